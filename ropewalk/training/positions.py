"""What a training step draws of positions: those of long texts for short sequences; and the length of windows."""

import random
from typing import Literal

import torch

from model.reading import Positions


def draw_positions(
    kind: Literal["consecutive", "random", "pose"], length: int, max_position: int | None, device: torch.device
) -> Positions | None:
    """Draw the positions of `length` tokens in a text of `max_position`, by torch's default generator on the CPU.

    Args:
        kind: "consecutive" draws nothing. "random" is a sorted sample without replacement (Ruoss et al.,
            arXiv 2305.16843). "pose" is two chunks of consecutive positions (PoSE, Zhu et al., arXiv 2309.10400,
            github.com/dwzhu-pku/PoSE): the first, of 1 to half of the tokens, begins at 0, the second anywhere
            after it. The tokens are consecutive in the data; only their positions skip.
        length: tokens of a sequence, T.
        max_position: length of the text that the positions come from, at least `length`.
        device: where the positions are put.

    Returns:
        Positions int64 [T] and the text's length; None for "consecutive", which means 0, 1, 2, ...
    """
    if kind == "consecutive":
        return None
    assert max_position is not None  # the configuration was checked
    if kind == "random":
        pos = torch.randperm(max_position)[:length].sort().values
    else:
        pos = torch.arange(length)
        first_chunk = int(torch.randint(1, (length + 1) // 2 + 1, ()))
        skipped = torch.randint(max_position - length + 1, ())
        pos[first_chunk:] += skipped
    return pos.to(device), max_position


def draw_window(short: int | None, *, seed: int, step: int) -> int | None:
    """Draw the longest window of optimizer step `step`: `short` in every second step on average; None: no limit.

    After SWAX (arXiv 2509.24552). A function of the run's seed and the step alone, so that all ranks agree and a
    resumed run repeats it.
    """
    if short is None or random.Random(f"{seed} {step}").random() < 0.5:
        return None
    return short
