"""Muon for matrices beside AdamW for all else, as one optimizer.

For: optim=muon. Shown: docs/log/learning_rates.md, on Markov texts. Leaves: when PyTorch has both in one optimizer.
"""

from typing import Any

import torch
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """PyTorch's Muon (K. Jordan et al., 2024) for the matrices of attention and MLPs, AdamW for all other parameters.

    Both have one learning rate and weight decay: Muon's update is scaled to the size of AdamW's (arXiv 2502.16982).

    Args:
        params: groups of (name, parameter), as `make_optimizer` has them.
        momentum: of Muon. AdamW has `betas`.
    """

    def __init__(
        self,
        params: list[dict[str, Any]],
        lr: float,
        *,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        groups: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for group in params:
            for is_hidden, chosen in groups.items():
                named = [(name, p) for name, p in group["params"] if is_hidden_matrix(name, p) is is_hidden]
                if named:
                    chosen.append(group | {"params": named, "muon": is_hidden})
        # A network has parameters of both kinds.
        self.parts: dict[bool, torch.optim.Optimizer] = {
            True: torch.optim.Muon(groups[True], lr=lr, momentum=momentum, adjust_lr_fn="match_rms_adamw"),
            False: torch.optim.AdamW(groups[False], lr=lr, betas=betas),
        }
        super().__init__([group for part in self.parts.values() for group in part.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        # Groups and state are those of this optimizer: whoever saves, loads or changes them sees one.
        for is_hidden, part in self.parts.items():
            part.param_groups = [group for group in self.param_groups if group["muon"] is is_hidden]
            part.state = self.state
            part.step()


def is_hidden_matrix(name: str, p: Tensor) -> bool:
    """Whether a parameter is a matrix of attention or of an MLP: no embedding, no convolution, of no encoding."""
    return p.ndim == 2 and name.endswith(".weight") and (".attn." in name or ".mlp." in name)
