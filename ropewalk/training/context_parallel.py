"""Context parallelism: several ranks read one text together, with any position encoding.

Every rank works on its own part of the text, token by token. Only attention looks beyond it: each layer gathers the
keys, the values and the encoding's `state` of all ranks. A piece of queries then attends to all keys up to its own end,
as when a cache is filled piece by piece, so an encoding notices nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from model.attention import Context, recomputed
from model.position import PositionEncoding
from model.position.layer import attend, make_context

# Functional collectives can be compiled. The gradient of this one is the sum over the ranks, cut as the tensor was.
# Its name in PyTorch before 2.13 was the second.
_all_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd


@dataclass(frozen=True)
class ContextParallel:
    """The place of this rank among the `size` ranks that share each text.

    A text is cut into 2 n equal pieces, and rank r of n has pieces r and 2 n - 1 - r. A query sees the keys before it,
    so an early piece is little work and a late one is much; these pairs are equal work. The last pieces may reach
    beyond the text: no token sees what follows it.
    """

    group: Any  # name of the process group; a name is a constant for torch.compile
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "ContextParallel":
        return cls(group.group_name, group.rank(), group.size())

    def pieces(self, length: int) -> list[range]:
        """This rank's two pieces of a text of `length` tokens, as positions."""
        n = 2 * self.size
        tokens = -(-length // n)  # of a piece, rounded up
        pieces = []
        # One from the start of the text and one from its end: together they attend to as much for every rank.
        for i in (self.rank, n - 1 - self.rank):
            pieces.append(range(i * tokens, (i + 1) * tokens))
        return pieces

    def own(self, x: Tensor, beyond: int = 0) -> Tensor:
        """This rank's part [B, t] of a text `x` [B, T], with `beyond` in the places after its end."""
        pieces = self.pieces(x.size(1))
        # Nothing else is cut: a whole text has all pieces, of equal size.
        whole = 2 * self.size * len(pieces[0])
        x = F.pad(x, (0, whole - x.size(1)), value=beyond)
        parts = [x[:, piece.start : piece.stop] for piece in pieces]
        return torch.cat(parts, dim=1)

    def whole(self, part: Tensor) -> Tensor:
        """The text [B, 2 n p, ...] of which each rank has a `part` [B, 2 p, ...], p tokens a piece. All ranks call it.

        The gradient of `part` is the sum of what all ranks contribute.
        """
        gathered = _all_gather(part.contiguous(), 0, self.group)  # [n B, 2 p, ...]
        early, late = gathered.unflatten(0, (self.size, -1)).chunk(2, dim=2)  # [n, B, p, ...] each
        return torch.cat([*early.unbind(), *late.unbind()[::-1]], dim=1)

    def contexts(
        self, encodings: Iterable[PositionEncoding], length: int, device: torch.device, *, recompute: bool
    ) -> tuple[Tensor, dict[PositionEncoding, "SplitContext"]]:
        """Positions [t] of this rank's part of a text of `length` tokens, and the context of each encoding."""
        pieces = self.pieces(length)
        split = {}
        for pe in encodings:
            contexts = []
            for piece in pieces:
                pos = torch.arange(piece.stop, device=device)
                # Tables follow the length of the whole text, as without context parallelism. For attention the text
                # ends with the piece, and has no gaps.
                ctx = make_context(pe, pos, len(piece), length)
                contexts.append(replace(ctx, length=piece.stop, has_gaps=False))
            split[pe] = SplitContext(self, contexts, recompute)
        new_pos = torch.cat([torch.arange(piece.start, piece.stop, device=device) for piece in pieces])
        return new_pos.clamp(max=length - 1), split  # a learned table may end with the text


@dataclass(frozen=True, eq=False)
class SplitContext:
    """Stand-in for a `Context` with context parallelism: one context for each of this rank's pieces."""

    ranks: ContextParallel
    contexts: list[Context]
    recompute: bool  # gather again in the backward pass, instead of keeping what a layer has gathered

    def attend(
        self, pe: PositionEncoding, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], sinks: Tensor | None
    ) -> Tensor:
        """Attention [B, t, H, D] of this rank's q, k, v [B, t, H or Hkv, D] and the encoding's `state`."""

        def gathered(q: Tensor, *parts: Tensor) -> Tensor:
            whole = [self.ranks.whole(x) for x in parts]
            out = []
            for q_piece, ctx in zip(q.chunk(2, dim=1), self.contexts, strict=True):
                # A piece sees what stands before its end, whichever rank has it.
                stop = ctx.pos_k.size(0)
                k, v, *others = [x[:, :stop] for x in whole]  # [B, stop, ...]
                visible_state = dict(zip(state, others, strict=True))
                q_piece = q_piece.transpose(1, 2)  # [B, H, p, D]
                k = k.transpose(1, 2)  # [B, Hkv, stop, D]
                v = v.transpose(1, 2)
                heads = attend(pe, q_piece, k, v, visible_state, replace(ctx, sinks=sinks))
                out.append(heads.transpose(1, 2))
            return torch.cat(out, dim=1)

        run = recomputed(gathered) if self.recompute else gathered
        return run(q, k, v, *state.values())
