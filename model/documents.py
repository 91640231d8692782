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
from model.position.layer import attend, make_context

SHORTEST = 16  # tokens of a row, at least: few sizes, so that many short documents run at once


@dataclass(eq=False)
class Documents:
    """The places of the documents in a batch [B, T].

    No tuple: torch.compile would have a graph for each number of rows.
    """

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
            q_rows = _take(q.flatten(0, 1), rows).transpose(1, 2)  # [n, H, L, D]
            k_rows = _take(k.flatten(0, 1), rows).transpose(1, 2)  # [n, Hkv, L, D]
            v_rows = _take(v.flatten(0, 1), rows).transpose(1, 2)
            state_rows = {name: _take(x.flatten(0, 1), rows) for name, x in state.items()}  # [n, L, ...]
            heads = attend(pe, q_rows, k_rows, v_rows, state_rows, replace(ctx, sinks=sinks))  # [n, H, L, D]
            out.append(heads.transpose(1, 2).flatten(0, 1))  # [n L, H, D]
        return _take(torch.cat(out), self.documents.place)


def _take(x: Tensor, places: Tensor) -> Tensor:
    """The rows `places` [n, L] of `x`, [n, L, ...].

    Its gradient does not depend on the order of its sums: a token stands in one piece, and what pads has no gradient.
    """
    return x.index_select(0, places.flatten()).unflatten(0, places.shape)


def find_documents(idx: Tensor, end: int) -> Documents | None:
    """The documents in token ids `idx` int64 [B, T], on the CPU, each of which ends in the token `end`.

    Pieces are padded with their last token to the next power of two, or T: what follows a token is invisible to it.
    None: no row has tokens of two documents.
    """
    total = idx.numel()
    length = idx.size(1)
    # A piece begins at the start of a row, and after each end of a document. Places count over the whole batch.
    begins = F.pad(idx[:, :-1] == end, (1, 0), value=True)  # [B, T]
    (first,) = begins.flatten().nonzero(as_tuple=True)  # [pieces]
    if len(first) == len(idx):
        return None
    sizes = first.diff(append=torch.tensor([total]))  # [pieces]

    def padded(size: int) -> int:
        power_of_two = 1 << (size - 1).bit_length()
        return min(length, max(SHORTEST, power_of_two))

    # Rows of few different widths: pieces of one width are one call of attention, and a power of two pads a piece to at
    # most twice its length, or to SHORTEST.
    widths = torch.tensor([padded(size) for size in sizes.tolist()])
    rows = []
    place = torch.empty(total, dtype=torch.long)
    laid = 0  # tokens in `rows` so far
    for width in widths.unique().tolist():
        start = first[widths == width, None]  # [n, 1]
        size = sizes[widths == width, None]  # [n, 1]
        within = torch.arange(width)
        tokens = start + within.minimum(size - 1)  # [n, L]
        is_real = within < size  # [n, L]; the rest pads
        place[tokens[is_real]] = laid + is_real.flatten().nonzero()[:, 0]
        rows.append(tokens)
        laid += tokens.numel()
    pos = torch.arange(total) - first.repeat_interleave(sizes)
    return Documents(rows, place.view_as(idx), pos.view_as(idx))


@torch.compiler.disable
def packed_contexts(
    encodings: Iterable[PositionEncoding], documents: Documents, device: torch.device
) -> tuple[Tensor, dict[PositionEncoding, PackedContext]]:
    """The positions [B, T] of a forward pass and its contexts, with tables computed once for each of `rows`."""
    # Each piece is a text of its own, so its positions begin at 0, and all rows of a width share one context.
    on_device = Documents(
        [rows.to(device) for rows in documents.rows], documents.place.to(device), documents.pos.to(device)
    )
    texts = [torch.arange(rows.size(1), device=device) for rows in on_device.rows]
    packed = {}
    for pe in encodings:
        contexts = [make_context(pe, text, len(text), len(text)) for text in texts]
        packed[pe] = PackedContext(on_device, contexts)
    return on_device.pos, packed
