"""Context parallelism: several ranks read one text together, with any position encoding.

For: texts that no device can hold. Has shown: loss and gradients of one process. Leaves: when PyTorch's own serves.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from model.attention import Context, recomputed
from model.cache import Cache
from model.layout import IGNORE_INDEX, Contexts, Layout
from model.position.base import PositionEncoding
from model.position.layer import make_context

# Functional collectives can be compiled. The gradient of this one is the sum over the ranks, cut as the tensor was.
# Its name in PyTorch before 2.13 was the second.
_all_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd


class Shared(Layout):
    """Texts of which each of the ranks in a group reads a part.

    Every rank works on its own part of the text, token by token. Only attention looks beyond it: each layer gathers the
    keys, the values and the encoding's `state` of all ranks. A piece of queries then attends to all keys up to its own
    end, as when a cache is filled piece by piece, so an encoding notices nothing.

    A text is cut into 2 n equal pieces, and rank r of n has pieces r and 2 n - 1 - r. A query sees the keys before it,
    so an early piece is little work and a late one is much; these pairs are equal work. The last pieces may reach
    beyond the text: no token sees what follows it.

    Args:
        recompute: gather again in the backward pass, instead of keeping what a layer has gathered. Not with
            checkpointing, which computes the whole layer again.
    """

    def __init__(self, group: dist.ProcessGroup, *, recompute: bool) -> None:
        super().__init__()
        self.group = group.group_name  # a name is a constant for torch.compile
        self.rank = group.rank()
        self.size = group.size()
        self.recompute = recompute

    def contexts(
        self, encodings: Iterable[PositionEncoding], idx: Tensor, cache: Cache | None
    ) -> tuple[Tensor, Tensor, Contexts]:
        """As of `Layout`: token ids [B, t] and positions [t] of this rank's pieces, and contexts for them."""
        assert cache is None  # only generation has one, and there each rank reads whole texts
        length = idx.size(1)
        pieces = self.pieces(length)
        contexts: Contexts = {}
        for pe in encodings:
            of_pieces = []
            for piece in pieces:
                pos = torch.arange(piece.stop, device=idx.device)
                # Tables follow the length of the whole text, as without context parallelism. For attention the text
                # ends with the piece, and has no gaps.
                ctx = make_context(pe, pos, len(piece), length)
                of_pieces.append(replace(ctx, length=piece.stop, has_gaps=False))
            contexts[pe] = SharedContext(self, of_pieces)
        own_pos = torch.cat([torch.arange(piece.start, piece.stop, device=idx.device) for piece in pieces])
        return self.own(idx), own_pos.clamp(max=length - 1), contexts  # a learned table may end with the text

    def scored(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        # A rank may have no target of its own. The mean over the ranks is the mean over all targets.
        n_targets = (targets != IGNORE_INDEX).sum() / self.size
        return self.own(targets, IGNORE_INDEX), n_targets

    def pieces(self, length: int) -> list[range]:
        """This rank's two pieces of a text of `length` tokens, as positions."""
        n = 2 * self.size
        tokens = -(-length // n)  # of a piece, rounded up
        # One from the start of the text and one from its end: together they attend to as much for every rank.
        return [range(i * tokens, (i + 1) * tokens) for i in (self.rank, n - 1 - self.rank)]

    def own(self, x: Tensor, beyond: int = 0) -> Tensor:
        """This rank's part [B, t] of a text `x` [B, T], with `beyond` in the places after its end."""
        pieces = self.pieces(x.size(1))
        # Nothing else is cut: a whole text has all pieces, of equal size.
        whole = 2 * self.size * len(pieces[0])
        x = F.pad(x, (0, whole - x.size(1)), value=beyond)
        return torch.cat([x[:, piece.start : piece.stop] for piece in pieces], dim=1)

    def gathered(self, part: Tensor) -> Tensor:
        """The text [B, 2 n p, ...] of which each rank has a `part` [B, 2 p, ...], p tokens a piece. All ranks call it.

        The gradient of `part` is the sum of what all ranks contribute.
        """
        gathered = _all_gather(part.contiguous(), 0, self.group)  # [n B, 2 p, ...]
        early, late = gathered.unflatten(0, (self.size, -1)).chunk(2, dim=2)  # [n, B, p, ...] each
        return torch.cat([*early.unbind(), *late.unbind()[::-1]], dim=1)


@dataclass(frozen=True, eq=False)
class SharedContext:
    """The context of a shared text: one `Context` for each of this rank's pieces.

    It has no `earlier`: a configuration that needs it is refused (`ropewalk.app.resolve`).
    """

    layout: Shared
    of_pieces: list[Context]

    def attend(
        self, pe: PositionEncoding, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], *, layer: Hashable,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        # Of this rank's t tokens: the result and q [B, t, H, D], k and v [B, t, Hkv, D], and the state.
        def gathered(q: Tensor, *parts: Tensor) -> Tensor:
            whole = [self.layout.gathered(x) for x in parts]
            out = []
            for q_piece, ctx in zip(q.chunk(2, dim=1), self.of_pieces, strict=True):
                # A piece sees what stands before its end, whichever rank has it.
                k, v, *others = [x[:, : ctx.length] for x in whole]  # [B, end of the piece, ...] each
                seen_state = dict(zip(state, others, strict=True))
                out.append(ctx.attend(pe, q_piece, k, v, seen_state, layer=layer, sinks=sinks))
            return torch.cat(out, dim=1)

        run: Any = recomputed(gathered) if self.layout.recompute else gathered
        return run(q, k, v, *state.values())
