"""scripts/sample.py: what it prints is the model's text, whatever the vocabulary and however it is generated."""

import io
import shlex

import pytest
import torch
from conftest import pe_options

from data.base import build_data
from model import serialization
from model.position.network import for_length
from ropewalk.run.directory import read_config
from scripts import sample as program


@pytest.fixture
def trained(straight):
    """`trained("pe=rope", ...)` is a run of two steps."""
    return lambda *options: straight("eval.lengths=[1]", "eval.variants=[]", "trainer.max_steps=2", *options)


@pytest.fixture
def sample(script, trained):
    """`sample("prompt=a", ...)` is what the script says of a run with RoPE, or of another `run`."""
    return lambda *arguments, run=None, **expected: script(
        program, f"run={run or trained('pe=rope')}", *arguments, **expected
    )


@pytest.mark.parametrize(
    ("training", "reader", "prompt"),
    [(["pe=yarn"], None, "un nœud"), (["data=flip_flop", "pe=rope", "pe.base=99"], "rerope", "w 1 i 0")],
    ids=["text", "task"],
)
def test_the_text_of_the_most_probable_tokens(trained, sample, training, reader, prompt):
    """Past the trained length, where a scaled encoding reads at its scale; without a cache the tokens are the same."""
    run = trained(*training)
    options = [f"pe={reader}"] if reader else []
    said = sample(f"prompt='{prompt}'", "max_new_tokens=30", "temperature=0", *options, run=run)

    assert "warning" not in said.err  # it has learned to read them, at this scale

    net = serialization.load(run, pe=reader and pe_options(reader, base=99.0))
    data = build_data(read_config(run)["data"])
    ids = data.encode(prompt)
    encodings = for_length(net.encodings, len(ids) + 30)
    for _ in range(30):
        logits = net(torch.tensor([ids]), encodings=encodings)
        ids.append(int(logits[0, -1, : net.vocab_size].argmax()))

    assert said.out == data.decode(ids)


def test_one_seed_is_one_text(sample):
    options = ["prompt=a", "max_new_tokens=20", "top_k=200"]
    first = sample(*options, "seed=1")
    assert sample(*options, "seed=1").out == first.out
    assert sample(*options, "seed=2").out != first.out
    assert "warning: 21 tokens, but the model was trained to read 16\n" in first.err
    assert sample(*options, "temperature=0").out == sample(*options, "temperature=1e-308").out


def test_a_scale_reaches_as_far_as_the_first_length_allows(trained, sample):
    """Of 8 tokens, before the model was extended to 16."""
    run = trained("pe=yarn", "pe.original_len=8", "pe.scale=4.0")
    said = sample("prompt=a", "max_new_tokens=40", run=run)
    assert "warning: 41 tokens, but the model was trained to read 32\n" in said.err


def test_a_terminal_gets_no_control_characters(sample, monkeypatch):
    """A model may write them, as one of bytes does, and a prompt may have them; a file gets the text as it is."""
    options = ["prompt='\x1b[31ma'", "max_new_tokens=200", "temperature=2"]

    assert sample(*options).out.startswith("\x1b[31ma")

    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    shown = sample(*options).out

    assert shown.startswith("\\x1b[31ma")
    assert all(character.isprintable() or character in "\n\t" for character in shown)


def test_a_prompt_of_any_text(sample, monkeypatch, tmp_path):
    """A file, a pipe, or in the quotes that the message proposes."""
    text = "it (is) a=1, [2]\n"
    (tmp_path / "prompt.txt").write_text(text)

    assert sample("max_new_tokens=2", f"prompt=@{tmp_path}/prompt.txt").out.startswith(text)

    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert sample("max_new_tokens=2", "prompt=-").out.startswith(text)

    refused = sample("prompt=def main(", code=2).err
    (argument,) = shlex.split(refused.splitlines()[0].rpartition(": ")[2])

    assert sample("max_new_tokens=2", argument).out.startswith("def main(")


def test_a_closed_output_is_no_error(sample, monkeypatch):
    """As by >&-, where Python has no stream at all; nor of training."""
    monkeypatch.setattr("sys.stdout", None)
    assert "tokens, scale 1" in sample("prompt=a", "max_new_tokens=2").err
