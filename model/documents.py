"""Documents as documents: in a batch of packed rows, the attention of every layer stays within each document.

The piece of a document in a row becomes a row of its own, so any encoding reads it as if it were alone, from position
0 on. Pieces of similar length run together. The rest of the network, token by token, sees the batch as it is packed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention import Context
from model.position import PositionEncoding

SHORTEST = 16  # tokens of a row, at least: few sizes, so that many short documents run at once


@dataclass(eq=False)
class Documents:
    """Where the documents of a batch [B, T] are. No tuple: torch.compile would have a graph for each number of rows."""

    rows: list[Tensor]  # int64 [n, L] each: the tokens of n pieces of up to L tokens, counted over the whole batch
    place: Tensor  # int64 [B, T]: of each token in `rows`, all laid end to end
    pos: Tensor  # int64 [B, T]: position of each token within its piece


@dataclass(frozen=True, eq=False)
class PackedContext:
    """What an attention layer needs instead of a `Context`: one for each of `documents.rows`."""

    documents: Documents
    contexts: list[Context]

    @torch.compiler.disable  # the shapes change from batch to batch
    def attend(
        self, pe: PositionEncoding, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], sinks: Tensor | None
    ) -> Tensor:
        """Attention [B, T, H, D] of q, k, v [B, T, H or Hkv, D] and the encoding's `state`."""
        out = []
        for rows, ctx in zip(self.documents.rows, self.contexts, strict=True):
            heads = [_take(x.flatten(0, 1), rows).transpose(1, 2) for x in (q, k, v)]  # [n, H or Hkv, L, D]
            own = {name: _take(x.flatten(0, 1), rows) for name, x in state.items()}  # [n, L, ...]
            out.append(pe(*heads, own, replace(ctx, sinks=sinks)).transpose(1, 2).flatten(0, 1))  # [n L, H, D]
        return _take(torch.cat(out), self.documents.place)


def _take(x: Tensor, places: Tensor) -> Tensor:
    """The rows `places` [n, L] of `x`, [n, L, ...]. In any order the gradient is the same: what pads has none."""
    return x.index_select(0, places.flatten()).unflatten(0, places.shape)


def find_documents(idx: Tensor, end: int) -> Documents | None:
    """The documents in token ids `idx` int64 [B, T], on the CPU, each of which ends in the token `end`.

    Pieces are padded with their last token to the next power of two, or T: what follows a token is invisible to it.
    None: no row has tokens of two documents.
    """
    total, length = idx.numel(), idx.size(1)
    (first,) = F.pad(idx[:, :-1] == end, (1, 0), value=True).flatten().nonzero(as_tuple=True)
    if len(first) == len(idx):
        return None
    sizes = first.diff(append=torch.tensor([total]))
    room = torch.tensor([min(length, max(SHORTEST, 1 << (size - 1).bit_length())) for size in sizes.tolist()])
    rows, place, before = [], torch.empty(total, dtype=torch.long), 0
    for width in room.unique().tolist():
        start, within = first[room == width, None], torch.arange(width)
        rows.append(start + within.minimum(sizes[room == width, None] - 1))  # [n, L]
        real = within < sizes[room == width, None]
        place[rows[-1][real]] = before + real.flatten().nonzero()[:, 0]
        before += real.numel()
    pos = torch.arange(total) - first.repeat_interleave(sizes)
    return Documents(rows, place.view_as(idx), pos.view_as(idx))


@torch.compiler.disable
def packed_contexts(
    encodings: Iterable[PositionEncoding], documents: Documents, device: torch.device
) -> tuple[Tensor, dict[PositionEncoding, PackedContext]]:
    """The positions [B, T] of a forward pass and its contexts, with tables computed once for each of `rows`."""
    rows = [own.to(device) for own in documents.rows]
    place, pos = documents.place.to(device), documents.pos.to(device)
    texts = [torch.arange(own.size(1), device=device) for own in rows]
    contexts = {pe: [pe.context(text, len(text), len(text)) for text in texts] for pe in encodings}
    return pos, {pe: PackedContext(Documents(rows, place, pos), own) for pe, own in contexts.items()}
