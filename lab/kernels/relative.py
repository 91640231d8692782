"""Attention with relative embeddings in Triton, forward and backward: memory linear in the length.

`Relative` and `Profiles` of `model.position.relative`, computed in blocks of queries, are its specification; method and
names are those of `lab.kernels.flash`. Each distance has an embedding, a row of the bank. A query is multiplied by
the embedding of each key's distance as by the key, and both products are added. The last row is that of all longer
distances.

Tiles are squares of N queries and N keys, and their distances are those of two blocks of N rows of the bank. With the
keys b tiles before the queries, query m and key n of the tile are b N + m - n apart. That is in block b of the bank
where m >= n, and in block b - 1 where m < n. So the products of queries and one block of the bank, each row of them
turned by (m - n) mod N, are the terms of two tiles: of one below the diagonal, of the other above it. From old keys to
new ones a tile takes one such product, and programs carry

    terms           of the queries and block b of the bank, turned, [N, N]
    older_grads     the gradients of the scores of the tile before, turned back: block b has its half of them too

Over the queries of a tile of keys nothing can be carried, and a tile takes two products.

Tiles whose distances are all beyond the bank are the far ones. There a query has one term for all keys, its product
with the last row, and the gradient of this term is a sum. So a short bank costs little in a long text. The rest are the
near tiles. In the kernels `L` is the number of rows of the bank, and `R` that of its channels.
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
    gradients_of,
    grads_of_sinks,
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

# Of `errors`, what fp32 holds for inputs of 16 bit too. What the bank gets is summed in fp32, but of rounded numbers.
EXACT = ("sinks with few embeddings", "sinks with queries of their own")


class Tiles(NamedTuple):
    """Sizes of the square tiles, and numbers of warps."""

    forward: int
    forward_warps: int
    backward: int
    backward_warps: int


def tiles(width: int, element_size: int) -> Tiles:
    """Sizes with which no kernel spills much, and which fit into the shared memory of every GPU from sm_80 on.

    Args:
        width: channels of a head or of the bank, whichever are more: a power of two up to 256.
        element_size: bytes of an element of q.
    """
    if element_size * width > 256:
        return Tiles(16, 4, 16, 4)
    if element_size == 4:  # fp32 has no matrix units, and its products are unrolled
        return Tiles(32, 4, 32, 4)
    if width > 64:
        return Tiles(64, 8, 32, 8)
    return Tiles(64, 4, 64, 8)


@triton.jit
def load_block(bank, block, L, R: tl.constexpr, N: tl.constexpr):
    """The rows of the bank for the distances from block * N on, [N, R]; beyond it all are the last one."""
    rows = block * N + tl.arange(0, N)
    rows = tl.minimum(tl.maximum(rows, 0), L - 1)  # none is negative for a key that is seen
    channels = tl.arange(0, R)
    return tl.load(bank + rows[:, None] * R + channels[None, :])


@triton.jit
def turned(x, N: tl.constexpr):
    """Move column c of row m of x [N, N] to column (m - c) mod N; done twice, it is x again."""
    m = tl.arange(0, N)
    return tl.gather(x, (m[:, None] - m[None, :]) & (N - 1), 1)


@triton.jit
def is_lower(N: tl.constexpr):
    """Where a tile has block b of the bank, and not b - 1; before it is turned and after, [N, N]."""
    m = tl.arange(0, N)
    return m[:, None] >= m[None, :]


@triton.jit
def first_near(oldest, block, L, N: tl.constexpr, CAPPED: tl.constexpr):
    """The oldest near tile of keys for a block of queries that sees tiles from `oldest` on."""
    if CAPPED:
        oldest = tl.maximum(oldest, block - last_near(L, N))
    return oldest


@triton.jit
def last_near(L, N: tl.constexpr):
    """How many tiles away the farthest near tile is. A tile b away has distances from (b - 1) N + 1 on."""
    return tl.cdiv(tl.maximum(L - 2, 0), N)


@triton.jit
def product_with_last(q_tile, bank, L, R: tl.constexpr):
    """The product of each query, [N, R], with the last row of the bank, fp32 [N]."""
    last_row = tl.load(bank + (L - 1) * R + tl.arange(0, R)).to(tl.float32)
    return tl.sum(q_tile.to(tl.float32) * last_row[None, :], 1)


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    position_q,
    bank,
    first,
    sinks,
    out,
    log_sums,
    T,
    L,
    first_batch,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_POSITION_Q: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """The output of N queries of a head, and their `log_sums`. The grid is (blocks of queries, H, B).

    The kernels of the backward pass take the same.

    Args:
        q: queries [B, H, T, D].
        k, v: keys and values [B, H // G, T, D]; G heads of queries share one of keys.
        position_q: what is multiplied by the bank, if it is not `scale` q, [B, H, T, R].
        bank: the embedding of each distance, [L, R].
        first: the first key that each query sees, [T] or [B, T]; the last one is its own.
        sinks: a logit for each head, [H].
        out: result [B, H, T, D].
        log_sums: result [B, H, T].
        first_batch: 1 if each text has its own `first` (and `last`); 0 if all share them.
        CAPPED: there may be distances beyond the bank, T > L.
        HAS_POSITION_Q, HAS_SINKS: there are `position_q`, `sinks`; otherwise these are never touched.
    """
    # A program has a block of queries of one head; `head` and the like say where its numbers begin.
    block = tl.program_id(0)
    b, h, head, kv_head = numbers_of_heads(H, G)
    k += kv_head * T * D
    v += kv_head * T * D
    first += b * first_batch * T

    i = block * N + tl.arange(0, N)
    q_tile = load_rows(q + head * T * D, i, T, D)
    position_tile = q_tile
    position_scale = scale
    if HAS_POSITION_Q:
        position_tile = load_rows(position_q + head * T * R, i, T, R)
        position_scale = 1.0
    first_key = tl.load(first + i, mask=i < T, other=T + N)  # queries beyond the end see no key

    highest = tl.full([N], float("-inf"), tl.float32)
    total = tl.zeros([N], tl.float32)
    if HAS_SINKS:  # the sum over keys begins with the sink
        highest = tl.zeros([N], tl.float32) + tl.load(sinks + h) * LOG2E
        total += 1.0
    acc = tl.zeros([N, D], tl.float32)

    # Far tiles: all their keys have the same term.
    oldest = tl.load(first + block * N) // N  # `first` ascends: the first query of the block sees the oldest key
    near = first_near(oldest, block, L, N, CAPPED)
    if CAPPED:
        last_term = product_with_last(position_tile, bank, L, R) * position_scale
        for tile in range(oldest, near):
            j = tile * N + tl.arange(0, N)
            k_tile = load_rows(k, j, T, D)
            v_tile = load_rows(v, j, T, D)
            scores = scores_of(q_tile, k_tile, scale) + last_term[:, None]
            scores = tl.where(is_seen(i, j, first_key), scores * LOG2E, float("-inf"))
            highest, total, acc = add_tile(scores, v_tile, highest, total, acc)

    # Near tiles, up to the queries' own.
    terms = turned(scores_of(position_tile, load_block(bank, block - near, L, R, N), position_scale), N)
    for tile in range(near, block + 1):
        j = tile * N + tl.arange(0, N)
        k_tile = load_rows(k, j, T, D)
        v_tile = load_rows(v, j, T, D)
        nearer_terms = turned(scores_of(position_tile, load_block(bank, block - tile - 1, L, R, N), position_scale), N)
        scores = scores_of(q_tile, k_tile, scale) + tl.where(is_lower(N), terms, nearer_terms)
        scores = tl.where(is_seen(i, j, first_key), scores * LOG2E, float("-inf"))
        highest, total, acc = add_tile(scores, v_tile, highest, total, acc)
        terms = nearer_terms

    total = tl.where(total == 0.0, 1.0, total)  # queries beyond the end
    store_rows(out + head * T * D, i, T, acc / total[:, None], D)
    store_numbers(log_sums + head * T, i, T, highest + tl.log2(total))


@triton.jit
def queries_kernel(
    q,
    k,
    v,
    position_q,
    bank,
    first,
    log_sums,
    means,
    out_grad,
    q_grad,
    position_grad,
    bank_sums,
    exact_means,
    last_terms,
    T,
    L,
    first_batch,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_POSITION_Q: tl.constexpr,
):
    """The gradients of N queries of a head, and what they give to that of the bank.

    The grid is (blocks of queries, H, B). All programs add to the gradient of the bank, N R numbers for N^2 scores,
    with atomic additions.

    Args:
        means: of the output, which may be rounded to 16 bit.
        position_grad: result if there is `position_q`, [B, H, T, R].
        bank_sums: result, zeros before, fp32 [L, R]; where `CAPPED` [(last_near + 1) N, R], where the rows from L - 1
            on are to be added up.
        exact_means: result, the means summed in fp32, as in `lab.kernels.flash`.
        last_terms: result for `keys_kernel` where `CAPPED`, what the last row of the bank adds to the scores of each
            query, fp32 [B, H, T].
    """
    # As in the forward pass: a block of queries of one head.
    block = tl.program_id(0)
    b, _h, head, kv_head = numbers_of_heads(H, G)
    k += kv_head * T * D
    v += kv_head * T * D
    first += b * first_batch * T

    i = block * N + tl.arange(0, N)
    r = tl.arange(0, R)
    q_tile = load_rows(q + head * T * D, i, T, D)
    out_grad_tile = load_rows(out_grad + head * T * D, i, T, D)
    position_tile = q_tile
    position_scale = scale
    acc = tl.zeros([N, D], tl.float32)
    if HAS_POSITION_Q:
        position_tile = load_rows(position_q + head * T * R, i, T, R)
        position_scale = 1.0
        position_acc = tl.zeros([N, R], tl.float32)
    first_key = tl.load(first + i, mask=i < T, other=T + N)
    log_sum = load_numbers(log_sums + head * T, i, T)
    mean = load_numbers(means + head * T, i, T)
    exact_mean = tl.zeros([N], tl.float32)

    # Far tiles. The gradient of their term is the sum of those of many scores, weight x (its gradient - mean). These
    # nearly cancel, while errors of a rounded mean add up. So the weights of all keys with the last row are summed too:
    # at the end their sum tells what the gradient was off by.
    oldest = tl.load(first + block * N) // N
    near = first_near(oldest, block, L, N, CAPPED)
    if CAPPED:
        last_term = product_with_last(position_tile, bank, L, R) * position_scale
        store_numbers(last_terms + head * T, i, T, last_term)
        far_weight = tl.zeros([N], tl.float32)
        far_sum = tl.zeros([N], tl.float32)
        for tile in range(oldest, near):
            j = tile * N + tl.arange(0, N)
            k_tile = load_rows(k, j, T, D)
            v_tile = load_rows(v, j, T, D)
            scores = scores_of(q_tile, k_tile, scale) + last_term[:, None]
            weight_grads = scores_of(out_grad_tile, v_tile, 1.0)
            weights, score_grads = gradients_of(scores, is_seen(i, j, first_key), log_sum, weight_grads, mean)
            exact_mean += tl.sum(weights * weight_grads, 1)
            far_weight += tl.sum(weights, 1)
            far_sum += tl.sum(score_grads, 1)
            acc += product(score_grads, k_tile)

    # Near tiles. What is added to the scores of a tile is made at the end of the one before: a tile of keys, which
    # is needed twice, would else be kept in registers over the turn. Where there are few, no loads are made in advance.
    terms = turned(scores_of(position_tile, load_block(bank, block - near, L, R, N), position_scale), N)
    nearer_terms = turned(scores_of(position_tile, load_block(bank, block - near - 1, L, R, N), position_scale), N)
    added = tl.where(is_lower(N), terms, nearer_terms)
    older_grads = tl.zeros([N, N], q_tile.dtype)
    for tile in tl.range(near, block + 1, num_stages=1 if CAPPED else 2):
        j = tile * N + tl.arange(0, N)
        k_tile = load_rows(k, j, T, D)
        v_tile = load_rows(v, j, T, D)
        scores = scores_of(q_tile, k_tile, scale) + added
        weight_grads = scores_of(out_grad_tile, v_tile, 1.0)
        weights, score_grads = gradients_of(scores, is_seen(i, j, first_key), log_sum, weight_grads, mean)
        exact_mean += tl.sum(weights * weight_grads, 1)
        acc += product(score_grads, k_tile)
        if CAPPED:  # keys with the last row of the bank
            is_far = i[:, None] - j[None, :] >= L - 1
            far_weight += tl.sum(tl.where(is_far, weights, 0.0), 1)

        # With its half of this tile, the gradient of block b of the bank is whole for these queries.
        grads = turned(score_grads.to(q_tile.dtype), N)
        term_grads = tl.where(is_lower(N), grads, older_grads)
        older_grads = grads
        bank_tile = load_block(bank, block - tile, L, R, N)
        if HAS_POSITION_Q:
            position_acc += product(term_grads, bank_tile)
        else:
            acc += product(term_grads, bank_tile)
        bank_grad = product_with_columns(term_grads, position_tile) * position_scale
        distance = (block - tile) * N + tl.arange(0, N)
        places = bank_sums + distance[:, None] * R + r[None, :]
        tl.atomic_add(places, bank_grad, mask=(distance[:, None] < L) | CAPPED, sem="relaxed")

        next_terms = turned(scores_of(position_tile, load_block(bank, block - tile - 2, L, R, N), position_scale), N)
        added = tl.where(is_lower(N), nearer_terms, next_terms)
        nearer_terms = next_terms

    if CAPPED:
        far_grad = far_sum + (mean - exact_mean) * far_weight
        last_row = tl.load(bank + (L - 1) * R + r).to(tl.float32)
        far_grads = far_grad[:, None] * last_row[None, :]  # [N, R]
        if HAS_POSITION_Q:
            position_acc += far_grads
        else:
            acc += far_grads
        last_row_grad = tl.sum(far_grad[:, None] * position_tile.to(tl.float32), 0) * position_scale
        tl.atomic_add(bank_sums + (L - 1) * R + r, last_row_grad, sem="relaxed")

    store_rows(q_grad + head * T * D, i, T, acc * scale, D)
    if HAS_POSITION_Q:
        store_rows(position_grad + head * T * R, i, T, position_acc, R)
    store_numbers(exact_means + head * T, i, T, exact_mean)


@triton.jit
def keys_kernel(
    q,
    k,
    v,
    position_q,
    bank,
    first,
    last,
    log_sums,
    means,
    out_grad,
    k_grad,
    v_grad,
    last_terms,
    T,
    L,
    first_batch,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_POSITION_Q: tl.constexpr,
):
    """The gradients of N keys and their values, over the G heads that share them.

    The grid is (blocks of keys, H // G, B).

    Args:
        means: the exact ones, of `queries_kernel`, which runs before.
        last_terms: of `queries_kernel` too.
    """
    # A program has a block of keys; all heads of queries that share it are summed here.
    block = tl.program_id(0)
    b, group, kv_head = numbers_of_key_heads()
    first += b * first_batch * T
    last += b * first_batch * T
    j = block * N + tl.arange(0, N)
    k_tile = load_rows(k + kv_head * T * D, j, T, D)
    v_tile = load_rows(v + kv_head * T * D, j, T, D)

    k_acc = tl.zeros([N, D], tl.float32)
    v_acc = tl.zeros([N, D], tl.float32)
    # `last` ascends: the last key of the block is seen by the latest query.
    stop = tl.load(last + tl.minimum(block * N + N - 1, T - 1)) // N + 1
    near_stop = stop
    if CAPPED:
        near_stop = tl.minimum(stop, block + last_near(L, N) + 1)
    for g in range(G):
        h = group * G + g
        head = (b * H + h).to(tl.int64)
        for tile in range(block, near_stop):
            i = tile * N + tl.arange(0, N)
            q_tile = load_rows(q + head * T * D, i, T, D)
            out_grad_tile = load_rows(out_grad + head * T * D, i, T, D)
            first_key = tl.load(first + i, mask=i < T, other=T + N)
            log_sum = load_numbers(log_sums + head * T, i, T)
            mean = load_numbers(means + head * T, i, T)
            position_tile = q_tile
            position_scale = scale
            if HAS_POSITION_Q:
                position_tile = load_rows(position_q + head * T * R, i, T, R)
                position_scale = 1.0
            terms = scores_of(position_tile, load_block(bank, tile - block, L, R, N), position_scale)
            nearer_terms = scores_of(position_tile, load_block(bank, tile - block - 1, L, R, N), position_scale)
            scores = scores_of(q_tile, k_tile, scale) + turned(tl.where(is_lower(N), terms, nearer_terms), N)
            weight_grads = scores_of(out_grad_tile, v_tile, 1.0)
            weights, score_grads = gradients_of(scores, is_seen(i, j, first_key), log_sum, weight_grads, mean)
            v_acc += product_with_columns(weights, out_grad_tile)
            k_acc += product_with_columns(score_grads, q_tile)
        if CAPPED:
            for tile in range(near_stop, stop):
                i = tile * N + tl.arange(0, N)
                q_tile = load_rows(q + head * T * D, i, T, D)
                out_grad_tile = load_rows(out_grad + head * T * D, i, T, D)
                first_key = tl.load(first + i, mask=i < T, other=T + N)
                log_sum = load_numbers(log_sums + head * T, i, T)
                mean = load_numbers(means + head * T, i, T)
                last_term = load_numbers(last_terms + head * T, i, T)
                scores = scores_of(q_tile, k_tile, scale) + last_term[:, None]
                weight_grads = scores_of(out_grad_tile, v_tile, 1.0)
                weights, score_grads = gradients_of(scores, is_seen(i, j, first_key), log_sum, weight_grads, mean)
                v_acc += product_with_columns(weights, out_grad_tile)
                k_acc += product_with_columns(score_grads, q_tile)

    store_rows(k_grad + kv_head * T * D, j, T, k_acc * scale, D)
    store_rows(v_grad + kv_head * T * D, j, T, v_acc, D)


@torch.library.custom_op("ropewalk::relative", mutates_args=())
@launched
def _relative(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_q: Maybe,
    bank: Tensor,
    first: Tensor,
    last: Tensor,
    sinks: Maybe,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The output [B, H, T, D], and `log_sums`, fp32 [B, H, T]."""
    out, log_sums = _empty_output(q, k, v, position_q, bank, first, last, sinks, scale)
    size = tiles(max(q.size(3), bank.size(1)), q.element_size())
    grid = (triton.cdiv(q.size(2), size.forward), q.size(1), q.size(0))
    forward_kernel[grid](
        q,
        k,
        v,
        or_unused(position_q, q),
        bank.to(q.dtype),
        first,
        log_sums if sinks is None else sinks,
        out,
        log_sums,
        *_sizes(q, bank, first),
        scale,
        **_flags(q, k, position_q, bank),
        N=size.forward,
        HAS_SINKS=sinks is not None,
        num_warps=size.forward_warps,
        num_stages=2,
    )
    return out, log_sums


@_relative.register_fake
def _empty_output(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_q: Maybe,
    bank: Tensor,
    first: Tensor,
    last: Tensor,
    sinks: Maybe,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("ropewalk::relative_backward", mutates_args=())
@launched
def _relative_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_q: Maybe,
    bank: Tensor,
    first: Tensor,
    last: Tensor,
    scale: float,
    log_sums: Tensor,
    means: Tensor,
    out_grad: Tensor,
) -> list[Tensor]:
    """The gradients of q, k, v, position_q (empty without it) and the bank, and the exact means."""
    q_grad, k_grad, v_grad = (torch.empty_like(x) for x in (q, k, v))
    position_grad = q.new_empty(0) if position_q is None else torch.empty_like(position_q)
    exact_means = torch.empty_like(means)
    last_terms = torch.empty_like(means)

    size = tiles(max(q.size(3), bank.size(1)), q.element_size())
    blocks = triton.cdiv(q.size(2), size.backward)
    inputs = (q, k, v, or_unused(position_q, q), bank.to(q.dtype), first)
    sizes = (*_sizes(q, bank, first), scale)
    flags = _flags(q, k, position_q, bank)
    flags |= {"N": size.backward, "num_warps": size.backward_warps, "num_stages": 2}

    n_rows = bank.size(0)
    if flags["CAPPED"]:  # whole blocks, so that many rows stand for the last one, and additions to it do not wait
        n_rows = (triton.cdiv(max(n_rows - 2, 0), size.backward) + 1) * size.backward
    bank_sums = torch.zeros((n_rows, bank.size(1)), dtype=torch.float32, device=q.device)

    # First the gradient of the queries, since it also makes the exact means that the keys need.
    queries_kernel[(blocks, q.size(1), q.size(0))](
        *inputs,
        log_sums,
        means,
        out_grad,
        q_grad,
        position_grad,
        bank_sums,
        exact_means,
        last_terms,
        *sizes,
        **flags,
    )
    keys_kernel[(blocks, k.size(1), q.size(0))](
        *inputs, last, log_sums, exact_means, out_grad, k_grad, v_grad, last_terms, *sizes, **flags
    )
    bank_grad = bank_sums[: bank.size(0)]
    if flags["CAPPED"]:
        bank_grad[-1] += bank_sums[bank.size(0) :].sum(0)
    return [q_grad, k_grad, v_grad, position_grad, bank_grad, exact_means]


@_relative_backward.register_fake
def _empty_grads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_q: Maybe,
    bank: Tensor,
    first: Tensor,
    last: Tensor,
    scale: float,
    log_sums: Tensor,
    means: Tensor,
    out_grad: Tensor,
) -> list[Tensor]:
    position_grad = q.new_empty(0) if position_q is None else torch.empty_like(position_q)
    return [*(torch.empty_like(x) for x in (q, k, v)), position_grad, torch.empty_like(bank), torch.empty_like(means)]


def _sizes(q: Tensor, bank: Tensor, first: Tensor) -> tuple[int, int, int]:
    """T, L and first_batch, which all kernels take."""
    return q.size(2), bank.size(0), first.ndim - 1


def _flags(q: Tensor, k: Tensor, position_q: Maybe, bank: Tensor) -> dict[str, int]:
    """What all kernels are compiled for."""
    _, n_head, length, head_dim = q.shape
    return {
        "H": n_head,
        "G": n_head // k.size(1),
        "D": head_dim,
        "R": bank.size(1),
        "CAPPED": length > bank.size(0),
        "HAS_POSITION_Q": position_q is not None,
    }


def _backward(ctx: Any, out_grad: Tensor, _: Tensor) -> tuple[Maybe, ...]:
    """Return the gradients of the inputs of `_relative`, None for those without one.

    Args:
        out_grad: of the output, [B, H, T, D]; the logarithms are not differentiated.
    """
    *inputs, sinks, out, log_sums = ctx.saved_tensors
    out_grad = out_grad.contiguous()
    means = means_of(out, out_grad)  # [B, H, T]
    q_grad, k_grad, v_grad, position_grad, bank_grad, exact_means = torch.ops.ropewalk.relative_backward(
        *inputs, ctx.scale, log_sums, means, out_grad
    )
    has_position_q = inputs[3] is not None
    sinks_grad = None
    if sinks is not None:
        sinks_grad = grads_of_sinks(sinks, log_sums, exact_means).sum((0, 2))
    return q_grad, k_grad, v_grad, position_grad if has_position_q else None, bank_grad, None, None, sinks_grad, None


_relative.register_autograd(_backward, setup_context=keep_inputs)


def relative(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bank: Tensor,
    first: Tensor,
    last: Tensor,
    *,
    scale: float,
    position_q: Maybe = None,
    sinks: Maybe = None,
) -> Tensor:
    """Softmax attention with relative embeddings [B, H, T, D], of as many queries as keys.

    The score of query i and key j is scale q_i.(k_j + bank[d]); with `position_q` scale q_i.k_j + position_q_i.bank[d].
    The distance d is i - j, at most L - 1. The bank is rounded to the dtype of q for products; its gradient is a sum in
    fp32, in any order.

    Args:
        q: queries [B, H, T, D], fp32, bf16 or fp16.
        k, v: keys and values [B, Hkv, T, D] of the same dtype; H is a multiple of Hkv.
        bank: a row for each distance from 0 on, [L, R]; R is D without `position_q`.
        first: the first key that each query sees, int32 [T] or [B, T], ascending; the last one is its own.
        last: the last query that sees each key, int32 [T] or [B, T], ascending; the first one is its own.
        position_q: what is multiplied by the bank instead of scale q, [B, H, T, R].
        sinks: a logit for each head, [H]: see `model.attention.softmax`.
    """
    head_dim = q.size(3)
    (bank,) = padded(bank.float())
    if position_q is not None:
        (position_q,) = padded(position_q.to(q.dtype))
    if sinks is not None:
        sinks = sinks.float()
    q, k, v = padded(q, k, v)
    out, _ = _relative(q, k, v, position_q, bank, first, last, sinks, scale)
    return out[..., :head_dim]


def errors(device: str, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of `relative` and its gradients on a device, against softmax attention in float64.

    Three calls, as the encodings make them: with an embedding for every distance, with few of them, and with few and
    queries of their own; these also have grouped heads, a window and sinks, and tiles that are not full.
    """
    length = 140  # three tiles, the last one not full
    i = torch.arange(length, device=device)
    distance = i[:, None] - i
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device)

    inputs = {name: random(1, heads, length, 64).to(dtype) for name, heads in (("q", 2), ("k", 1), ("v", 1))}
    out_grad = random(1, 2, length, 64).to(dtype)
    # Only what the kernels compute is checked here, not what rounding the bank loses.
    every = {"bank": random(length, 64).to(dtype).float()}
    few = {"bank": random(20, 64).to(dtype).float(), "sinks": random(2)}
    own = {
        "bank": random(20, 16).to(dtype).float(),
        "sinks": random(2),
        "position_q": random(1, 2, length, 16).to(dtype),
    }

    def of_window(window: int | None) -> tuple[Any, Any]:
        """The kernel and what it should compute, with a window."""
        first, last = seen_range(length, window, device)
        unseen = (distance < 0) | (i < first[:, None])

        def kernel(q: Tensor, k: Tensor, v: Tensor, bank: Tensor, **options: Tensor) -> Tensor:
            return relative(q, k, v, bank, first, last, scale=1 / 8, **options)

        def exact(
            q: Tensor, k: Tensor, v: Tensor, bank: Tensor, sinks: Maybe = None, position_q: Maybe = None
        ) -> Tensor:
            terms = (q / 8 if position_q is None else position_q) @ bank.mT  # [1, 2, length, L]
            place = distance.clamp(0, bank.size(0) - 1).expand(1, 2, -1, -1)
            scores = (q @ k.mT / 8 + terms.gather(3, place)).masked_fill(unseen, -torch.inf)
            if sinks is not None:
                scores = torch.cat((scores, sinks[:, None, None].expand(1, -1, length, 1)), -1)
            return scores.softmax(-1)[..., :length] @ v

        return kernel, exact

    errors_by_name = relative_errors(*of_window(None), inputs | every, out_grad)
    for case, added in (("few embeddings", few), ("queries of their own", own)):
        for name, error in relative_errors(*of_window(130), inputs | added, out_grad).items():
            errors_by_name[f"{name} with {case}"] = error
    return errors_by_name
