"""Training-free context extensions of a RoPE model, which keep every relative position within what training has met.

Pairs of a query and a key fall into zones by their distance. In each zone RoPE rotates by positions of its own. No
weight changes: the encodings train as RoPE, and an evaluation measures them as RoPE (scale 1) and active.
"""

import math
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from model.attention import for_heads_of, in_blocks, softmax
from model.position.base import Context, Count, Shape
from model.position.ops import exact_dtype
from model.position.rotary import Rotary

Stretch = Annotated[float, Field(ge=1, allow_inf_nan=False)]


class TrainingFree(Rotary):
    """Base of the training-free extensions: RoPE at scale 1, active at any other, the original_len that it may read.

    Args:
        original_len: length in tokens that the weights were trained at; default train_len. Training beyond it, as in a
            fine-tuning, is done with the extension active.
    """

    unscaled = 1.0

    def __init__(
        self, shape: Shape, *, original_len: Annotated[int, Field(ge=2)] | None = None, **options: Any
    ) -> None:
        super().__init__(shape, **options)
        self.original_len = original_len or shape.train_len
        self.set_scale(math.inf)

    def set_scale(self, scale: float) -> None:
        """Set the scale at which it is active."""
        self.scale = scale
        longer = self.train_len > self.original_len
        self.scales = (scale,) if longer else tuple(dict.fromkeys((self.unscaled, scale)))
        self.active_scale = self.scales[0]

    def describe(self) -> list[str]:
        trains = "trains as RoPE, is evaluated as that and" if self.scales[0] == self.unscaled else "trains and is read"
        return [f"{type(self).__name__}: {trains} with the extension; original length {self.original_len} tokens"]

    def positions(self, i: Tensor) -> list[tuple[Tensor, Tensor]]:
        """For each zone the positions of the tokens `i`, 0..T-1 in `exact_dtype`: as queries, and as keys; [T] each."""
        raise NotImplementedError

    def zone(self, i: Tensor, j: Tensor) -> Tensor:
        """The zone of queries i [Tq, 1] and keys j [Tk], whole numbers: int64 [Tq, Tk]; -1 is not seen at all."""
        raise NotImplementedError

    def tables(self, pos: Tensor, length: int) -> Any:
        """Where active: the first position, and for each zone (cos, sin) of the queries and of the keys."""
        if self.active_scale == self.unscaled:
            return super().tables(pos, length)
        positions = self.positions((pos - pos[0]).to(exact_dtype(pos.device)))
        return pos[0], [[super(TrainingFree, self).tables(x, length) for x in pair] for pair in positions]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        if self.active_scale == self.unscaled:
            return super().attend(q, k, v, state, ctx)
        first, tables = ctx.tables
        queries = [self.rotated(q, *of_queries) for of_queries, _ in tables]
        keys = [self.rotated(k, *of_keys) for _, of_keys in tables]

        def block(*arguments: Any) -> Tensor:
            *rotated, v, ctx = arguments
            zone = self.zone(ctx.pos_q[:, None] - first, ctx.pos_k - first)
            zones = zip(rotated[: len(tables)], rotated[len(tables) :], strict=True)
            products = ((q * ctx.scale) @ for_heads_of(q, k).mT for q, k in zones)  # [B, H, Tq, Tk] each
            scores = next(products)
            for n, own in enumerate(products, 1):
                scores = torch.where(zone == n, own, scores)
            scores = scores.masked_fill((zone < 0) | ~ctx.visible(self.window), -torch.inf)
            return softmax(scores, ctx.sinks).to(v.dtype) @ for_heads_of(rotated[0], v)

        return in_blocks(block, queries, [*keys, v], ctx, window=self.window)


class NearWindow(TrainingFree):
    """Base of the extensions with exact positions up to a distance.

    Args:
        near_window: i - j < near_window are exact; default original_len / `divisor`.
    """

    divisor = 2

    def __init__(self, shape: Shape, *, near_window: Count | None = None, **options: Any) -> None:
        super().__init__(shape, **options)
        self.near_window = near_window or max(1, self.original_len // self.divisor)

    def zone(self, i: Tensor, j: Tensor) -> Tensor:
        return (i - j >= self.near_window).long()


class ReRoPE(NearWindow):
    """ReRoPE (kexue.fm/archives/9708, github.com/bojone/rerope): all keys beyond the window are at its distance."""

    def positions(self, i: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(i, i), (torch.full_like(i, self.near_window), torch.zeros_like(i))]


class LeakyReRoPE(NearWindow):
    """Leaky ReRoPE (same sources): beyond the window, distances grow by 1 / `slowdown` for each token.

    Args:
        scale: target length / original length. `slowdown` follows from it: the farthest key of a text of that length
            is at original_len.
    """

    def __init__(self, shape: Shape, *, scale: Stretch = 4.0, **options: Any) -> None:
        super().__init__(shape, **options)
        if self.near_window >= self.original_len:
            raise ValueError(f"pe.near_window={self.near_window} must be below pe.original_len={self.original_len}")
        self.slowdown = (scale * self.original_len - self.near_window) / (self.original_len - self.near_window)
        self.set_scale(scale)

    def positions(self, i: Tensor) -> list[tuple[Tensor, Tensor]]:
        slow = i / self.slowdown
        return [(i, i), (slow + self.near_window * (1 - 1 / self.slowdown), slow)]


class SelfExtend(NearWindow):
    """Self-Extend (arXiv 2401.01325, github.com/datamllab/LongLM): beyond the window positions count groups of tokens.

    Relative positions stay whole numbers; in the released code they do where `group` divides `near_window`.

    Args:
        scale: target length / original length.
        group: tokens in a group; default so many that at the target length no relative position is beyond 2/3 of
            original_len, as the authors advise.
    """

    divisor = 4

    def __init__(self, shape: Shape, *, scale: Stretch = 4.0, group: Count | None = None, **options: Any) -> None:
        super().__init__(shape, **options)
        room = 2 * self.original_len / 3 - self.near_window
        if group is None and room <= 0:
            limit = f"must be below 2/3 of pe.original_len={self.original_len}, unless pe.group is given"
            raise ValueError(f"pe.near_window={self.near_window} {limit}")
        self.group = group or math.ceil((scale * self.original_len - self.near_window) / room)
        self.set_scale(scale)

    def positions(self, i: Tensor) -> list[tuple[Tensor, Tensor]]:
        grouped = i.div(self.group, rounding_mode="floor")
        return [(i, i), (grouped + self.near_window - self.near_window // self.group, grouped)]


class DualChunk(TrainingFree):
    """Dual chunk attention, DCA (arXiv 2402.17463, github.com/HKUNLP/ChunkLlama): the text is cut into chunks.
    Positions are exact within a chunk, and over its border up to the largest; keys of older chunks are at the largest.

    As in the released code, the largest position is 3/4 of original_len, and a chunk 1/8 of original_len shorter.
    """

    def __init__(self, shape: Shape, **options: Any) -> None:
        super().__init__(shape, **options)
        self.largest = self.original_len * 3 // 4
        self.chunk = max(1, self.largest - self.original_len // 8)

    def positions(self, i: Tensor) -> list[tuple[Tensor, Tensor]]:
        within = i % self.chunk
        after = (within + self.chunk).clamp(max=self.largest)
        last = torch.full_like(i, min(2 * self.chunk - 1, self.largest))
        return [(within, within), (after, within), (last, within)]

    def zone(self, i: Tensor, j: Tensor) -> Tensor:
        return (i // self.chunk - j // self.chunk).clamp(0, 2)


class HardWindow(NearWindow):
    """The control for all of these: keys beyond the window are not seen. By default it is as long as training was."""

    divisor = 1

    def positions(self, i: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(i, i)]

    def zone(self, i: Tensor, j: Tensor) -> Tensor:
        return -super().zone(i, j)


class SinksWindow(HardWindow):
    """StreamingLLM (arXiv 2309.17453): besides the window the first tokens of the text, moved up to just before it.

    Args:
        sinks: the tokens kept from the start of the text; the default window leaves room for them in original_len.
    """

    def __init__(self, shape: Shape, *, sinks: Count = 4, near_window: Count | None = None, **options: Any) -> None:
        super().__init__(shape, near_window=near_window, **options)
        self.sinks = sinks
        self.near_window = near_window or max(1, self.original_len - sinks)

    def positions(self, i: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(i, i), (i.clamp(max=self.sinks + self.near_window - 1), i)]

    def zone(self, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(j < self.sinks, (i - j >= self.near_window).long(), super().zone(i, j))
