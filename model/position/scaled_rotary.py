"""Scalings of rotary encodings: changed frequencies with which a trained model reads longer texts."""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from model.position.base import Positive, Scaling, Shape
from model.position.ops import Base, Device, inverse_frequencies
from model.position.rotary import Rotary


class ScaledRotary(Scaling, Rotary):
    """Base of the scalings that change RoPE's frequencies. Unscaled it is RoPE. Nothing is learned."""

    unscaled_as = Rotary

    def at(self, inv_freq: Tensor, scale: float, length: int) -> Tensor:
        """Return the frequencies at a scale, in a text of `length` tokens, from RoPE's `inv_freq` [rotary_dim / 2]."""
        raise NotImplementedError

    def by_turns(self, inv_freq: Tensor, scale: float, low: float, high: float) -> Tensor:
        """Scale frequencies [rotary_dim / 2] by the number of turns that they make within original_len.

        With `high` turns or more a frequency is kept; with `low` or fewer it is divided by `scale`; in between the
        blend of the two is linear in the turns.
        """
        # A pair that turns often has met all its angles in training, and tells near tokens apart: it should stay. One
        # that has not completed a turn would meet angles that it never saw.
        turns = self.original_len * inv_freq / (2 * math.pi)
        return _blend(inv_freq, scale, 1 - (turns - low) / (high - low))

    def sharpening(self, scale: float) -> float:
        """Return the factor of queries and of keys at a scale; the logits get its square."""
        return 1.0

    def frequencies(self, length: int, device: Device = None) -> Tensor:
        plain = super().frequencies(length, device)
        if self.active_scale == self.unscaled:
            return plain
        return self.at(plain, self.active_scale, length)

    @property
    def logit_scale(self) -> float:  # type: ignore[override]
        # Part of the softmax scale rather than of cos and sin, where it would miss the channels that are not rotated.
        if self.active_scale == self.unscaled:
            return 1.0
        return self.sharpening(self.active_scale) ** 2

    @property
    def stretch(self) -> float:
        """Target length / original length, of the longest text that it is meant for."""
        return max(self.scales)

    def describe(self) -> list[str]:
        scale = max(self.scales)
        length = math.ceil(self.stretch * self.original_len)
        plain = Rotary.frequencies(self, length)
        scaled = self.at(plain, scale, length)
        is_kept = scaled > (1 - 1e-9) * plain  # equal up to rounding
        # A pair that does not finish a turn in training meets new angles wherever it turns further than it did there.
        trained_angle = self.original_len * plain
        is_complete = trained_angle >= 2 * math.pi
        is_further = length * scaled > (1 + 1e-9) * trained_angle
        unseen = int((is_further & ~is_complete).sum())
        pairs = f"{int(is_complete.sum())} of {len(plain)} pairs turn within {self.original_len} tokens"
        changed = f"{int(is_kept.sum())} frequencies kept, {unseen} with new angles in {length} tokens"
        logits = f"logit scale {self.sharpening(scale) ** 2:.4f}"
        return [*super().describe(), f"{pairs}; at scale {scale:g} {changed}, {logits}"]


class Linear(ScaledRotary):
    """Position interpolation (arXiv 2306.15595): positions are divided by the scale, or, equivalently, frequencies."""

    def at(self, inv_freq: Tensor, scale: float, length: int) -> Tensor:
        return inv_freq / scale


class NTK(ScaledRotary):
    """NTK-aware scaling (bloc97, 2023; described in arXiv 2309.00071): a larger base.

    It is chosen so that the lowest frequency is divided by the scale and the highest stays.
    """

    def __init__(self, shape: Shape, **options: Any) -> None:
        super().__init__(shape, **options)
        if self.rotary_dim < 4:
            raise ValueError(f"a larger base needs at least 4 rotated channels, not {self.rotary_dim}: raise model.dim")

    def base_at(self, scale: float | Tensor) -> float | Tensor:
        """Return the base at a scale."""
        return self.base * scale ** (self.rotary_dim / (self.rotary_dim - 2))

    def at(self, inv_freq: Tensor, scale: float | Tensor, length: int) -> Tensor:
        return inverse_frequencies(self.rotary_dim, self.base_at(scale), inv_freq.device)


class ABF(NTK):
    """Another base (ABF; arXiv 2309.16039): the one given, or that of NTK-aware scaling.

    Args:
        new_base: the base at the scale, such as 500,000; default base * scale^(D/(D-2)), D = rotary_dim.
    """

    def __init__(self, shape: Shape, *, new_base: Base | None = None, **options: Any) -> None:
        super().__init__(shape, **options)
        self.new_base = new_base

    def base_at(self, scale: float | Tensor) -> float | Tensor:
        return self.new_base or super().base_at(scale)


class DynamicNTK(NTK):
    """NTK-aware scaling that follows the text (emozilla, 2023; described in arXiv 2309.00071): the base grows once the
    text is longer than original_len, as for a scale of 1 + scale (length / original_len - 1).

    Beyond original_len angles depend on the length of the text so far. So reading a text at once and token by token
    differ from the second layer on: what the cache holds of earlier tokens was computed while the text was shorter.

    Args:
        scale: how fast the base grows; at 1 the lowest frequency is divided by length / original_len. 0 is RoPE, which
            it trains as unless train_len is beyond original_len.
    """

    unscaled = 0.0
    stretch = 4.0  # an example for `describe`: any length can be read

    def at(self, inv_freq: Tensor, scale: float | Tensor, length: int) -> Tensor:
        # A tensor, not a float, so that torch.compile has one graph for all lengths.
        tokens = inv_freq.new_full((), length).clamp(min=self.original_len)
        growth = 1 + scale * (tokens / self.original_len - 1)
        return super().at(inv_freq, growth, length)


class NTKByParts(ScaledRotary):
    """NTK-by-parts (arXiv 2309.00071, section 3.2): high frequencies are kept, low ones divided by the scale, with a
    blend between the two that is linear in the turns. Llama 3.1 (arXiv 2407.21783) has narrower limits.

    Args:
        low_freq_factor: turns within original_len up to which a frequency is divided by the scale; the paper's alpha.
        high_freq_factor: turns from which it is kept; the paper's beta. Must be above low_freq_factor.
    """

    def __init__(
        self, shape: Shape, *, low_freq_factor: float = 1.0, high_freq_factor: float = 32.0, **options: Any
    ) -> None:
        super().__init__(shape, **options)
        _check_limits(low_freq_factor=low_freq_factor, high_freq_factor=high_freq_factor)
        self.low_freq_factor = low_freq_factor
        self.high_freq_factor = high_freq_factor

    def at(self, inv_freq: Tensor, scale: float, length: int) -> Tensor:
        return self.by_turns(inv_freq, scale, self.low_freq_factor, self.high_freq_factor)


class Yarn(ScaledRotary):
    """YaRN (arXiv 2309.00071): low frequencies are divided by the scale, high ones kept, the logits sharpened.

    Args:
        beta_fast: turns within original_len above which a frequency is kept.
        beta_slow: turns below which it is divided by the scale.
        ramp: the quantity in which the blend between the two is linear. "code", as in the released code and its many
            ports: the index of the pair, between the rounded indices of the two limits. "unrounded": the same between
            the limits themselves. "paper": the number of turns, as in NTK-by-parts. With 128 channels and original_len
            4096, pair 28 keeps 0.692 of its frequency by the code, 0.342 by the paper.
        attention_factor: factor of queries and keys at a scale; default 0.1 ln(scale) + 1.
    """

    def __init__(
        self, shape: Shape, *, beta_fast: float = 32.0, beta_slow: float = 1.0,
        ramp: Literal["code", "unrounded", "paper"] = "code", attention_factor: Positive | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(shape, **options)
        _check_limits(beta_slow=beta_slow, beta_fast=beta_fast)
        self.beta_fast = beta_fast
        self.beta_slow = beta_slow
        self.ramp = ramp
        self.attention_factor = attention_factor

    def at(self, inv_freq: Tensor, scale: float, length: int) -> Tensor:
        if self.ramp == "paper":
            return self.by_turns(inv_freq, scale, self.beta_slow, self.beta_fast)
        # Frequencies fall with the index of the pair, so the limit of the fast ones is the lower index.
        low = self._pair_index(self.beta_fast)
        high = self._pair_index(self.beta_slow)
        if self.ramp == "code":
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, self.rotary_dim - 1)  # the last channel's index, not the last pair's: as in the released code
        index = torch.arange(inv_freq.numel(), dtype=inv_freq.dtype, device=inv_freq.device)
        return _blend(inv_freq, scale, (index - low) / max(high - low, 1e-3))

    def _pair_index(self, turns: float) -> float:
        """Return the index, not rounded, of the pair of channels that makes so many turns within original_len."""
        # turns = original_len base^(-2i/D) / (2 pi), solved for i.
        return self.rotary_dim * math.log(self.original_len / (turns * 2 * math.pi)) / (2 * math.log(self.base))

    def sharpening(self, scale: float) -> float:
        # YaRN's authors fitted the default to the lowest perplexity of LLaMA models.
        return self.attention_factor or 0.1 * math.log(scale) + 1.0


class LongRope(ScaledRotary):
    """LongRoPE (arXiv 2402.13753): every frequency is divided by a factor of its own, and the logits sharpened.

    The factors are found by a search for each model; models such as Phi-3 come with theirs. Without them the long ones
    are those of NTK-aware scaling, where the search starts. The length of the text so far decides which list is used,
    with the consequences described in `DynamicNTK`.

    Args:
        short_factor: divisors of the rotary_dim / 2 frequencies for texts up to original_len; default 1. A list of
            another length is a ValueError.
        long_factor: the same for longer texts; default scale^(2i/(rotary_dim - 2)).
        attention_factor: factor of queries and keys at a scale; default sqrt(1 + ln(scale) / ln(original_len)).
    """

    def __init__(
        self, shape: Shape, *, short_factor: list[Positive] | None = None, long_factor: list[Positive] | None = None,
        attention_factor: Positive | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(shape, **options)
        pairs = self.rotary_dim // 2
        for name, factors in (("short_factor", short_factor), ("long_factor", long_factor)):
            if factors is not None and len(factors) != pairs:
                raise ValueError(f"pe.{name} has {len(factors)} divisors, but a head has {pairs} rotated pairs")
        self.short_factor = short_factor
        self.long_factor = long_factor
        self.attention_factor = attention_factor
        # Made once rather than in each forward pass. Not buffers, which a conversion to bf16 would round. On the CPU by
        # name, since a configuration is checked under torch.device("meta"), where tensors have no values.
        self.short = torch.tensor(short_factor or [1.0] * pairs, dtype=torch.float64, device="cpu")
        self.long = torch.tensor(long_factor or [], dtype=torch.float64, device="cpu")

    def at(self, inv_freq: Tensor, scale: float, length: int) -> Tensor:
        short = self.short.to(inv_freq, non_blocking=True)
        long = self.long.to(inv_freq, non_blocking=True)
        if self.long_factor is None:
            index = torch.arange(inv_freq.numel(), dtype=inv_freq.dtype, device=inv_freq.device)
            long = scale ** (index / max(len(index) - 1, 1))
        # Chosen by a tensor, so that torch.compile has one graph for all lengths.
        is_long = torch.full((), length, device=inv_freq.device) > self.original_len
        return inv_freq / torch.where(is_long, long, short)

    def sharpening(self, scale: float) -> float:
        return self.attention_factor or math.sqrt(1 + math.log(scale) / math.log(self.original_len))


def _blend(inv_freq: Tensor, scale: float, interpolated: Tensor) -> Tensor:
    """Blend frequencies with the same frequencies divided by `scale`.

    Args:
        inv_freq: frequencies [n].
        interpolated: share of the divided ones, [n]; clamped to 0..1.
    """
    share = interpolated.clamp(0, 1)
    return inv_freq / scale * share + inv_freq * (1 - share)


def _check_limits(**limits: float) -> None:
    """Raise ValueError unless the first of two named options is positive and below the second."""
    (low_name, low), (high_name, high) = limits.items()
    if not 0 < low < high < math.inf:
        raise ValueError(f"pe.{low_name}={low:g} must lie between 0 and pe.{high_name}={high:g}")
