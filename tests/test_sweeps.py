"""A sweep: its jobs are the runs one by one, mistakes end it before any work, failures are named and skipped."""

import re
import resource
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ENCODINGS, ROOT, rows_of
from lives import On, kill, live
from reader import Reader

from conf import cli
from evaluation import page
from evaluation.compare import compare
from model import callbacks
from model.machine import forget_past_work

INFINITE = ["optim.lr=1e38", "optim.warmup_steps=0", "optim.grad_clip=null"]


def runs_in(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def break_off(monkeypatch, name, happens):
    """Let it happen in the third step of the run `name`: raise an error, or call."""
    on_batch_end = callbacks.StepEnd.on_train_batch_end

    def stop(self, trainer, *arguments):
        on_batch_end(self, trainer, *arguments)
        if trainer.global_step == 3 and self.metrics.parent.name == name:
            if isinstance(happens, Exception):
                raise happens
            happens()

    monkeypatch.setattr(callbacks.StepEnd, "on_train_batch_end", stop)


def test_jobs_are_the_runs_one_by_one(train):
    outcome = train("pe=rope,alibi", "seed=0,1", "-m")
    assert outcome.code == 0, outcome.err
    assert runs_in(train.runs) == ["alibi-text", "alibi-text-s1", "rope-text", "rope-text-s1"]
    assert "sweep of 4 runs: 4 to train, 0 complete" in outcome.out
    assert re.search(r"^\[2/4\] rope-text-s1: done in \d:\d\d; 2 left, about \d min$", outcome.out, re.M)
    assert "sweep: 4 of 4 runs are complete" in outcome.out
    train("pe=alibi", "seed=1", "name=alone")
    assert rows_of(train.runs / "alone") == rows_of(train.runs / "alibi-text-s1")


def test_a_stopped_sweep_is_continued(train, monkeypatch):
    sweep = ["pe=rope,alibi,nope", "model.dropout=0.1"]
    with monkeypatch.context() as patch:
        break_off(patch, "alibi-text", lambda: signal.raise_signal(signal.SIGINT))  # Ctrl-C
        assert train(*sweep, "-m").code == 130
    assert runs_in(train.runs) == ["alibi-text", "rope-text"]
    untouched = {path: path.stat().st_mtime_ns for path in (train.runs / "rope-text").rglob("*")}
    outcome = train(*sweep, "-m")
    assert outcome.code == 0
    assert "[1/3] rope-text: complete\n" in outcome.out
    assert outcome.out.count("validation loss") == 2  # no table of the complete one
    assert "continuing" in outcome.out
    assert {path: path.stat().st_mtime_ns for path in (train.runs / "rope-text").rglob("*")} == untouched
    train(*sweep, f"runs_dir={train.runs}/unbroken", "-m")
    for name in ("rope-text", "alibi-text", "nope-text"):
        assert rows_of(train.runs / name) == rows_of(train.runs / "unbroken" / name)
    assert train(*sweep, "-m").code == 0


def content(folder):
    """What the page of the runs in `folder` says, but for what a clock measured, where they lie and when they ran."""
    read = Reader(page.render(compare([folder])))
    assert read.words.count("tokens/s") == read.words.count("memory, MB") == 1  # the last columns but one
    rows = {id: cells[:-3] + cells[-1:] for id, cells in read.rows.items()}
    own = re.compile(r"environment\.|runs_dir$")
    configs = [{k: v for k, v in (read.data["common"] | run).items() if not own.match(k)} for run in read.data["runs"]]
    return rows, read.data["figures"], configs


def test_a_killed_sweep_continued_gives_the_same_page(train):
    sweep = ["pe=rope,yarn", "trainer.log_every=1"]
    in_second = On("model.callbacks:StepEnd.on_train_batch_end", 6 + 3, kill)
    assert live([*train.complete(*sweep), "-m"], in_second) == -signal.SIGKILL
    assert compare([train.runs]).left_out == [(train.runs / "yarn-text", "not finished: step 2 of 6")]
    assert train(*sweep, "-m").code == 0
    unbroken = train.runs.with_name("unbroken")
    assert train(*sweep, f"runs_dir={unbroken}", "-m").code == 0
    assert len(compare([unbroken]).runs) == 2
    assert content(train.runs) == content(unbroken)


def test_a_failing_job_is_named_and_the_others_go_on(train, monkeypatch):
    sweep = ["pe=rope,alibi,nope"]
    with monkeypatch.context() as patch:
        break_off(patch, "alibi-text", RuntimeError("power cut"))
        outcome = train(*sweep, "-m")
    assert outcome.code == 1
    assert "[2/3] alibi-text: failed: power cut" in outcome.err
    assert "raise happens\nRuntimeError: power cut\n" in outcome.err  # where, since it is nobody's mistake
    assert "[3/3] nope-text: done" in outcome.out
    assert "sweep: 2 of 3 runs are complete" in outcome.out
    assert "  alibi-text failed: power cut\n" in outcome.err
    assert "the same command trains these" in outcome.err
    assert train(*sweep, "-m").code == 0
    assert rows_of(train.runs / "alibi-text")[-1]["step"] == 6


def test_a_diverging_job_is_named(train):
    outcome = train("pe=rope,alibi", *INFINITE, "-m")
    assert outcome.code == 1
    assert "Traceback" not in outcome.err
    for number, name in (("1/2", "rope-text"), ("2/2", "alibi-text")):
        assert f"[{number}] {name}: failed: the " in outcome.err
    again = train("pe=rope,alibi", *INFINITE, "-m")
    assert again.code == 1
    assert "lower optim.lr=1e+38" in again.err


def test_overwriting_counts_only_new_results(train, monkeypatch):
    assert train("pe=rope,alibi", "-m").code == 0
    break_off(monkeypatch, "alibi-text", OSError("disk full"))
    outcome = train("pe=rope,alibi", "overwrite=true", "-m")
    assert outcome.code == 1
    assert "2 to train, 0 complete" in outcome.out
    assert "sweep: 1 of 2 runs are complete" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pe=rope,yarm"], "pe=yarm: there is no such option; did you mean yarn? (pe=yarm)"),
        (["pe=yarn,rope", "pe.scale=2"], "pe.scale: there is no such key"),
        (
            ["pe=rope,nope", "optim.lr=1e-3,-1"],
            "optim.lr=-1: it should be greater than 0 (pe=rope optim.lr=-1, pe=nope",
        ),
        (["pe=cope", "pe.npos_max=0,4", "name='a${pe.npos_max}'"], "pe.npos_max=0"),
        (["seed=0,1", "name=one"], "seed=0 and seed=1 would both be"),
    ],
)
def test_a_mistake_in_one_job_ends_the_sweep_before_any_work(train, arguments, message):
    outcome = train(*arguments, "-m")
    assert outcome.code == 2
    assert message in outcome.err
    assert not train.runs.exists()


def test_the_name_that_is_proposed_tells_runs_apart(train):
    sweep = ["pe=yarn", "pe.scale=2,4", "model=tiny,llama_tiny", "trainer.max_steps=1", "optim.lr=1e-3"]
    outcome = train(*sweep, "-m")
    assert outcome.code == 2
    name = re.search(r"name='.*'", outcome.err)[0]
    assert train(*sweep, name, "-m").code == 0
    assert runs_in(train.runs) == [
        f"yarn-text-scale{scale}-{model}-s0" for scale in (2, 4) for model in ("llama_tiny", "tiny")
    ]


def test_another_configuration_under_a_name_is_refused_before_any_work(train):
    train("pe=rope")
    outcome = train("pe=alibi,rope", "trainer.max_steps=7", "-m")
    assert outcome.code == 2
    assert "trainer.max_steps: 6 there, 7 now" in outcome.err
    assert runs_in(train.runs) == ["rope-text"]


@pytest.fixture
def one_thread(monkeypatch):
    """The order of sums depends on the number of threads: one here and in every process that joblib starts."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # joblib leaves it as it is where it is set
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_jobs_in_parallel(train, one_thread):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    sweep = ["pe=rope,alibi", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    outcome = train(*sweep, "-m")
    assert outcome.code == 0, outcome.err
    for number, name in (("1/2", "rope-text"), ("2/2", "alibi-text")):
        assert f"[{number}] {name}: done" in outcome.out
        assert "step 6/6" in (train.runs / ".sweep" / f"{name}.log").read_text()
    assert "step 6/6" not in outcome.out
    train("pe=alibi", "name=alone")
    assert rows_of(train.runs / "alone") == rows_of(train.runs / "alibi-text")
    outcome = train(*sweep, *INFINITE, "overwrite=true", "-m")
    assert outcome.code == 1
    assert "[1/2] rope-text: failed: the " in outcome.err
    assert "  alibi-text failed: the " in outcome.err


def test_a_missing_launcher_is_told():
    program = "import sys, runpy; sys.modules['hydra_plugins'] = None; sys.argv[:] = sys.argv[1:]; "
    program += "runpy.run_path('train.py', run_name='__main__')"
    command = [sys.executable, "-c", program, "train.py", "-m", "pe=rope,nope", "hydra/launcher=joblib"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == 'error: hydra/launcher=joblib needs a package: pip install "ropewalk[sweep]"\n'


@pytest.mark.parametrize(("size", "part"), [("compare", "seed=0"), ("compare_gpu", "pe=rope")])
def test_the_standard_comparison(train, monkeypatch, size, part):
    """The experiment says what is swept; the command line may narrow it."""
    jobs = []
    monkeypatch.setattr("sys.argv", ["train.py", "-m", f"experiment={size}", part, f"runs_dir={train.runs}"])
    with pytest.raises(SystemExit):  # nothing is trained
        cli.run(jobs.append)
    assert len({cfg.name for cfg in jobs}) == len(jobs)
    names, seeds = {cfg.pe["name"] for cfg in jobs}, {cfg.seed for cfg in jobs}
    if part == "seed=0":
        assert (len(names) >= 8, names <= set(ENCODINGS), seeds) == (True, True, {0})
    else:
        assert (names, seeds) == ({"rope"}, {0, 1, 2})
    assert max(jobs[0].lengths) == 8 * jobs[0].train_len
    assert len({str(cfg.model_dump(exclude={"pe", "seed", "name"})) for cfg in jobs}) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="the peak cannot be reset elsewhere")
def test_a_job_does_not_inherit_the_peak_memory_of_another():
    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    before = peak()
    block = bytearray(300 << 20)
    assert peak() > before + 250
    del block
    forget_past_work()
    assert peak() < before + 50
