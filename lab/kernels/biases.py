"""What the kernels of `lab.kernels.flash` add to the scores of a tile, and what they sum up for its gradients.

Each bias is a set of functions in Triton that the kernels call:

    rows    (extra, b, h, H, T, i, P) -> what all tiles of some queries of a head share: "rows" below
    score   (scores, rows, i0, j0, i, j, T, M, N, P) -> the scores of a tile, to base 2, with the bias
    start   (N, P) -> the sums that a program carries from tile to tile
    grad    (sums, score_grads, weights, rows, dest, h, head, i0, j0, i, j, T, M, N, P, IS_FULL) -> these with a tile's
    store   (sums, excess, rows, dest, head, i, T, P) of queries; (sums, dest, head, j, T, P) of keys

`i` and `j` are the queries and keys of a tile, from i0 and j0 on, M and N of them: [M, 1] and [1, N], or [1, M] and
[N, 1] in the kernel of the keys, whose tiles have keys as rows. `extra` are the tensors of the bias and `dest` those of
its gradients. `P` is a size that some biases need as a constant. A full tile has no pair that is not seen.

The weights of a query sum up to 1, so the gradients of its scores sum up to zero. `excess` is by how much the mean that
they were computed with, which comes from a rounded output, is below the exact one: sums are corrected by it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from lab.kernels.ops import LOG2E, high_and_low

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def no_rows(extra, b, h, H: tl.constexpr, T, i, P: tl.constexpr):
    return extra


@triton.jit
def no_score(scores, rows, i0, j0, i, j, T, M: tl.constexpr, N: tl.constexpr, P: tl.constexpr):
    return scores


@triton.jit
def no_start(N: tl.constexpr, P: tl.constexpr):
    return (tl.zeros([1], tl.float32),)


@triton.jit
def no_grad(
    sums, score_grads, weights, rows, dest, h, head, i0, j0, i, j, T,
    M: tl.constexpr, N: tl.constexpr, P: tl.constexpr, IS_FULL: tl.constexpr,
):  # fmt: skip
    return sums


@triton.jit
def no_query_store(sums, excess, rows, dest, head, i, T, P: tl.constexpr):
    pass


@triton.jit
def no_key_store(sums, dest, head, j, T, P: tl.constexpr):
    pass


def no_buffers(q: Tensor, extra: Sequence[Tensor], blocks: tuple[int, int]) -> tuple[list[Tensor], list[Tensor]]:
    return [], []


@dataclass(frozen=True)
class Bias:
    """One bias: its functions in Triton, and what surrounds them in PyTorch.

    Attributes:
        of_queries, of_keys: start, grad and store of the two kernels of the backward pass.
        prepared: (extra of the operator) -> extra of the kernels, and P.
        buffers: (q, extra, numbers of blocks of queries and keys) -> `dest` of the two kernels.
        grads: (extra, both `dest`) -> the gradients of `extra`.
    """

    rows: Any = no_rows
    score: Any = no_score
    of_queries: tuple[Any, Any, Any] = (no_start, no_grad, no_query_store)
    of_keys: tuple[Any, Any, Any] = (no_start, no_grad, no_key_store)
    prepared: Callable[..., tuple[tuple[Any, ...], int]] = lambda extra: ((), 1)
    buffers: Callable[..., tuple[list[Tensor], list[Tensor]]] = no_buffers
    grads: Callable[..., list[Tensor]] = lambda extra, of_queries, of_keys: []

    def constants(self, hooks: tuple[Any, Any, Any] | None = None) -> dict[str, Any]:
        """What a kernel is compiled for; `hooks` are those of the kernels of the backward pass."""
        names = {"ROWS": self.rows, "SCORE": self.score}
        if hooks is not None:
            names |= dict(zip(("START", "GRAD", "STORE"), hooks, strict=True))
        return names


# A number for each key: that of key j less that of query i is added to their score. extra: keys [B or 1, H, T].


@triton.jit
def keys_rows(extra, b, h, H: tl.constexpr, T, i, P: tl.constexpr):
    high, low, keys_batch = extra
    of_head = (b * keys_batch * H + h).to(tl.int64) * T
    high += of_head
    low += of_head
    return high, low, tl.load(high + i, mask=i < T, other=0.0), tl.load(low + i, mask=i < T, other=0.0)


@triton.jit
def keys_score(scores, rows, i0, j0, i, j, T, M: tl.constexpr, N: tl.constexpr, P: tl.constexpr):
    # A sum of forget gates may be thousands, and its difference to that of a near key a hundredth. The high parts of
    # near keys subtract without rounding, and the low parts hold what fp32 has left out of them.
    high, low, high_of_query, low_of_query = rows
    scores += tl.load(high + j, mask=j < T, other=0.0) - high_of_query
    return scores + (tl.load(low + j, mask=j < T, other=0.0) - low_of_query)


@triton.jit
def without_own(x, i, j, IS_FULL: tl.constexpr):
    """`x` of a tile with 0 for the pair of each token with itself.

    Its bias is 0. It gets the same gradient from the query as from the key, with errors that may exceed all others.
    """
    if IS_FULL:  # this pair is at the border of what is seen
        return x
    else:
        return tl.where(i == j, 0.0, x)


@triton.jit
def keys_query_start(N: tl.constexpr, P: tl.constexpr):
    return tl.zeros([N], tl.float32), tl.zeros([N], tl.float32)


@triton.jit
def keys_query_grad(
    sums, score_grads, weights, rows, dest, h, head, i0, j0, i, j, T,
    M: tl.constexpr, N: tl.constexpr, P: tl.constexpr, IS_FULL: tl.constexpr,
):  # fmt: skip
    grad_sum, weight_sum = sums
    grad_sum += tl.sum(without_own(score_grads, i, j, IS_FULL), 1)
    weight_sum += tl.sum(without_own(weights, i, j, IS_FULL), 1)
    return grad_sum, weight_sum


@triton.jit
def keys_query_store(sums, excess, rows, dest, head, i, T, P: tl.constexpr):
    grad_sum, weight_sum = sums
    tl.store(dest[0] + head * T + i, grad_sum - excess * weight_sum, mask=i < T)


@triton.jit
def keys_key_start(N: tl.constexpr, P: tl.constexpr):
    return (tl.zeros([N], tl.float32),)


@triton.jit
def keys_key_grad(
    sums, score_grads, weights, rows, dest, h, head, i0, j0, i, j, T,
    M: tl.constexpr, N: tl.constexpr, P: tl.constexpr, IS_FULL: tl.constexpr,
):  # fmt: skip
    return (sums[0] + tl.sum(without_own(score_grads, i, j, IS_FULL), 1),)


@triton.jit
def keys_key_store(sums, dest, head, j, T, P: tl.constexpr):
    tl.store(dest[0] + head * T + j, sums[0], mask=j < T)


def keys_prepared(extra: Sequence[Tensor]) -> tuple[tuple[Any, ...], int]:
    high, low = high_and_low(extra[0].double() * LOG2E.value)
    return (high, low, int(high.size(0) > 1)), 1


def keys_buffers(q: Tensor, extra: Sequence[Tensor], blocks: tuple[int, int]) -> tuple[list[Tensor], list[Tensor]]:
    return [_numbers(q)], [_numbers(q)]


def keys_grads(extra: Sequence[Tensor], of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]) -> list[Tensor]:
    grad = of_keys[0].double() - of_queries[0]
    return [grad.sum_to_size(extra[0].shape).to(extra[0].dtype)]


def _numbers(q: Tensor) -> Tensor:
    """An fp32 number of each query or key, [B, H, T]."""
    return q.new_empty(q.shape[:3], dtype=torch.float32)


# A number for each distance. extra: row [H, n], n more than any distance.


@triton.jit
def row_rows(extra, b, h, H: tl.constexpr, T, i, P: tl.constexpr):
    row, n = extra
    return row + h * n, n


@triton.jit
def row_score(scores, rows, i0, j0, i, j, T, M: tl.constexpr, N: tl.constexpr, P: tl.constexpr):
    row, n = rows
    return scores + tl.load(row + tl.minimum(tl.maximum(i - j, 0), n - 1))


@triton.jit
def row_grad(
    sums, score_grads, weights, rows, dest, h, head, i0, j0, i, j, T,
    M: tl.constexpr, N: tl.constexpr, P: tl.constexpr, IS_FULL: tl.constexpr,
):  # fmt: skip
    # A distance needs the sum along a diagonal. Sheared, row c of a square tile [keys, queries] has the pairs at the
    # distances i0 - j0 + c, of query c and later ones, and i0 - j0 + c - N. So N^2 scores take 2 N additions to memory.
    tl.static_assert(M == N)
    _row, n = rows
    c = tl.arange(0, N)
    query = c[None, :]
    sheared = tl.gather(score_grads, (query - c[:, None]) & (N - 1), 0)
    is_farther = query >= c[:, None]
    place = dest[0] + h * n
    distance = i0 - j0 + c
    farther = tl.sum(tl.where(is_farther, sheared, 0.0), 1)
    tl.atomic_add(place + distance, farther, mask=(distance >= 0) & (distance < n), sem="relaxed")
    distance -= N
    nearer = tl.sum(tl.where(is_farther, 0.0, sheared), 1)
    tl.atomic_add(place + distance, nearer, mask=(distance >= 0) & (distance < n), sem="relaxed")
    return sums


def row_prepared(extra: Sequence[Tensor]) -> tuple[tuple[Any, ...], int]:
    return (extra[0] * LOG2E.value, extra[0].size(1)), 1


def row_buffers(q: Tensor, extra: Sequence[Tensor], blocks: tuple[int, int]) -> tuple[list[Tensor], list[Tensor]]:
    return [], [torch.zeros_like(extra[0])]


def row_grads(extra: Sequence[Tensor], of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]) -> list[Tensor]:
    return [of_keys[0]]


# A number for each query and distance below n - 1, and one for each query and all longer distances: terms [B, H, T, n].


@triton.jit
def terms_rows(extra, b, h, H: tl.constexpr, T, i, P: tl.constexpr):
    terms, n = extra
    terms += (b * H + h).to(tl.int64) * T * n
    return terms, n, tl.load(terms + i * n + n - 1, mask=i < T, other=0.0)


@triton.jit
def terms_score(scores, rows, i0, j0, i, j, T, M: tl.constexpr, N: tl.constexpr, P: tl.constexpr):
    terms, n, last_term = rows
    if i0 - j0 - N + 1 >= n - 1:
        scores += last_term * LOG2E
    else:
        distance = tl.minimum(tl.maximum(i - j, 0), n - 1)
        scores += tl.load(terms + i * n + distance, mask=i < T, other=0.0) * LOG2E
    return scores


@triton.jit
def terms_grad(
    sums, score_grads, weights, rows, dest, h, head, i0, j0, i, j, T,
    M: tl.constexpr, N: tl.constexpr, P: tl.constexpr, IS_FULL: tl.constexpr,
):  # fmt: skip
    # A term is of one key below the last distance, and of many there. Their gradients nearly cancel, while errors of a
    # rounded mean add up: see `excess`.
    _terms, n, _last_term = rows
    far_sum, far_weight = sums
    if i0 - j0 - N + 1 >= n - 1:
        far_sum += tl.sum(score_grads, 1)
        far_weight += tl.sum(weights, 1)
    else:
        distance = i - j
        place = dest[0] + head * T * n + i * n + distance
        tl.store(place, score_grads, mask=(distance >= 0) & (distance < n - 1) & (i < T))
        far_sum += tl.sum(tl.where(distance >= n - 1, score_grads, 0.0), 1)
        far_weight += tl.sum(tl.where(distance >= n - 1, weights, 0.0), 1)
    return far_sum, far_weight


@triton.jit
def terms_store(sums, excess, rows, dest, head, i, T, P: tl.constexpr):
    _terms, n, _last_term = rows
    far_sum, far_weight = sums
    tl.store(dest[0] + head * T * n + i * n + n - 1, far_sum - excess * far_weight, mask=i < T)


def terms_prepared(extra: Sequence[Tensor]) -> tuple[tuple[Any, ...], int]:
    return (extra[0], extra[0].size(3)), 1


def terms_buffers(q: Tensor, extra: Sequence[Tensor], blocks: tuple[int, int]) -> tuple[list[Tensor], list[Tensor]]:
    return [torch.zeros_like(extra[0])], []


def terms_grads(extra: Sequence[Tensor], of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]) -> list[Tensor]:
    return [of_queries[0]]


# FIRE: f(x) of each head, where x = ln(1 + c (i - j)) / reach of i is the place of a key: 0 for the query's own token.
# To evaluate f, a network with one hidden layer of ReLUs, for each score would take many times as long as attention.
# But f is linear between kinks, which are where a unit of the hidden layer is switched on or off, and these are the
# same for all heads. So f is a slope and an intercept for each head and each segment between two kinks. The nearest and
# the farthest pair of a tile say which segments lie between them: one in most tiles, a few next to the diagonal. The
# sums of slopes and intercepts are those of programs, which PyTorch adds up: there are no atomic additions.
# extra: kinks [S], the first of them 0; slopes and intercepts [H, S]; 1 / reach [T] or [B, T]; c [1].


@triton.jit
def log2(x):
    """The logarithm to base 2 by one instruction, off by 2^-22 at most near 1; `tl.log2` takes about twenty."""
    if INTERPRETED:
        return tl.log2(x)
    else:
        return libdevice.fast_log2f(x)


@triton.jit
def fire_rows(extra, b, h, H: tl.constexpr, T, i, P: tl.constexpr):
    kinks, slopes, intercepts, inverse_reach, c, reach_batch = extra
    inverse = tl.load(inverse_reach + b * reach_batch * T + tl.minimum(i, T - 1)) / LOG2E  # of logarithms to base 2
    return kinks, slopes + h * P, intercepts + h * P, inverse, tl.load(c)


@triton.jit
def segments_of(rows, i0, j0, M: tl.constexpr, N: tl.constexpr, P: tl.constexpr):
    """The first and the last segment in a tile."""
    kinks, _slopes, _intercepts, inverse, c = rows
    all_kinks = tl.load(kinks + tl.arange(0, P))
    nearest = tl.maximum(i0 - (j0 + N - 1), 0).to(tl.float32)
    farthest = (i0 + M - 1 - j0).to(tl.float32)
    lowest_place = log2(1.0 + c * nearest) * tl.min(inverse)
    highest_place = log2(1.0 + c * farthest) * tl.max(inverse)
    # The first segment begins at 0, where rounding might let a place be less.
    low = tl.sum((all_kinks <= lowest_place).to(tl.int32), 0) - 1
    high = tl.sum((all_kinks <= highest_place).to(tl.int32), 0) - 1
    return tl.maximum(low, 0), tl.maximum(high, 0)


@triton.jit
def distances_of(i, j):
    """The distances of a tile, fp32; as positive numbers in the future, too."""
    # Numbers below 2^24 are exact. Converting each distance, not i and j, would take as long as its logarithm.
    return tl.abs(i.to(tl.float32) - j.to(tl.float32))


@triton.jit
def fire_score(scores, rows, i0, j0, i, j, T, M: tl.constexpr, N: tl.constexpr, P: tl.constexpr):
    kinks, slopes, intercepts, inverse, c = rows
    low, high = segments_of(rows, i0, j0, M, N, P)
    place = log2(1.0 + c * distances_of(i, j)) * inverse
    # A place outside of these segments, which rounding may cause, counts as in the nearest of them.
    slope = tl.load(slopes + low)
    scores += slope * place + tl.load(intercepts + low)
    # Without the condition, which is false for most tiles, Triton would not load a tile while the one before it is
    # computed: it does not look for loops within conditions.
    if low < high:
        for s in range(low + 1, high + 1):
            # f is continuous: beyond a kink it differs from what it was by the change of the slope.
            next_slope = tl.load(slopes + s)
            scores += (next_slope - slope) * tl.maximum(place - tl.load(kinks + s), 0.0)
            slope = next_slope
    return scores


@triton.jit
def fire_query_start(N: tl.constexpr, P: tl.constexpr):
    return tl.zeros([N], tl.float32), tl.zeros([N], tl.float32), tl.zeros([N], tl.float32), tl.zeros([N], tl.float32)


@triton.jit
def fire_query_grad(
    sums, score_grads, weights, rows, dest, h, head, i0, j0, i, j, T,
    M: tl.constexpr, N: tl.constexpr, P: tl.constexpr, IS_FULL: tl.constexpr,
):  # fmt: skip
    # What 1 / reach and c change of scores: times the gradient of the score, and the weight.
    reach_sum, reach_weight, c_sum, c_weight = sums
    kinks, slopes, _intercepts, inverse, c = rows
    low, high = segments_of(rows, i0, j0, M, N, P)
    distance = distances_of(i, j)
    grown = 1.0 + c * distance
    place = log2(grown) * inverse
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
    reach_weight += tl.sum(place_weights * place, 1)
    # distance / (1 + c distance), as a GPU computes it fastest.
    inverse_root = tl.rsqrt(grown)
    by_c = distance * inverse_root * inverse_root
    c_sum += tl.sum(place_grads * by_c, 1)
    c_weight += tl.sum(place_weights * by_c, 1)
    return reach_sum, reach_weight, c_sum, c_weight


@triton.jit
def fire_query_store(sums, excess, rows, dest, head, i, T, P: tl.constexpr):
    reach_sum, reach_weight, c_sum, c_weight = sums
    reach_grad, c_grad = dest
    inverse = tl.sum(rows[3], 1)  # [queries, 1] -> [queries]
    # Slopes are times LOG2E, and so is what is divided here by it.
    of_reach = (reach_sum - excess * reach_weight) / (inverse * LOG2E * LOG2E)
    tl.store(reach_grad + head * T + i, of_reach, mask=i < T)
    of_c = tl.where(i < T, (c_sum - excess * c_weight) * inverse, 0.0)
    tl.store(c_grad + head * tl.num_programs(0) + tl.program_id(0), tl.sum(of_c, 0))


@triton.jit
def fire_key_start(N: tl.constexpr, P: tl.constexpr):
    return tl.zeros([P], tl.float32), tl.zeros([P], tl.float32)


@triton.jit
def fire_key_grad(
    sums, score_grads, weights, rows, dest, h, head, i0, j0, i, j, T,
    M: tl.constexpr, N: tl.constexpr, P: tl.constexpr, IS_FULL: tl.constexpr,
):  # fmt: skip
    slope_sums, intercept_sums = sums
    kinks, _slopes, _intercepts, inverse, c = rows
    low, high = segments_of(rows, i0, j0, M, N, P)
    place = log2(1.0 + c * distances_of(i, j)) * inverse
    # All scores count for the first segment, and then those beyond a kink move on to the next.
    s = tl.arange(0, P)
    by_slope = score_grads * place
    slope_sums += tl.where(s == low, tl.sum(by_slope), 0.0)
    intercept_sums += tl.where(s == low, tl.sum(score_grads), 0.0)
    if low < high:
        for segment in range(low + 1, high + 1):
            is_beyond = place >= tl.load(kinks + segment)
            sign = tl.where(s == segment, 1.0, tl.where(s == segment - 1, -1.0, 0.0))
            slope_sums += sign * tl.sum(tl.where(is_beyond, by_slope, 0.0))
            intercept_sums += sign * tl.sum(tl.where(is_beyond, score_grads, 0.0))
    return slope_sums, intercept_sums


@triton.jit
def fire_key_store(sums, dest, head, j, T, P: tl.constexpr):
    slope_sums, intercept_sums = sums
    s = tl.arange(0, P)
    of_program = dest[0] + (head * tl.num_programs(0) + tl.program_id(0)) * 2 * P
    tl.store(of_program + s, slope_sums)
    tl.store(of_program + P + s, intercept_sums)


def fire_prepared(extra: Sequence[Tensor]) -> tuple[tuple[Any, ...], int]:
    kinks, slopes, intercepts, inverse_reach, c = extra
    size = triton.next_power_of_2(kinks.numel())
    unused = (0, size - kinks.numel())
    of_heads = [F.pad(x * LOG2E.value, unused) for x in (slopes, intercepts)]
    return (F.pad(kinks, unused, value=torch.inf), *of_heads, inverse_reach, c, inverse_reach.ndim - 1), size


def fire_buffers(q: Tensor, extra: Sequence[Tensor], blocks: tuple[int, int]) -> tuple[list[Tensor], list[Tensor]]:
    batch, n_head, *_ = q.shape
    n_query_blocks, n_key_blocks = blocks
    size = triton.next_power_of_2(extra[0].numel())
    numbers = _numbers(q)
    of_segments = numbers.new_empty(batch, n_head, n_key_blocks, 2, size)
    return [numbers, numbers.new_empty(batch, n_head, n_query_blocks)], [of_segments]


def fire_grads(extra: Sequence[Tensor], of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]) -> list[Tensor]:
    kinks, _, _, inverse_reach, _ = extra
    reach_grad, c_grad = of_queries
    of_heads = of_keys[0].sum((0, 2))[..., : kinks.numel()]  # [H, 2, S]
    slopes_grad, intercepts_grad = (x.contiguous() for x in of_heads.unbind(1))
    reach_grad = reach_grad.sum((0, 1) if inverse_reach.ndim == 1 else 1)
    return [torch.zeros_like(kinks), slopes_grad, intercepts_grad, reach_grad, c_grad.sum().view(1)]


BIASES = {
    "nothing": Bias(),
    "keys": Bias(
        keys_rows, keys_score, (keys_query_start, keys_query_grad, keys_query_store),
        (keys_key_start, keys_key_grad, keys_key_store), keys_prepared, keys_buffers, keys_grads,
    ),
    "row": Bias(
        row_rows, row_score, of_keys=(no_start, row_grad, no_key_store),
        prepared=row_prepared, buffers=row_buffers, grads=row_grads,
    ),
    "terms": Bias(
        terms_rows, terms_score, of_queries=(keys_query_start, terms_grad, terms_store),
        prepared=terms_prepared, buffers=terms_buffers, grads=terms_grads,
    ),
    "fire": Bias(
        fire_rows, fire_score, (fire_query_start, fire_query_grad, fire_query_store),
        (fire_key_start, fire_key_grad, fire_key_store), fire_prepared, fire_buffers, fire_grads,
    ),
}  # fmt: skip
