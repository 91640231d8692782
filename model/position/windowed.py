"""Training-free context extensions of a RoPE model: every relative position stays within what training has met.

Pairs of a query and a key fall into zones by their distance, and each zone has its own positions for RoPE to rotate
by. No weight changes: the encodings train as RoPE, and an evaluation measures them as RoPE (scale 1) and with the
extension.
"""

import math
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from model.attention import exactly, for_heads_of, in_blocks, products, softmax
from model.position.base import ANY_LENGTH, Context, Count, Scaled, Shape
from model.position.ops import exact_dtype, rotate_pairs
from model.position.rotary import Rotary

Stretch = Annotated[float, Field(ge=1, allow_inf_nan=False)]


class TrainingFree(Scaled, Rotary):
    """Base of the training-free extensions: RoPE at scale 1, active at any other scale.

    A subclass says which zones there are (`zone`), and by which positions queries and keys are rotated in each
    (`positions`). Training beyond original_len, as in fine-tuning, runs with the extension active.
    """

    def __init__(self, shape: Shape, **options: Any) -> None:
        super().__init__(shape, **options)
        if self.values:
            raise ValueError("pe.values=true: each value has one angle, but in this encoding each zone has its own")
        self.set_scales(ANY_LENGTH)

    def positions(self, i: Tensor, length: int) -> list[tuple[Tensor, Tensor]]:
        """Return for each zone the positions of the tokens `i` of a text of `length` as queries and as keys.

        Both are [T], as `i` is: the numbers 0..T-1 in `exact_dtype`.
        """
        raise NotImplementedError

    def zone(self, i: Tensor, j: Tensor, length: int) -> Tensor:
        """Return the zone of queries i [Tq, 1] and keys j [Tk], all int64: [Tq, Tk]; -1: the key is hidden."""
        raise NotImplementedError

    def tables(self, pos: Tensor, length: int) -> Any:
        """The first position, the length and, for each zone, (cos, sin) of queries and of keys; RoPE's while unscaled.

        Positions count from the first token, so that zones of whole groups or chunks begin with the text.
        """
        if self.active_scale == self.unscaled:
            return super().tables(pos, length)
        tables = []
        i = (pos - pos[0]).to(exact_dtype(pos.device))
        for of_queries, of_keys in self.positions(i, length):
            tables.append((super().tables(of_queries, length), super().tables(of_keys, length)))
        return pos[0], length, tables

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        if self.active_scale == self.unscaled:
            return super().attend(q, k, v, state, ctx)
        first, length, tables = ctx.tables  # `ctx.length` may be that of a piece of the text

        # Each zone has positions, and so rotated queries and keys, of its own.
        queries = [rotate_pairs(q, *of_queries, layout=self.layout) for of_queries, _ in tables]
        keys = [rotate_pairs(k, *of_keys, layout=self.layout) for _, of_keys in tables]

        # Queries and keys exist once for each zone, rotated by its positions. A block computes the scores of all its
        # pairs in every zone, and then each pair takes the score of its own zone. `in_blocks` passes the block's
        # queries of every zone, then its keys of every zone, the values and the context.
        def block(*arguments: Any) -> Tensor:
            *rotated, v, ctx = arguments
            q_zones = rotated[: len(tables)]  # [B, H, Tq, D] each
            k_zones = rotated[len(tables) :]  # [B, Hkv, Tk, D] each
            zone = self.zone(ctx.pos_q[:, None] - first, ctx.pos_k - first, length)  # [Tq, Tk]

            # Each pair takes the score of its own zone, and each zone computes the keys from its first to its last.
            scores = torch.zeros(
                (*v.shape[:1], *q_zones[0].shape[1:3], v.size(2)), dtype=exactly(v).dtype, device=v.device
            )
            for n in range(len(tables)):
                keys_of_zone = _extent(zone == n)
                of_zone = products(q_zones[n], for_heads_of(q_zones[n], k_zones[n][:, :, keys_of_zone]), ctx.scale)
                others = scores[..., keys_of_zone]
                scores[..., keys_of_zone] = torch.where(zone[:, keys_of_zone] == n, of_zone, others)

            # Adds 0, or -inf where a key is not seen: `ctx.mask` hides it, or its zone is below 0.
            scores += torch.where(zone >= 0, ctx.mask(), -torch.inf)
            return softmax(scores, ctx.sinks).to(v.dtype) @ for_heads_of(q_zones[0], v)

        return in_blocks(block, queries, [*keys, v], ctx)


def _extent(is_in: Tensor) -> slice:
    """The keys from the first to the last that any query has in its zone, by `is_in`, bool [Tq, Tk].

    All of them where it would take longer to ask than to compute them: on a GPU, and in a compiled graph.
    """
    if is_in.is_cuda or torch.compiler.is_compiling():
        return slice(None)
    keys = is_in.any(0).nonzero()
    return slice(int(keys[0]), int(keys[-1]) + 1) if len(keys) else slice(0)


class NearWindow(TrainingFree):
    """Base of the extensions with exact positions up to a distance.

    Args:
        near_window: distances i - j below it are exact; default original_len / `divisor`, in tokens.
    """

    divisor = 2

    def __init__(self, shape: Shape, *, near_window: Count | None = None, **options: Any) -> None:
        super().__init__(shape, **options)
        self.near_window = near_window or max(1, self.original_len // self.divisor)

    def zone(self, i: Tensor, j: Tensor, length: int) -> Tensor:
        return (i - j >= self.near_window).long()


class ReRoPE(NearWindow):
    """ReRoPE (kexue.fm/archives/9708, github.com/bojone/rerope): all keys beyond the window are at one distance.

    It is near_window, so no relative position exceeds it, and the order of those keys is lost.
    """

    def positions(self, i: Tensor, length: int) -> list[tuple[Tensor, Tensor]]:
        # Beyond the window queries are at position near_window and keys at 0, wherever they are in the text.
        return [(i, i), (torch.full_like(i, self.near_window), torch.zeros_like(i))]


class LeakyReRoPE(NearWindow):
    """Leaky ReRoPE (same sources): beyond the window, distances grow by 1 / `slowdown` for each token.

    Args:
        scale: target length / original length. `slowdown` follows from it: in a text of the target length the farthest
            key is at distance original_len.
    """

    def __init__(self, shape: Shape, *, scale: Stretch = 4.0, **options: Any) -> None:
        super().__init__(shape, **options)
        if self.near_window >= self.original_len:
            raise ValueError(f"pe.near_window={self.near_window} must be below pe.original_len={self.original_len}")
        self.slowdown = (scale * self.original_len - self.near_window) / (self.original_len - self.near_window)
        self.set_scales(scale)

    def positions(self, i: Tensor, length: int) -> list[tuple[Tensor, Tensor]]:
        # Slowed down, near_window tokens span only near_window / slowdown. Queries are moved ahead by the rest, so that
        # the zones meet at distance near_window.
        slow = i / self.slowdown
        ahead = self.near_window * (1 - 1 / self.slowdown)
        return [(i, i), (slow + ahead, slow)]


class SelfExtend(NearWindow):
    """Self-Extend (arXiv 2401.01325, github.com/datamllab/LongLM): beyond the window positions count groups of tokens.

    Relative positions stay whole numbers; in the released code they do where `group` divides `near_window`.

    Args:
        scale: target length / original length.
        group: tokens in a group; by default as many as keep relative positions within 2/3 of original_len at the target
            length, as the authors advise.
    """

    divisor = 4

    def __init__(self, shape: Shape, *, scale: Stretch = 4.0, group: Count | None = None, **options: Any) -> None:
        super().__init__(shape, **options)
        # Relative positions left beyond the window, for all tokens of the target length that lie there.
        room = 2 * self.original_len / 3 - self.near_window
        if group is None and room <= 0:
            raise ValueError(
                f"pe.near_window={self.near_window} must be below 2/3 of pe.original_len={self.original_len}, "
                "unless pe.group is given"
            )
        self.group = group or math.ceil((scale * self.original_len - self.near_window) / room)
        self.set_scales(scale)

    def positions(self, i: Tensor, length: int) -> list[tuple[Tensor, Tensor]]:
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
        self.largest = self.original_len * 3 // 4  # position
        self.chunk = max(1, self.largest - self.original_len // 8)

    def positions(self, i: Tensor, length: int) -> list[tuple[Tensor, Tensor]]:
        within = i % self.chunk
        # Keys keep their position within their chunk. For the chunk before its own a query is one chunk further on, and
        # for all older chunks at one fixed position; neither is beyond `largest`.
        next_chunk = (within + self.chunk).clamp(max=self.largest)
        largest = torch.full_like(i, min(2 * self.chunk - 1, self.largest))
        return [(within, within), (next_chunk, within), (largest, within)]

    def zone(self, i: Tensor, j: Tensor, length: int) -> Tensor:
        return (i // self.chunk - j // self.chunk).clamp(0, 2)


class HardWindow(NearWindow):
    """The control for all of these: keys beyond the window are hidden. By default it is original_len tokens long."""

    divisor = 1
    sinks = 0  # tokens from the start that every query sees

    @property
    def most_seen(self) -> int | None:
        if self.active_scale == self.unscaled:
            return self.window
        seen = self.near_window + self.sinks
        return seen if self.window is None else min(seen, self.window)

    def positions(self, i: Tensor, length: int) -> list[tuple[Tensor, Tensor]]:
        return [(i, i)]

    def zone(self, i: Tensor, j: Tensor, length: int) -> Tensor:
        return -super().zone(i, j, length)  # zone 1, beyond the window, becomes -1


class SinksWindow(HardWindow):
    """StreamingLLM (arXiv 2309.17453): a window and, moved up to just before it, the first tokens of the text.

    Args:
        sinks: number of tokens kept from the start; the default window leaves room for them in original_len.
    """

    def __init__(self, shape: Shape, *, sinks: Count = 4, near_window: Count | None = None, **options: Any) -> None:
        super().__init__(shape, near_window=near_window, **options)
        self.sinks = sinks
        self.near_window = near_window or max(1, self.original_len - sinks)

    def positions(self, i: Tensor, length: int) -> list[tuple[Tensor, Tensor]]:
        # In zone 1 keys are the first tokens, at positions 0 to sinks - 1. A late query is at the one position at which
        # they come right before its window.
        return [(i, i), (i.clamp(max=self.sinks + self.near_window - 1), i)]

    def zone(self, i: Tensor, j: Tensor, length: int) -> Tensor:
        # The first tokens are in zone 0 as long as they are in the window, then in zone 1. Others have HardWindow's.
        of_first = (i - j >= self.near_window).long()
        return torch.where(j < self.sinks, of_first, super().zone(i, j, length))
