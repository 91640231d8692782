"""The layer's part of a position encoding: context, temperature, cache, limits, initial values.

An encoding overrides none of it, so it is no part of the interface in `base.py`.
"""

import math

import torch
from torch import Tensor, nn

from model.attention import Context, Places, exactly
from model.position.base import PositionEncoding


def reads_in_place(pe: PositionEncoding, length: int) -> bool:
    """Whether `pe` can read documents where they stand in packed rows of `length` tokens, with kernels."""
    # What is undefined beyond `max_len` is still defined for the shorter documents of a row, one by one.
    return pe.in_place and (pe.max_len is None or length <= pe.max_len)


def make_context(
    pe: PositionEncoding, pos: Tensor, n_new: int, length: int, *, kernels: bool = False, places: Places | None = None
) -> Context:
    """Return the context of a forward pass over the last `n_new` of the tokens at `pos` int64 [T].

    Args:
        length: tokens of the whole text; if they are more than T, the others were left out.
        kernels: attention may use `model.kernels`.
        places: the tokens are rows of documents, where `reads_in_place`.

    Raises:
        ValueError: the text is longer than the encoding is defined for.
    """
    check_length(pe, length)
    pos_q = pos[-n_new:]
    # Autocast would compute matrix products in bf16, but positions need fp32.
    with torch.autocast(pos.device.type, enabled=False):
        tables = pe.tables(pos, length)
        # A temperature depends on the position within the document, [B, 1, T], or within the text.
        temperature = _temperature(pe, pos_q if places is None else places.pos[:, None])
    # The logit scale joins the softmax scale: see `ScaledRotary.logit_scale`.
    return Context(
        pos_q, pos, length, tables, pe.logit_scale / math.sqrt(pe.head_dim), window=pe.window, temperature=temperature,
        has_gaps=pos.size(0) < length, kernels=kernels, places=places,
    )  # fmt: skip


def attend(pe: PositionEncoding, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
    """Return the attention of one layer, [B, H, Tq, D], with the temperature; see `PositionEncoding.attend`."""
    # If scores are proportional to q, multiplying q multiplies them. Other encodings call `tempered` themselves, at the
    # point where it multiplies their scores.
    if pe.linear_in_q:
        q = ctx.tempered(q)
    return pe.attend(q, k, v, state, ctx)


def cached_tokens(pe: PositionEncoding) -> int | None:
    """Number of the newest tokens that can influence attention, and that the cache keeps; None: all."""
    return None if pe.window is None else pe.window + pe.lookback


def check_length(pe: PositionEncoding, length: int) -> None:
    """Raise ValueError for a text of more than `max_len` tokens."""
    if pe.max_len is not None and length > pe.max_len:
        end = f"the {pe.max_len} positions of {type(pe).__name__} at scale {pe.active_scale:g}"
        raise ValueError(f"a text of {length} tokens is beyond {end}: {pe.remedy(length)}")


@torch.no_grad()
def init_parameters(pe: PositionEncoding, generator: torch.Generator) -> None:
    """Set all parameters of an encoding to their initial values, in place.

    Raises:
        ValueError: its `reset_parameters` leaves one out.
    """
    # A parameter that is still NaN afterwards was forgotten. The constructor's values cannot stand in for it: a network
    # that was built on the meta device has uninitialised memory instead.
    for p in pe.parameters():
        nn.init.constant_(p, math.nan)
    pe.reset_parameters(generator)
    if pe.temperature == "ssmax":  # every query at the end of a training sequence starts with a factor of 1
        nn.init.constant_(pe.ssmax, 1 / math.log(_trained_length(pe)))
    if pe.temperature == "head":
        nn.init.ones_(pe.head_factor)
    unset = [name for name, p in pe.named_parameters() if p.isnan().any()]
    if unset:
        raise ValueError(f"{type(pe).__name__}.reset_parameters must set {', '.join(unset)}")


def _trained_length(pe: PositionEncoding) -> int:
    """Tokens, at least 2 (its logarithm divides), that the weights were first trained at."""
    return max(2, getattr(pe, "original_len", pe.train_len))


def _temperature(pe: PositionEncoding, pos_q: Tensor) -> Tensor | None:
    """The factor of each query's scores, fp32 [Tq, 1], [1, 1], [H, Tq, 1] or [H, 1, 1]; None without a temperature.

    With positions `pos_q` [B, 1, Tq] of each text's own it may also be [B, 1, Tq, 1] or [B, H, Tq, 1].
    """
    if pe.temperature == "none":
        return None
    if pe.temperature == "head":
        return exactly(pe.head_factor)
    if isinstance(pe.temperature, float):
        return torch.full((1, 1), pe.temperature, device=pos_q.device)
    seen = (pos_q + 1)[..., None].float()  # [Tq, 1] or [B, 1, Tq, 1], number of keys that each query sees
    if pe.window is not None:
        seen = seen.clamp(max=pe.window)
    length = _trained_length(pe)
    if pe.temperature == "log":
        return (seen.log() / math.log(length)).clamp(min=1)
    if pe.temperature == "llama4":
        return 1 + 0.1 * (seen / length).floor().log1p()
    return exactly(pe.ssmax) * seen.log()  # "ssmax": [H, 1, 1] times `seen`
