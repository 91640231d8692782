"""CoPE's attention in Triton, forward and backward: memory linear in the length.

`model.position.cope.cope_attention` is its specification; method and names are those of `lab.kernels.flash`. What is
added to a score is here not known before the other scores: the position of a key is the sum of the gates from it to its
query. So a program goes through the tiles of its queries from the newest keys to the oldest, and carries

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
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lab.kernels.ops import (
    LOG2E,
    Maybe,
    add_tile,
    grads_of_sinks,
    load_numbers,
    load_rows,
    numbers_of_heads,
    numbers_of_key_heads,
    padded,
    product,
    product_with_columns,
    registered,
    scores_of,
    store_numbers,
    store_rows,
)

CHUNK = 1024  # queries of a step of the backward pass
MANY_HEADS = 128  # heads of all texts from which a fourth of these queries fill a GPU


class Tiles(NamedTuple):
    """Sizes of tiles and numbers of warps."""

    queries: int
    keys: int
    forward_warps: int
    backward_warps: int


def tiles(head_dim: int, element_size: int, has_gate_keys: bool) -> Tiles:
    """Sizes with which no kernel spills much, and which fit into the shared memory of every GPU from sm_80 on.

    Args:
        head_dim: a power of two up to 256.
        element_size: bytes of an element of q.
        has_gate_keys: the gates have keys of their own, whose gradients take registers too.
    """
    if element_size * head_dim > 512:
        return Tiles(16, 16, 4, 4)
    if head_dim > 64 and has_gate_keys:
        return Tiles(16, 32, 4, 4)
    if element_size == 4 or head_dim > 128:  # fp32 has no matrix units, and its products are unrolled
        return Tiles(32, 32, 4, 4)
    if head_dim > 64 or has_gate_keys:
        return Tiles(32, 32, 4, 8)
    return Tiles(64, 32, 4, 8)


@triton.jit
def is_seen(i, j, first):
    """Whether the queries i see the keys j, [len(i), len(j)]; `first` is the first key that each query sees."""
    return (j[None, :] <= i[:, None]) & (j[None, :] >= first[:, None])


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
def add_to(places, x, inside):
    """Add `x` to the numbers at `places`, which no other program changes, where `inside`."""
    before = tl.load(places, mask=inside, other=0.0)
    tl.store(places, before + x, mask=inside)


@triton.jit
def gates_of(logits, seen):
    """The gates of a tile; those of keys that are not seen are closed."""
    return tl.where(seen, 1 / (1 + tl.exp2(-logits * LOG2E)), 0.0)


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
    q, k, v, position_q, gate_keys, at_table, first, sinks, out, log_sums, T, first_batch, scale, H: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_GATE_KEYS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """The output of BM queries of a head, and their `log_sums`. The grid is (blocks of queries, H, B).

    The kernels of the backward pass take the same.

    Args:
        q: queries [B, H, T, D].
        k, v: keys and values [B, H // G, T, D]; G heads of queries share one of keys.
        position_q, gate_keys: what the logits of the gates are made of if these are not the scores, [B, H, T, D] and
            [B, H // G, T, D].
        at_table: what each entry of the table adds to the scores of each query, [B, H, T, P].
        first: the first key that each query sees, [T] or [B, T]; the last one is its own.
        sinks: a logit for each head, [H].
        out: result [B, H, T, D].
        log_sums: result [B, H, T].
        first_batch: 1 if each text has its own `first`; 0 if all share one.
        HAS_GATE_KEYS, HAS_SINKS: there are `gate_keys`, `sinks`; otherwise these are never touched.
    """
    # A program has a block of queries of one head; `head` and the like say where its numbers begin.
    block = tl.program_id(0)
    b, h, head, kv_head = numbers_of_heads(H, G)
    k += kv_head * T * D
    v += kv_head * T * D
    gate_keys += kv_head * T * D
    at_table += head * T * P
    first += b * first_batch * T

    i = block * BM + tl.arange(0, BM)
    q_tile = load_rows(q + head * T * D, i, T, D)
    if HAS_GATE_KEYS:
        position_tile = load_rows(position_q + head * T * D, i, T, D)
    first_key = tl.load(first + i, mask=i < T, other=T + BN)  # queries beyond the end see no key

    highest = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    if HAS_SINKS:  # the sum over keys begins with the sink
        highest = tl.zeros([BM], tl.float32) + tl.load(sinks + h) * LOG2E
        total += 1.0
    acc = tl.zeros([BM, D], tl.float32)

    # From the newest keys on, until all queries have counted up to the last position. Those beyond the end have.
    oldest = tl.load(first + block * BM) // BN
    tile = (tl.minimum((block + 1) * BM, T) - 1) // BN
    counted = tl.where(i < T, 0.0, 1.0 * P)
    while (tile >= oldest) & (tl.min(counted, 0) < P - 1):
        j = tile * BN + tl.arange(0, BN)
        k_tile = load_rows(k, j, T, D)
        v_tile = load_rows(v, j, T, D)
        seen = is_seen(i, j, first_key)
        scores = scores_of(q_tile, k_tile, scale)
        logits = scores
        if HAS_GATE_KEYS:
            logits = scores_of(position_tile, load_rows(gate_keys, j, T, D), scale)
        gates = gates_of(logits, seen)
        term, _entry, _share, _slope = read_table(gates, counted, at_table, i, T, P)
        counted += tl.sum(gates, 1)
        scores = tl.where(seen, (scores + term) * LOG2E, float("-inf"))
        highest, total, acc = add_tile(scores, v_tile, highest, total, acc)
        tile -= 1

    # All older keys are at the last position.
    last_term = tl.load(at_table + i * P + P - 1, mask=i < T, other=0.0)
    for j0 in range(oldest * BN, (tile + 1) * BN, BN):
        j = j0 + tl.arange(0, BN)
        k_tile = load_rows(k, j, T, D)
        v_tile = load_rows(v, j, T, D)
        scores = scores_of(q_tile, k_tile, scale) + last_term[:, None]
        scores = tl.where(is_seen(i, j, first_key), scores * LOG2E, float("-inf"))
        highest, total, acc = add_tile(scores, v_tile, highest, total, acc)

    total = tl.where(total == 0.0, 1.0, total)  # queries beyond the end
    store_rows(out + head * T * D, i, T, acc / total[:, None], D)
    store_numbers(log_sums + head * T, i, T, highest + tl.log2(total))


@triton.jit
def queries_kernel(
    q, k, v, position_q, gate_keys, at_table, first, out, log_sums, means, out_grad, q_grad, gate_q_grad, at_table_grad,
    counts, moves, oldest_counted, start, T, first_batch, scale, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, HAS_GATE_KEYS: tl.constexpr,
):  # fmt: skip
    """The gradients of BM queries of a head and of what the table adds to their scores.

    The grid is (blocks of C queries, H, B).

    Args:
        means: result, the sum over channels of output x its gradient, [B, H, T].
        gate_q_grad: result, the part of `position_q` in the gates, fp32 [B, H, T, D].
        at_table_grad: result, zeros before, fp32 [B, H, T, P].
        counts, moves: results for `keys_kernel`, `counted` and `moved` of each counted tile of BN keys,
            [B, H, tiles, C].
        oldest_counted: result, the oldest counted tile of each block of queries, int32 [B, H, C // BM].
        start: the first of the C queries.
    """
    # As in the forward pass: a block of queries of one head.
    block = start // BM + tl.program_id(0)
    b, _h, head, kv_head = numbers_of_heads(H, G)
    k += kv_head * T * D
    v += kv_head * T * D
    gate_keys += kv_head * T * D
    at_table += head * T * P
    at_table_grad += head * T * P
    first += b * first_batch * T
    counts += head * tl.cdiv(T, BN) * C
    moves += head * tl.cdiv(T, BN) * C

    i = block * BM + tl.arange(0, BM)
    row = i - start  # in the chunk
    q_tile = load_rows(q + head * T * D, i, T, D)
    out_grad_tile = load_rows(out_grad + head * T * D, i, T, D)
    out_tile = load_rows(out + head * T * D, i, T, D)
    mean = tl.sum(out_tile.to(tl.float32) * out_grad_tile.to(tl.float32), 1)
    store_numbers(means + head * T, i, T, mean)
    if HAS_GATE_KEYS:
        position_tile = load_rows(position_q + head * T * D, i, T, D)
        gate_acc = tl.zeros([BM, D], tl.float32)
    first_key = tl.load(first + i, mask=i < T, other=T + BN)
    log_sum = load_numbers(log_sums + head * T, i, T)

    # The gates alone, from the newest keys on, to know what each tile begins with.
    oldest = tl.load(first + block * BM) // BN
    newest = (tl.minimum((block + 1) * BM, T) - 1) // BN
    tile = newest
    counted = tl.where(i < T, 0.0, 1.0 * P)
    while (tile >= oldest) & (tl.min(counted, 0) < P - 1):
        j = tile * BN + tl.arange(0, BN)
        if HAS_GATE_KEYS:
            logits = scores_of(position_tile, load_rows(gate_keys, j, T, D), scale)
        else:
            logits = scores_of(q_tile, load_rows(k, j, T, D), scale)
        tl.store(counts + tile * C + row, counted)
        counted += tl.sum(gates_of(logits, is_seen(i, j, first_key)), 1)
        tile -= 1
    tl.store(oldest_counted + head * (C // BM) + tl.program_id(0), tile + 1)
    tl.debug_barrier()  # below, other threads load `counts` than those that stored them

    # Keys at the last position, which do not depend on gates.
    acc = tl.zeros([BM, D], tl.float32)
    last_term = tl.load(at_table + i * P + P - 1, mask=i < T, other=0.0)
    last_grad = tl.zeros([BM], tl.float32)
    for j0 in range(oldest * BN, (tile + 1) * BN, BN):
        j = j0 + tl.arange(0, BN)
        k_tile = load_rows(k, j, T, D)
        v_tile = load_rows(v, j, T, D)
        scores = scores_of(q_tile, k_tile, scale) + last_term[:, None]
        seen = is_seen(i, j, first_key)
        weight_grads = scores_of(out_grad_tile, v_tile, 1.0)
        _weights, score_grads = gradients_of(scores, seen, log_sum, weight_grads, mean)
        last_grad += tl.sum(score_grads, 1)
        acc += product(score_grads, k_tile)

    # The counted tiles, up to the newest keys.
    moved = tl.zeros([BM], tl.float32)
    # No loads in advance: with them Triton 3.6 and 3.7 cannot compile the loop for Hopper.
    for newer in tl.range(tile + 1, newest + 1, num_stages=1):
        j = newer * BN + tl.arange(0, BN)
        k_tile = load_rows(k, j, T, D)
        v_tile = load_rows(v, j, T, D)
        seen = is_seen(i, j, first_key)
        scores = scores_of(q_tile, k_tile, scale)
        logits = scores
        if HAS_GATE_KEYS:
            gate_tile = load_rows(gate_keys, j, T, D)
            logits = scores_of(position_tile, gate_tile, scale)
        gates = gates_of(logits, seen)
        counted = tl.load(counts + newer * C + row)
        term, entry, share, slope = read_table(gates, counted, at_table, i, T, P)
        weight_grads = scores_of(out_grad_tile, v_tile, 1.0)
        _weights, score_grads = gradients_of(scores + term, seen, log_sum, weight_grads, mean)

        # The term lies between two entries, which share its gradient.
        place = at_table_grad + i[:, None] * P + entry
        tl.atomic_add(place, score_grads * (1 - share), mask=seen, sem="relaxed")
        tl.atomic_add(place + 1, score_grads * share, mask=seen & (entry < P - 1), sem="relaxed")

        # A gate is part of the positions of its own key and of all older ones.
        position_grads = score_grads * slope
        tl.store(moves + newer * C + row, moved)
        gate_grads = (moved[:, None] + tl.cumsum(position_grads, 1)) * gates * (1 - gates)
        moved += tl.sum(position_grads, 1)
        if HAS_GATE_KEYS:
            gate_acc += product(gate_grads, gate_tile)
        else:
            score_grads += gate_grads
        acc += product(score_grads, k_tile)
    tl.atomic_add(at_table_grad + i * P + P - 1, last_grad, mask=i < T, sem="relaxed")

    store_rows(q_grad + head * T * D, i, T, acc * scale, D)
    if HAS_GATE_KEYS:
        store_rows(gate_q_grad + head * T * D, i, T, gate_acc * scale, D)


@triton.jit
def keys_kernel(
    q, k, v, position_q, gate_keys, at_table, first, last, log_sums, means, out_grad, k_grad, v_grad, gate_keys_grad,
    counts, moves, oldest_counted, start, T, first_batch, scale, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, HAS_GATE_KEYS: tl.constexpr,
):  # fmt: skip
    """Add what C queries of the G heads that share BN keys give to the gradients of these and their values.

    The grid is (tiles of keys, H // G, B).

    Args:
        k_grad, v_grad, gate_keys_grad: sums so far, fp32 [B, H // G, T, D].
        counts, moves, oldest_counted, start: as of `queries_kernel`, which runs before.
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
    if HAS_GATE_KEYS:
        gate_tile = load_rows(gate_keys + kv_head * T * D, j, T, D)
        gate_acc = tl.zeros([BN, D], tl.float32)
    # `last` ascends: the last key of the tile is seen by the latest query.
    stop = tl.minimum(tl.load(last + tl.minimum(tile * BN + BN - 1, T - 1)) + 1, start + C)
    for g in range(G):
        h = group * G + g
        head = (b * H + h).to(tl.int64)
        head_table = at_table + head * T * P
        head_tile = (head * tl.cdiv(T, BN) + tile) * C
        for i0 in range(tl.maximum(start, tile * BN // BM * BM), stop, BM):
            i = i0 + tl.arange(0, BM)
            place = head_tile + i - start
            q_tile = load_rows(q + head * T * D, i, T, D)
            out_grad_tile = load_rows(out_grad + head * T * D, i, T, D)
            first_key = tl.load(first + i, mask=i < T, other=T + BN)
            log_sum = load_numbers(log_sums + head * T, i, T)
            mean = load_numbers(means + head * T, i, T)
            seen = is_seen(i, j, first_key)
            scores = scores_of(q_tile, k_tile, scale)
            weight_grads = scores_of(out_grad_tile, v_tile, 1.0)

            # Weights and the gradients of scores as in `queries_kernel`, for the columns of these keys.
            if tile >= tl.load(oldest_counted + head * (C // BM) + (i0 - start) // BM):
                logits = scores
                if HAS_GATE_KEYS:
                    position_tile = load_rows(position_q + head * T * D, i, T, D)
                    logits = scores_of(position_tile, gate_tile, scale)
                gates = gates_of(logits, seen)
                counted = tl.load(counts + place)
                term, _entry, _share, slope = read_table(gates, counted, head_table, i, T, P)
                weights, score_grads = gradients_of(scores + term, seen, log_sum, weight_grads, mean)
                moved = tl.load(moves + place)
                gate_grads = (moved[:, None] + tl.cumsum(score_grads * slope, 1)) * gates * (1 - gates)
                if HAS_GATE_KEYS:
                    gate_acc += product_with_columns(gate_grads, position_tile)
                else:
                    score_grads += gate_grads
            else:
                last_term = tl.load(head_table + i * P + P - 1, mask=i < T, other=0.0)
                scores += last_term[:, None]
                weights, score_grads = gradients_of(scores, seen, log_sum, weight_grads, mean)
            v_acc += product_with_columns(weights, out_grad_tile)
            k_acc += product_with_columns(score_grads, q_tile)

    # No other program has these keys, and the chunks of queries come one after the other.
    channels = tl.arange(0, D)
    places = kv_head * T * D + j[:, None] * D + channels[None, :]
    inside = j[:, None] < T
    add_to(k_grad + places, k_acc * scale, inside)
    add_to(v_grad + places, v_acc, inside)
    if HAS_GATE_KEYS:
        add_to(gate_keys_grad + places, gate_acc * scale, inside)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, extra: list[Tensor], sinks: Maybe, bias: str,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = torch.empty_like(q)
    log_sums = q.new_empty(q.shape[:3], dtype=torch.float32)
    size = _tiles_for(q, extra)
    inputs, sizes, constants = _arguments(q, k, v, first, extra, scale)
    grid = (triton.cdiv(q.size(2), size.queries), q.size(1), q.size(0))
    or_unused = log_sums if sinks is None else sinks
    forward_kernel[grid](
        *inputs, or_unused, out, log_sums, *sizes, **constants, HAS_SINKS=sinks is not None,
        num_warps=size.forward_warps, num_stages=2,
    )  # fmt: skip
    return out, log_sums


def _backward(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, extra: list[Tensor], sinks: Maybe, bias: str,
    scale: float, out: Tensor, log_sums: Tensor, out_grad: Tensor,
) -> list[Tensor]:  # fmt: skip
    size = _tiles_for(q, extra)
    n_batch, n_head, length, _ = q.shape
    position_q, table, *gate_keys = extra
    n_tiles = triton.cdiv(length, size.keys)
    chunk = _chunk(n_batch * n_head, size.queries)

    inputs, sizes, constants = _arguments(q, k, v, first, extra, scale)
    at_table = inputs[5]
    q_grad = torch.empty_like(q)
    means = torch.empty_like(log_sums)
    at_table_grad = torch.zeros_like(at_table)
    gate_q_grad = q.new_empty(q.shape if gate_keys else 0, dtype=torch.float32)
    k_grad = torch.zeros_like(k, dtype=torch.float32)
    v_grad = torch.zeros_like(k_grad)
    gate_keys_grad = torch.zeros_like(k_grad) if gate_keys else k_grad.new_empty(0)

    counts = q.new_empty((n_batch, n_head, n_tiles, chunk), dtype=torch.float32)
    moves = torch.empty_like(counts)
    oldest_counted = q.new_empty((n_batch, n_head, chunk // size.queries), dtype=torch.int32)

    constants |= {"C": chunk, "num_warps": size.backward_warps, "num_stages": 2}
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        carried = (counts, moves, oldest_counted, start, *sizes)
        queries_kernel[(triton.cdiv(stop - start, size.queries), n_head, n_batch)](
            *inputs, out, log_sums, means, out_grad, q_grad, gate_q_grad, at_table_grad, *carried, **constants
        )
        keys_kernel[(triton.cdiv(stop, size.keys), k.size(1), n_batch)](
            *inputs, last, log_sums, means, out_grad, k_grad, v_grad, gate_keys_grad, *carried, **constants
        )

    # at_table = position_q table
    with torch.autocast(q.device.type, enabled=False):
        position_grad = at_table_grad @ table.mT
        table_grad = position_q.flatten(0, 2).float().mT @ at_table_grad.flatten(0, 2)
    of_gate_keys = []
    if gate_keys:
        position_grad += gate_q_grad
        of_gate_keys = [gate_keys_grad.to(q.dtype)]
    sinks_grad = log_sums.new_empty(0) if sinks is None else grads_of_sinks(sinks, log_sums, means)
    k_grad = k_grad.to(q.dtype)
    v_grad = v_grad.to(q.dtype)
    return [q_grad, k_grad, v_grad, position_grad.to(q.dtype), table_grad, *of_gate_keys, sinks_grad]


def _tiles_for(q: Tensor, extra: list[Tensor]) -> Tiles:
    """The tiles of an operator's inputs."""
    return tiles(q.size(3), q.element_size(), has_gate_keys=len(extra) == 3)


def _chunk(n_heads: int, block: int) -> int:
    """How many queries a step of the backward pass takes, whole blocks of them.

    Two numbers of each of them and each tile of keys are kept, so it takes fewer where there are many heads and texts.
    """
    return max(block, CHUNK if n_heads < MANY_HEADS else CHUNK // 4)


def _arguments(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, extra: list[Tensor], scale: float
) -> tuple[tuple[Tensor, ...], tuple[int, int, float], dict[str, int | bool]]:
    """What all kernels take: tensors; T, first_batch and scale; and constants."""
    position_q, table, *gate_keys = extra
    # What each entry of the table adds to the scores of each query, [B, H, T, P].
    with torch.autocast(q.device.type, enabled=False):
        at_table = position_q.float() @ table
    size = _tiles_for(q, extra)
    constants = {"H": q.size(1), "G": q.size(1) // k.size(1), "D": q.size(3), "P": table.size(1)}
    constants |= {"BM": size.queries, "BN": size.keys, "HAS_GATE_KEYS": bool(gate_keys)}
    inputs = (q, k, v, position_q, gate_keys[0] if gate_keys else k, at_table, first)
    return inputs, (q.size(2), first.ndim - 1, scale), constants


registered("cope", _forward, _backward)


def cope(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    first: Tensor,
    last: Tensor,
    *,
    scale: float,
    position_q: Maybe = None,
    gate_keys: Maybe = None,
    sinks: Maybe = None,
) -> Tensor:
    """Attention with contextual positions [B, H, T, D], of as many queries as keys.

    It equals `model.position.cope.cope_attention`, which says what `position_q`, `gate_keys` and `sinks` are. The
    gradient of the table is a sum in fp32, in any order.

    Args:
        q: queries [B, H, T, D], fp32, bf16 or fp16.
        k, v: keys and values [B, Hkv, T, D] of the same dtype; H is a multiple of Hkv.
        table: [D, P].
        first: the first key that each query sees, int32 [T] or [B, T], ascending; the last one is its own.
        last: the last query that sees each key, int32 [T] or [B, T], ascending; the first one is its own.
    """
    head_dim = q.size(3)
    q, k, v, position_q = padded(q, k, v, q if position_q is None else position_q)
    extra = [position_q, F.pad(table.float(), (0, 0, 0, q.size(3) - head_dim)).contiguous()]
    if gate_keys is not None:
        extra += padded(gate_keys)
    if sinks is not None:
        sinks = sinks.float().contiguous()
    out, _ = torch.ops.ropewalk.cope(q, k, v, first.contiguous(), last.contiguous(), extra, sinks, "cope", scale)
    return out[..., :head_dim]
