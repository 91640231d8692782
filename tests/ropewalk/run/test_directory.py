"""A run directory: who may write into it, what it may continue, and what it says about its making."""

import json
import os
import shlex
import shutil
import subprocess

import pytest
from conftest import edit

from conf.files import read_json
from ropewalk.app.configure import train_values
from ropewalk.app.resolve import resolve
from ropewalk.run import directory, provenance
from ropewalk.run.directory import RunDir, find, lock, read_config, read_metrics

DATA = {"tokenizer": "bytes"}


@pytest.fixture
def make(tmp_path):
    """`make("seed=1", ...)` is the directory of that run, as a new start of the program sees it."""
    return lambda *options: RunDir(resolve(train_values("pe=nope", f"runs_dir={tmp_path}/runs", "name=it", *options)))


@pytest.fixture
def run(make):
    """A run that has been created."""
    run = make()
    run.create(DATA)
    return run


def test_a_directory_that_a_kill_left_half_made_is_made_anew(make, tmp_path):
    """Half-written files within a run: see test_resume.py."""
    runs = tmp_path / "runs"
    (runs / ".it.partial" / "checkpoints").mkdir(parents=True)
    make().create(DATA)
    assert os.listdir(runs) == ["it"]


def test_one_lock_for_all_that_write_into_a_run(make, run, tmp_path, monkeypatch):
    """Also by way of a link to it; who holds it compares again what may have changed since the first check."""
    monkeypatch.setattr(directory, "PATIENCE", 0)
    link = tmp_path / "link"
    link.symlink_to(run.path)
    with run.lock():
        for other in (make().lock(), lock(link)):
            with pytest.raises(ValueError, match="another process is working on"):
                other.__enter__()

    with pytest.raises(ValueError, match=r"seed: 0 in \S+/config\.yaml, 1 on this command line"):
        make("seed=1").lock().__enter__()


@pytest.mark.parametrize("name", ["checkpoints", "evals", "metrics.jsonl", "tokenizer/vocab.json", "config.yaml"])
def test_links_within_a_run_are_not_followed(make, run, tmp_path, name):
    (run.path / "wandb").mkdir()
    (run.path / "wandb" / "latest-run").symlink_to(tmp_path)  # wandb's own
    assert find(run.path) == run.path

    place = run.path / name
    place.parent.mkdir(exist_ok=True)
    place.touch()
    place.symlink_to(place.rename(tmp_path / "moved"))
    for use in (lambda: find(run.path), make().check):
        with pytest.raises(ValueError, match="is a link"):
            use()


@pytest.mark.parametrize("name", ["it/evals/x.json", "it/checkpoints/step=1.ckpt", ".it.lock"])
def test_a_pipe_is_refused(make, run, name):
    """To open one would wait for ever."""
    pipe = run.path.parent / name
    pipe.parent.mkdir(exist_ok=True)
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match=f"{name} is a link, a pipe or a device"):
        make().lock().__enter__()


def test_what_is_no_run_is_left_alone(make, run):
    (run.path / "config.yaml").rename(run.path / "thesis.txt")
    with pytest.raises(ValueError, match="exists and is not a run"):
        make().check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["eval.sequences=7", "logger=tensorboard", "trainer.keep_checkpoints=5", "data.cache_dir=elsewhere"], None),
        (["optim.lr=0.1", "eval.sequences=7"], r"configuration:\n  optim\.lr: 0\.004 in \S+, 0\.1 on this"),
        (["trainer.precision=auto"], None),  # a machine has made numbers of "auto"
        (["trainer.precision=32"], r"trainer\.precision: 'bf16-mixed' in \S+, '32-true' on this"),
        (["trainer.max_steps=99"], r"trainer\.max_steps: 700"),  # fewer than are trained
        (["trainer.max_steps=100"], None),
    ],
)
def test_what_may_change_and_what_not(make, run, options, message):
    """Who watches, what is measured, where, and how long; not what trains."""
    edit(run.path / "config.yaml", "trainer", precision="bf16-mixed")
    run.checkpoints.mkdir()
    (run.checkpoints / "step=100.ckpt").touch()
    again = make("trainer.precision=bf16-mixed", *options)
    if message:
        with pytest.raises(ValueError, match=message):
            again.check()
        return
    again.check()
    again.create(DATA)

    assert read_config(run.path)["trainer"]["max_steps"] == again.cfg.trainer.max_steps


def test_another_number_of_steps_leaves_the_earlier_one_on_record(make, run):
    """Where steps were trained with it."""
    run.checkpoints.mkdir()
    for steps, trained in {500: 0, 600: 100, 700: 100, 800: 700}.items():
        (run.checkpoints / f"step={trained}.ckpt").touch()
        make(f"trainer.max_steps={steps}").create(DATA)
    assert read_json(run.path / "data.json") == DATA | {"earlier_max_steps": [[500, 100], [700, 700]]}


def test_a_run_of_an_older_version_is_resumed(make, run):
    """Options that came later do what was done before; keys that are gone are read if they did nothing."""
    config = run.path / "config.yaml"
    edit(config, "optim", schedule=...)
    edit(config, "trainer", deterministic=..., checkpoint_parts=True)
    edit(config, "model", key_offset=..., parallel=False, gate="none")
    edit(config, "logger", kind="wandb")
    edit(config, "data", lengths=None)
    edit(config, overwrite=False)
    make().check()
    assert read_config(run.path) == run.cfg.model_dump()

    edit(config, "data", lengths={0: 1.0})
    with pytest.raises(ValueError, match=r"data\.lengths=.* is no longer supported"):
        read_config(run.path)


def test_each_start_is_recorded(make, run, monkeypatch):
    arguments = ["train.py", "data.files=my corpus/*.txt", "name=${pe.name}"]
    monkeypatch.setattr("sys.argv", arguments)
    make().create(DATA)
    _, second = json.loads((run.path / "environment.json").read_text())["starts"]
    assert shlex.split(second["command"])[1:] == arguments


CLONE = """
mkdir -p project/model project/corpus
cd project
echo 'a = 1' > old.py
git init -q
git add .
git -c user.name=x -c user.email=x@y commit -qm first
echo 'a = 2' > old.py
echo 'mine = 3' > model/encoding.py
echo 'text = 1' > corpus/page.py
echo 'password: 1' > keys.yaml
"""


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_changes_to_the_source_are_recorded_with_new_files(make, tmp_path, monkeypatch):
    """In a repository in place of ours. But for a corpus beneath the clone, and a file of the user's own."""
    subprocess.run(["bash", "-ec", CLONE], cwd=tmp_path, check=True)
    monkeypatch.setattr(provenance, "ROOT", tmp_path / "project")
    for module in (directory, provenance):  # without its cache
        monkeypatch.setattr(module, "source_state", provenance.source_state.__wrapped__)
    run = make()
    run.create(DATA)

    (path,) = run.path.glob("git-*.diff")
    diff = path.read_text()
    (start,) = json.loads((run.path / "environment.json").read_text())["starts"]
    assert start["commit"] in (tmp_path / "project/.git/logs/HEAD").read_text()
    assert "+a = 2" in diff
    assert "+mine = 3" in diff
    assert "corpus" not in diff
    assert "password" not in diff


def test_rows_that_are_damaged_or_cut_short(run):
    run.metrics.write_text('{"step": 1}\n{"a": 1}\n')

    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2, is damaged"):
        list(read_metrics(run.path))

    run.metrics.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert list(read_metrics(run.path)) == [{"step": 1}, {"step": 2}]

    run.truncate_metrics(1)
    assert list(read_metrics(run.path)) == [{"step": 1}]


def test_nothing_is_written_into_another_run_that_takes_its_place(make, run):
    shutil.rmtree(run.path)
    make("seed=1").create(DATA)
    for write in (lambda: run.append({"step": 2}), run.sync):
        with pytest.raises(ValueError, match="is another run by now"):
            write()
    assert not run.metrics.exists()
