"""The loop over measures: complete for every variant, on the same texts, nothing twice."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import build_gpt, pe_options
from planted import Planted, Texts, results_of

from conf.schema import Config
from data.base import IGNORE_INDEX
from ropewalk.evaluation import loop
from ropewalk.evaluation.measures import lengths
from ropewalk.evaluation.results import load_all
from ropewalk.evaluation.scoring import Scorer
from ropewalk.files import write_json
from ropewalk.training.hardware import Hardware

TOKEN_BYTES = torch.arange(50) % 4
TRAIN_LEN = 32
LENGTHS = [TRAIN_LEN, 2 * TRAIN_LEN, 4 * TRAIN_LEN]
DATA = Texts(np.random.default_rng(0).integers(0, 50, (5, 4 * TRAIN_LEN + 1)))
DATA.token_bytes = TOKEN_BYTES
CPU = Hardware("cpu", "32-true", compile=False)


def config(pe=None, lengths=LENGTHS, target_tokens=8, **evaluation):
    options = {"lengths": [1, 2, 4], "sequences": 5, "by_position": False, "far_copies": False, "variants": []}
    return SimpleNamespace(
        seed=0,
        pe=pe or pe_options("rope"),
        train_len=TRAIN_LEN,
        lengths=lengths,
        target_tokens=target_tokens,
        trainer=SimpleNamespace(val_tokens=96),
        eval=SimpleNamespace(**options | evaluation),
    )


@pytest.fixture
def measure(tmp_path):
    """`measure(net, cfg)` measures the network of a run after step 7."""
    write_json(tmp_path / "environment.json", {"run_id": "id", "starts": []})
    return lambda net, cfg: loop.measure(net, DATA, cfg, CPU, tmp_path, run_id="id", step=7)


def losses_of(net, part):
    """The loss of each target of some texts, in nats, and the targets."""
    x, y = part.batch(0, part.n)
    with torch.no_grad():
        return F.cross_entropy(net(x).transpose(1, 2), y, reduction="none").double(), y


def test_validation_leaves_tokens_without_bytes_out_of_the_bits():
    net = build_gpt("rope")
    validation = loop.validate(net, DATA, config())

    losses, y = losses_of(net, DATA.validation(TRAIN_LEN, 96))
    bytes_of_target = TOKEN_BYTES[y]
    bits = losses[bytes_of_target > 0].sum() / math.log(2)
    assert validation.loss == pytest.approx(losses.mean().item(), rel=1e-6)
    assert validation.bits_per_byte == pytest.approx((bits / bytes_of_target.sum()).item(), rel=1e-6)
    assert (validation.tokens, validation.length, validation.error) == (96, TRAIN_LEN, None)


def test_loss_by_position_keeps_texts_apart(monkeypatch, measure):
    net = build_gpt("rope")
    monkeypatch.setattr(lengths, "BINS", 8)
    _, by_position = measure(net, config(by_position=True))

    losses, _ = losses_of(net, DATA.part(128, 128))
    for start, measured in zip(range(0, 128, 16), by_position.measured, strict=True):
        assert measured.span == (start, start + 15)
        np.testing.assert_allclose(measured.nats, losses[:, start : start + 16].sum(1), rtol=1e-5)


def by_what_it_sees(seen):
    """Odds with which the loss of every token falls by a bit with each doubling of the text before it."""
    odds = np.full(51, len(seen) / 10**4)
    odds[50] = 1 - odds[:50].sum()  # no text has this token
    return odds


@pytest.mark.parametrize(("sees", "gain"), [(TRAIN_LEN, 0.0), (4 * TRAIN_LEN, 2.0)])
def test_rows_have_the_context_that_the_heading_states(sees, gain):
    lengths_of = [TRAIN_LEN // 2, *LENGTHS]
    options = SimpleNamespace(target_tokens=None)
    target_tokens = Config.target_tokens.fget(SimpleNamespace(eval=options, lengths=lengths_of))
    cfg = config(lengths=lengths_of, target_tokens=target_tokens)
    means = []
    for m in results_of(lengths.lengths(DATA, cfg), Planted(by_what_it_sees, sees)):
        means.append(sum(m.nats) / sum(m.tokens) / math.log(2))
        least, most = m.length - target_tokens + 1, m.length
        assert math.log2(10**4 / min(most, sees)) - 1e-6 <= means[-1] <= math.log2(10**4 / min(least, sees)) + 1e-6
    assert means[1] - means[-1] == pytest.approx(gain, abs=0.2)


def labels(evaluations):
    return [(e.variant.label, e.variant.scale, e.variant.zero_shot) for e in evaluations]


def test_every_variant_on_the_same_texts(measure):
    """RoPE's weights as trained and as YaRN; the run's own encoding among the variants is not measured twice."""
    net = build_gpt("rope", init_std=0.3)
    variants = [pe_options("yarn", scale=4.0), pe_options("rope"), pe_options("rerope")]
    evaluations = measure(net, config(variants=variants))
    assert labels(evaluations) == [("rope", 1.0, False), ("yarn at scale 4", 4.0, True), ("rerope", math.inf, True)]

    as_rope, as_yarn, as_rerope = evaluations
    assert as_rope.eval == as_yarn.eval == as_rerope.eval

    trained_as_yarn = build_gpt("yarn", pe={"scale": 4.0, "train_scale": 4.0}, init_std=0.3)
    expected = Scorer(trained_as_yarn, token_bytes=TOKEN_BYTES)(DATA.part(128, 8)).nats[:, 0]
    np.testing.assert_allclose(as_yarn.measured[-1].nats, expected, atol=1e-4)
    assert not np.allclose(as_rope.measured[-1].nats, expected, rtol=1e-2)


def test_own_scales_and_lengths_without_a_position(measure):
    pe = pe_options("learned", scale=2.0)
    unscaled, scaled = measure(build_gpt("learned", pe={"scale": 2.0}), config(pe))
    assert labels([unscaled, scaled]) == [("learned at scale 1", 1.0, False), ("learned at scale 2", 2.0, True)]
    assert [m.length for m in unscaled.measured] == [32]
    assert [m.length for m in scaled.measured] == [32, 64]
    assert (unscaled.skipped, scaled.skipped) == ([64, 128], [128])


def test_what_was_measured_is_saved_and_not_measured_again(measure, tmp_path):
    (first,) = measure(build_gpt("rope"), config())
    assert load_all(tmp_path) == [first]
    again = measure(build_gpt("rope", seed=1), config(variants=[pe_options("yarn", scale=4.0)]))
    assert again[0] == first
    assert labels(again) == [("rope", 1.0, False), ("yarn at scale 4", 4.0, True)]


def test_a_rehearsal_finds_what_would_fail():
    loop.rehearse(build_gpt("rope"), DATA, config(by_position=True, far_copies=True), hardware=CPU)
    bad = Texts(DATA.tokens + IGNORE_INDEX)
    with pytest.raises(IndexError):
        loop.rehearse(build_gpt("rope"), bad, config(), hardware=CPU)


@pytest.mark.parametrize("name", ["lengths", "by_position", "far_copies"])
def test_a_plan_says_how_many_tokens_are_read(name):
    net = Planted(lambda seen: np.full(50, 1 / 50))
    (plan,) = loop.plans(DATA, config(), [name])
    results_of(plan, net)
    assert sum(net.read) == plan.tokens


@pytest.mark.parametrize("asked", [["length"], ["far_copies"]])
def test_measures_that_cannot_be_made_are_named(asked):
    with pytest.raises(ValueError, match=rf"measures: .*{asked[0]}"):
        loop.plans(DATA, config(lengths=[TRAIN_LEN]), asked)
