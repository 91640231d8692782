"""What a user can get wrong ends in one message with the remedy, before anything is written."""

import re
import runpy
import shutil
import subprocess
import sys
from importlib import import_module
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from conftest import ROOT, outcome_of, snapshot
from process_helpers import live

import train as program
from ropewalk.app.cli import CONF_DIR, _comments

UNSAID = "_target_", "defaults"

CASES = [
    (["experiment=quik"], "did you mean quick?"),
    (["max_steps=3"], "did you mean trainer.max_steps?"),
    (["+trainer.max_stepz=3"], "did you mean trainer.max_steps?"),
    (["wandb=true"], "did you mean logger=wandb?"),
    (["pe=rope", "pe.scale=4"], "These have it: pe=abf, pe=dynamic_ntk, pe=leaky_rerope"),
    (["-m", "pe=yarn,ntk", "pe.scale=4"], "where pe is swept, write ++pe.scale..."),
    (["model.dim=128", "model.n_head=3"], "try model.n_head=2"),
    # huge and infinite numbers
    (["eval.lengths=[1e30]"], "eval.lengths=[1e+30]"),
    (["optim.lr=inf"], "optim.lr=inf"),
    (["model.n_layer=1000000000"], "model.n_layer=1000000000"),
    (["model.dim=2000000"], "not enough memory: training takes at least"),
    # names become paths
    (["name=../up"], "name='../up'"),
    (["data.name=../../escaped"], "data.name='../../escaped'"),
    (["name='x\n'"], r"name='x\n'"),
    # patterns and variants
    (["pe=hybrid", "pe.local.base=5"], "pe.local.base is not set by the pattern: write +pe.local.base..."),
    (["pe=hybrid", "pe.near.pe=rope"], "pe.near is not set by the pattern: write +pe.near..."),
    (["pe=hybrid", "pe.pattern=[local,globl]"], "must be a list of local, global"),
    (["pe=hybrid", "pe.local.scale=4"], "These have it: pe.local.pe=abf, pe.local.pe=dynamic_ntk"),
    (["pe=hybrid", "pe.local.pe=yarm", "pe.local.scale=4"], "pe.local.scale: there is no such key"),
    (["pe=hybrid", "+pe.local.bse=5"], "pe=rope: bse: there is no such key; did you mean base?"),
    (["pe=hybrid", "pe.local.window=wide"], "pe.local.window='wide'"),
    (["eval.variants=[alibi]"], "pe=alibi (ALiBi) cannot read weights trained with rope"),
    (["eval.variants=[{pe:yarn,scal:8}]"], "did you mean scale?"),
    # the data and the rest
    (["train_len=100000"], "too few for one window"),
    (["eval.lengths=[0.1]", "eval.target_tokens=4"], "fewer than the 4 scored"),
    (["pe._target_=os.system"], "pe._target_='os.system' is not a PositionEncoding"),
    (["data._target_=data.prepare.Split"], "data._target_"),
    (["pe=learned", "pe.scale=2", "eval.lengths=[4,8]"], "no position beyond 32 tokens, and the shortest length is 64"),
    (["data=flip_flop", "train_len=16", "eval.lengths=[1,1.0625]"], "an even number of tokens, at least 4, not 17"),
    (["trainer.compile=graphs"], "trainer.compile=graphs needs CUDA, and the device is cpu"),
    (["trainer.compile=graphs", "trainer=fsdp"], "layers of fsdp and context_parallel send messages"),
    (["trainer.positions=pose"], "trainer.max_position=None: trainer.positions=pose needs"),
    (["trainer.positions=pose", "trainer.max_position=15"], "at least train_len=16"),
    (["trainer.positions=random", "trainer.max_position=128", "pe=learned"], "beyond the 16 positions of Learned"),
    (["trainer.positions=pose", "trainer.max_position=99", "data.documents=mask"], "positions restart in each"),
    (["trainer.short_window=8", "pe.window=8"], "trainer.short_window=8: pe=rope has no window longer than that"),
    (["pe=[[1]]"], "one option at a time; for a run of each write -m pe=1"),
    (["trainer.replicas=2"], "trainer.replicas=2 needs trainer=fsdp"),
    (["trainer=fsdp", "trainer.replicas=2"], "trainer.replicas=2 does not divide the number of processes, 1"),
    (["trainer.context_parallel=2"], "does not divide the number of processes, 1: set trainer=ddp"),
    (["trainer.context_parallel=2", "data.documents=mask"], "data.documents=mask: trainer.context_parallel=2"),
    (["trainer.context_parallel=2", "trainer.positions=pose", "trainer.max_position=99"], "trainer.positions=pose"),
    (
        ["trainer.context_parallel=2", "model.conv=4"],
        "model.conv=4: trainer.context_parallel=2 does not have the tokens",
    ),
    (["trainer.context_parallel=2", "model.key_offset=true"], "model.key_offset=True: trainer.context_parallel=2 does"),
    (["model.key_offset=true", "model.head_dim=7"], "model.key_offset=true: a head of 7 channels has no half"),
    (["stages=[{steps:2,train_len:12}]"], "train_len=12 must divide train_len=16"),
    (
        ["stages=[{steps:4,train_len:8},{steps:2,train_len:8}]"],
        "they take 6 steps, and trainer.max_steps=6 leaves none",
    ),
    (["stages=[{steps:2,train_len:8,bse:5}]"], "stages.0.bse: there is no such key; there is: steps, train_len"),
    (["stages=[{steps:2,train_len:8,pe:{bse:5}}]"], "did you mean pe.base?"),
    (["pe=learned", "stages=[{steps:2,train_len:8,pe:{original_len:8}}]"], "gives another class or other parameters"),
    (["data=flip_flop", "train_len=18", "stages=[{steps:2,train_len:9}]"], "an even number of tokens, at least"),
    (["init_optimizer=true"], "init_optimizer=true needs all weights of a run: init_from=RUN"),
    (["trainer.num_nodes=2"], "trainer.num_nodes=2: start it on every machine"),
    (["~pe"], "pe=NAME"),
    (["runs/rope-code"], "'runs/rope-code' is not KEY=VALUE"),
    (["pe=[rope,yarn]"], "write -m pe=rope,yarn"),
    (["--config-name=evil"], "evil: there is no such configuration"),
    (["--config-path=/"], "config: there is no such configuration"),
    (["eval.lengths=" + 900 * "[" + 900 * "]"], "nested too deeply"),
    (["init_from=''"], "init_from='' names no model"),
    (["init_from=hf:"], "init_from='hf:' names no model"),
]


@pytest.mark.parametrize(("arguments", "message"), CASES, ids=[" ".join(c[0])[:60] for c in CASES])
def test_mistake(train, arguments, message):
    outcome = train(*arguments)
    assert outcome.code == 2
    assert message in outcome.err
    assert "Traceback" not in outcome.err
    assert not train.runs.exists()


@pytest.mark.parametrize(
    "error", [RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9"), MemoryError()]
)
def test_no_memory(train, monkeypatch, error):
    monkeypatch.setattr(program, "GPT", Mock(side_effect=error))
    outcome = train()
    assert outcome.code == 2
    reason = str(error) or "MemoryError"
    assert f"error: not enough memory for this model, batch or text: {reason}\n" in outcome.err


def test_a_closed_terminal(train, monkeypatch):
    """Python then has no stdout."""
    monkeypatch.setattr("sys.stdout", None)
    outcome = train("pe=rope", "trainer.max_steps=0", "eval.lengths=[1]", "eval.variants=[]")
    assert (outcome.code, outcome.out) == (0, ""), outcome.err


def test_a_system_without_what_is_unix_alone():
    """The programs can be imported, and a run is locked by nobody."""
    hidden = "import os, signal, sys; sys.modules['fcntl'] = sys.modules['resource'] = None; del signal.SIGUSR1\n"
    hidden += "del os.O_NOFOLLOW, os.O_NONBLOCK, os.sysconf\n"
    names = ["train", "ropewalk", *(f"scripts.{path.stem}" for path in (ROOT / "scripts").glob("*.py"))]
    checks = """
import pathlib, tempfile
from ropewalk.app.run_dir import lock
from ropewalk.training.hardware import memory_limit, peak_memory
from ropewalk.training.stop import Stop
with tempfile.TemporaryDirectory() as folder, Stop(None) as stop, lock(pathlib.Path(folder, "run")):
    assert memory_limit() > 0 and peak_memory("cpu") == 0
"""
    code = f"{hidden}import {', '.join(names)}\n{checks}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_mistake_harms_no_run(train):
    assert train("pe=rope", "trainer.max_steps=1", "eval.variants=[]").code == 0
    before = snapshot(train.runs)
    for arguments in (["pe.bse=1"], ["eval.lengths=[1000]"], ["data.files=/nowhere/*"]):
        assert train("pe=rope", "overwrite=true", *arguments).code == 2
    assert snapshot(train.runs) == before


def test_what_is_probably_not_meant_is_a_warning(monkeypatch, capfd):
    monkeypatch.setattr(program, "train", lambda cfg: None)
    for arguments, warning in (
        ([], ""),
        (["experiment=quick"], ""),
        (["trainer.max_steps=30"], "never leaves its warm-up"),
        (["pe=hybrid"], ""),
        (["pe=hybrid", "model.n_layer=3"], "no layer gets global"),
    ):
        monkeypatch.setattr("sys.argv", ["train.py", *arguments])
        said = outcome_of(program.main, capfd).err
        assert warning in said
        assert bool(said) == bool(warning)
        assert ("warning" in said) == bool(warning)


def test_help_says_what_each_key_means(monkeypatch, capfd, tmp_path):
    (tmp_path / "pe").mkdir()
    (tmp_path / "pe" / "mine.yaml").write_text("defaults: [rope, _self_]\nbase: 5.0 # my own base\n")
    monkeypatch.setattr("sys.argv", ["train.py", "--config-dir", str(tmp_path), "pe=mine", "--help"])
    outcome = outcome_of(program.main, capfd)
    assert outcome.code == 0
    assert outcome.out.startswith("Train a small GPT")
    assert "powered by Hydra" not in outcome.out
    lines = [line.split(maxsplit=1) for line in outcome.out.splitlines() if "=" in line and line.startswith("  ")]
    meanings = {line[0].partition("=")[0]: line[1] if len(line) > 1 else "" for line in lines}
    assert meanings["pe.base"] == "my own base"
    assert "tokens" in meanings["pe.window"]  # of nope.yaml, by way of two lists of defaults
    assert "minutes" in meanings["trainer.time_limit"]
    assert [key for key, meaning in meanings.items() if not meaning] == []
    for path in sorted({*CONF_DIR.glob("*/*.yaml")} - {*CONF_DIR.glob("experiment/*")}):  # nor in an option not chosen
        found = _comments([CONF_DIR], path.parent.name, path.stem)
        assert [key for key, meaning in found.items() if not meaning and key.split(".")[-1] not in UNSAID] == [], path


@pytest.mark.parametrize("name", ["evaluate", "sample", "export", "report", "bench", "draw"])
def test_help_of_a_script(script, name):
    module = import_module(f"scripts.{name}")
    outcome = script(module, "--help")
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith(module.__doc__)
    assert f"\n  {'run=???' if name in ('evaluate', 'sample', 'export') else ''}" in outcome.out


def test_a_script_of_another_clone_does_not_run_this_one(tmp_path, monkeypatch, capfd):
    for name in ("ropewalk/app/cli.py", "scripts/sample.py"):
        (tmp_path / name).parent.mkdir()
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.setattr("sys.argv", ["sample.py", "--help"])
    main = runpy.run_path(str(tmp_path / "scripts" / "sample.py"))["main"]
    monkeypatch.setitem(sys.modules, main.__module__, SimpleNamespace(__file__=f"{tmp_path}/scripts/sample.py"))
    outcome = outcome_of(main, capfd)
    assert outcome.code == 2
    assert f"would run {ROOT}: each clone needs its own environment" in outcome.err


def test_as_a_process(tmp_path):
    """One message; silence if nobody reads what it prints."""
    text = "from ropewalk.app.cli import program\n@program('report')\n"
    text += "def main(_):\n    while True:\n        print(flush=True)\n"
    (tmp_path / "own.py").write_text(text + "main()")
    for script, first in (("train.py --help", "Train a small GPT.*"), (tmp_path / "own.py", "")):
        shell = f"PYTHONPATH=. '{sys.executable}' {script} | head -1"
        done = subprocess.run(["bash", "-c", shell], cwd=ROOT, capture_output=True, text=True)
        assert re.fullmatch(f"{first}\n", done.stdout + done.stderr)
    assert live(["pe=yarm"], None, str(tmp_path / "said")) == 2
    assert (tmp_path / "said").read_text() == "error: pe=yarm: there is no such option; did you mean yarn?\n"
