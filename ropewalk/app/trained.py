"""A trained model that a run starts from or that is evaluated: its description, its weights, and who can read them."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from conf.schema import Config, ConfigError, GPTConfig, parse
from data.base import Data
from data.text import TextData
from model import position, serialization
from model.gpt import GPT
from model.position.base import NO_ENCODING
from model.position.network import family_of
from ropewalk import hf
from ropewalk.app.cli import encoding
from ropewalk.training.ranks import assign

Options = Mapping[str, Any]
_NOT_SHARED = ("name", "_target_", "scale", "train_scale", "attention_factor")  # the last belongs to the scale


def resolve_encoding(pe: Options, model: GPTConfig, train_len: int) -> tuple[dict[str, Any], GPT]:
    """Return the options `pe` with what the encodings take for null and "auto", and the network on the device "meta".

    Raises ValueError: an option is unknown, of another type or out of range.
    """
    with torch.device("meta"):
        net = GPT(model, pe, vocab_size=1, train_len=train_len)
    if "pattern" not in pe:
        return net.encodings[0].options, net
    # The layers repeat the pattern, so its first occurrence has an instance of each part that is used.
    parts = {name: part.options for name, part in zip(pe["pattern"], net.encodings, strict=False)}
    return {**pe, **parts}, net


def base_model(source: str | None) -> dict[str, Any]:
    """Return what model.json says of the model `source`, and its `source`; nothing for None.

    Args:
        source: a run; or hf:FOLDER_OR_HUB_ID for a model of transformers, of which it is what model.json would say.

    Raises ValueError: there is no such model, or it cannot be read.
    """
    if source is None:
        return {}
    read = hf.read_model(source).describe if source.startswith("hf:") else partial(serialization.describe, source)
    return read() | {"source": source}


def original_len(cfg: Config, base: Options) -> int:
    """The longest text that the weights of a run, or those it began with, were trained to read without a scaling."""
    # A run of no steps only gives a trained model other texts.
    trained = cfg.train_len if cfg.trainer.max_steps or not base else 0
    return max(trained, base.get("original_len", 0))


def vocab_size(data: Data, base: Options) -> int:
    """Return the vocabulary size of a network that starts from the model `base`, if any.

    The data may use fewer tokens than the model has. Raises ConfigError: the data have other tokens.
    """
    if not base:
        return data.vocab_size
    tokenizer, size = base.get("tokenizer"), int(base["vocab_size"])
    differs = tokenizer and not data.tokenizer_identity().items() <= tokenizer.items()
    if differs or _largest_id(data) >= size:
        what = f"{base['source']} has a vocabulary of {size} tokens, the data another one of {data.vocab_size}"
        remedy = "leave out data.tokenizer, so that it is the model's own, or choose its data"
        raise ConfigError(f"{what}: {remedy}; of a tokenizer with tokens that the model lacks, remove these")
    return size


def _largest_id(data: Data) -> int:
    """The largest token id in any text of `data`: special tokens are in none, but for those at its start and end."""
    if not isinstance(data, TextData):
        return data.vocab_size - 1
    of_text = int(data.encoder.token_bytes.nonzero().max())
    return max(of_text, data.encoder.eot, data.text_start or 0)


def load_weights(net: GPT, base: Options, *, partial: bool) -> list[str]:
    """Give `net` the weights of the model `base`; returns the tensors that keep their initial values.

    With `partial` the tensors that fit no other are left out. Raises ConfigError: the weights cannot be read, one does
    not fit, or with `partial` none does; names them.
    """
    source = base["source"]
    is_foreign = source.startswith("hf:")
    weights = hf.read_model(source).state_dict() if is_foreign else serialization.read_weights(source, base)
    wrong = serialization.mismatched_tensors(net, weights)
    if wrong and not partial:
        reason = f"{', '.join(wrong[:5])} differ in name or shape; init_partial=true takes those that fit"
        raise ConfigError(f"the weights of {source} do not fit: {reason}")
    if not weights.keys() - wrong:
        raise ConfigError(f"none of the weights of {source} fits")
    tensors = net.state_dict()
    for name in weights.keys() - wrong:
        assign(tensors[name], weights[name])
    return [name for name in wrong if name in tensors]


def shared_options(base: Options, chosen: Options) -> dict[str, Any]:
    """The options of the encoding `chosen` that the encoding of the model `base` decides, part by part of a pattern."""
    base_parts = position.parts(base["pe"])
    shared = {}
    for name, part in position.parts(chosen).items():
        base_part = base_parts.get(name, base_parts.get("", {}))
        of_part = {key: value for key, value in base_part.items() if key in part and key not in _NOT_SHARED}
        if "original_len" in part:
            of_part["original_len"] = base_part.get("original_len") or base["original_len"]
        shared[name] = of_part
    return shared.get("", shared)


def variants(trained: Options, wanted: Iterable[str | Options], longest: float | None = None) -> list[dict[str, Any]]:
    """Return all options of the encodings `wanted`, which read the weights of a trained model zero-shot.

    Options that are not given are those of the trained encoding, where it has them.

    Args:
        trained: model, pe, train_len and original_len of the trained model, as in model.json.
        wanted: each a name, {pe: NAME, OPTION: VALUE, ...}, or all options already.
        longest: the longest text, a multiple of train_len, which decides the scale; None: as in the YAML.

    Raises ConfigError: an encoding or option does not exist, or an encoding cannot read these weights.
    """
    resolved = []
    for spec in wanted:
        given = {"pe": spec} if isinstance(spec, str) else spec
        pe = encoding(given)
        if "pe" in given:  # else it has all options already
            pe |= shared_options(trained, pe) | {key: value for key, value in given.items() if key in pe}
            if longest and "scale" not in given and pe.get("scale", 1) > 1:  # dynamic_ntk's is 1 for any length
                pe["scale"] = max(1.0, longest * trained["train_len"] / pe["original_len"])
        resolved.append(readable(trained, pe, remedy="fine-tune with train.py init_from=... instead"))
    return resolved


def readable(trained: Options, pe: Options, *, remedy: str, dropping: bool = False) -> dict[str, Any]:
    """Return all options of the encoding `pe`, which is to read the weights of the trained model.

    With `dropping` NoPE may take over, in some layers or all, from an encoding without parameters, to be trained on:
    DroPE.

    Raises ConfigError: this encoding cannot read these weights; names the `remedy`.
    """
    model, length = parse(GPTConfig, trained["model"]), trained["train_len"]
    _, old_net = resolve_encoding(trained["pe"], model, length)
    options, net = resolve_encoding(pe, model, length)
    family, old_family = family_of(net.encodings), family_of(old_net.encodings)
    unread = [new for old, new in zip(old_net.encodings, net.encodings, strict=True) if new.family != old.family]
    # Options decide the shapes of parameters, and whether layers share them.
    shapes, old_shapes = ({name: p.shape for name, p in of.named_parameters()} for of in (net, old_net))
    # Nothing that was trained may be lost by it.
    drops = all(pe.family == NO_ENCODING for pe in unread) and shapes.keys() == old_shapes.keys()
    if (family, shapes) != (old_family, old_shapes) and not (dropping and drops):
        theirs = f"{trained['pe']['name']} ({old_family})"
        if family == old_family:
            theirs += ", whose parameters have other shapes"
        raise ConfigError(f"pe={pe['name']} ({family}) cannot read weights trained with {theirs}; {remedy}")
    return options
