"""Scalings of rotary encodings: by their frequencies, a model reads texts longer than those it was trained on."""

import math
from typing import Any, Literal

from model.position import frequencies as fr
from model.position.base import Shape
from model.position.rotary import Rotary
from model.position.scaled import Scaled


class ScaledRotary(Scaled, Rotary):
    """Base of the scalings of the frequencies; their constructors take the options of `Scaled` and of `Rotary`."""

    knob: str | None = None
    """The option to lower where a scaling that means to keep its highest frequencies keeps none at these sizes."""

    def scaled(self, scale: float, length: int, device: fr.Device) -> fr.Frequencies:
        """What `frequencies` returns at a `scale` other than `unscaled`."""
        raise NotImplementedError

    def frequencies(self, length: int, device: fr.Device = None) -> fr.Frequencies:
        if self.active == self.unscaled:
            return super().frequencies(length, device)
        return self.scaled(self.active, length, device)

    @property
    def temperature(self) -> float:  # type: ignore[override]
        # In the softmax scale rather than in cos and sin, where it would miss the channels that do not turn.
        return self.frequencies(self.original_len)[1] ** 2

    @property
    def stretch(self) -> float:
        """Target length / original length: where `describe` looks at the frequencies."""
        return max(self.scale, self.train_scale)

    def describe(self) -> list[str]:
        scale = max(self.scale, self.train_scale)
        if scale == self.unscaled:
            return super().describe()
        length = math.ceil(self.stretch * self.original_len)
        plain, _ = super().frequencies(length)
        scaled, factor = self.at_scale(scale).frequencies(length)
        ratio = scaled / plain  # 1: kept; 1 / stretch: interpolated
        total, kept = ratio.numel(), int((ratio > 1 - 1e-9).sum())
        divided = int((ratio < (1 + 1e-9) / self.stretch).sum())
        longest = 2 * math.pi / scaled.min().item()
        lines = [
            *super().describe(),
            f"at scale {scale:g}, for {length} tokens: of {total} frequencies {kept} kept, {total - kept - divided} "
            f"blended, {divided} interpolated; longest wavelength {longest:.0f} tokens; "
            f"logit temperature {factor**2:.4f}",
        ]
        if self.knob and kept <= 1:
            lines.append(
                f"warning: at most one frequency is kept, because {self.original_len} tokens are few for the limits of "
                f"this scaling; a smaller pe.{self.knob} keeps more"
            )
        return lines


class Linear(ScaledRotary):
    """Position interpolation (arXiv 2306.15595): positions, which is to say frequencies, are divided by the scale."""

    def scaled(self, scale: float, length: int, device: fr.Device) -> fr.Frequencies:
        return fr.linear(self.dim, self.base, scale=scale, device=device)


class NTK(ScaledRotary):
    """NTK-aware scaling (bloc97, 2023): a larger base, so that the lowest frequency is divided by the scale.

    Raises:
        ValueError: fewer than 4 channels turn; else as `Scaled` and `Rotary`.
    """

    def __init__(self, shape: Shape, **scaled: Any) -> None:
        super().__init__(shape, **scaled)
        if self.dim < 4:
            raise ValueError(f"a larger base needs at least 4 turning channels, not {self.dim}: raise model.dim")

    def scaled(self, scale: float, length: int, device: fr.Device) -> fr.Frequencies:
        return fr.ntk(self.dim, self.base, scale=scale, device=device)


class DynamicNTK(NTK):
    """NTK-aware scaling that follows the text (emozilla, 2023): the base grows once it is longer than original_len.

    Up to original_len it is RoPE. Beyond, angles depend on the length of the call, so that the cache keeps raw keys.
    One difference between reading at once and token by token is inherent: in the second layer and up, what the cache
    holds of earlier tokens was computed while the text was shorter.

    Args:
        scale: how fast the base grows, see `frequencies.dynamic_ntk`; at 1 the length divides the lowest frequency.
            0 is RoPE, at which it trains unless train_len is beyond original_len.
        The others are those of `Scaled` and `Rotary`.
    """

    unscaled = 0.0
    cache_rotated = False
    stretch = 4.0  # any length can be read

    def __init__(self, shape: Shape, *, scale: float = 1.0, **scaled: Any) -> None:
        super().__init__(shape, scale=scale, **scaled)

    def scaled(self, scale: float, length: int, device: fr.Device) -> fr.Frequencies:
        return fr.dynamic_ntk(
            self.dim, self.base, scale=scale, original_len=self.original_len, length=length, device=device
        )


class NTKByParts(ScaledRotary):
    """NTK-by-parts (arXiv 2309.00071, section 3.2): high frequencies are kept, low ones divided by the scale.

    Args:
        alpha, beta: turns within original_len up to which a frequency is divided, and from which it is kept.
        The others are those of `Scaled` and `Rotary`.

    Raises:
        ValueError: not 0 < alpha < beta; else as `Scaled` and `Rotary`.
    """

    knob = "beta"

    def __init__(self, shape: Shape, *, alpha: float = 1.0, beta: float = 32.0, **scaled: Any) -> None:
        super().__init__(shape, **scaled)
        _check_limits(alpha=alpha, beta=beta)
        self.options = dict(alpha=alpha, beta=beta)

    def scaled(self, scale: float, length: int, device: fr.Device) -> fr.Frequencies:
        return fr.ntk_by_parts(
            self.dim, self.base, scale=scale, original_len=self.original_len, device=device, **self.options
        )


class Llama3(ScaledRotary):
    """The scaling of Llama 3.1 (arXiv 2407.21783): NTK-by-parts with narrower limits.

    Args:
        low_freq_factor, high_freq_factor: alpha and beta of `NTKByParts` by the names of Llama's configurations.
        The others are those of `Scaled` and `Rotary`.

    Raises:
        ValueError: not 0 < low_freq_factor < high_freq_factor; else as `Scaled` and `Rotary`.
    """

    knob = "high_freq_factor"

    def __init__(
        self, shape: Shape, *, low_freq_factor: float = 1.0, high_freq_factor: float = 4.0, **scaled: Any
    ) -> None:
        super().__init__(shape, **scaled)
        _check_limits(low_freq_factor=low_freq_factor, high_freq_factor=high_freq_factor)
        self.options = dict(alpha=low_freq_factor, beta=high_freq_factor)

    def scaled(self, scale: float, length: int, device: fr.Device) -> fr.Frequencies:
        return fr.ntk_by_parts(
            self.dim, self.base, scale=scale, original_len=self.original_len, device=device, **self.options
        )


class Yarn(ScaledRotary):
    """YaRN (arXiv 2309.00071): low frequencies are interpolated, high ones kept, the logits sharpened.

    Args:
        beta_fast, beta_slow: turns within original_len above which a frequency is kept, below which it is divided by
            the scale.
        ramp: how the blend between them runs, "code", "unrounded" or "paper"; see `frequencies.yarn`.
        attention_factor: what queries and keys are multiplied by at a scale; default 0.1 ln(scale) + 1.
        The others are those of `Scaled` and `Rotary`.

    Raises:
        ValueError: not 0 < beta_slow < beta_fast, an unknown ramp, or an attention_factor that is not positive; else
            as `Scaled` and `Rotary`.
    """

    knob = "beta_fast"

    def __init__(
        self,
        shape: Shape,
        *,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        ramp: Literal["code", "unrounded", "paper"] = "code",
        attention_factor: float | None = None,
        **scaled: Any,
    ) -> None:
        super().__init__(shape, **scaled)
        _check_limits(beta_slow=beta_slow, beta_fast=beta_fast)
        if ramp not in ("code", "unrounded", "paper"):
            raise ValueError(f"pe.ramp={ramp!r} must be 'code', 'unrounded' or 'paper'")
        _check_sharpening(attention_factor)
        self.options: dict[str, Any] = dict(
            beta_fast=beta_fast, beta_slow=beta_slow, ramp=ramp, attention_factor=attention_factor
        )

    def scaled(self, scale: float, length: int, device: fr.Device) -> fr.Frequencies:
        return fr.yarn(self.dim, self.base, scale=scale, original_len=self.original_len, device=device, **self.options)


class LongRope(ScaledRotary):
    """LongRoPE (arXiv 2402.13753): every frequency is divided by a factor of its own, and the logits sharpened.

    The factors are found by a search for each model; a model of Phi-3's kind brings its own. Without them the long
    ones are those of NTK-aware scaling, from which the published search sets out. Which list is used depends on the
    length of the call, with the consequences that `DynamicNTK` describes.

    Args:
        short_factor: divisors of the dim/2 frequencies for texts up to original_len; default 1.
        long_factor: the same beyond; default scale^(2i/(dim-2)), i = 0..dim/2-1.
        attention_factor: what queries and keys are multiplied by at a scale; default
            sqrt(1 + ln(scale) / ln(original_len)).
        The others are those of `Scaled` and `Rotary`.

    Raises:
        ValueError: a list of another length, or a number that is not positive; else as `Scaled` and `Rotary`.
    """

    cache_rotated = False

    def __init__(
        self,
        shape: Shape,
        *,
        short_factor: list[float] | None = None,
        long_factor: list[float] | None = None,
        attention_factor: float | None = None,
        **scaled: Any,
    ) -> None:
        super().__init__(shape, **scaled)
        for name, factors in (("short_factor", short_factor), ("long_factor", long_factor)):
            if factors is not None and len(factors) != self.dim // 2:
                raise ValueError(f"pe.{name} has {len(factors)} divisors, but a head has {self.dim // 2} turning pairs")
            for factor in factors or []:
                if not 0 < factor < float("inf"):
                    raise ValueError(f"pe.{name} holds {factor:g}: a divisor of a frequency must be a positive number")
        _check_sharpening(attention_factor)
        self.short_factor, self.long_factor, self.attention_factor = short_factor, long_factor, attention_factor

    def scaled(self, scale: float, length: int, device: fr.Device) -> fr.Frequencies:
        pairs = self.dim // 2
        last = max(pairs - 1, 1)
        return fr.longrope(
            self.dim,
            self.base,
            scale=scale,
            original_len=self.original_len,
            length=length,
            short_factor=self.short_factor or [1.0] * pairs,
            long_factor=self.long_factor or [scale ** (i / last) for i in range(pairs)],
            attention_factor=self.attention_factor,
            device=device,
        )


def _check_limits(**limits: float) -> None:
    """Two options, named, of which the first must be positive and below the second."""
    (low_name, low), (high_name, high) = limits.items()
    if not 0 < low < high < float("inf"):
        raise ValueError(f"pe.{low_name}={low:g} must lie between 0 and pe.{high_name}={high:g}")


def _check_sharpening(attention_factor: float | None) -> None:
    if attention_factor is not None and not 0 < attention_factor < float("inf"):
        raise ValueError(f"pe.attention_factor={attention_factor:g} must be a positive number, or null for the default")
