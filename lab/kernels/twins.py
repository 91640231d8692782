"""Twins of encodings, by exact class: the same encoding, whose attention is computed by kernels.

The class of an encoding says what it computes in PyTorch, which is the specification, and which a twin goes back to
where no kernel serves: one token of a cache, float64, heads of more than 256 channels. A subclass has no twin, since
what it overrides would be ignored. Only a user's own bias of the distance has one, if it overrides nothing else.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.kernels.cope import cope
from lab.kernels.flash import fire, flash
from lab.kernels.in_place import PlacedContext
from lab.zoo.nape import NAPE
from lab.zoo.profiles import Profiles
from lab.zoo.xpos import XPos
from model.attention import Context, exactly, products
from model.position.absolute import Learned, Sinusoidal
from model.position.base import PositionEncoding
from model.position.bias import FIRE, T5, ALiBi, DistanceBias, Kerple
from model.position.cope import CoPE, RotaryCoPE
from model.position.forget import FoX, RotaryFoX
from model.position.ops import rotate_pairs
from model.position.relative import Relative
from model.position.rotary import PRope, Rotary
from model.position.scaled_rotary import ABF, NTK, DynamicNTK, Linear, LongRope, NTKByParts, Yarn

Methods = dict[str, Callable[..., Any]]
State = dict[str, Tensor]
MAX_HEAD_DIM = 256  # channels of a head that kernels can hold
MAX_TERMS = 128  # distances with a term of their own for each query, of which there is a table


def specification(pe: PositionEncoding) -> type[PositionEncoding]:
    """The class that the twin `pe` is of."""
    return type(pe).__mro__[1]


def can_serve(q: Tensor, ctx: Context) -> bool:
    """Whether there is a kernel for these queries [B, H, Tq, D], of whatever encoding."""
    is_whole = q.size(2) == ctx.pos_k.size(0) and q.size(2) > 1
    return is_whole and q.dtype != torch.float64 and q.size(3) <= MAX_HEAD_DIM


def seen_keys(q: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
    """The first key that each query sees, and the last query that sees each key: int32 [T], or [B, T] in place."""
    if isinstance(ctx, PlacedContext):
        return ctx.first, ctx.last
    if ctx.window is None:
        i = torch.arange(q.size(2), device=q.device, dtype=torch.int32)
        return torch.zeros_like(i), torch.full_like(i, q.size(2) - 1)
    pos = ctx.pos_k.contiguous()  # ascending, with gaps or without
    first = torch.searchsorted(pos, pos - ctx.window + 1)
    last = torch.searchsorted(pos, pos + ctx.window - 1, right=True) - 1
    return first.int(), last.int()


def flashed(pe: Any, q: Tensor, k: Tensor, v: Tensor, ctx: Context, **bias: Tensor | None) -> Tensor:
    """`lab.kernels.flash.flash` of rotated queries and keys, and values if `pe` rotates these."""
    q, k = pe.rotate(q, k, ctx)
    rotates_values = getattr(pe, "values", False)
    if rotates_values:  # see `Rotary.attend`
        cos, sin = ctx.tables
        v = rotate_pairs(v, cos, sin, layout=pe.layout)
    out = flash(q, k, v, *seen_keys(q, ctx), scale=ctx.scale, sinks=ctx.sinks, **bias)
    return rotate_pairs(out, cos, -sin, layout=pe.layout) if rotates_values else out


def plain(pe: PositionEncoding, q: Tensor, k: Tensor, v: Tensor, state: State, ctx: Context) -> Tensor:
    """Attention without a bias: of windows, documents and sinks. PyTorch has kernels of its own for all else."""
    hides = isinstance(ctx, PlacedContext) or (ctx.window is not None and (ctx.has_gaps or ctx.window < q.size(2)))
    if not can_serve(q, ctx) or not (hides or ctx.sinks is not None):
        return specification(pe).attend(pe, q, k, v, state, ctx)
    return flashed(pe, q, k, v, ctx)


def by_key(pe: Any, q: Tensor, k: Tensor, v: Tensor, state: State, ctx: Context) -> Tensor:
    """Attention with a `KeyBias`."""
    if not can_serve(q, ctx):
        return specification(pe).attend(pe, q, k, v, state, ctx)
    return flashed(pe, q, k, v, ctx, keys=pe.key_bias(state, ctx).transpose(1, 2))  # [B or 1, H, T]


def by_distance(pe: Any, q: Tensor, k: Tensor, v: Tensor, state: State, ctx: Context) -> Tensor:
    """Attention with a `DistanceBias`."""
    if ctx.has_gaps or not can_serve(q, ctx):
        return specification(pe).attend(pe, q, k, v, state, ctx)
    return flashed(pe, q, k, v, ctx, row=pe.at(torch.arange(ctx.length, device=q.device)))  # [H, length]


def by_terms(pe: Any, q: Tensor, k: Tensor, v: Tensor, state: State, ctx: Context) -> Tensor:
    """Attention of `Relative` and `Profiles`, if few distances have embeddings of their own."""
    if pe.bank.size(1) > MAX_TERMS or ctx.has_gaps or not can_serve(q, ctx):
        return specification(pe).attend(pe, q, k, v, state, ctx)
    if isinstance(pe, Profiles):
        terms = products(state["r"].transpose(1, 2), pe.bank.mT, 1.0)  # [B, H, T, distances]
    else:
        terms = products(q, pe.bank.mT, ctx.scale)
    return flashed(pe, q, k, v, ctx, terms=terms)


class Segments(NamedTuple):
    """FIRE's bias where its network is written as what it is, linear in segments: see `lab.kernels.flash.fire`."""

    kinks: Tensor  # where each of S segments begins, fp32 [S], ascending, the first of them 0
    slopes: Tensor  # of each head in each segment, fp32 [H, S]
    intercepts: Tensor  # of each head in each segment, fp32 [H, S]


def segments_of(pe: FIRE, pos: Tensor, length: int) -> Segments:
    """The segments of FIRE's network, once for all layers."""
    units = exactly(torch.stack((pe.up_weight[:, 0], pe.up_bias)))  # [2, width]
    with torch.no_grad():
        weight, bias = units
        # A unit that rises with x is on beyond its kink, one that falls is on before it. x is never below 0, so a unit
        # that is always on, or never, has its kink at 0 or at infinity. A weight of 0 rises or falls by its sign bit,
        # as the division takes it.
        kinks = (-bias / weight).nan_to_num(torch.inf, posinf=torch.inf, neginf=0.0).clamp(min=0.0)  # [width]
        begins = F.pad(kinks.sort().values, (1, 0))  # [S]
        is_beyond = kinks[:, None] <= begins  # [width, S]
        is_on = (is_beyond != weight.signbit()[:, None]).to(units.dtype)
    slopes, intercepts = (units[:, None] * exactly(pe.down_weight)) @ is_on  # [H, S] each
    return Segments(begins, slopes, intercepts + exactly(pe.down_bias)[:, None])


def by_segments(pe: Any, q: Tensor, k: Tensor, v: Tensor, state: State, ctx: Context) -> Tensor:
    """Attention of FIRE."""
    if ctx.has_gaps or not can_serve(q, ctx):
        return specification(pe).attend(pe, q, k, v, state, ctx)
    q, k = pe.rotate(q, k, ctx)
    with torch.autocast(q.device.type, enabled=False):
        c, reach = pe._c_and_reach(ctx.pos if isinstance(ctx, PlacedContext) else ctx.pos_q)
    more = {"inverse_reach": reach.reciprocal(), "c": c, **ctx.tables._asdict()}
    return fire(q, k, v, *seen_keys(q, ctx), scale=ctx.scale, sinks=ctx.sinks, **more)


def by_gates(pe: Any, q: Tensor, k: Tensor, v: Tensor, state: State, ctx: Context) -> Tensor:
    """Attention of CoPE."""
    if getattr(pe, "values", False) or not can_serve(q, ctx):
        return specification(pe).attend(pe, q, k, v, state, ctx)
    q = position_q = ctx.tempered(q)
    q, k = pe.rotate(q, k, ctx)
    gate_keys = None  # gates are made of the scores
    if pe.gates == "values":
        gate_keys = v
    elif pe.gates == "projection":
        gate_keys = state["gate_keys"].transpose(1, 2).to(q.dtype)  # [B, Hkv, T, D]
    if not pe.training:
        of_gates = (q, k) if gate_keys is None else (position_q, gate_keys)
        pe.clamped = pe.clamped + pe._clamped_share(*of_gates, ctx)
        pe.forwards = pe.forwards + 1
    table = pe.table if pe.scaling == "paper" else pe.table * ctx.scale
    more = {"position_q": position_q, "gate_keys": gate_keys, "sinks": ctx.sinks}
    return cope(q, k, v, table, *seen_keys(q, ctx), scale=ctx.scale, **more)


def _by_class() -> dict[type[PositionEncoding], Methods]:
    """The methods of the twins of all classes that have one."""
    methods: dict[type[PositionEncoding], Methods] = {}
    rotary = (Rotary, PRope, XPos, Linear, NTK, ABF, DynamicNTK, NTKByParts, Yarn, LongRope)
    for cls in (PositionEncoding, Sinusoidal, Learned, *rotary):
        methods[cls] = {"attend": plain}
    for cls in (ALiBi, NAPE, FoX, RotaryFoX):
        methods[cls] = {"attend": by_key}
    for cls in (T5, Kerple):
        methods[cls] = {"attend": by_distance}
    for cls in (Relative, Profiles):
        methods[cls] = {"attend": by_terms}
    for cls in (CoPE, RotaryCoPE):
        methods[cls] = {"attend": by_gates}
    methods[FIRE] = {"attend": by_segments, "tables": segments_of}
    return methods


METHODS = _by_class()
# Classes whose angles depend on the length of the text.
DEPENDS_ON_LENGTH = {DynamicNTK, LongRope}
# Classes whose parameters get gradients that are rounded as those of queries are.
IS_ROUNDED = {CoPE, RotaryCoPE, Relative, Profiles}


def methods_of(cls: type[PositionEncoding]) -> Methods | None:
    """The methods of the twin of a class, or None if it has no twin."""
    if cls in METHODS:
        return METHODS[cls]
    base = DistanceBias
    as_base = ("tables", "rotate", "bias", "attend", "state")
    if issubclass(cls, base) and all(getattr(cls, name) is getattr(base, name) for name in as_base):
        return {"attend": by_distance}
    return None


def reads_in_place(pe: PositionEncoding) -> bool:
    """Whether the twin of `pe`, or `pe` as a twin, reads packed documents where they are.

    What its layers compute must depend on distances alone, and be computed by kernels.
    """
    cls = specification(pe) if getattr(type(pe), "is_twin", False) else type(pe)
    methods = methods_of(cls)
    if methods is None or pe.head_dim > MAX_HEAD_DIM:
        return False
    if isinstance(pe, Relative) and pe.bank.size(1) > MAX_TERMS:
        return False
    turns_values = isinstance(pe, RotaryCoPE) and pe.values
    return cls not in DEPENDS_ON_LENGTH and not turns_values


@cache
def twin_of(cls: type[PositionEncoding]) -> type[PositionEncoding]:
    """A class like `cls`, of the same name, that attends by kernels."""
    methods = methods_of(cls)
    assert methods is not None
    return type(cls.__name__, (cls,), {**methods, "is_twin": True, "__module__": cls.__module__})
