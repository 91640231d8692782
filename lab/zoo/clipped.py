"""Clipped RoPE: the lowest frequencies are made lower still, smoothly.

For: a network that reads longer text than it was trained on. Has shown: see docs/log/inkling.md. Leaves: if it is never
told apart from `p_rope`, whose frequencies end abruptly.
"""

import math

import torch
from torch import Tensor

from model.position.ops import Device
from model.position.rotary import PRope, Rotary


class ClippedRoPE(PRope):
    """Clipped RoPE (arXiv 2602.05258), which its authors call CoPE: the frequencies that p-RoPE sets to zero are
    multiplied by half a period of a cosine instead, from 1 for the first of them to 0 for the last.

    The CoPE of arXiv 2405.18719 is another encoding.
    """

    def frequencies(self, length: int, device: Device = None) -> Tensor:
        inv_freq = Rotary.frequencies(self, length, device) / self.factor
        kept, clipped = inv_freq.tensor_split([self.kept_pairs])
        angle = torch.linspace(0, math.pi, len(clipped), dtype=inv_freq.dtype, device=device)
        return torch.cat((kept, clipped * (1 + angle.cos()) / 2))
