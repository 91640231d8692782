"""What the kernels of `lab.kernels.flash` add to the scores of a tile, and what they sum up for its gradients.

A bias is a set of functions in Triton that the kernels call. `extra` are the tensors that it depends on, and `dest`
tensors of the same shapes for their gradients, which are zero at first:

    rows      (extra, dest, h, head, i, T, P) -> what all tiles of the queries i of a head share: `rows` below
    score     (scores, rows, tile, P) -> the scores of a tile, to base 2, with the bias
    grad      (sums, score_grads, weights, rows, tile, P, IS_FULL) -> what a program carries from tile to tile
    store     (sums, excess, rows, i, T, P) of queries; (sums, rows, j, T, P) of keys

`h` is the number of the head, and `head` that among the heads of all texts. A `tile` is (i0, j0, i, j, T): the queries
i from i0 on, and the keys j from j0 on. These are [M, 1] and [1, N]; or [1, M] and [N, 1] in the kernel of the keys,
whose tiles have keys as rows. `P` is the number of FIRE's segments. A full tile has no pair that is not seen.

The weights of a query sum up to 1, so the gradients of its scores sum up to zero. `excess` is by how much the mean that
they were computed with, which comes from a rounded output, is below the exact one: sums are corrected by it.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra import libdevice

from lab.kernels.ops import LOG2E

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def no_rows(extra, dest, h, head, i, T, P: tl.constexpr):
    return extra


@triton.jit
def no_score(scores, rows, tile, P: tl.constexpr):
    return scores


@triton.jit
def no_grad(sums, score_grads, weights, rows, tile, P: tl.constexpr, IS_FULL: tl.constexpr):
    return sums


@triton.jit
def no_query_store(sums, excess, rows, i, T, P: tl.constexpr):
    pass


@triton.jit
def no_key_store(sums, rows, j, T, P: tl.constexpr):
    pass


class Bias(NamedTuple):
    """The functions of a bias."""

    rows: Any = no_rows
    score: Any = no_score
    query_grad: Any = no_grad
    query_store: Any = no_query_store
    key_grad: Any = no_grad
    key_store: Any = no_key_store


# A number for each key: that of key j less that of query i is added to their score.
# extra: the numbers [B, H, T], and what fp32 has left out of them.


@triton.jit
def keys_rows(extra, dest, h, head, i, T, P: tl.constexpr):
    high = extra[0] + head * T
    low = extra[1] + head * T
    high_of_query = tl.load(high + i, mask=i < T, other=0.0)
    low_of_query = tl.load(low + i, mask=i < T, other=0.0)
    return high, low, high_of_query, low_of_query, dest[0] + head * T


@triton.jit
def keys_score(scores, rows, tile, P: tl.constexpr):
    # A sum of forget gates may be thousands, and its difference to that of a near key a hundredth. The high parts of
    # near keys subtract without rounding, and the low parts hold what fp32 has left out of them.
    high, low, high_of_query, low_of_query, _grad = rows
    _i0, _j0, _i, j, T = tile
    scores += (tl.load(high + j, mask=j < T, other=0.0) - high_of_query) * LOG2E
    return scores + (tl.load(low + j, mask=j < T, other=0.0) - low_of_query) * LOG2E


@triton.jit
def without_own(x, tile, IS_FULL: tl.constexpr):
    """`x` of a tile with 0 for the pair of each token with itself.

    Its bias is 0. It gets the same gradient from the query as from the key, with errors that may exceed all others.
    """
    # A full tile has no such pair, which is at the border of what is seen.
    return x if IS_FULL else tl.where(tile[2] == tile[3], 0.0, x)


@triton.jit
def keys_query_grad(sums, score_grads, weights, rows, tile, P: tl.constexpr, IS_FULL: tl.constexpr):
    grad_sum = sums[0] + tl.sum(without_own(score_grads, tile, IS_FULL), 1)
    weight_sum = sums[1] + tl.sum(without_own(weights, tile, IS_FULL), 1)
    return grad_sum, weight_sum, sums[2], sums[3]


@triton.jit
def keys_query_store(sums, excess, rows, i, T, P: tl.constexpr):
    tl.store(rows[4] + i, excess * sums[1] - sums[0], mask=i < T)


@triton.jit
def keys_key_grad(sums, score_grads, weights, rows, tile, P: tl.constexpr, IS_FULL: tl.constexpr):
    return sums[0] + tl.sum(without_own(score_grads, tile, IS_FULL), 1), sums[1], sums[2]


@triton.jit
def keys_key_store(sums, rows, j, T, P: tl.constexpr):
    place = rows[4] + j
    tl.store(place, tl.load(place, mask=j < T, other=0.0) + sums[0], mask=j < T)


KEYS = Bias(keys_rows, keys_score, keys_query_grad, keys_query_store, keys_key_grad, keys_key_store)

# A number for each distance. extra: row [H, T].


@triton.jit
def row_rows(extra, dest, h, head, i, T, P: tl.constexpr):
    return extra[0] + h * T, dest[0] + h * T


@triton.jit
def row_score(scores, rows, tile, P: tl.constexpr):
    # The distances of a tile are one run of numbers. Triton copies what a product will need while it computes the tile
    # before, and would copy a number for each score: that took three times as long.
    i0, j0, i, j, T = tile
    N: tl.constexpr = j.numel
    nearest = i0 - j0 - N + 1
    distances = tl.maximum(nearest + tl.arange(0, 2 * max(i.numel, N)), 0)
    numbers = tl.load(rows[0] + tl.minimum(distances, T - 1)) * LOG2E
    of_scores = tl.gather(numbers, tl.reshape(i - j - nearest, [scores.numel]), 0)
    return scores + tl.reshape(of_scores, scores.shape)


@triton.jit
def row_grad(sums, score_grads, weights, rows, tile, P: tl.constexpr, IS_FULL: tl.constexpr):
    # A distance needs the sum along a diagonal. Sheared, row c of a square tile [keys, queries] has the pairs at the
    # distances i0 - j0 + c, of query c and later ones, and i0 - j0 + c - N. So N^2 scores take 2 N additions to memory.
    i0, j0, i, j, T = tile
    N: tl.constexpr = j.numel
    tl.static_assert(i.numel == N)
    c = tl.arange(0, N)
    sheared = tl.gather(score_grads, (c[None, :] - c[:, None]) & (N - 1), 0)
    is_farther = c[None, :] >= c[:, None]
    distance = i0 - j0 + c
    farther = tl.sum(tl.where(is_farther, sheared, 0.0), 1)
    tl.atomic_add(rows[1] + distance, farther, mask=(distance >= 0) & (distance < T), sem="relaxed")
    distance -= N
    nearer = tl.sum(tl.where(is_farther, 0.0, sheared), 1)
    tl.atomic_add(rows[1] + distance, nearer, mask=(distance >= 0) & (distance < T), sem="relaxed")
    return sums


ROW = Bias(row_rows, row_score, key_grad=row_grad)

# FIRE: f(x) of each head, where x = ln(1 + c (i - j)) / reach of i is the place of a key: 0 for the query's own token.
# To evaluate f, a network with one hidden layer of ReLUs, for each score would take many times as long as attention.
# But f is linear between kinks, which are where a unit of the hidden layer is switched on or off, and these are the
# same for all heads. So f is a slope and an intercept for each head and each segment between two kinks. The nearest and
# the farthest pair of a tile say which segments lie between them: one in most tiles, a few next to the diagonal.
# extra: kinks [P], the first of them 0; slopes and intercepts [H, P]; 1 / reach and c of each query, [B, H, T] each,
# where c is one number.


@triton.jit
def log2(x):
    """The logarithm to base 2 by one instruction, off by 2^-22 at most near 1; `tl.log2` takes about twenty."""
    return tl.log2(x) if INTERPRETED else libdevice.fast_log2f(x)


@triton.jit
def fire_rows(extra, dest, h, head, i, T, P: tl.constexpr):
    kinks, slopes, intercepts, inverse_reach, c = extra
    inverse = tl.load(inverse_reach + head * T + tl.minimum(i, T - 1)) / LOG2E  # of logarithms to base 2
    _kinks, slopes_grad, intercepts_grad, reach_grad, c_grad = dest
    of_queries = (reach_grad + head * T, c_grad + head * T)
    return (
        kinks,
        slopes + h * P,
        intercepts + h * P,
        inverse,
        tl.load(c),
        of_queries,
        (slopes_grad + h * P, intercepts_grad + h * P),
    )


@triton.jit
def fire_segments(rows, tile, P: tl.constexpr):
    """The first and the last segment in a tile; the place of each pair."""
    kinks, _slopes, _intercepts, inverse, c, _of_queries, _of_heads = rows
    i0, j0, i, j, _T = tile
    all_kinks = tl.load(kinks + tl.arange(0, P))
    nearest = tl.maximum(i0 - (j0 + j.numel - 1), 0).to(tl.float32)
    farthest = (i0 + i.numel - 1 - j0).to(tl.float32)
    lowest_place = log2(1.0 + c * nearest) * tl.min(inverse)
    highest_place = log2(1.0 + c * farthest) * tl.max(inverse)
    # The first segment begins at 0, where rounding might let a place be less.
    low = tl.sum((all_kinks <= lowest_place).to(tl.int32), 0) - 1
    high = tl.sum((all_kinks <= highest_place).to(tl.int32), 0) - 1
    return tl.maximum(low, 0), tl.maximum(high, 0), log2(1.0 + c * distances_of(i, j)) * inverse


@triton.jit
def distances_of(i, j):
    """The distances of a tile, fp32; as positive numbers in the future, too."""
    # Numbers below 2^24 are exact. Converting each distance, not i and j, would take as long as its logarithm.
    return tl.abs(i.to(tl.float32) - j.to(tl.float32))


@triton.jit
def fire_score(scores, rows, tile, P: tl.constexpr):
    kinks, slopes, intercepts, _inverse, _c, _of_queries, _of_heads = rows
    low, high, place = fire_segments(rows, tile, P)
    # A place outside of these segments, which rounding may cause, counts as in the nearest of them.
    slope = tl.load(slopes + low) * LOG2E
    scores += slope * place + tl.load(intercepts + low) * LOG2E
    # Without the condition, which is false for most tiles, Triton would not load a tile while the one before it is
    # computed: it does not look for loops within conditions.
    if low < high:
        for s in range(low + 1, high + 1):
            # f is continuous: beyond a kink it differs from what it was by the change of the slope.
            next_slope = tl.load(slopes + s) * LOG2E
            scores += (next_slope - slope) * tl.maximum(place - tl.load(kinks + s), 0.0)
            slope = next_slope
    return scores


@triton.jit
def fire_query_grad(sums, score_grads, weights, rows, tile, P: tl.constexpr, IS_FULL: tl.constexpr):
    # What 1 / reach and c change of scores: times the gradient of the score, and the weight.
    reach_sum, reach_weight, c_sum, c_weight = sums
    kinks, slopes, _intercepts, _inverse, c, _of_queries, _of_heads = rows
    low, high, place = fire_segments(rows, tile, P)
    slope = tl.load(slopes + low) + tl.zeros_like(place)  # of each pair
    if low < high:
        for s in range(low + 1, high + 1):
            slope = tl.where(place >= tl.load(kinks + s), tl.load(slopes + s), slope)
    reach_sum += tl.sum(score_grads * slope * place, 1)
    reach_weight += tl.sum(weights * slope * place, 1)
    # distance / (1 + c distance), as a GPU computes it fastest.
    distance = distances_of(tile[2], tile[3])
    inverse_root = tl.rsqrt(1.0 + c * distance)
    by_c = slope * distance * inverse_root * inverse_root
    c_sum += tl.sum(score_grads * by_c, 1)
    c_weight += tl.sum(weights * by_c, 1)
    return reach_sum, reach_weight, c_sum, c_weight


@triton.jit
def fire_query_store(sums, excess, rows, i, T, P: tl.constexpr):
    reach_sum, reach_weight, c_sum, c_weight = sums
    reach_grad, c_grad = rows[5]
    inverse_reach = tl.sum(rows[3], 1) * LOG2E  # [queries, 1] -> [queries]
    tl.store(reach_grad + i, (reach_sum - excess * reach_weight) / inverse_reach, mask=i < T)
    tl.store(c_grad + i, (c_sum - excess * c_weight) * inverse_reach, mask=i < T)


@triton.jit
def fire_key_grad(sums, score_grads, weights, rows, tile, P: tl.constexpr, IS_FULL: tl.constexpr):
    unused, slope_sums, intercept_sums = sums
    low, high, place = fire_segments(rows, tile, P)
    # All scores count for the first segment, and then those beyond a kink move on to the next.
    s = tl.arange(0, P)
    by_slope = score_grads * place
    slope_sums += tl.where(s == low, tl.sum(by_slope), 0.0)
    intercept_sums += tl.where(s == low, tl.sum(score_grads), 0.0)
    if low < high:
        for segment in range(low + 1, high + 1):
            is_beyond = place >= tl.load(rows[0] + segment)
            sign = tl.where(s == segment, 1.0, tl.where(s == segment - 1, -1.0, 0.0))
            slope_sums += sign * tl.sum(tl.where(is_beyond, by_slope, 0.0))
            intercept_sums += sign * tl.sum(tl.where(is_beyond, score_grads, 0.0))
    return unused, slope_sums, intercept_sums


@triton.jit
def fire_key_store(sums, rows, j, T, P: tl.constexpr):
    slopes_grad, intercepts_grad = rows[6]
    s = tl.arange(0, P)
    tl.atomic_add(slopes_grad + s, sums[1], sem="relaxed")
    tl.atomic_add(intercepts_grad + s, sums[2], sem="relaxed")


FIRE = Bias(fire_rows, fire_score, fire_query_grad, fire_query_store, fire_key_grad, fire_key_store)

BIASES = {"nothing": Bias(), "keys": KEYS, "row": ROW, "fire": FIRE}
