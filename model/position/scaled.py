"""What every encoding with a scale has in common: at which scale it trains, and at which it reads longer text."""

import copy
from typing import Any, Self

from model.position.base import PositionEncoding, Shape


class Scaled(PositionEncoding):
    """Base of the scalings: how a model trained at `original_len` reads longer text.

    So `scale` is at work where the text is longer than `original_len`: in training at a longer train_len, and in the
    second reading of an evaluation. Training at `original_len` itself runs unscaled, bit for bit.

    Args:
        scale: target length / original length, at least 1.
        train_scale: train at this scale instead, whatever the lengths. From scratch the scaled frequencies are then
            merely other frequencies, and extrapolate worse than unscaled ones.
        original_len: length in tokens the weights were trained at before any extension; default train_len.

    Raises:
        ValueError: a scale or a length out of range.
    """

    unscaled = 1.0
    """The scale that changes nothing, and the smallest one allowed."""

    def __init__(
        self,
        shape: Shape,
        *,
        scale: float = 4.0,
        train_scale: float | None = None,
        original_len: int | None = None,
        **others: Any,
    ) -> None:
        super().__init__(shape, **others)
        for name, value in (("scale", scale), ("train_scale", train_scale)):
            if value is not None and not self.unscaled <= value < float("inf"):
                raise ValueError(f"pe.{name}={value:g} must be at least {self.unscaled:g}, which means no scaling")
        if original_len is not None and original_len < 2:
            raise ValueError(f"pe.original_len={original_len} must be at least 2 tokens")
        self.original_len = shape.train_len if original_len is None else original_len
        self.trained_len = max(shape.train_len, self.original_len)
        if train_scale is None:
            train_scale = scale if shape.train_len > self.original_len else self.unscaled
        self.scale, self.train_scale, self.active = scale, train_scale, train_scale

    @property
    def label(self) -> str:  # type: ignore[override]
        return f"scale {self.active:g}" + (", as trained" if self.active == self.train_scale else "")

    def at_scale(self, scale: float) -> Self:
        """This encoding reading at another scale; parameters are shared."""
        reading = copy.copy(self)
        reading.active = scale
        return reading

    def readings(self) -> list[Self]:
        return [self.at_scale(scale) for scale in dict.fromkeys((self.train_scale, self.scale))]

    def reading_for(self, length: int) -> Self:
        return self.at_scale(max(self.scale, self.train_scale) if length > self.trained_len else self.train_scale)

    def resolved(self) -> dict[str, Any]:
        return {**super().resolved(), "original_len": self.original_len}

    def describe(self) -> list[str]:
        plan = f"trains at scale {self.train_scale:g}" + (" (unscaled)" if self.train_scale == self.unscaled else "")
        if self.scale != self.train_scale:
            plan += f", is evaluated at scale {self.train_scale:g} and {self.scale:g}"
        return [f"{type(self).__name__}: {plan}; original length {self.original_len} tokens"]
