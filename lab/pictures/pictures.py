"""Pictures of encodings, each a function that draws on an Axes: turns of a rotation's pairs, scores by distance,
attention of a trained network, what it counts in a text.

For: docs/positions.md, and telling what an encoding does before training it. Shown: in the docs. Leaves: when the docs
have no pictures.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullLocator
from torch import Tensor

from conf.schema import GPTConfig
from data.base import IGNORE_INDEX, Data
from lab.pictures.attention_weights import attended, weights_of
from lab.zoo.path import PaTH
from lab.zoo.profiles import Profiles
from lab.zoo.stick_breaking import StickBreaking
from model import position
from model.attention import for_heads_of
from model.gpt import GPT
from model.position import Context, PositionEncoding, Shape, layer
from model.position.absolute import Learned, Sinusoidal
from model.position.bias import FIRE, T5, Kerple
from model.position.cope import CoPE
from model.position.forget import FoX
from model.position.network import for_length, view
from model.position.ops import sums_to_the_end
from model.position.relative import Relative
from model.position.rotary import Rotary
from ropewalk.api import attend
from ropewalk.report.plot import LIGHT, LINES, dressed, name_ends, titled

SCORE = 4.0  # of equal queries and keys
# Scores of the heads' keys where they decide how positions count.
LEVELS = (2.0, 0.0, -2.0, -4.0)
WORDS = ("the", "cat", "sat", "on", "the")  # a text that a layer is asked what it reads of
LOWEST = -10.0  # end of the axis of scores: a weight of e^-10 of the largest
SIZE = (4.2, 2.7)  # inches
MAX_TOKENS = 48  # tokens of a text that a picture shows
BASE = "RoPE"  # the line beside encodings that change it


def learned(pe: PositionEncoding) -> Mapping[str, Tensor | float]:
    """Return parameters that show what an encoding can learn, where its initial ones are zeros or noise."""
    heads = torch.arange(1.0, pe.n_head + 1)
    # Heads differ: the first one falls slowly with the distance, or fast, the others more or less so.
    if isinstance(pe, CoPE):
        # q.e[p] = -p / 10 for the equal channels of `scores`; a projection of its own starts as it is.
        falling = torch.arange(pe.npos_max) / -10
        return {"table": falling.expand(pe.head_dim, -1) / (_channel(pe) * pe.head_dim)}
    if isinstance(pe, T5):
        bucket = torch.arange(pe.table.size(0))[:, None]
        return {"table": -bucket * 0.5**heads}
    if isinstance(pe, Kerple):
        return {"p": 2 / heads, "a": torch.ones(pe.n_head)}
    if isinstance(pe, FIRE):
        # All units of the hidden layer are the distance itself, and their mean has the slope of the head.
        width = pe.up_bias.numel()
        slopes = (8 / heads)[:, None].expand(-1, width)
        return {"up_weight": 1.0, "up_bias": 0.0, "down_weight": -slopes / width, "down_bias": 0.0}
    if isinstance(pe, Relative):
        falling = -torch.arange(pe.max_distance + 1).log1p().expand_as(pe.distances)
        if not isinstance(pe, Profiles):
            return {"distances": falling / (_channel(pe) * math.sqrt(pe.head_dim))}
        # All profiles are the same one, of which each head takes its share.
        mix = torch.zeros_like(pe.mix)
        mix[:, 0, 0] = 1 / heads
        return {"distances": falling, "mix": mix}
    if isinstance(pe, PaTH):
        return {"strength_bias": -heads}
    if isinstance(pe, FoX):
        return {"gate_bias": 1.5 * heads - 1}
    if isinstance(pe, Learned):
        return {"table": pe.table * _channel(pe) / 0.02}
    return {}


def _channel(pe: PositionEncoding) -> float:
    """The value of every channel of queries and keys whose score is `SCORE`."""
    return math.sqrt(SCORE / math.sqrt(pe.head_dim))


@torch.no_grad()
def built(options: Mapping[str, Any], shape: Shape) -> list[tuple[str, PositionEncoding]]:
    """Return an encoding with `learned` parameters at its largest scale; of a pattern each part, with its layers."""
    pattern = options.get("pattern", [""])
    encodings = position.build_encodings(options, shape._replace(n_layer=len(pattern)))
    parts = []
    for name in dict.fromkeys(pattern):
        pe = encodings[pattern.index(name)]
        layer.init_parameters(pe, torch.Generator().manual_seed(0))
        for parameter, values in learned(pe).items():
            getattr(pe, parameter).copy_(torch.as_tensor(values))
        if pe.window is None:
            pe.active_scale = max(pe.scales)
        n_layer = pattern.count(name)
        label = "1 layer" if n_layer == 1 else f"{n_layer} layers"
        parts.append((label if name else "", pe))
    return parts


@torch.no_grad()
def scores(pe: PositionEncoding, distances: Tensor) -> Tensor:
    """Return ln(weight / largest weight) of equal keys at `distances` int64 [n] before the last query: [H, n].

    Equal channels of queries and keys make a score of `SCORE`. Where the content decides how positions count, the
    heads have those of `LEVELS`. What an encoding makes of the layer's input is made of random inputs.
    """
    length = int(distances.max()) + 1
    dim = pe.n_head * pe.head_dim
    x = torch.randn(1, length, dim, generator=torch.Generator().manual_seed(0))
    x[..., 0] = 1.0

    channel = _channel(pe)
    q = torch.full((1, pe.n_head, length, pe.head_dim), channel)
    k = torch.full((1, pe.n_kv_head, length, pe.head_dim), channel)
    if isinstance(pe, CoPE | StickBreaking):
        # Each head has its level, and so keys of its own.
        levels = torch.tensor(LEVELS).repeat(pe.n_head)[: pe.n_head]
        factors = levels[:, None, None] / SCORE  # [H, 1, 1]
        k = k.expand(-1, pe.n_head, -1, -1) * factors
    if isinstance(pe, Sinusoidal | Learned):
        # Queries and keys are the positions' own vectors.
        embedded = pe.embed(torch.zeros(1, length, dim), torch.arange(length))
        q = k = embedded.unflatten(-1, (pe.n_head, -1)).transpose(1, 2)

    def read(values: Tensor) -> Tensor:
        return attend(pe, q, k, values, x, embedded=True)

    by_key = weights_of(read, torch.zeros_like(k), [length - 1])[0, :, 0]  # [H, length]
    weights = by_key[:, length - 1 - distances]
    return (weights / weights.amax(-1, keepdim=True)).log()


def turns(pe: Rotary, length: int, *, scaled: bool) -> Tensor:
    """Return the turns that each pair of channels makes within `length` tokens, float64 [pairs]."""
    frequencies = pe.frequencies(length) if scaled else Rotary.frequencies(pe, length)
    return frequencies * length / (2 * math.pi)


def new_angles(seen: Tensor, met: Tensor) -> int:
    """Count the pairs that meet angles beyond those of training: they turn less than once there, and further now."""
    return int(((seen < 1) & (met > seen * (1 + 1e-9))).sum())


def draw_turns(name: str, pe: Rotary, length: int, ax: Axes) -> None:
    """Draw the turns by pair in training and in the longer text, before and after scaling."""
    dressed(ax)
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter("{x:g}")
    seen = turns(pe, pe.train_len, scaled=False)
    plain = turns(pe, length, scaled=False)
    scaled = turns(pe, length, scaled=True)
    pairs = range(len(seen))

    ax.plot(pairs, plain, "o", markersize=4.5, markerfacecolor="none", color=LIGHT.muted)
    ax.plot(pairs, seen, "o", markersize=4.5, color=LIGHT.grey)
    note = f"grey: in {pe.train_len:,} tokens, rings: in {length:,}"
    new = f"{new_angles(seen, plain)} meet new angles"
    if not torch.equal(plain, scaled):
        ax.plot(pairs, scaled, "o", markersize=3.5, color=LINES[0])
        note += ", blue: here"
        new += f" as RoPE, {new_angles(seen, scaled)} here"

    lowest = float(seen.min()) / 2
    ax.set_ylim(lowest, float(plain.max()) * 2)
    ax.yaxis.set_minor_locator(NullLocator())
    # Below one turn a pair has not seen all of its angles.
    ax.axhspan(lowest, 1, color=LIGHT.grid, alpha=0.5, zorder=0)
    whole = int((seen >= 1).sum())
    titled(ax, f"{name}: turns by pair of channels", f"{note}; {whole} of {len(seen)} turn in training, {new}")


def draw_scores(name: str, parts: Sequence[tuple[str, PositionEncoding]], shape: Shape, length: int, ax: Axes) -> None:
    """Draw the scores by distance: a line for each head, or for each part of a pattern; RoPE in grey.

    Heads that are equal are one line, and RoPE is added to other rotations.

    Args:
        name: of the encoding, or of the pattern.
        parts: what `built` returned for it.
        shape: sizes of the layer that they are built for.
        length: tokens; the longest distance is one less.
    """
    dressed(ax)

    # Every distance where scores change fast, and about 128 of the others.
    near = torch.arange(min(64, length))
    far = torch.arange(len(near), length, max(1, length // 128))
    distances = torch.cat((near, far))

    first = parts[0][1]
    if isinstance(first, Rotary) and name != "rope":
        parts = [(BASE, Rotary(shape, layout=first.layout)), *parts]

    colours = iter(LINES)
    names = []
    for label, pe in parts:
        by_head = scores(pe, distances)
        others = [head for head in range(1, pe.n_head) if not torch.allclose(by_head[0], by_head[head], atol=1e-3)]
        for head in [0, *others]:
            head_label = f"head {head + 1}"
            if not others:
                head_label = name
            elif isinstance(pe, CoPE | StickBreaking):
                head_label = f"q·k = {LEVELS[head % 4]:g}"

            colour = LIGHT.grey if label == BASE else next(colours)
            # What is lower weighs nothing, and leaves the axis.
            y = by_head[head].clamp(min=1.1 * LOWEST)
            width = 1.2 if label == BASE else 1.6
            ax.plot(distances, y, color=colour, linewidth=width)
            names.append((label or head_label, length - 1, max(float(y[-1]), LOWEST), colour))

    ax.axvline(shape.train_len, color=LIGHT.muted, linewidth=0.8, linestyle=(0, (1, 2)))
    ax.set_ylim(LOWEST, 0.3)
    ax.set_xlim(0, length)
    ax.set_xlabel("distance in tokens; dotted: the training length")
    titled(ax, name, "ln of a key's weight against the largest")
    name_ends(ax, names)


def attention_of(net: GPT, ids: Tensor) -> tuple[list[str], Tensor]:
    """Return what the layers attend to in a text `ids` int64 [T], `by_distance`: at most 64 queries of its second half.

    Raises ValueError: the weights of an encoding cannot be told, see `attended`.
    """
    tokens = len(ids)
    half = tokens // 2
    queries = range(half, tokens, math.ceil((tokens - half) / 64))
    layers = attended(net, ids[None], queries, encodings=for_length(net.encodings, tokens))
    return by_distance(torch.cat(layers), queries)


def by_distance(weights: Tensor, queries: Sequence[int]) -> tuple[list[str], Tensor]:
    """Split the attention [layers, H, queries, T] of queries at some positions over the first token and distances.

    Returns:
        Names of n ranges, and the mean share of each, [layers, n]; those of a layer sum to what its keys get in all.
    """
    by_query = weights.mean(1)  # [layers, queries, T]
    pos = torch.arange(weights.size(-1))
    distance = torch.tensor(queries)[:, None] - pos  # [queries, T]
    ranges = {"first": pos.expand_as(distance) == 0, "self": distance == 0}
    for doubling in range((len(pos) - 1).bit_length()):
        low = 2**doubling
        ranges[f"{low}"] = (distance >= low) & (distance < 2 * low) & (pos > 0)
    shares = [(by_query * inside).sum(-1).mean(-1) for inside in ranges.values()]  # [layers] each
    return list(ranges), torch.stack(shares, dim=-1)


def draw_attention(title: str, ranges: Sequence[str], shares: Tensor, ax: Axes) -> None:
    """Draw in percent what `attention_of` returned: a row for each layer."""
    rows = {f"layer {number}": of_layer for number, of_layer in enumerate(shares, start=1)}
    heat_map(ax, rows, ranges)
    titled(ax, title, "% of attention: first token, self, from a distance of at least")


def heat_map(ax: Axes, rows: Mapping[str, Tensor], columns: Sequence[str]) -> None:
    """Draw shares in percent, a row of them for each name."""
    shares_on(ax, rows)
    for number, shares in enumerate(rows.values()):
        for column, share in enumerate(shares.tolist()):
            words = f"{100 * share:.0f}"
            ax.text(column + 0.5, number + 0.5, words, ha="center", va="center", color=LIGHT.ink, fontsize=9)
    ax.set_xticks(np.arange(len(columns)) + 0.5, columns)


def shares_on(ax: Axes, rows: Mapping[str, Tensor]) -> None:
    """Draw shares as more or less of a colour, a row of them for each name."""
    dressed(ax)
    for number, shares in enumerate(rows.values()):
        for column, share in enumerate(shares.tolist()):
            # A share is how much of one colour there is.
            look = {"facecolor": LINES[0], "alpha": min(1.0, 0.75 * share), "linewidth": 0}
            ax.add_patch(Rectangle((column + 0.02, number + 0.02), 0.96, 0.96, **look))
    ax.set_xlim(0, len(next(iter(rows.values()))))
    ax.set_ylim(len(rows), 0)
    ax.set_yticks(np.arange(len(rows)) + 0.5, rows)
    ax.grid(visible=False)


def question(data: Data, length: int) -> Tensor:
    """A text of at most `length` tokens, int64 [T], that ends where an answer is asked for; of text anywhere."""
    part = data.eval_sets([length], target_tokens=1, sequences=16)[-1]
    x, y = part.batch(0, part.n)
    text = (x != x.mode(1, keepdim=True).values).sum(1).argmax()  # the one with the fewest fillers
    return x[text, : int((y[text] != IGNORE_INDEX).nonzero().max()) + 1]


@torch.no_grad()
def counted(net: GPT, ids: Tensor) -> list[tuple[int, str, Tensor]]:
    """Return what the layers with CoPE or FoX make of the text `ids` int64 [T] for its last query.

    Returns:
        The number of the layer, from 1 on, and "gates", the gate of each key, [H, T], whose sums are positions; or
        "left", the share of each key's weight that the forget gates between it and the query have left, [H, T].
    """
    found: list[tuple[int, str, Tensor]] = []

    def record_gates(number: int, gate_q: Tensor, gate_keys: Tensor, ctx: Context) -> float:
        logits = gate_q[0, :, -1:] @ for_heads_of(gate_q, gate_keys)[0].mT * ctx.scale  # [H, 1, T]
        found.append((number, "gates", logits[:, 0].sigmoid()))
        return 0.0  # as if nothing was clamped

    def record_sums(number: int, sums: Callable[..., Tensor], state: dict[str, Tensor]) -> Tensor:
        by_token = sums(state)  # [1, T, H]
        found.append((number, "left", (by_token[0, -1:] - by_token[0]).exp().mT))
        return by_token

    encodings = list(net.encodings)
    for number, pe in enumerate(net.encodings, start=1):
        if isinstance(pe, CoPE):
            encodings[number - 1] = view(pe, _clamped_share=partial(record_gates, number))
        elif isinstance(pe, FoX):
            encodings[number - 1] = view(pe, log_gate_sums=partial(record_sums, number, pe.log_gate_sums))
    net.hidden_states(ids[None], encodings=encodings)
    return found


def draw_counted(title: str, kind: str, shares: Tensor, words: Sequence[str], ax: Axes) -> None:
    """Draw what `counted` returned for a layer: a row for each head, a column for each of the last MAX_TOKENS words."""
    words = words[-MAX_TOKENS:]
    ax.get_figure(root=True).set_size_inches(0.17 * len(words) + 1.4, 0.2 * len(shares) + 1.5)  # type: ignore[union-attr]
    shares_on(ax, {f"head {number}": of_head[-MAX_TOKENS:] for number, of_head in enumerate(shares, start=1)})
    ax.set_xticks([column + 0.5 for column in range(len(words))], words, rotation=90)
    note = "filled: how much of a key is left, as the last token sees it"
    if kind == "gates":
        note = "filled: gates of the last token, which are counted; numbers: the position of each key, rounded"
        positions = sums_to_the_end(shares)[:, -MAX_TOKENS:].round().int()
        for (head, column), position in np.ndenumerate(positions.numpy()):
            ax.text(column + 0.5, head + 0.5, position, ha="center", va="center", color=LIGHT.ink, fontsize=7)
    titled(ax, title, note)


@torch.no_grad()
def lookups(options: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what the last of `WORDS` reads in one layer that looks for keys like itself, with options of the network.

    Args:
        options: of the encoding, which should know no positions.

    Returns:
        By option the attention of the last word on all of them, [T].
    """
    options_of_network: dict[str, dict[str, Any]] = {
        "neither": {},
        "key_offset=true": {"key_offset": True},
        "conv=4": {"conv": 4},
    }
    words = sorted(set(WORDS))
    n_words = len(words)
    ids = torch.tensor([words.index(word) for word in WORDS])
    dim = 2 * n_words
    by_option = {}
    for name, fields in options_of_network.items():
        config = GPTConfig(n_layer=1, n_head=1, dim=dim, norm="rmsnorm", **fields)
        net = GPT(config, options, vocab_size=n_words, train_len=len(WORDS))
        attn: Any = net.blocks[0].attn
        # Each half of a word's channels is its one-hot vector, and its query, key and value are the word itself.
        net.embedding.weight.copy_(torch.eye(n_words).repeat(1, 2))
        attn.qkv.weight.copy_(torch.eye(dim).repeat(3, 1))  # [3 dim, dim]
        # The norm makes the square of a word `dim`: a match scores 2 `SCORE`, that of half the channels `SCORE`.
        attn.qkv.weight[:dim] *= 2 * SCORE / math.sqrt(dim)
        if attn.mix.conv is not None:
            # What taps [3 dim, 4] can learn: a key is that of the word before, and queries and values stay.
            attn.mix.conv.zero_()
            attn.mix.conv[dim : 2 * dim, :2] = torch.tensor([-1.0, 1.0])
        (weights,) = attended(net, ids[None], [len(WORDS) - 1])
        by_option[name] = weights[0, 0, 0]
    return by_option


def draw_lookups(options: Mapping[str, Any], ax: Axes) -> None:
    """Draw `lookups` in percent: a row for each option, a column for each word."""
    heat_map(ax, lookups(options), WORDS)
    titled(ax, "Keys that know the token before", f'% of what the last "{WORDS[-1]}" reads of each word')
