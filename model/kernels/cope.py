"""CoPE attention, exact, in memory linear in the sequence length: PyTorch operations alone, on any device.

Its specification is `model.position.cope.cope_attention`. Position p_ij sums the gates from key j to query i, so a
query visits its keys from the diagonal to the past. Everything is flipped in time on entry: in this file query i sees
the keys j >= i, and positions are plain cumulative sums along the keys.

Forward. A block of queries visits its keys tile by tile, carries the sum of its gates from one to the next, and merges
the softmax over each tile by its log-sum-exp (lse). From t = q e [P] and the slopes s_n = t_{n+1} - t_n, the position
term is t_f + (p - f) s_f, f = floor(min(p, P - 1)); a last slope of zero covers the clamp, the upper end and P = 1.
Once all queries of the block have reached P - 1, the position term is t_{P-1} for every key left: PyTorch's fused
attention reads those, and t_{P-1} is added to its lse.

Backward. A block recomputes the scores of all keys it visited, in one strip: positions sum from the diagonal, their
gradients sum towards it. The keys left have gates without gradient: the backward of the fused attention serves
them, given the output and the (shifted) lse of the whole row.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROWS = 64  # queries of a block; the heads that share a key count separately
TILE = 256  # keys of a tile
SCORES = 2**18  # held at a time in each buffer, or one strip if that is longer: they stay in the processor's cache


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
    assert q.size(2) == k.size(2) and q.size(1) % k.size(1) == 0, (q.shape, k.shape)
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
    """[B, H, T, D] flipped in time, as `shape`."""
    return x.flip(2).to(dtype).reshape(shape)


def _unflip(x: Tensor, like: Tensor) -> Tensor:
    """Inverse of `_flip`, in the shape and dtype of `like`."""
    return x.view(like.shape).flip(2).to(like.dtype)


def _spans(length: int, step: int) -> Iterator[tuple[int, int]]:
    return ((a, min(a + step, length)) for a in range(0, length, step))


class _Strip:
    """Scores of the queries i0..i1 of some heads, over one range of keys at a time.

    The buffers are shared by all strips: fresh memory for each would cost more than the arithmetic in it.
    """

    def __init__(self, x: _Tensors, scale: float, heads: slice, i0: int, i1: int, buffers: list[Tensor]) -> None:
        self.scale, self.heads, self.i0, self.i1, self.buffers = scale, heads, i0, i1, buffers
        self.rows = heads, slice(None), slice(i0, i1)
        self.q, self.position_q = (y[self.rows].flatten(1, 2) for y in (x.q, x.position_q))  # [n, R, D]
        self.scaled = self.q * scale
        self.k, self.v, self.e = x.k[heads], x.v[heads], x.e
        self.gate_keys = None if x.gate_keys is None else x.gate_keys[heads]
        self.scaled_position_q = self.scaled if self.gate_keys is None else self.position_q * scale
        self.values = self.position_q @ x.e  # [n, R, P]
        self.slopes = torch.zeros_like(self.values)
        torch.sub(self.values[..., 1:], self.values[..., :-1], out=self.slopes[..., :-1])
        self.last = x.e.size(1) - 1
        self.carry: Tensor | float = 0.0  # sum of the gates so far, [n, R, 1]

    def score(self, r0: int, r1: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Scores, gates, floor of the positions and the rest, and slopes there: [n, R, r1 - r0], in the buffers."""
        z, gates, rest, slope, floor = (_view(y, *self.q.shape[:2], r1 - r0) for y in self.buffers)
        torch.bmm(self.scaled, self.k[:, r0:r1].mT, out=z)
        if self.gate_keys is not None:
            torch.bmm(self.scaled_position_q, self.gate_keys[:, r0:r1].mT, out=gates)
        if r0 == self.i0:
            self._mask(z)
            if self.gate_keys is not None:
                self._mask(gates)
        torch.sigmoid(z if self.gate_keys is None else gates, out=gates)
        position = torch.cumsum(gates, -1, out=rest).add_(self.carry)
        self.carry = position[..., -1:].clone()
        floor.copy_(position.clamp_(max=self.last))
        position.frac_()
        z += torch.gather(self.values, -1, floor, out=slope)
        z.addcmul_(rest, torch.gather(self.slopes, -1, floor, out=slope))
        return z, gates, floor, rest, slope

    def _mask(self, z: Tensor) -> None:
        """-inf for the keys that a query must not see."""
        block = self.i1 - self.i0
        future = torch.ones(block, block, dtype=torch.bool, device=z.device).tril(-1)
        z[..., :block].unflatten(1, (-1, block)).masked_fill_(future, -torch.inf)

    def clamped(self) -> bool:
        """Whether the positions of all keys left are P - 1."""
        return bool((self.carry >= self.last).all())


def _view(buffer: Tensor, *shape: int) -> Tensor:
    return buffer[: shape[0] * shape[1] * shape[2]].view(shape)


def _buffers(like: Tensor, n: int, size: int) -> list[Tensor]:
    return [*like.new_empty(n, size), like.new_empty(size, dtype=torch.int64)]


_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _has_flash(x: Tensor) -> bool:
    """Whether there is a fused attention that returns its lse. Elsewhere every key is visited."""
    return x.device.type == "cpu"


@torch.library.custom_op("ropewalk::cope_attention", mutates_args=())  # opaque to torch.compile: loops depend on data
def _forward(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, position_q: Tensor | None, gate_keys: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Output; and in flipped time lse [n, G, T], and where each block's visited keys end, int64 [n, blocks]."""
    with torch.autocast(q.device.type, enabled=False):
        x = _read(q, k, v, table, position_q, gate_keys)
        n, groups, length, _ = x.q.shape
        block, tile = _block(groups), min(TILE, length)
        step = min(n, max(1, SCORES // (groups * block * tile)))
        buffers = _buffers(x.q, 4, step * groups * block * tile)
        out, lse = torch.empty_like(x.q), x.q.new_empty(n, groups, length, 1)
        ends = torch.empty(n, -(-length // block), dtype=torch.int64)
        for h0, h1 in _spans(n, step):
            for i, (i0, i1) in enumerate(_spans(length, block)):
                strip = _Strip(x, scale, slice(h0, h1), i0, i1, buffers)
                o, l, ends[h0:h1, i] = _attend(strip)
                out[strip.rows], lse[strip.rows] = (y.unflatten(1, (groups, -1)) for y in (o, l))
        return _unflip(out, q).to(v.dtype), lse.squeeze(-1), ends.to(q.device)


def _attend(strip: _Strip) -> tuple[Tensor, Tensor, int]:
    """Output [n, R, D], lse [n, R, 1], and where the visited keys end."""
    length = strip.k.size(1)
    out = lse = None
    for r0 in range(strip.i0, length, TILE):
        r1 = min(r0 + TILE, length)
        z, weights, *_ = strip.score(r0, r1)
        torch.softmax(z, -1, out=weights)
        tile_lse = z.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log()
        tile = torch.bmm(weights, strip.v[:, r0:r1])
        out, lse = (tile, tile_lse) if out is None else _merge(out, lse, tile, tile_lse)
        if r1 < length and _has_flash(z) and strip.clamped():
            rest, rest_lse = _flash(strip.q[None], strip.k[None, :, r1:], strip.v[None, :, r1:], scale=strip.scale)
            return *_merge(out, lse, rest[0], rest_lse[0, ..., None] + strip.values[..., -1:]), r1
    return out, lse, length


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys, from the output and the lse over each."""
    return out.lerp_(more, torch.sigmoid(more_lse - lse)), torch.logaddexp(lse, more_lse)


@_forward.register_fake
def _(q, k, v, table, position_q, gate_keys, scale):
    n, groups, length = q.size(0) * k.size(1), q.size(1) // k.size(1), q.size(2)
    lse = q.new_empty(n, groups, length, dtype=torch.promote_types(q.dtype, torch.float32))
    ends = q.new_empty(n, -(-length // _block(groups)), dtype=torch.int64)
    return q.new_empty(q.shape, dtype=v.dtype), lse, ends


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
    with torch.autocast(q.device.type, enabled=False):
        x = _read(q, k, v, table, position_q, gate_keys)
        grad, out = (_flip(y, x.q.shape, x.q.dtype) for y in (grad, out))
        delta = (grad * out).sum(-1, keepdim=True)
        lse = lse[..., None]
        n, groups, length, _ = x.q.shape
        block = _block(groups)
        size = groups * block * length
        size = max(size, min(SCORES, n * size))
        buffers, spare = _buffers(x.q, 4, size), x.q.new_empty(size)
        dq, *others = (None if y is None else torch.zeros_like(y) for y in x)
        grads = _Tensors(dq, *others)
        if position_q is None:
            grads = grads._replace(position_q=dq)
        for (i0, i1), column in zip(_spans(length, block), ends.T.tolist(), strict=True):
            for heads, end in _runs(column, size // (groups * (i1 - i0)), i0):
                strip = _Strip(x, scale, heads, i0, i1, buffers)
                do, o, l, d = (y[strip.rows].flatten(1, 2) for y in (grad, out, lse, delta))
                _differentiate(strip, end, do, o, l, d, spare, grads)
        return [
            _unflip(grads.q, q),
            _unflip(grads.k, k),
            _unflip(grads.v, v),
            grads.e.to(table.dtype),
            q.new_empty(0) if position_q is None else _unflip(grads.position_q, position_q),
            q.new_empty(0) if gate_keys is None else _unflip(grads.gate_keys, gate_keys),
        ]


@_backward.register_fake
def _(grad, out, lse, ends, q, k, v, table, position_q, gate_keys, scale):
    inputs = (q, k, v, table, position_q, gate_keys)
    return [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs]


def _runs(ends: list[int], keys: int, i0: int) -> Iterator[tuple[slice, int]]:
    """Heads to treat together: neighbours whose visited keys, counted from `i0`, end alike and number at most `keys`."""
    first = 0
    for head in range(1, len(ends) + 1):
        full = (head + 1 - first) * (ends[first] - i0) > keys
        if head == len(ends) or ends[head] != ends[first] or full:
            yield slice(first, head), ends[first]
            first = head


def _differentiate(
    strip: _Strip, end: int, grad: Tensor, out: Tensor, lse: Tensor, delta: Tensor, spare: Tensor, grads: _Tensors
) -> None:
    """Add to `grads` what a block of queries contributes; `delta` is the sum of grad * out over each row."""
    i0 = strip.i0
    k, v = strip.k[:, i0:end], strip.v[:, i0:end]
    dk, dv = grads.k[strip.heads], grads.v[strip.heads]
    z, gates, floor, rest, slope = strip.score(i0, end)
    weights = z.sub_(lse).exp_()
    dv[:, i0:end].baddbmm_(weights.mT, grad)
    dz = torch.bmm(grad, v.mT, out=_view(spare, *z.shape)).sub_(delta).mul_(weights)

    dvalues = torch.zeros_like(strip.values).scatter_add_(-1, floor, dz)
    dslopes = torch.zeros_like(strip.values).scatter_add_(-1, floor, rest.mul_(dz))
    dvalues[..., :-1] -= dslopes[..., :-1]
    dvalues[..., 1:] += dslopes[..., :-1]

    dposition = slope.mul_(dz)
    before = torch.cumsum(dposition, -1, out=z)  # a gate moves its own key and those behind it
    dgate_logits = dposition.sub_(before).add_(before[..., -1:]).mul_(gates.addcmul_(gates, gates, value=-1))
    if strip.gate_keys is None:
        dz += dgate_logits
    dq = torch.bmm(dz, k)
    dk[:, i0:end].baddbmm_(dz.mT, strip.scaled)
    dposition_q = dvalues.new_zeros(())
    if strip.gate_keys is not None and grads.gate_keys is not None:
        dposition_q = torch.bmm(dgate_logits, strip.gate_keys[:, i0:end]).mul_(strip.scale)
        grads.gate_keys[strip.heads, i0:end].baddbmm_(dgate_logits.mT, strip.scaled_position_q)
    dq *= strip.scale

    if end < strip.k.size(1):
        dvalues[..., -1] -= dvalues.sum(-1)  # a row of dz sums to 0, over all of its keys
        left = (strip.k[None, :, end:], strip.v[None, :, end:])
        shifted = (lse - strip.values[..., -1:]).squeeze(-1)
        more = _flash_backward(
            grad[None], strip.q[None], *left, out[None], shifted[None], 0.0, False, scale=strip.scale
        )
        for total, part in zip((dq, dk[:, end:], dv[:, end:]), more, strict=True):
            total += part[0]
    groups = grads.q.size(1)
    dposition_q = dposition_q + dvalues @ strip.e.T
    grads.q[strip.rows] += dq.unflatten(1, (groups, -1))
    grads.position_q[strip.rows] += dposition_q.unflatten(1, (groups, -1))
    grads.e.addmm_(strip.position_q.flatten(0, 1).T, dvalues.flatten(0, 1))


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*output, *tensors)


def _differentiate_op(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    *saved, position_q, gate_keys = ctx.saved_tensors
    dq, dk, dv, dtable, dposition_q, dgate_keys = _backward(grad, *saved, position_q, gate_keys, ctx.scale)
    return (
        dq,
        dk,
        dv,
        dtable,
        None if position_q is None else dposition_q,
        None if gate_keys is None else dgate_keys,
        None,
    )


_forward.register_autograd(_differentiate_op, setup_context=_setup_context)
