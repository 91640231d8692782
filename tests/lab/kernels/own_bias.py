"""A user's own bias, which knows nothing of kernels; and two that kernels must not serve."""

import os
import signal

import torch

from model.position.bias import DistanceBias


class Own(DistanceBias):
    """Falls with the root of the distance."""

    def __init__(self, shape, **options):
        super().__init__(shape, **options)
        self.slope = torch.nn.Parameter(torch.zeros(shape.n_head))

    def reset_parameters(self, generator):
        torch.nn.init.ones_(self.slope)

    def at(self, distance):
        return -self.slope[:, None] * distance.float().sqrt()


class Kills(Own):
    """Kills any process but the one that made it."""

    def __init__(self, shape, **options):
        super().__init__(shape, **options)
        self.home = os.getpid()

    def at(self, distance):
        if os.getpid() != self.home:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().at(distance)


class Wrong(Own):
    """Is another function whenever a row of all distances is asked for, as by kernels."""

    def at(self, distance):
        row = super().at(distance)
        return row if distance[0] else 1.5 * row
