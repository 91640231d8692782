"""A user's own bias, which knows nothing of kernels; and some whose check does not end well."""

import os
import signal
import time

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


class Planted(Own):
    """Does harm in another process than the one that made it."""

    def __init__(self, shape, **options):
        super().__init__(shape, **options)
        self.home = os.getpid()

    def at(self, distance):
        if os.getpid() != self.home:
            self.harm()
        return super().at(distance)


class Hung(Planted):
    def harm(self):
        time.sleep(3600)


class Killed(Planted):
    def harm(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Crashed(Planted):
    def harm(self):
        raise RuntimeError("an illegal memory access was encountered")


class Wrong(Own):
    """Is another function whenever a row of all distances is asked for, as by kernels."""

    def at(self, distance):
        row = super().at(distance)
        return row if distance[0] else 1.5 * row
