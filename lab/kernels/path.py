"""PaTH attention in Triton, forward and backward: memory linear in the length.

`model.position.path` is its specification; method and names are those of `lab.kernels.flash`. What reflections do to
keys, and to queries from one place to another, is in `lab.kernels.reflections`, with tiles, spans and places. The
kernels here are those of attention:

- Within its own tile every query has other reflections before it meets a key. `met` makes them matrix products.
- The query leaves its tile at the start, by `u`. From there it meets keys that `carried` has brought to the end of
  that tile or span. For these keys the query stays as it is: what is left is plain flash attention.
- Before it meets an older span it passes all the reflections of the span it leaves, by a matrix of `crossings`.

So a query takes one product more for each span, not two for each tile. Queries of tile t meet keys at place t - 1, then
at the last place of each older span.

In the backward pass programs first go from the newest keys to the oldest, as in the forward pass, and then back with
the gradient of the queries as they are at each place. The gradients of keys and crossings need both, queries and
gradient, at each place. All of them would be quadratic in the length, so the backward pass takes `CHUNK` queries after
the other, as in `lab.kernels.cope`. What the reflections do is computed again there, not kept.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from lab.kernels.ops import (
    LOG2E,
    Maybe,
    add_tile,
    add_to,
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
from lab.kernels.reflections import (
    Places,
    add_gradients,
    exact_product,
    load_tile,
    places_of,
    precision_of,
    tiles,
)
from model.attention import seen_range, softmax

EXACT = ()  # of `errors`, what fp32 holds for inputs of 16 bit too
CHUNK = 512  # queries of a step of the backward pass, rounded to whole tiles
MAX_WIDTH = 128  # beyond it a matrix [D, D] does not fit into the shared memory of a GPU


@triton.jit
def scores_with_gates(logits, i, j, first, high, low, T, scale, HAS_GATES: tl.constexpr):
    """The scores of the queries i and keys j to base 2, fp32 [len(i), len(j)]; -inf where a key is not seen.

    Args:
        logits: the products of queries and keys, past the reflections between them.
        first: the first key that each query sees, [len(i)].
        high, low: what the head adds for a key, [T] each: see `path`.
    """
    scores = logits * scale
    if HAS_GATES:
        # As in `lab.kernels.flash`: the high parts of near keys subtract without rounding.
        scores += load_numbers(high, j, T)[None, :] - load_numbers(high, i, T)[:, None]
        scores += load_numbers(low, j, T)[None, :] - load_numbers(low, i, T)[:, None]
    return tl.where(is_seen(i, j, first), scores * LOG2E, float("-inf"))


@triton.jit
def reached_by(i, q_tile, w_tile, PRECISION: tl.constexpr):
    """The product of each query i of a tile with each w of the tile, [N, N]; 0 for tokens after the query.

    Only the reflections of a query's own token and of those before it stand between the query and older keys.
    """
    products = exact_product(q_tile.to(tl.float32), tl.trans(w_tile), PRECISION)
    return tl.where(i[:, None] >= i[None, :], products, 0.0)


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    w,
    met,
    u,
    carried,
    crossings,
    first,
    high,
    low,
    sinks,
    out,
    log_sums,
    T,
    TILES,
    first_batch,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_GATES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """The output of a tile of queries of a head, and their `log_sums`. The grid is (tiles of queries, H, B).

    The kernels of the backward pass take the same.

    Args:
        q: queries [B, H, T, D].
        k, v: keys and values [B, H // G, T, D]; G heads of queries share one of keys.
        w: unit vectors of the reflections, [B, H // G, T, D].
        met, u: of each tile, [B, H // G, TILES N, N] and [B, H // G, TILES N, D]; zeros beyond the end of the text.
        carried: the keys of a span at each place, [B, H // G, TILES, R N, D].
        crossings: what to add to a query that goes from each place to the start of its span, as a matrix:
            [B, H // G, TILES, D, D].
        first: the first key that each query sees, [T] or [B, T]; the last one is its own.
        high, low: what is added for each key, [B, H, T] each.
        sinks: a logit for each head, [H].
        out: result [B, H, T, D].
        log_sums: result [B, H, T].
        TILES: tiles of N tokens, those of whole spans.
        first_batch: 1 if each text has its own `first` (and `last`); 0 if all share them.
        PRECISION: of products of fp32.
        HAS_GATES, HAS_SINKS: there are `high` and `low`, `sinks`; otherwise these are never read.
    """
    # A program has a tile of queries of one head; `head` and the like say where its numbers begin.
    own = tl.program_id(0)
    b, h, head, kv_head = numbers_of_heads(H, G)
    k += kv_head * T * D
    v += kv_head * T * D
    high += head * T
    low += head * T
    first += b * first_batch * T

    i = own * N + tl.arange(0, N)
    q_tile = load_rows(q + head * T * D, i, T, D)
    k_tile = load_rows(k, i, T, D)
    v_tile = load_rows(v, i, T, D)
    first_key = tl.load(first + i, mask=i < T, other=TILES * N)  # queries beyond the end see no key

    highest = tl.full([N], float("-inf"), tl.float32)
    total = tl.zeros([N], tl.float32)
    if HAS_SINKS:  # the sum over keys begins with the sink
        highest = tl.zeros([N], tl.float32) + tl.load(sinks + h) * LOG2E
        total += 1.0
    acc = tl.zeros([N, D], tl.float32)

    # The own tile.
    tile_rows = kv_head * TILES * N + i
    reached = reached_by(i, q_tile, load_rows(w + kv_head * T * D, i, T, D), PRECISION)
    logits = scores_of(q_tile, k_tile, 1.0) - exact_product(reached, load_tile(met, tile_rows, N), PRECISION)
    scores = scores_with_gates(logits, i, i, first_key, high, low, T, scale, HAS_GATES)
    highest, total, acc = add_tile(scores, v_tile, highest, total, acc)

    # The queries at the place before it, and then at the last place of each older span. Span s is met at place c.
    passed = q_tile.to(tl.float32) - exact_product(reached, load_tile(u, tile_rows, D), PRECISION)
    oldest = tl.load(first + own * N) // N
    newest = tl.cdiv(own, R) - 1
    for back in range(newest - oldest // R + 1):
        s = newest - back
        c = tl.minimum(s * R + R, own) - 1
        place = kv_head * TILES + c
        for tile in range(tl.maximum(s * R, oldest), c + 1):
            j = tile * N + tl.arange(0, N)
            key_tile = load_tile(carried + place * R * N * D, j - s * R * N, D)
            logits = exact_product(passed, tl.trans(key_tile), PRECISION)
            scores = scores_with_gates(logits, i, j, first_key, high, low, T, scale, HAS_GATES)
            highest, total, acc = add_tile(scores, load_rows(v, j, T, D), highest, total, acc)
        passed += exact_product(passed, load_tile(crossings + place * D * D, tl.arange(0, D), D), PRECISION)
    total = tl.where(total == 0.0, 1.0, total)  # queries beyond the end

    store_rows(out + head * T * D, i, T, acc / total[:, None], D)
    store_numbers(log_sums + head * T, i, T, highest + tl.log2(total))


@triton.jit
def queries_kernel(
    q,
    k,
    v,
    w,
    met,
    u,
    carried,
    crossings,
    first,
    high,
    low,
    log_sums,
    means,
    out_grad,
    exact_means,
    own_grads,
    passed_at,
    grads_at,
    start,
    T,
    TILES,
    first_batch,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_GATES: tl.constexpr,
):
    """The gradient of the queries of a tile as they are when they leave it, and their exact means.

    The grid is (tiles of C queries, H, B).

    Args:
        exact_means: result for the kernels that run after this one, [B, H, T]: see `lab.kernels.flash`.
        own_grads: result, the gradient of the queries as they leave their own tile, fp32 [B, H, T, D].
        passed_at, grads_at: results for the kernels of keys and crossings, fp32 [B, H, TILES // R, C, D]: the queries
            where they meet each span, and the gradient of what they are before they meet older ones.
        start: the first of the C queries.
    """
    # As in the forward pass: a tile of queries of one head.
    own = start // N + tl.program_id(0)
    b, _h, head, kv_head = numbers_of_heads(H, G)
    k += kv_head * T * D
    v += kv_head * T * D
    high += head * T
    low += head * T
    first += b * first_batch * T
    passed_at += head * (TILES // R) * C * D
    grads_at += head * (TILES // R) * C * D

    i = own * N + tl.arange(0, N)
    row = i - start  # in the chunk
    q_tile = load_rows(q + head * T * D, i, T, D)
    out_grad_tile = load_rows(out_grad + head * T * D, i, T, D)
    first_key = tl.load(first + i, mask=i < T, other=TILES * N)
    log_sum = load_numbers(log_sums + head * T, i, T)
    mean = load_numbers(means + head * T, i, T)
    tile_rows = kv_head * TILES * N + i
    channels = tl.arange(0, D)
    places_in_chunk = row[:, None] * D + channels[None, :]

    # The own tile, for the means and for the queries as they leave it.
    reached = reached_by(i, q_tile, load_rows(w + kv_head * T * D, i, T, D), PRECISION)
    logits = scores_of(q_tile, load_rows(k, i, T, D), 1.0)
    logits -= exact_product(reached, load_tile(met, tile_rows, N), PRECISION)
    scores = scores_with_gates(logits, i, i, first_key, high, low, T, scale, HAS_GATES)
    weights = tl.exp2(scores - log_sum[:, None])
    exact_mean = tl.sum(weights * scores_of(out_grad_tile, load_rows(v, i, T, D), 1.0), 1)
    passed = q_tile.to(tl.float32) - exact_product(reached, load_tile(u, tile_rows, D), PRECISION)

    # The queries alone, from the newest keys on, to know what meets each span.
    oldest = tl.load(first + own * N) // N
    newest = tl.cdiv(own, R) - 1
    for back in range(newest - oldest // R + 1):
        s = newest - back
        place = kv_head * TILES + tl.minimum(s * R + R, own) - 1
        tl.store(passed_at + s * C * D + places_in_chunk, passed)
        passed += exact_product(passed, load_tile(crossings + place * D * D, channels, D), PRECISION)
    tl.debug_barrier()  # other threads may read what these have stored

    # Back, from the oldest keys on.
    grad = tl.zeros([N, D], tl.float32)
    for s in range(oldest // R, newest + 1):
        c = tl.minimum(s * R + R, own) - 1
        place = kv_head * TILES + c
        tl.store(grads_at + s * C * D + places_in_chunk, grad)
        crossing = load_tile(crossings + place * D * D, channels, D)
        grad += exact_product(grad, tl.trans(crossing), PRECISION)
        passed = tl.load(passed_at + s * C * D + places_in_chunk)
        for tile in range(tl.maximum(s * R, oldest), c + 1):
            j = tile * N + tl.arange(0, N)
            key_tile = load_tile(carried + place * R * N * D, j - s * R * N, D)
            logits = exact_product(passed, tl.trans(key_tile), PRECISION)
            scores = scores_with_gates(logits, i, j, first_key, high, low, T, scale, HAS_GATES)
            weights = tl.exp2(scores - log_sum[:, None])
            weight_grads = scores_of(out_grad_tile, load_rows(v, j, T, D), 1.0)
            exact_mean += tl.sum(weights * weight_grads, 1)
            logit_grads = weights * (weight_grads - mean[:, None]) * scale
            grad += exact_product(logit_grads, key_tile, PRECISION)

    store_rows(own_grads + head * T * D, i, T, grad, D)
    store_numbers(exact_means + head * T, i, T, exact_mean)


@triton.jit
def keys_kernel(
    v,
    carried,
    first,
    last,
    high,
    low,
    log_sums,
    exact_means,
    out_grad,
    v_grad,
    carried_grad,
    keys_grad,
    passed_at,
    start,
    T,
    TILES,
    first_batch,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_GATES: tl.constexpr,
):
    """Add to the gradients of a tile of keys at each place, and of their values, what C queries of other tiles give.

    The grid is (tiles of keys, H // G, B).

    Args:
        last: the last query that sees each key, [T] or [B, T].
        v_grad: sums so far, fp32 [B, H // G, T, D].
        carried_grad: sums so far, fp32, as `carried`.
        keys_grad: sums so far of the gradients of what is added for each key, fp32 [B, H, T].
    """
    # A program has a tile of keys; all heads of queries that share it are summed here.
    tile = tl.program_id(0)
    b, group, kv_head = numbers_of_key_heads()
    first += b * first_batch * T
    last += b * first_batch * T
    j = tile * N + tl.arange(0, N)
    v_tile = load_rows(v + kv_head * T * D, j, T, D)

    s = tile // R
    v_acc = tl.zeros([N, D], tl.float32)
    # `last` ascends: the last key of the tile is seen by the latest query.
    latest = tl.minimum(tl.load(last + tl.minimum(tile * N + N - 1, T - 1)) + 1, start + C)
    for c in range(tile, s * R + R):
        # The next tile of queries meets the keys at place c, and if that is the last one of the span, all later ones.
        stop = latest
        if c < s * R + R - 1:
            stop = tl.minimum(latest, c * N + 2 * N)
        from_query = tl.maximum(start, c * N + N)
        if from_query < stop:
            rows = (kv_head * TILES + c) * R * N + (j - s * R * N)
            key_tile = load_tile(carried, rows, D)
            key_acc = tl.zeros([N, D], tl.float32)
            for g in range(G):
                head = (b * H + group * G + g).to(tl.int64)
                key_sums = tl.zeros([N], tl.float32)
                for i0 in range(from_query, stop, N):
                    i = i0 + tl.arange(0, N)
                    at_span = (head * (TILES // R) + s) * C
                    passed = load_tile(passed_at, at_span + i - start, D)
                    out_grad_tile = load_rows(out_grad + head * T * D, i, T, D)
                    first_key = tl.load(first + i, mask=i < T, other=TILES * N)
                    log_sum = load_numbers(log_sums + head * T, i, T)
                    mean = load_numbers(exact_means + head * T, i, T)
                    logits = exact_product(passed, tl.trans(key_tile), PRECISION)
                    scores = scores_with_gates(
                        logits, i, j, first_key, high + head * T, low + head * T, T, scale, HAS_GATES
                    )
                    weights = tl.exp2(scores - log_sum[:, None])
                    v_acc += product_with_columns(weights, out_grad_tile)
                    weight_grads = scores_of(out_grad_tile, v_tile, 1.0)
                    score_grads = weights * (weight_grads - mean[:, None])
                    key_acc += exact_product(tl.trans(score_grads), passed, PRECISION)
                    if HAS_GATES:
                        key_sums += tl.sum(score_grads, 0)
                if HAS_GATES:
                    add_to(keys_grad + head * T + j, key_sums, j < T)
            places = rows[:, None] * D + tl.arange(0, D)[None, :]
            add_to(carried_grad + places, key_acc * scale, j[:, None] < T)

    # No other program has these keys, and the chunks of queries come one after the other.
    places = kv_head * T * D + j[:, None] * D + tl.arange(0, D)[None, :]
    add_to(v_grad + places, v_acc, j[:, None] < T)


@triton.jit
def crossings_kernel(
    last,
    crossings_grad,
    passed_at,
    grads_at,
    start,
    T,
    TILES,
    first_batch,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add what C queries give to the gradients of the crossing from one place. The grid is (places, H // G, B).

    Args:
        crossings_grad: sums so far, fp32, as `crossings`.
    """
    c = tl.program_id(0)
    b, group, kv_head = numbers_of_key_heads()
    last += b * first_batch * T

    # Only queries that also see a key of an older span cross: from place c those of the next tile, and from the last
    # place of a span all later ones.
    s = c // R
    channels = tl.arange(0, D)
    stop = tl.minimum(tl.load(last + tl.maximum(s * R * N - 1, 0)) + 1, start + C)
    if c % R < R - 1:
        stop = tl.minimum(stop, c * N + 2 * N)
    from_query = tl.maximum(start, c * N + N)
    if (s > 0) & (from_query < stop):
        acc = tl.zeros([D, D], tl.float32)
        for g in range(G):
            head = (b * H + group * G + g).to(tl.int64)
            for i0 in range(from_query, stop, N):
                rows = (head * (TILES // R) + s) * C + i0 - start + tl.arange(0, N)
                passed = load_tile(passed_at, rows, D)
                grad = load_tile(grads_at, rows, D)
                acc += exact_product(tl.trans(passed), grad, PRECISION)
        places = (kv_head * TILES + c) * D * D + channels[:, None] * D + channels[None, :]
        add_to(crossings_grad + places, acc, channels[:, None] < D)


@triton.jit
def own_queries_kernel(
    q,
    k,
    v,
    w,
    met,
    u,
    first,
    high,
    low,
    log_sums,
    means,
    out_grad,
    q_grad,
    own_grads,
    reached_grads,
    T,
    TILES,
    first_batch,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_GATES: tl.constexpr,
):
    """The gradient of a tile of queries of a head, after all chunks. The grid is (tiles of queries, H, B).

    Args:
        own_grads: as of `queries_kernel`.
        reached_grads: result for `reflections_kernel`, the gradient of what `reached_by` returns, fp32 [B, H, T, N].
    """
    b, _h, head, kv_head = numbers_of_heads(H, G)
    i = tl.program_id(0) * N + tl.arange(0, N)
    tile_rows = kv_head * TILES * N + i
    first_key = tl.load(first + b * first_batch * T + i, mask=i < T, other=TILES * N)
    log_sum = load_numbers(log_sums + head * T, i, T)
    mean = load_numbers(means + head * T, i, T)

    q_tile = load_rows(q + head * T * D, i, T, D)
    w_tile = load_rows(w + kv_head * T * D, i, T, D)
    reached = reached_by(i, q_tile, w_tile, PRECISION)
    k_tile = load_rows(k + kv_head * T * D, i, T, D)
    met_tile = load_tile(met, tile_rows, N)
    logits = scores_of(q_tile, k_tile, 1.0) - exact_product(reached, met_tile, PRECISION)
    scores = scores_with_gates(logits, i, i, first_key, high + head * T, low + head * T, T, scale, HAS_GATES)
    weights = tl.exp2(scores - log_sum[:, None])
    out_grad_tile = load_rows(out_grad + head * T * D, i, T, D)
    weight_grads = scores_of(out_grad_tile, load_rows(v + kv_head * T * D, i, T, D), 1.0)
    logit_grads = weights * (weight_grads - mean[:, None]) * scale

    grad = load_rows(own_grads + head * T * D, i, T, D)
    reached_grad = exact_product(logit_grads, tl.trans(met_tile), PRECISION)
    reached_grad += exact_product(grad, tl.trans(load_tile(u, tile_rows, D)), PRECISION)
    reached_grad = tl.where(i[:, None] >= i[None, :], -reached_grad, 0.0)
    grad += product(logit_grads, k_tile) + exact_product(reached_grad, w_tile, PRECISION)

    store_rows(q_grad + head * T * D, i, T, grad, D)
    store_rows(reached_grads + head * T * N, i, T, reached_grad, N)


@triton.jit
def own_keys_kernel(
    q,
    k,
    v,
    w,
    met,
    first,
    high,
    low,
    log_sums,
    exact_means,
    out_grad,
    k_grad,
    v_grad,
    met_grad,
    keys_grad,
    T,
    TILES,
    first_batch,
    scale,
    G,
    H: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_GATES: tl.constexpr,
):
    """The gradients that a tile of keys gets from its own queries, after all chunks. The grid is (tiles, H // G, B).

    Args:
        k_grad, met_grad: results, fp32, as k and met.
        v_grad, keys_grad: sums so far, as of `keys_kernel`.
        G: as always, but no constant: a loop that the compiler unrolls takes too many registers.
    """
    tile = tl.program_id(0)
    b, group, kv_head = numbers_of_key_heads()

    i = tile * N + tl.arange(0, N)
    tile_rows = kv_head * TILES * N + i
    first_key = tl.load(first + b * first_batch * T + i, mask=i < T, other=TILES * N)
    k_acc = tl.zeros([N, D], tl.float32)
    v_acc = tl.zeros([N, D], tl.float32)
    met_acc = tl.zeros([N, N], tl.float32)
    for g in tl.range(0, G, disable_licm=True):
        head = (b * H + group * G + g).to(tl.int64)
        q_tile = load_rows(q + head * T * D, i, T, D)
        out_grad_tile = load_rows(out_grad + head * T * D, i, T, D)
        log_sum = load_numbers(log_sums + head * T, i, T)
        mean = load_numbers(exact_means + head * T, i, T)

        reached = reached_by(i, q_tile, load_rows(w + kv_head * T * D, i, T, D), PRECISION)
        logits = scores_of(q_tile, load_rows(k + kv_head * T * D, i, T, D), 1.0)
        logits -= exact_product(reached, load_tile(met, tile_rows, N), PRECISION)
        scores = scores_with_gates(logits, i, i, first_key, high + head * T, low + head * T, T, scale, HAS_GATES)
        weights = tl.exp2(scores - log_sum[:, None])
        v_acc += product_with_columns(weights, out_grad_tile)
        weight_grads = scores_of(out_grad_tile, load_rows(v + kv_head * T * D, i, T, D), 1.0)
        score_grads = weights * (weight_grads - mean[:, None])
        k_acc += product_with_columns(score_grads * scale, q_tile)
        met_acc -= exact_product(tl.trans(reached), score_grads * scale, PRECISION)
        if HAS_GATES:
            add_to(keys_grad + head * T + i, tl.sum(score_grads, 0), i < T)

    places = kv_head * T * D + i[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(k_grad + places, k_acc, mask=i[:, None] < T)
    add_to(v_grad + places, v_acc, i[:, None] < T)
    tl.store(met_grad + tile_rows[:, None] * N + tl.arange(0, N)[None, :], met_acc)


@triton.jit
def reflections_kernel(
    q,
    w,
    own_grads,
    reached_grads,
    w_grad,
    u_grad,
    T,
    TILES,
    G,
    H: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradients that the reflections of a tile get from its queries. The grid is (tiles, H // G, B).

    Args:
        own_grads, reached_grads: as of `own_queries_kernel`.
        w_grad, u_grad: results, fp32, as w and u.
        G: as of `own_keys_kernel`.
    """
    tile = tl.program_id(0)
    b, group, kv_head = numbers_of_key_heads()

    i = tile * N + tl.arange(0, N)
    w_acc = tl.zeros([N, D], tl.float32)
    u_acc = tl.zeros([N, D], tl.float32)
    for g in tl.range(0, G, disable_licm=True):
        head = (b * H + group * G + g).to(tl.int64)
        q_tile = load_rows(q + head * T * D, i, T, D)
        reached = reached_by(i, q_tile, load_rows(w + kv_head * T * D, i, T, D), PRECISION)
        grad = load_rows(own_grads + head * T * D, i, T, D)
        reached_grad = load_rows(reached_grads + head * T * N, i, T, N)
        u_acc -= exact_product(tl.trans(reached), grad, PRECISION)
        w_acc += exact_product(tl.trans(reached_grad), q_tile.to(tl.float32), PRECISION)

    channels = tl.arange(0, D)
    places = i[:, None] * D + channels[None, :]
    tl.store(w_grad + kv_head * T * D + places, w_acc, mask=i[:, None] < T)
    tl.store(u_grad + kv_head * TILES * N * D + places, u_acc)


@torch.library.custom_op("ropewalk::path", mutates_args=())
@launched
def _path(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    first: Tensor,
    last: Tensor,
    high: Maybe,
    low: Maybe,
    sinks: Maybe,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The output [B, H, T, D], and `log_sums`, fp32 [B, H, T]."""
    out, log_sums = _empty_output(q, k, v, w, beta, first, last, high, low, sinks, scale)
    size = tiles(q.size(3), q.element_size())
    _, places = places_of(k, w, beta, size, precision_of(q.element_size()))
    grid = (triton.cdiv(q.size(2), size.tokens), q.size(1), q.size(0))
    forward_kernel[grid](
        q,
        k,
        v,
        w,
        *places,
        first,
        or_unused(high, log_sums),
        or_unused(low, log_sums),
        or_unused(sinks, log_sums),
        out,
        log_sums,
        q.size(2),
        places.carried.size(2),
        int(first.ndim > 1),
        scale,
        **_flags(q, k),
        R=size.span,
        HAS_GATES=high is not None,
        HAS_SINKS=sinks is not None,
        num_warps=size.forward_warps,
        num_stages=2,
    )
    return out, log_sums


@_path.register_fake
def _empty_output(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    first: Tensor,
    last: Tensor,
    high: Maybe,
    low: Maybe,
    sinks: Maybe,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("ropewalk::path_backward", mutates_args=())
@launched
def _path_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    first: Tensor,
    last: Tensor,
    high: Maybe,
    low: Maybe,
    scale: float,
    log_sums: Tensor,
    means: Tensor,
    out_grad: Tensor,
) -> list[Tensor]:
    """The gradients of q, k, v, w, beta and keys [B, H, T] (of a key, not yet of its query), and the exact means."""
    size = tiles(q.size(3), q.element_size())
    precision = precision_of(q.element_size())
    # Made again: to keep them would take several times the memory of q, k and v.
    inverses, places = places_of(k, w, beta, size, precision)
    met, u, carried, crossings = places

    n_batch, n_head, length, head_dim = q.shape
    n_tiles = carried.size(2)
    chunk = size.tokens * max(1, min(CHUNK // size.tokens, triton.cdiv(length, size.tokens)))

    # Zeros are what chunks of queries add to; all others are written once.
    q_grad, w_grad, met_grad, u_grad = (torch.empty_like(x) for x in (q, w, met, u))
    k_grad = torch.empty_like(k, dtype=torch.float32)
    v_grad, carried_grad, crossings_grad, keys_grad = (
        torch.zeros_like(x) for x in (k_grad, carried, crossings, log_sums)
    )
    exact_means = torch.empty_like(log_sums)
    own_grads = torch.empty_like(q, dtype=torch.float32)
    reached_grads = own_grads.new_empty((*q.shape[:3], size.tokens))
    passed_at = own_grads.new_empty((n_batch, n_head, n_tiles // size.span, chunk, head_dim))
    grads_at = torch.empty_like(passed_at)

    # What the kernels take. First the gradient of queries, since it also makes the exact means that the keys need.
    gates = (or_unused(high, log_sums), or_unused(low, log_sums))
    sizes = (length, n_tiles, int(first.ndim > 1))
    flags = _flags(q, k) | {"num_warps": size.backward_warps, "num_stages": 2}
    has_gates = {"HAS_GATES": high is not None}
    chunks = {"R": size.span, "C": chunk}
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        in_queries = (triton.cdiv(stop - start, size.tokens), n_head, n_batch)
        in_keys = (triton.cdiv(stop, size.tokens), k.size(1), n_batch)
        queries_kernel[in_queries](
            q, k, v, w, *places, first, *gates, log_sums, means, out_grad, exact_means, own_grads, passed_at, grads_at,
            start, *sizes, scale, **flags, **has_gates, **chunks,
        )  # fmt: skip
        keys_kernel[in_keys](
            v, carried, first, last, *gates, log_sums, exact_means, out_grad, v_grad, carried_grad, keys_grad,
            passed_at, start, *sizes, scale, **flags, **has_gates, **chunks,
        )  # fmt: skip
        crossings_kernel[in_keys](last, crossings_grad, passed_at, grads_at, start, *sizes, **flags, **chunks)

    # Within tiles, after all chunks.
    own_queries_kernel[(triton.cdiv(length, size.tokens), n_head, n_batch)](
        q, k, v, w, met, u, first, *gates, log_sums, means, out_grad, q_grad, own_grads, reached_grads, *sizes, scale,
        **flags, **has_gates,
    )  # fmt: skip
    all_tiles = (n_tiles, k.size(1), n_batch)
    flags |= {"num_stages": size.own_stages}
    own_keys_kernel[all_tiles](
        q, k, v, w, met, first, *gates, log_sums, exact_means, out_grad, k_grad, v_grad, met_grad, keys_grad, *sizes,
        scale, **flags, **has_gates,
    )  # fmt: skip
    reflections_kernel[all_tiles](q, w, own_grads, reached_grads, w_grad, u_grad, length, n_tiles, **flags)

    place_grads = Places(met_grad, u_grad, carried_grad, crossings_grad)
    beta_grad = add_gradients(k, w, beta, inverses, places, place_grads, k_grad, w_grad, size, precision)
    return [q_grad, k_grad.to(k.dtype), v_grad.to(v.dtype), w_grad, beta_grad, keys_grad, exact_means]


@_path_backward.register_fake
def _empty_grads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    first: Tensor,
    last: Tensor,
    high: Maybe,
    low: Maybe,
    scale: float,
    log_sums: Tensor,
    means: Tensor,
    out_grad: Tensor,
) -> list[Tensor]:
    return [torch.empty_like(x) for x in (q, k, v, w, beta, log_sums, means)]


def _flags(q: Tensor, k: Tensor) -> dict[str, Any]:
    """What the kernels of attention are compiled for."""
    _, n_head, _, head_dim = q.shape
    return {
        "H": n_head,
        "G": n_head // k.size(1),
        "D": head_dim,
        "N": tiles(head_dim, q.element_size()).tokens,
        "PRECISION": precision_of(q.element_size()),
    }


def _backward(ctx: Any, out_grad: Tensor, _: Tensor) -> tuple[Maybe, ...]:
    """Return the gradients of the inputs of `_path`, None for those without one.

    Args:
        out_grad: of the output, [B, H, T, D]; the logarithms are not differentiated.
    """
    *inputs, sinks, out, log_sums = ctx.saved_tensors
    out_grad = out_grad.contiguous()
    means = means_of(out, out_grad)  # [B, H, T]
    *grads, keys_grad, exact_means = torch.ops.ropewalk.path_backward(*inputs, ctx.scale, log_sums, means, out_grad)
    sinks_grad = None
    if sinks is not None:
        # As in `lab.kernels.flash`: what is subtracted from the scores of all other keys has a gradient, too.
        sink_score_grads = grads_of_sinks(sinks, log_sums, exact_means)  # [B, H, T]
        sinks_grad = sink_score_grads.sum((0, 2))
        keys_grad = keys_grad + sink_score_grads
    has_gates = inputs[-2] is not None
    return *grads, None, None, keys_grad if has_gates else None, None, sinks_grad, None


_path.register_autograd(_backward, setup_context=keep_inputs)


def path(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    beta: Tensor,
    first: Tensor,
    last: Tensor,
    *,
    scale: float,
    keys: Maybe = None,
    sinks: Maybe = None,
) -> Tensor:
    """PaTH attention [B, H, T, D], of as many queries as keys: see `model.position.path`.

    Gradients of `keys` and `sinks` are sums in fp32, whatever the dtype of q.

    Args:
        q: queries [B, H, T, D], fp32, bf16 or fp16; D at most `MAX_WIDTH`.
        k, v: keys and values [B, Hkv, T, D] of the same dtype; H is a multiple of Hkv.
        w: unit vectors [B, Hkv, T, D], fp32.
        beta: strengths of the reflections, fp32 [B, Hkv, T, 1].
        first: the first key that each query sees, int32 [T] or [B, T], ascending; the last one is its own.
        last: the last query that sees each key, int32 [T] or [B, T], ascending; the first one is its own.
        keys: a number of each key; that of key j less that of query i is added to their score: [B, H, T], fp32 or
            better.
        sinks: a logit for each head, [H]: see `model.attention.softmax`.
    """
    head_dim = q.size(3)
    q, k, v, w = padded(q, k, v, w)
    high, low = (None, None) if keys is None else high_and_low(keys)
    sinks = None if sinks is None else sinks.float()
    out, _ = _path(q, k, v, w, beta.squeeze(3).contiguous(), first, last, high, low, sinks, scale)
    return out[..., :head_dim]


def errors(device: str, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of `path` and its gradients on a device, against the specification in float64.

    One call with everything at once: grouped heads, a window, forget gates, sinks, three spans, and tiles that are not
    full.
    """
    from lab.zoo.path import within_block

    length = 300
    window = 280
    i = torch.arange(length, device=device)
    distance = i[:, None] - i
    visible = (distance >= 0) & (distance < window)
    first, last = seen_range(length, window, device)
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device)

    inputs = {name: random(1, heads, length, 64).to(dtype) for name, heads in (("q", 2), ("k", 1), ("v", 1))}
    inputs["w"] = F.normalize(random(1, 1, length, 64), dim=-1)
    inputs["beta"] = 2 * random(1, 1, length, 1).sigmoid()
    # Sums of forget gates, which old keys pass.
    inputs["keys"] = random(1, 2, length).double().abs().div(20).cumsum(2)
    inputs["sinks"] = random(2)
    out_grad = random(1, 2, length, 64).to(dtype)

    def exact(
        q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, keys: Tensor, sinks: Tensor
    ) -> Tensor:  # the text is one block
        logits, _ = within_block(q, k, w, beta)
        scores = logits / 8 + keys[:, :, None] - keys[..., None]
        return softmax(scores.masked_fill(~visible, -torch.inf), sinks) @ v

    kernel = partial(path, first=first, last=last, scale=1 / 8)
    return relative_errors(kernel, exact, inputs, out_grad)
