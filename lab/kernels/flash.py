"""Flash attention in Triton for scores with a bias, for windows, documents and sinks: memory linear in the length.

`model.attention` without it is its specification. The method is that of FlashAttention 2 (arXiv 2307.08691): a program
holds one tile of the scores at a time, and the backward pass computes the tiles again. What is added to scores is a set
of functions of `lab.kernels.biases`. A query sees a run of keys that ends with its own, so two rows of integers
describe windows and documents alike.

What the paper calls m, l, L and D is here

    highest     the running maximum of a query's scores
    total       the running sum of exp(score - highest)
    log_sums    the logarithm of the sum of exp(score), which the forward pass keeps for the backward pass
    means       the sum over keys of weight x its gradient, which equals the sum over channels of output x its gradient

Scores and their logarithms are to base 2, for a GPU computes exp2 faster than exp. In the kernels there are `T` tokens,
heads have `D` channels, `G` heads of queries share one of keys, and a tile is of `BM` queries and `BN` keys.

Most tiles are full: each of their queries sees each of their keys, and nothing is compared. The others are at the two
ends of what is seen. A program first takes these, and then the full ones.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from lab.kernels.biases import BIASES, INTERPRETED
from lab.kernels.ops import (
    LOG2E,
    Inputs,
    Outputs,
    Tile,
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

# The tiles of the three kernels for heads of up to so many channels, and those that are better with some biases. On
# Hopper, but for 256 channels, they are the fastest of about ten that were tried: with four warps 64 rows are what one
# instruction multiplies.
HOPPER = {
    64: (Tile(64, 128, 4), Tile(64, 64, 4), Tile(64, 64, 4)),
    128: (Tile(64, 64, 4, stages=3), Tile(64, 64, 4), Tile(32, 64, 4)),
    256: (Tile(32, 32, 4), Tile(32, 32, 4), Tile(32, 32, 4)),
    ("nothing", 64): (Tile(64, 64, 4, stages=3), Tile(64, 64, 4), Tile(64, 64, 4)),
    # The last one of a row must be a square.
    ("row", 64): (Tile(64, 64, 4, stages=3), Tile(64, 64, 4), Tile(64, 64, 4)),
    ("row", 128): (Tile(128, 64, 8, stages=3), Tile(64, 64, 4), Tile(64, 64, 4, stages=1)),
    ("fire", 64): (Tile(64, 128, 4), Tile(64, 32, 4, stages=3), Tile(64, 64, 4, stages=1)),
    ("fire", 128): (Tile(64, 64, 4), Tile(64, 32, 4), Tile(32, 64, 4)),
    # One size for both kernels of the backward pass: the first keeps numbers for tiles of the second.
    ("cope", 64): (Tile(64, 32, 4), Tile(64, 32, 4), Tile(64, 32, 4)),
    ("cope", 128): (Tile(64, 32, 4), Tile(64, 32, 4), Tile(64, 32, 4)),
}
# With these hardly a register is spilled, on GPUs from sm_80 on and with every Triton that is supported, and all fit
# into shared memory.
OTHER = {
    64: (Tile(128, 64, 8), Tile(64, 64, 8), Tile(64, 32, 4)),
    128: (Tile(64, 64, 4), Tile(64, 64, 8), Tile(32, 32, 4)),
    256: (Tile(32, 32, 4), Tile(32, 32, 4), Tile(32, 32, 4)),
    ("row", 64): (Tile(128, 64, 8), Tile(64, 64, 8), Tile(32, 32, 4)),
    ("fire", 64): (Tile(128, 64, 8), Tile(64, 32, 4, stages=1), Tile(32, 64, 4, stages=1)),
    ("fire", 128): (Tile(64, 64, 4), Tile(32, 32, 4), Tile(32, 32, 4)),
    ("cope", 64): (Tile(32, 32, 4), Tile(32, 32, 4), Tile(32, 32, 4)),
    ("cope", 128): (Tile(32, 32, 4), Tile(32, 32, 8), Tile(32, 32, 8)),
}


def tiles(head_dim: int, bias: str) -> tuple[Tile, Tile, Tile]:
    """The tiles of the kernels of forward pass, queries and keys, for heads of `head_dim` channels, a power of two."""
    # The interpreter takes those that a GPU has run.
    table = HOPPER if INTERPRETED or driver.active.get_current_target().arch // 10 == 9 else OTHER
    width = max(64, head_dim)
    return table.get((bias, width), table[width])


@triton.jit
def range_of_keys(first, i0, T, BM: tl.constexpr, BN: tl.constexpr):
    """The tiles of keys that a block of queries from i0 on sees: their first key, their number; of the full ones, too.

    Args:
        first: the first key that each query sees, ascending.
    """
    last_row = tl.minimum(i0 + BM, T) - 1
    start = tl.load(first + i0) // BN * BN
    n_tiles = tl.cdiv(last_row + 1 - start, BN)
    full_start = tl.cdiv(tl.load(first + last_row), BN) * BN
    n_full = tl.maximum((i0 + 1) // BN * BN - full_start, 0) // BN
    return start, n_tiles, full_start, n_full


@triton.jit
def range_of_queries(last, j0, T, BM: tl.constexpr, BN: tl.constexpr):
    """The tiles of queries that see a block of keys from j0 on, as `range_of_keys`.

    Args:
        last: the last query that sees each key, ascending.
    """
    last_row = tl.minimum(j0 + BN, T) - 1
    start = j0 // BM * BM
    n_tiles = tl.cdiv(tl.load(last + last_row) + 1 - start, BM)
    full_start = tl.cdiv(last_row, BM) * BM
    full_stop = (tl.load(last + j0) + 1) // BM * BM
    n_full = tl.where(j0 + BN > T, 0, tl.maximum(full_stop - full_start, 0) // BM)
    return start, n_tiles, full_start, n_full


@triton.jit
def nth_tile(n, span, N: tl.constexpr, IS_FULL: tl.constexpr):
    """Where the n-th full tile of a range begins, or the n-th of the others: those before the full ones come first."""
    start, _n_tiles, full_start, n_full = span
    begin = start + n * N
    other = tl.where((n_full > 0) & (begin >= full_start), begin + n_full * N, begin)
    return full_start + n * N if IS_FULL else other


@triton.jit
def hidden(scores, first, tile, IS_FULL: tl.constexpr):
    """`scores` of a tile with -inf where query i does not see key j."""
    _i0, _j0, i, j, T = tile
    first_key = tl.load(first + i, mask=i < T, other=T + j.numel)  # queries beyond the end see no key
    return scores if IS_FULL else tl.where((j <= i) & (j >= first_key), scores, float("-inf"))


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
    ROWS: tl.constexpr,
    SCORE: tl.constexpr,
):
    """The output of BM queries of a head, and their `log_sums`. The grid is (blocks of queries, H, B).

    Args:
        x: see `Inputs`.
        out: result [B, H, T, D].
        log_sums: result [B, H, T].
        scale: the factor of q.k.
        P, ROWS, SCORE: the bias, see `lab.kernels.biases`.
    """
    # A program has a block of queries of one head. The last blocks, which see the most keys, come first.
    i0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    b, h, head, kv_head = numbers_of_heads(G)
    i = i0 + tl.arange(0, BM)
    q_tile = load_rows(x.q, head, i, T, D)
    rows = ROWS(x.extra, x.extra, h, head, i[:, None], T, P)

    # The softmax of a row over all tiles so far: its highest score, and the sum of 2^(score - highest).
    highest, total, acc = start_of_softmax(x.sinks, h, BM, D)
    span = range_of_keys(x.first_key + b * T, i0, T, BM, BN)
    for IS_FULL in tl.static_range(2):
        for n in range(0, span[3] if IS_FULL else span[1] - span[3]):
            j0 = nth_tile(n, span, BN, IS_FULL)
            j = j0 + tl.arange(0, BN)
            tile = (i0, j0, i[:, None], j[None, :], T)
            k_tile = load_rows(x.k, kv_head, j, T, D, IS_FULL)
            v_tile = load_rows(x.v, kv_head, j, T, D, IS_FULL)
            scores = SCORE(scores_of(q_tile, k_tile, scale * LOG2E), rows, tile, P)
            scores = hidden(scores, x.first_key + b * T, tile, IS_FULL)
            highest, total, acc = add_tile(scores, v_tile, highest, total, acc)
    store_softmax(out, log_sums, head, i, T, highest, total, acc, D)


@triton.jit
def queries_kernel(
    x,
    y,
    q_grad,
    dest,
    scale,
    T,
    G: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ROWS: tl.constexpr,
    SCORE: tl.constexpr,
    GRAD: tl.constexpr,
    STORE: tl.constexpr,
):
    """The gradient of BM queries of a head, and their means. The grid is (blocks of queries, H, B).

    Means from the output may be rounded to 16 bit. That is enough for q. A bias sums up gradients of scores that nearly
    cancel, so `keys_kernel`, which runs after this one, takes the exact means, which are summed here.

    Args:
        x, y: see `Inputs` and `Outputs`; `y.means` is a result.
        q_grad: result [B, H, T, D].
        dest, GRAD, STORE: results of the bias, and how they are summed.
    """
    i0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    b, h, head, kv_head = numbers_of_heads(G)
    i = i0 + tl.arange(0, BM)
    out_grad_tile = load_rows(y.out_grad, head, i, T, D)
    mean = mean_of(y, head, i, T, out_grad_tile, D)
    q_tile = load_rows(x.q, head, i, T, D)
    log_sum = load_numbers(y.log_sums, head, i, T, float("inf"))  # queries beyond the end have no weights
    rows = ROWS(x.extra, dest, h, head, i[:, None], T, P)

    exact_mean = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    sums = (exact_mean, exact_mean, exact_mean, exact_mean)
    span = range_of_keys(x.first_key + b * T, i0, T, BM, BN)
    for IS_FULL in tl.static_range(2):
        for n in range(0, span[3] if IS_FULL else span[1] - span[3]):
            j0 = nth_tile(n, span, BN, IS_FULL)
            j = j0 + tl.arange(0, BN)
            tile = (i0, j0, i[:, None], j[None, :], T)
            k_tile = load_rows(x.k, kv_head, j, T, D, IS_FULL)
            v_tile = load_rows(x.v, kv_head, j, T, D, IS_FULL)
            # The scores are computed again, and `log_sum` makes weights of them without a second pass over the row.
            scores = SCORE(scores_of(q_tile, k_tile, scale * LOG2E), rows, tile, P)
            scores = hidden(scores, x.first_key + b * T, tile, IS_FULL)
            weights = tl.exp2(scores - log_sum[:, None])
            weight_grads = scores_of(out_grad_tile, v_tile, 1.0)
            exact_mean += tl.sum(weights * weight_grads, 1)
            # The derivative of the softmax: what the gradient of a weight exceeds the mean by.
            score_grads = weights * (weight_grads - mean[:, None])
            acc += product(score_grads, k_tile)
            sums = GRAD(sums, score_grads, weights, rows, tile, P, IS_FULL)

    store_rows(q_grad, head, i, T, acc * scale, D)
    store_numbers(y.means, head, i, T, exact_mean)
    STORE(sums, exact_mean - mean, rows, i, T, P)


@triton.jit
def keys_kernel(
    x,
    y,
    k_grad,
    v_grad,
    dest,
    scale,
    T,
    G: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ROWS: tl.constexpr,
    SCORE: tl.constexpr,
    GRAD: tl.constexpr,
    STORE: tl.constexpr,
):
    """The gradients of BN keys and their values, over the G heads that share them, and of what is added to scores.

    The grid is (blocks of keys, H // G, B). One program sums up all that a key gets. Keys are the rows of its tiles,
    and queries their columns: so products with queries and gradients of outputs need not turn them.
    """
    j0 = tl.program_id(0) * BN
    b, _group, kv_head, _ = numbers_of_heads(1)
    j = j0 + tl.arange(0, BN)
    k_tile = load_rows(x.k, kv_head, j, T, D)
    v_tile = load_rows(x.v, kv_head, j, T, D)

    k_acc = tl.zeros([BN, D], tl.float32)
    v_acc = tl.zeros([BN, D], tl.float32)
    span = range_of_queries(x.last_query + b * T, j0, T, BM, BN)
    for head in range(kv_head * G, kv_head * G + G):
        h = head - b * tl.num_programs(1) * G
        sums = (tl.zeros([BN], tl.float32), tl.zeros([P], tl.float32), tl.zeros([P], tl.float32))
        for IS_FULL in tl.static_range(2):
            for n in range(0, span[3] if IS_FULL else span[1] - span[3]):
                i0 = nth_tile(n, span, BM, IS_FULL)
                i = i0 + tl.arange(0, BM)
                tile = (i0, j0, i[None, :], j[:, None], T)
                q_tile = load_rows(x.q, head, i, T, D, IS_FULL)
                out_grad_tile = load_rows(y.out_grad, head, i, T, D, IS_FULL)
                log_sum = load_numbers(y.log_sums, head, i[None, :], T, float("inf"))
                mean = load_numbers(y.means, head, i[None, :], T)
                rows = ROWS(x.extra, dest, h, head, i[None, :], T, P)
                scores = SCORE(scores_of(k_tile, q_tile, scale * LOG2E), rows, tile, P)
                scores = hidden(scores, x.first_key + b * T, tile, IS_FULL)
                # Weights and the gradients of scores as in `queries_kernel`.
                weights = tl.exp2(scores - log_sum)
                v_acc += product(weights, out_grad_tile)
                weight_grads = scores_of(v_tile, out_grad_tile, 1.0)
                score_grads = weights * (weight_grads - mean)
                k_acc += product(score_grads, q_tile)
                sums = GRAD(sums, score_grads, weights, rows, tile, P, IS_FULL)
        STORE(sums, ROWS(x.extra, dest, h, head, j, T, P), j, T, P)

    store_rows(k_grad, kv_head, j, T, k_acc * scale, D)
    store_rows(v_grad, kv_head, j, T, v_acc, D)


def constants(x: Inputs, bias: str) -> dict[str, Any]:
    """What all kernels are compiled for."""
    added = BIASES[bias]
    size = x.extra[0].size(-1) if bias == "fire" else 1
    return {"G": x.q.size(1) // x.k.size(1), "P": size, "ROWS": added.rows, "SCORE": added.score}


def backward(x: Inputs, y: Outputs, bias: str, scale: float) -> list[Tensor]:
    """The gradients of q, k, v and of what the bias depends on; writes `y.means`."""
    q_grad, k_grad, v_grad = (torch.empty_like(tensor) for tensor in x[:3])
    dest = tuple(torch.zeros_like(tensor) for tensor in x.extra)
    added = BIASES[bias]
    length = x.q.size(2)
    _, tile, tile_of_keys = tiles(x.q.size(3), bias)
    # First the queries: the keys need their exact means.
    hooks = constants(x, bias) | {"GRAD": added.query_grad, "STORE": added.query_store}
    launch(queries_kernel, tile, triton.cdiv(length, tile.queries), x.q, x, y, q_grad, dest, scale, **hooks)
    hooks |= {"GRAD": added.key_grad, "STORE": added.key_store}
    launch(
        keys_kernel, tile_of_keys, triton.cdiv(length, tile_of_keys.keys),
        x.k, x, y, k_grad, v_grad, dest, scale, **hooks,
    )  # fmt: skip
    return [q_grad, k_grad, v_grad, *dest]
