"""CoPE attention, exact, in memory linear in the sequence length: in Triton, for CUDA.

Its specification is `model.position.cope.cope_attention`; `model.kernels.dispatch` says where it serves. Tables and
carried sums are in memory for QUERY_CHUNK queries at a time, all else is as long as the text.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from model.kernels import cope_triton_kernels as kernels

QUERY_CHUNK = 4096  # a multiple of every BM


class Tiling(NamedTuple):
    """How a kernel is cut: BM queries by BN keys, STEP of them at a time in a window, which begins at a multiple of BN;
    warps, and stages of the pipeline outside of windows."""

    BM: int
    BN: int
    STEP: int
    num_warps: int
    num_stages: int = 2


class Tilings(NamedTuple):
    forward: Tiling
    bwd_preprocess: Tiling  # its BN, that of `bwd_dkdv`, divides its BM: it leaves the carried sums at those tiles
    bwd_dq: Tiling
    bwd_dkdv: Tiling  # its STEP is its BN


def tilings(head_dim: int, itemsize: int) -> Tilings:
    """The largest of a few tried with which 16-bit kernels spill no register on sm_80 and sm_90, whatever the time:
    `python tests/model/compile_kernels.py`."""
    if itemsize == 4:
        return Tilings(
            Tiling(64, 32, 16, 8, 1), Tiling(64, 16, 16, 8, 1), Tiling(32, 16, 16, 4, 1), Tiling(16, 16, 16, 2, 1)
        )
    if head_dim > 64:
        return Tilings(Tiling(128, 32, 16, 8, 1), Tiling(64, 32, 16, 4), Tiling(64, 32, 16, 8), Tiling(32, 32, 32, 4))
    return Tilings(Tiling(64, 64, 32, 4), Tiling(64, 32, 16, 4), Tiling(64, 32, 16, 4), Tiling(64, 32, 32, 4))


def constants(dtype: torch.dtype, head_dim: int, npos: int, tiling: Tiling) -> dict[str, int | str]:
    """Constants of a kernel."""
    widest = max(t.STEP for t in tilings(head_dim, dtype.itemsize))
    return {
        "D": head_dim,
        "P": npos,
        "SHIFT": min(24, 31 - (npos - 1 + widest).bit_length()),  # 2^31 exceeds the largest sum before the clamp
        "BM": tiling.BM,
        "BN": tiling.BN,
        "STEP": tiling.STEP,
        "PRECISION": "tf32x3" if dtype == torch.float32 else "ieee",  # of products of fp32 alone
    }


class _Call:
    """What all launches for one call share."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, scale: float) -> None:
        self.q, self.k, self.v = (_neighbouring_channels(x) for x in (q, k, v))
        self.batch, self.heads, self.length, self.head_dim = q.shape
        self.npos = table.size(1)
        self.scale = scale * kernels.LOG2E.value
        self.tilings = tilings(self.head_dim, q.element_size())
        e = table.float()
        self.slopes = torch.zeros_like(e)  # [D, P]
        torch.sub(e[:, 1:], e[:, :-1], out=self.slopes[:, :-1])
        self.entries = torch.stack((e, self.slopes), -1).flatten(1) * kernels.LOG2E.value  # [D, 2 P]

    def chunks(self) -> Iterator[tuple[int, int]]:
        """First query and number of queries."""
        return ((first, min(QUERY_CHUNK, self.length - first)) for first in range(0, self.length, QUERY_CHUNK))

    def packed_table(self, position_q: Tensor) -> Tensor:
        """Value and slope of each entry for `position_q` [B, H, n, D], a 64-bit word each: int64 [B, H, n, P]."""
        return (position_q.float() @ self.entries).view(torch.int64)

    def launch(
        self,
        name: str,
        programs: tuple[int, int],
        tensors: tuple[Tensor, ...],
        span: tuple[int, int],
        *,
        strided: tuple[Tensor, ...] = (),
        **more: int,
    ) -> None:
        """Run a kernel on q, k, v and `tensors` for the queries of `span`; of the `strided` it gets the strides."""
        tiling: Tiling = getattr(self.tilings, name)
        strides = [s for x in (self.q, self.k, self.v, *strided) for s in x.stride()[:3]]
        with torch.cuda.device_of(self.q):  # Triton launches on the current device
            getattr(kernels, name)[programs](
                *(self.q, self.k, self.v, *tensors, *strides),
                *(self.heads, self.heads // self.k.size(1), self.length, *span, self.scale),
                **constants(self.q.dtype, self.head_dim, self.npos, tiling),
                **more,
                num_warps=tiling.num_warps,
                num_stages=tiling.num_stages,
            )


def _neighbouring_channels(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def cope_attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, *, scale: float, position_q: Tensor | None = None
) -> Tensor:
    """Causal self-attention with contextual positions; differentiable once. The gates are those of q and k.

    Args:
        q: [B, H, T, D]. k, v: [B, Hkv, T, D], H a multiple of Hkv; all in one dtype of at most 32 bits.
        table: e, [D, P], of any dtype.
        position_q: queries of e, [B, H, T, D]; default q.

    Returns:
        [B, H, T, D] in the dtype of v
    """
    return _forward(q, k, v, table, position_q, scale)[0]


# The number of launches depends on the length: an operator of our own hides them from torch.compile.
@torch.library.custom_op("ropewalk::cope_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, position_q: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Output [B, H, T, D]; lse in base 2 and the first key of each query's window, [B, H, T]."""
    with torch.autocast(q.device.type, enabled=False):
        call = _Call(q, k, v, table, scale)
        position_q = q if position_q is None else position_q
        out = q.new_empty(q.shape)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        start = q.new_empty(q.shape[:3], dtype=torch.int32)
        for first, count in call.chunks():
            packed = call.packed_table(position_q[:, :, first : first + count])
            programs = triton.cdiv(count, call.tilings.forward.BM), call.batch * call.heads
            call.launch("forward", programs, (packed, out, lse, start), (first, count))
        return out, lse, start


@_forward.register_fake
def _(q, k, v, table, position_q, scale):
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    return q.new_empty(q.shape), lse, q.new_empty(q.shape[:3], dtype=torch.int32)


@torch.library.custom_op("ropewalk::cope_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    start: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    position_q: Tensor | None,
    scale: float,
) -> list[Tensor]:
    """Gradients of q, k, v, table and, if there is one, position_q, from what `_forward` returned."""
    with torch.autocast(q.device.type, enabled=False):
        call = _Call(q, k, v, table, scale)
        grad = _neighbouring_channels(grad)
        n, npos = call.batch * call.heads, call.npos
        dq = q.new_empty(q.shape, dtype=torch.float32)
        dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=q.device) for x in (k, v))
        dposition_q = dq if position_q is None else torch.zeros_like(dq)
        own_q = q if position_q is None else position_q
        # Running sums over the keys of ds and of ds times the fraction; by differences they are gradients of t_n and
        # of slopes.
        steps = call.slopes.clone()
        steps[:, :-1] -= call.slopes[:, 1:]
        of_sums = torch.stack((-call.slopes, steps), -1).flatten(1).T  # [2 P, D]
        moments = q.new_zeros(call.head_dim, 2 * npos, dtype=torch.float32)
        tiling = call.tilings
        bn = tiling.bwd_dkdv.BN
        assert bn == tiling.bwd_preprocess.BN == tiling.bwd_dkdv.STEP
        assert tiling.bwd_preprocess.BM % bn == 0
        for first, count in call.chunks():
            span = slice(first, first + count)
            chunk_q = own_q[:, :, span].float()  # [B, H, n, D]
            packed = call.packed_table(chunk_q)
            tiles = triton.cdiv(first + count, tiling.bwd_preprocess.BM) * (tiling.bwd_preprocess.BM // bn)
            carry = q.new_empty(n, tiles, count, dtype=torch.int32)
            passed = q.new_empty(n, tiles, count, dtype=torch.float32)
            sums = q.new_empty(call.batch, call.heads, count, 2 * npos, dtype=torch.float32)
            delta, total = q.new_empty(2, n, count, dtype=torch.float32)
            tensors: tuple[Tensor, ...] = packed, out, grad, lse, start, carry, passed, sums, delta, total
            programs = triton.cdiv(count, tiling.bwd_preprocess.BM), n
            more = {"tiles": tiles, "P2": triton.next_power_of_2(npos)}
            call.launch("bwd_preprocess", programs, tensors, (first, count), strided=(grad,), **more)

            tensors = packed, grad, lse, start, delta, total, dq
            programs = triton.cdiv(count, tiling.bwd_dq.BM), n
            call.launch("bwd_dq", programs, tensors, (first, count), strided=(grad,))

            reach = _reach(start[:, :, span].reshape(n, count) // bn, tiles)
            tensors = packed, grad, lse, start, reach, carry, passed, delta, total, dk, dv
            programs = triton.cdiv(first + count, bn), call.batch * k.size(1)
            call.launch("bwd_dkdv", programs, tensors, (first, count), strided=(grad,), tiles=tiles)

            dposition_q[:, :, span] += sums @ of_sums
            moments += chunk_q.flatten(0, 2).T @ sums.flatten(0, 2)
        of_entries, of_fractions = moments.unflatten(1, (npos, 2)).unbind(-1)  # [D, P]
        dslopes = of_fractions - of_entries
        dslopes[:, 1:] -= of_fractions[:, :-1]
        dtable = torch.zeros_like(dslopes)
        dtable[:, 1:] += dslopes[:, :-1]
        dtable[:, :-1] -= dslopes[:, :-1]
        grads = [dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dtable.to(table.dtype)]
        return grads if position_q is None else [*grads, dposition_q.to(position_q.dtype)]


@_backward.register_fake
def _(grad, out, lse, start, q, k, v, table, position_q, scale):
    return [x.new_empty(x.shape) for x in (q, k, v, table, position_q) if x is not None]


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*output, *tensors)


def _gradients(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    grads = _backward(grad, *ctx.saved_tensors, ctx.scale)
    return *grads, *[None] * (6 - len(grads))


_forward.register_autograd(_gradients, setup_context=_save)


def _reach(windows: Tensor, tiles: int) -> Tensor:
    """For each tile of keys, up to where there are queries whose window holds it: int32 [n, tiles].

    Args:
        windows: the first tile of each query's window, [n, count].
    """
    ends = torch.arange(1, windows.size(1) + 1, device=windows.device, dtype=torch.int32).expand_as(windows)
    reach = torch.zeros(windows.size(0), tiles, device=windows.device, dtype=torch.int32)
    return reach.scatter_reduce_(1, windows.long(), ends, "amax").cummax(1).values
