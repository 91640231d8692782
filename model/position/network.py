"""Functions of the encodings of a network's layers, one for each layer; layers may share an instance.

A scale is no state of a network. It is a list of other encodings, which stand in for the network's own in one forward
pass: see `GPT.hidden_states`.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from model.position.base import PositionEncoding

Encodings = Sequence[PositionEncoding]


def view(pe: PositionEncoding, **changes: Any) -> PositionEncoding:
    """The encoding `pe`, sharing its parameters and submodules, with other values of some attributes."""
    other = copy.copy(pe)  # shallow: the dictionaries of parameters and submodules are those of `pe`
    for name, value in changes.items():
        setattr(other, name, value)  # where it is a property this is an error; an entry in vars() would be ignored
    return other


def with_parameters_of(encodings: Encodings, owners: Encodings) -> Encodings:
    """Give `encodings`, in place, the parameters of `owners` themselves, layer by layer, and return them.

    They are those of a stage of training, or of a variant that reads trained weights. The network's own encodings stay
    registered, so its optimizer and its state dict notice nothing.
    """
    for pe, owner in zip(encodings, owners, strict=True):
        for name, parameter in owner.named_parameters():
            assert pe.get_parameter(name).shape == parameter.shape
            # The name of a submodule's parameter has dots, which setattr does not follow.
            path, _, leaf = name.rpartition(".")  # path: of the submodule, "" for the encoding itself
            setattr(pe.get_submodule(path), leaf, parameter)
    return encodings


def family_of(encodings: Encodings) -> str:
    """Name of the networks that read each other's weights without training: those of one family."""
    learned = {"ssmax": ", SSMax", "head": ", a factor for each head"}
    families = [pe.family + learned.get(str(pe.temperature), "") for pe in encodings]
    return ", ".join(dict.fromkeys(families))


def max_len_of(encodings: Encodings) -> int | None:
    """Longest text, in tokens, that all layers are defined for at their active scales; None: no limit."""
    limits = [pe.max_len for pe in encodings if pe.max_len is not None]
    return min(limits, default=None)


def exact_above(encodings: Encodings) -> int | None:
    """The length in tokens beyond which a layer asks how long a text is, and padding counts; None: none asks."""
    lengths = [pe.original_len for pe in encodings if pe.asks_length]
    return min(lengths, default=None)


def metrics_of(encodings: Encodings) -> dict[str, Tensor]:
    """The metrics of the encodings since the last call, each averaged over the encodings that have it."""
    values: dict[str, list[Tensor]] = {}
    for pe in dict.fromkeys(encodings):
        for name, value in pe.metrics().items():
            values.setdefault(name, []).append(value)
    return {name: torch.stack(values[name]).mean() for name in sorted(values)}


def scales_of(encodings: Encodings) -> tuple[float, ...]:
    """The scales to evaluate at; the first is the one that they train at. (1.0,) without an encoding that has others.

    An encoding with a window of at most its train_len keeps its scale: it has met every distance in training.
    """
    of_layers = [pe.scales[:1] if _window_was_filled(pe) else pe.scales for pe in encodings]
    scaled = [scales for scales in of_layers if scales != (1.0,)]
    # Those of the first layer with two scales. A layer trained beyond its original_len has one, and may come before it.
    scaled.sort(key=len, reverse=True)
    return scaled[0] if scaled else (1.0,)


def at_scale(encodings: Encodings, scale: float) -> Encodings:
    """The encodings with the scaled ones at `scale`, one of `scales_of`, or at their own scale of the same index."""
    # In a pattern of different scalings the network's scales are those of its first scaled layer. The others follow by
    # index: first the scale that they train at, then the one that they read longer text at.
    index = scales_of(encodings).index(scale)
    views = {}
    for pe in encodings:
        if len(pe.scales) > 1 and not _window_was_filled(pe):
            views[pe] = view(pe, active_scale=pe.scales[index])
    return [views.get(pe, pe) for pe in encodings]


def _window_was_filled(pe: PositionEncoding) -> bool:
    return pe.window is not None and pe.window <= pe.train_len


def for_length(encodings: Encodings, length: int) -> Encodings:
    """The encodings to read `length` tokens with: at the largest scale beyond train_len, else as they train.

    An evaluation reads every length at each scale instead: `Evaluator._variants`.
    """
    scales = scales_of(encodings)
    scale = max(scales) if length > encodings[0].train_len else scales[0]
    return at_scale(encodings, scale)
