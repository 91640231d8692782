"""Flash attention in Triton for scores with a bias, for windows, documents and sinks: memory linear in the length.

`model.attention` without it is its specification. The method is that of FlashAttention 2 (arXiv 2307.08691): a program
holds one tile of the scores at a time, and the backward pass computes the tiles again. What is added to a score comes
from a number for each key or for each distance, so one kernel serves all biases of these two forms. A query sees a run
of keys that ends with its own, so two rows of integers describe windows and documents alike. Two more rows describe
runs that end anywhere: the zones of `lab.kernels.zones`.

What the paper calls m, l, L and D is here

    highest     the running maximum of a query's scores
    total       the running sum of exp(score - highest)
    log_sums    the logarithm of the sum of exp(score), which the forward pass keeps for the backward pass
    means       the sum over keys of weight x its gradient, which equals the sum over channels of output x its gradient

Scores and their logarithms are to base 2, for a GPU computes exp2 faster than exp. In the kernels `D` is the number of
channels of a head.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.kernels.ops import (
    LOG2E,
    Maybe,
    add_tile,
    grads_of_sinks,
    high_and_low,
    is_seen,
    keep_inputs,
    launched,
    load_numbers,
    load_rows,
    means_of,
    numbers_of_heads,
    numbers_of_key_heads,
    or_unused,
    padded,
    product,
    product_with_columns,
    relative_errors,
    scores_of,
    store_numbers,
    store_rows,
)
from model.attention import seen_range

EXACT = ("keys", "row", "sinks", "row with gaps")  # of `errors`, what fp32 holds for inputs of 16 bit too


class Tiles(NamedTuple):
    """Sizes of tiles and numbers of warps."""

    queries: int  # of a program of the forward pass
    keys: int  # of a step of its loop
    forward_warps: int
    backward: int  # queries and keys of a tile of the backward pass
    backward_warps: int


def tiles(head_dim: int, element_size: int) -> Tiles:
    """Sizes with which no kernel spills much, and which fit into the shared memory of every GPU from sm_80 on.

    Args:
        head_dim: a power of two up to 256.
        element_size: bytes of an element of q.
    """
    if element_size * head_dim > 512:
        return Tiles(16, 16, 4, 16, 4)
    if element_size == 4 or head_dim > 128:  # fp32 has no matrix units, and its products are unrolled
        return Tiles(32, 32, 4, 32, 4)
    if head_dim > 64:
        return Tiles(64, 64, 4, 64, 8)
    return Tiles(128, 64, 8, 64, 8)


@triton.jit
def newest_keys(newest, i, T, HAS_NEWEST: tl.constexpr):
    """The newest key that each query of i sees, [len(i)]: its own, unless `newest` [T] says otherwise."""
    keys = i
    if HAS_NEWEST:
        keys = tl.load(newest + i, mask=i < T, other=-1)
    return keys


@triton.jit
def load_log_sums(log_sums, i, T, HAS_NEWEST: tl.constexpr):
    """The `log_sums` of the queries i."""
    log_sum = load_numbers(log_sums, i, T)
    if HAS_NEWEST:  # a query that sees no key has -inf, and its scores, -inf too, less -inf would be NaN
        log_sum = tl.where(log_sum == float("-inf"), 0.0, log_sum)
    return log_sum


@triton.jit
def distances_of(pos, i, j, T, HAS_POS: tl.constexpr):
    """The distance of each query of i to each key of j, [len(i), len(j)]; negative in the future."""
    distance = i[:, None] - j[None, :]
    if HAS_POS:
        distance = load_numbers(pos, i, T)[:, None] - load_numbers(pos, j, T)[None, :]
    return distance


@triton.jit
def tile_scores(
    q,
    k,
    i,
    j,
    first,
    newest,
    high,
    low,
    row,
    pos,
    T,
    L,
    scale,
    HAS_KEYS: tl.constexpr,
    HAS_ROW: tl.constexpr,
    HAS_POS: tl.constexpr,
):
    """The scores of the queries i and keys j to base 2, fp32 [len(i), len(j)]; -inf where a key is not seen.

    Args:
        q, k: [len(i), D] and [len(j), D].
        first, newest: the first and the newest key that each query sees, [len(i)] each.
        high, low: what the head adds for a key, [T] each: see `flash`.
        row: what the head adds for a distance, [L].
        pos: positions of the tokens, [T].
    """
    scores = scores_of(q, k, scale)
    if HAS_KEYS:
        # A sum of forget gates may be thousands, and its difference to that of a near key a hundredth. The high parts
        # of near keys subtract without rounding, and the low parts hold what fp32 has left out of them.
        scores += load_numbers(high, j, T)[None, :] - load_numbers(high, i, T)[:, None]
        scores += load_numbers(low, j, T)[None, :] - load_numbers(low, i, T)[:, None]
    if HAS_ROW:
        distance = distances_of(pos, i, j, T, HAS_POS)
        scores += tl.load(row + tl.minimum(tl.maximum(distance, 0), L - 1))
    return tl.where(is_seen(newest, j, first), scores * LOG2E, float("-inf"))


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    first,
    newest,
    high,
    low,
    row,
    pos,
    sinks,
    out,
    log_sums,
    T,
    L,
    keys_batch,
    first_batch,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    HAS_NEWEST: tl.constexpr,
    HAS_KEYS: tl.constexpr,
    HAS_ROW: tl.constexpr,
    HAS_POS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """The output of BM queries of a head, and their `log_sums`. The grid is (blocks of queries, H, B).

    The kernels of the backward pass take the same.

    Args:
        q: queries [B, H, T, D].
        k, v: keys and values [B, H // G, T, D]; G heads of queries share one of keys.
        first: the first key that each query sees, [T] or [B, T].
        newest: the newest key that each query sees, in the shape of `first`.
        high, low: what is added for each key, [B or 1, H, T] each.
        row: what is added for each distance, [H, L].
        pos: positions of the tokens, [T].
        sinks: a logit for each head, [H].
        keys_batch: 1 if each text has its own `high` and `low`; 0 if all share them.
        first_batch: 1 if each text has its own `first` (and `newest`, `last`, `oldest`); 0 if all share them.
        out: result [B, H, T, D].
        log_sums: result [B, H, T].
        HAS_NEWEST: there are `newest` and `oldest`; otherwise a query sees keys up to its own.
        HAS_POS: there is `pos`; otherwise tokens are one apart. It is for `row` alone.
        HAS_KEYS, HAS_ROW, HAS_SINKS: there are `high` and `low`, `row`, `sinks`; otherwise these are never read.
    """
    # A program has a block of queries of one head; `head` and the like say where its numbers begin.
    block = tl.program_id(0)
    b, h, head, kv_head = numbers_of_heads(H, G)
    bias_head = (b * keys_batch * H + h).to(tl.int64)
    k += kv_head * T * D
    v += kv_head * T * D
    first += b * first_batch * T
    newest += b * first_batch * T
    high += bias_head * T
    low += bias_head * T
    row += h * L

    i = block * BM + tl.arange(0, BM)
    q_tile = load_rows(q + head * T * D, i, T, D)
    first_key = tl.load(first + i, mask=i < T, other=T + BN)  # queries beyond the end see no key
    newest_key = newest_keys(newest, i, T, HAS_NEWEST)

    # The softmax of a row over all tiles so far: its highest score, and the sum of 2^(score - highest).
    highest = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    if HAS_SINKS:  # the sum over keys begins with the sink
        highest = tl.zeros([BM], tl.float32) + tl.load(sinks + h) * LOG2E
        total += 1.0

    acc = tl.zeros([BM, D], tl.float32)
    # `first` and `newest` ascend: the first query of the block sees the oldest key, and the last one the newest.
    start = tl.load(first + block * BM) // BN * BN
    stop = tl.minimum((block + 1) * BM, T)
    if HAS_NEWEST:
        stop = tl.load(newest + stop - 1) + 1
    for j0 in range(start, stop, BN):
        j = j0 + tl.arange(0, BN)
        k_tile = load_rows(k, j, T, D)
        v_tile = load_rows(v, j, T, D)
        scores = tile_scores(
            q_tile,
            k_tile,
            i,
            j,
            first_key,
            newest_key,
            high,
            low,
            row,
            pos,
            T,
            L,
            scale,
            HAS_KEYS,
            HAS_ROW,
            HAS_POS,
        )
        highest, total, acc = add_tile(scores, v_tile, highest, total, acc)
    total = tl.where(total == 0.0, 1.0, total)  # queries that see no key, and those beyond the end

    store_rows(out + head * T * D, i, T, acc / total[:, None], D)
    store_numbers(log_sums + head * T, i, T, highest + tl.log2(total))


@triton.jit
def queries_kernel(
    q,
    k,
    v,
    first,
    newest,
    high,
    low,
    row,
    pos,
    log_sums,
    means,
    out_grad,
    q_grad,
    exact_means,
    T,
    L,
    keys_batch,
    first_batch,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    HAS_NEWEST: tl.constexpr,
    HAS_KEYS: tl.constexpr,
    HAS_ROW: tl.constexpr,
    HAS_POS: tl.constexpr,
):
    """The gradient of N queries of a head, and their exact means. The grid is (blocks of queries, H, B).

    `means` come from the output, which may be rounded to 16 bit. That is enough for q. A bias sums up gradients of
    scores that nearly cancel, so `keys_kernel`, which runs after this one, takes the means that are summed here.
    """
    # As in the forward pass: a block of queries of one head.
    block = tl.program_id(0)
    b, h, head, kv_head = numbers_of_heads(H, G)
    bias_head = (b * keys_batch * H + h).to(tl.int64)
    k += kv_head * T * D
    v += kv_head * T * D
    first += b * first_batch * T
    newest += b * first_batch * T
    high += bias_head * T
    low += bias_head * T
    row += h * L

    i = block * N + tl.arange(0, N)
    q_tile = load_rows(q + head * T * D, i, T, D)
    out_grad_tile = load_rows(out_grad + head * T * D, i, T, D)
    first_key = tl.load(first + i, mask=i < T, other=T + N)
    newest_key = newest_keys(newest, i, T, HAS_NEWEST)
    log_sum = load_log_sums(log_sums + head * T, i, T, HAS_NEWEST)
    mean = load_numbers(means + head * T, i, T)

    exact_mean = tl.zeros([N], tl.float32)
    acc = tl.zeros([N, D], tl.float32)
    start = tl.load(first + block * N) // N * N
    stop = tl.minimum((block + 1) * N, T)
    if HAS_NEWEST:
        stop = tl.load(newest + stop - 1) + 1
    for j0 in range(start, stop, N):
        j = j0 + tl.arange(0, N)
        k_tile = load_rows(k, j, T, D)
        v_tile = load_rows(v, j, T, D)
        scores = tile_scores(
            q_tile,
            k_tile,
            i,
            j,
            first_key,
            newest_key,
            high,
            low,
            row,
            pos,
            T,
            L,
            scale,
            HAS_KEYS,
            HAS_ROW,
            HAS_POS,
        )

        # The scores are computed again, and `log_sum` makes weights of them without a second pass over the row.
        weights = tl.exp2(scores - log_sum[:, None])
        weight_grads = scores_of(out_grad_tile, v_tile, 1.0)
        exact_mean += tl.sum(weights * weight_grads, 1)

        # The derivative of the softmax: what the gradient of a weight exceeds the mean by.
        score_grads = weights * (weight_grads - mean[:, None])
        acc += product(score_grads, k_tile)

    store_rows(q_grad + head * T * D, i, T, acc * scale, D)
    store_numbers(exact_means + head * T, i, T, exact_mean)


@triton.jit
def keys_kernel(
    q,
    k,
    v,
    first,
    newest,
    last,
    oldest,
    high,
    low,
    row,
    pos,
    log_sums,
    means,
    out_grad,
    k_grad,
    v_grad,
    keys_grad,
    row_grad,
    T,
    L,
    keys_batch,
    first_batch,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    HAS_NEWEST: tl.constexpr,
    HAS_KEYS: tl.constexpr,
    HAS_ROW: tl.constexpr,
    HAS_POS: tl.constexpr,
):
    """The gradients of N keys and their values, over the G heads that share them, and of what is added to scores.

    The grid is (blocks of keys, H // G, B). One program sums up all that a key gets, so that only `row_grad`, to
    which every program adds, takes atomic additions.

    Args:
        last: the last query that sees each key, in the shape of `first`.
        oldest: the oldest query that sees each key, in the shape of `first`.
    """
    # A program has a block of keys; all heads of queries that share it are summed here.
    block = tl.program_id(0)
    b, group, kv_head = numbers_of_key_heads()
    first += b * first_batch * T
    newest += b * first_batch * T
    last += b * first_batch * T
    oldest += b * first_batch * T
    j = block * N + tl.arange(0, N)
    k_tile = load_rows(k + kv_head * T * D, j, T, D)
    v_tile = load_rows(v + kv_head * T * D, j, T, D)

    k_acc = tl.zeros([N, D], tl.float32)
    v_acc = tl.zeros([N, D], tl.float32)
    # Distances of a tile of queries from i0 on and keys from j0 on are i0 - j0 + m - N and i0 - j0 + m, for m = 0..N-1.
    # Sheared, column m of a tile holds these two alone: `key_at` is the key at that distance, in the row of a query.
    m = tl.arange(0, N)
    key_at = (m[:, None] - m[None, :]) & (N - 1)
    is_nearer = m[:, None] < m[None, :]  # of distance i0 - j0 + m - N
    # `last` and `oldest` ascend: the last key of the block is seen by the latest query, the first one by the oldest.
    stop = tl.load(last + tl.minimum(block * N + N - 1, T - 1)) + 1
    start = block * N
    if HAS_NEWEST:
        start = tl.load(oldest + start) // N * N
    for g in range(G):
        h = group * G + g
        head = (b * H + h).to(tl.int64)
        bias_head = (b * keys_batch * H + h).to(tl.int64)
        key_sums = tl.zeros([N], tl.float32)
        carry = tl.zeros([N], tl.float32)
        for i0 in range(start, stop, N):
            i = i0 + tl.arange(0, N)
            q_tile = load_rows(q + head * T * D, i, T, D)
            out_grad_tile = load_rows(out_grad + head * T * D, i, T, D)
            first_key = tl.load(first + i, mask=i < T, other=T + N)
            newest_key = newest_keys(newest, i, T, HAS_NEWEST)
            log_sum = load_log_sums(log_sums + head * T, i, T, HAS_NEWEST)
            mean = load_numbers(means + head * T, i, T)
            scores = tile_scores(
                q_tile,
                k_tile,
                i,
                j,
                first_key,
                newest_key,
                high + bias_head * T,
                low + bias_head * T,
                row + h * L,
                pos,
                T,
                L,
                scale,
                HAS_KEYS,
                HAS_ROW,
                HAS_POS,
            )

            # Weights and the gradients of scores as in `queries_kernel`, for the columns of these keys.
            weights = tl.exp2(scores - log_sum[:, None])
            v_acc += product_with_columns(weights, out_grad_tile)

            weight_grads = scores_of(out_grad_tile, v_tile, 1.0)
            score_grads = weights * (weight_grads - mean[:, None])
            k_acc += product_with_columns(score_grads, q_tile)
            if HAS_KEYS:
                key_sums += tl.sum(score_grads, 0)
            if HAS_ROW and HAS_POS:
                # With gaps the pairs at one distance lie anywhere in the tile: an addition to memory for each score. It
                # is of 0 where a key is not seen.
                distance = distances_of(pos, i, j, T, HAS_POS)
                tl.atomic_add(
                    row_grad + h * L + distance, score_grads, mask=(distance >= 0) & (distance < L), sem="relaxed"
                )
            elif HAS_ROW:
                # A distance needs the sum along a diagonal. The tile has one half of each of its diagonals and the tile
                # before it, with older queries, the other; so N^2 scores take N additions to memory.
                sheared = tl.gather(score_grads, key_at, 1)
                distances = i0 - block * N - N + m
                nearer = carry + tl.sum(tl.where(is_nearer, sheared, 0.0), 0)
                tl.atomic_add(
                    row_grad + h * L + distances, nearer, mask=(distances >= 0) & (distances < L), sem="relaxed"
                )
                carry = tl.sum(tl.where(is_nearer, 0.0, sheared), 0)
        if HAS_KEYS:
            store_numbers(keys_grad + head * T, j, T, key_sums)
        if HAS_ROW and not HAS_POS:
            distances = (stop - 1 - block * N) // N * N + m
            inside = distances < L
            if HAS_NEWEST:  # keys that no query sees
                inside &= distances >= 0
            tl.atomic_add(row_grad + h * L + distances, carry, mask=inside, sem="relaxed")

    # With `store_rows`, kernels with gaps would spill 1,152 bytes on sm_80, in place of 188.
    channels = tl.arange(0, D)
    places = kv_head * T * D + j[:, None] * D + channels[None, :]
    tl.store(k_grad + places, k_acc * scale, mask=j[:, None] < T)
    tl.store(v_grad + places, v_acc, mask=j[:, None] < T)


@torch.library.custom_op("ropewalk::flash", mutates_args=())
@launched
def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    last: Tensor,
    newest: Maybe,
    oldest: Maybe,
    high: Maybe,
    low: Maybe,
    row: Maybe,
    pos: Maybe,
    sinks: Maybe,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The output [B, H, T, D], and `log_sums`, fp32 [B, H, T]."""
    out, log_sums = _empty_output(q, k, v, first, last, newest, oldest, high, low, row, pos, sinks, scale)
    size = tiles(q.size(3), q.element_size())
    runs, bias, sizes, flags = _arguments(q, k, first, last, newest, oldest, high, low, row, pos)
    grid = (triton.cdiv(q.size(2), size.queries), q.size(1), q.size(0))
    forward_kernel[grid](
        q,
        k,
        v,
        *runs[:2],
        *bias,
        bias[0] if sinks is None else sinks,
        out,
        log_sums,
        *sizes,
        scale,
        **flags,
        BM=size.queries,
        BN=size.keys,
        HAS_SINKS=sinks is not None,
        num_warps=size.forward_warps,
        num_stages=2,
    )
    return out, log_sums


@_flash.register_fake
def _empty_output(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    last: Tensor,
    newest: Maybe,
    oldest: Maybe,
    high: Maybe,
    low: Maybe,
    row: Maybe,
    pos: Maybe,
    sinks: Maybe,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("ropewalk::flash_backward", mutates_args=())
@launched
def _flash_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    last: Tensor,
    newest: Maybe,
    oldest: Maybe,
    high: Maybe,
    low: Maybe,
    row: Maybe,
    pos: Maybe,
    scale: float,
    log_sums: Tensor,
    means: Tensor,
    out_grad: Tensor,
    part: bool,
) -> list[Tensor]:
    """The gradients of q, k, v, keys [B, H, T] (of a key, not yet of its query) and row, and the exact means.

    With `part` the keys are only a part of what the softmax is over, and so are the exact means: `log_sums` and `means`
    are those of the whole.
    """
    grads = _empty_grads(
        q, k, v, first, last, newest, oldest, high, low, row, pos, scale, log_sums, means, out_grad, part
    )
    q_grad, k_grad, v_grad, keys_grad, row_grad, exact_means = grads
    row_grad.zero_()

    size = tiles(q.size(3), q.element_size())
    runs, bias, sizes, flags = _arguments(q, k, first, last, newest, oldest, high, low, row, pos)
    blocks = triton.cdiv(q.size(2), size.backward)
    flags |= {"N": size.backward, "num_warps": size.backward_warps, "num_stages": 2}

    # First the gradient of the queries, since it also makes the exact means that the keys need.
    queries_kernel[(blocks, q.size(1), q.size(0))](
        q, k, v, *runs[:2], *bias, log_sums, means, out_grad, q_grad, exact_means, *sizes, scale, **flags
    )
    keys_kernel[(blocks, k.size(1), q.size(0))](
        q,
        k,
        v,
        *runs,
        *bias,
        log_sums,
        means if part else exact_means,
        out_grad,
        k_grad,
        v_grad,
        keys_grad,
        row_grad,
        *sizes,
        scale,
        **flags,
    )
    return grads


@_flash_backward.register_fake
def _empty_grads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    last: Tensor,
    newest: Maybe,
    oldest: Maybe,
    high: Maybe,
    low: Maybe,
    row: Maybe,
    pos: Maybe,
    scale: float,
    log_sums: Tensor,
    means: Tensor,
    out_grad: Tensor,
    part: bool,
) -> list[Tensor]:
    """What `_flash_backward` fills and returns."""
    keys_grad = torch.empty_like(log_sums)
    row_grad = q.new_empty(1, 1, dtype=torch.float32) if row is None else torch.empty_like(row)
    return [torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), keys_grad, row_grad, torch.empty_like(means)]


def _arguments(
    q: Tensor,
    k: Tensor,
    first: Tensor,
    last: Tensor,
    newest: Maybe,
    oldest: Maybe,
    high: Maybe,
    low: Maybe,
    row: Maybe,
    pos: Maybe,
) -> tuple[list[Tensor], list[Tensor], tuple[int, int, int, int], dict[str, int]]:
    """What all kernels take: the runs of keys and of queries; high, low, row and pos; sizes; and flags.

    The runs are first, newest, last and oldest; the sizes T, L, keys_batch and first_batch; the flags say what the
    kernels are compiled for.
    """
    _, n_head, length, head_dim = q.shape
    unused = q.new_empty(1, 1, dtype=torch.float32)
    bias = [or_unused(x, unused) for x in (high, low, row)]
    n_distances = bias[2].size(1)
    bias.append(or_unused(pos, first))
    runs = [first, or_unused(newest, first), last, or_unused(oldest, last)]
    keys_batch = int(high is not None and high.size(0) > 1)
    flags = {
        "H": n_head,
        "G": n_head // k.size(1),
        "D": head_dim,
        "HAS_NEWEST": newest is not None,
        "HAS_KEYS": high is not None,
        "HAS_ROW": row is not None,
        "HAS_POS": pos is not None,
    }
    return runs, bias, (length, n_distances, keys_batch, first.ndim - 1), flags


def _backward(ctx: Any, out_grad: Tensor, _: Tensor) -> tuple[Maybe | float, ...]:
    """Return the gradients of the inputs of `_flash`, None for those without one.

    Args:
        out_grad: of the output, [B, H, T, D]; the logarithms are not differentiated.
    """
    q, k, v, first, last, newest, oldest, high, low, row, pos, sinks, out, log_sums = ctx.saved_tensors
    out_grad = out_grad.contiguous()
    means = means_of(out, out_grad)  # [B, H, T]
    q_grad, k_grad, v_grad, keys_grad, row_grad, exact_means = torch.ops.ropewalk.flash_backward(
        q, k, v, first, last, newest, oldest, high, low, row, pos, ctx.scale, log_sums, means, out_grad, False
    )
    sinks_grad = None
    if sinks is not None:
        # So the gradients of a query's other scores do not sum to zero, and what is subtracted from all of them,
        # keys[i], has a gradient too.
        sink_score_grads = grads_of_sinks(sinks, log_sums, exact_means)  # [B, H, T]
        sinks_grad = sink_score_grads.sum((0, 2))
        keys_grad = keys_grad + sink_score_grads
    return (
        q_grad,
        k_grad,
        v_grad,
        None,
        None,
        None,
        None,
        None if high is None else keys_grad.sum_to_size(high.shape),
        None,
        None if row is None else row_grad,
        None,
        sinks_grad,
        None,
    )


_flash.register_autograd(_backward, setup_context=keep_inputs)


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    last: Tensor,
    *,
    scale: float,
    newest: Maybe = None,
    oldest: Maybe = None,
    keys: Maybe = None,
    row: Maybe = None,
    pos: Maybe = None,
    sinks: Maybe = None,
) -> Tensor:
    """Softmax attention [B, H, T, D], softmax(scale q.k + bias) v, of as many queries as keys.

    Gradients of `keys`, `row` and `sinks` are sums in fp32, whatever the dtype of q. That of `row` is summed in any
    order. With `pos` it takes an addition to memory for each score, which is slower than one for each diagonal of a
    tile.

    Args:
        q: queries [B, H, T, D], fp32, bf16 or fp16.
        k, v: keys and values [B, Hkv, T, D] of the same dtype; H is a multiple of Hkv.
        first: the first key that each query sees, int32 [T] or [B, T], ascending.
        last: the last query that sees each key, int32 [T] or [B, T], ascending.
        newest: the newest key that each query sees, as `first`; None: its own. It may be less than `first`: then the
            query sees no key, and its output is 0.
        oldest: the oldest query that sees each key, as `last`, T if there is none; needed with `newest`.
        keys: a number of each key; that of key j less that of query i is added to their score: [B or 1, H, T], fp32 or
            better.
        row: a number of each distance from 0 on, added to the scores: fp32 [H, L], L more than any distance.
        pos: positions of the tokens, int32 [T], ascending, if they are not one apart; for `row` alone.
        sinks: a logit for each head, [H]: see `model.attention.softmax`.
    """
    head_dim = q.size(3)
    q, k, v = padded(q, k, v)
    high, low = (None, None) if keys is None else high_and_low(keys)
    if row is not None:
        row = row.float().contiguous()
    if sinks is not None:
        sinks = sinks.float()
    out, _ = _flash(q, k, v, first, last, newest, oldest, high, low, row, pos, sinks, scale)
    return out[..., :head_dim]


def errors(device: str, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of `flash` and its gradients on a device, against softmax attention in float64.

    Three calls: one with everything at once (grouped heads, documents, a window, both biases, sinks, and tiles that are
    not full), one of q, k and v alone, and one of distances with gaps. `lab.kernels.zones` checks the runs of zones.
    """
    generator = torch.Generator().manual_seed(0)
    length = 150
    window = 70
    document = torch.zeros(2, length, dtype=torch.int32, device=device)  # the first token of each token's document
    document[1, 90:] = 90
    behind = torch.full_like(document, length)  # the first token behind it
    behind[1, :90] = 90

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device)

    inputs = {name: random(2, heads, length, 64).to(dtype) for name, heads in (("q", 2), ("k", 1), ("v", 1))}
    # `keys` fall or rise by much along the text, as the sums of forget gates do.
    added = {"keys": random(2, 2, length).double().cumsum(2), "row": random(2, length), "sinks": random(2)}
    out_grad = random(2, 2, length, 64).to(dtype)
    i = torch.arange(length, device=device)
    distance = i[:, None] - i

    def exact(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, row: Tensor, sinks: Tensor) -> Tensor:
        scores = q @ k.mT / 8 + keys[:, :, None] - keys[..., None]
        scores = scores + row[:, distance.clamp(min=0)]
        unseen = (distance < 0) | (distance >= window) | (i < document[..., None])  # [2, length, length]
        scores = scores.masked_fill(unseen[:, None], -torch.inf)
        sink_scores = sinks[:, None, None].expand(2, -1, length, 1)
        return torch.cat((scores, sink_scores), -1).softmax(-1)[..., :-1] @ v

    def kernel(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, row: Tensor, sinks: Tensor) -> Tensor:
        first, last = seen_range(length, window, device)
        first, last = first.maximum(document), last.minimum(behind - 1)
        return flash(q, k, v, first, last, scale=1 / 8, keys=keys, row=row, sinks=sinks)

    def exact_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / 8).masked_fill(distance < 0, -torch.inf).softmax(-1) @ v

    def kernel_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash(q, k, v, *seen_range(length, None, device), scale=1 / 8)

    short = 70  # tokens of a text with gaps, which become longer
    pos = (i + i**2 // 70)[:short].int()
    with_gaps = {name: x[:1, :, :short] for name, x in inputs.items()} | {"row": added["row"]}

    def exact_with_gaps(q: Tensor, k: Tensor, v: Tensor, row: Tensor) -> Tensor:
        gaps = pos[:, None] - pos
        scores = q @ k.mT / 8 + row[:, gaps.clamp(min=0)]
        return scores.masked_fill(distance[:short, :short] < 0, -torch.inf).softmax(-1) @ v

    def kernel_with_gaps(q: Tensor, k: Tensor, v: Tensor, row: Tensor) -> Tensor:
        return flash(q, k, v, *seen_range(short, None, device), scale=1 / 8, row=row, pos=pos)

    relative = relative_errors(kernel, exact, inputs | added, out_grad)
    for name, error in relative_errors(kernel_alone, exact_alone, inputs, out_grad).items():
        relative[f"{name} with nothing added"] = error
    short_grad = out_grad[:1, :, :short]
    for name, error in relative_errors(kernel_with_gaps, exact_with_gaps, with_gaps, short_grad).items():
        relative[f"{name} with gaps"] = error
    return relative
