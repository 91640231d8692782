"""NAPE: ALiBi in half of the heads."""

import torch
from torch import Tensor

from model.position.bias import ALiBi


class NAPE(ALiBi):
    """NAPE (arXiv 2506.16640): ALiBi with slopes 1/h in the first half of the heads, no encoding in the others.

    Nothing is learned.
    """

    def slopes(self, device: torch.device) -> Tensor:
        h = torch.arange(1, self.n_head + 1, dtype=torch.float32, device=device)
        return torch.where(h <= self.n_head // 2, 1 / h, 0.0)
