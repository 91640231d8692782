"""CoPE attention, exact, in memory linear in the sequence length: PyTorch operations alone, on any device.

Its specification is `model.position.cope.cope_attention`. On CUDA `model.kernels.cope_triton` runs instead where it
can: see `model.kernels.choice`.

Position p_ij sums the gates from key j to query i, so a query visits its keys from the diagonal to the past. Everything
is flipped in time on entry: in this file query i sees the keys j >= i, and positions are plain cumulative sums along
the keys.

Forward. A block of queries visits its keys tile by tile, carries the sum of its gates from one to the next, and merges
the softmax over each tile by its log-sum-exp (lse). From t = q e [P] and the slopes s_n = t_{n+1} - t_n, the position
term is t_f + (p - f) s_f, f = floor(min(p, P - 1)); a last slope of zero covers the clamp, the upper end and P = 1.
Once all queries of the block have reached P - 1, the position term is t_{P-1} for every key left: PyTorch's fused
attention reads those, and t_{P-1} is added to its lse.

Backward. A block recomputes the scores of all keys it visited, in one strip: positions sum from the diagonal, their
gradients sum towards it. The keys left have gates without gradient: the backward of the fused attention serves
them, given the output and the (shifted) lse of the whole row.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model.kernels.choice import takes_triton

ROWS = 64  # queries of a block, those of all the heads that share a key
TILE = 224  # keys of a tile: with gates of a half, enough for 64 queries to reach position 63
SCORES = 2**19  # in each buffer, or one strip if longer: more falls out of the cache, fewer are many small calls


def cope_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    *,
    scale: float,
    position_q: Tensor | None = None,
    gate_keys: Tensor | None = None,
) -> Tensor:
    """Causal self-attention with contextual positions (CoPE, arXiv 2405.18719); differentiable once.

    With scores z_ij = scale q_i.k_j the gates are g_ij = sigmoid(z_ij); key j's position seen from query i is
    p_ij = sum of g_it for t = j..i, at most P - 1; and q_i.e[p_ij], linear between the entries of the table, is added
    to z_ij. Dtypes below fp32 are read and written; everything in between is fp32, under autocast too.

    Args:
        q: [B, H, T, D]. k, v: [B, Hkv, T, D], H a multiple of Hkv. table: e, [D, P].
        position_q: queries of e and of `gate_keys`, [B, H, T, D]; default q.
        gate_keys: keys of the gates, [B, Hkv, T, D]; default: q and k, so that the gates are sigmoid(z).

    Returns:
        [B, H, T, D] in the dtype of v
    """
    assert q.size(2) == k.size(2), f"{q.size(2)} queries and {k.size(2)} keys: a cached text needs the plain version"
    return _forward(q, k, v, table, position_q, gate_keys, scale)[0]


class _Tensors(NamedTuple):
    """The inputs, or their gradients, flipped in time; n = B Hkv, and G heads share a key."""

    q: Tensor  # [n, G, T, D]
    k: Tensor  # [n, T, D]
    v: Tensor
    e: Tensor  # [D, P]
    position_q: Tensor  # q itself if there is no other
    gate_keys: Tensor | None


def _read(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, position_q: Tensor | None, gate_keys: Tensor | None
) -> _Tensors:
    dtype = torch.promote_types(q.dtype, torch.float32)
    queries, keys = (-1, q.size(1) // k.size(1), *q.shape[2:]), (-1, *k.shape[2:])
    q = _flip(q, queries, dtype)
    return _Tensors(
        q,
        _flip(k, keys, dtype),
        _flip(v, keys, dtype),
        table.to(dtype),
        q if position_q is None else _flip(position_q, queries, dtype),
        None if gate_keys is None else _flip(gate_keys, keys, dtype),
    )


def _block(groups: int) -> int:
    """Time steps of a block of queries."""
    return max(1, ROWS // groups)


def _flip(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """[B, H, T, D] flipped in time, as `shape`; contiguous, without which the fused attention reads wrongly."""
    return x.flip(2).to(dtype).contiguous().view(shape)


def _unflip(x: Tensor, like: Tensor) -> Tensor:
    """Inverse of `_flip`, in the shape and dtype of `like`."""
    return x.view(like.shape).flip(2).to(like.dtype)


def _spans(length: int, step: int) -> Iterator[tuple[int, int]]:
    return ((a, min(a + step, length)) for a in range(0, length, step))


class _Tile(NamedTuple):
    """One entry for each query and key, [n, R, keys], in buffers that all blocks share: fresh memory would cost more
    than the arithmetic on it."""

    z: Tensor  # scores, position term included
    gates: Tensor
    rest: Tensor  # of the positions, to their floor
    slope: Tensor  # of the position term there
    spare: Tensor
    floor: Tensor  # int64

    @classmethod
    def buffers(cls, like: Tensor, size: int) -> "_Tile":
        return cls._make([*like.new_empty(5, size), like.new_empty(size, dtype=torch.int64)])

    def shaped(self, *shape: int) -> "_Tile":
        return _Tile._make(x[: math.prod(shape)].view(shape) for x in self)


class _Block:
    """The queries i0..i1 of some heads, R of them for each of n sets of keys."""

    def __init__(self, x: _Tensors, scale: float, heads: slice, i0: int, i1: int, buffers: _Tile) -> None:
        self.scale, self.heads, self.i0, self.i1, self.buffers = scale, heads, i0, i1, buffers
        self.rows = heads, slice(None), slice(i0, i1)
        self.q, self.position_q = self.own(x.q), self.own(x.position_q)
        self.k, self.v, self.e = x.k[heads], x.v[heads], x.e
        self.gate_keys = None if x.gate_keys is None else x.gate_keys[heads]
        self.scaled_q, self.scaled_position_q = self.q * scale, self.position_q * scale
        self.values = self.position_q @ x.e  # [n, R, P]
        self.slopes = torch.zeros_like(self.values)
        torch.sub(self.values[..., 1:], self.values[..., :-1], out=self.slopes[..., :-1])
        self.carry = self.q.new_zeros(())  # sum of the gates so far, [n, R, 1]

    def own(self, x: Tensor) -> Tensor:
        """What `x` [B Hkv, G, T, C] holds of this block: [n, R, C]."""
        return x[self.rows].flatten(1, 2)

    def put(self, to: Tensor, x: Tensor) -> None:
        """Inverse of `own`."""
        to[self.rows] = x.unflatten(1, (-1, self.i1 - self.i0))

    def score(self, r0: int, r1: int) -> _Tile:
        """Scores over the keys r0..r1, which follow those of the call before."""
        block, last = self.i1 - self.i0, self.e.size(1) - 1
        tile = self.buffers.shaped(*self.q.shape[:2], r1 - r0)
        z = torch.bmm(self.scaled_q, self.k[:, r0:r1].mT, out=tile.z)
        logits = z
        if self.gate_keys is not None:
            logits = torch.bmm(self.scaled_position_q, self.gate_keys[:, r0:r1].mT, out=tile.gates)
        if r0 == self.i0:
            future = torch.ones(block, block, dtype=torch.bool, device=z.device).tril(-1)
            for x in {z, logits}:
                x[..., :block].unflatten(1, (-1, block)).masked_fill_(future, -torch.inf)
        torch.sigmoid(logits, out=tile.gates)
        position = torch.cumsum(tile.gates, -1, out=tile.rest).add_(self.carry)
        self.carry = position[..., -1:].clone()
        tile.floor.copy_(position.clamp_(max=last))
        position.frac_()
        z += torch.gather(self.values, -1, tile.floor, out=tile.slope)
        z.addcmul_(tile.rest, torch.gather(self.slopes, -1, tile.floor, out=tile.slope))
        return tile

    def clamped(self) -> bool:
        """Whether all keys that follow have position P - 1."""
        return bool((self.carry >= self.e.size(1) - 1).all())

    def attend(self) -> tuple[Tensor, Tensor, int]:
        """Output [n, R, D], lse [n, R, 1], and the end of the keys visited."""
        length = self.k.size(1)
        out = lse = self.q.new_full((), -torch.inf)
        for r0 in range(self.i0, length, TILE):
            r1 = min(r0 + TILE, length)
            tile = self.score(r0, r1)
            weights = torch.softmax(tile.z, -1, out=tile.spare)
            tile_lse = tile.z.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log()
            tile_out = torch.bmm(weights, self.v[:, r0:r1])
            out, lse = (tile_out, tile_lse) if r0 == self.i0 else _merge(out, lse, tile_out, tile_lse)
            if r1 < length and _has_flash(out) and self.clamped():
                rest, rest_lse = _flash(self.q[None], self.k[None, :, r1:], self.v[None, :, r1:], scale=self.scale)
                return *_merge(out, lse, rest[0], rest_lse[0, ..., None] + self.values[..., -1:]), r1
        return out, lse, length

    def differentiate(self, end: int, grad: Tensor, out: Tensor, lse: Tensor, grads: _Tensors) -> None:
        """Add to `grads` the part of these queries, given the `grad` and `out` of all, and what `attend` found."""
        grad, out, lse = (self.own(x) for x in (grad, out, lse))
        heads, keys = self.heads, slice(self.i0, end)
        z, gates, rest, slope, spare, floor = self.score(self.i0, end)
        weights = z.sub_(lse).exp_()
        grads.v[heads, keys].baddbmm_(weights.mT, grad)
        delta = (grad * out).sum(-1, keepdim=True)
        dz = torch.bmm(grad, self.v[:, keys].mT, out=spare).sub_(delta).mul_(weights)

        dvalues = torch.zeros_like(self.values).scatter_add_(-1, floor, dz)
        dslopes = torch.zeros_like(self.values).scatter_add_(-1, floor, rest.mul_(dz))
        dvalues[..., :-1] -= dslopes[..., :-1]
        dvalues[..., 1:] += dslopes[..., :-1]

        dposition = slope.mul_(dz)
        sums = torch.cumsum(dposition, -1, out=z)
        dgates = dposition.sub_(sums).add_(sums[..., -1:])  # a gate moves its own key and those behind it
        dlogits = dgates.mul_(gates.addcmul_(gates, gates, value=-1))
        if self.gate_keys is None:
            dz += dlogits
        dq = torch.bmm(dz, self.k[:, keys]).mul_(self.scale)
        grads.k[heads, keys].baddbmm_(dz.mT, self.scaled_q)

        if end < self.k.size(1):
            dvalues[..., -1] -= dvalues.sum(-1)  # the sum of a row of dz over all of its keys is 0
            k, v, left = self.k[:, end:], self.v[:, end:], slice(end, None)
            inputs = (x[None] for x in (grad, self.q, k, v, out, (lse - self.values[..., -1:]).squeeze(-1)))
            more = _flash_backward(*inputs, 0.0, False, scale=self.scale)
            for total, part in zip((dq, grads.k[heads, left], grads.v[heads, left]), more, strict=True):
                total += part[0]

        dposition_q = dvalues @ self.e.T
        grads.e.addmm_(self.position_q.flatten(0, 1).T, dvalues.flatten(0, 1))
        if self.gate_keys is not None and grads.gate_keys is not None:
            dposition_q.baddbmm_(dlogits, self.gate_keys[:, keys], alpha=self.scale)
            grads.gate_keys[heads, keys].baddbmm_(dlogits.mT, self.scaled_position_q)
        if grads.position_q is grads.q:
            dq += dposition_q
        else:
            self.put(grads.position_q, dposition_q)
        self.put(grads.q, dq)


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _has_flash(x: Tensor) -> bool:
    """Whether PyTorch has a fused attention that tells its lse for all dtypes and lengths; if not, visit all keys."""
    return x.device.type == "cpu"


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys, from the output and the lse over each."""
    return out.lerp_(more, torch.sigmoid(more_lse - lse)), torch.logaddexp(lse, more_lse)


@contextlib.contextmanager
def _small_products() -> Iterator[None]:
    """MKL multiplies fp32 matrices within it. Those of 64 queries are small, and oneDNN is slower at them, where
    `model.machine` has chosen it."""
    setting = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, setting.fp32_precision = setting.fp32_precision, "ieee"
    try:
        yield
    finally:
        setting.fp32_precision = before


# The loops depend on the data: an operator of our own hides them from torch.compile.
@torch.library.custom_op("ropewalk::cope_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, position_q: Tensor | None, gate_keys: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Output; and for the backward of the same kernel lse [B Hkv, G, T, 1] and int32 [B Hkv, G, T]: in flipped time,
    and where each query's visited keys end, or as `model.kernels.cope_triton.forward` gives them."""
    with torch.autocast(q.device.type, enabled=False), _small_products():
        if takes_triton(q, k, v, gate_keys):
            from model.kernels import cope_triton

            out, *state = cope_triton.forward(q, k, v, table, position_q, scale)
            lse, ends = (x.unflatten(1, (k.size(1), -1)).flatten(0, 1) for x in state)
            return out, lse.unsqueeze(-1), ends
        x = _read(q, k, v, table, position_q, gate_keys)
        n, groups, length, _ = x.q.shape
        block = _block(groups)
        tile = groups * block * min(TILE, length)
        step = min(n, max(1, SCORES // tile))
        buffers = _Tile.buffers(x.q, step * tile)
        out, lse = torch.empty_like(x.q), x.q.new_empty(n, groups, length, 1)
        ends = torch.empty(n, groups, length, dtype=torch.int32, device=q.device)
        for h0, h1 in _spans(n, step):
            for i0, i1 in _spans(length, block):
                queries = _Block(x, scale, slice(h0, h1), i0, i1, buffers)
                block_out, block_lse, ends[h0:h1, :, i0:i1] = queries.attend()
                queries.put(out, block_out)
                queries.put(lse, block_lse)
        return _unflip(out, q).to(v.dtype), lse, ends


@_forward.register_fake
def _(q, k, v, table, position_q, gate_keys, scale):
    n, groups, length = q.size(0) * k.size(1), q.size(1) // k.size(1), q.size(2)
    lse = q.new_empty(n, groups, length, 1, dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(q.shape, dtype=v.dtype), lse, q.new_empty(n, groups, length, dtype=torch.int32)


@torch.library.custom_op("ropewalk::cope_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    ends: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    position_q: Tensor | None,
    gate_keys: Tensor | None,
    scale: float,
) -> list[Tensor]:
    """Gradients of q, k, v, table, position_q and gate_keys; an empty tensor for what is None."""
    with torch.autocast(q.device.type, enabled=False), _small_products():
        if takes_triton(q, k, v, gate_keys):
            from model.kernels import cope_triton

            state = lse.view(q.shape[:3]), ends.view(q.shape[:3])
            given = cope_triton.backward(grad, out, *state, q, k, v, table, position_q, scale)
            return [*given, *(q.new_empty(0) for _ in range(6 - len(given)))]
        x = _read(q, k, v, table, position_q, gate_keys)
        grad, out = (_flip(y, x.q.shape, x.q.dtype) for y in (grad, out))
        n, groups, length, _ = x.q.shape
        block = _block(groups)
        strip = groups * block * length
        size = max(strip, min(SCORES, n * strip))
        buffers = _Tile.buffers(x.q, size)
        dq = torch.empty_like(x.q)
        grads = _Tensors(
            dq,
            torch.zeros_like(x.k),
            torch.zeros_like(x.v),
            torch.zeros_like(x.e),
            dq if position_q is None else torch.empty_like(dq),
            None if gate_keys is None else torch.zeros_like(x.k),
        )
        for (i0, i1), of_heads in zip(_spans(length, block), ends[:, 0, ::block].T.tolist(), strict=True):
            for heads, end in _runs(of_heads, i0, size // (groups * (i1 - i0))):
                queries = _Block(x, scale, heads, i0, i1, buffers)
                queries.differentiate(end, grad, out, lse, grads)
        found = [_unflip(y, like) for y, like in zip(grads[:3], (q, k, v), strict=True)] + [grads.e.to(table.dtype)]
        for like, y in ((position_q, grads.position_q), (gate_keys, grads.gate_keys)):
            found.append(q.new_empty(0) if like is None or y is None else _unflip(y, like))
        return found


def _runs(ends: list[int], i0: int, keys: int) -> Iterator[tuple[slice, int]]:
    """Heads to treat together: neighbours that visited the same keys, from `i0`, at most `keys` in all."""
    first = 0
    for head in range(1, len(ends) + 1):
        full = (head + 1 - first) * (ends[first] - i0) > keys
        if full or head == len(ends) or ends[head] != ends[first]:
            yield slice(first, head), ends[first]
            first = head


@_backward.register_fake
def _(grad, out, lse, ends, q, k, v, table, position_q, gate_keys, scale):
    inputs = (q, k, v, table, position_q, gate_keys)
    return [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs]


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*output, *tensors)


def _gradients(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    grads = _backward(grad, *saved, ctx.scale)
    return *(None if x is None else g for x, g in zip(saved[3:], grads, strict=True)), None


_forward.register_autograd(_gradients, setup_context=_save)
