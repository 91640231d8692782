"""Loggers mirror metrics.jsonl, and cannot harm a run."""

import csv
import json

import pytest
import torch
from conftest import rows_of

from model.machine import Machine


def test_csv(train):
    assert train("pe=rope", "logger=csv").code == 0
    (path,) = train.runs.rglob("metrics.csv")
    with path.open() as file:
        mirrored = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    assert [row["step"] for row in mirrored] == [row["step"] for row in rows_of(train.runs / "rope-text")]
    for found, row in zip(mirrored, rows_of(train.runs / "rope-text"), strict=True):
        assert found.items() >= row.items()


def test_tensorboard(train):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert train("pe=rope", "logger=tensorboard").code == 0
    events = accumulator.EventAccumulator(str(train.runs / "rope-text" / "tensorboard"))
    events.Reload()
    for key in ("train/loss", "val/loss", "lr", "grad_norm"):
        expected = [(row["step"], row[key]) for row in rows_of(train.runs / "rope-text") if key in row]
        found = [(event.step, event.value) for event in events.Scalars(key)]
        assert [step for step, _ in found] == [step for step, _ in expected]
        assert [value for _, value in found] == pytest.approx([value for _, value in expected], rel=1e-6)


def test_tensorboard_missing_is_told(train, monkeypatch):
    import lightning.fabric.loggers.tensorboard as module

    monkeypatch.setattr(module, "_TENSORBOARD_AVAILABLE", False)
    monkeypatch.setattr(module, "_TENSORBOARDX_AVAILABLE", False)
    outcome = train("pe=rope", "logger=tensorboard")
    assert outcome.code == 2
    assert 'pip install "ropewalk[tensorboard]"' in outcome.err
    assert not train.runs.exists()


def test_wandb_is_offline_without_a_key(train, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))  # no login of whoever runs the tests
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    outcome = train("pe=rope", "logger=wandb")
    assert outcome.code == 0, outcome.err
    (log,) = train.runs.rglob("offline-run-*/*.wandb")
    assert json.loads((train.runs / "rope-text" / "environment.json").read_text())["run_id"] in log.name
    assert log.stat().st_size > 0
    train("pe=rope", "name=silent")
    assert rows_of(train.runs / "rope-text") == rows_of(train.runs / "silent")


def test_a_failing_logger_is_a_warning(train, monkeypatch):
    from lightning.pytorch.loggers import CSVLogger

    def fail(*arguments, **options):
        raise OSError("disk full")

    monkeypatch.setattr(CSVLogger, "log_metrics", fail)
    with pytest.warns(UserWarning, match="CSVLogger failed, training goes on: disk full"):
        assert train("pe=rope", "logger=csv").code == 0
    train("pe=rope", "name=silent")
    assert rows_of(train.runs / "rope-text") == rows_of(train.runs / "silent")


def test_auto_is_explained():
    machine = Machine.choose(accelerator="cpu", precision="auto", compile="auto")
    assert machine.device == "cpu"
    assert machine.describe()[0].startswith("device cpu (as asked); precision ")
    asked = Machine.choose(accelerator="cpu", precision=32, compile=True)
    assert (asked.precision, asked.compile) == ("32-true", True)


def test_compile_failure_is_explained(monkeypatch):
    from conftest import build_gpt

    from model.trainer import compile_or_explain

    net = build_gpt("rope")

    def no_compiler(*arguments, **options):
        raise RuntimeError("no working C++ compiler\nlong story")

    monkeypatch.setattr(type(net), "compile", lambda self: setattr(self, "_compiled_call_impl", no_compiler))
    assert compile_or_explain(net, Machine.choose(accelerator="cpu", precision=32), 2, 8) == "no working C++ compiler"
    assert net(torch.zeros(1, 4, dtype=torch.int64)).shape == (1, 4, 50)  # eager works
