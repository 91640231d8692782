"""The optimizer's groups, its schedule, and clipping, against PyTorch's own."""

import pytest
import torch
from conftest import build_gpt

from conf.schema import Optim
from ropewalk.training.optimizer import clip_gradients, learning_rate, make_optimizer

OPTIM = Optim(
    lr=0.01, min_lr_ratio=0.1, warmup_steps=3, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=None, decay_share=0.4
)  # fmt: skip


@pytest.mark.parametrize("named", [False, True])
def test_matrices_decay_and_of_encodings_what_they_name(named):
    net = build_gpt("cope")
    first, *others = net.distinct_encodings
    first.decayed = ()
    if named:
        first.decayed = tuple(name for name, _ in first.named_parameters())
    spared = set()
    for pe in others if named else [first, *others]:
        spared.update(pe.parameters())
    decays = of_parameters(make_optimizer(net, OPTIM), "weight_decay")
    for p in net.parameters():
        expected = 0.1
        if p.ndim != 2 or p in spared:
            expected = 0.0
        assert decays[p] == expected


def of_parameters(optimizer, option):
    """An option of the optimizer by parameter."""
    values = {}
    for group in optimizer.param_groups:
        values.update(dict.fromkeys(group["params"], group[option]))
    return values


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_the_schedule_is_a_warm_up_and_a_decay(name):
    p = torch.nn.Parameter(torch.zeros(1))
    adamw = torch.optim.AdamW([p], lr=0.01)
    schedulers = torch.optim.lr_scheduler
    warm = schedulers.LinearLR(adamw, 1 / 3, 1.0, 2)
    if name == "cosine":
        later = [schedulers.CosineAnnealingLR(adamw, 6, eta_min=0.001)]
    elif name == "linear":
        later = [schedulers.LinearLR(adamw, 1.0, 0.1, 6)]
    else:  # from step 5 on, whose rate is the last whole one, in 4 of 10 steps
        later = [schedulers.ConstantLR(adamw, 1.0, 99), schedulers.LinearLR(adamw, 1.0, 0.1, 4)]
    schedule = schedulers.SequentialLR(adamw, [warm, *later], [3, 5][: len(later)])
    optim = OPTIM.model_copy(update={"schedule": name})
    for step in range(10):
        assert learning_rate(step, optim, 10) == pytest.approx(adamw.param_groups[0]["lr"], rel=1e-12)
        adamw.step()
        schedule.step()
    assert learning_rate(50, optim, 10) == pytest.approx(0.001)
    # A share of nothing leaves the rate whole to the end: shorter budgets branch off such a run.
    constant = optim.model_copy(update={"schedule": "wsd", "decay_share": 0.0})
    assert learning_rate(8, constant, 10) == 0.01


def test_encodings_have_a_learning_rate_of_their_own():
    net = build_gpt("cope")
    optim = OPTIM.model_copy(update={"pe_lr_scale": 8.0})
    expected = dict.fromkeys(net.parameters(), 1.0)
    for pe in net.distinct_encodings:
        expected.update(dict.fromkeys(pe.parameters(), 8.0))
    assert of_parameters(make_optimizer(net, optim), "lr_scale") == expected


@pytest.mark.parametrize("max_norm", [0.5, 1e9, None])
def test_clipping_is_pytorchs(max_norm):
    net = torch.nn.Linear(7, 5)
    theirs = torch.nn.Linear(7, 5)
    for p, q in zip(net.parameters(), theirs.parameters(), strict=True):
        p.grad = torch.linspace(-1, 2, p.numel()).view(p.shape)
        q.grad = 3 * p.grad
    norm = clip_gradients(net, torch.tensor(3.0), max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm or torch.inf)
    assert norm == pytest.approx(expected.item(), rel=1e-6)
    for p, q in zip(net.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=0)
