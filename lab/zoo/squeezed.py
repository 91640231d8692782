"""Training-free readings of RoPE's weights that use positions of the training length for longer text in other ways."""

import math
from typing import Any

import torch
from torch import Tensor

from model.position.base import Count, Positive, PositiveShare, Shape
from model.position.windowed import NearWindow


class STRING(NearWindow):
    """STRING (arXiv 2410.18745, github.com/HKUNLP/STRING): keys beyond the window move up to distance `local`.

    The largest distances are the least trained, and this reading does without them. So it helps within original_len
    already; beyond original_len + near_window - local tokens the farthest keys are at distances that were never met.

    Args:
        local: the distance of the first key beyond the window, in tokens; default original_len / 32.
    """

    divisor = 3

    def __init__(self, shape: Shape, *, local: Count | None = None, **options: Any) -> None:
        super().__init__(shape, **options)
        self.local = local or max(1, self.original_len // 32)
        if self.local > self.near_window:
            raise ValueError(f"pe.local={self.local} must be at most pe.near_window={self.near_window}")

    def positions(self, i: Tensor, length: int) -> list[tuple[Tensor, Tensor]]:
        return [(i, i), (i - (self.near_window - self.local), i)]


class LaMPE(NearWindow):
    """LaMPE (arXiv 2508.02308, github.com/scar-on/LaMPE): the room for distances follows the length of the text.

    Near distances are exact; those between follow positions p M / (length - 1), rounded down; the last `tail` of all
    grow by 1 a token again. M = capacity original_len sigmoid(steepness (length / original_len - midpoint)), rounded
    down. A text of up to original_len is read exactly. Positions follow the length, as with DynamicNTK.

    The authors fit the sigmoid for each model. The defaults are their fit for Llama 3.

    Args:
        tail: the number of largest distances that are not squeezed; default original_len / 40.
        capacity: what M / original_len tends to in long text.
        midpoint: length / original_len at which M is half of that.
        steepness: how fast M grows there.
    """

    asks_length = True
    divisor = 8

    def __init__(
        self, shape: Shape, *, tail: Count | None = None, capacity: PositiveShare = 0.757, midpoint: Positive = 2.87,
        steepness: Positive = 0.86, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(shape, **options)
        self.tail = tail or max(1, self.original_len // 40)
        self.capacity = capacity
        self.midpoint = midpoint
        self.steepness = steepness
        needed = math.ceil(capacity * self.original_len) + self.near_window + self.tail
        if needed > self.original_len:
            parts = f"pe.near_window={self.near_window} and pe.tail={self.tail} take {needed} positions"
            raise ValueError(f"pe.capacity={capacity:g}, {parts}, more than pe.original_len={self.original_len}")

    def positions(self, i: Tensor, length: int) -> list[tuple[Tensor, Tensor]]:
        # A tensor, not a float, so that torch.compile has one graph for all lengths.
        tokens = i.new_full((), length)
        filled = torch.sigmoid(self.steepness * (tokens / self.original_len - self.midpoint))
        room = (self.capacity * self.original_len * filled).floor()  # M

        def mapped(p: Tensor | float) -> Tensor:
            return (p * room / (tokens - 1)).floor()

        # Both moves make the zones meet: at distance near_window, and where key 0 is as far back as the tail begins.
        ahead = self.near_window - 1 - mapped(self.near_window)
        last = tokens - 1 - self.tail
        back = last - mapped(last) - ahead
        return [(i, i), (mapped(i) + ahead, mapped(i)), (i - back, i)]

    def zone(self, i: Tensor, j: Tensor, length: int) -> Tensor:
        far = super().zone(i, j, length)
        if length <= self.original_len:
            return torch.zeros_like(far)
        return far * torch.where(i - j < length - self.tail, 1, 2)
