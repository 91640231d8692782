"""Two processes train what one does, fail together, and go on from each other's checkpoints."""

import signal
import subprocess
import sys
from functools import partial

import pytest
import torch
from conftest import ROOT, rows_of
from differences import differences, results
from process_helpers import STEP, On, kill, terminated, together
from safetensors.torch import load_file

from ropewalk.run.directory import steps_in
from ropewalk.run.stop import EXIT_INTERRUPTED, EXIT_STOPPED
from ropewalk.training.checkpoints import path_of

# 7 sequences of validation are no multiple of two.
COMMON = ("trainer.precision=32", "trainer.grad_accum_steps=2", "trainer.log_every=3", "trainer.val_tokens=112")
TEXT = ("pe=cope", *COMMON, "stages=[{steps: 3, train_len: 8, pe: {scaling: code}}]")
# Gates have gradients that the norm of all shows: FSDP leaves those of encodings to us.
TASK = ("pe=fox", "data=flip_flop", *COMMON)
FSDP = ("trainer=fsdp", *TASK)
QUICK = {
    "text": TEXT,
    "task": TASK,
    "fsdp": FSDP,
    "shared texts": ("trainer.context_parallel=2", *TEXT),
}
SLOW = {"replicas": (*FSDP, "trainer.replicas=2"), "fsdp in stages": ("trainer=fsdp", *TEXT)}
for pe in ("rope", "fox_rope", "path", "gemma3", "dca"):
    SLOW[f"shared texts, {pe}"] = ("trainer=fsdp", "trainer.context_parallel=2", f"pe={pe}", *COMMON)
KINDS = QUICK | SLOW
BY_NIGHT = [pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW]
OF_SEVERAL = ("trainer=fsdp", "trainer.replicas=2", "trainer.context_parallel=2")


@pytest.fixture
def job(train, tmp_path):
    """`job([action or None for each process], *options, codes=...)`: what each said, until it ended with its code."""

    def run(actions, *options, codes=None):
        if not any(option.startswith("trainer=") for option in options):
            options = ("trainer=ddp", *options)
        folder = tmp_path / "said"
        ended = together(train.complete(*options), folder, *actions)
        said = [(folder / str(rank)).read_text() for rank in range(len(actions))]
        assert ended == (codes or [0] * len(actions)), said
        return said

    return run


@pytest.fixture
def pair(job, finished, train, tmp_path_factory):
    """`pair(*options)` is the run of these options by two processes from start to end, made only once."""

    def run(*options):
        key = ("pair", *options)
        if key not in finished:
            said = job([None, None], *options, "name=pair")
            assert said[1] == ""  # one speaks
            folder = tmp_path_factory.mktemp("pair")
            finished[key] = (train.runs / "pair").rename(folder / "run")
        return finished[key]

    return run


def assert_same_numbers(one, other, tolerance=1e-6):
    """All rows and results agree to `tolerance`.

    The order of additions differs: of gradients between processes, and within the products over a whole micro-batch.
    A sum of N terms in fp32 then changes by some 6e-8 * sqrt(N); a step of AdamW does not enlarge it at these sizes.
    """
    near = partial(pytest.approx, rel=tolerance, abs=2e-5)
    expected = {key: near(value) if isinstance(value, float) else value for key, value in results(one).items()}
    assert results(other) == expected


@pytest.mark.parametrize("kind", [*QUICK, *BY_NIGHT])
def test_two_processes_are_one(pair, straight, kind):
    """The same numbers; the weights are in one file, and in the checkpoint, under the names of the plain network."""
    options = KINDS[kind]
    two = pair(*options)
    of_one = [option for option in options if option not in OF_SEVERAL]
    one = straight(*of_one)

    assert_same_numbers(one, two)

    weights = load_file(two / "model.safetensors")
    saved = torch.load(path_of(two / "checkpoints", 6), weights_only=True)["model"]

    assert weights.keys() == load_file(one / "model.safetensors").keys()
    torch.testing.assert_close({name: saved[name] for name in weights}, weights, rtol=0, atol=0)


@pytest.mark.slow
def test_replicas_of_two_ranks_each(train, job, straight):
    options = (*TEXT, "trainer.grad_accum_steps=1")  # a sequence of the batch for each rank
    job([None] * 4, "trainer=fsdp", *options, "trainer.replicas=2", "name=replicas")
    assert_same_numbers(straight(*options), train.runs / "replicas")


def small_batches() -> None:
    """Evaluate two sequences at a time."""
    from ropewalk.evaluation import scoring

    scoring.BATCH_TOKENS = {"cpu": 32}


def test_of_three_batches_of_an_evaluation_one_process_has_two(train, job, straight):
    options = ("pe=rope", "data=flip_flop", "trainer.max_steps=1", "eval.sequences=5")
    job([small_batches] * 2, *options, "name=two")
    assert_same_numbers(straight(*options), train.runs / "two")


@pytest.mark.parametrize("portions", [2, 4])
def test_each_scored_token_weighs_the_same(trained, straight, portions):
    """However many of them are in each portion of a batch."""
    options = "pe=rope", "data=flip_flop", "trainer.max_steps=1"
    (row,) = rows_of(trained(*options, f"trainer.grad_accum_steps={portions}"))
    (expected,) = rows_of(straight(*options))

    assert row == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", ["text", "fsdp", *BY_NIGHT])
def test_killed_and_resumed(train, pair, job, kind):
    """All processes in mid-accumulation, then one of them, which ends the other."""
    options = (*KINDS[kind], "model.dropout=0.1")
    job([On(STEP, 6, kill)] * 2, *options, "name=killed", codes=[-signal.SIGKILL] * 2)
    said = job([None, On(STEP, 3, kill)], *options, "name=killed", codes=[2, -signal.SIGKILL])

    assert "error: another process of this run has ended" in said[0]

    said = job([None, None], *options, "name=killed")

    assert "resuming" in said[0]
    assert differences(train.runs / "killed", pair(*options)) == []


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_another_number_of_processes_goes_on(train, job, straight, kind):
    """Two, of which one gets a signal in mid-accumulation, then one, then two again; a row is due in between."""
    kind = f"trainer={kind}"
    run = train.runs / "changing"
    stopping = On(STEP, 3, partial(signal.raise_signal, signal.SIGTERM))
    job([None, stopping], kind, *TEXT, "name=changing", codes=[EXIT_STOPPED] * 2)

    assert steps_in(run / "checkpoints")[-1] == 2

    with On(STEP, 3, partial(signal.raise_signal, signal.SIGINT)):
        train(*TEXT, "name=changing", code=EXIT_INTERRUPTED)

    assert steps_in(run / "checkpoints")[-1] == 4

    job([None, None], kind, *TEXT, "name=changing")

    assert [row["step"] for row in rows_of(run)] == [1, 3, 6]
    assert_same_numbers(straight(*TEXT), run)


def lack_memory() -> None:
    raise OSError("no memory left")


EXPLODES = ("trainer=fsdp", "optim.lr=1e30", "optim.warmup_steps=0", "optim.grad_clip=null")
FAILURES = {  # what happens on both ranks, the options, and the message
    "not finite in shards": ([None, None], EXPLODES, "infinite or NaN in step 2"),
    "on the second": ([None, On(STEP, 3, lack_memory)], (), "no memory left"),
    "on the first": ([On("ropewalk.run.directory.provenance", 1, lack_memory), None], (), "no memory left"),
}


@pytest.mark.parametrize("where", FAILURES)
def test_an_error_ends_all_and_is_told_once(job, where):
    actions, options, message = FAILURES[where]
    both = "".join(job(actions, "pe=rope", *options, codes=[2, 2]))

    assert both.count("error: ") == 1
    assert message in both


def test_lightning_starts_the_ranks_that_are_asked_for(train):
    options = train.complete("pe=rope", "trainer=ddp", "trainer.devices=2", "name=launched")
    command = [sys.executable, "train.py", *options]
    out = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    assert "processes: 2\n" in out
    assert (train.runs / "launched" / "training.json").is_file()


@pytest.mark.slow
def test_a_run_that_lightning_started_goes_on_by_torchrun(train, job):
    """A signal to the first process, which has started the other one, stops the run."""
    options = [f"trainer.{key}=100" for key in ("log_every", "val_every", "checkpoint_every")]
    options += ["pe=rope", "trainer.max_steps=300", "logger=tensorboard", "name=launched"]
    run = train.runs / "launched"
    command = [sys.executable, "train.py", *train.complete(*options, "trainer=ddp", "trainer.devices=2")]
    out, err = terminated(command, run / "checkpoints/step=100.ckpt")

    assert out.count("stopped after step") == 1
    assert "rror" not in err

    assert job([None, None], *options)[0].count("resuming") == 1

    assert [row["step"] for row in rows_of(run)] == [1, 100, 200, 300]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_compiled_processes_compute_what_one_does_uncompiled(train, job, straight, kind):
    options = ["pe=rope", "trainer.compile=true"]
    job([None, None], f"trainer={kind}", *options, "name=compiled")
    assert_same_numbers(straight("pe=rope"), train.runs / "compiled", 1e-5)
