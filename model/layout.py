"""How texts lie in a batch: one in each row, or packed. `lab` and the ranks of a run bring layouts of their own.

From a run to its layers there are three steps. A run has one `Packing`. It makes a `Layout` of the token ids of each
batch. A layout makes, for each encoding, the context that its layers attend with. All contexts have the methods
`attend` and `earlier` of `model.attention.Context`, so the network asks nobody what a batch is.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# `torch.compiler.disable` of torch's own optimizers: it imports the compiler, which takes a second, at the first call
# and not when a module is imported. The public one would slow the start of every program.
from torch._compile import _disable_dynamo as uncompiled

from model.attention import Context, shifts
from model.cache import Cache
from model.position.base import PositionEncoding
from model.position.layer import make_context

IGNORE_INDEX = -100  # a target that is not scored, as in torch's cross_entropy
Contexts = dict[PositionEncoding, Any]  # what attends in the layers of each encoding
Positions = tuple[Tensor, int]  # positions of tokens, int64 [T], ascending; and the length of the text they are from
# The least width, in tokens, that a piece is padded to: many short documents then have one width, and run at once.
SHORTEST = 16


@dataclass(eq=False)
class Layout:
    """Base of the layouts. By itself each row is one text, or the next tokens of the one in the cache."""

    # Where the tokens, those in the cache included, stand in a longer text whose other tokens are left out; and its
    # length.
    positions: Positions | None = None

    def contexts(
        self, encodings: Iterable[PositionEncoding], idx: Tensor, cache: Cache | None
    ) -> tuple[Tensor, Tensor, Contexts]:
        """The token ids of `idx` [B, T] that this process reads; their positions; a context for each encoding.

        The positions are int64 [T], or [B, T] where those of each row differ.

        Each context is made once, before the layers run. So tables, such as the angles of a rotation, are computed once
        rather than in every layer, and are not part of what checkpointing computes again.
        """
        n_new = idx.size(1)
        if self.positions is not None:
            pos, length = self.positions
        else:
            length = n_new if cache is None else cache.length + n_new
            pos = torch.arange(length, device=idx.device)  # of the cached tokens too
        contexts = {pe: make_context(pe, pos, n_new, length, cache) for pe in encodings}
        return idx, pos[-n_new:], contexts

    def scored(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The targets of `targets` [B, T] whose tokens this process reads; and what divides the sum of their losses."""
        return targets, (targets != IGNORE_INDEX).sum()

    def gathered(self, x: Tensor) -> Tensor:
        """Numbers [B, T, ...] of all tokens of each text, of those `x` of the tokens that this process reads."""
        return x


WHOLE = Layout()  # whole texts, from position 0 on


@dataclass(eq=False, kw_only=True)
class Packed(Layout):
    """Documents as documents: in a batch of packed rows, the attention of every layer stays within each document.

    A piece is the part of a document that lies in one packed row. For attention every piece becomes a row of its own,
    so it is read as if it were alone, from position 0 on, and pieces of similar length run together: an encoding that
    asks how long a text is sees the length of the row. The rest of the network works token by token and sees the batch
    as it is packed.
    """

    # One tensor int64 [n, L] for each width L: row by row the tokens of n pieces of up to L tokens, as indices into the
    # flat batch [B T].
    rows: list[Tensor]
    place: Tensor  # int64 [B, T]: where each token stands in all tensors of `rows`, laid end to end
    pos: Tensor  # int64 [B, T]: position of each token within its piece

    @uncompiled
    def contexts(
        self, encodings: Iterable[PositionEncoding], idx: Tensor, cache: Cache | None
    ) -> tuple[Tensor, Tensor, Contexts]:
        """As `Layout.contexts`: the positions are [B, T], within pieces, and each width has one set of tables."""
        assert cache is None  # no text is continued by packed documents
        device = idx.device
        on_device = Packed(
            rows=[tokens.to(device) for tokens in self.rows], place=self.place.to(device), pos=self.pos.to(device)
        )
        # Each piece is a text of its own, so its positions begin at 0, and all rows of a width share one context.
        positions = [torch.arange(rows.size(1), device=device) for rows in on_device.rows]  # [L] of each width
        contexts = {}
        for pe in encodings:
            by_width = [make_context(pe, pos, len(pos), len(pos)) for pos in positions]
            contexts[pe] = PackedContext(on_device, by_width)
        return idx, on_device.pos, contexts


@dataclass(frozen=True, eq=False)
class PackedContext:
    """The context of packed documents: one `Context` for each width of pieces."""

    documents: Packed
    by_width: list[Context]

    @uncompiled  # the shapes change from batch to batch
    def attend(
        self, pe: PositionEncoding, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], *, layer: Hashable,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """As `Context.attend`, of q, k and v [B, T, H or Hkv, D] and `state`, [B, T, ...] each: [B, T, H, D]."""
        out = []
        for rows, ctx in zip(self.documents.rows, self.by_width, strict=True):
            # Of the tokens of the pieces: [n, L, H, D], twice [n, L, Hkv, D], and [n, L, ...] each of the state.
            q_rows, k_rows, v_rows = [_take(x.flatten(0, 1), rows) for x in (q, k, v)]
            state_rows = {name: _take(x.flatten(0, 1), rows) for name, x in state.items()}
            heads = ctx.attend(pe, q_rows, k_rows, v_rows, state_rows, layer=layer, sinks=sinks)  # [n, L, H, D]
            out.append(heads.flatten(0, 1))  # [n L, H, D]
        return _take(torch.cat(out), self.documents.place)  # back in the order of the batch

    def earlier(self, owner: Hashable, x: Tensor, n: int) -> list[Tensor]:
        # As in whole rows, and then zeros where the token before belongs to another document.
        shifted = shifts(F.pad(x, (0, 0, n, 0)), n)
        return [before * (self.documents.pos >= k)[..., None] for k, before in enumerate(shifted)]


def packed(idx: Tensor, end: int | None, exact_above: int | None = None) -> Layout:
    """The layout of token ids `idx` int64 [B, T], on the CPU, in which each document ends in the token `end`.

    Without an `end`, or if no row has tokens of two documents, the rows are whole texts. Pieces are padded to the next
    power of two, or T, by repeating their last token, which no token before it can see.

    Args:
        exact_above: pieces of more tokens than this are not padded, and shorter ones to no more: an encoding asks how
            long these texts are. See `model.position.network.exact_above`.
    """
    if end is None:
        return WHOLE
    total = idx.numel()
    length = idx.size(1)
    # A piece begins at the start of each row and after each end of a document. From here on tokens are counted over the
    # flat batch.
    begins = F.pad(idx[:, :-1] == end, (1, 0), value=True)  # [B, T]
    (first,) = begins.flatten().nonzero(as_tuple=True)  # [pieces], the first token of each
    if len(first) == len(idx):  # one piece in each row
        return WHOLE
    sizes = first.diff(append=torch.tensor([total]))  # [pieces]

    # All pieces of one width are one call of attention, so widths should be few. A power of two at most doubles a piece
    # that is not shorter than SHORTEST.
    longest = min(length, exact_above or length)
    doubled = SHORTEST * 2 ** torch.arange(longest.bit_length())  # to beyond the longest
    all_widths = torch.cat((doubled[doubled < longest], torch.tensor([longest])))  # ascending
    padded = all_widths[torch.searchsorted(all_widths, sizes.clamp(max=longest))]  # the least that holds each piece
    widths = padded.maximum(sizes)
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
    return Packed(rows=rows, place=place.view_as(idx), pos=pos.view_as(idx))


@dataclass(frozen=True)
class Packing:
    """How the texts of a run are packed in its batches: it makes the layout of each batch.

    Args:
        document_end: the token that ends a document, beyond which no attention looks back; None: rows are whole texts.
        shared: the layout of all batches, of ranks that share each text or of documents in place; None: that of each
            batch is made of its tokens.
        ranks_per_text: the number of these ranks.
        exact_above: see `packed`.
    """

    document_end: int | None = None
    shared: Layout | None = None
    ranks_per_text: int = 1
    exact_above: int | None = None

    def __call__(self, idx: Tensor) -> Layout:
        """The layout of a batch of token ids int64 [B, T], best on the CPU."""
        return self.shared or packed(idx, self.document_end, self.exact_above)


def _take(x: Tensor, places: Tensor) -> Tensor:
    """The rows `places` [n, L] of `x` [N, ...], as [n, L, ...].

    The gradient is the same in every run, although its sums have no fixed order on a GPU: a token stands in one piece
    only, and padding has no gradient.
    """
    return x.index_select(0, places.flatten()).unflatten(0, places.shape)
