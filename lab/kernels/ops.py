"""What the kernels share: their arguments, and parts of them in Triton."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)


class Inputs(NamedTuple):
    """What all kernels read. G heads of queries share one of keys."""

    q: Tensor  # queries [B, H, T, D]
    k: Tensor  # keys [B, H // G, T, D]
    v: Tensor  # values [B, H // G, T, D]
    first_key: Tensor  # the first key that each query sees, int32 [B, T], ascending; the last one is its own
    last_query: Tensor  # the last query that sees each key, int32 [B, T], ascending; the first one is its own
    sinks: Tensor  # a logit for each head, [H]; -inf: no sink
    extra: tuple[Tensor, ...]  # what else scores depend on


class Outputs(NamedTuple):
    """What the backward pass reads besides."""

    out: Tensor  # [B, H, T, D]
    log_sums: Tensor  # the logarithms to base 2 of the sums of exp(score), [B, H, T]
    means: Tensor  # result of the kernel of the queries, the means of the gradients of weights, [B, H, T]
    out_grad: Tensor  # [B, H, T, D]


class Tile(NamedTuple):
    """Size of the tiles of a kernel, its number of warps, and the tiles in memory (2: the next one is being loaded)."""

    queries: int
    keys: int
    warps: int
    stages: int = 2

    def options(self) -> dict[str, int]:
        """What a kernel with these tiles is compiled for."""
        return {"BM": self.queries, "BN": self.keys, "num_warps": self.warps, "num_stages": self.stages}


@triton.jit
def numbers_of_heads(G: tl.constexpr):
    """What a program of the grid (.., H, B), one for each head of queries, works on.

    Returns:
        b: the number of the text.
        h: the number of the head in its text.
        head: its number among the heads of all texts.
        kv_head: the number of the head of keys that it shares, among those of all texts.
    """
    # Blocks of one head are dimension 0, so they run side by side and find its keys in the cache.
    b = tl.program_id(2)
    h = tl.program_id(1)
    head = (b * tl.num_programs(1) + h).to(tl.int64)
    return b, h, head, head // G


@triton.jit
def load_rows(x, head, rows, T, D: tl.constexpr, IS_FULL: tl.constexpr = False):
    """The `rows` of a head of x [.., T, D]; zeros for those beyond the end, where IS_FULL says that there are none."""
    places = x + head * T * D + rows[:, None] * D + tl.arange(0, D)[None, :]
    if IS_FULL:
        return tl.load(places)
    else:
        return tl.load(places, mask=rows[:, None] < T, other=0.0)


@triton.jit
def store_rows(x, head, rows, T, values, D: tl.constexpr):
    """Write `values` [len(rows), D] to the `rows` of a head of x [.., T, D], but for those beyond the end."""
    places = x + head * T * D + rows[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(places, values, mask=rows[:, None] < T)


@triton.jit
def load_numbers(x, head, places, T, beyond=0.0):
    """The numbers of a head of x [.., T] at `places`; `beyond` for those beyond the end."""
    return tl.load(x + head * T + places, mask=places < T, other=beyond)


@triton.jit
def store_numbers(x, head, places, T, values):
    """Write `values` to a head of x [.., T] at `places`, but for those beyond the end."""
    tl.store(x + head * T + places, values, mask=places < T)


@triton.jit
def scores_of(a, b, scale):
    """Products of all rows of `a` [m, D] and of `b` [n, D], times `scale`, fp32 [m, n]."""
    return tl.dot(a, tl.trans(b), input_precision="ieee") * scale


@triton.jit
def product(weights, tile):
    """The matrix product with a tile [.., D], in fp32; the weights are rounded as the tile is."""
    return tl.dot(weights.to(tile.dtype), tile, input_precision="ieee")


@triton.jit
def start_of_softmax(sinks, h, BM: tl.constexpr, D: tl.constexpr):
    """`highest`, `total` and `acc` of BM queries before the first tile, as of `add_tile`: the sink's, whose value is 0.

    A sink of -inf leaves nothing of it in the first tile.
    """
    highest = tl.zeros([BM], tl.float32) + tl.load(sinks + h) * LOG2E
    return highest, tl.full([BM], 1.0, tl.float32), tl.zeros([BM, D], tl.float32)


@triton.jit
def add_tile(scores, v_tile, highest, total, acc):
    """Add a tile of keys to the softmax of its queries: the new `highest`, `total` and `acc`.

    Args:
        scores: to base 2, [len(i), len(j)]; -inf where a key is not seen.
        v_tile: the values, [len(j), D].
        highest, total: of the tiles before this one, [len(i)] each.
        acc: the sum of 2^(score - highest) x value over these tiles, fp32 [len(i), D].
    """
    # Sums over the tiles before this one are brought to the new highest score.
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    # A query that has not seen a key yet has nothing to scale, and -inf less -inf would be NaN.
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest)

    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(highest - base)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None] + product(weights, v_tile)
    return new_highest, total, acc


@triton.jit
def store_softmax(out, log_sums, head, i, T, highest, total, acc, D: tl.constexpr):
    """Write the output of the queries i and their `log_sums`."""
    total = tl.where(total == 0.0, 1.0, total)  # queries beyond the end
    store_rows(out, head, i, T, acc / total[:, None], D)
    store_numbers(log_sums, head, i, T, highest + tl.log2(total))


@triton.jit
def mean_of(y, head, i, T, out_grad_tile, D: tl.constexpr):
    """The sum over channels of output x its gradient, [len(i)]: that over keys of weight x its gradient, too."""
    out_tile = load_rows(y.out, head, i, T, D)
    return tl.sum(out_tile.to(tl.float32) * out_grad_tile.to(tl.float32), 1)


def launch(
    kernel: Any,
    tile: Tile,
    n_blocks: int,
    heads: Tensor,
    *arguments: Any,
    **constants: Any,
) -> None:
    """Run a kernel for blocks of each head of `heads` [B, H, T, D], which are the queries or the keys.

    Args:
        tile: of the kernel.
        n_blocks: of a head.
        arguments: of the kernel, up to T.
        constants: that the kernel is compiled for, beside those of the tile and D.
    """
    n_batch, n_head, length, head_dim = heads.shape
    # Triton launches on the current device, which is the first of the machine in every rank until it says other.
    with torch.cuda.device_of(heads):
        kernel[n_blocks, n_head, n_batch](*arguments, length, D=head_dim, **constants, **tile.options())
