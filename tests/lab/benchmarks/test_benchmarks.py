"""Benchmarks count memory rightly, compare round by round, train as train.py does. No test looks at a time."""

import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from conftest import write_knots

from conf.errors import ConfigError
from conf.schema import parse
from lab.benchmarks import measure, training
from ropewalk.app.compose import composed, plain
from scripts import bench


@pytest.fixture
def options(tmp_path):
    """Options of a small model on a small text, and one head of 64 channels."""
    corpus = write_knots(tmp_path / "corpus")
    small = [
        f"data.files={corpus}/*.txt",
        f"data.cache_dir={tmp_path}",
        "data=text",
        "data.val_fraction=0.3",
        "device=cpu",
        "model.n_layer=2",
        "model.dim=32",
        "train_len=16",
        "trainer.batch_size=4",
        "rounds=2",
        "steps=1",
        "n_head=1",
        "encodings=[t5]",
        "lengths=[32]",
    ]
    with composed("bench", "mode=training", *small) as config:
        return parse(bench.Arguments, plain(config))


def test_the_measured_memory_is_all_that_is_held_at_once():
    """q.exp() is the result, and its gradient."""
    q = torch.zeros(1000, requires_grad=True)
    held = measure.peak_memory(lambda: torch.autograd.grad(q.exp().sum(), q), "cpu")

    assert held == pytest.approx(2 * q.nbytes, rel=0.1)


def test_times_are_compared_round_by_round():
    assert measure.ratio([2.0, 10.0, 6.0], [1.0, 10.0, 2.0]) == "2.00 (1.50 to 2.50)"


def test_the_bare_loop_trains_what_train_py_does(options):
    cfg = training.configuration(options, "cope")
    bare = torch.stack([*islice(training.bare(cfg), 6)])
    trained = torch.stack([*islice(training.trained(cfg), 6)])

    torch.testing.assert_close(trained, bare, rtol=1e-5, atol=0)
    assert bare[5] < bare[0]


@pytest.mark.parametrize("mode", ["attention", "training"])
def test_each_mode_ends_with_a_row_of_the_encoding(options, mode):
    *_, last_row = measure.markdown(bench.MODES[mode](options))

    assert last_row.startswith("| t5 | ")


@pytest.mark.parametrize("mode", ["attention", "training"])
def test_no_encoding_takes_the_row_of_another(options, mode):
    twice = options.model_copy(update={"encodings": ["t5", {"pe": "t5", "num_buckets": 16}]})
    with pytest.raises(ConfigError, match="encodings has t5 twice: name one otherwise"):
        list(bench.MODES[mode](twice))


def test_a_folder_without_nanogpt_is_refused(options, tmp_path):
    with pytest.raises(ConfigError, match=r"model\.py"):
        next(bench.MODES["peers"](options.model_copy(update={"nanogpt": str(tmp_path)})))


@pytest.mark.slow
def test_the_script_for_a_gpu_runs_each_part():
    """At small sizes on the CPU. The check of kernels has too few seconds here, and says so."""
    root = Path(bench.__file__).parents[1]
    small = "device=cpu model.n_layer=1 model.dim=32 model.n_head=2 rounds=2 steps=1 train_len=16"
    environment = {
        "PYTHON": sys.executable,
        "LIMIT": "600",
        "MINUTES": "0.01",
        "CHECK": f"{small} encodings=[rope] lengths=[32] batch=1",
        "SMALLER": f"{small} trainer.batch_size=2",
    }

    run = subprocess.run(
        ["bash", "lab/benchmarks/gpu.sh"],
        cwd=root,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )

    assert run.returncode == 0, run.stderr
    assert "**Not exact, or not checked**" in run.stdout
    assert run.stdout.count("| rope, bare loop |") == 5
    assert run.stdout.count("| Llama of transformers |") == 2  # a row would be an error if the first losses differed
