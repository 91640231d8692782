"""Engines of others: Hydra's launchers run sweeps, optuna searches, submitit requeues, and a time limit stops."""

import signal
import subprocess
import sys
from functools import partial

import pytest
import yaml
from conftest import ROOT
from process_helpers import On

from ropewalk.app.resolve import load_config
from ropewalk.evaluation.objective import objective
from ropewalk.run.directory import RunDir

ROW = "ropewalk.run.directory.RunDir.append"  # called once for each row of metrics.jsonl
SHORT = ("eval.lengths=[1,2]", "eval.variants=[]")


def sweep(train, *options):
    """A sweep in a process of its own: some launchers leave processes behind in that of the tests."""
    command = [sys.executable, "train.py", *train.complete("-m", *SHORT, *options)]
    command = [word for word in command if word != "hydra/launcher=basic"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)


def runs_of(train):
    return {path.parent.name: RunDir(load_config(path.parent)) for path in train.runs.glob("*/training.json")}


@pytest.mark.parametrize("launcher", [pytest.param("joblib", marks=pytest.mark.slow), "submitit_local"])
def test_other_launchers_run_a_sweep(train, launcher):
    sweep(train, f"hydra/launcher={launcher}", "pe=rope,nope")

    assert {*runs_of(train)} == {"rope-text", "nope-text"}


def test_optuna_gets_the_loss_of_each_run(train):
    search = [
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=2",
        "hydra.sweeper.n_jobs=2",
        "hydra.sweeper.sampler.seed=1",
    ]
    sweep(train, *search, "optim.lr=interval(1e-4,1e-2)", "name='lr${optim.lr}'", "pe=rope", "objective=1")
    found = yaml.safe_load((train.runs / ".sweep" / "optimization_results.yaml").read_text())
    losses = {run.cfg.optim.lr: objective(run) for run in runs_of(train).values()}

    assert len(losses) == 2
    assert found["best_value"] == min(losses.values()) == losses[found["best_params"]["optim.lr"]]


def test_a_launcher_that_waits_for_sigusr2_gets_it_after_a_checkpoint(train, monkeypatch):
    """As submitit, whose handler requeues the job and ends the process."""
    checkpoints = []

    def requeue(number, frame):
        checkpoints.extend(path.name for path in train.runs.glob("*/checkpoints/*"))
        raise SystemExit(-1)

    old = signal.signal(signal.SIGUSR2, requeue)
    try:
        with On(ROW, 2, partial(signal.raise_signal, signal.SIGUSR2)):
            train("pe=rope", *SHORT, code=None)
    finally:
        signal.signal(signal.SIGUSR2, old)

    assert checkpoints
    assert not (train.runs / "rope-text" / "training.json").exists()

    assert "resuming" in train("pe=rope", *SHORT).out


def test_a_time_limit_stops_after_a_checkpoint_and_the_same_command_resumes(train):
    outcome = train("pe=rope", "trainer.time_limit=1e-9", *SHORT, code=75)

    assert "SIGALRM: stopped after step 1; " in outcome.out
    assert "resuming" in train("pe=rope", *SHORT).out
    assert (train.runs / "rope-text" / "training.json").exists()
