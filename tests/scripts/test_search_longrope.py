"""scripts/search_longrope.py: what it finds is better by its own measure, and what it prints can be pasted."""

import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import snapshot

import ropewalk
from data.base import EvalSet
from scripts import search_longrope as program


@pytest.fixture
def search(script):
    """`search("run=...", ...)` runs the script's command line within this process."""
    return partial(script, program, "texts=3", "population=8", "generations=3", "device=cpu")


def test_the_search_finds_a_planted_optimum():
    """From two starts far away to divisors that are best by a known loss, within the limits."""
    best = np.array([1.0, 1.0, 1.5, 3.0, 6.0, 8.0])

    def loss(factors):
        return float(np.abs(np.log(factors) - np.log(best)).max())

    starts = [(1.0,) * 6, (8.0,) * 6]
    found = program.search(loss, starts, 16, 60, 10.0, np.random.default_rng(0))
    assert loss(found) < 0.1 < min(map(loss, starts))
    assert found == program.search(loss, starts, 16, 60, 10.0, np.random.default_rng(0))
    for _ in range(50):
        child = program.mutated([found, (10.0,) * 6], 10.0, np.random.default_rng())
        assert list(child) == sorted(child)
        assert child[0] >= 1
        assert child[-1] <= 10


def test_copies_of_what_is_near_do_not_count():
    """Of two words that come again, the one from 9 tokens ago is read by a network of 16 tokens, the other is not."""
    tokens = torch.arange(40)
    tokens[30:33] = tokens[21:24]  # 9 tokens before
    tokens[35:38] = tokens[2:5]  # 33 tokens before
    part = EvalSet("text", 39, 1, lambda start, stop: (tokens[None, :-1], tokens[None, 1:]))
    data = SimpleNamespace(token_bytes=torch.full((40,), 3))  # three tokens are about 8 bytes
    (groups,) = program.far_copies_of(part, data, 16).groups
    assert (groups == 0).nonzero().flatten().tolist() == [37]  # the target after the words


@pytest.mark.parametrize("name", program.STARTS)
def test_a_start_reads_as_its_scaling(straight, name):
    """The divisors of a scaling, given to longrope, make the scaling's logits, but for the sharpening."""
    run = straight("pe=rope")
    scaled = ropewalk.load(run, pe=name, scale=4.0)
    factors = program.start(scaled.net, 4.0, 64)
    sharpening = next(pe for pe in scaled.net.encodings).sharpening(4.0)
    same = ropewalk.load(run, pe="longrope", scale=4.0, long_factor=list(factors), attention_factor=sharpening)
    tokens = torch.arange(64)[None] % same.net.vocab_size
    with scaled.net.at_scale(4.0), same.net.at_scale(4.0), torch.no_grad():
        torch.testing.assert_close(same.net(tokens), scaled.net(tokens))


def test_what_it_prints_can_be_pasted(straight, search):
    """The table's loss is that of a network loaded with the printed list; nothing is written, and it is repeatable."""
    run = straight("pe=rope")
    before = snapshot(run)
    said = search(f"run={run}", "scale=4")
    assert said.code == 0, said.err
    assert snapshot(run) == before
    assert search(f"run={run}", "scale=4").out == said.out

    rows = dict(re.findall(r"^(\w+) +(\d+\.\d+) ", said.out, re.M))
    assert [*rows] == [*program.STARTS, "found"]
    assert len({*rows.values()}) > 1  # the divisors matter
    assert float(rows["found"]) <= min(float(rows[name]) for name in program.STARTS)

    factors = [float(factor) for factor in said.out.strip().partition("long_factor=[")[2].rstrip("]'").split(",")]
    model = ropewalk.load(run, pe="longrope", scale=4.0, long_factor=factors)
    model.data.prepare()
    inputs, targets = model.data.train_batch(range(3), 64, 0)
    # Copied words have about 8 bytes.
    n = max(3, round(8 / float(model.data.token_bytes[targets[0]].float().mean())))
    bits = 0.0
    n_far = 0
    with model.net.at_scale(4.0), torch.no_grad():
        for x, y in zip(inputs, targets, strict=True):
            logprobs = model.net(x[None])[0, :, : model.net.vocab_size].log_softmax(-1)
            words = [*x[:1].tolist(), *y.tolist()]
            for i in range(n, len(words)):
                # The last place before i after the same words, by looking at every place.
                places = [j for j in range(n, i) if words[j - n : j] == words[i - n : i]]
                if places and i - places[-1] > 16:
                    bits -= float(logprobs[i - 1, words[i]]) / np.log(2)
                    n_far += 1
    assert f"{n_far} far copies" in said.out
    assert float(rows["found"]) == pytest.approx(bits / n_far, abs=1e-3)


@pytest.mark.parametrize(
    ("training", "arguments", "message"),
    [
        (["pe=rope"], ["scale=1"], "scale"),
        (["pe=rope"], ["scale=4", "texts=0"], "texts"),
        (["pe=rope"], [], "scale is missing"),
        (["pe=alibi"], ["scale=4"], "cannot read weights trained with alibi"),
        (["data=flip_flop", "pe=rope"], ["scale=4"], "trained on a task"),
    ],
    ids=["scale", "texts", "missing", "bias", "task"],
)
def test_bad_input(straight, search, training, arguments, message):
    said = search(f"run={straight(*training)}", *arguments)
    assert said.code == 2
    assert message in said.err
    assert "Traceback" not in said.err


def test_no_such_run(search, tmp_path):
    said = search(f"run={tmp_path}", "scale=4")
    assert said.code == 2
    assert str(tmp_path) in said.err
