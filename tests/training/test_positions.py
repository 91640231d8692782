"""Positions of long texts for short sequences: drawn as the papers say, and at work in training."""

from collections import Counter
from contextlib import nullcontext
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from conftest import rows_of
from scipy.stats import chisquare

from train import Training
from training.positions import draw_positions

TO_128 = ["trainer.max_position=128"]


def drawn(kind, length, max_position):
    """How often 4,000 draws give each list of positions."""
    torch.manual_seed(0)
    found = [draw_positions(kind, length, max_position, torch.device("cpu")) for _ in range(4000)]
    assert {reach for _, reach in found} == {max_position}
    return Counter(tuple(pos.tolist()) for pos, _ in found)


def test_they_are_drawn_as_the_papers_say():
    samples = drawn("random", 3, 7)
    assert sorted(samples) == sorted(combinations(range(7), 3))
    assert chisquare(list(samples.values())).pvalue > 1 / 3000
    chunks = drawn("pose", 5, 8)
    first_and_skip = [(first, skip) for first in (1, 2, 3) for skip in range(4)]
    assert set(chunks) == {(*range(first), *range(first + skip, 5 + skip)) for first, skip in first_and_skip}
    del chunks[0, 1, 2, 3, 4]  # no skip, three times as often
    assert chisquare(list(chunks.values())).pvalue > 1 / 3000


def test_training_sees_them(train):
    options = {"consecutive": [], "pose": TO_128, "random": TO_128, "no room": ["trainer.max_position=16"]}
    first = {}
    for name, more in options.items():
        kind = "random" if name == "no room" else name
        run = ["pe=rope", "trainer.max_steps=1", "eval.lengths=[1]", "eval.variants=[]", f"trainer.positions={kind}"]
        assert train(*run, *more, f"name={name}").code == 0
        first[name] = rows_of(train.runs / name)[0]["train/loss"]
    assert first["no room"] == first["consecutive"]
    assert len(set(first.values())) == 3


class AllSeenError(Exception):
    """Ends a step after its last micro-batch."""


def draws(world_size, grad_accum_steps, step=3):
    """What each micro-batch of a step draws at random, in the order of its samples."""
    drawn = {}
    trainer = SimpleNamespace(grad_accum_steps=grad_accum_steps, max_steps=9, strategy="ddp")
    optim = SimpleNamespace(lr=1.0, min_lr_ratio=0.1, warmup_steps=1)
    for rank in range(world_size):
        numbers = iter(range(rank, world_size * grad_accum_steps, world_size))  # as `batch_indices` divides samples

        def backward(number):
            drawn[number] = torch.rand(3).tolist()
            return torch.zeros(2)

        def end(*_, **__):
            raise AllSeenError

        fabric = SimpleNamespace(world_size=world_size, global_rank=rank, device="cpu", all_reduce=end)
        fabric.no_backward_sync = lambda *_, **__: nullcontext()
        training = SimpleNamespace(
            fabric=fabric, cfg=SimpleNamespace(seed=7, trainer=trainer, optim=optim), model=None, backward=backward,
            optimizer=SimpleNamespace(param_groups=[]),
        )  # fmt: skip
        with pytest.raises(AllSeenError):
            Training.step(training, step, ((number,) for number in numbers))
    return [drawn[number] for number in sorted(drawn)]


def test_what_is_drawn_at_random_does_not_depend_on_the_number_of_ranks():
    alone = draws(1, 4)
    assert len({tuple(values) for values in alone}) == 4
    assert draws(2, 2) == draws(4, 1) == alone
    assert draws(1, 4, step=4) != alone
