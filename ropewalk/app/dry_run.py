"""dry_run=true: what a run would take, before it takes it."""

import time
from typing import TYPE_CHECKING

from model.size import flops_per_token
from ropewalk.evaluation import loop
from ropewalk.training.hardware import peak_memory

if TYPE_CHECKING:
    from train import Training

_STEPS = 3  # that are timed, after one that is not


def forecast(training: "Training") -> list[str]:
    """Return lines about the time of a training and its evaluation, measured in a few steps; they change the weights.

    All ranks call it.
    """
    cfg = training.cfg
    steps = cfg.trainer.max_steps
    batches = training.micro_batches(start_step=0)
    for step in range(_STEPS + 1):
        _, norm = training.step(step + 1, batches, training.plan.at(1))
        float(norm)  # waits for the device
        if step == 0:  # compiles and allocates
            started = time.perf_counter()
    seconds = (time.perf_counter() - started) / _STEPS

    # Reading takes a third of the operations of training on it.
    net = training.net
    jobs = [job for plan in loop.plans(training.data, cfg) for job in plan.jobs]
    readings = len(loop.readings(net, cfg, training.hardware))
    operations = readings * sum(job.tokens * flops_per_token(net, job.length) for job in jobs) / 3
    evaluation = seconds * operations / (cfg.step_tokens * flops_per_token(net, cfg.train_len))
    tokens = readings * sum(job.tokens for job in jobs)
    return [
        f"memory: a process holds {peak_memory(training.hardware.device) / 2**30:,.2f} GiB at most in these steps",
        f"a step takes {seconds:.3g} s, {steps} of them about {steps * seconds / 60:.1f} minutes",
        f"evaluation, readings: {readings}; {tokens:,} tokens, about {evaluation / 60:.1f} minutes",
    ]
