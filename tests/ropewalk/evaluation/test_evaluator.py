"""The loop over measures: complete for every variant, on the same texts, nothing twice."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import build_gpt, data_options, pe_options
from planted import DATA, TOKEN_BYTES, Texts

from conf.files import write_json
from data.base import IGNORE_INDEX, build_data
from ropewalk.evaluation.evaluator import Evaluator
from ropewalk.evaluation.measures import lengths
from ropewalk.evaluation.results import load_all
from ropewalk.evaluation.scoring import Scorer
from ropewalk.training.hardware import Hardware

TRAIN_LEN = 32
LENGTHS = [TRAIN_LEN, 2 * TRAIN_LEN, 4 * TRAIN_LEN]
CPU = Hardware("cpu", "32-true", compile=False)


def config(pe=None, target_tokens=8, **evaluation):
    options = {"lengths": [1, 2, 4], "sequences": 5, "by_position": False, "far_copies": False, "variants": []}
    return SimpleNamespace(
        seed=0,
        pe=pe or pe_options("rope"),
        train_len=TRAIN_LEN,
        lengths=LENGTHS,
        target_tokens=target_tokens,
        trainer=SimpleNamespace(val_tokens=96),
        eval=SimpleNamespace(**options | evaluation),
    )


@pytest.fixture
def measure(tmp_path):
    """`measure(net, cfg)` measures the network of a run after step 7."""
    write_json(tmp_path / "environment.json", {"run_id": "id", "starts": []})
    run = SimpleNamespace(path=tmp_path, run_id="id")
    return lambda net, cfg: Evaluator(net, DATA, cfg, CPU).measure(run, step=7)


def losses_of(net, part):
    """The loss of each target of some texts, in nats, and the targets."""
    x, y = part.batch(0, part.n)
    with torch.no_grad():
        losses = F.cross_entropy(net(x).transpose(1, 2), y, reduction="none")
    return losses.double(), y


def test_validation_leaves_tokens_without_bytes_out_of_the_bits():
    net = build_gpt("rope")
    validation = Evaluator(net, DATA, config(), CPU).validate()

    losses, y = losses_of(net, DATA.validation(TRAIN_LEN, 96))
    size = TOKEN_BYTES[y]
    bits = losses[size > 0].sum() / math.log(2)

    assert validation["loss"] == pytest.approx(float(losses.mean()), rel=1e-6)
    assert validation["bits_per_byte"] == pytest.approx(float(bits / size.sum()), rel=1e-6)
    assert validation["tokens"] == 96
    assert validation["error"] is None


def test_a_sample_of_text_is_what_the_network_holds_for_likeliest(monkeypatch):
    monkeypatch.setattr(DATA, "decode", str, raising=False)
    net = build_gpt("cope", dropout=0.5).train()
    sample = Evaluator(net, DATA, config(), CPU).sample()
    was_training = net.training
    half = DATA.validation(TRAIN_LEN, 96).batch(0, 1)[0][:, : TRAIN_LEN // 2]
    ids = half
    for _ in range(TRAIN_LEN // 2):
        ids = torch.cat([ids, net.eval()(ids)[:, -1:].argmax(-1)], dim=1)

    assert was_training
    assert sample == f"text: {half[0].tolist()}\nwritten: {ids[0, TRAIN_LEN // 2 :].tolist()}"


def test_a_sample_of_a_task_has_its_answers():
    data = build_data(data_options("counting"))
    net = build_gpt("cope", vocab_size=data.vocab_size)
    x, y = data.validation(TRAIN_LEN, 96).batch(0, 1)
    answers = net(x)[0].argmax(-1)[y[0] != IGNORE_INDEX]
    lines = Evaluator(net, data, config(), CPU).sample().splitlines()

    assert lines[1] == f"answers: {data.decode(answers.tolist())}"
    assert lines[2] == f"right: {data.decode(y[y != IGNORE_INDEX].tolist())}"


def test_loss_by_position_keeps_texts_apart(monkeypatch, measure):
    net = build_gpt("rope")
    monkeypatch.setattr(lengths, "BINS", 8)
    _, by_position = measure(net, config(by_position=True))

    losses, _ = losses_of(net, DATA.part(128, 128))

    expected = losses.view(5, 8, 16).sum(-1)  # by text and by bin of 16 positions

    assert [m.span for m in by_position.measured] == [(16 * i, 16 * i + 15) for i in range(8)]
    np.testing.assert_allclose([m.nats for m in by_position.measured], expected.T, rtol=1e-5)


def label(e):
    return e.variant.label, e.variant.scale, e.variant.zero_shot


def test_every_variant_on_the_same_texts(measure):
    """RoPE's weights as trained and as YaRN; the run's own encoding among the variants is not measured twice."""
    net = build_gpt("rope", init_std=0.3)
    variants = [pe_options("yarn", scale=4.0), pe_options("rope"), pe_options("rerope")]
    as_rope, as_yarn, as_rerope = measure(net, config(variants=variants))

    assert label(as_rope) == ("rope", 1.0, False)
    assert label(as_yarn) == ("yarn at scale 4", 4.0, True)
    assert label(as_rerope) == ("rerope", math.inf, True)

    assert as_rope.eval == as_yarn.eval == as_rerope.eval

    trained_as_yarn = build_gpt("yarn", pe={"scale": 4.0, "train_scale": 4.0}, init_std=0.3)
    sums = Scorer(trained_as_yarn, token_bytes=TOKEN_BYTES)(DATA.part(128, 8))
    expected = sums.nats[:, 0]  # of the tokens with bytes
    np.testing.assert_allclose(as_yarn.measured[-1].nats, expected, atol=1e-4)
    assert not np.allclose(as_rope.measured[-1].nats, expected, rtol=1e-2)


def test_own_scales_and_lengths_without_a_position(measure):
    pe = pe_options("learned", scale=2.0)
    unscaled, scaled = measure(build_gpt("learned", pe={"scale": 2.0}), config(pe))

    assert label(unscaled) == ("learned at scale 1", 1.0, False)
    assert label(scaled) == ("learned at scale 2", 2.0, True)
    assert [m.length for m in unscaled.measured] == [32]
    assert [m.length for m in scaled.measured] == [32, 64]
    assert unscaled.skipped == [64, 128]
    assert scaled.skipped == [128]


def test_what_was_measured_is_saved_and_not_measured_again(measure, tmp_path):
    (first,) = measure(build_gpt("rope"), config())
    assert load_all(tmp_path) == [first]

    again = measure(build_gpt("rope", seed=1), config(variants=[pe_options("yarn", scale=4.0)]))
    assert again[0] == first
    assert len(again) == 2


def test_nothing_is_written_into_another_run_that_takes_its_place(measure, tmp_path):
    write_json(tmp_path / "environment.json", {"run_id": "another", "starts": []})
    with pytest.raises(ValueError, match="is another run by now"):
        measure(build_gpt("rope"), config())
    assert load_all(tmp_path) == []


def test_a_rehearsal_finds_what_would_fail():
    Evaluator(build_gpt("rope"), DATA, config(by_position=True, far_copies=True), CPU).rehearse()
    bad = Texts(DATA.tokens + IGNORE_INDEX)
    with pytest.raises(ValueError, match="an input of the data is token -"):
        Evaluator(build_gpt("rope"), bad, config(), CPU).rehearse()
