"""A run directory: who may write into it, what it may continue, and what it says about its making."""

import contextlib
import hashlib
import json
import os
import shlex
import shutil
import subprocess
from functools import partial

import pytest
import synthetic
import yaml
from hypothesis import given, strategies

from ropewalk.app import run_dir
from ropewalk.app.init_from import train_values
from ropewalk.app.resolve import resolve
from ropewalk.app.run_dir import RunDir, data_options, find, lock, read_config, read_metrics
from ropewalk.files import read_json, write_json
from ropewalk.training import provenance
from ropewalk.training.checkpoints import Progress
from ropewalk.training.rows import check_rows

DATA = {"tokenizer": "bytes"}


@pytest.fixture
def make(tmp_path):
    """`make("seed=1", ...)` is the directory of that run, as a new start of the program sees it."""
    return lambda *options: RunDir(resolve(train_values("pe=nope", f"runs_dir={tmp_path}/runs", "name=it", *options)))


def elsewhere(action) -> str:
    """What another process is told that does `action`."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            action()
            os.write(writer, b"free")
        except Exception as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return os.read(reader, 1000).decode()


def test_overwriting_belongs_to_the_first_start_only(make):
    """Else a job that is requeued with overwrite=true never ends."""
    make().create(DATA)
    first = make("overwrite=true")
    assert not first.begun  # what is there is to be replaced
    old, new = make().run_id, first.run_id
    first.create(DATA)
    assert first.begun
    assert make().run_id == new != old
    again = make("overwrite=true")
    assert again.begun  # interrupted: the same command goes on
    again.check()
    assert again.run_id == new
    assert not make("overwrite=true", "seed=1").begun
    write_json(again.path / "training.json", synthetic.TRAINING | {"steps": 700})
    assert not make("overwrite=true").begun  # complete: afresh
    assert make().complete


def test_what_a_kill_left_behind_is_removed(make):
    run = make()
    for overwrite in (False, True):
        for left in (".it.partial/checkpoints", ".it.old/evals"):
            (run.path.parent / left).mkdir(parents=True)
        make(f"overwrite={overwrite}").create(DATA)
        assert [path.name for path in run.path.parent.iterdir()] == ["it"]


def test_one_lock_for_all_that_write_into_a_run(make, tmp_path, monkeypatch):
    monkeypatch.setattr(run_dir, "PATIENCE", 0)
    run = make()
    run.create(DATA)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "it").symlink_to(run.path)
    with run.lock():
        for use in (make().check, make("overwrite=true").check, lock(tmp_path / "other" / "it").__enter__):
            assert "another process works on" in elsewhere(use)
    assert elsewhere(lock(run.path).__enter__) == "free"
    with pytest.raises(ValueError, match=r"seed: 0 in \S+/config\.yaml, 1 on this command line"), make("seed=1").lock():
        pytest.fail("it must not come to this, though it was free when it was checked before")


@pytest.mark.parametrize("name", ["checkpoints", "evals", "metrics.jsonl", "tokenizer/vocab.json", "config.yaml"])
def test_links_within_a_run_are_not_followed(make, tmp_path, name):
    run = make()
    run.create(DATA)
    (run.path / "wandb").mkdir()
    (run.path / "wandb" / "latest-run").symlink_to(tmp_path)  # wandb's own
    assert find(run.path) == run.path
    place = run.path / name
    place.parent.mkdir(exist_ok=True)
    if not place.exists():
        place.touch()
    place.rename(tmp_path / "moved")
    place.symlink_to(tmp_path / "moved")
    for use in (lambda: find(run.path), make().check, make("overwrite=true").check, lambda: make().lock().__enter__()):
        with pytest.raises(ValueError, match="is a link, which is not followed"):
            use()


def test_what_is_neither_file_nor_folder_is_refused(make):
    """To open a named pipe would wait for ever."""
    run = make()
    run.create(DATA)
    for name in ("evals/x.json", "tokenizer/v.tiktoken", "metrics.jsonl", "checkpoints/step=1.ckpt"):
        pipe = run.path / name
        pipe.parent.mkdir(exist_ok=True)
        os.mkfifo(pipe)
        for use in (lambda: find(run.path), make().check):
            with pytest.raises(ValueError, match=f"{name} is neither a file nor a folder"):
                use()
        with pytest.raises(ValueError, match="is neither a file nor a folder"):
            read_json(pipe)
        pipe.unlink()
    lock_file = run.path.with_name(".it.lock")
    lock_file.unlink(missing_ok=True)
    os.mkfifo(lock_file)
    with pytest.raises(ValueError, match="is neither a file nor a folder"), lock(run.path):
        pytest.fail("a pipe is no lock")
    lock_file.unlink()
    lock_file.symlink_to(run.path / "config.yaml")
    with pytest.raises(ValueError, match="is a link"), lock(run.path):
        pytest.fail("a link is no lock")


def test_a_model_of_another_configuration_is_refused(make):
    """Its weights fit, so that nothing but the results would tell."""
    run = make("pe=rope")
    run.create(DATA)
    about = {key: run.cfg.model_dump()[key] for key in ("model", "pe", "train_len")}
    write_json(run.path / "model.json", about)
    assert find(run.path) == run.path
    for section, key, value in (("pe", "base", 5.0), ("model", "norm_eps", 0.1)):
        write_json(run.path / "model.json", about | {section: about[section] | {key: value}})
        with pytest.raises(ValueError, match=f"model.json is damaged: {section}.{key} is {value}, and"):
            find(run.path)


def test_a_complete_run_is_not_locked(make):
    """It may lie in a read-only folder."""
    run = make()
    run.create(DATA)
    write_json(run.path / "training.json", synthetic.TRAINING | {"steps": 700})
    run.check()
    assert make().complete
    assert not list(run.path.parent.glob(".*lock"))


def test_what_may_change_and_what_not(make):
    stranger = make().path / "thesis.txt"
    stranger.parent.mkdir(parents=True)
    stranger.touch()
    with pytest.raises(ValueError, match="exists and is not a run"):
        make("overwrite=true").check()
    stranger.unlink()
    make().create(DATA)
    make("eval.sequences=7", "logger=csv", "trainer.keep_checkpoints=5", "data.cache_dir=elsewhere").check()
    with pytest.raises(ValueError, match=r"optim\.lr: 0\.004 in \S+, 0\.1 on this") as caught:
        make("optim.lr=0.1", "eval.sequences=7").check()
    assert "eval" not in str(caught.value)


def test_the_first_checkpoint_was_due_by_the_longest_interval_of_all_starts(make):
    """Of three starts that were killed before their first checkpoint; what is lost is still told after them."""
    for interval, last in ((10, 5), (100, 50), (10, 5)):
        run = make(f"trainer.checkpoint_every={interval}")
        if run.begun:
            check_rows(run, Progress())
        run.create(DATA)
        run.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, last + 1)))
    run.metrics.write_text('{"step": 101}\n')
    with pytest.raises(ValueError, match="ends at step 101, and there is no checkpoint"):
        check_rows(make("trainer.checkpoint_every=10"), Progress())


def test_each_start_is_recorded(make, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "data.files=my corpus/*.txt", "name=${pe.name}"])
    make().create(DATA)
    make().create(DATA)
    first, second = json.loads((make().path / "environment.json").read_text())["starts"]
    assert shlex.split(first["command"])[1:] == ["train.py", "data.files=my corpus/*.txt", "name=${pe.name}"]
    assert {"commit", "dirty", "torch", "packages", "threads", "time"} <= second.keys()


needs_git = pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")


@needs_git
def test_changes_to_the_source_are_recorded_with_new_files(tmp_path, monkeypatch, make):
    project = tmp_path / "project"
    project.mkdir()
    git = ["git", "-C", str(project), "-c", "user.name=x", "-c", "user.email=x@y"]
    (project / "old.py").write_text("a = 1\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr(provenance, "ROOT", project)
    for module in (run_dir, provenance):  # without its cache
        monkeypatch.setattr(module, "source_state", provenance.source_state.__wrapped__)
    assert (provenance.provenance()["dirty"], provenance.provenance()["diff_sha256"]) == (False, None)
    (project / "old.py").write_text("a = 2\n")
    (project / "encoding.py").write_text("mine = 3\n")
    make().create(DATA)
    found = provenance.provenance()
    assert found["dirty"]
    diff = (make().path / f"git-{found['diff_sha256'][:8]}.diff").read_text()
    assert "+a = 2" in diff
    assert "+mine = 3" in diff


@needs_git
def test_a_corpus_beneath_the_clone_is_not_part_of_the_source(tmp_path, monkeypatch):
    """Nor is a large new file copied: its hash says which it was."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    for folder in ("corpus", "model"):
        (tmp_path / folder).mkdir()
    (tmp_path / "corpus" / "page.py").write_text("text = 1\n")
    (tmp_path / "model" / "mine.py").write_text("mine = 1\n")
    (tmp_path / "large.py").write_text("#" * 200_000)
    new_files = provenance.source_state.__wrapped__()[1]
    assert "+mine = 1" in new_files
    assert "corpus" not in new_files
    assert f"large.py: 200000 bytes, SHA-256 {hashlib.sha256(b'#' * 200_000).hexdigest()}" in new_files
    assert len(new_files) < 1000


def test_damaged_files_are_named(make):
    run = make()
    run.create(DATA)
    run.metrics.write_text('{"step": 1}\n{"a": 1}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2, is damaged"):
        list(read_metrics(run.path))
    run.metrics.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [row["step"] for row in read_metrics(run.path)] == [1, 2]  # cut short by a kill
    run.truncate_metrics(1)
    assert run.metrics.read_text() == '{"step": 1}\n'
    config = run.path / "config.yaml"
    values = yaml.safe_load(config.read_text())
    assert data_options(run.path, "ours") == values["data"] | {"cache_dir": "ours"}
    hostile = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))
    for text, message in (
        ("a: &x {b: *x}", "has an alias"),
        (hostile, "has an alias"),
        (yaml.safe_dump({k: v for k, v in values.items() if k != "eval"}), "eval is missing"),
        (yaml.safe_dump(values | {"data": 5}), "data=5: it should be"),
        (yaml.safe_dump(values | {"trainer": values["trainer"] | {"max_steps": "x"}}), "max_steps='x': it should be"),
    ):
        config.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_config(run.path)


@pytest.mark.parametrize(("name", "read"), [("config.yaml", read_config), ("metrics.jsonl", read_metrics)])
def test_a_file_without_an_end_is_refused(make, name, read):
    """A sparse file of many GB takes no room on a disk, but would take it all in memory."""
    run = make()
    run.create(DATA)
    with (run.path / name).open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match="cannot be read"):
        list(read(run.path))


def test_a_run_may_end_earlier_but_not_before_what_it_has_trained(make):
    make().create(DATA)
    (make().path / "checkpoints").mkdir()
    (make().path / "checkpoints" / "step=100.ckpt").touch()
    with pytest.raises(ValueError, match=r"trainer\.max_steps: 700"):
        make("trainer.max_steps=99").check()
    shorter = make("trainer.max_steps=100")
    shorter.check()
    shorter.create(DATA)
    assert read_config(shorter.path)["trainer"]["max_steps"] == 100


def test_a_copied_run_can_be_trained_on(make):
    run = make()
    run.create(DATA)
    shutil.copytree(run.path, run.path.with_name("copy"))
    copy = make("name=copy")
    copy.check()
    assert copy.begun


def test_nothing_is_written_into_another_run_that_takes_its_place(make):
    run = make()
    run.create(DATA)
    run.append({"step": 1})
    shutil.rmtree(run.path)
    make("seed=1").create(DATA)
    for write in (partial(run.append, {"step": 2}), run.sync):
        with pytest.raises(ValueError, match="is another run by now"):
            write()
    assert not run.metrics.exists()


def test_a_run_from_before_an_option_is_resumed(make):
    """Options that came later have the value that does what was done before, whatever their section."""
    run = make()
    run.create(DATA)
    config = run.path / "config.yaml"
    values = yaml.safe_load(config.read_text())
    for section, key in [("optim", "schedule"), ("trainer", "deterministic"), ("model", "key_offset")]:
        del values[section][key]
    config.write_text(yaml.safe_dump(values))
    make().check()
    assert read_config(run.path) == run.cfg.model_dump()
    with pytest.raises(ValueError, match=r"optim\.schedule: 'cosine' in .*, 'linear' on this command line"):
        make("optim.schedule=linear").check()


SYNTAX = strategies.text(alphabet=":-[]{}&*!#,\"'\n\t a1.é\x00\ufeff", max_size=200).map(str.encode)


@given(content=strategies.binary(max_size=200) | SYNTAX)
def test_any_content_is_read_or_refused(tmp_path_factory, content):
    """By a ValueError, which the programs report; never by an error of a library."""
    run = tmp_path_factory.mktemp("run")
    for name in ("config.yaml", "metrics.jsonl", "data.json"):
        (run / name).write_bytes(content)
    for read in (read_config, lambda run: list(read_metrics(run)), lambda run: read_json(run / "data.json")):
        with contextlib.suppress(ValueError):
            read(run)
