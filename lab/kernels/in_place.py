"""Packed documents where they are: two numbers of each token say which others it sees."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention import Context, shifts
from model.cache import Cache
from model.layout import Contexts, Layout, packed
from model.position.base import PositionEncoding
from model.position.layer import make_context, temperature_of
from model.position.network import exact_above


def all_read_in_place(encodings: Iterable[PositionEncoding]) -> bool:
    """Whether these encodings are all twins that can read packed documents where they are."""
    return all(getattr(pe, "reads_in_place", False) for pe in encodings)


class InPlace(Layout):
    """The layout of packed documents for encodings that are all twins: see `lab.kernels.twins`.

    `model.layout.Packed` is its specification, and what reads for other encodings. Nothing is looked for on the CPU.

    Args:
        end: the token that ends a document.
    """

    def __init__(self, end: int) -> None:
        super().__init__()
        self.end = end

    def contexts(
        self, encodings: Iterable[PositionEncoding], idx: Tensor, cache: Cache | None
    ) -> tuple[Tensor, Tensor, Contexts]:
        encodings = list(encodings)
        if not all_read_in_place(encodings):
            return packed(idx.cpu(), self.end, exact_above(encodings)).contexts(encodings, idx, cache)
        assert cache is None
        length = idx.size(1)
        begins = F.pad(idx[:, :-1] == self.end, (1, 0), value=True)  # [B, T]
        in_row = torch.arange(length, device=idx.device)
        start = torch.where(begins, in_row, 0).cummax(1).values  # the first token of the document that holds t
        # The last token of that document, from right to left: the token before the next beginning.
        ends = F.pad(begins[:, 1:], (0, 1), value=True)
        last = torch.where(ends, in_row, length - 1).flip(1).cummin(1).values.flip(1)
        pos = in_row - start  # [B, T]
        contexts: Contexts = {}
        for pe in encodings:
            # Attention depends on distances, which are the same in the row as in the document.
            plain = make_context(pe, in_row, length, length)
            reach = (pe.window or length) - 1
            first_seen = start.maximum(in_row - reach).int()
            last_seen = last.minimum(in_row + reach).int()
            fields = vars(plain) | {"temperature": temperature_of(pe, pos[:, None])}
            contexts[pe] = PlacedContext(**fields, pos=pos, first_key=first_seen, last_query=last_seen)
        return idx, pos, contexts


@dataclass(frozen=True, kw_only=True)
class PlacedContext(Context):
    """The context of rows of documents, for twins alone."""

    pos: Tensor  # int64 [B, T]: position of each token within its document
    first_key: Tensor  # int32 [B, T]: the first key of the row that each query sees
    last_query: Tensor  # int32 [B, T]: the last query of the row that sees each key

    def block(self, start: int, stop: int, low: int = 0) -> Context:
        raise ValueError("an encoding without kernels would look across the borders of documents")

    def visible(self) -> Tensor:
        """True where query i may see key j, bool [B, 1, Tq, Tk]; of some of the queries, too."""
        first = self.first_key[:, None, self.pos_q, None]  # positions in the row are its tokens
        return super().visible() & (self.pos_k >= first)

    def earlier(self, owner: Hashable, x: Tensor, n: int) -> list[Tensor]:
        # As in whole rows, and then zeros where the token before belongs to another document.
        shifted = shifts(F.pad(x, (0, 0, n, 0)), n)
        return [before * (self.pos >= k)[..., None] for k, before in enumerate(shifted)]
