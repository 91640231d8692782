"""scripts/sample.py: what it prints is the model's text, whatever the vocabulary and however it is generated."""

import pytest
import torch
from conftest import Outcome, outcome_of

import conf.cli
import data as data_sources
from conf.rundir import read_config
from model import store
from scripts import sample as script


@pytest.fixture
def sample(monkeypatch, capfd):
    """`sample("run=...", ...)` runs the script's command line within this process."""

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr("sys.argv", ["sample.py", *arguments])
        capfd.readouterr()
        return outcome_of(lambda: conf.cli.script(script.main), capfd)

    return run


@pytest.mark.parametrize(
    ("training", "prompt"), [(["pe=yarn"], "un nœud"), (["data=flip_flop", "pe=rope"], "w 1 i 0")], ids=["text", "task"]
)
@torch.no_grad()
def test_the_text_of_the_most_probable_tokens(train, sample, training, prompt):
    """Past the trained length, where a scaled encoding reads at its scale; without a cache the tokens are the same."""
    assert train(*training, "eval.lengths=[1]", "trainer.max_steps=2", "name=it").code == 0
    run = train.runs / "it"
    said = sample(f"run={run}", f"prompt={prompt}", "max_new_tokens=30", "temperature=0")
    assert said.code == 0, said.err
    net, data = store.load(run), data_sources.build(read_config(run)["data"])
    ids = data.encode(prompt)
    with net.reading(lambda pe: pe.readings()[-1]) as pe:
        for _ in range(30):
            ids.append(int(net(torch.tensor([ids]))[0, -1].argmax()))
    assert said.out == data.decode(ids)
    assert "(30 tokens, " in said.err
    assert f" tokens/s, {pe.label})" in said.err


def test_one_seed_is_one_text(train, sample):
    assert train("pe=rope", "eval.lengths=[1]", "trainer.max_steps=2", "name=it").code == 0
    options = [f"run={train.runs}/it", "prompt=a", "max_new_tokens=20", "top_k=200", "top_p=0.99"]
    first, again, other = (sample(*options, f"seed={seed}").out for seed in (1, 1, 2))
    assert first == again != other
    for wrong, message in (
        ("prompt=", "the prompt is empty"),
        ("temperature=-1", "temperature='-1'"),
        ("top_p=0", "top_p='0'"),
        ("topk=3", "did you mean top_k?"),
    ):
        said = sample(*options, wrong)
        assert said.code == 2
        assert message in said.err


def test_no_position_that_far(train, sample):
    assert train("pe=learned", "eval.lengths=[1]", "trainer.max_steps=2", "name=it").code == 0
    said = sample(f"run={train.runs}/it", "prompt=a", "max_new_tokens=100")
    assert said.code == 2
    assert "1 prompt tokens and 100 new ones exceed the encoding's 64 positions" in said.err
