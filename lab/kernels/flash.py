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

Scores and their logarithms are to base 2, for a GPU computes exp2 faster than exp. In the kernels `D` is the number of
channels of a head.

Most tiles are full: each of their queries sees each of their keys, and nothing is compared. The others are at the two
ends of what is seen. A program first takes these, and then the full ones.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.kernels.biases import BIASES
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
    registered,
    scores_of,
    store_numbers,
    store_rows,
)


class Tile(NamedTuple):
    """Size of the tiles of a kernel, its number of warps, and the registers of a thread (None: as many as it wants)."""

    queries: int
    keys: int
    warps: int
    registers: int | None = None

    def options(self) -> dict[str, int | None]:
        """What a kernel with these tiles is compiled for."""
        options = {"BM": self.queries, "BN": self.keys, "num_warps": self.warps, "num_stages": 2}
        return options if self.registers is None else options | {"maxnreg": self.registers}


class Tiles(NamedTuple):
    """The tiles of each kernel."""

    forward: Tile
    of_queries: Tile
    of_keys: Tile


def tiles(head_dim: int, element_size: int, bias: str) -> Tiles:
    """Sizes with which no kernel spills much, and which fit into the shared memory of every GPU from sm_80 on.

    Args:
        head_dim: a power of two up to 256.
        element_size: bytes of an element of q.
        bias: its name.
    """
    if element_size * head_dim > 512:
        return Tiles(*[Tile(16, 16, 4)] * 3)
    if element_size == 4 or head_dim > 128:  # fp32 has no matrix units, and its products are unrolled
        return Tiles(*[Tile(32, 32, 4)] * 3)
    if head_dim > 64:
        if bias == "fire":
            return Tiles(Tile(64, 64, 4), Tile(64, 32, 4), Tile(32, 64, 8))
        return Tiles(Tile(64, 64, 4), Tile(64, 64, 8), Tile(64, 64, 8))
    if bias == "fire":
        # On Hopper four warps hold a tile of 64 queries the same way in both products of the backward pass. With eight,
        # scores would move between threads, and their places would be computed twice.
        return Tiles(Tile(128, 64, 8), Tile(64, 32, 4), Tile(64, 64, 4))
    # Without a bias the kernel of the queries wants 132 registers. With 128 it has as many instructions, and Hopper
    # runs two programs side by side.
    registers = 128 if bias == "nothing" else None
    return Tiles(Tile(128, 64, 8), Tile(64, 64, 8, registers), Tile(64, 64, 8))


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
def partial_tile(n, start, full_start, n_full, N: tl.constexpr):
    """Where the n-th tile that is not full begins: those before the full ones come first, then those after them."""
    begin = start + n * N
    return tl.where((n_full > 0) & (begin >= full_start), begin + n_full * N, begin)


@triton.jit
def hidden(scores, first, i, j, T, BN: tl.constexpr):
    """`scores` with -inf where query i, [M, 1] or [1, M], does not see key j, [1, N] or [N, 1]."""
    first_key = tl.load(first + i, mask=i < T, other=T + BN)  # queries beyond the end see no key
    return tl.where((j <= i) & (j >= first_key), scores, float("-inf"))


@triton.jit
def load_log_sums(log_sums, i, T):
    """The `log_sums` of the queries i. Those beyond the end have no weights."""
    return tl.load(log_sums + i, mask=i < T, other=float("inf"))


@triton.jit
def forward_tile(
    highest, total, acc, q_tile, k, v, first, rows, i0, j0, T, scale,
    D: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SCORE: tl.constexpr, IS_FULL: tl.constexpr,
):  # fmt: skip
    """Add the tile of keys from j0 on to the softmax of the queries from i0 on: see `add_tile`."""
    i = (i0 + tl.arange(0, BM))[:, None]
    keys = j0 + tl.arange(0, BN)
    j = keys[None, :]
    k_tile = load_rows(k, keys, T, D, IS_FULL)
    v_tile = load_rows(v, keys, T, D, IS_FULL)
    scores = SCORE(scores_of(q_tile, k_tile, scale), rows, i0, j0, i, j, T, BM, BN, P)
    if not IS_FULL:
        scores = hidden(scores, first, i, j, T, BN)
    return add_tile(scores, v_tile, highest, total, acc)


@triton.jit
def forward_kernel(
    q, k, v, first, extra, sinks, out, log_sums, T, first_batch, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    HAS_SINKS: tl.constexpr, ROWS: tl.constexpr, SCORE: tl.constexpr,
):  # fmt: skip
    """The output of BM queries of a head, and their `log_sums`. The grid is (blocks of queries, H, B).

    The kernels of the backward pass take the same.

    Args:
        q: queries [B, H, T, D].
        k, v: keys and values [B, H // G, T, D]; G heads of queries share one of keys.
        first: the first key that each query sees, [T] or [B, T], ascending; the last one is its own.
        extra: tensors of the bias.
        sinks: a logit for each head, [H].
        out: result [B, H, T, D].
        log_sums: result [B, H, T].
        first_batch: 1 if each text has its own `first` (and `last`); 0 if all share them.
        scale: the factor of q.k, times LOG2E.
        HAS_SINKS: there are `sinks`; otherwise these are never read.
        ROWS, SCORE: the bias, as P: see `lab.kernels.biases`.
    """
    # A program has a block of queries of one head. The last blocks, which see the most keys, come first.
    i0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    b, h, head, kv_head = numbers_of_heads(H, G)
    first += b * first_batch * T
    k += kv_head * T * D
    v += kv_head * T * D
    i = i0 + tl.arange(0, BM)
    q_tile = load_rows(q + head * T * D, i, T, D)
    rows = ROWS(extra, b, h, H, T, i[:, None], P)

    # The softmax of a row over all tiles so far: its highest score, and the sum of 2^(score - highest).
    highest = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    if HAS_SINKS:  # the sum over keys begins with the sink
        highest = tl.zeros([BM], tl.float32) + tl.load(sinks + h) * LOG2E
        total += 1.0
    acc = tl.zeros([BM, D], tl.float32)

    start, n_tiles, full_start, n_full = range_of_keys(first, i0, T, BM, BN)
    for n in range(0, n_tiles - n_full):
        j0 = partial_tile(n, start, full_start, n_full, BN)
        highest, total, acc = forward_tile(
            highest, total, acc, q_tile, k, v, first, rows, i0, j0, T, scale, D, P, BM, BN, SCORE, False
        )
    for j0 in range(full_start, full_start + n_full * BN, BN):
        highest, total, acc = forward_tile(
            highest, total, acc, q_tile, k, v, first, rows, i0, j0, T, scale, D, P, BM, BN, SCORE, True
        )
    total = tl.where(total == 0.0, 1.0, total)  # queries that see no key, and those beyond the end

    store_rows(out + head * T * D, i, T, acc / total[:, None], D)
    store_numbers(log_sums + head * T, i, T, highest + tl.log2(total))


@triton.jit
def queries_tile(
    exact_mean, acc, sums, q_tile, out_grad_tile, log_sum, mean, k, v, first, rows, dest, h, head, i0, j0, T, scale,
    D: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    SCORE: tl.constexpr, GRAD: tl.constexpr, IS_FULL: tl.constexpr,
):  # fmt: skip
    """Add what the tile of keys from j0 on gives to the exact mean, the gradient of q, and the sums of the bias."""
    i = (i0 + tl.arange(0, BM))[:, None]
    keys = j0 + tl.arange(0, BN)
    j = keys[None, :]
    k_tile = load_rows(k, keys, T, D, IS_FULL)
    v_tile = load_rows(v, keys, T, D, IS_FULL)
    scores = SCORE(scores_of(q_tile, k_tile, scale), rows, i0, j0, i, j, T, BM, BN, P)
    if not IS_FULL:
        scores = hidden(scores, first, i, j, T, BN)

    # The scores are computed again, and `log_sum` makes weights of them without a second pass over the row.
    weights = tl.exp2(scores - log_sum[:, None])
    weight_grads = scores_of(out_grad_tile, v_tile, 1.0)
    exact_mean += tl.sum(weights * weight_grads, 1)
    # The derivative of the softmax: what the gradient of a weight exceeds the mean by.
    score_grads = weights * (weight_grads - mean[:, None])
    acc += product(score_grads, k_tile)
    sums = GRAD(sums, score_grads, weights, rows, dest, h, head, i0, j0, i, j, T, BM, BN, P, IS_FULL)
    return exact_mean, acc, sums


@triton.jit
def queries_kernel(
    q, k, v, first, extra, dest, out, log_sums, out_grad, q_grad, exact_means, T, first_batch, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    ROWS: tl.constexpr, SCORE: tl.constexpr,
    START: tl.constexpr, GRAD: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """The gradient of BM queries of a head, and their means. The grid is (blocks of queries, H, B).

    Means from the output may be rounded to 16 bit. That is enough for q. A bias sums up gradients of scores that nearly
    cancel, so `keys_kernel`, which runs after this one, takes the exact means, which are summed here.

    Args:
        dest: results of the bias.
        exact_means: result [B, H, T].
    """
    i0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    b, h, head, kv_head = numbers_of_heads(H, G)
    first += b * first_batch * T
    k += kv_head * T * D
    v += kv_head * T * D
    i = i0 + tl.arange(0, BM)
    out_grad_tile = load_rows(out_grad + head * T * D, i, T, D)
    out_tile = load_rows(out + head * T * D, i, T, D)
    mean = tl.sum(out_tile.to(tl.float32) * out_grad_tile.to(tl.float32), 1)
    q_tile = load_rows(q + head * T * D, i, T, D)
    log_sum = load_log_sums(log_sums + head * T, i, T)
    rows = ROWS(extra, b, h, H, T, i[:, None], P)

    exact_mean = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    sums = START(BM, P)
    start, n_tiles, full_start, n_full = range_of_keys(first, i0, T, BM, BN)
    for n in range(0, n_tiles - n_full):
        j0 = partial_tile(n, start, full_start, n_full, BN)
        exact_mean, acc, sums = queries_tile(
            exact_mean, acc, sums, q_tile, out_grad_tile, log_sum, mean, k, v, first, rows, dest, h, head, i0, j0, T,
            scale, D, P, BM, BN, SCORE, GRAD, False,
        )  # fmt: skip
    for j0 in range(full_start, full_start + n_full * BN, BN):
        exact_mean, acc, sums = queries_tile(
            exact_mean, acc, sums, q_tile, out_grad_tile, log_sum, mean, k, v, first, rows, dest, h, head, i0, j0, T,
            scale, D, P, BM, BN, SCORE, GRAD, True,
        )  # fmt: skip

    store_rows(q_grad + head * T * D, i, T, acc * (scale / LOG2E), D)
    store_numbers(exact_means + head * T, i, T, exact_mean)
    STORE(sums, exact_mean - mean, rows, dest, head, i, T, P)


@triton.jit
def keys_tile(
    k_acc, v_acc, sums, k_tile, v_tile, q, out_grad, log_sums, means, first, extra, dest, b, h, head, i0, j0, T, scale,
    H: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    ROWS: tl.constexpr, SCORE: tl.constexpr, GRAD: tl.constexpr, IS_FULL: tl.constexpr,
):  # fmt: skip
    """Add what the tile of queries from i0 on gives to the gradients of keys and values, and the sums of the bias.

    Keys are the rows of the tile, and queries its columns: so its products with queries and gradients of outputs need
    not turn it.
    """
    queries = i0 + tl.arange(0, BM)
    i = queries[None, :]
    j = (j0 + tl.arange(0, BN))[:, None]
    q_tile = load_rows(q, queries, T, D, IS_FULL)
    out_grad_tile = load_rows(out_grad, queries, T, D, IS_FULL)
    log_sum = load_log_sums(log_sums, i, T)
    mean = load_numbers(means, i, T)
    rows = ROWS(extra, b, h, H, T, i, P)
    scores = SCORE(scores_of(k_tile, q_tile, scale), rows, i0, j0, i, j, T, BM, BN, P)
    if not IS_FULL:
        scores = hidden(scores, first, i, j, T, BN)

    # Weights and the gradients of scores as in `queries_kernel`.
    weights = tl.exp2(scores - log_sum)
    v_acc += product(weights, out_grad_tile)
    weight_grads = scores_of(v_tile, out_grad_tile, 1.0)
    score_grads = weights * (weight_grads - mean)
    k_acc += product(score_grads, q_tile)
    sums = GRAD(sums, score_grads, weights, rows, dest, h, head, i0, j0, i, j, T, BM, BN, P, IS_FULL)
    return k_acc, v_acc, sums


@triton.jit
def keys_kernel(
    q, k, v, first, last, extra, dest, log_sums, means, out_grad, k_grad, v_grad, T, first_batch, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    ROWS: tl.constexpr, SCORE: tl.constexpr,
    START: tl.constexpr, GRAD: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """The gradients of BN keys and their values, over the G heads that share them, and of what is added to scores.

    The grid is (blocks of keys, H // G, B). One program sums up all that a key gets.
    """
    j0 = tl.program_id(0) * BN
    b, group, kv_head = numbers_of_key_heads()
    first += b * first_batch * T
    last += b * first_batch * T
    j = j0 + tl.arange(0, BN)
    k_tile = load_rows(k + kv_head * T * D, j, T, D)
    v_tile = load_rows(v + kv_head * T * D, j, T, D)

    k_acc = tl.zeros([BN, D], tl.float32)
    v_acc = tl.zeros([BN, D], tl.float32)
    start, n_tiles, full_start, n_full = range_of_queries(last, j0, T, BM, BN)
    for g in range(G):
        h = group * G + g
        head = (b * H + h).to(tl.int64)
        sums = START(BN, P)
        for n in range(0, n_tiles - n_full):
            i0 = partial_tile(n, start, full_start, n_full, BM)
            k_acc, v_acc, sums = keys_tile(
                k_acc, v_acc, sums, k_tile, v_tile, q + head * T * D, out_grad + head * T * D, log_sums + head * T,
                means + head * T, first, extra, dest, b, h, head, i0, j0, T, scale,
                H, D, P, BM, BN, ROWS, SCORE, GRAD, False,
            )  # fmt: skip
        for i0 in range(full_start, full_start + n_full * BM, BM):
            k_acc, v_acc, sums = keys_tile(
                k_acc, v_acc, sums, k_tile, v_tile, q + head * T * D, out_grad + head * T * D, log_sums + head * T,
                means + head * T, first, extra, dest, b, h, head, i0, j0, T, scale,
                H, D, P, BM, BN, ROWS, SCORE, GRAD, True,
            )  # fmt: skip
        STORE(sums, dest, head, j, T, P)

    store_rows(k_grad + kv_head * T * D, j, T, k_acc * (scale / LOG2E), D)
    store_rows(v_grad + kv_head * T * D, j, T, v_acc, D)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, extra: list[Tensor], sinks: Maybe, bias: str,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = torch.empty_like(q)
    log_sums = q.new_empty(q.shape[:3], dtype=torch.float32)
    size = tiles(q.size(3), q.element_size(), bias).forward
    extra_of_kernels, sizes, constants = _arguments(q, k, first, extra, bias, scale)
    constants |= BIASES[bias].constants() | size.options()
    or_unused = log_sums if sinks is None else sinks
    forward_kernel[(triton.cdiv(q.size(2), size.queries), q.size(1), q.size(0))](
        q, k, v, first, extra_of_kernels, or_unused, out, log_sums, *sizes, **constants, HAS_SINKS=sinks is not None
    )  # fmt: skip
    return out, log_sums


def _backward(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, extra: list[Tensor], sinks: Maybe, bias: str,
    scale: float, out: Tensor, log_sums: Tensor, out_grad: Tensor,
) -> list[Tensor]:  # fmt: skip
    q_grad = torch.empty_like(q)
    k_grad = torch.empty_like(k)
    v_grad = torch.empty_like(v)
    exact_means = torch.empty_like(log_sums)

    _, of_queries, of_keys = tiles(q.size(3), q.element_size(), bias)
    n_query_blocks = triton.cdiv(q.size(2), of_queries.queries)
    n_key_blocks = triton.cdiv(q.size(2), of_keys.keys)
    added = BIASES[bias]
    extra_of_kernels, sizes, constants = _arguments(q, k, first, extra, bias, scale)
    query_dest, key_dest = added.buffers(q, extra, (n_query_blocks, n_key_blocks))

    # First the gradient of the queries, since it also makes the exact means that the keys need.
    queries_kernel[(n_query_blocks, q.size(1), q.size(0))](
        q, k, v, first, extra_of_kernels, tuple(query_dest), out, log_sums, out_grad, q_grad, exact_means, *sizes,
        **constants, **added.constants(added.of_queries), **of_queries.options(),
    )  # fmt: skip
    keys_kernel[(n_key_blocks, k.size(1), q.size(0))](
        q, k, v, first, last, extra_of_kernels, tuple(key_dest), log_sums, exact_means, out_grad, k_grad, v_grad,
        *sizes, **constants, **added.constants(added.of_keys), **of_keys.options(),
    )  # fmt: skip
    sinks_grad = log_sums.new_empty(0) if sinks is None else grads_of_sinks(sinks, log_sums, exact_means)
    return [q_grad, k_grad, v_grad, *added.grads(extra, query_dest, key_dest), sinks_grad]


def _arguments(
    q: Tensor, k: Tensor, first: Tensor, extra: list[Tensor], bias: str, scale: float
) -> tuple[tuple[Any, ...], tuple[int, int, float], dict[str, int]]:
    """What all kernels take: what the bias needs; T, first_batch and scale; and constants."""
    _, n_head, length, head_dim = q.shape
    of_kernels, size = BIASES[bias].prepared(extra)
    constants = {"H": n_head, "G": n_head // k.size(1), "D": head_dim, "P": size}
    return of_kernels, (length, first.ndim - 1, scale * LOG2E.value), constants


registered("flash", _forward, _backward)


def flash(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, *, scale: float,
    keys: Maybe = None, row: Maybe = None, terms: Maybe = None, sinks: Maybe = None,
) -> Tensor:  # fmt: skip
    """Softmax attention [B, H, T, D], softmax(scale q.k + bias) v, of as many queries as keys.

    Gradients of the bias and of `sinks` are sums in fp32, whatever the dtype of q. That of `row` is summed in any
    order.

    Args:
        q: queries [B, H, T, D], fp32, bf16 or fp16.
        k, v: keys and values [B, Hkv, T, D] of the same dtype; H is a multiple of Hkv.
        first: the first key that each query sees, int32 [T] or [B, T], ascending; the last one is its own.
        last: the last query that sees each key, int32 [T] or [B, T], ascending; the first one is its own.
        keys: a number of each key; that of key j less that of query i is added to their score: [B or 1, H, T], fp32 or
            better.
        row: a number of each distance from 0 on, added to the scores: fp32 [H, L], L more than any distance.
        terms: a number of each query and distance, added to the scores: fp32 [B, H, T, L]; the last one of a query is
            that of all distances from L - 1 on.
        sinks: a logit for each head, [H]: see `model.attention.softmax`.
    """
    extra = {"keys": keys, "row": row, "terms": terms}
    given = [(name, x) for name, x in extra.items() if x is not None]
    assert len(given) <= 1
    for name, x in given:
        return _call(q, k, v, first, last, [x if name == "keys" else x.float()], sinks, name, scale)
    return _call(q, k, v, first, last, [], sinks, "nothing", scale)


def fire(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, *, scale: float, kinks: Tensor, slopes: Tensor,
    intercepts: Tensor, inverse_reach: Tensor, c: Tensor, sinks: Maybe = None,
) -> Tensor:  # fmt: skip
    """`flash` with FIRE's bias of query i and key j, f(x), x = ln(1 + c (i - j)) inverse_reach[i].

    f is a continuous function of each head that is linear between kinks. x is off by about 2e-7 inverse_reach. A score
    exactly on a kink may count for the segment on either side.

    Args:
        kinks: where each of S segments of all f begins, [S], ascending, the first of them 0; it has no gradient.
        slopes, intercepts: of each f in each segment, [H, S].
        inverse_reach: a positive number of each query, [T] or [B, T].
        c: the factor of distances, [1], at least 0.
    """
    extra = [x.float() for x in (kinks, slopes, intercepts, inverse_reach, c)]
    return _call(q, k, v, first, last, extra, sinks, "fire", scale)


def _call(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, extra: list[Tensor], sinks: Maybe, bias: str,
    scale: float,
) -> Tensor:  # fmt: skip
    """The output of the operator, of heads of any width."""
    head_dim = q.size(3)
    q, k, v = padded(q, k, v)
    extra = [x.contiguous() for x in extra]
    if sinks is not None:
        sinks = sinks.float().contiguous()
    out, _ = torch.ops.ropewalk.flash(q, k, v, first.contiguous(), last.contiguous(), extra, sinks, bias, scale)
    return out[..., :head_dim]
