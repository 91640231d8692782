"""What differs between the steps of a run: the encodings that read its sequences, and what it draws of positions.

By default nothing differs.
"""

from itertools import chain
from typing import Literal

import torch

from conf.schema import Config
from model.gpt import GPT
from model.layout import Positions
from model.position import Shape, build_encodings
from model.position.network import Encodings, with_parameters_of


class Schedule:
    """The encodings of each step: those of its stage of training.

    An encoding derives tables and scales from the training length in its constructor. So that a stage trains as a run
    of its length would, it gets encodings of its own, with the parameters of the network's. They are made once, so
    that `torch.compile` has a graph for each stage and not for each step.
    """

    def __init__(self, cfg: Config, net: GPT) -> None:
        self.cfg = cfg
        self.stages: list[Encodings] = []
        for stage in cfg.stages:
            encodings = build_encodings(stage.pe, Shape.of(cfg.model, stage.train_len))
            self.stages.append(with_parameters_of(encodings, net.encodings))
        self.stages.append(net.encodings)  # after the stages

    @property
    def encodings(self) -> Encodings:
        """Those of all steps."""
        return [*chain(*self.stages)]

    def at(self, step: int) -> Encodings:
        """The encodings of optimizer step `step`, counted from 1."""
        return self.stages[self.cfg.stage_of(step - 1)]


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
        pos[first_chunk:] += torch.randint(max_position - length + 1, ())  # what is skipped
    return pos.to(device), max_position
