"""Training-free context extensions of a RoPE model: every relative position stays within what training has met.

Pairs of a query and a key fall into zones by their distance, and each zone has its own positions for RoPE to rotate
by. No weight changes: the encodings train as RoPE, and an evaluation measures them as RoPE (scale 1) and with the
extension.
"""

import math
from dataclasses import replace
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from model.attention import (
    exactly,
    for_heads_of,
    fused_forward,
    has_kernel,
    in_blocks,
    merged,
    products,
    run_of_keys,
    softmax,
)
from model.position.base import ANY_LENGTH, Context, Count, Positive, Scaled, Shape, Share, overrides
from model.position.ops import exact_dtype
from model.position.rotary import Rotary

Stretch = Annotated[float, Field(ge=1, allow_inf_nan=False)]


class TrainingFree(Scaled, Rotary):
    """Base of the training-free extensions: RoPE at scale 1, active at any other scale.

    A subclass says which zones there are (`zone`), and by which positions queries and keys are rotated in each
    (`positions`). Kernels need to know, too, between which keys a zone of a query lies (`runs`). Training beyond
    original_len, as in fine-tuning, runs with the extension active.
    """

    unscaled_as = Rotary
    kernels = "lab.kernels.zones"

    def __init__(self, shape: Shape, **options: Any) -> None:
        super().__init__(shape, **options)
        if self.values:
            raise ValueError("pe.values=true: a value has one angle, but the zones of this encoding have several")
        self.set_scales(ANY_LENGTH)
        # Whether `runs` says what `zone` says: it does not know of a `zone` that a subclass or a mixin overrides.
        owner = next(base for base in type(self).__mro__ if "runs" in vars(base))
        is_whole = owner is not TrainingFree and issubclass(owner, TrainingFree)
        self.has_runs = is_whole and not overrides(self, owner, "zone")

    def positions(self, i: Tensor, length: int) -> list[tuple[Tensor, Tensor]]:
        """Return for each zone the positions of the tokens `i` of a text of `length` as queries and as keys.

        Both are [T], as `i` is: the numbers 0..T-1 in `exact_dtype`.
        """
        raise NotImplementedError

    def zone(self, i: Tensor, j: Tensor, length: int) -> Tensor:
        """Return the zone of queries i [Tq, 1] and keys j [Tk], all int64: [Tq, Tk]; -1: the key is hidden."""
        raise NotImplementedError

    def runs(self, i: Tensor, length: int) -> list[tuple[Tensor, Tensor]]:
        """Return for each zone the first and the newest key there of each query, int64 [T] each, both ascending.

        Optional: what `zone` says of a text without gaps, i = 0..T-1, where the keys of a zone are neighbours. The
        first key may be below 0, which means 0, or beyond the newest, which means none.
        """
        raise NotImplementedError

    def tables(self, pos: Tensor, length: int) -> Any:
        """The first position, the length, the runs of zones (None with gaps, or without `runs`) and, for each zone,
        (cos, sin) of queries and of keys; RoPE's while unscaled.

        Positions count from the first token, so that zones of whole groups or chunks begin with the text.
        """
        if self.active_scale == self.unscaled:
            return super().tables(pos, length)
        tables = []
        i = (pos - pos[0]).to(exact_dtype(pos.device))
        for of_queries, of_keys in self.positions(i, length):
            tables.append((super().tables(of_queries, length), super().tables(of_keys, length)))
        runs = None
        if self.has_runs and pos.size(0) == length:
            tokens = torch.arange(length, device=pos.device)
            runs = [run_of_keys(first, newest, self.window) for first, newest in self.runs(tokens, length)]
        return pos[0], length, runs, tables

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        if self.active_scale == self.unscaled:
            return super().attend(q, k, v, state, ctx)
        first, length, runs, tables = ctx.tables  # `ctx.length` may be that of a piece of the text

        # Each zone has positions, and so rotated queries and keys, of its own.
        queries = [self.rotated(q, *of_queries) for of_queries, _ in tables]
        keys = [self.rotated(k, *of_keys) for _, of_keys in tables]
        if runs is not None and has_kernel(q, ctx):
            from lab.kernels.zones import zones  # needs Triton, which only comes with PyTorch for GPUs

            return zones(queries, keys, v, runs, scale=ctx.scale, sinks=ctx.sinks)

        # Queries and keys exist once for each zone, rotated by its positions. A block computes the scores of all its
        # pairs in every zone, and then each pair takes the score of its own zone. `in_blocks` passes the block's
        # queries of every zone, then its keys of every zone, the values and the context.
        def block(*arguments: Any) -> Tensor:
            *rotated, v, ctx = arguments
            q_zones = rotated[: len(tables)]
            k_zones = rotated[len(tables) :]
            zone = self.zone(ctx.pos_q[:, None] - first, ctx.pos_k - first, length)  # [Tq, Tk]

            def in_zone(n: int) -> Tensor:
                q = q_zones[n]  # [B, H, Tq, D]
                k = for_heads_of(q, k_zones[n])  # [B, H, Tk, D]
                return products(q, k, ctx.scale)  # [B, H, Tq, Tk]

            # The scores of zone 0, until those of another zone replace them.
            scores = in_zone(0)
            for n in range(1, len(tables)):
                scores = torch.where(zone == n, in_zone(n), scores)

            # Pairs with a zone below 0 are not seen.
            visible = (zone >= 0) & ctx.visible()
            scores = scores.masked_fill(~visible, -torch.inf)
            return softmax(scores, ctx.sinks).to(v.dtype) @ for_heads_of(q_zones[0], v)

        return in_blocks(block, queries, [*keys, v], ctx)


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

    def runs(self, i: Tensor, length: int) -> list[tuple[Tensor, Tensor]]:
        return [(i - self.near_window + 1, i), (torch.zeros_like(i), i - self.near_window)]


class NearAndFar(NearWindow):
    """Base of the extensions with two zones: near distances, and all others."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        size = self.near_window
        active = self.active_scale != self.unscaled
        whole = q.size(2) == k.size(2) > size and not ctx.has_gaps
        plain = ctx.window is None and ctx.sinks is None
        learning = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        usual = not overrides(self, NearWindow, "zone", "runs")  # the zones meet at `near_window`
        fused = usual and q.device.type == "cpu" and not torch.compiler.is_compiling() and not has_kernel(q, ctx)
        if not (active and whole and plain and fused) or learning:
            return super().attend(q, k, v, state, ctx)

        # An evaluation on a CPU makes no score twice. The far zone, i - j >= size, is causal attention of the queries
        # from `size` on with as many keys from the first on. The near zone is a sliding window.
        _, _, _, ((near_q, near_k), (far_q, far_k)) = ctx.tables

        def near_zone(q: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
            mask = torch.where(ctx.visible(), 0.0, -torch.inf).to(q.dtype)[None, None]  # [1, 1, Tq, Tk]
            out, log_sum = fused_forward(q, k, v, mask=mask, scale=ctx.scale)
            return torch.cat((out, log_sum[..., None]), dim=-1)  # [B, H, Tq, D + 1]

        # The near zone, of all queries.
        in_window = replace(ctx, window=size)
        queries = (self.rotated(q, *near_q),)
        keys = (self.rotated(k, *near_k), v)
        near = in_blocks(near_zone, queries, keys, in_window, recompute=False)
        out = near[..., :-1]  # [B, H, T, D]
        log_sum = near[..., -1]  # [B, H, T]

        # The far zone, of the queries that have one.
        q = self.rotated(q, *far_q)[:, :, size:]
        k = self.rotated(k, *far_k)[:, :, :-size]
        v_far = v[:, :, :-size]
        far, far_log_sum = fused_forward(q, k, v_far, causal=True, scale=ctx.scale)

        out[:, :, size:], _ = merged(exactly(far), far_log_sum, out[:, :, size:], log_sum[:, :, size:])
        return out.to(v.dtype)


class ReRoPE(NearAndFar):
    """ReRoPE (kexue.fm/archives/9708, github.com/bojone/rerope): all keys beyond the window are at one distance.

    It is near_window, so no relative position exceeds it, and the order of those keys is lost.
    """

    def positions(self, i: Tensor, length: int) -> list[tuple[Tensor, Tensor]]:
        # Beyond the window queries are at position near_window and keys at 0, wherever they are in the text.
        return [(i, i), (torch.full_like(i, self.near_window), torch.zeros_like(i))]


class LeakyReRoPE(NearAndFar):
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


class STRING(NearAndFar):
    """STRING (arXiv 2410.18745, github.com/HKUNLP/STRING): keys beyond the window move up to distance `local`.

    The largest distances are the least trained, and this reading does without them. So it helps within original_len
    already; beyond original_len + near_window - local tokens the farthest keys are at distances that were never met.

    Args:
        local: the distance of the first key beyond the window, in tokens; default original_len / 32.
    """

    divisor = 3

    def __init__(self, shape: Shape, *, local: Count | None = None, **options: Any) -> None:
        super().__init__(shape, **options)
        self.local = local or max(1, self.original_len // 32)
        if self.local > self.near_window:
            raise ValueError(f"pe.local={self.local} must be at most pe.near_window={self.near_window}")

    def positions(self, i: Tensor, length: int) -> list[tuple[Tensor, Tensor]]:
        return [(i, i), (i - (self.near_window - self.local), i)]


class LaMPE(NearWindow):
    """LaMPE (arXiv 2508.02308, github.com/scar-on/LaMPE): the room for distances follows the length of the text.

    Near distances are exact; those between follow positions p M / (length - 1), rounded down; the last `tail` of all
    grow by 1 a token again. M = capacity original_len sigmoid(steepness (length / original_len - midpoint)), rounded
    down. A text of up to original_len is read exactly. Positions follow the length, as with DynamicNTK.

    The authors fit the sigmoid for each model. The defaults are their fit for Llama 3.

    Args:
        tail: the number of largest distances that are not squeezed; default original_len / 40.
        capacity: what M / original_len tends to in long text.
        midpoint: length / original_len at which M is half of that.
        steepness: how fast M grows there.
    """

    divisor = 8

    def __init__(
        self, shape: Shape, *, tail: Count | None = None, capacity: Share = 0.757, midpoint: Positive = 2.87,
        steepness: Positive = 0.86, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(shape, **options)
        self.tail = tail or max(1, self.original_len // 40)
        self.capacity = capacity
        self.midpoint = midpoint
        self.steepness = steepness
        needed = math.ceil(capacity * self.original_len) + self.near_window + self.tail
        if needed > self.original_len:
            parts = f"pe.near_window={self.near_window} and pe.tail={self.tail} take {needed} positions"
            raise ValueError(f"pe.capacity={capacity:g}, {parts}, more than pe.original_len={self.original_len}")

    def positions(self, i: Tensor, length: int) -> list[tuple[Tensor, Tensor]]:
        # A tensor, not a float, so that torch.compile has one graph for all lengths.
        tokens = i.new_full((), length)
        filled = torch.sigmoid(self.steepness * (tokens / self.original_len - self.midpoint))
        room = (self.capacity * self.original_len * filled).floor()  # M

        def mapped(p: Tensor | float) -> Tensor:
            return (p * room / (tokens - 1)).floor()

        # Both moves make the zones meet: at distance near_window, and where key 0 is as far back as the tail begins.
        ahead = self.near_window - 1 - mapped(self.near_window)
        last = tokens - 1 - self.tail
        back = last - mapped(last) - ahead
        return [(i, i), (mapped(i) + ahead, mapped(i)), (i - back, i)]

    def zone(self, i: Tensor, j: Tensor, length: int) -> Tensor:
        far = super().zone(i, j, length)
        if length <= self.original_len:
            return torch.zeros_like(far)
        return far * torch.where(i - j < length - self.tail, 1, 2)

    def runs(self, i: Tensor, length: int) -> list[tuple[Tensor, Tensor]]:
        start = torch.zeros_like(i)
        if length <= self.original_len:
            none = (start, torch.full_like(i, -1))
            return [(start, i), none, none]
        near, (_, newest) = super().runs(i, length)
        first = i - (length - self.tail) + 1  # before it lies the tail
        return [near, (first, newest), (start, newest.minimum(first - 1))]


class SelfExtend(NearAndFar):
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
            limit = f"must be below 2/3 of pe.original_len={self.original_len}, unless pe.group is given"
            raise ValueError(f"pe.near_window={self.near_window} {limit}")
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

    def runs(self, i: Tensor, length: int) -> list[tuple[Tensor, Tensor]]:
        own_chunk = i // self.chunk * self.chunk  # its first token
        chunk_before = own_chunk - self.chunk
        return [(own_chunk, i), (chunk_before, own_chunk - 1), (torch.zeros_like(i), chunk_before - 1)]


class HardWindow(NearWindow):
    """The control for all of these: keys beyond the window are hidden. By default it is original_len tokens long."""

    divisor = 1

    def positions(self, i: Tensor, length: int) -> list[tuple[Tensor, Tensor]]:
        return [(i, i)]

    def zone(self, i: Tensor, j: Tensor, length: int) -> Tensor:
        return -super().zone(i, j, length)  # zone 1, beyond the window, becomes -1

    def runs(self, i: Tensor, length: int) -> list[tuple[Tensor, Tensor]]:
        return super().runs(i, length)[:1]


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
        return torch.where(j < self.sinks, (i - j >= self.near_window).long(), super().zone(i, j, length))

    def runs(self, i: Tensor, length: int) -> list[tuple[Tensor, Tensor]]:
        kept = (torch.zeros_like(i), (i - self.near_window).clamp(max=self.sinks - 1))
        return [*super().runs(i, length), kept]
