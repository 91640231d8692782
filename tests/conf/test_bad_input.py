"""What a user can get wrong ends in one message with the remedy, before anything is written."""

import subprocess
import sys

import pytest
from conftest import ROOT

CASES = [
    (["pe=yarm"], "did you mean yarn?"),
    (["experiment=quik"], "did you mean quick?"),
    (["pe.scal=8"], "did you mean pe.scale?"),
    (["trainer.max_stepz=3"], "did you mean trainer.max_steps?"),
    (["max_steps=3"], "did you mean trainer.max_steps?"),
    (["+trainer.max_stepz=3"], "did you mean trainer.max_steps?"),
    (["pe=rope", "pe.scale=4"], "pe.scale: there is no such key; there is: name, _target_, base"),
    (["pe.scale=eight"], "pe.scale='eight'"),
    (["trainer.max_steps=many"], "trainer.max_steps='many'"),
    (["trainer.max_steps=1.5"], "trainer.max_steps=1.5"),
    (["pe.scale=0.5"], "pe.scale=0.5 must be at least 1"),
    (["pe=cope", "pe.npos_max=0"], "pe.npos_max=0"),
    (["model.dim=128", "model.n_head=3"], "try model.n_head=2"),
    (["model.n_head=4", "model.n_kv_head=3"], "model.n_kv_head=3 does not divide"),
    (["pe=rope", "model.dim=33", "model.n_head=1"], "even number of channels"),
    (["train_len=0"], "train_len=0"),
    (["name=a/b"], "name='a/b'"),
    (["name=../up"], "name='../up'"),
    (["data.files=/nowhere/*.txt"], "data.files=/nowhere/*.txt matches no file"),
    (["data.files=null"], "data.files is missing"),
    (["data.tokenizer=gpt5"], "gpt5"),
    (["train_len=100000"], "too few for one window"),
    (["eval.lengths=[0.5,1000]"], "lower eval.lengths"),
    (["eval.lengths=[0.1]"], "fewer than the 4 that are scored"),
    (["eval.lengths=[]"], "eval.lengths=[]"),
    (["trainer.batch_size=5", "trainer.accumulate=2"], "trainer.batch_size=5 must be a multiple"),
    (["trainer.devices=0"], "trainer.devices=0: it should be greater than or equal to 1"),
    (["trainer.precision=64"], "trainer.precision=64"),
    (["logger=wandb", "logger.mode=loud"], "logger.mode='loud'"),
    (["runs_dir=/proc/nowhere"], "runs_dir=/proc/nowhere cannot be written to"),
    (["pe._target_=os.system"], "pe._target_='os.system' is not a PositionEncoding"),
    (["data._target_=data.prepare.Split"], "data._target_"),
    (["~pe"], "pe=NAME"),
    (["pe=["], "error: "),
]


@pytest.mark.parametrize(("arguments", "message"), CASES, ids=[" ".join(c[0]) for c in CASES])
def test_mistake(train, arguments, message):
    outcome = train(*arguments)
    assert outcome.code == 2
    assert message in outcome.err
    assert "Traceback" not in outcome.err
    assert not train.runs.exists()


def test_cuda_is_missing(train, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    outcome = train("trainer.accelerator=cuda")
    assert outcome.code == 2
    assert "trainer.accelerator=cuda is not available here" in outcome.err


def test_a_mistake_harms_no_run(train):
    assert train("pe=rope").code == 0
    before = {path: path.read_bytes() for path in train.runs.rglob("*") if path.is_file()}
    for arguments in (["pe.bse=1"], ["eval.lengths=[1000]"], ["data.files=/nowhere/*"]):
        assert train("pe=rope", "overwrite=true", *arguments).code == 2
    assert {path: path.read_bytes() for path in train.runs.rglob("*") if path.is_file()} == before


def test_a_stranger_in_the_place_of_the_run(train):
    place = train.runs / "rope-text"
    place.mkdir(parents=True)
    (place / "thesis.txt").write_text("chapter 1")
    outcome = train("pe=rope", "overwrite=true")
    assert outcome.code == 2
    assert "is not a run" in outcome.err
    assert (place / "thesis.txt").read_text() == "chapter 1"


def test_as_a_process():
    done = subprocess.run([sys.executable, "train.py", "pe=yarm"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: pe=yarm: there is no such option; did you mean yarn?\n"
