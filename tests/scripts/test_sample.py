"""scripts/sample.py: what it prints is the model's text, whatever the vocabulary and however it is generated."""

import io
import shlex
from functools import partial

import pytest
import torch
from conftest import pe_options

from data.base import build_data
from model import serialization
from model.position.network import for_length
from ropewalk.app.run_dir import read_config
from scripts import sample as program


@pytest.fixture
def sample(script):
    """`sample("run=...", ...)` runs the script's command line within this process."""
    return partial(script, program)


@pytest.fixture
def trained(straight):
    """`trained("pe=rope", ...)` is a run of two steps."""
    return partial(straight, "eval.lengths=[1]", "eval.variants=[]", "trainer.max_steps=2")


@pytest.mark.parametrize(
    ("training", "reader", "prompt"),
    [(["pe=yarn"], None, "un nœud"), (["data=flip_flop", "pe=rope", "pe.base=99"], "rerope", "w 1 i 0")],
    ids=["text", "task"],
)
def test_the_text_of_the_most_probable_tokens(trained, sample, training, reader, prompt):
    """Past the trained length, where a scaled encoding reads at its scale; without a cache the tokens are the same."""
    run = trained(*training)
    options = [f"pe={reader}"] if reader else []
    said = sample(f"run={run}", f"prompt='{prompt}'", "max_new_tokens=30", "temperature=0", *options)
    assert said.code == 0, said.err
    pe = reader and pe_options(reader, base=99.0)
    net, data = serialization.load(run, pe=pe), build_data(read_config(run)["data"])
    ids = data.encode(prompt)
    encodings = for_length(net.encodings, len(ids) + 30, net.train_len)
    for _ in range(30):
        logits = net(torch.tensor([ids]), encodings=encodings)[0, -1, : net.vocab_size]
        ids.append(int(logits.argmax()))
    assert said.out == data.decode(ids)


def test_one_seed_is_one_text(trained, sample):
    options = [f"run={trained('pe=rope')}", "prompt=a", "max_new_tokens=20", "top_k=200", "top_p=0.99"]
    first, again, other = (sample(*options, f"seed={seed}").out for seed in (1, 1, 2))
    assert first == again != other
    assert sample(*options, "temperature=0").out == sample(*options, "temperature=1e-308").out


@pytest.mark.parametrize(("wrong", "message"), [("prompt=", "prompt"), ("top_p=0", "top_p=0"), ("step=9", "step 9")])
def test_mistakes(trained, sample, wrong, message):
    said = sample(f"run={trained('pe=rope')}", "prompt=a", wrong)
    assert (said.code, said.out) == (2, "")
    assert message in said.err


def test_a_terminal_gets_no_control_characters(trained, sample, monkeypatch):
    """A model may write them, as one of bytes does, and a prompt may have them; a file gets the text as it is."""
    options = [f"run={trained('pe=rope')}", "prompt='\x1b[31ma'", "max_new_tokens=200", "temperature=2"]
    assert sample(*options).out.startswith("\x1b[31ma")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    shown = sample(*options).out
    assert shown.startswith("\\x1b[31ma")
    assert all(character.isprintable() or character in "\n\t" for character in shown)


def test_a_prompt_of_any_text(trained, sample, monkeypatch, tmp_path):
    """A file, a pipe, or in the quotes that the message proposes."""
    options = [f"run={trained('pe=rope')}", "max_new_tokens=2"]
    text = "it (is) a=1, [2]\n"
    (tmp_path / "prompt.txt").write_text(text)
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    for prompt in (f"prompt=@{tmp_path}/prompt.txt", "prompt=-"):
        said = sample(*options, prompt)
        assert said.out.startswith(text), said.err
    refused = sample(*options, "prompt=def main(").err
    (argument,) = shlex.split(refused.splitlines()[0].rpartition(": ")[2])
    assert sample(*options, argument).out.startswith("def main(")


def test_several_runs(trained, sample, tmp_path):
    """Also with a text beyond what the model was trained to read, of which it warns."""
    options = "prompt=a", "max_new_tokens=20", f"hydra.sweep.dir={tmp_path}"
    said = sample("-m", f"run={trained('pe=rope')}", "pe=rope,rerope", *options)
    assert said.code == 0, said.err
    assert said.err.count("warning: 21 tokens, and the model has learned to read 16\n") == 1
