"""A sweep: its jobs are the runs one by one, mistakes end it before any work, failures are named and skipped.

Also by engines of others: Hydra's launchers, and optuna, which searches.
"""

import os
import signal
import subprocess
import sys
from functools import partial

import pytest
import yaml
from conftest import ROOT, rows_of
from differences import differences
from process_helpers import On, power_cut, terminated

from ropewalk.app import side_by_side
from ropewalk.app.configure import train_values
from ropewalk.app.resolve import load_config, resolve
from ropewalk.evaluation.objective import objective
from ropewalk.run.directory import RunDir, read_config

SHORT = ("eval.lengths=[1,2]", "eval.variants=[]")
ROW = "ropewalk.run.directory.RunDir.append"  # called five times in a run: call 8 is for step 3 of the second


def test_each_job_is_the_run_that_it_would_be_alone(train, trained):
    train("pe=rope,yarn", "name=mine", *SHORT, "-m")

    assert sorted(path.name for path in train.runs.glob("[!.]*")) == ["mine-pe=rope", "mine-pe=yarn"]

    alone = trained("pe=yarn", *SHORT, name="alone")
    of_sweep = train.runs / "mine-pe=yarn"

    assert read_config(of_sweep) == read_config(alone) | {"name": "mine-pe=yarn"}
    assert differences(of_sweep, alone) == []


def test_a_stopped_sweep_is_continued(train):
    sweep = ["pe=rope,alibi", *SHORT, "-m"]
    with On(ROW, 8, partial(signal.raise_signal, signal.SIGINT)):  # Ctrl-C
        train(*sweep, code=130)
    complete = train.runs / "rope-text"
    before = {path: path.stat().st_mtime_ns for path in complete.rglob("*")}

    outcome = train(*sweep)

    assert "resuming" in outcome.out
    assert outcome.out.count("validation loss") == 1  # no table of the complete one
    assert {path: path.stat().st_mtime_ns for path in complete.rglob("*")} == before

    page = complete / "report.html"
    page.unlink()  # as if the process had been killed before the very last file
    train(*sweep)
    assert page.exists()


def test_a_failing_job_is_named_and_the_others_go_on(train):
    with On(ROW, 2, power_cut):
        outcome = train("pe=rope,nope", *SHORT, "-m", code=1)

    assert "failed: rope-text; " in outcome.err
    assert "in power_cut\n" in outcome.err  # where, since it is nobody's mistake
    assert (train.runs / "nope-text" / "training.json").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("pe=rope,yarm", "yarn"),
        ("pe=yarn,rope pe.scale=2", "pe.scale"),
        ("pe=rope,nope optim.lr=1e-3,-1", "pe=rope optim.lr=-1: optim.lr=-1"),
        ("optim.lr=interval(0.1,0.2)", "hydra/sweeper=optuna"),
        ("pe=[rope,alibi],nope", "one option at a time"),
        ("hydra/launcher=side_by_side hydra.launcher.n_jobs=-1", "hydra.launcher.n_jobs=-1: must be the number"),
        ("hydra/launcher=side_by_side hydra.launcher.n_jobs=all", "hydra.launcher.n_jobs=all: must be the number"),
        ("pe=glob(zz*)", "pe=glob(zz*): no option matches"),
        ("name=x-1-2 model.n_head=1,2", "x-1-2 would be the place of several runs"),
        ("seed=0,1 eval={sequences:3} eval={at:[2]}", "eval={...} is given more than once"),
        ("eval={sequences:3},{sequences:4} eval={at:[2]}", "eval={...} is given more than once"),
    ],
)
def test_a_mistake_in_one_job_ends_the_sweep_before_any_work(train, line, message):
    assert message in train(*line.split(), "-m", code=2).err
    assert not train.runs.exists()


@pytest.fixture
def planned(train, monkeypatch):
    """`planned("pe=rope,nope", ...)` is {name: overrides} of the jobs that a sweep would start side by side."""

    def run(*options: str) -> dict[str, list[str]]:
        started = {}

        def run_all(commands, places, logs):
            for name, (program, *overrides) in commands.items():
                assert program.endswith("train.py")
                started[name] = [override for override in overrides if not override.startswith("hydra")]
            return dict.fromkeys(commands, side_by_side.Ended("", b"1.0", 1.0))

        monkeypatch.setattr(side_by_side, "run_all", run_all)
        train(*options, "-m", "hydra/launcher=side_by_side")
        return started

    return run


def test_what_varies_tells_runs_apart(planned, tmp_path):
    """What a name says already, as the encoding, the data and the seed in the default one, is not repeated."""
    (tmp_path / "pe").mkdir()
    (tmp_path / "pe" / "mine.yaml").write_text("defaults: [rope]\n")  # a folder of the user's is read in sweeps, too
    options = [f"hydra.searchpath=[file://{tmp_path}]", "pe=mine", "data.tokenizer=bytes,train:300", "seed=0,1", *SHORT]
    name = "rope-text-data.tokenizer="

    assert [*planned(*options)] == [f"{name}bytes", f"{name}bytes-s1", f"{name}train:300", f"{name}train:300-s1"]


def test_runs_of_one_name_in_several_folders_are_all_run(planned, tmp_path):
    folders = [f"{tmp_path}/{folder}" for folder in "ab"]
    started = planned(f"runs_dir={','.join(folders)}")

    assert [f"runs_dir={folder}" in job for folder, job in zip(folders, started.values(), strict=True)] == [True, True]


def test_equal_jobs_are_one_run(planned):
    assert [*planned("seed=0,0", "name=twice")] == ["twice"]


def test_jobs_take_turns_if_one_has_several_processes(train, monkeypatch):
    found = []

    def run_all(commands, places, logs):
        found.extend(places)
        return dict.fromkeys(commands, side_by_side.Ended("", b"1.0", 1.0))

    monkeypatch.setattr(side_by_side, "run_all", run_all)
    train(
        "trainer=default,ddp",
        "name='${trainer.strategy}'",
        "-m",
        "hydra/launcher=side_by_side",
        "hydra.launcher.n_jobs=2",
    )

    assert found == [{}]


def test_an_experiment_may_say_what_is_swept(planned):
    """The command line may narrow it. But for what is compared, the jobs are equal."""
    jobs = [resolve(train_values(*overrides)) for overrides in planned("experiment=compare", "seed=0").values()]

    assert len({cfg.pe["name"] for cfg in jobs}) == len({cfg.name for cfg in jobs}) == len(jobs) >= 8

    compared = {"pe": True, "name": True, "eval": {"variants"}}

    assert len({str(cfg.model_dump(exclude=compared)) for cfg in jobs}) == 1


def test_what_matches_a_pattern_is_swept(planned):
    assert {*planned("pe=glob(cope*)")} == {"cope-text", "cope_relative-text", "cope_rope-text"}


def test_runs_train_side_by_side(train):
    """Each in a process of its own with its own log; what is complete is left alone, and what fails is named."""
    infinite = ["optim.warmup_steps=0", "optim.grad_clip=null"]  # with a rate that is too high
    sweep = ["pe=rope", "name='${pe.name}-${optim.lr}'", *infinite, *SHORT]
    train("optim.lr=0.002", *sweep)
    before = rows_of(train.runs / "rope-0.002")

    outcome = train("optim.lr=0.001,0.002,1e38", *sweep, "-m", "hydra/launcher=side_by_side", code=1)
    assert "rope-1e+38: failed: " in outcome.out
    assert "step 6/6" not in outcome.out  # two would print at once
    assert "step 6/6" in (train.runs / ".sweep" / "rope-0.001.txt").read_text()
    assert rows_of(train.runs / "rope-0.002") == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "begun"),
    [
        (["trainer.max_steps=3000", "trainer.log_every=1"], "metrics.jsonl"),
        (["trainer.max_steps=0", "eval.sequences=100000"], "config.yaml"),
    ],
    ids=["while they train", "while they are measured"],
)
def test_a_signal_stops_what_trains_side_by_side(train, options, begun):
    """It may reach the first process alone. What had not begun does not begin."""
    options = ["pe=rope", "seed=0,1,2,3,4", *options, *SHORT]
    runs = [train.runs / "rope-text", train.runs / "rope-text-s1"]
    sweep = [sys.executable, "train.py", *train.complete(*options, "-m")]
    terminated(sweep, *[run / begun for run in runs], preexec_fn=_on_two_cores)

    assert sorted(path.name for path in train.runs.glob("[!.]*")) == ["rope-text", "rope-text-s1"]
    assert begun == "config.yaml" or all([*run.glob("checkpoints/*.ckpt")] for run in runs)


def _on_two_cores():
    os.sched_setaffinity(0, [*os.sched_getaffinity(0)][:2])


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
