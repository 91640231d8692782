"""Twins of encodings, by exact class: the same encoding, whose attention is computed by kernels.

The class of an encoding says what it computes in PyTorch, which is the specification, and which a twin goes back to
where no kernel serves: one token of a cache, tokens of a longer text, float64, heads of more than 256 channels. A
subclass has no twin, since what it overrides would be ignored. Only a user's own bias of the distance has one, if it
overrides nothing else.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triton import next_power_of_2

from lab.kernels.in_place import PlacedContext
from lab.kernels.operator import attention
from lab.zoo.clipped import ClippedRoPE
from lab.zoo.nape import NAPE
from lab.zoo.xpos import XPos
from model.attention import Context, exactly
from model.position.absolute import Learned, Sinusoidal
from model.position.base import PositionEncoding
from model.position.bias import FIRE, ALiBi, DistanceBias
from model.position.cope import CoPE
from model.position.forget import FoX, RotaryFoX
from model.position.ops import without_low_bits
from model.position.rotary import PRope, Rotary
from model.position.scaled_rotary import ABF, NTK, DynamicNTK, Linear, LongRope, NTKByParts, Yarn

State = dict[str, Tensor]
Extra = tuple[Tensor, ...]
# (encoding, queries [B, H, T, D] that are not rotated, state, context) -> `extra` of `lab.kernels.operator.attention`.
MakeExtra = Callable[[Any, Tensor, State, Context], Extra]
MAX_HEAD_DIM = 256  # channels of a head that kernels can hold


def attend(pe: Any, q: Tensor, k: Tensor, v: Tensor, state: State, ctx: Context) -> Tensor:
    """The `attend` of a twin: see `PositionEncoding`."""
    exact: Any = specification(pe)
    served = bias_of(exact)
    assert served is not None
    bias, make_extra = served
    if not can_serve(pe, bias, q, ctx):
        return exact.attend(pe, q, k, v, state, ctx)
    extra = make_extra(pe, q, state, ctx)
    q, k = pe.rotate(q, k, ctx)
    if bias == "cope" and not pe.training:
        pe.clamped = pe.clamped + pe._clamped_share(q, k, ctx)
        pe.forwards = pe.forwards + 1
    return attention(q, k, v, *seen_keys(q, ctx), scale=ctx.scale, bias=bias, extra=extra, sinks=ctx.sinks)


def can_serve(pe: Any, bias: str, q: Tensor, ctx: Context) -> bool:
    """Whether there is a kernel for these queries [B, H, Tq, D]."""
    is_whole = q.size(2) == ctx.pos_k.size(0) and q.size(2) > 1 and not ctx.has_gaps
    if not is_whole or q.dtype == torch.float64 or not has_kernel(pe):
        return False
    hides = isinstance(ctx, PlacedContext) or (ctx.window is not None and ctx.window < q.size(2))
    # PyTorch has kernels of its own where nothing is added, hidden or left to a sink.
    return bias != "nothing" or hides or ctx.sinks is not None


def has_kernel(pe: Any) -> bool:
    """Whether the options of an encoding are those of a kernel, if its class has a twin."""
    if isinstance(pe, CoPE) and (pe.gates != "keys" or pe.temperature != "none"):
        return False
    return pe.head_dim <= MAX_HEAD_DIM and not getattr(pe, "values", False)


def seen_keys(q: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
    """The first key that each query sees, and the last query that sees each key: int32 [T], or [B, T] in place."""
    if isinstance(ctx, PlacedContext):
        return ctx.first_key, ctx.last_query
    length = q.size(2)
    window = length if ctx.window is None else ctx.window
    i = torch.arange(length, device=q.device, dtype=torch.int32)
    return (i - window + 1).clamp(min=0), (i + window - 1).clamp(max=length - 1)


def of_nothing(pe: Any, q: Tensor, state: State, ctx: Context) -> Extra:
    """Of encodings that only rotate, or add to the embeddings."""
    return ()


def of_keys(pe: Any, q: Tensor, state: State, ctx: Context) -> Extra:
    """Of a `KeyBias`: float64 as the sum of two fp32 tensors, of which the first gets the gradient."""
    numbers = pe.key_bias(state, ctx).transpose(1, 2).expand(q.shape[:3]).double()  # [B, H, T]
    low = (numbers - without_low_bits(numbers, torch.float32)).float().detach()
    return (numbers - low).float(), low


def of_distances(pe: Any, q: Tensor, state: State, ctx: Context) -> Extra:
    """Of a `DistanceBias`."""
    return (pe.at(torch.arange(q.size(2), device=q.device)).float(),)  # [H, T]


def of_table(pe: Any, q: Tensor, state: State, ctx: Context) -> Extra:
    """Of CoPE: what each entry of the table adds to the scores of each query."""
    with torch.autocast(q.device.type, enabled=False):
        at_table = q.float() @ exactly(pe.table)  # [B, H, T, P]
    return (at_table if pe.scaling == "paper" else at_table * ctx.scale,)


def of_segments(pe: Any, q: Tensor, state: State, ctx: Context) -> Extra:
    """Of FIRE: its segments, and 1 / reach and c of each query."""
    with torch.autocast(q.device.type, enabled=False):
        c, reach = pe._c_and_reach(ctx.pos if isinstance(ctx, PlacedContext) else ctx.pos_q)
    inverse_reach = reach.reciprocal()[..., None, :]  # [1, T], or [B, 1, T] in place
    return *ctx.tables, inverse_reach.expand(q.shape[:3]), c.expand(q.shape[:3])


def segments(pe: FIRE, pos: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """FIRE's network written as what it is, linear in segments: once for all layers, in place of its `tables`.

    Returns:
        Where each of S segments begins, fp32 [P], ascending, the first of them 0, then inf up to a power of two; the
        slopes and intercepts of each head in each segment, fp32 [H, P], likewise followed by zeros.
    """
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
    intercepts = intercepts + exactly(pe.down_bias)[:, None]
    unused = (0, next_power_of_2(len(begins)) - len(begins))
    return F.pad(begins, unused, value=torch.inf), F.pad(slopes, unused), F.pad(intercepts, unused)


ROTARY = (Rotary, PRope, ClippedRoPE, XPos, Linear, NTK, ABF, DynamicNTK, NTKByParts, Yarn, LongRope)
# The bias of each class that has a twin, and what that depends on.
BY_CLASS: dict[type[PositionEncoding], tuple[str, MakeExtra]] = {
    **dict.fromkeys((PositionEncoding, Sinusoidal, Learned, *ROTARY), ("nothing", of_nothing)),
    **dict.fromkeys((ALiBi, NAPE, FoX, RotaryFoX), ("keys", of_keys)),
    FIRE: ("fire", of_segments),
    # Not RotaryCoPE: a rotated query that is rounded to 16 bit moves positions, and gradients would be off by a fifth.
    CoPE: ("cope", of_table),
}
# Classes whose angles depend on the length of the text.
DEPENDS_ON_LENGTH = {DynamicNTK, LongRope}


def bias_of(cls: type[PositionEncoding]) -> tuple[str, MakeExtra] | None:
    """The bias of the twin of a class, and what that depends on; None if it has no twin.

    T5, KERPLE and a user's own bias of the distance have one as long as they override nothing else.
    """
    base = DistanceBias
    as_base = ("tables", "rotate", "bias", "attend", "state")
    if issubclass(cls, base) and all(getattr(cls, name) is getattr(base, name) for name in as_base):
        return "row", of_distances
    return BY_CLASS.get(cls)


def reads_in_place(pe: PositionEncoding) -> bool:
    """Whether the twin of `pe`, or `pe` as a twin, reads packed documents where they are.

    What its layers compute must depend on distances alone, and be computed by kernels.
    """
    cls = specification(pe) if getattr(pe, "is_twin", False) else type(pe)
    return bias_of(cls) is not None and has_kernel(pe) and cls not in DEPENDS_ON_LENGTH


def specification(pe: PositionEncoding) -> type[PositionEncoding]:
    """The class that the twin `pe` is of."""
    return type(pe).__mro__[1]


@cache
def twin_of(cls: type[PositionEncoding]) -> type[PositionEncoding]:
    """A class like `cls`, of the same name, that attends by kernels."""
    methods: dict[str, Any] = {"attend": attend, "is_twin": True, "__module__": cls.__module__}
    methods["reads_in_place"] = property(reads_in_place)
    if cls is FIRE:
        methods["tables"] = segments
    return type(cls.__name__, (cls,), methods)
