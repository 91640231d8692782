"""What content decides in a text: the gates that CoPE counts, and what FoX has not forgotten.

For: seeing what a trained run counts. Shown: by `scripts/draw.py run=...`. Leaves: when CoPE and FoX do.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from data.base import IGNORE_INDEX, Data
from lab.pictures.pictures import shares_on
from model.attention import for_heads_of
from model.gpt import GPT
from model.position import Context
from model.position.cope import CoPE
from model.position.forget import FoX
from model.position.network import view
from model.position.ops import sums_to_the_end
from ropewalk.report.plot import LIGHT, titled

MOST = 48  # tokens that a picture shows


def question(data: Data, length: int) -> Tensor:
    """A text of at most `length` tokens, int64 [T], that ends where an answer is asked for; of text anywhere."""
    part = data.eval_sets([length], target_tokens=1, sequences=16)[-1]
    x, y = part.batch(0, part.n)
    text = (x != x.mode(1, keepdim=True).values).sum(1).argmax()  # the one with the fewest fillers
    return x[text, : int((y[text] != IGNORE_INDEX).nonzero().max()) + 1]


@torch.no_grad()
def of_text(net: GPT, ids: Tensor) -> list[tuple[int, str, Tensor]]:
    """Return what the layers with CoPE or FoX make of the text `ids` int64 [T] for its last query.

    Returns:
        The number of the layer, from 1 on, and "gates", the gate of each key, [H, T], whose sums are positions; or
        "left", the share of each key's weight that the forget gates between it and the query have left, [H, T].
    """
    found: list[tuple[int, str, Tensor]] = []

    def record_gates(layer: int, gate_q: Tensor, gate_keys: Tensor, ctx: Context) -> float:
        logits = gate_q[0, :, -1:] @ for_heads_of(gate_q, gate_keys)[0].mT * ctx.scale  # [H, 1, T]
        found.append((layer, "gates", logits[:, 0].sigmoid()))
        return 0.0  # as if nothing was clamped

    def record_sums(layer: int, sums: Callable[..., Tensor], state: dict[str, Tensor]) -> Tensor:
        by_token = sums(state)  # [1, T, H]
        found.append((layer, "left", (by_token[0, -1:] - by_token[0]).exp().mT))
        return by_token

    encodings = list(net.encodings)
    for layer, pe in enumerate(net.encodings, start=1):
        if isinstance(pe, CoPE):
            encodings[layer - 1] = view(pe, _clamped_share=partial(record_gates, layer))
        elif isinstance(pe, FoX):
            encodings[layer - 1] = view(pe, log_gate_sums=partial(record_sums, layer, pe.log_gate_sums))
    net.hidden_states(ids[None], encodings=encodings)
    return found


def draw(title: str, kind: str, shares: Tensor, words: Sequence[str], ax: Axes) -> None:
    """Draw what `of_text` returned for a layer: a row for each head, a column for each of the last `MOST` words."""
    words = words[-MOST:]
    ax.get_figure(root=True).set_size_inches(0.17 * len(words) + 1.4, 0.2 * len(shares) + 1.5)  # type: ignore[union-attr]
    shares_on(ax, {f"head {number}": of_head[-MOST:] for number, of_head in enumerate(shares, start=1)})
    ax.set_xticks([column + 0.5 for column in range(len(words))], words, rotation=90)
    note = "filled: how much of a key is left, as the last token sees it"
    if kind == "gates":
        note = "filled: gates of the last token, which are counted; numbers: the position of each key, rounded"
        positions = sums_to_the_end(shares)[:, -MOST:].round().int()
        for (head, column), position in np.ndenumerate(positions.numpy()):
            ax.text(column + 0.5, head + 0.5, position, ha="center", va="center", color=LIGHT.ink, fontsize=6)
    titled(ax, title, note)
