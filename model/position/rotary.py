"""Rotary encodings: queries and keys are rotated by an angle proportional to their position."""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from model.position.base import Context, Count, PositionEncoding, Positive, Shape, Share
from model.position.ops import Base, Device, cos_sin, exact_dtype, inverse_frequencies, rotate_pairs


class Rotary(PositionEncoding):
    """RoPE (arXiv 2104.09864): pair i of a head's channels is rotated by position * base^(-2i/D).

    A score then depends on two positions only through their difference. Nothing is learned.

    Args:
        base: base of the geometric series of frequencies, often called theta; "auto": that with which the slowest
            pair makes one turn within train_len, so that training meets all angles.
        layout: which channels form pair i: "half", (i, i + D/2), as in GPT-NeoX and transformers;
            "interleaved", (2i, 2i + 1), as in the paper. Equivalent up to a permutation of the trained channels.
        partial_rotary_factor: share of the head's channels that are rotated, the first ones.
        resonance: round every wavelength to whole tokens (arXiv 2403.00071), so that the angles of a pair repeat,
            however long the text. In training as in evaluation, and after any scaling.
        values: rotate the values too, and the output back by the angle of its query, so that what is read says how
            far away it was (arXiv 2606.11275).
    """

    # Of the subclasses, too: a scaling, p-RoPE or xPos may start from the weights of RoPE. Read zero-shot they are
    # other functions of these weights, some of them bad ones, which an evaluation shows.
    family = "rotary"
    in_place = True
    zero_shot = ("yarn",)

    def __init__(
        self, shape: Shape, *, base: Base | Literal["auto"] = 10000.0, layout: Literal["half", "interleaved"] = "half",
        partial_rotary_factor: Share = 1.0, resonance: bool = False, values: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(shape, **options)
        self.rotary_dim = int(shape.head_dim * partial_rotary_factor)
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            sizes = f"head_dim={shape.head_dim} with pe.partial_rotary_factor={partial_rotary_factor:g}"
            raise ValueError(f"a rotation needs an even number of channels, but {sizes} gives {self.rotary_dim}")
        self.base = _critical_base(self.rotary_dim, shape.train_len) if base == "auto" else base
        self.layout = layout
        self.partial_rotary_factor = partial_rotary_factor
        self.resonance = resonance
        self.values = values
        self.family = f"{self.family}, {layout} layout, {self.rotary_dim} channels"
        if resonance:
            self.family += ", whole wavelengths"
        if values:
            self.family += ", values rotated"

    def frequencies(self, length: int, device: Device = None) -> Tensor:
        """Return the frequencies in a text of `length` tokens, radians per token, `exact_dtype` [rotary_dim / 2]."""
        return inverse_frequencies(self.rotary_dim, self.base, device)

    def tables(self, pos: Tensor, length: int) -> Any:
        """Cosine and sine of the angles, fp32 [length, rotary_dim / 2] each."""
        inv_freq = self.frequencies(length, pos.device)
        if self.resonance:
            wavelength = 2 * math.pi / inv_freq
            inv_freq = 2 * math.pi / wavelength.round().clamp(min=1)
        return cos_sin(pos[:, None].to(inv_freq.dtype) * inv_freq)  # angles [length, rotary_dim / 2]

    def rotate(self, q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        cos, sin = ctx.tables
        return self.rotated(q, cos, sin), self.rotated(k, cos, sin)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor], ctx: Context) -> Tensor:
        if not self.values:
            return super().attend(q, k, v, state, ctx)
        # The value of key j is turned by its angle, and the output of query i back by that of i: what remains is a
        # turn by the distance, as in the scores.
        cos, sin = ctx.tables
        out = super().attend(q, k, self.rotated(v, cos, sin), state, ctx)
        return self.rotated(out, cos, -sin)

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate `x` [B, H, T, D] by the angles of the last T rows of `cos` and `sin`; other channels stay."""
        # Queries are the newest of the keys' tokens, so both take the last rows of the same tables.
        tokens = x.size(2)
        out = rotate_pairs(x[..., : self.rotary_dim], cos[-tokens:], sin[-tokens:], layout=self.layout)
        kept = x[..., self.rotary_dim :]
        if kept.size(-1) == 0:
            return out
        return torch.cat((out, kept), dim=-1)


def _critical_base(dim: int, length: int) -> float:
    """Return the base with which the slowest of dim / 2 pairs makes one turn within `length` tokens."""
    # The slowest frequency is base^(-(dim - 2) / dim), and one turn is 2 pi = length * frequency. A single pair has
    # frequency 1 whatever the base; in a text shorter than a turn no base is large enough.
    if dim == 2 or length <= 2 * math.pi:
        return 10000.0
    return (length / (2 * math.pi)) ** (dim / (dim - 2))


class PRope(Rotary):
    """p-RoPE (arXiv 2410.06205): RoPE whose lowest frequencies are zero, so those channels ignore the distance.

    Args:
        proportion: share of the frequencies to keep, the highest ones, rounded down to whole pairs; "auto": those that
            make a full turn within `original_len`, so that training meets all their angles.
        factor: divisor of the kept frequencies, in training as in evaluation.
        original_len: for "auto": length in tokens the weights were first trained at; default train_len.
    """

    in_place = True
    kept_pairs: int  # pairs of channels that are rotated, the first ones

    def __init__(
        self, shape: Shape, *, proportion: Share | Literal["auto"] = 0.75, factor: Positive = 1.0,
        original_len: Count | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(shape, **options)
        self.factor = factor
        self.original_len = original_len or shape.train_len
        if proportion == "auto":
            self.kept_pairs = self._pairs_with_a_full_turn()
            # Half a pair more than are kept, so that rounding down, here or in transformers after an export, gives
            # exactly these pairs.
            proportion = min(1.0, (2 * self.kept_pairs + 1) / self.rotary_dim)
        else:
            self.kept_pairs = int(proportion * self.rotary_dim // 2)
        self.proportion = proportion

    def _pairs_with_a_full_turn(self) -> int:
        """Count the pairs that turn at least once within `original_len`."""
        # In plain Python, since a configuration is checked under torch.device("meta"), where tensors have no values.
        kept = 0
        for pair in range(self.rotary_dim // 2):
            inv_freq = self.base ** -(2 * pair / self.rotary_dim) / self.factor
            if inv_freq * self.original_len / (2 * math.pi) >= 1:
                kept += 1
        return kept

    def frequencies(self, length: int, device: Device = None) -> Tensor:
        kept = torch.arange(self.rotary_dim // 2, device=device) < self.kept_pairs
        return super().frequencies(length, device) * kept / self.factor


class XPos(Rotary):
    """xPos (arXiv 2212.10554): besides the rotation, pair i of q.k decays as zeta_i^(distance / scale_base), where
    zeta_i = (2i + gamma D) / ((1 + gamma) D): fast where the frequency is high.

    Queries are multiplied by zeta^n and keys divided by it, n = (position - centre) / scale_base. The centre, half of
    train_len, cancels in the scores and keeps numbers in range, up to where a factor would leave 2^100: `max_len`.

    Args:
        gamma: the larger it is, the slower the fastest decay.
        scale_base: tokens after which pair i has decayed by zeta_i.
    """

    def __init__(self, shape: Shape, *, gamma: Positive = 0.4, scale_base: Positive = 512.0, **options: Any) -> None:
        super().__init__(shape, **options)
        if self.values:
            raise ValueError("pe.values=true: xPos has another factor for queries than for keys; leave it out")
        self.gamma = gamma
        self.scale_base = scale_base
        self.centre = shape.train_len // 2
        # The fastest decay is that of pair 0, zeta_0 = gamma / (1 + gamma): its factor reaches 2^100 first.
        tokens = scale_base * 100 * math.log(2) / math.log((1 + gamma) / gamma)
        self.max_len = self.centre + int(tokens)

    def remedy(self, length: int) -> str:
        return f"raise pe.scale_base={self.scale_base:g}, or use another encoding"

    def tables(self, pos: Tensor, length: int) -> Any:
        """(cos, sin) for queries and for keys, the decay multiplied in, fp32 [length, rotary_dim / 2] each."""
        cos, sin = super().tables(pos, length)
        dtype = exact_dtype(pos.device)
        width = self.rotary_dim
        channel = torch.arange(0, width, 2, dtype=dtype, device=pos.device)
        zeta = (channel + self.gamma * width) / ((1 + self.gamma) * width)  # [rotary_dim / 2]
        n = (pos[:, None] - self.centre).to(dtype) / self.scale_base  # [length, 1]
        decay = (zeta**n).float()  # [length, rotary_dim / 2]
        of_queries = (cos * decay, sin * decay)
        of_keys = (cos / decay, sin / decay)
        return of_queries, of_keys

    def rotate(self, q: Tensor, k: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        of_queries, of_keys = ctx.tables
        return self.rotated(q, *of_queries), self.rotated(k, *of_keys)
