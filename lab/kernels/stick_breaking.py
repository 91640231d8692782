"""Stick-breaking attention in Triton, forward and backward: memory linear in the length.

`model.position.forget.stick_breaking_attention` is its specification; method and names are those of
`lab.kernels.flash`. With b_ij = sigmoid(scale q_i.k_j) the weight of key j is b_ij times the product of 1 - b_il over
the keys l between j and i. So a program goes through the tiles of its queries from the newest keys to the oldest, and
carries

    left        the logarithm of the weight that all keys after the tile leave, for each query

It stops where so little is left that no weight of an older key differs from 0 in fp32.

The logarithm of a weight is the score plus the sum of ln (1 - b_il) over l = j..i-1. Its gradient is the weight times
the gradient of the weight; call it a_ij. Then the gradient of a score is a_ij - b_ij x the sum of a_il over the keys l
up to j, and what is left at the end counts as one more key, the oldest. So in the backward pass programs go from the
oldest keys to the newest, and carry

    older       the sum of a_il over all keys before the tile, for each query

The gradient of the keys needs both numbers for every tile and query. Computed back from a number kept for each query,
they would be differences of sums that nearly cancel. All of them would be quadratic in the length. So the backward pass
takes `CHUNK` queries after the other, as in `lab.kernels.cope`: first their gradient, which leaves both numbers, then
their part of the gradients of the keys. The forward pass keeps nothing but its inputs.

Scores and all logarithms are to base 2.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.kernels.cope import Tiles
from lab.kernels.cope import tiles as tiles_of_cope
from lab.kernels.ops import (
    LOG2E,
    add_to,
    launched,
    load_rows,
    numbers_of_heads,
    numbers_of_key_heads,
    padded,
    product,
    product_with_columns,
    relative_errors,
    scores_of,
    store_rows,
)
from model.attention import seen_range

EXACT = ()  # of `errors`, what fp32 holds for inputs of 16 bit too
CHUNK = 1024  # queries of a step of the backward pass, rounded to whole tiles
NOTHING = tl.constexpr(-150.0)  # 2^-150 is 0 in fp32


def tiles(head_dim: int, element_size: int) -> Tiles:
    """Sizes of tiles and numbers of warps: those of CoPE, whose kernels hold as many tiles of scores."""
    return tiles_of_cope(head_dim, element_size, has_gate_keys=False)


@triton.jit
def is_past(i, j, first):
    """Whether the queries i see the keys j, [len(i), len(j)]: no query sees its own."""
    return (j[None, :] < i[:, None]) & (j[None, :] >= first[:, None])


@triton.jit
def log2_of_1_plus(x):
    """The logarithm of 1 + x, for x from 0 to 1."""
    # The sum 1 + x loses a small x, and thousands of keys with small shares leave less than each of them alone.
    series = x * (1 - x * (0.5 - x / 3)) * LOG2E
    return tl.where(x < 0.01, series, tl.log2(1 + x))


@triton.jit
def break_off(scores, seen):
    """The shares b of the keys of a tile, and the logarithms of 1 - b, [len(i), len(j)] each; 0 where not seen."""
    smaller = tl.exp2(-tl.abs(scores))  # b / (1 - b) or its inverse: the one that cannot overflow
    share = tl.where(scores >= 0, 1.0, smaller) / (1 + smaller)
    log_rest = -(tl.maximum(scores, 0.0) + log2_of_1_plus(smaller))
    return tl.where(seen, share, 0.0), tl.where(seen, log_rest, 0.0)


@triton.jit
def weights_of(scores, log_rest, left, seen):
    """The weights of the keys of a tile, [len(i), len(j)], with `left` as before the tile."""
    log_weights = scores + tl.cumsum(log_rest, 1, reverse=True) + left[:, None]
    return tl.exp2(tl.where(seen, log_weights, float("-inf")))


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    first,
    out,
    T,
    first_batch,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    REMAINDER: tl.constexpr,
):
    """The output of BM queries of a head. The grid is (blocks of queries, H, B).

    The kernels of the backward pass take the same.

    Args:
        q: queries [B, H, T, D].
        k, v: keys and values [B, H // G, T, D]; G heads of queries share one of keys.
        first: the first key that each query sees, [T] or [B, T]; the last one is the one before its own.
        out: result [B, H, T, D].
        first_batch: 1 if each text has its own `first`; 0 if all share one.
        REMAINDER: what is left goes to the value of the query's own token.
    """
    # A program has a block of queries of one head.
    block = tl.program_id(0)
    b, _h, head, kv_head = numbers_of_heads(H, G)
    k += kv_head * T * D
    v += kv_head * T * D
    first += b * first_batch * T

    i = block * BM + tl.arange(0, BM)
    q_tile = load_rows(q + head * T * D, i, T, D)
    first_key = tl.load(first + i, mask=i < T, other=T + BN)  # queries beyond the end see no key

    acc = tl.zeros([BM, D], tl.float32)
    oldest = tl.load(first + block * BM) // BN
    tile = (tl.minimum((block + 1) * BM, T) - 1) // BN
    left = tl.where(i < T, 0.0, float("-inf"))
    while (tile >= oldest) & (tl.max(left, 0) > NOTHING):
        j = tile * BN + tl.arange(0, BN)
        k_tile = load_rows(k, j, T, D)
        v_tile = load_rows(v, j, T, D)
        seen = is_past(i, j, first_key)
        scores = scores_of(q_tile, k_tile, scale) * LOG2E
        _share, log_rest = break_off(scores, seen)
        acc += product(weights_of(scores, log_rest, left, seen), v_tile)
        left += tl.sum(log_rest, 1)
        tile -= 1
    if REMAINDER:
        acc += tl.exp2(left)[:, None] * load_rows(v, i, T, D)

    store_rows(out + head * T * D, i, T, acc, D)


@triton.jit
def queries_kernel(
    q,
    k,
    v,
    first,
    out_grad,
    q_grad,
    rests,
    lefts,
    olders,
    oldest_reached,
    start,
    T,
    first_batch,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    C: tl.constexpr,
    REMAINDER: tl.constexpr,
):
    """The gradient of BM queries of a head. The grid is (blocks of C queries, H, B).

    Args:
        rests: result for `keys_kernel`, the weight that all keys leave, fp32 [B, H, C].
        lefts, olders: results for it, `left` and `older` of each tile of BN keys, [B, H, tiles, C].
        oldest_reached: result for it, the oldest tile in which anything is left, int32 [B, H, C // BM].
        start: the first of the C queries.
    """
    # As in the forward pass: a block of queries of one head.
    block = start // BM + tl.program_id(0)
    b, _h, head, kv_head = numbers_of_heads(H, G)
    k += kv_head * T * D
    v += kv_head * T * D
    first += b * first_batch * T
    lefts += head * tl.cdiv(T, BN) * C
    olders += head * tl.cdiv(T, BN) * C

    i = block * BM + tl.arange(0, BM)
    row = i - start  # in the chunk
    q_tile = load_rows(q + head * T * D, i, T, D)
    out_grad_tile = load_rows(out_grad + head * T * D, i, T, D)
    first_key = tl.load(first + i, mask=i < T, other=T + BN)

    # The shares alone, from the newest keys on, to know what each tile begins with.
    oldest = tl.load(first + block * BM) // BN
    newest = (tl.minimum((block + 1) * BM, T) - 1) // BN
    tile = newest
    left = tl.where(i < T, 0.0, float("-inf"))
    while (tile >= oldest) & (tl.max(left, 0) > NOTHING):
        j = tile * BN + tl.arange(0, BN)
        scores = scores_of(q_tile, load_rows(k, j, T, D), scale) * LOG2E
        _share, log_rest = break_off(scores, is_past(i, j, first_key))
        tl.store(lefts + tile * C + row, left)
        left += tl.sum(log_rest, 1)
        tile -= 1
    tl.store(oldest_reached + head * (C // BM) + tl.program_id(0), tile + 1)
    tl.debug_barrier()  # below, other threads load `lefts` than those that stored them

    # What is left counts as a key before all others.
    older = tl.zeros([BM], tl.float32)
    if REMAINDER:
        rest = tl.exp2(left)
        tl.store(rests + head * C + row, rest)
        own_values = load_rows(v, i, T, D).to(tl.float32)
        older += rest * tl.sum(out_grad_tile.to(tl.float32) * own_values, 1)

    acc = tl.zeros([BM, D], tl.float32)
    for newer in range(tile + 1, newest + 1):
        j = newer * BN + tl.arange(0, BN)
        k_tile = load_rows(k, j, T, D)
        v_tile = load_rows(v, j, T, D)
        seen = is_past(i, j, first_key)
        scores = scores_of(q_tile, k_tile, scale) * LOG2E
        share, log_rest = break_off(scores, seen)
        left = tl.load(lefts + newer * C + row)
        weights = weights_of(scores, log_rest, left, seen)

        log_grads = weights * scores_of(out_grad_tile, v_tile, 1.0)  # of the logarithms of the weights
        score_grads = log_grads - share * (older[:, None] + tl.cumsum(log_grads, 1))
        acc += product(score_grads, k_tile)
        tl.store(olders + newer * C + row, older)
        older += tl.sum(log_grads, 1)

    store_rows(q_grad + head * T * D, i, T, acc * scale, D)


@triton.jit
def keys_kernel(
    q,
    k,
    v,
    first,
    last,
    out_grad,
    k_grad,
    v_grad,
    rests,
    lefts,
    olders,
    oldest_reached,
    start,
    T,
    first_batch,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    C: tl.constexpr,
    REMAINDER: tl.constexpr,
):
    """Add what C queries of the G heads that share BN keys give to the gradients of these and their values.

    The grid is (tiles of keys, H // G, B).

    Args:
        last: the last query that sees each key or has it as its own, [T] or [B, T].
        k_grad, v_grad: sums so far, fp32 [B, H // G, T, D].
        rests, lefts, olders, oldest_reached, start: as of `queries_kernel`, which runs before.
    """
    # A program has a tile of keys; all heads of queries that share it are summed here.
    tile = tl.program_id(0)
    b, group, kv_head = numbers_of_key_heads()
    j = tile * BN + tl.arange(0, BN)
    k_tile = load_rows(k + kv_head * T * D, j, T, D)
    v_tile = load_rows(v + kv_head * T * D, j, T, D)
    first += b * first_batch * T
    last += b * first_batch * T

    k_acc = tl.zeros([BN, D], tl.float32)
    v_acc = tl.zeros([BN, D], tl.float32)
    # `last` ascends: the last key of the tile is seen by the latest query.
    stop = tl.minimum(tl.load(last + tl.minimum(tile * BN + BN - 1, T - 1)) + 1, start + C)
    for g in range(G):
        head = (b * H + group * G + g).to(tl.int64)
        head_tile = (head * tl.cdiv(T, BN) + tile) * C
        for i0 in range(tl.maximum(start, tile * BN // BM * BM), stop, BM):
            # Otherwise newer keys have left nothing for these.
            if tile >= tl.load(oldest_reached + head * (C // BM) + (i0 - start) // BM):
                i = i0 + tl.arange(0, BM)
                row = i - start
                q_tile = load_rows(q + head * T * D, i, T, D)
                out_grad_tile = load_rows(out_grad + head * T * D, i, T, D)
                first_key = tl.load(first + i, mask=i < T, other=T + BN)
                seen = is_past(i, j, first_key)
                scores = scores_of(q_tile, k_tile, scale) * LOG2E
                share, log_rest = break_off(scores, seen)
                left = tl.load(lefts + head_tile + row)
                weights = weights_of(scores, log_rest, left, seen)

                log_grads = weights * scores_of(out_grad_tile, v_tile, 1.0)
                older = tl.load(olders + head_tile + row)
                score_grads = log_grads - share * (older[:, None] + tl.cumsum(log_grads, 1))
                k_acc += product_with_columns(score_grads, q_tile)
                if REMAINDER:
                    is_own = i[:, None] == j[None, :]
                    weights = tl.where(is_own, tl.load(rests + head * C + row)[:, None], weights)
                v_acc += product_with_columns(weights, out_grad_tile)

    # No other program has these keys, and the chunks of queries come one after the other.
    channels = tl.arange(0, D)
    places = kv_head * T * D + j[:, None] * D + channels[None, :]
    inside = j[:, None] < T
    add_to(k_grad + places, k_acc * scale, inside)
    add_to(v_grad + places, v_acc, inside)


@torch.library.custom_op("ropewalk::stick_breaking", mutates_args=())
@launched
def _stick_breaking(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, scale: float, remainder: bool
) -> Tensor:
    """The output [B, H, T, D]."""
    out = torch.empty_like(q)
    size = tiles(q.size(3), q.element_size())
    grid = (triton.cdiv(q.size(2), size.queries), q.size(1), q.size(0))
    forward_kernel[grid](
        q,
        k,
        v,
        first,
        out,
        q.size(2),
        int(first.ndim > 1),
        scale,
        **_flags(q, k, remainder),
        num_warps=size.forward_warps,
        num_stages=2,
    )
    return out


@_stick_breaking.register_fake
def _empty_output(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, scale: float, remainder: bool
) -> Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("ropewalk::stick_breaking_backward", mutates_args=())
@launched
def _stick_breaking_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    last: Tensor,
    scale: float,
    remainder: bool,
    out_grad: Tensor,
) -> list[Tensor]:
    """The gradients of q, k and v."""
    size = tiles(q.size(3), q.element_size())
    n_batch, n_head, length, _ = q.shape
    n_tiles = triton.cdiv(length, size.keys)
    chunk = size.queries * max(1, min(CHUNK // size.queries, triton.cdiv(length, size.queries)))

    q_grad = torch.empty_like(q)
    k_grad = torch.zeros_like(k, dtype=torch.float32)
    v_grad = torch.zeros_like(k_grad)
    rests = q.new_empty((n_batch, n_head, chunk), dtype=torch.float32)
    lefts = q.new_empty((n_batch, n_head, n_tiles, chunk), dtype=torch.float32)
    olders = torch.empty_like(lefts)
    oldest_reached = q.new_empty((n_batch, n_head, chunk // size.queries), dtype=torch.int32)

    flags = _flags(q, k, remainder) | {"C": chunk, "num_warps": size.backward_warps, "num_stages": 2}
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        carried = (rests, lefts, olders, oldest_reached, start, length, int(first.ndim > 1), scale)
        queries_kernel[(triton.cdiv(stop - start, size.queries), n_head, n_batch)](
            q, k, v, first, out_grad, q_grad, *carried, **flags
        )
        keys_kernel[(triton.cdiv(stop, size.keys), k.size(1), n_batch)](
            q, k, v, first, last, out_grad, k_grad, v_grad, *carried, **flags
        )
    return [q_grad, k_grad.to(k.dtype), v_grad.to(v.dtype)]


@_stick_breaking_backward.register_fake
def _empty_grads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    last: Tensor,
    scale: float,
    remainder: bool,
    out_grad: Tensor,
) -> list[Tensor]:
    return [torch.empty_like(x) for x in (q, k, v)]


def _flags(q: Tensor, k: Tensor, remainder: bool) -> dict[str, int]:
    """What all kernels are compiled for."""
    _, n_head, _, head_dim = q.shape
    size = tiles(head_dim, q.element_size())
    return {
        "H": n_head,
        "G": n_head // k.size(1),
        "D": head_dim,
        "BM": size.queries,
        "BN": size.keys,
        "REMAINDER": remainder,
    }


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scale, ctx.remainder = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, out_grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of the inputs of `_stick_breaking`, None for those without one."""
    grads = torch.ops.ropewalk.stick_breaking_backward(
        *ctx.saved_tensors, ctx.scale, ctx.remainder, out_grad.contiguous()
    )
    return *grads, None, None, None, None


_stick_breaking.register_autograd(_backward, setup_context=_keep_inputs)


def stick_breaking(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, *, scale: float, remainder: bool
) -> Tensor:
    """Stick-breaking attention [B, H, T, D], of as many queries as keys.

    It equals `model.position.forget.stick_breaking_attention`, which says what `remainder` is.

    Args:
        q: queries [B, H, T, D], fp32, bf16 or fp16.
        k, v: keys and values [B, Hkv, T, D] of the same dtype; H is a multiple of Hkv.
        first: the first key that each query sees, int32 [T] or [B, T], ascending; the last one is the one before its
            own. A query that sees none has its own.
        last: the last query that sees each key, int32 [T] or [B, T], ascending; its own for a key that none sees.
    """
    head_dim = q.size(3)
    q, k, v = padded(q, k, v)
    return _stick_breaking(q, k, v, first, last, scale, remainder)[..., :head_dim]


def errors(device: str, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of `stick_breaking` and its gradients on a device, against the specification in float64.

    One call with everything at once: grouped heads, a window, tiles that are not full, and texts whose keys take about
    half of what is left, next to nothing, or so much that old keys get nothing.
    """
    from model.position.forget import stick_breaking_attention

    length = 150
    window = 110
    i = torch.arange(length, device=device)
    distance = i[:, None] - i
    past = (distance > 0) & (distance < window)
    first, last = seen_range(length, window, device)
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device)

    q = random(3, 2, length, 64)
    k = random(3, 1, length, 64)
    q[1:, :, :, 0] = 8.0
    k[1, :, :, 0] = -4.0
    k[2, :, :, 0] = 8.0
    inputs = {"q": q.to(dtype), "k": k.to(dtype), "v": random(3, 1, length, 64).to(dtype)}
    out_grad = random(3, 2, length, 64).to(dtype)

    exact = partial(stick_breaking_attention, scale=1 / 8, past=past, remainder=True)
    kernel = partial(stick_breaking, first=first, last=last, scale=1 / 8, remainder=True)
    return relative_errors(kernel, exact, inputs, out_grad)
