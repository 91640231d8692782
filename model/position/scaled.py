"""What every encoding with a scale has in common: at which scale it trains, and at which it reads longer text."""

from typing import Any

from model.position.base import PositionEncoding, Shape


class Scaled(PositionEncoding):
    """Base of the scalings: how a model trained at `original_len` reads longer text.

    Training at a train_len up to `original_len` runs unscaled, bit for bit; training beyond it runs at `scale`. An
    evaluation measures both: see `scales`.

    Args:
        scale: target length / original length, at least 1.
        train_scale: train at this scale instead, whatever the lengths. From scratch the scaled frequencies are then
            merely other frequencies, and extrapolate worse than unscaled ones.
        original_len: length in tokens the weights were trained at before any extension; default train_len.

    Raises:
        ValueError: a scale or a length out of range.
    """

    zero_shot: tuple[str, ...] = ()  # its own scales are measured
    unscaled = 1.0
    """The scale that changes nothing, and the smallest one allowed."""

    def __init__(
        self,
        shape: Shape,
        *,
        scale: float = 4.0,
        train_scale: float | None = None,
        original_len: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(shape, **options)
        for name, value in (("scale", scale), ("train_scale", train_scale)):
            if value is not None and not self.unscaled <= value < float("inf"):
                raise ValueError(f"pe.{name}={value:g} must be at least {self.unscaled:g}, which means no scaling")
        if original_len is not None and original_len < 2:
            raise ValueError(f"pe.original_len={original_len} must be at least 2 tokens")
        self.original_len = shape.train_len if original_len is None else original_len
        self.scale, self.train_scale = scale, train_scale
        if train_scale is None:
            train_scale = scale if shape.train_len > self.original_len else self.unscaled
        self.scales = tuple(dict.fromkeys((train_scale, scale)))
        self.active_scale = train_scale

    def describe(self) -> list[str]:
        trained = self.scales[0]
        plan = f"trains at scale {trained:g}" + (" (unscaled)" if trained == self.unscaled else "")
        if len(self.scales) > 1:
            plan += f", is evaluated at scale {trained:g} and {self.scale:g}"
        return [f"{type(self).__name__}: {plan}; original length {self.original_len} tokens"]
