"""Pictures of encodings as SVG: turns of a rotation's pairs, scores by distance, attention of a trained network."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import torch
from torch import Tensor

from conf.schema import GPTConfig
from lab.pictures.attention_weights import Attended, attended, weights_of
from lab.pictures.svg import element, text
from lab.zoo.path import PaTH
from lab.zoo.profiles import Profiles
from lab.zoo.stick_breaking import StickBreaking
from model import position
from model.gpt import GPT
from model.position import PositionEncoding, Shape, layer
from model.position.absolute import Learned, Sinusoidal
from model.position.bias import FIRE, T5, Kerple
from model.position.cope import CoPE
from model.position.forget import FoX
from model.position.network import for_length
from model.position.relative import Relative
from model.position.rotary import Rotary

SCORE = 4.0  # of equal queries and keys
# Scores of the heads' keys where they decide how positions count.
LEVELS = (2.0, 0.0, -2.0, -4.0)
WORDS = ("the", "cat", "sat", "on", "the")  # a text that a layer is asked what it reads of
LOWEST = -10.0  # end of the axis of scores: a weight of e^-10 of the largest
STYLE = """<style>
.pe text{font:11px system-ui,sans-serif;fill:#1b2026}.pe .b{font-weight:700;font-size:13px}.pe .card{fill:#fff}
.pe .m{fill:#5f6975}.pe path,.pe .grid{fill:none;stroke:#dfe3e8}.pe .shade{fill:#f1f3f6}.pe path{stroke-width:1.6}
.pe .c0{stroke:#0563f2}.pe .c1{stroke:#c2410c}.pe .c2{stroke:#0f766e}.pe .c3{stroke:#a21caf}.pe .base{stroke:#9aa3ae}
.pe .d0{fill:#0563f2}.pe .d1{fill:#9aa3ae}.pe .d2{fill:none;stroke:#9aa3ae}.pe .heat{fill:#0563f2}
@media(prefers-color-scheme:dark){.pe text{fill:#e4e7eb}.pe .card{fill:#14171c}.pe .m{fill:#9ca6b2}
.pe path,.pe .grid{stroke:#323843}.pe .shade{fill:#1f242c}.pe .c0{stroke:#629fff}.pe .c1{stroke:#ff9a5c}
.pe .c2{stroke:#4fd1c0}.pe .c3{stroke:#f4b4ff}.pe .base{stroke:#6b7480}.pe .d0{fill:#629fff}.pe .d1{fill:#6b7480}
.pe .d2{stroke:#6b7480}}
</style>"""


class Line(NamedTuple):
    label: str
    look: str  # CSS class
    y: Tensor  # [n]


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


def built(options: Mapping[str, Any], shape: Shape) -> list[tuple[str, PositionEncoding]]:
    """Return an encoding with `learned` parameters at its largest scale; of a pattern each part, with its layers."""
    pattern = options.get("pattern", [""])
    encodings = position.build_encodings(options, shape._replace(n_layer=len(pattern)))
    parts = {}
    for name, pe in zip(pattern, encodings, strict=True):
        if name in parts:
            continue
        layer.init_parameters(pe, torch.Generator().manual_seed(0))
        with torch.no_grad():
            for parameter, values in learned(pe).items():
                getattr(pe, parameter).copy_(torch.as_tensor(values))
        if pe.window is None:
            pe.active_scale = max(pe.scales)
        label = ""
        if name:
            n_layer = pattern.count(name)
            label = "1 layer" if n_layer == 1 else f"{n_layer} layers"
        parts[name] = (label, pe)
    return list(parts.values())


@torch.no_grad()
def scores(pe: PositionEncoding, distances: Tensor) -> Tensor:
    """Return ln(weight / largest weight) of equal keys at `distances` int64 [n] before the last query: [H, n].

    Equal channels of queries and keys make a score of `SCORE`. Where the content decides how positions count, the
    heads have those of `LEVELS`. What an encoding makes of the layer's input is made of random inputs.
    """
    length = int(distances.max()) + 1
    pos = torch.arange(length)
    dim = pe.n_head * pe.head_dim
    x = torch.randn(1, length, dim, generator=torch.Generator().manual_seed(0))
    x[..., 0] = 1.0
    channel = _channel(pe)
    q = torch.full((1, pe.n_head, 1, pe.head_dim), channel)
    k = torch.full((1, pe.n_kv_head, length, pe.head_dim), channel)
    if isinstance(pe, CoPE | StickBreaking):
        # Each head has its level, and so keys of its own.
        levels = torch.tensor(LEVELS).repeat(pe.n_head)[: pe.n_head]
        factors = levels[:, None, None] / SCORE  # [H, 1, 1]
        k = k.expand(-1, pe.n_head, -1, -1) * factors
    if isinstance(pe, Sinusoidal | Learned):
        # Queries and keys are the positions' own vectors.
        k = pe.embed(torch.zeros(1, length, dim), pos).unflatten(-1, (pe.n_head, -1)).transpose(1, 2)
        q = k[:, :, -1:]

    ctx = layer.make_context(pe, pos, 1, length)
    state = pe.state(x)

    def attend(values: Tensor) -> Tensor:
        return layer.attend(pe, q, k, values, state, ctx)

    by_key = weights_of(attend, torch.zeros_like(k), [0])[0, :, 0]  # [H, length]
    weights = by_key[:, length - 1 - distances]
    return (weights / weights.amax(-1, keepdim=True)).log()


def turns(pe: Rotary, length: int, *, scaled: bool) -> Tensor:
    """Return the turns that each pair of channels makes within `length` tokens, float64 [pairs]."""
    frequencies = pe.frequencies(length) if scaled else Rotary.frequencies(pe, length)
    return frequencies * length / (2 * math.pi)


def new_angles(seen: Tensor, met: Tensor) -> int:
    """Count the pairs that meet angles beyond those of training: they turn less than once there, and further now."""
    return int(((seen < 1) & (met > seen * (1 + 1e-9))).sum())


def draw_turns(name: str, pe: Rotary, length: int) -> str:
    """Draw the turns by pair in training and in the longer text, before and after scaling, as an SVG."""
    seen = turns(pe, pe.train_len, scaled=False)
    plain = turns(pe, length, scaled=False)
    scaled = turns(pe, length, scaled=True)
    is_scaled = not torch.equal(plain, scaled)

    pairs = len(seen)
    # The axis of turns is logarithmic, with some room at both ends.
    low = math.log10(float(seen.min())) - 0.3
    high = math.log10(float(plain.max())) + 0.3

    def height(turns: float) -> float:
        log = math.log10(max(turns, 10**low))
        share = (log - low) / (high - low)
        return 172 - 120 * share

    # The range below one turn is shaded, and each power of ten has a tick.
    one = height(1.0)
    body = [element("rect", look="shade", x=46, y=one, width=296, height=172 - one)]
    for power in range(math.ceil(low), math.floor(high) + 1):
        tick = 10.0**power
        body.append(text(40, height(tick) + 4, f"{tick:g}", "m", "end"))

    # A point for each pair: in training, in the longer text, and there after scaling.
    series = {"d2": plain, "d1": seen}
    if is_scaled:
        series["d0"] = scaled
    radius = min(3.0, 96 / pairs)
    pitch = 296 / pairs
    for look, of_pairs in series.items():
        for pair, value in enumerate(of_pairs.tolist()):
            x = 46 + pitch * (pair + 0.5)
            body.append(element("circle", look=look, cx=x, cy=height(value), r=radius))
    # The words: how many pairs training has seen a whole turn of, and how many meet new angles.
    whole = int((seen >= 1).sum())
    legend = f"turns by pair: ● in {pe.train_len:,} tokens, ○ in {length:,}"
    new = f"pairs with new angles in {length:,}: {new_angles(seen, plain)}"
    if is_scaled:
        legend += ", blue: here"
        new += f" as RoPE, {new_angles(seen, scaled)} here"
    body += [
        text(14, 40, f"{whole} of {pairs} pairs turn within {pe.train_len:,} tokens"),
        text(50, 168, "less than a full turn", "m"),
        text(46, 188, legend, "m"),
        text(46, 204, new),
    ]
    return svg(name, body, 214)


def _score_lines(name: str, parts: Sequence[tuple[str, PositionEncoding]], distances: Tensor) -> list[Line]:
    """Return the lines of `draw_scores`: heads that are equal are one, and RoPE is added to other rotations."""
    lines: list[Line] = []
    first = parts[0][1]
    if isinstance(first, Rotary) and name != "rope":
        dim = first.n_head * first.head_dim
        shape = Shape(dim, first.n_head, first.n_kv_head, first.head_dim, first.train_len, n_layer=1)
        rope = Rotary(shape, layout=first.layout)
        lines.append(Line("RoPE", "base", scores(rope, distances)[0]))
    n_coloured = 0
    for label, pe in parts:
        by_head = scores(pe, distances)
        distinct = {0: by_head[0]}
        for head, y in enumerate(by_head):
            if not torch.allclose(by_head[0], y, atol=1e-3):
                distinct[head] = y
        for head, y in distinct.items():
            head_label = f"head {head + 1}"
            if isinstance(pe, CoPE | StickBreaking):
                head_label = f"q·k = {LEVELS[head % 4]:g}"
            if len(distinct) == 1:
                head_label = name
            lines.append(Line(label or head_label, f"c{n_coloured % 4}", y))
            n_coloured += 1
    return lines


def draw_scores(name: str, parts: Sequence[tuple[str, PositionEncoding]], length: int) -> str:
    """Draw the scores by distance as an SVG: a line for each head, or for each part of a pattern; RoPE in grey."""
    # Every distance where scores change fast, and about 256 of the others.
    near = torch.arange(min(64, length))
    far = torch.arange(len(near), length, max(1, length // 256))
    distances = torch.cat((near, far))
    lines = _score_lines(name, parts, distances)

    # The axis of scores, and where training ended on that of distances.
    body = [text(14, 40, "score against that of the best key", "m")]
    for score in (0, -5, -10):
        y = _height(score)
        body.append(element("path", look="grid", d=f"M36 {y:.1f}H342"))
        body.append(text(30, y + 4, f"{score}", "m", "end"))
    edge = 36 + 306 * parts[0][1].train_len / length
    body.append(element("path", look="grid", stroke_dasharray=3, d=f"M{edge:.1f} 48V172"))
    body.append(text(edge + 4, 168, "trained", "m"))

    columns = (36 + 306 * distances / length).tolist()
    for line in lines:
        # A line ends with the first point below the axis.
        visible = (line.y > LOWEST).nonzero()
        stop = int(visible.max()) + 2 if len(visible) else 1
        points = [(x, _height(score)) for x, score in zip(columns, line.y.tolist(), strict=True)]
        path = " ".join(f"{x:.1f} {y:.1f}" for x, y in _thinned(points[:stop]))
        body.append(element("path", look=line.look, d=f"M{path}"))

    # The key below: a stroke and a name for each line.
    wide = sum(26 + 6 * len(line.label) for line in lines)
    key_x = 36 if wide <= 306 else 14  # a long key begins at the card's margin, or its end would be cut off
    for line in lines:
        body.append(element("path", look=line.look, d=f"M{key_x} 200h12"))
        body.append(text(key_x + 16, 204, line.label))
        key_x += 26 + 6 * len(line.label)
    body.append(text(342, 186, f"distance in tokens, to {length:,}", "m", "end"))
    return svg(name, body, 214)


def _height(score: float) -> float:
    """Return the y of a score, which ends at the ends of the axis."""
    return 52 + 120 * min(1.0, max(0.0, score / LOWEST))


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Leave out points that lie on the line between the neighbours that are kept."""
    kept = points[:1]
    for before, (x, y), after in zip(points, points[1:], points[2:], strict=False):
        start_x, start_y = kept[-1]
        slope = (after[1] - start_y) / (after[0] - start_x)
        straight = start_y + slope * (x - start_x)
        is_jump = abs(before[1] - y) > 20
        if is_jump or abs(straight - y) > 0.05:
            kept.append((x, y))
    return kept + points[-1:]


def attention_of(net: GPT, ids: Tensor) -> list[Attended]:
    """Return what each layer attends to in a text `ids` int64 [T], for at most 64 queries of its second half.

    Raises ValueError: the weights of an encoding cannot be told, see `attended`.
    """
    tokens = len(ids)
    half = tokens // 2
    queries = range(half, tokens, math.ceil((tokens - half) / 64))
    return attended(net, ids[None], queries, encodings=for_length(net.encodings, tokens, net.train_len))


def gates_of(of_layer: Attended) -> Tensor | None:
    """Return what the gates of a layer say of each token, [H, T]; None for a layer without gates.

    Those of FoX say what share is forgotten at it, and those of CoPE how much of it the last token counts.
    """
    if "log_gates" in of_layer.state:
        return 1 - of_layer.state["log_gates"][0].exp().T
    if not isinstance(of_layer.pe, CoPE):
        return None
    q, k = of_layer.pe.rotate(of_layer.q, of_layer.k, of_layer.ctx)
    k = k.repeat_interleave(q.size(1) // k.size(1), dim=1)
    logits = q[:, :, -1:] @ k.mT * of_layer.ctx.scale  # [1, H, 1, T]
    return logits[0, :, 0].sigmoid()


def by_distance(weights: Tensor, queries: Sequence[int]) -> tuple[list[str], Tensor]:
    """Split the attention [H, queries, T] of queries at some positions over the first token and ranges of distances.

    Returns:
        Names of the ranges, and the mean share of each; they sum to what the keys get in all.
    """
    by_query = weights.mean(0)  # [queries, T]
    pos = torch.arange(weights.size(-1))
    distance = torch.tensor(queries)[:, None] - pos  # [queries, T]
    ranges = {"first": pos.expand_as(distance) == 0, "self": distance == 0}
    low = 1
    while low < len(pos):
        ranges[f"{low}"] = (distance >= low) & (distance < 2 * low) & (pos > 0)
        low *= 2
    shares = [(by_query * inside).sum(-1).mean() for inside in ranges.values()]
    return list(ranges), torch.stack(shares)


def draw_attention(title: str, layers: Sequence[Attended]) -> str:
    """Draw the share of attention in percent by layer and distance as an SVG."""
    body = []
    for number, of_layer in enumerate(layers):
        names, shares = by_distance(of_layer.weights[0], of_layer.queries)
        width = 300 / len(names)
        y = 58 + 20 * number
        body.append(text(36, y + 14, f"{number + 1}", "m", "end"))
        x = 42.0
        for name, share in zip(names, shares.tolist(), strict=True):
            opacity = f"{0.75 * min(1, share):.2f}"
            body.append(element("rect", look="heat", x=x, y=y, width=width - 1, height=19, fill_opacity=opacity))
            body.append(text(x + width / 2, y + 14, f"{100 * share:.0f}", anchor="middle"))
            if number == 0:
                body.append(text(x + width / 2, 52, name, "m", "middle"))
            x += width

    bottom = 58 + 20 * len(layers)
    body.append(text(14, bottom + 16, "% of attention by layer: first token, self, from a distance", "m"))
    return svg(title, body, bottom + 26)


def lookups(options: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what the last of `WORDS` reads in one layer that looks for keys like itself, with options of the network.

    Args:
        options: of the encoding, which should know no positions.

    Returns:
        By option the attention of the last word on all of them, [T].
    """
    words = sorted(set(WORDS))
    n_words = len(words)
    ids = torch.tensor([words.index(word) for word in WORDS])
    options_of_network: dict[str, dict[str, Any]] = {
        "neither": {},
        "key_offset=true": {"key_offset": True},
        "conv=4": {"conv": 4},
    }
    by_option = {}
    dim = 2 * n_words
    for name, fields in options_of_network.items():
        config = GPTConfig(n_layer=1, n_head=1, dim=dim, norm="rmsnorm", **fields)
        net = GPT(config, options, vocab_size=n_words, train_len=len(WORDS))
        parameters = dict(net.named_parameters())
        with torch.no_grad():
            # Each half of a word's channels is its one-hot vector, and its query, key and value are the word itself.
            net.embedding.weight.copy_(torch.eye(n_words).repeat(1, 2))
            projections = parameters["blocks.0.attn.qkv.weight"]  # [3 dim, dim]
            projections.copy_(torch.eye(dim).repeat(3, 1))
            # The norm makes the square of a word `dim`: a match scores 2 `SCORE`, that of half the channels `SCORE`.
            projections[:dim] *= 2 * SCORE / math.sqrt(dim)
            if name == "conv=4":
                # What taps can learn: a key is that of the word before, and queries and values stay.
                taps = parameters["blocks.0.attn.qkv_conv.weight"]  # [3 dim, 4]
                taps.zero_()
                taps[dim : 2 * dim, :2] = torch.tensor([-1.0, 1.0])
        (of_layer,) = attended(net, ids[None], [len(WORDS) - 1])
        by_option[name] = of_layer.weights[0, 0, 0]
    return by_option


def draw_lookups(options: Mapping[str, Any]) -> str:
    """Draw `lookups` in percent as an SVG: a row for each option, a column for each word."""
    rows = lookups(options)
    width = 234 / len(WORDS)
    body = []
    for number, (name, weights) in enumerate(rows.items()):
        y = 58 + 24 * number
        body.append(text(14, y + 16, name))
        for column, weight in enumerate(weights.tolist()):
            x = 110 + width * column
            opacity = f"{0.75 * weight:.2f}"
            body.append(element("rect", look="heat", x=x, y=y, width=width - 1, height=23, fill_opacity=opacity))
            body.append(text(x + width / 2, y + 16, f"{100 * weight:.0f}", anchor="middle"))
            if number == 0:
                body.append(text(x + width / 2, 52, WORDS[column], "m", "middle"))
    body.append(text(14, 146, f'% of the attention of the last "{WORDS[-1]}", looking for itself', "m"))
    return svg("keys that know the token before", body, 156)


def coloured(pieces: Sequence[str], strengths: Tensor) -> str:
    """Return a text as HTML, each piece coloured by its strength in 0..1, [n]."""
    spans = []
    for piece, strength in zip(pieces, strengths.tolist(), strict=True):
        spans.append(f'<span style="background:rgb(5 99 242/{60 * strength:.0f}%)">{escape(piece)}</span>')
    return f"<pre>{''.join(spans)}</pre>"


def svg(title: str, body: Sequence[str], height: int) -> str:
    """Return a picture of its own, 360 wide, on a card that follows the reader's light or dark theme."""
    head = [element("title", escape(title)), STYLE, element("rect", look="card", width=360, height=height, rx=6)]
    lines = "\n".join([*head, text(14, 24, title, "b"), *body])
    space = "http://www.w3.org/2000/svg"
    return element("svg", f"\n{lines}\n", xmlns=space, look="pe", viewBox=f"0 0 360 {height}", role="img") + "\n"
