"""Rotary encodings: queries and keys are turned by an angle proportional to their position.

Three choices are independent of one another: the frequencies (and their scaling, see `scaled_rotary`), the layout of
the pairs, and the fraction of the channels that turn.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from model.position import frequencies as fr
from model.position.base import PositionEncoding, Shape

Layout = Literal["half", "interleaved"]


class Rotary(PositionEncoding):
    """RoPE (arXiv 2104.09864): pair i of a head's channels turns by position * base^(-2i/D).

    Args:
        base: the constant called theta.
        layout: which channels form pair i: "half", (i, i + D/2), as in GPT-NeoX and transformers;
            "interleaved", (2i, 2i + 1), as in the paper. Equivalent up to a permutation of the trained channels.
        fraction: share of the head's channels that turn, the first ones; the others carry no position.

    Raises:
        ValueError: base or fraction out of range, or an odd number of channels to pair.
    """

    def __init__(self, shape: Shape, *, base: float = 10000.0, layout: Layout = "half", fraction: float = 1.0) -> None:
        super().__init__(shape)
        if not 1 < base < float("inf"):
            raise ValueError(f"pe.base={base:g} must be greater than 1 (RoPE uses 10000, Llama 3 500000)")
        if not 0 < fraction <= 1:
            raise ValueError(f"pe.fraction={fraction:g} must be in (0, 1]: the share of each head's channels that turn")
        if layout not in ("half", "interleaved"):
            raise ValueError(f"pe.layout={layout!r} must be 'half' or 'interleaved'")
        self.dim = int(shape.head_dim * fraction)  # channels that turn
        if self.dim < 2 or self.dim % 2:
            raise ValueError(
                f"a rotation needs an even number of channels, at least 2, but head_dim={shape.head_dim} with "
                f"pe.fraction={fraction:g} gives {self.dim}; change model.dim, model.n_head or pe.fraction"
            )
        self.base, self.layout, self.fraction, self.train_len = base, layout, fraction, shape.train_len

    def frequencies(self, length: int, device: fr.Device = None) -> fr.Frequencies:
        """(inverse frequencies float64 [dim/2], attention factor) for a text of `length` tokens."""
        return fr.rope(self.dim, self.base, device=device)

    @property
    def family(self) -> str:
        return f"rotary, {self.layout} layout, {self.dim} channels"

    def tables(self, pos: Tensor, length: int) -> Any:
        """cos and sin of the angles, fp32 [T, dim/2]."""
        inv_freq, _ = self.frequencies(length, pos.device)
        angle = pos[:, None].to(inv_freq.dtype) * inv_freq
        return angle.cos().float(), angle.sin().float()

    def rotate(self, x: Tensor, table: Any) -> Tensor:
        cos, sin = table
        turned, kept = x[..., : self.dim], x[..., self.dim :]
        if self.layout == "half":
            a, b = turned.chunk(2, dim=-1)  # [B, H, T, dim/2] each
            out = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        else:
            a, b = turned[..., 0::2], turned[..., 1::2]
            out = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        out = out.to(x.dtype)  # fp32 tables promote bf16 queries, so that only the result is rounded
        return out if kept.size(-1) == 0 else torch.cat((out, kept), dim=-1)


class PRope(Rotary):
    """p-RoPE (arXiv 2410.06205): the lowest frequencies are zero, so that their channels match at any distance.

    Args:
        proportion: share of the frequencies that are kept, the highest ones.
        factor: divisor of those frequencies, in training as in reading.
        The others are those of `Rotary`; with a fraction, the frequencies are those of the channels that turn.

    Raises:
        ValueError: proportion or factor out of range.
    """

    def __init__(self, shape: Shape, *, proportion: float = 0.75, factor: float = 1.0, **rotary: Any) -> None:
        super().__init__(shape, **rotary)
        if not 0 < proportion <= 1:
            raise ValueError(f"pe.proportion={proportion:g} must be in (0, 1]: the share of the frequencies to keep")
        if not 0 < factor < float("inf"):
            raise ValueError(f"pe.factor={factor:g} must be a positive number: it divides frequencies")
        self.proportion, self.factor = proportion, factor

    def frequencies(self, length: int, device: fr.Device = None) -> fr.Frequencies:
        return fr.p_rope(self.dim, self.base, proportion=self.proportion, factor=self.factor, device=device)


class XPos(Rotary):
    """xPos (arXiv 2212.10554): besides turning, pair i of q.k decays as zeta_i^(distance / decay_len), where
    zeta_i = (2i + gamma D) / ((1 + gamma) D): fast where the frequency is high.

    Queries are multiplied by zeta^n and keys divided by it, n = (position - centre) / decay_len. The centre cancels in
    the scores; it keeps numbers in range. It is half of train_len whatever the text, so that keys in the cache
    stay valid, and the text ends where a factor would leave 2^100: `max_len`.

    Args:
        gamma: how far the fastest decay is from all or nothing; larger is slower.
        decay_len: tokens after which pair i has decayed by zeta_i.
        The others are those of `Rotary`.

    Raises:
        ValueError: gamma or decay_len out of range, or train_len beyond `max_len`; a longer text, in a forward pass.
    """

    def __init__(self, shape: Shape, *, gamma: float = 0.4, decay_len: float = 512.0, **rotary: Any) -> None:
        super().__init__(shape, **rotary)
        for name, value in (("gamma", gamma), ("decay_len", decay_len)):
            if not 0 < value < float("inf"):
                raise ValueError(f"pe.{name}={value:g} must be a positive number")
        self.gamma, self.decay_len, self.centre = gamma, decay_len, shape.train_len // 2
        self.max_len = self.centre + int(decay_len * 100 * math.log(2) / math.log((1 + gamma) / gamma))
        self._check(shape.train_len)

    def _check(self, length: int) -> None:
        assert self.max_len is not None
        if length > self.max_len:
            raise ValueError(
                f"a text of {length} tokens is beyond the {self.max_len} for which xPos's factors are finite numbers: "
                f"raise pe.decay_len={self.decay_len:g}, or use another encoding"
            )

    def tables(self, pos: Tensor, length: int) -> Any:
        """(cos, sin) for queries and for keys, the decay multiplied in."""
        self._check(length)
        cos, sin = super().tables(pos, length)  # [T, dim/2]
        channel = torch.arange(0, self.dim, 2, dtype=fr.exact_dtype(pos.device), device=pos.device)
        zeta = (channel + self.gamma * self.dim) / ((1 + self.gamma) * self.dim)
        decay = (zeta ** ((pos[:, None] - self.centre).to(zeta.dtype) / self.decay_len)).float()
        return (cos * decay, sin * decay), (cos / decay, sin / decay)

    def rotate(self, x: Tensor, table: Any) -> Tensor:
        return super().rotate(x, table[0])

    def rotate_key(self, x: Tensor, table: Any) -> Tensor:
        return super().rotate(x, table[1])
