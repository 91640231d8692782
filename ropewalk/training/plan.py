"""What differs between the steps of a run: the encodings that read its sequences. By default nothing does."""

from conf.schema import Config
from model import position
from model.gpt import GPT
from model.position.base import Shape
from model.position.network import Encodings, with_parameters_of, with_window
from ropewalk.training.positions import draw_window


class Plan:
    """The encodings of each step: those of its stage of training, with short windows where the step draws them.

    An encoding derives tables and scales from the training length in its constructor. So that a stage trains as a run
    of its length would, it gets encodings of its own, with the parameters of the network's. They are made once, so
    that `torch.compile` has a graph for each stage and not for each step.
    """

    def __init__(self, cfg: Config, net: GPT) -> None:
        self.cfg = cfg
        self.stages: list[Encodings] = []
        for stage in cfg.stages:
            encodings = position.build_encodings(stage.pe, Shape.of(cfg.model, stage.train_len))
            self.stages.append(with_parameters_of(encodings, net.encodings))
        self.stages.append(net.encodings)  # after the stages
        short = cfg.trainer.short_window
        self.with_short_windows = [with_window(encodings, short) for encodings in self.stages] if short else []

    @property
    def encodings(self) -> Encodings:
        """Those of all steps."""
        return [pe for encodings in (*self.stages, *self.with_short_windows) for pe in encodings]

    def at(self, step: int) -> Encodings:
        """The encodings of optimizer step `step`, counted from 1."""
        stage = self.cfg.stage_of(step - 1)
        window = draw_window(self.cfg.trainer.short_window, seed=self.cfg.seed, step=step)
        return self.stages[stage] if window is None else self.with_short_windows[stage]
