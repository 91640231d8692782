"""CoPE's attention in Triton, forward and backward: memory linear in the length.

`model.position.cope.cope_attention` is its specification, with gates made of the scores; method and names are those of
`lab.kernels.flash`. Queries and keys are those of the layer: one that is rotated or tempered, and then rounded to 16
bit, would move positions, and gradients would be off by a fifth. So there CoPE runs in blocks.

What is added to a score is here not known before the other scores: the position of a key is the sum of the gates from
it to its query. So a program goes through the tiles of its queries from the newest keys to the oldest, and carries

    counted     the sum of the gates of all keys after the tile, for each query

Once all queries of a block have counted up to the last position, older keys add one number to each query's scores, and
the rest is plain flash attention. The tiles up to there are the counted ones.

In the backward pass a gate moves its own key and all older ones. So programs go from the oldest keys to the newest,
and carry

    moved       the sum of the gradients of the positions of all keys before the tile, for each query

The gradient of the keys needs both numbers for every tile and query. These would be quadratic in the length, so the
backward pass takes `CHUNK` queries after the other: first their gradient, which leaves both numbers, then their part of
the gradients of the keys. In the kernels `P` is the number of entries of the table. Results that are not needed have
names of their own, since a loop must not change the type of a variable.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.kernels.flash import tiles
from lab.kernels.ops import (
    LOG2E,
    Inputs,
    Outputs,
    add_tile,
    launch,
    load_numbers,
    load_rows,
    mean_of,
    numbers_of_heads,
    product,
    scores_of,
    start_of_softmax,
    store_numbers,
    store_rows,
    store_softmax,
)

CHUNK = 1024  # queries of a step of the backward pass
MANY_HEADS = 128  # heads of all texts from which a fourth of these queries fill a GPU


class Carried(NamedTuple):
    """What a step of the backward pass keeps of its C queries."""

    counts: Tensor  # `counted` of each counted tile of keys, [B, H, tiles, C]
    moves: Tensor  # `moved` of each counted tile of keys, [B, H, tiles, C]
    oldest_counted: Tensor  # the oldest counted tile of each block of queries, int32 [B, H, blocks]
    start: int  # the first of the queries


@triton.jit
def is_seen(i, j, first_key):
    """Whether the queries i see the keys j, [len(i), len(j)]; `first_key` is the first that each query sees."""
    return (j[None, :] <= i[:, None]) & (j[None, :] >= first_key[:, None])


@triton.jit
def gradients_of(scores, seen, log_sum, weight_grads, mean):
    """The weights of a tile, 0 for keys that are not seen, and the gradients of its scores, [len(i), len(j)] each.

    Args:
        scores: as in the forward pass, computed again.
        log_sum, mean: of the queries i.
        weight_grads: the gradients of the weights.
    """
    scores = tl.where(seen, scores * LOG2E, float("-inf"))
    weights = tl.exp2(scores - log_sum[:, None])
    return weights, weights * (weight_grads - mean[:, None])


@triton.jit
def gates_of(scores, seen):
    """The gates of a tile; those of keys that are not seen are closed."""
    return tl.where(seen, 1 / (1 + tl.exp2(-scores * LOG2E)), 0.0)


@triton.jit
def read_table(gates, counted, at_table, i, T, P: tl.constexpr):
    """What the position of each key adds to its score, and how it was read; four tensors [len(i), len(j)].

    Args:
        gates: of the queries i and the keys of a tile, [len(i), len(j)].
        counted: the gates of all keys after the tile, [len(i)].
        at_table: what each entry of the table adds to the scores of each query, [T, P].

    Returns:
        the term; the entry below the position; the share of the next entry, from 0 to 1; the slope between the two, 0
        at the last entry.
    """
    position = tl.minimum(tl.cumsum(gates, 1, reverse=True) + counted[:, None], P - 1.0)
    entry = position.to(tl.int32)
    share = position - entry
    place = at_table + i[:, None] * P + entry
    has_next = entry < P - 1
    low = tl.load(place, mask=i[:, None] < T, other=0.0)
    high = tl.load(place + 1, mask=(i[:, None] < T) & has_next, other=0.0)
    slope = tl.where(has_next, high - low, 0.0)
    return low + share * slope, entry, share, slope


@triton.jit
def forward_kernel(
    x,
    out,
    log_sums,
    scale,
    T,
    G: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """The output of BM queries of a head, and their `log_sums`. The grid is (blocks of queries, H, B).

    Args:
        x: see `Inputs`; `x.extra` is what each entry of the table adds to the scores of each query, [B, H, T, P].
        out: result [B, H, T, D].
        log_sums: result [B, H, T].
        scale: the factor of q.k.
    """
    # A program has a block of queries of one head.
    i0 = tl.program_id(0) * BM
    b, h, head, kv_head = numbers_of_heads(G)
    at_table = x.extra[0] + head * T * P
    first = x.first_key + b * T
    i = i0 + tl.arange(0, BM)
    q_tile = load_rows(x.q, head, i, T, D)
    first_key = tl.load(first + i, mask=i < T, other=T + BN)  # queries beyond the end see no key
    last_term = tl.load(at_table + i * P + P - 1, mask=i < T, other=0.0)

    highest, total, acc = start_of_softmax(x.sinks, h, BM, D)
    counted = tl.where(i < T, 0.0, 1.0 * P)  # queries beyond the end have counted up to the last position
    oldest = tl.load(first + i0) // BN
    end = tl.cdiv(tl.minimum(i0 + BM, T), BN)
    for n in range(oldest, end):
        tile = oldest + end - 1 - n
        j = tile * BN + tl.arange(0, BN)
        k_tile = load_rows(x.k, kv_head, j, T, D)
        v_tile = load_rows(x.v, kv_head, j, T, D)
        seen = is_seen(i, j, first_key)
        scores = scores_of(q_tile, k_tile, scale)
        if tl.min(counted, 0) < P - 1:
            gates = gates_of(scores, seen)
            term, _entry, _share, _slope = read_table(gates, counted, at_table, i, T, P)
            counted += tl.sum(gates, 1)
            scores += term
        else:
            scores += last_term[:, None]
        scores = tl.where(seen, scores * LOG2E, float("-inf"))
        highest, total, acc = add_tile(scores, v_tile, highest, total, acc)
    store_softmax(out, log_sums, head, i, T, highest, total, acc, D)


@triton.jit
def queries_kernel(
    x,
    y,
    q_grad,
    at_table_grad,
    carried,
    C,
    scale,
    T,
    G: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """The gradients of BM queries of a head and of what the table adds to their scores.

    The grid is (blocks of C queries, H, B).

    Args:
        x, y: see `Inputs` and `Outputs`; `y.means` is a result.
        q_grad: result [B, H, T, D].
        at_table_grad: result, zeros before, fp32 [B, H, T, P].
        carried: results for `keys_kernel`, which runs after this one.
    """
    # As in the forward pass: a block of queries of one head.
    i0 = carried.start + tl.program_id(0) * BM
    b, h, head, kv_head = numbers_of_heads(G)
    at_table = x.extra[0] + head * T * P
    at_table_grad += head * T * P
    first = x.first_key + b * T
    i = i0 + tl.arange(0, BM)
    place = head * tl.cdiv(T, BN) * C + i - carried.start  # in `counts` and `moves`, of tile 0
    q_tile = load_rows(x.q, head, i, T, D)
    out_grad_tile = load_rows(y.out_grad, head, i, T, D)
    mean = mean_of(y, head, i, T, out_grad_tile, D)
    first_key = tl.load(first + i, mask=i < T, other=T + BN)
    log_sum = load_numbers(y.log_sums, head, i, T)

    # The gates alone, from the newest keys on, to know what each tile begins with.
    oldest = tl.load(first + i0) // BN
    end = tl.cdiv(tl.minimum(i0 + BM, T), BN)
    tile = end - 1
    counted = tl.where(i < T, 0.0, 1.0 * P)
    while (tile >= oldest) & (tl.min(counted, 0) < P - 1):
        j = tile * BN + tl.arange(0, BN)
        scores = scores_of(q_tile, load_rows(x.k, kv_head, j, T, D), scale)
        tl.store(carried.counts + place + tile * C, counted)
        counted += tl.sum(gates_of(scores, is_seen(i, j, first_key)), 1)
        tile -= 1
    tl.store(carried.oldest_counted + head * (C // BM) + tl.program_id(0), tile + 1)
    tl.debug_barrier()  # below, other threads load `counts` than those that stored them

    acc = tl.zeros([BM, D], tl.float32)
    last_term = tl.load(at_table + i * P + P - 1, mask=i < T, other=0.0)
    last_grad = tl.zeros([BM], tl.float32)
    counted_grad = tl.zeros([BM], tl.float32)
    moved = tl.zeros([BM], tl.float32)
    # No loads in advance: with them Triton 3.6 and 3.7 cannot compile the loop for Hopper.
    for newer in tl.range(oldest, end, num_stages=1):
        j = newer * BN + tl.arange(0, BN)
        k_tile = load_rows(x.k, kv_head, j, T, D)
        v_tile = load_rows(x.v, kv_head, j, T, D)
        seen = is_seen(i, j, first_key)
        scores = scores_of(q_tile, k_tile, scale)
        weight_grads = scores_of(out_grad_tile, v_tile, 1.0)
        if newer > tile:
            gates = gates_of(scores, seen)
            begun = tl.load(carried.counts + place + newer * C)
            term, entry, share, slope = read_table(gates, begun, at_table, i, T, P)
            _weights, score_grads = gradients_of(scores + term, seen, log_sum, weight_grads, mean)
            counted_grad += tl.sum(score_grads, 1)

            # The term lies between two entries, which share its gradient.
            of_entry = at_table_grad + i[:, None] * P + entry
            tl.atomic_add(of_entry, score_grads * (1 - share), mask=seen, sem="relaxed")
            tl.atomic_add(of_entry + 1, score_grads * share, mask=seen & (entry < P - 1), sem="relaxed")

            # A gate is part of the positions of its own key and of all older ones.
            position_grads = score_grads * slope
            tl.store(carried.moves + place + newer * C, moved)
            score_grads += (moved[:, None] + tl.cumsum(position_grads, 1)) * gates * (1 - gates)
            moved += tl.sum(position_grads, 1)
        else:  # keys at the last position, which do not depend on gates
            _weights, score_grads = gradients_of(scores + last_term[:, None], seen, log_sum, weight_grads, mean)
            last_grad += tl.sum(score_grads, 1)
        acc += product(score_grads, k_tile)
    # The exact mean, as in `lab.kernels.flash`: that from the rounded output, and what the gradients of all scores sum
    # up to, instead of zero. Weights sum up to 1, that of the sink included.
    of_sink = tl.exp2(tl.load(x.sinks + h) * LOG2E - log_sum)
    store_numbers(y.means, head, i, T, mean * (1.0 - of_sink) + counted_grad + last_grad)
    tl.atomic_add(at_table_grad + i * P + P - 1, last_grad, mask=i < T, sem="relaxed")
    store_rows(q_grad, head, i, T, acc * scale, D)


@triton.jit
def keys_kernel(
    x,
    y,
    k_grad,
    v_grad,
    carried,
    C,
    scale,
    T,
    G: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Add what C queries of the G heads that share BN keys give to the gradients of these and their values.

    The grid is (tiles of keys, H // G, B).

    Args:
        x, y: see `Inputs` and `Outputs`.
        k_grad, v_grad: sums so far, fp32 [B, H // G, T, D]; `k_grad` is to be multiplied by `scale`.
        carried: as `queries_kernel` has left it.
    """
    # A program has a tile of keys; all heads of queries that share it are summed here.
    tile = tl.program_id(0)
    b, _group, kv_head, _ = numbers_of_heads(1)
    j = tile * BN + tl.arange(0, BN)
    k_tile = load_rows(x.k, kv_head, j, T, D)
    v_tile = load_rows(x.v, kv_head, j, T, D)
    # No other program has these keys, and the chunks of queries come one after the other.
    k_acc = load_rows(k_grad, kv_head, j, T, D)
    v_acc = load_rows(v_grad, kv_head, j, T, D)

    start = carried.start
    # `last_query` ascends: the last key of the tile is seen by the latest query.
    stop = tl.minimum(tl.load(x.last_query + b * T + tl.minimum(tile * BN + BN - 1, T - 1)) + 1, start + C)
    for head in range(kv_head * G, kv_head * G + G):
        at_table = x.extra[0] + head * T * P
        for i0 in range(tl.maximum(start, tile * BN // BM * BM), stop, BM):
            i = i0 + tl.arange(0, BM)
            place = (head * tl.cdiv(T, BN) + tile) * C + i - start
            q_tile = load_rows(x.q, head, i, T, D)
            out_grad_tile = load_rows(y.out_grad, head, i, T, D)
            first_key = tl.load(x.first_key + b * T + i, mask=i < T, other=T + BN)
            log_sum = load_numbers(y.log_sums, head, i, T)
            mean = load_numbers(y.means, head, i, T)
            seen = is_seen(i, j, first_key)
            scores = scores_of(q_tile, k_tile, scale)
            weight_grads = scores_of(out_grad_tile, v_tile, 1.0)

            # Weights and the gradients of scores as in `queries_kernel`, for the columns of these keys.
            if tile >= tl.load(carried.oldest_counted + head * (C // BM) + (i0 - start) // BM):
                gates = gates_of(scores, seen)
                counted = tl.load(carried.counts + place)
                term, _entry, _share, slope = read_table(gates, counted, at_table, i, T, P)
                weights, score_grads = gradients_of(scores + term, seen, log_sum, weight_grads, mean)
                moved = tl.load(carried.moves + place)
                score_grads += (moved[:, None] + tl.cumsum(score_grads * slope, 1)) * gates * (1 - gates)
            else:
                last_term = tl.load(at_table + i * P + P - 1, mask=i < T, other=0.0)
                weights, score_grads = gradients_of(scores + last_term[:, None], seen, log_sum, weight_grads, mean)
            v_acc += product(tl.trans(weights), out_grad_tile)
            k_acc += product(tl.trans(score_grads), q_tile)

    store_rows(k_grad, kv_head, j, T, k_acc, D)
    store_rows(v_grad, kv_head, j, T, v_acc, D)


def constants(x: Inputs, bias: str) -> dict[str, int]:
    """What all kernels are compiled for."""
    return {"G": x.q.size(1) // x.k.size(1), "P": x.extra[0].size(-1)}


def backward(x: Inputs, y: Outputs, bias: str, scale: float) -> list[Tensor]:
    """As `lab.kernels.flash.backward`; the gradient of the last entry of the table is summed in any order."""
    n_batch, n_head, length, head_dim = x.q.shape
    _, tile, _ = tiles(head_dim, bias)
    # Two numbers of each query and each tile of keys are kept, so it takes fewer where there are many heads and texts.
    chunk = max(tile.queries, CHUNK if n_batch * n_head < MANY_HEADS else CHUNK // 4)

    q_grad = torch.empty_like(x.q)
    at_table_grad = torch.zeros_like(x.extra[0])
    k_grad = torch.zeros_like(x.k, dtype=torch.float32)
    v_grad = torch.zeros_like(k_grad)
    counts = y.means.new_empty(n_batch, n_head, triton.cdiv(length, tile.keys), chunk)
    oldest_counted = torch.empty((*counts.shape[:2], chunk // tile.queries), dtype=torch.int32, device=counts.device)
    carried = Carried(counts, torch.empty_like(counts), oldest_counted, 0)
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        rest = (carried._replace(start=start), chunk, scale)
        n_blocks = triton.cdiv(stop - start, tile.queries)
        launch(queries_kernel, tile, n_blocks, x.q, x, y, q_grad, at_table_grad, *rest, **constants(x, bias))
        n_blocks = triton.cdiv(stop, tile.keys)
        launch(keys_kernel, tile, n_blocks, x.k, x, y, k_grad, v_grad, *rest, **constants(x, bias))

    k_grad *= scale
    return [q_grad, k_grad.to(x.k.dtype), v_grad.to(x.v.dtype), at_table_grad]
