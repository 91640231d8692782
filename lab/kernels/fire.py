"""FIRE's attention in Triton: flash attention whose bias depends on the distance and on the query's position.

`model.position.bias.FIRE` without it is its specification. FIRE adds f(x) to the score of query i and key j, where x is
ln(1 + c (i - j)) / reach of i, and f is a network with one hidden layer of ReLUs. x is called the place of the key: 0
for the query's own token, at most 1.

To evaluate the network for each score would take many times as long as attention. But f is linear between kinks, which
are where a unit of the hidden layer is switched on or off, and these are the same for all heads. So f is a slope and an
intercept for each head and each segment between two kinks. They are made in PyTorch, and through them the network gets
its gradients.

The nearest and the farthest pair of a tile say which segments lie between them: one in most tiles, and a few next to
the diagonal. So the bias of a score costs a logarithm, and then three operations for each segment of its tile.

For the gradients of slopes and intercepts each program sums those of its scores, segment by segment. PyTorch adds up
these sums. So there are no atomic additions, and the gradients of a run can be repeated.

The rest is the method of `lab.kernels.flash`, with its names.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from lab.kernels.ops import (
    LOG2E,
    Maybe,
    add_tile,
    grads_of_sinks,
    is_seen,
    keep_inputs,
    launched,
    load_numbers,
    load_rows,
    means_of,
    numbers_of_heads,
    numbers_of_key_heads,
    padded,
    product,
    product_with_columns,
    relative_errors,
    scores_of,
    store_numbers,
    store_rows,
)
from model.attention import seen_range

EXACT = ("slopes", "intercepts", "inverse_reach", "c", "sinks")  # of `errors`, what fp32 holds in 16 bit too
# Of the check at the start of a run. No place there is so near to a kink that rounding could move it across.
KINKS = (0.11, 0.23, 0.29, 0.52, 0.67, 0.83, 1.4)
C = 0.3
THRESHOLD = 50
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


class Tile(NamedTuple):
    """Size of the tiles of a kernel, and its number of warps."""

    queries: int
    keys: int
    warps: int


class Tiles(NamedTuple):
    """The tiles of each kernel."""

    forward: Tile
    of_queries: Tile
    of_keys: Tile


def tiles(head_dim: int, element_size: int) -> Tiles:
    """Sizes with which no kernel spills much, and which fit into the shared memory of every GPU from sm_80 on.

    Args:
        head_dim: a power of two up to 256.
        element_size: bytes of an element of q.
    """
    if element_size * head_dim > 512:
        return Tiles(Tile(16, 16, 4), Tile(16, 16, 4), Tile(16, 16, 4))
    if element_size == 4 or head_dim > 128:  # fp32 has no matrix units, and its products are unrolled
        return Tiles(Tile(32, 32, 4), Tile(32, 32, 4), Tile(32, 32, 8))
    # On Hopper four warps hold a tile of 64 queries the same way in both products of the backward pass. With eight,
    # scores would move between threads, and their places would be computed twice.
    if head_dim > 64:
        return Tiles(Tile(64, 64, 4), Tile(64, 32, 4), Tile(32, 64, 8))
    return Tiles(Tile(128, 64, 8), Tile(64, 32, 4), Tile(64, 64, 4))


@triton.jit
def log2(x):
    """The logarithm to base 2 by one instruction, off by 2^-22 at most near 1; `tl.log2` takes about twenty."""
    if INTERPRETED:
        return tl.log2(x)
    return libdevice.fast_log2f(x)


@triton.jit
def distances_of(i, j):
    """The distances of the queries i and keys j, fp32 [len(i), len(j)]; as positive numbers in the future, too."""
    # Numbers below 2^24 are exact. Converting each distance, not i and j, would take as long as its logarithm.
    return tl.abs(i.to(tl.float32)[:, None] - j.to(tl.float32)[None, :])


@triton.jit
def segments_of(kinks, i0, j0, M: tl.constexpr, N: tl.constexpr, smallest, largest, c):
    """The first and the last segment in the tile of M queries from i0 on and N keys from j0 on.

    Args:
        kinks: as of `forward_kernel`, loaded, and padded with inf.
        smallest, largest: of `inverse_reach` of the queries, to base 2.
    """
    nearest = tl.maximum(i0 - (j0 + N - 1), 0).to(tl.float32)
    farthest = (i0 + M - 1 - j0).to(tl.float32)
    lowest_place = log2(1.0 + c * nearest) * smallest
    highest_place = log2(1.0 + c * farthest) * largest
    # The first segment begins at 0, where rounding might let a place be less.
    low = tl.sum((kinks <= lowest_place).to(tl.int32), 0) - 1
    high = tl.sum((kinks <= highest_place).to(tl.int32), 0) - 1
    return tl.maximum(low, 0), tl.maximum(high, 0)


@triton.jit
def add_bias(scores, place, low, high, kinks, slopes, intercepts):
    """The scores of a tile with the bias, to base 2, fp32 [len(i), len(j)].

    Args:
        low, high: the first and the last segment of the tile. A place outside of them, which rounding may cause, counts
            as in the nearest of them.
        slopes, intercepts: of the head.
    """
    slope = tl.load(slopes + low)
    scores += slope * LOG2E * place + tl.load(intercepts + low) * LOG2E
    # Without the condition, which is false for most tiles, Triton would not load a tile while the one before it is
    # computed: it does not look for loops within conditions.
    if low < high:
        for s in range(low + 1, high + 1):
            # f is continuous: beyond a kink it differs from what it was by the change of the slope.
            next_slope = tl.load(slopes + s)
            scores += (next_slope - slope) * LOG2E * tl.maximum(place - tl.load(kinks + s), 0.0)
            slope = next_slope
    return scores


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    first,
    kinks,
    slopes,
    intercepts,
    inverse_reach,
    c,
    sinks,
    out,
    log_sums,
    T,
    first_batch,
    reach_batch,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """The output of BM queries of a head, and their `log_sums`. The grid is (blocks of queries, H, B).

    The kernels of the backward pass take the same.

    Args:
        q: queries [B, H, T, D].
        k, v: keys and values [B, H // G, T, D]; G heads of queries share one of keys.
        first: the first key that each query sees, [T] or [B, T]; the last one is its own.
        kinks: where each of the S segments of f begins, [S], ascending; the first of them at 0.
        slopes, intercepts: of f in each segment, [H, S].
        inverse_reach: 1 / reach of each query, [T] or [B, T].
        c: the factor of distances, [1].
        sinks: a logit for each head, [H].
        first_batch, reach_batch: 1 if each text has its own `first`, `inverse_reach`; 0 if all share them.
        out: result [B, H, T, D].
        log_sums: result [B, H, T].
        P: a power of two, at least S.
        HAS_SINKS: there are `sinks`; otherwise these are never read.
    """
    # A program has a block of queries of one head; `head` and the like say where its numbers begin.
    block = tl.program_id(0)
    b, h, head, kv_head = numbers_of_heads(H, G)
    k += kv_head * T * D
    v += kv_head * T * D
    first += b * first_batch * T
    inverse_reach += b * reach_batch * T
    slopes += h * S
    intercepts += h * S
    s = tl.arange(0, P)
    all_kinks = tl.load(kinks + s, mask=s < S, other=float("inf"))
    factor = tl.load(c)

    i = block * BM + tl.arange(0, BM)
    q_tile = load_rows(q + head * T * D, i, T, D)
    first_key = tl.load(first + i, mask=i < T, other=T + BN)  # queries beyond the end see no key
    inverse = tl.load(inverse_reach + tl.minimum(i, T - 1)) / LOG2E  # of logarithms to base 2
    smallest = tl.min(inverse, 0)
    largest = tl.max(inverse, 0)

    # The softmax of a row over all tiles so far: its highest score, and the sum of 2^(score - highest).
    highest = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    if HAS_SINKS:  # the sum over keys begins with the sink
        highest = tl.zeros([BM], tl.float32) + tl.load(sinks + h) * LOG2E
        total += 1.0

    acc = tl.zeros([BM, D], tl.float32)
    # `first` ascends: the first query of the block sees the oldest key.
    start = tl.load(first + block * BM) // BN * BN
    for j0 in range(start, tl.minimum((block + 1) * BM, T), BN):
        j = j0 + tl.arange(0, BN)
        k_tile = load_rows(k, j, T, D)
        v_tile = load_rows(v, j, T, D)
        low, high = segments_of(all_kinks, block * BM, j0, BM, BN, smallest, largest, factor)
        place = log2(1.0 + factor * distances_of(i, j)) * inverse[:, None]
        scores = scores_of(q_tile, k_tile, scale * LOG2E)
        scores = add_bias(scores, place, low, high, kinks, slopes, intercepts)
        scores = tl.where(is_seen(i, j, first_key), scores, float("-inf"))
        highest, total, acc = add_tile(scores, v_tile, highest, total, acc)
    total = tl.where(total == 0.0, 1.0, total)  # queries beyond the end

    store_rows(out + head * T * D, i, T, acc / total[:, None], D)
    store_numbers(log_sums + head * T, i, T, highest + tl.log2(total))


@triton.jit
def queries_kernel(
    q,
    k,
    v,
    first,
    kinks,
    slopes,
    intercepts,
    inverse_reach,
    c,
    log_sums,
    means,
    out_grad,
    q_grad,
    exact_means,
    reach_grad,
    c_grad,
    T,
    first_batch,
    reach_batch,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """The gradients of BM queries of a head and of their places, and their exact means.

    The grid is (blocks of queries, H, B).

    `means` come from the output, which may be rounded to 16 bit. That is enough for q. What depends on places sums up
    gradients of scores that nearly cancel. They are linear in the mean, so they are corrected once the exact one is
    known; `keys_kernel`, which runs after this one, takes it from the start.

    Args:
        reach_grad: result, the gradient of `inverse_reach` from each head, [B, H, T].
        c_grad: result, the gradient of c from each program, [B, H, blocks of queries].
    """
    # As in the forward pass: a block of queries of one head.
    block = tl.program_id(0)
    b, h, head, kv_head = numbers_of_heads(H, G)
    k += kv_head * T * D
    v += kv_head * T * D
    first += b * first_batch * T
    inverse_reach += b * reach_batch * T
    slopes += h * S
    intercepts += h * S
    s = tl.arange(0, P)
    all_kinks = tl.load(kinks + s, mask=s < S, other=float("inf"))
    factor = tl.load(c)

    i = block * BM + tl.arange(0, BM)
    q_tile = load_rows(q + head * T * D, i, T, D)
    out_grad_tile = load_rows(out_grad + head * T * D, i, T, D)
    first_key = tl.load(first + i, mask=i < T, other=T + BN)
    log_sum = load_numbers(log_sums + head * T, i, T)
    mean = load_numbers(means + head * T, i, T)
    inverse = tl.load(inverse_reach + tl.minimum(i, T - 1)) / LOG2E
    smallest = tl.min(inverse, 0)
    largest = tl.max(inverse, 0)

    exact_mean = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    # Sums over keys of what `inverse_reach` and c change of scores: times the gradient of the score, and the weight.
    reach_sum = tl.zeros([BM], tl.float32)
    reach_mean = tl.zeros([BM], tl.float32)
    c_sum = tl.zeros([BM], tl.float32)
    c_mean = tl.zeros([BM], tl.float32)
    start = tl.load(first + block * BM) // BN * BN
    for j0 in range(start, tl.minimum((block + 1) * BM, T), BN):
        j = j0 + tl.arange(0, BN)
        k_tile = load_rows(k, j, T, D)
        v_tile = load_rows(v, j, T, D)
        low, high = segments_of(all_kinks, block * BM, j0, BM, BN, smallest, largest, factor)
        distance = distances_of(i, j)
        grown = 1.0 + factor * distance
        place = log2(grown) * inverse[:, None]
        scores = scores_of(q_tile, k_tile, scale * LOG2E)
        scores = add_bias(scores, place, low, high, kinks, slopes, intercepts)
        scores = tl.where(is_seen(i, j, first_key), scores, float("-inf"))

        # The scores are computed again, and `log_sum` makes weights of them without a second pass over the row.
        weights = tl.exp2(scores - log_sum[:, None])
        weight_grads = scores_of(out_grad_tile, v_tile, 1.0)
        exact_mean += tl.sum(weights * weight_grads, 1)

        # The derivative of the softmax: what the gradient of a weight exceeds the mean by.
        score_grads = weights * (weight_grads - mean[:, None])

        # The gradients of places, and the same with weights.
        slope = tl.load(slopes + low)
        place_grads = score_grads * slope
        place_weights = weights * slope
        if low < high:
            for segment in range(low + 1, high + 1):
                slope = tl.load(slopes + segment)
                is_beyond = place >= tl.load(kinks + segment)
                place_grads = tl.where(is_beyond, score_grads * slope, place_grads)
                place_weights = tl.where(is_beyond, weights * slope, place_weights)
        reach_sum += tl.sum(place_grads * place, 1)
        reach_mean += tl.sum(place_weights * place, 1)
        # distance / (1 + c distance), as a GPU computes it fastest.
        inverse_root = tl.rsqrt(grown)
        by_c = distance * inverse_root * inverse_root
        c_sum += tl.sum(place_grads * by_c, 1)
        c_mean += tl.sum(place_weights * by_c, 1)
        acc += product(score_grads, k_tile)

    excess = exact_mean - mean
    store_rows(q_grad + head * T * D, i, T, acc * scale, D)
    store_numbers(exact_means + head * T, i, T, exact_mean)
    store_numbers(reach_grad + head * T, i, T, (reach_sum - excess * reach_mean) / (inverse * LOG2E))
    of_queries = (c_sum - excess * c_mean) * inverse * LOG2E  # zeros beyond the end
    tl.store(c_grad + head * tl.num_programs(0) + block, tl.sum(of_queries, 0))


@triton.jit
def keys_kernel(
    q,
    k,
    v,
    first,
    last,
    kinks,
    slopes,
    intercepts,
    inverse_reach,
    c,
    log_sums,
    means,
    out_grad,
    k_grad,
    v_grad,
    segments_grad,
    T,
    first_batch,
    reach_batch,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    P: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """The gradients of BN keys and their values, over the G heads that share them, and of the segments.

    The grid is (blocks of keys, H // G, B).

    Args:
        last: the last query that sees each key, [T] or [B, T].
        means: the exact ones.
        segments_grad: result, the gradients of slopes and intercepts from each program, [B, H, blocks of keys, 2, P].
    """
    # A program has a block of keys; all heads of queries that share it are summed here.
    block = tl.program_id(0)
    b, group, kv_head = numbers_of_key_heads()
    first += b * first_batch * T
    last += b * first_batch * T
    inverse_reach += b * reach_batch * T
    s = tl.arange(0, P)
    all_kinks = tl.load(kinks + s, mask=s < S, other=float("inf"))
    factor = tl.load(c)
    j = block * BN + tl.arange(0, BN)
    k_tile = load_rows(k + kv_head * T * D, j, T, D)
    v_tile = load_rows(v + kv_head * T * D, j, T, D)

    k_acc = tl.zeros([BN, D], tl.float32)
    v_acc = tl.zeros([BN, D], tl.float32)
    # `last` ascends: the last key of the block is seen by the latest query.
    stop = tl.load(last + tl.minimum(block * BN + BN - 1, T - 1)) + 1
    for g in range(G):
        h = group * G + g
        head = (b * H + h).to(tl.int64)
        slope_sums = tl.zeros([P], tl.float32)
        intercept_sums = tl.zeros([P], tl.float32)
        for i0 in range(block * BN // BM * BM, stop, BM):
            i = i0 + tl.arange(0, BM)
            q_tile = load_rows(q + head * T * D, i, T, D)
            out_grad_tile = load_rows(out_grad + head * T * D, i, T, D)
            first_key = tl.load(first + i, mask=i < T, other=T + BN)
            log_sum = load_numbers(log_sums + head * T, i, T)
            mean = load_numbers(means + head * T, i, T)
            inverse = tl.load(inverse_reach + tl.minimum(i, T - 1)) / LOG2E
            low, high = segments_of(all_kinks, i0, block * BN, BM, BN, tl.min(inverse, 0), tl.max(inverse, 0), factor)
            place = log2(1.0 + factor * distances_of(i, j)) * inverse[:, None]
            scores = scores_of(q_tile, k_tile, scale * LOG2E)
            scores = add_bias(scores, place, low, high, kinks, slopes + h * S, intercepts + h * S)
            scores = tl.where(is_seen(i, j, first_key), scores, float("-inf"))

            # Weights and the gradients of scores as in `queries_kernel`, for the columns of these keys.
            weights = tl.exp2(scores - log_sum[:, None])
            v_acc += product_with_columns(weights, out_grad_tile)

            weight_grads = scores_of(out_grad_tile, v_tile, 1.0)
            score_grads = weights * (weight_grads - mean[:, None])
            k_acc += product_with_columns(score_grads, q_tile)

            # All scores count for the first segment, and then those beyond a kink move on to the next.
            by_slope = score_grads * place
            slope_sums += tl.where(s == low, tl.sum(by_slope), 0.0)
            intercept_sums += tl.where(s == low, tl.sum(score_grads), 0.0)
            if low < high:
                for segment in range(low + 1, high + 1):
                    is_beyond = place >= tl.load(kinks + segment)
                    sign = tl.where(s == segment, 1.0, tl.where(s == segment - 1, -1.0, 0.0))
                    slope_sums += sign * tl.sum(tl.where(is_beyond, by_slope, 0.0))
                    intercept_sums += sign * tl.sum(tl.where(is_beyond, score_grads, 0.0))
        of_program = segments_grad + (head * tl.num_programs(0) + block) * 2 * P
        tl.store(of_program + s, slope_sums)
        tl.store(of_program + P + s, intercept_sums)

    store_rows(k_grad + kv_head * T * D, j, T, k_acc * scale, D)
    store_rows(v_grad + kv_head * T * D, j, T, v_acc, D)


@torch.library.custom_op("ropewalk::fire", mutates_args=())
@launched
def _fire(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    last: Tensor,
    kinks: Tensor,
    slopes: Tensor,
    intercepts: Tensor,
    inverse_reach: Tensor,
    c: Tensor,
    sinks: Maybe,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The output [B, H, T, D], and `log_sums`, fp32 [B, H, T]."""
    out, log_sums = _empty_output(q, k, v, first, last, kinks, slopes, intercepts, inverse_reach, c, sinks, scale)
    size = tiles(q.size(3), q.element_size()).forward
    forward_kernel[(triton.cdiv(q.size(2), size.queries), q.size(1), q.size(0))](
        q,
        k,
        v,
        first,
        kinks,
        slopes,
        intercepts,
        inverse_reach,
        c,
        kinks if sinks is None else sinks,
        out,
        log_sums,
        *_sizes(q, first, inverse_reach),
        scale,
        **_flags(q, k, kinks, size),
        HAS_SINKS=sinks is not None,
    )
    return out, log_sums


@_fire.register_fake
def _empty_output(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    last: Tensor,
    kinks: Tensor,
    slopes: Tensor,
    intercepts: Tensor,
    inverse_reach: Tensor,
    c: Tensor,
    sinks: Maybe,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("ropewalk::fire_backward", mutates_args=())
@launched
def _fire_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    last: Tensor,
    kinks: Tensor,
    slopes: Tensor,
    intercepts: Tensor,
    inverse_reach: Tensor,
    c: Tensor,
    scale: float,
    log_sums: Tensor,
    means: Tensor,
    out_grad: Tensor,
) -> list[Tensor]:
    """The gradients of q, k and v; the parts of those of segments, inverse_reach and c; and the exact means.

    The parts are [B, H, blocks of keys, 2, P], [B, H, T] and [B, H, blocks of queries]; what they sum to are gradients.
    """
    inputs = (q, k, v, first, last, kinks, slopes, intercepts, inverse_reach, c)
    grads = _empty_grads(*inputs, scale, log_sums, means, out_grad)
    q_grad, k_grad, v_grad, segments_grad, reach_grad, c_grad, exact_means = grads
    batch, n_head, length, head_dim = q.shape
    sizes = _sizes(q, first, inverse_reach)
    all_tiles = tiles(head_dim, q.element_size())

    # First the gradient of the queries, since it also makes the exact means that the keys need.
    size = all_tiles.of_queries
    queries_kernel[(triton.cdiv(length, size.queries), n_head, batch)](
        q,
        k,
        v,
        first,
        kinks,
        slopes,
        intercepts,
        inverse_reach,
        c,
        log_sums,
        means,
        out_grad,
        q_grad,
        exact_means,
        reach_grad,
        c_grad,
        *sizes,
        scale,
        **_flags(q, k, kinks, size),
    )
    size = all_tiles.of_keys
    keys_kernel[(triton.cdiv(length, size.keys), k.size(1), batch)](
        *inputs,
        log_sums,
        exact_means,
        out_grad,
        k_grad,
        v_grad,
        segments_grad,
        *sizes,
        scale,
        **_flags(q, k, kinks, size),
    )
    return grads


@_fire_backward.register_fake
def _empty_grads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    last: Tensor,
    kinks: Tensor,
    slopes: Tensor,
    intercepts: Tensor,
    inverse_reach: Tensor,
    c: Tensor,
    scale: float,
    log_sums: Tensor,
    means: Tensor,
    out_grad: Tensor,
) -> list[Tensor]:
    """What `_fire_backward` fills and returns."""
    batch, n_head, length, head_dim = q.shape
    size = tiles(head_dim, q.element_size())
    n_key_blocks = triton.cdiv(length, size.of_keys.keys)
    n_query_blocks = triton.cdiv(length, size.of_queries.queries)
    n_places = triton.next_power_of_2(kinks.numel())
    return [
        torch.empty_like(q),
        torch.empty_like(k),
        torch.empty_like(v),
        log_sums.new_empty(batch, n_head, n_key_blocks, 2, n_places),
        torch.empty_like(log_sums),
        log_sums.new_empty(batch, n_head, n_query_blocks),
        torch.empty_like(means),
    ]


def _sizes(q: Tensor, first: Tensor, inverse_reach: Tensor) -> tuple[int, int, int]:
    """T, first_batch and reach_batch of all kernels."""
    return q.size(2), first.ndim - 1, inverse_reach.ndim - 1


def _flags(q: Tensor, k: Tensor, kinks: Tensor, size: Tile) -> dict[str, int]:
    """What a kernel with tiles of this size is compiled for."""
    _, n_head, _, head_dim = q.shape
    n_segments = kinks.numel()
    return {
        "H": n_head,
        "G": n_head // k.size(1),
        "D": head_dim,
        "S": n_segments,
        "P": triton.next_power_of_2(n_segments),
        "BM": size.queries,
        "BN": size.keys,
        "num_warps": size.warps,
        "num_stages": 2,
    }


def _backward(ctx: Any, out_grad: Tensor, _: Tensor) -> tuple[Maybe | float, ...]:
    """Return the gradients of the inputs of `_fire`, None for those without one.

    Args:
        out_grad: of the output, [B, H, T, D]; the logarithms are not differentiated.
    """
    *inputs, sinks, out, log_sums = ctx.saved_tensors
    slopes, inverse_reach = inputs[6], inputs[8]
    out_grad = out_grad.contiguous()
    means = means_of(out, out_grad)  # [B, H, T]
    q_grad, k_grad, v_grad, segments_grad, reach_grad, c_grad, exact_means = torch.ops.ropewalk.fire_backward(
        *inputs, ctx.scale, log_sums, means, out_grad
    )
    sinks_grad = None
    if sinks is not None:
        sinks_grad = grads_of_sinks(sinks, log_sums, exact_means).sum((0, 2))
    slopes_grad, intercepts_grad = segments_grad.sum((0, 2))[..., : slopes.size(1)].unbind(1)  # [H, S] each
    return (
        q_grad,
        k_grad,
        v_grad,
        None,
        None,
        None,
        slopes_grad,
        intercepts_grad,
        reach_grad.sum((0, 1) if inverse_reach.ndim == 1 else 1),
        c_grad.sum().view(1),
        sinks_grad,
        None,
    )


_fire.register_autograd(_backward, setup_context=keep_inputs)


def fire(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    last: Tensor,
    *,
    scale: float,
    kinks: Tensor,
    slopes: Tensor,
    intercepts: Tensor,
    inverse_reach: Tensor,
    c: Tensor,
    sinks: Maybe = None,
) -> Tensor:
    """Softmax attention [B, H, T, D], softmax(scale q.k + bias) v, of as many queries as keys.

    The bias of query i and key j is f(x), x = ln(1 + c (i - j)) inverse_reach[i], of a continuous function f for each
    head that is linear between kinks. x is off by about 2e-7 inverse_reach.

    Gradients of all but q, k and v are sums in fp32, whatever the dtype of q. A score exactly on a kink may count for
    the segment on either side.

    Args:
        q: queries [B, H, T, D], fp32, bf16 or fp16.
        k, v: keys and values [B, Hkv, T, D] of the same dtype; H is a multiple of Hkv.
        first: the first key that each query sees, int32 [T] or [B, T], ascending; the last one is its own.
        last: the last query that sees each key, int32 [T] or [B, T], ascending; the first one is its own.
        kinks: where each of S segments of all f begins, [S], ascending, the first of them 0; it has no gradient.
        slopes, intercepts: of each f in each segment, [H, S].
        inverse_reach: a positive number of each query, [T] or [B, T].
        c: the factor of distances, [1], at least 0.
        sinks: a logit for each head, [H]: see `model.attention.softmax`.
    """
    head_dim = q.size(3)
    q, k, v = padded(q, k, v)
    if sinks is not None:
        sinks = sinks.float()
    numbers = [x.float().contiguous() for x in (kinks, slopes, intercepts, inverse_reach, c)]
    out, _ = _fire(q, k, v, first, last, *numbers, sinks, scale)
    return out[..., :head_dim]


def errors(device: str, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of `fire` and its gradients on a device, against softmax attention in float64.

    One call with everything at once (grouped heads, documents, a window, sinks, and tiles that are not full), and the
    output of one without sinks.
    """
    generator = torch.Generator().manual_seed(0)
    length = 150
    window = 120
    document = torch.zeros(2, length, dtype=torch.int32, device=device)  # the first token of each token's document
    document[1, 40:] = 40
    behind = torch.full_like(document, length)  # the first token behind it
    behind[1, :40] = 40

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device)

    inputs = {name: random(2, heads, length, 64).to(dtype) for name, heads in (("q", 2), ("k", 1), ("v", 1))}
    out_grad = random(2, 2, length, 64).to(dtype)
    kinks = torch.tensor([0.0, *KINKS], device=device)
    slopes = 3 * random(2, kinks.numel())
    # Each segment begins where the one before it ends.
    steps = slopes.diff(dim=1) * kinks[1:]
    intercepts = random(2, 1) - F.pad(steps, (1, 0)).cumsum(1)
    i = torch.arange(length, device=device)
    reach = torch.log1p(C * (i - document).clamp(min=THRESHOLD))
    added = {
        "slopes": slopes,
        "intercepts": intercepts,
        "inverse_reach": 1 / reach,
        "c": torch.tensor([C], device=device),
        "sinks": random(2),
    }
    distance = i[:, None] - i
    unseen = (distance < 0) | (distance >= window) | (i < document[..., None])  # [2, length, length]

    def exact(
        q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, intercepts: Tensor, inverse_reach: Tensor, c: Tensor,
        sinks: Tensor,
    ) -> Tensor:  # fmt: skip
        place = torch.log1p(c * distance.clamp(min=0)) * inverse_reach[..., None]  # [2, length, length]
        segment = torch.searchsorted(kinks[1:].double(), place.detach(), right=True)
        bias = slopes[:, segment] * place + intercepts[:, segment]  # [2 heads, 2 texts, length, length]
        scores = (q @ k.mT / 8 + bias.transpose(0, 1)).masked_fill(unseen[:, None], -torch.inf)
        sink_scores = sinks[:, None, None].expand(2, -1, length, 1)
        return torch.cat((scores, sink_scores), -1).softmax(-1)[..., :-1] @ v

    first, last = seen_range(length, window, device)
    last = last.minimum(behind - 1)
    kernel: Callable[..., Tensor] = partial(fire, first=first.maximum(document), last=last, scale=1 / 8, kinks=kinks)
    relative = relative_errors(kernel, exact, inputs | added, out_grad)

    without_sinks = inputs | {name: x for name, x in added.items() if name != "sinks"}
    out = kernel(**without_sinks)
    in_float64 = {name: x.double() for name, x in without_sinks.items()}
    expected = exact(**in_float64, sinks=torch.full((2,), -torch.inf, device=device))
    relative["out without sinks"] = float((out.double() - expected).norm() / expected.norm())
    return relative
