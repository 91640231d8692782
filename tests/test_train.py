"""A run from its command line to its files: complete, continued, refused, repeated."""

import json
import subprocess
import sys

import pytest
import torch
import yaml
from conftest import ROOT, rows_of
from safetensors.torch import load_file

from evaluation.results import Results
from model import callbacks, store
from model.checkpoints import checkpoints_in


def weights(run_dir) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "model.safetensors")


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_the_files_of_a_run(train):
    outcome = train("pe=yarn")
    assert outcome.code == 0, outcome.err
    run = train.runs / "yarn-text"
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["trainer"]["max_steps"] == 6
    assert config["pe"]["original_len"] == 16  # resolved
    assert json.loads((run / "environment.json").read_text())["packages"]["torch"] == torch.__version__
    assert json.loads((run / "data.json").read_text())["tokenizer"]
    assert (run / "figures" / "extrapolation.png").stat().st_size > 10_000
    rows = rows_of(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 6]  # log_every=2, val_every=3
    assert [row["step"] for row in rows if "val/loss" in row] == [3, 6]
    assert all(row["tokens"] == 64 * row["step"] for row in rows)
    assert set(rows[0]) == {"step", "tokens", "train/loss", "lr", "grad_norm"}
    results = Results.load(run / "results.json")
    assert [(r.reading, r.length) for r in results.lengths] == [
        (label, n) for label in ("scale 1, as trained", "scale 4") for n in (8, 16, 32, 64, 128)
    ]
    assert results.validation.loss == rows[-1]["val/loss"]
    assert results.training.tokens == 6 * 64
    assert "scale 4" in outcome.out


@pytest.mark.parametrize("name", ["rope", "yarn", "cope", "nope"])
def test_loss_falls(train, name):
    assert train(f"pe={name}", "trainer.max_steps=40", "trainer.log_every=10", "optim.lr=0.01").code == 0
    losses = [row["train/loss"] for row in rows_of(train.runs / f"{name}-text")]
    assert losses[-1] < 0.7 * losses[0]
    assert all(loss == loss for loss in losses)


def test_every_encoding_trains(train, encoding):
    """50 steps from the command line: finite, falling loss, and an evaluation at every length it is defined for."""
    outcome = train(f"pe={encoding}", "trainer.max_steps=50", "trainer.log_every=10", "trainer.val_every=50")
    assert outcome.code == 0, outcome.err
    run = train.runs / f"{encoding}-text"
    losses = [row["train/loss"] for row in rows_of(run)]
    assert losses[-1] < losses[0] - 0.5
    results = Results.load(run / "results.json")
    measured = {row.length for row in results.lengths}
    skipped = {n for lengths in results.skipped.values() for n in lengths}
    assert measured | skipped == {8, 16, 32, 64, 128}
    assert all(0 < row.loss < 20 for row in results.lengths)


def test_yarn_from_scratch_is_rope_until_it_reads_further(train):
    train("pe=rope")
    train("pe=yarn")
    assert equal(weights(train.runs / "rope-text"), weights(train.runs / "yarn-text"))
    train("pe=yarn", "pe.train_scale=4", "name=scaled")
    assert not equal(weights(train.runs / "rope-text"), weights(train.runs / "scaled"))
    assert {row.reading for row in Results.load(train.runs / "scaled" / "results.json").lengths} == {
        "scale 4, as trained"
    }


def test_same_seed_same_run(train):
    train("pe=rope", "model.dropout=0.1", "name=a")
    train("pe=rope", "model.dropout=0.1", "name=b", "trainer.num_workers=1", "logger=csv", "eval.by_position=false")
    train("pe=rope", "model.dropout=0.1", "name=c", "seed=1")
    assert rows_of(train.runs / "a") == rows_of(train.runs / "b") != rows_of(train.runs / "c")
    assert equal(weights(train.runs / "a"), weights(train.runs / "b"))


def test_a_complete_run_trains_nothing(train):
    train("pe=rope")
    run = train.runs / "rope-text"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    again = train("pe=rope", "logger=csv")  # who watches may differ
    assert again.code == 0
    assert "is complete" in again.out
    assert "bits per byte" in again.out
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_another_configuration_under_the_name_is_refused(train):
    train("pe=rope")
    outcome = train("pe=rope", "trainer.max_steps=7", "optim.lr=0.5")
    assert outcome.code == 2
    assert "trainer.max_steps: 6 there, 7 now" in outcome.err
    assert "optim.lr: 0.002 there, 0.5 now" in outcome.err
    assert train("pe=rope", "trainer.max_steps=7", "overwrite=true").code == 0
    assert rows_of(train.runs / "rope-text")[-1]["step"] == 7


@pytest.mark.parametrize("accumulate", [1, 3, 8])
def test_steps_are_optimizer_steps(train, accumulate):
    train("pe=rope", "trainer.batch_size=24", f"trainer.accumulate={accumulate}")
    run = train.runs / "rope-text"
    rows = rows_of(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 6]
    assert [row["step"] for row in rows if "val/loss" in row] == [3, 6]
    assert [path.name for path in checkpoints_in(run / "checkpoints")] == ["step=4.ckpt", "step=6.ckpt"]


def test_accumulation_changes_no_step(train):
    for accumulate in (1, 2):
        train("pe=rope", f"trainer.accumulate={accumulate}", f"name=by{accumulate}")
    for one, two in zip(rows_of(train.runs / "by1"), rows_of(train.runs / "by2"), strict=True):
        assert one.keys() == two.keys()
        for key in one:
            assert one[key] == pytest.approx(two[key], rel=1e-4), key


def test_learning_rate_warms_up_and_decays(train):
    train("pe=rope", "trainer.log_every=1", "optim.lr=0.01")
    rates = [row["lr"] for row in rows_of(train.runs / "rope-text")]
    assert rates == pytest.approx([0.005, 0.01, 0.01, 0.00775, 0.00325, 0.001])  # 2 steps up, half a cosine to 0.1


def test_bits_per_byte_and_perplexity(train):
    train("pe=rope")
    run = train.runs / "rope-text"
    row = Results.load(run / "results.json").validation
    assert row.perplexity == pytest.approx(torch.tensor(row.loss, dtype=torch.float64).exp().item())
    net = store.load(run)
    assert net.vocab_size == 257
    # One byte a token but for the end of a text, which has none.
    assert row.bits_per_byte * 0.6931471805599453 >= row.loss


def test_the_scripts(train):
    train("pe=yarn")
    run = train.runs / "yarn-text"

    def script(name: str, *arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, f"scripts/{name}.py", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    done = script("evaluate", f"run={run}", "eval.lengths=[1,3]", "eval.sequences=4")
    assert done.returncode == 0, done.stderr
    results = Results.load(run / "results.json")
    assert {row.length for row in results.lengths} == {16, 48}
    assert results.training is not None
    wrong = script("evaluate", f"run={run}", "eval.length=[1]")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "did you mean eval.lengths?" in wrong.stderr
    missing = script("evaluate", f"run={train.runs}/none")
    assert missing.returncode == 2
    assert str(run) in missing.stderr
    said = script("sample", f"run={run}", "prompt=knots in", "max_new_tokens=12", "temperature=0")
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("knots in")
    assert len(said.stdout.encode()) >= len("knots in") + 12
    assert "12 tokens" in said.stderr
    assert "scale 4" in said.stderr  # 8 + 12 tokens are beyond the 16 it was trained at
    empty = script("sample", f"run={run}", "prompt=")
    assert empty.returncode == 2
    assert "the prompt is empty" in empty.stderr


def test_cope_trains_alike_with_the_kernel_and_by_its_definition(train, monkeypatch):
    from model.kernels import cope as kernels
    from model.position import cope

    options = ["pe=cope", "pe.npos_max=6", "trainer.max_steps=200", "trainer.val_every=200", "trainer.log_every=20"]
    train(*options, "name=kernel")

    def by_definition(q, k, v, table, **other):
        visible = torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril()
        return cope.cope_attention(q, k, v, table, visible=visible, **other)

    monkeypatch.setattr(kernels, "cope_attention", by_definition)
    train(*options, "name=definition")
    curves = [[row["train/loss"] for row in rows_of(train.runs / name)] for name in ("kernel", "definition")]
    assert curves[0][-1] < 0.5 * curves[0][0]
    assert curves[0] != curves[1]  # rounding differs: both ways were taken
    assert curves[0] == pytest.approx(curves[1], rel=0.01)


def test_csv_survives_an_interruption(train, monkeypatch):
    def crash(self, trainer, *arguments):
        on_batch_end(self, trainer, *arguments)
        if trainer.global_step == 4:
            raise RuntimeError("power cut")

    on_batch_end = callbacks.StepEnd.on_train_batch_end
    with monkeypatch.context() as patch:
        patch.setattr(callbacks.StepEnd, "on_train_batch_end", crash)
        with pytest.raises(RuntimeError, match="power cut"):
            train("pe=rope", "logger=csv")
    train("pe=rope", "logger=csv")
    (path,) = train.runs.rglob("metrics.csv")
    steps = [row.split(",") for row in path.read_text().splitlines()]
    column = steps[0].index("step")
    assert [int(row[column]) for row in steps[1:]] == [row["step"] for row in rows_of(train.runs / "rope-text")]


def test_in_bf16(train):
    """The precision is recorded, so that a run is not continued in another."""
    assert train("pe=t5", "trainer.precision=bf16-mixed", "name=mixed").code == 0
    outcome = train("pe=t5", "trainer.precision=bf16-true", "name=pure", "trainer.max_steps=30", "optim.lr=0.01")
    assert outcome.code == 0, outcome.err
    losses = [row["train/loss"] for row in rows_of(train.runs / "pure")]
    assert losses[-1] < losses[0] - 0.5
    (train.runs / "mixed" / "results.json").unlink()
    refused = train("pe=t5", "trainer.precision=32", "name=mixed")
    assert refused.code == 2
    assert "trainer.precision: 'bf16-mixed' there, '32-true' now" in refused.err


def test_infinite_losses_are_results_too(train):
    train("pe=rope")
    path = train.runs / "rope-text" / "results.json"
    results = Results.load(path)
    results.lengths[0].loss = float("nan")
    results.lengths[1].perplexity = float("inf")
    results.save(path)
    again = Results.load(path)
    assert again.lengths[0].loss != again.lengths[0].loss
    assert again.lengths[1].perplexity == float("inf")
