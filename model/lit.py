"""The LightningModule: loss, optimizer, schedule and clipping around a GPT."""

import math
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from model.gpt import GPT

DEFERRED = ("cuda",)  # devices that looking at a number would stall: they are asked only now and then


class NonFiniteError(ValueError):
    """The loss, its gradient or a weight is infinite or not a number."""


class LitGPT(L.LightningModule):
    """Trains `net` with AdamW.

    Args:
        net: the network.
        seed: dropout in micro-batch k is drawn from (seed, k, rank), so that a resumed run repeats it and nothing
            else that draws random numbers can change it.
        max_steps: optimizer steps of the whole run.
        lr, min_lr_ratio, warmup_steps: linear warm-up to lr, then a cosine to min_lr_ratio * lr at the last step.
        weight_decay: of matrices. Norms, biases and position encodings are left alone: pulling an encoding towards
            zero would favour those without parameters.
        beta1, beta2: of AdamW. grad_clip: largest gradient norm, or None.
    """

    def __init__(
        self,
        net: GPT,
        *,
        seed: int,
        max_steps: int,
        lr: float,
        min_lr_ratio: float,
        warmup_steps: int,
        weight_decay: float,
        beta1: float,
        beta2: float,
        grad_clip: float | None,
    ) -> None:
        super().__init__()
        self.net, self.seed, self.max_steps = net, seed, max_steps
        self.lr, self.min_lr_ratio, self.warmup_steps = lr, min_lr_ratio, warmup_steps
        self.weight_decay, self.betas, self.grad_clip = weight_decay, (beta1, beta2), grad_clip
        self.grad_norm = torch.tensor(0.0)  # before clipping, of the latest step
        self.bad_step = torch.tensor(0)  # the first whose gradient was not finite; none: 0
        # Scored targets, as shares of a micro-batch: of this step, and with their losses since the last logged step.
        self.step_share, self.loss_sum, self.loss_share = torch.zeros(3).unbind()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        # A run is one epoch, so batch_idx counts micro-batches from its very start. Mixed by odd constants.
        torch.manual_seed((self.seed * 0x9E3779B1 + batch_idx * 0x85EBCA77 + self.global_rank * 0xC2B2AE3D) % 2**63)
        loss = self.net.loss(*batch)
        share = (batch[1] >= 0).float().mean()
        self.step_share = self.step_share.to(share.device) + share  # stays on the device: no sync
        self.loss_sum = self.loss_sum.to(share.device) + loss.detach().float() * share
        self.loss_share = self.loss_share.to(share.device) + share
        # An infinite loss may have a finite gradient. Made NaN here, it reaches the norm, and all processes with it.
        return loss * torch.where(loss.detach().isfinite(), share, math.nan)

    def schedule(self, step: int) -> float:
        """Learning rate of optimizer step `step` (0-based) as a share of lr."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.max_steps - 1 - self.warmup_steps)
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    def configure_optimizers(self) -> Any:
        encodings = {id(p) for p in self.net.positions.parameters()}
        matrices: list[torch.nn.Parameter] = []
        others: list[torch.nn.Parameter] = []
        for p in self.net.parameters():
            (matrices if p.ndim >= 2 and id(p) not in encodings else others).append(p)
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]
        fused = self.device.type in ("cpu", "cuda")
        optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=self.lr, betas=self.betas, fused=fused)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.schedule)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None) -> None:
        """Make the gradient the mean over all scored targets of the step, on every process and in every micro-batch,
        and clip it.

        So far each micro-batch counts by its share of scored targets: the sum of their gradients was divided by the
        number of micro-batches, and now is by the sum of their shares. In text all shares are 1, and so is `scale`.
        """
        share = self.trainer.strategy.reduce(self.step_share, reduce_op="sum")
        scale = self.trainer.accumulate_grad_batches * self.trainer.world_size / share
        self.step_share = torch.zeros_like(self.step_share)
        gradients = [p.grad for p in self.net.parameters() if p.grad is not None]
        total = torch.nn.utils.get_total_norm(gradients)
        if hasattr(total, "full_tensor"):  # of all shards
            total, gradients = total.full_tensor(), [g.to_local() for g in gradients]  # type: ignore[attr-defined]
        self.grad_norm = norm = total * scale
        largest = math.inf if self.grad_clip is None else self.grad_clip
        torch._foreach_mul_(gradients, scale * (largest / (norm + 1e-6)).clamp(max=1.0))  # as clip_grad_norm_ has it
        bad_step = self.bad_step.to(norm.device)
        bad = ~norm.isfinite() & (bad_step == 0)
        self.bad_step = torch.where(bad, self.trainer.global_step + 1, bad_step)
        if norm.device.type in DEFERRED:  # as a GradScaler does: at 1 the fused optimizer leaves everything as it is
            optimizer.found_inf = (self.bad_step > 0).float()
        else:
            self.check_finite()

    def assemble(self) -> None:
        """Bring the network that is evaluated and saved up to date; see `model.shards`. Called on every process."""

    def release(self) -> None:
        """It has been evaluated."""

    def check_finite(self) -> None:
        """Raise NonFiniteError if the gradient of any step so far was not finite. Neither that step nor a later one
        has changed anything."""
        if step := int(self.bad_step):
            raise self._not_finite("the loss or its gradient became infinite or NaN", step)

    def check_weights(self) -> None:
        """Raise NonFiniteError if the latest step, with a finite gradient, took a weight beyond the largest number."""
        finite = [p.detach().isfinite().all() for p in self.net.parameters()]
        finite = [f.full_tensor() if hasattr(f, "full_tensor") else f for f in finite]
        if not torch.stack(finite).all():
            raise self._not_finite("a weight became infinite or NaN", self.trainer.global_step)

    def _not_finite(self, what: str, step: int) -> NonFiniteError:
        return NonFiniteError(
            f"{what} in step {step}: lower optim.lr={self.lr:g}, raise optim.warmup_steps={self.warmup_steps}, or use "
            f"trainer.precision=32; python scripts/replay.py run={self.trainer.default_root_dir} step={step} shows its "
            f"batch"
        )
