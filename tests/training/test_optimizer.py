"""The optimizer's groups, its schedule, and clipping, against PyTorch's own."""

import pytest
import torch
from conftest import build_gpt

from conf.schema import Optim
from training.optimizer import clip_gradients, learning_rate, make_optimizer

OPTIM = Optim(
    lr=0.01, min_lr_ratio=0.1, warmup_steps=3, weight_decay=0.1, beta1=0.9, beta2=0.95, grad_clip=None, decay_share=0.4
)  # fmt: skip


@pytest.mark.parametrize("named", [False, True])
def test_matrices_decay_and_of_encodings_what_they_name(named):
    net = build_gpt("cope")
    own = {name: id(p) for name, p in net.encodings[0].named_parameters()}
    net.encodings[0].decayed = tuple(own) if named else ()
    decay = {id(p): group["weight_decay"] for group in make_optimizer(net, OPTIM).param_groups for p in group["params"]}
    others = {id(p) for pe in net.distinct_encodings[1:] for p in pe.parameters()}
    for p in net.parameters():
        spared = id(p) in others or (id(p) in own.values() and not named)
        assert decay[id(p)] == (0.1 if p.ndim == 2 and not spared else 0.0)


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
    of_encodings = {id(p) for pe in net.distinct_encodings for p in pe.parameters()}
    groups = make_optimizer(net, OPTIM.model_copy(update={"pe_lr_scale": 8.0})).param_groups
    scales = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    assert scales == {id(p): 8.0 if id(p) in of_encodings else 1.0 for p in net.parameters()}


@pytest.mark.parametrize("max_norm", [0.5, 1e9, None])
def test_clipping_is_pytorchs(max_norm):
    nets = [torch.nn.Linear(7, 5) for _ in range(2)]
    for net in nets:
        for p in net.parameters():
            p.grad = torch.linspace(-1, 2, p.numel()).view(p.shape)
    norm = clip_gradients(nets[0], torch.tensor(3.0), max_norm)
    for p in nets[1].parameters():
        p.grad *= 3
    expected = torch.nn.utils.clip_grad_norm_(nets[1].parameters(), max_norm or torch.inf)
    assert norm == pytest.approx(expected.item(), rel=1e-6)
    for p, q in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=0)
