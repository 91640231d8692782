"""Positions as training data: short sequences with the positions of long texts, for any encoding."""

from typing import Literal

import torch

from model.attention import Positions


def draw_positions(
    kind: Literal["consecutive", "random", "pose"], length: int, max_position: int | None, device: torch.device
) -> Positions | None:
    """Positions of `length` tokens in a text of `max_position`, drawn by torch's default generator on the CPU.

    consecutive: None, for 0, 1, 2, ...: nothing is drawn.
    random: a sample without replacement (Ruoss et al., arXiv 2305.16843).
    pose: two chunks (PoSE, Zhu et al., arXiv 2309.10400, github.com/dwzhu-pku/PoSE): the first, of 1 to half of the
    tokens, begins at 0, the second anywhere behind it. The text itself has no gap.
    """
    if kind == "consecutive":
        return None
    assert max_position is not None  # the configuration was checked
    if kind == "random":
        pos = torch.randperm(max_position)[:length].sort().values
    else:
        pos = torch.arange(length)
        first = int(torch.randint(1, (length + 1) // 2 + 1, ()))
        pos[first:] += torch.randint(max_position - length + 1, ())
    return pos.to(device), max_position
