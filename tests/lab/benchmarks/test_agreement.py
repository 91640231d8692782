"""The comparison of training with kernels and without: above its own noise, and below what a small defect makes.

`pytest -m slow -s tests/benchmarks/test_agreement.py` prints both, on a CPU.
"""

import pytest
import torch

import model.gpt
from conf.schema import parse
from lab.benchmarks import Options, gpu, training
from ropewalk.app import cli


class ScaledGradient(torch.autograd.Function):
    """x; in the backward pass its gradient times `factor`."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("spec", gpu.AGREEING)
def test_a_gradient_that_is_off_by_a_percent_is_found_above_the_noise(spec, seed, monkeypatch, tmp_path):
    """In the gradient of every other tile of 64 keys: a factor of all of it would be lost in AdamW."""
    attend = model.gpt.attend

    def wrong(pe, q, k, v, state, ctx):
        is_wrong = torch.arange(k.size(2)) // 64 % 2 == 1
        factor = torch.where(is_wrong, 1.01, 1.0)[:, None]
        return attend(pe, q, ScaledGradient.apply(k, factor), v, state, ctx)

    class Job(training.Job):
        def __init__(self, cfg):
            self.wrong = cfg.trainer.kernels  # the same attention with the defect stands for kernels
            trainer = cfg.trainer.model_copy(update={"kernels": False})
            super().__init__(cfg.model_copy(update={"trainer": trainer, "seed": seed}))
            self.net.kernels = self.wrong

    def steps_of(job):
        job.net.kernels = False
        with pytest.MonkeyPatch.context() as patch:
            if job.wrong:
                patch.setattr(model.gpt, "attend", wrong)
            yield from training.steps_of(job)

    monkeypatch.setattr(gpu, "steps_of", steps_of)
    monkeypatch.setattr(gpu, "Job", Job)
    with cli.composed("check_gpu", "device=cpu", f"data.cache_dir={tmp_path}") as config:
        row = gpu.agreement(parse(Options, cli.plain(config)), spec)
    print(spec, seed, row)
    noise = float(row[gpu.AGREEMENT_COLUMNS[3]])
    difference = float(row["largest difference"])
    assert noise < gpu.MAX_DIFFERENCE / 3
    assert difference > 5 * gpu.MAX_DIFFERENCE
    assert row["right"] == "**no**"
