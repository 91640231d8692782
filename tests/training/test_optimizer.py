"""The optimizer's groups, its schedule, and clipping, against PyTorch's own."""

from types import SimpleNamespace

import pytest
import torch
from conftest import build_gpt

from training.optimizer import clip_gradients, learning_rate, make_optimizer

OPTIM = SimpleNamespace(lr=0.01, min_lr_ratio=0.1, warmup_steps=3, weight_decay=0.1, beta1=0.9, beta2=0.95)


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


def test_the_schedule_is_a_warm_up_and_a_cosine():
    p = torch.nn.Parameter(torch.zeros(1))
    adamw = torch.optim.AdamW([p], lr=0.01)
    warm = torch.optim.lr_scheduler.LinearLR(adamw, 1 / 3, 1.0, 2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adamw, 6, eta_min=0.001)
    schedule = torch.optim.lr_scheduler.SequentialLR(adamw, [warm, cosine], [3])
    for step in range(10):
        assert learning_rate(step, OPTIM, 10) == pytest.approx(adamw.param_groups[0]["lr"], rel=1e-12)
        adamw.step()
        schedule.step()
    assert learning_rate(50, OPTIM, 10) == pytest.approx(0.001)


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
