"""Pictures of encodings as SVG: turns of a rotation's pairs, scores by distance, attention of a trained network."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import torch
from torch import Tensor

from model import position
from model.gpt import GPT
from model.position import Context, PositionEncoding, Shape, layer
from model.position.absolute import Learned, Sinusoidal
from model.position.bias import FIRE, T5, Kerple
from model.position.cope import CoPE
from model.position.forget import FoX, StickBreaking
from model.position.path import PaTH
from model.position.relative import Profiles, Relative
from model.position.rotary import Rotary

SCORE = 4.0  # of equal queries and keys
# Scores of the heads' keys where they decide how positions count.
LEVELS = (2.0, 0.0, -2.0, -4.0)
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
    if isinstance(pe, CoPE):
        # q.e[p] = -p / 10 for the equal channels of `scores`; a projection of its own starts as it is.
        falling = torch.arange(pe.npos_max) / -10
        return {"table": falling.expand(pe.head_dim, -1) / (_channel(pe) * pe.head_dim)}
    if isinstance(pe, T5):
        return {"table": -torch.arange(pe.table.size(0))[:, None] * 0.5**heads}
    if isinstance(pe, Kerple):
        return {"p": 2 / heads, "a": torch.ones(pe.n_head)}
    if isinstance(pe, FIRE):
        slopes = (8 / heads)[:, None].expand(-1, pe.up_bias.numel())
        return {"up_weight": 1.0, "up_bias": 0.0, "down_weight": -slopes / pe.up_bias.numel(), "down_bias": 0.0}
    if isinstance(pe, Profiles):
        mix = torch.zeros_like(pe.mix)
        mix[:, 0, 0] = 1 / heads
        return {"distances": -torch.arange(pe.max_distance + 1).log1p().expand_as(pe.distances), "mix": mix}
    if isinstance(pe, Relative):
        falling = -torch.arange(pe.max_distance + 1).log1p()
        return {"distances": falling.expand_as(pe.distances) / (_channel(pe) * math.sqrt(pe.head_dim))}
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
        label = f"{pattern.count(name)} {'layer' if pattern.count(name) == 1 else 'layers'}" if name else ""
        parts[name] = (label, pe)
    return list(parts.values())


def read_off(attend: Callable[[Tensor], Tensor], keys: int, which: Tensor, width: int) -> Tensor:
    """Return the weights [B, H, Tq, n] that attention gives to the keys `which` int64 [n].

    Args:
        attend: values [keys, width] -> outputs [B, H, Tq, width].
    """
    # Where the value of key n is the n-th unit vector, the output is the weights. Values are as wide as a head.
    units = torch.zeros(keys, len(which))
    units[which, torch.arange(len(which))] = 1.0
    weights = []
    for part in units.split(width, dim=1):
        out = attend(torch.nn.functional.pad(part, (0, width - part.size(1))))
        weights.append(out[..., : part.size(1)])
    return torch.cat(weights, dim=-1)


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
    k = torch.full((1, pe.n_kv_head, length, pe.head_dim), _channel(pe))
    q = torch.full((1, pe.n_head, 1, pe.head_dim), _channel(pe))
    if isinstance(pe, CoPE | StickBreaking):
        levels = torch.tensor(LEVELS).repeat(pe.n_head)[: pe.n_head] / SCORE
        k = k.expand(-1, pe.n_head, -1, -1) * levels[:, None, None]
    if isinstance(pe, Sinusoidal | Learned):
        # Queries and keys are the positions' own vectors.
        k = pe.embed(torch.zeros(1, length, dim), pos).unflatten(-1, (pe.n_head, -1)).transpose(1, 2)
        q = k[:, :, -1:]
    ctx = layer.make_context(pe, pos, 1, length)
    state = pe.state(x)

    def attend(values: Tensor) -> Tensor:
        return layer.attend(pe, q, k, values.expand(*k.shape[:2], -1, -1), state, ctx)

    weights = read_off(attend, length, length - 1 - distances, pe.head_dim)[0, :, 0]
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
    low, high = math.log10(float(seen.min())) - 0.3, math.log10(float(plain.max())) + 0.3
    pairs = len(seen)

    def place(pair: int, value: float) -> tuple[float, float]:
        return 46 + 296 * (pair + 0.5) / pairs, 172 - 120 * (math.log10(max(value, 10**low)) - low) / (high - low)

    is_scaled = not torch.equal(plain, scaled)
    one = place(0, 1.0)[1]
    body = [f'<rect class="shade" x="46" y="{one:.1f}" width="296" height="{172 - one:.1f}"/>']
    for power in range(math.ceil(low), math.floor(high) + 1):
        body.append(_text(40, place(0, 10.0**power)[1] + 4, f"{10.0**power:g}", "m", "end"))
    for look, series in (("d2", plain), ("d1", seen), ("d0", scaled)):
        if look == "d0" and not is_scaled:
            continue
        for pair, value in enumerate(series.tolist()):
            x, y = place(pair, value)
            body.append(f'<circle class="{look}" cx="{x:.1f}" cy="{y:.1f}" r="{min(3, 96 / pairs):.1f}"/>')
    after = f" as RoPE, {new_angles(seen, scaled)} here" if is_scaled else ""
    legend = f"turns by pair: ● in {pe.train_len:,} tokens, ○ in {length:,}"
    if is_scaled:
        legend += ", blue: here"
    body += [
        _text(14, 40, f"{int((seen >= 1).sum())} of {pairs} pairs turn within {pe.train_len:,} tokens"),
        _text(50, 168, "less than a full turn", "m"),
        _text(46, 188, legend, "m"),
        _text(46, 204, f"pairs with new angles in {length:,}: {new_angles(seen, plain)}{after}"),
    ]
    return svg(name, body, 214)


def _score_lines(name: str, parts: Sequence[tuple[str, PositionEncoding]], distances: Tensor) -> list[Line]:
    """Return the lines of `draw_scores`: heads that are equal are one, and RoPE is added to other rotations."""
    lines: list[Line] = []
    for label, pe in parts:
        by_head = scores(pe, distances)
        if isinstance(pe, Rotary) and name != "rope" and not lines:
            shape = Shape(pe.n_head * pe.head_dim, pe.n_head, pe.n_kv_head, pe.head_dim, pe.train_len, 1)
            lines.append(Line("RoPE", "base", scores(Rotary(shape, layout=pe.layout), distances)[0]))
        levels = [f"q·k = {level:g}" for level in LEVELS]
        for head, y in enumerate(by_head):
            if head and torch.allclose(by_head[0], y, atol=1e-3):
                continue
            look = f"c{sum(line.look != 'base' for line in lines) % 4}"
            several = not torch.allclose(by_head, by_head[:1], atol=1e-3)
            head_label = levels[head % 4] if isinstance(pe, CoPE | StickBreaking) else f"head {head + 1}"
            lines.append(Line(label or (head_label if several else name), look, y))
    return lines


def draw_scores(name: str, parts: Sequence[tuple[str, PositionEncoding]], length: int) -> str:
    """Draw the scores by distance as an SVG: a line for each head, or for each part of a pattern; RoPE in grey."""
    near = torch.arange(min(64, length))
    distances = torch.cat((near, torch.arange(len(near), length, max(1, length // 256))))
    lines = _score_lines(name, parts, distances)

    def place(distance: float, score: float) -> tuple[float, float]:
        return 36 + 306 * distance / length, 52 + 120 * min(1, max(0, -score / -LOWEST))

    body = [_text(14, 40, "score against that of the best key", "m")]
    for score in (0, -5, -10):
        y = place(0, score)[1]
        body += [f'<path class="grid" d="M36 {y:.1f}H342"/>', _text(30, y + 4, f"{score}", "m", "end")]
    train_len = parts[0][1].train_len
    edge = place(train_len, 0)[0]
    body += [f'<path class="grid" stroke-dasharray="3" d="M{edge:.1f} 48V172"/>', _text(edge + 4, 168, "trained", "m")]
    for line in lines:
        visible = line.y > LOWEST
        points = [place(float(d), float(y)) for d, y in zip(distances, line.y, strict=True)]
        stop = int(visible.nonzero().max()) + 2 if visible.any() else 1
        path = " ".join(f"{x:.1f} {y:.1f}" for x, y in _thinned(points[:stop]))
        body.append(f'<path class="{line.look}" d="M{path}"/>')
    key_x = 36.0
    for line in lines:
        body.append(f'<path class="{line.look}" d="M{key_x:.0f} 200h12"/>')
        body.append(_text(key_x + 16, 204, line.label))
        key_x += 26 + 6 * len(line.label)
    body.append(_text(342, 186, f"distance in tokens, to {length:,}", "m", "end"))
    return svg(name, body, 214)


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Leave out points that lie on the line between the neighbours that are kept."""
    kept = points[:1]
    for before, point, after in zip(points, points[1:], points[2:], strict=False):
        slope = (after[1] - kept[-1][1]) / (after[0] - kept[-1][0])
        straight = kept[-1][1] + slope * (point[0] - kept[-1][0])
        if abs(straight - point[1]) > 0.05 or abs(before[1] - point[1]) > 20:
            kept.append(point)
    return kept + points[-1:]


@torch.no_grad()
def attention_of(net: GPT, ids: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the weights [H, T, T] of each layer for a text `ids` int64 [T], and what its gates say of each token.

    Gates are [H, T]: the share that FoX forgets at a token, or that CoPE counts of it as seen from the last one.

    Raises ValueError: an encoding makes gates of the values, which are replaced here.
    """
    weights: list[Tensor] = []
    gates: list[Tensor | None] = []
    originals = {pe: pe.attend for pe in net.distinct_encodings}

    def recorder(pe: PositionEncoding) -> Callable[..., Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
            def with_values(values: Tensor) -> Tensor:
                return originals[pe](q, k, values.to(v).expand_as(v), state, ctx)

            tokens = k.size(2)
            weights.append(read_off(with_values, tokens, torch.arange(tokens), pe.head_dim)[0])
            gate = None
            if "log_gates" in state:
                gate = 1 - state["log_gates"][0].exp().T
            elif isinstance(pe, CoPE) and pe.gates == "keys":
                rotated_q, rotated_k = pe.rotate(q, k, ctx)
                shared = rotated_q.size(1) // rotated_k.size(1)
                logits = rotated_q[:, :, -1:] @ rotated_k.repeat_interleave(shared, dim=1).mT * ctx.scale
                gate = logits[0, :, 0].sigmoid()
            gates.append(gate)
            return originals[pe](q, k, v, state, ctx)

        return attend

    for pe in originals:
        if isinstance(pe, CoPE) and pe.gates == "values":
            raise ValueError("pe.gates=values: the attention cannot be drawn, since its gates are made of the values")
    try:
        for pe in originals:
            pe.attend = recorder(pe)  # type: ignore[method-assign]
        with net.at_scale(net.scale_for(len(ids))):
            net(ids[None])
    finally:
        for pe in originals:
            del pe.attend
    return weights, gates


def by_distance(weights: Tensor) -> tuple[list[str], Tensor]:
    """Split the attention [H, T, T] of the queries of the second half over the first token and ranges of distances.

    Returns:
        Names of the ranges, and the mean share of each, [n]; they sum to what the keys get in all.
    """
    tokens = weights.size(-1)
    pos = torch.arange(tokens)
    distance = pos[:, None] - pos
    late = weights.mean(0)[tokens // 2 :]
    names = ["first", "self"]
    shares = [late[:, 0].mean(), late.diagonal(tokens // 2).mean()]
    low = 1
    while low < tokens:
        inside = (distance >= low) & (distance < 2 * low) & (pos > 0)
        shares.append((late * inside[tokens // 2 :]).sum(-1).mean())
        names.append(f"{low}")
        low *= 2
    return names, torch.stack(shares)


def draw_attention(title: str, weights: Sequence[Tensor]) -> str:
    """Draw the share of attention in percent by layer and distance as an SVG."""
    body = []
    for number, of_layer in enumerate(weights):
        names, shares = by_distance(of_layer)
        width = 300 / len(names)
        y = 58 + 20 * number
        body.append(_text(36, y + 14, f"{number + 1}", "m", "end"))
        for column, (name, share) in enumerate(zip(names, shares.tolist(), strict=True)):
            x = 42 + width * column
            rect = f'x="{x:.1f}" y="{y}" width="{width - 1:.1f}" height="19"'
            body.append(f'<rect class="heat" {rect} fill-opacity="{0.75 * min(1, share):.2f}"/>')
            body.append(_text(x + width / 2, y + 14, f"{100 * share:.0f}", "", "middle"))
            if number == 0:
                body.append(_text(x + width / 2, 52, name, "m", "middle"))
    bottom = 58 + 20 * len(weights)
    body.append(_text(14, bottom + 16, "% of attention by layer: on the first token, itself, from a distance", "m"))
    return svg(title, body, bottom + 26)


def coloured(pieces: Sequence[str], strengths: Tensor) -> str:
    """Return a text as HTML, each piece coloured by its strength in 0..1, [n]."""
    spans = []
    for piece, strength in zip(pieces, strengths.tolist(), strict=True):
        spans.append(f'<span style="background:rgb(5 99 242/{60 * strength:.0f}%)">{escape(piece)}</span>')
    return f"<pre>{''.join(spans)}</pre>"


def svg(title: str, body: Sequence[str], height: int) -> str:
    """Return a picture of its own, 360 wide, on a card that follows the reader's light or dark theme."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="pe" viewBox="0 0 360 {height}" role="img">'
    card = f'<rect class="card" width="360" height="{height}" rx="6"/>'
    parts = [head, f"<title>{escape(title)}</title>", STYLE, card, _text(14, 24, title, "b"), *body, "</svg>"]
    return "\n".join(parts) + "\n"


def _text(x: float, y: float, words: str, look: str = "", anchor: str = "start") -> str:
    return f'<text class="{look}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
