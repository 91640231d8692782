"""Training-free context extensions of a RoPE model, which keep every relative position within what training has met.

Pairs of a query and a key fall into zones by their distance. In each zone RoPE rotates by positions of its own. No
weight changes: the encodings train as RoPE, and an evaluation measures them as RoPE (scale 1) and with the extension.
"""

import math
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from model.attention import for_heads_of, in_blocks, softmax
from model.position.base import ANY_LENGTH, Context, Count, Scaled, Shape
from model.position.ops import exact_dtype
from model.position.rotary import Rotary

Stretch = Annotated[float, Field(ge=1, allow_inf_nan=False)]


class TrainingFree(Scaled, Rotary):
    """Base of the training-free extensions: RoPE at scale 1, active at any other scale.

    A subclass says which zones there are (`zone`), and by which positions queries and keys are rotated in each
    (`positions`). Training beyond original_len, as in a fine-tuning, is done with the extension active.
    """

    unscaled_as = Rotary

    def __init__(self, shape: Shape, **options: Any) -> None:
        super().__init__(shape, **options)
        self.set_scales(ANY_LENGTH)

    def positions(self, i: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return for each zone the positions of the tokens `i` as queries and as keys.

        Both are [T], as `i` is: the numbers 0..T-1 in `exact_dtype`.
        """
        raise NotImplementedError

    def zone(self, i: Tensor, j: Tensor) -> Tensor:
        """Return the zone of queries i [Tq, 1] and keys j [Tk], both int64: int64 [Tq, Tk]; -1 is not seen at all."""
        raise NotImplementedError

    def tables(self, pos: Tensor, length: int) -> Any:
        """Where active: the first position, and for each zone (cos, sin) of the queries and of the keys.

        Positions count from the first token, so that zones of whole groups or chunks begin with the text.
        """
        if self.active_scale == self.unscaled:
            return super().tables(pos, length)
        tables = []
        for of_queries, of_keys in self.positions((pos - pos[0]).to(exact_dtype(pos.device))):
            tables.append((super().tables(of_queries, length), super().tables(of_keys, length)))
        return pos[0], tables

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        if self.active_scale == self.unscaled:
            return super().attend(q, k, v, state, ctx)
        first, tables = ctx.tables
        queries = [self.rotated(q, *of_queries) for of_queries, _ in tables]
        keys = [self.rotated(k, *of_keys) for _, of_keys in tables]

        # Queries and keys exist once for each zone, rotated by its positions. So a block computes the scores of all its
        # pairs in every zone, and takes each pair's from its own. `in_blocks` hands over the block's queries of every
        # zone, then its keys of every zone, then the values and the context.
        def block(*arguments: Any) -> Tensor:
            *rotated, v, ctx = arguments
            q_zones = rotated[: len(tables)]
            k_zones = rotated[len(tables) :]
            zone = self.zone(ctx.pos_q[:, None] - first, ctx.pos_k - first)

            def in_zone(n: int) -> Tensor:
                return (q_zones[n] * ctx.scale) @ for_heads_of(q_zones[n], k_zones[n]).mT  # [B, H, Tq, Tk]

            scores = in_zone(0)
            for n in range(1, len(tables)):
                scores = torch.where(zone == n, in_zone(n), scores)
            seen = (zone >= 0) & ctx.visible()
            scores = scores.masked_fill(~seen, -torch.inf)
            return softmax(scores, ctx.sinks).to(v.dtype) @ for_heads_of(q_zones[0], v)

        return in_blocks(block, queries, [*keys, v], ctx)


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
    """ReRoPE (kexue.fm/archives/9708, github.com/bojone/rerope): all keys beyond the window are at its distance.

    So order is lost beyond it, and no relative position exceeds near_window.
    """

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
        self.set_scales(scale)

    def positions(self, i: Tensor) -> list[tuple[Tensor, Tensor]]:
        slow = i / self.slowdown
        ahead = self.near_window * (1 - 1 / self.slowdown)  # so that the zones meet at distance near_window
        return [(i, i), (slow + ahead, slow)]


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
        self.set_scales(scale)

    def positions(self, i: Tensor) -> list[tuple[Tensor, Tensor]]:
        grouped = i.div(self.group, rounding_mode="floor")
        ahead = self.near_window - self.near_window // self.group  # so that the zones meet, up to rounding
        return [(i, i), (grouped + ahead, grouped)]


class DualChunk(TrainingFree):
    """Dual chunk attention, DCA (arXiv 2402.17463, github.com/HKUNLP/ChunkLlama): the text is cut into chunks.

    Zone 0 is the query's own chunk, where positions are exact. Zone 1 is the chunk before, where they are exact up to
    the largest position. In zone 2, all older chunks, every query is at the largest position.

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
