"""The Lightning Trainer of a run."""

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch

from model.checkpoints import AtomicCheckpointIO
from model.gpt import GPT
from model.lit import LitGPT
from model.machine import Machine

# Lightning advertises and repeats itself; what a user needs to know, this project says.
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
for _message in (
    "does not have many workers",  # batches are cut from memory-mapped files
    "your dataloader is not resumable",  # its sampler begins where the checkpoint ends
    "isinstance.treespec, LeafSpec.",  # Lightning's own use of torch
):
    warnings.filterwarnings("ignore", message=f".*{_message}")


def compile_or_explain(net: GPT, machine: Machine, batch: int, length: int) -> str | None:
    """Compile `net` in place and try it as it will be trained; if that fails, leave it eager and return why."""
    if machine.precision == "bf16-true":
        net.bfloat16()  # as Lightning will
    net.compile()
    try:
        idx = torch.zeros(batch, length, dtype=torch.int64, device=machine.device)
        with torch.autocast(machine.device, torch.bfloat16, enabled=machine.precision == "bf16-mixed"):
            net.loss(idx, idx).backward()
        net.zero_grad(set_to_none=True)
    except Exception as error:  # the compiler's errors have no common class
        net._compiled_call_impl = None
        return str(error).strip().splitlines()[0]
    return None


def build_module(net: GPT, strategy: str, world_size: int, *, compile: bool, **options: Any) -> tuple[LitGPT, Any]:
    """What trains `net`, and Lightning's strategy for it. `options` go to LitGPT; `compile` is for shards alone."""
    if strategy == "fsdp":
        from model.shards import ShardedGPT, Shards

        return ShardedGPT(net, compile=compile, **options), Shards(world_size)
    return LitGPT(net, **options), "ddp" if world_size > 1 else "auto"


def build_trainer(
    run: Path,
    machine: Machine,
    *,
    devices: int | str,
    num_nodes: int,
    strategy: Any,
    max_steps: int,
    accumulate: int,
    callbacks: list[L.Callback],
) -> L.Trainer:
    """A Trainer that only runs the loop: validation, logging, checkpoints and signals are ours."""
    trainer = L.Trainer(
        default_root_dir=run,
        accelerator="gpu" if machine.device == "cuda" else machine.device,
        devices=devices,
        num_nodes=num_nodes,
        strategy=strategy,
        precision=machine.precision,  # type: ignore[arg-type]
        max_steps=max_steps,
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        callbacks=callbacks,
        logger=False,
        plugins=[AtomicCheckpointIO()],
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        use_distributed_sampler=False,  # data.sampler deals out the samples
    )
    # Lightning's handlers would talk to other processes in the middle of what they do, or requeue a job of Slurm.
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    return trainer
