"""The optimizer's groups, its schedule, and clipping, against PyTorch's own."""

import re

import pytest
import torch
from conftest import build_gpt

from conf.schema import Optim
from ropewalk.training.optimizer import clip_gradients, learning_rate, make_optimizer

OPTIM = Optim(
    lr=0.01,
    min_lr_ratio=0.1,
    warmup_steps=3,
    weight_decay=0.1,
    beta1=0.9,
    beta2=0.95,
    grad_clip=None,
    decay_share=0.4,
    pe_lr_scale=8.0,
)


def by_name(net, option):
    """An option of the groups of a network's optimizer, by the name of the parameter."""
    values = {}
    for group in make_optimizer(net, OPTIM).param_groups:
        values |= dict.fromkeys(group["params"], group[option])
    return {name: values[p] for name, p in net.named_parameters()}


def test_matrices_decay_and_of_encodings_what_they_name():
    net = build_gpt("cope")
    of_first_layer, _ = net.distinct_encodings
    of_first_layer.decayed = ("table",)
    matrices = {name for name, p in net.named_parameters() if p.ndim == 2}
    decays = by_name(net, "weight_decay")

    assert {name for name, decay in decays.items() if decay == 0.1} == matrices - {"blocks.1.position.table"}
    assert set(decays.values()) == {0.1, 0.0}


def test_encodings_have_a_learning_rate_of_their_own():
    """optim.pe_lr_scale times that of all other parameters."""
    scales = by_name(build_gpt("cope"), "lr_scale")
    for layer in (0, 1):
        assert scales.pop(f"blocks.{layer}.position.table") == 8.0
    assert set(scales.values()) == {1.0}


def after_steps(make, name="cope"):
    """The weights of a small network after three steps of an optimizer, by the parameter's name."""
    net = build_gpt(name)
    optimizers = make(net)
    idx = torch.arange(16).view(2, 8)
    for _ in range(3):
        net(idx, targets=idx).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return dict(net.named_parameters())


def test_another_optimizer_is_pytorchs():
    """Its parameters decay as those of AdamW do."""
    optim = OPTIM.model_copy(update={"optimizer": {"_target_": "torch.optim.NAdam", "decoupled_weight_decay": True}})

    def theirs(net):
        decaying = [p for name, p in net.named_parameters() if p.ndim == 2 and not name.endswith("table")]
        others = [p for name, p in net.named_parameters() if p.ndim == 1 or name.endswith("table")]
        groups = [{"params": decaying, "weight_decay": 0.1}, {"params": others}]
        return [torch.optim.NAdam(groups, lr=0.01, betas=(0.9, 0.95), decoupled_weight_decay=True)]

    torch.testing.assert_close(after_steps(lambda net: [make_optimizer(net, optim)]), after_steps(theirs))


def test_muon_steps_matrices_of_layers_and_adamw_all_else():
    """Like two optimizers of PyTorch."""
    optim = OPTIM.model_copy(update={"optimizer": {"_target_": "lab.muon.Muon", "momentum": 0.9}})
    matrices = re.compile(r"blocks\.\d\.(attn\.(qkv|out)|mlp\.(up|down))\.weight")

    def theirs(net):
        names = {name for name, _ in net.named_parameters() if matrices.fullmatch(name)}
        hidden = [p for name, p in net.named_parameters() if name in names]
        decaying = [net.embedding.weight]
        others = [p for name, p in net.named_parameters() if name not in names and p is not net.embedding.weight]
        groups = [{"params": decaying, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return [
            torch.optim.Muon(hidden, lr=0.01, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95)),
        ]

    torch.testing.assert_close(after_steps(lambda net: [make_optimizer(net, optim)]), after_steps(theirs))


WARM_UP = [1 / 3, 2 / 3, 1.0]
ROOT_3 = 0.75**0.5  # cosines of multiples of 30 degrees
COSINE = [0.55 + 0.45 * cosine for cosine in (ROOT_3, 0.5, 0.0, -0.5, -ROOT_3, -1.0)]
SCHEDULES = {  # of ten steps, of which three are a warm-up, in shares of the rate, down to a tenth
    "cosine": [*WARM_UP, 1.0, *COSINE],
    "linear": [*WARM_UP, 1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1],
    "wsd": [*WARM_UP, 1.0, 1.0, 1.0, 0.775, 0.55, 0.325, 0.1],  # it decays in the last 4 of 10
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedule_is_a_warm_up_and_a_decay(name):
    optim = OPTIM.model_copy(update={"schedule": name})
    rates = [learning_rate(step, optim, 10) for step in range(10)]
    assert rates == pytest.approx([0.01 * share for share in SCHEDULES[name]])
    assert learning_rate(50, optim, 10) == pytest.approx(0.001)


def test_a_share_of_nothing_leaves_the_rate_whole_to_the_end():
    """Shorter budgets branch off such a run."""
    constant = OPTIM.model_copy(update={"schedule": "wsd", "decay_share": 0.0})
    assert learning_rate(8, constant, 10) == 0.01


@pytest.mark.parametrize("max_norm", [0.5, 1e9, None])
def test_clipping_is_pytorchs(max_norm):
    """It multiplies the gradients as well, here by 3."""
    net = torch.nn.Linear(7, 5)
    theirs = torch.nn.Linear(7, 5)
    for p, q in zip(net.parameters(), theirs.parameters(), strict=True):
        p.grad = torch.linspace(-1, 2, p.numel()).view(p.shape)
        q.grad = 3 * p.grad
    norm = clip_gradients(net, torch.tensor(3.0), max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm or torch.inf)

    assert norm == pytest.approx(expected.item(), rel=1e-6)
    gradients = [p.grad for p in net.parameters()]
    torch.testing.assert_close(gradients, [p.grad for p in theirs.parameters()], rtol=1e-6, atol=0)
