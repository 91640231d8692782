"""Documents as documents: in a batch of packed rows, the attention of every layer stays within each document.

Packed rows hold many documents end to end. A piece is the part of a document that lies in one packed row. For attention
every piece becomes a row of its own, so any encoding reads it as if it were alone, from position 0 on, and pieces of
similar length run together. The rest of the network works token by token and sees the batch as it is packed.

That is the specification, and serves every device and encoding. Where kernels are used and the encodings allow it
(`PositionEncoding.in_place`), pieces stay where they are, and two numbers of each token say which others it sees.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

# `torch.compiler.disable` of torch's own optimizers: it imports the compiler, which takes a second, at the first call
# and not when a module is imported. The public one would slow the start of every program.
from torch._compile import _disable_dynamo as uncompiled

from model.attention import Context, Places
from model.position import PositionEncoding
from model.position.layer import attend, make_context

# The least width, in tokens, that a piece is padded to: many short documents then have one width, and run at once.
SHORTEST = 16


@dataclass(eq=False)
class Documents:
    """The places of the documents in a batch [B, T].

    A class and no tuple, since torch.compile would make a graph for each number of rows.
    """

    # One tensor int64 [n, L] for each width L: row by row the tokens of n pieces of up to L tokens, as indices into the
    # flat batch [B T].
    rows: list[Tensor]
    place: Tensor  # int64 [B, T]: where each token stands in all tensors of `rows`, laid end to end
    pos: Tensor  # int64 [B, T]: position of each token within its piece


@dataclass(frozen=True)
class DocumentsInPlace:
    """Documents that stay where they are. A forward pass finds them in its token ids, without waiting for a device."""

    end: int  # the token that ends a document


@dataclass(frozen=True, eq=False)
class PackedContext:
    """Stand-in for a `Context` where attention stays within documents: one context for each of `documents.rows`."""

    documents: Documents
    contexts: list[Context]

    @uncompiled  # the shapes change from batch to batch
    def attend(
        self, pe: PositionEncoding, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], sinks: Tensor | None
    ) -> Tensor:
        """Attention [B, T, H, D] of q, k, v [B, T, H or Hkv, D] and the encoding's `state`."""
        out = []
        for rows, ctx in zip(self.documents.rows, self.contexts, strict=True):
            q_rows = _take(q.flatten(0, 1), rows).transpose(1, 2)  # [n, H, L, D]
            k_rows = _take(k.flatten(0, 1), rows).transpose(1, 2)  # [n, Hkv, L, D]
            v_rows = _take(v.flatten(0, 1), rows).transpose(1, 2)  # [n, Hkv, L, D]
            state_rows = {name: _take(x.flatten(0, 1), rows) for name, x in state.items()}  # [n, L, ...]
            heads = attend(pe, q_rows, k_rows, v_rows, state_rows, replace(ctx, sinks=sinks))  # [n, H, L, D]
            out.append(heads.transpose(1, 2).flatten(0, 1))  # [n L, H, D]
        return _take(torch.cat(out), self.documents.place)  # back in the order of the batch


def _take(x: Tensor, places: Tensor) -> Tensor:
    """The rows `places` [n, L] of `x` [N, ...], as [n, L, ...].

    The gradient is the same in every run, although its sums have no fixed order on a GPU: a token stands in one piece
    only, and padding has no gradient.
    """
    return x.index_select(0, places.flatten()).unflatten(0, places.shape)


def positions_in_place(idx: Tensor, end: int) -> Tensor:
    """Position of each token within its document, int64 [B, T]; in `idx` int64 [B, T] each ends in the token `end`."""
    begins = F.pad(idx[:, :-1] == end, (1, 0), value=True)  # [B, T]
    t = torch.arange(idx.size(1), device=idx.device).expand_as(idx)
    start = torch.where(begins, t, 0).cummax(1).values  # the first token of the document that holds t
    return t - start


def places(pos: Tensor, window: int | None) -> Places:
    """What tokens at the positions `pos` int64 [B, T] within their documents see of them, or of a window there."""
    length = pos.size(1)
    t = torch.arange(length, device=pos.device).expand_as(pos)
    first = t - pos
    # The next document begins at the least start behind t: a minimum over the tokens from the end of the row on.
    starts = torch.where(pos == 0, t, length)
    starts_behind = F.pad(starts[:, 1:], (0, 1), value=length)
    last = starts_behind.flip(1).cummin(1).values.flip(1) - 1
    if window is not None:
        first = first.maximum(t - window + 1)
        last = last.minimum(t + window - 1)
    return Places(pos, first.int().contiguous(), last.int().contiguous())


def contexts_in_place(
    encodings: Iterable[PositionEncoding], idx: Tensor, end: int
) -> tuple[Tensor, dict[PositionEncoding, Context]]:
    """Positions [B, T] of the documents in token ids `idx` [B, T], and the context of each encoding, for kernels."""
    pos = positions_in_place(idx, end)
    length = idx.size(1)
    in_row = torch.arange(length, device=idx.device)
    contexts = {}
    for pe in encodings:
        contexts[pe] = make_context(pe, in_row, length, length, kernels=True, places=places(pos, pe.window))
    return pos, contexts


def find_documents(idx: Tensor, end: int) -> Documents | None:
    """The documents in token ids `idx` int64 [B, T], on the CPU, each of which ends in the token `end`.

    Pieces are padded to the next power of two, or T, by repeating their last token, which no token before it can see.
    Returns None if no row has tokens of two documents.
    """
    total = idx.numel()
    length = idx.size(1)
    # A piece begins at the start of each row and after each end of a document. From here on tokens are counted over the
    # flat batch.
    begins = F.pad(idx[:, :-1] == end, (1, 0), value=True)  # [B, T]
    (first,) = begins.flatten().nonzero(as_tuple=True)  # [pieces], the first token of each
    if len(first) == len(idx):  # one piece in each row
        return None
    sizes = first.diff(append=torch.tensor([total]))  # [pieces]

    # All pieces of one width are one call of attention, so widths should be few. A power of two at most doubles a piece
    # that is not shorter than SHORTEST.
    choices = []
    power_of_two = SHORTEST
    while power_of_two < length:
        choices.append(power_of_two)
        power_of_two *= 2
    all_widths = torch.tensor([*choices, length])  # ascending
    widths = all_widths[torch.searchsorted(all_widths, sizes)]  # of each piece the least that holds it
    rows = []
    place = torch.empty(total, dtype=torch.long)
    n_placed = 0  # tokens in `rows` so far, padding included
    for width in widths.unique().tolist():
        start = first[widths == width, None]  # [n, 1]
        size = sizes[widths == width, None]  # [n, 1]
        within = torch.arange(width)  # [L]
        tokens = start + within.minimum(size - 1)  # [n, L]
        is_real = within < size  # [n, L]; the rest is padding
        # `nonzero` numbers the entries of this tensor, row by row; those of the tensors before it come first.
        place[tokens[is_real]] = n_placed + is_real.flatten().nonzero()[:, 0]
        rows.append(tokens)
        n_placed += tokens.numel()
    pos = torch.arange(total) - first.repeat_interleave(sizes)
    return Documents(rows, place.view_as(idx), pos.view_as(idx))


@uncompiled
def packed_contexts(
    encodings: Iterable[PositionEncoding], documents: Documents, device: torch.device, *, kernels: bool = False
) -> tuple[Tensor, dict[PositionEncoding, PackedContext]]:
    """Positions [B, T] of a forward pass and the context of each encoding, with one set of tables for each width.

    Args:
        kernels: as of `make_context`.
    """
    # Each piece is a text of its own, so its positions begin at 0, and all rows of a width share one context.
    on_device = Documents(
        [rows.to(device) for rows in documents.rows], documents.place.to(device), documents.pos.to(device)
    )
    positions = [torch.arange(rows.size(1), device=device) for rows in on_device.rows]  # [L] of each width
    packed = {}
    for pe in encodings:
        contexts = [make_context(pe, pos, len(pos), len(pos), kernels=kernels) for pos in positions]
        packed[pe] = PackedContext(on_device, contexts)
    return on_device.pos, packed
