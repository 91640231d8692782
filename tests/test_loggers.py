"""Loggers mirror metrics.jsonl and results.json, number by number, and cannot harm a run."""

import csv
import json
import struct
import time

import pytest
import torch
from conftest import rows_of

from conf.schema import flatten
from evaluation.results import Results
from model import callbacks
from model.machine import Machine

KINDS = ("csv", "tensorboard", "wandb")


@pytest.fixture(autouse=True)
def _nobody_is_logged_in(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_RUN_GROUP"):
        monkeypatch.delenv(name, raising=False)


def wandb_records(run):
    """What wandb would upload of its only offline run. Its service may still be writing when a run has ended."""
    for _ in range(100):
        records = read_wandb(run)
        if any(record.HasField("exit") for record in records) or any(record.HasField("footer") for record in records):
            return records
        time.sleep(0.2)
    raise AssertionError(f"wandb did not finish {run}")


def read_wandb(run):
    """A LevelDB log of wandb's protobuf messages, as far as it is written."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = run.glob("wandb/offline-run-*/*.wandb")
    assert json.loads((run / "environment.json").read_text())["run_id"] in path.name
    data, at, message, records = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 0 < (rest := -at % 32768) < 7:  # of a block: no header fits
            at += rest
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if at + 7 + length > len(data):
            break
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole or the last part of a message
            records.append(Record.FromString(message))
            message = b""
    return records


def items_of(record) -> dict:
    return {"/".join([item.key] if item.key else item.nested_key): json.loads(item.value_json) for item in record}


def tensorboard_events(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "images": 0}).Reload()


def mirrored(kind, run) -> dict[tuple[int, str], list[float]]:
    """{(step, key of metrics.jsonl): every value that was shown for it}"""
    found: dict = {}
    if kind == "csv":
        with (run / "csv" / "metrics.csv").open() as file:
            rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
        shown = [(int(row["step"]), key, value) for row in rows for key, value in row.items()]
    elif kind == "tensorboard":
        events = tensorboard_events(run)
        shown = [(e.step, tag, e.value) for tag in events.Tags()["scalars"] for e in events.Scalars(tag)]
    else:
        rows = [
            items_of(r.history.item) | {"_step": r.history.step.num}
            for r in wandb_records(run)
            if r.HasField("history")
        ]
        shown = [(row["_step"], key, value) for row in rows for key, value in row.items()]
    for step, key, value in shown:
        found.setdefault((step, key), []).append(value)
        if key.startswith("train/") and key != "train/loss":  # a group that metrics.jsonl does not name
            found.setdefault((step, key.removeprefix("train/")), []).append(value)
    return found


def as_stored(kind, value):
    return torch.tensor(value, dtype=torch.float32).item() if kind == "tensorboard" else value


def check_metrics(kind, run):
    found = mirrored(kind, run)
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for key, value in row.items():
            if key != "step" and "task" not in row:
                assert found[row["step"], key] == [as_stored(kind, value)], (row["step"], key)


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_shown_once(train, kind):
    assert train("pe=cope", f"logger={kind}").code == 0
    check_metrics(kind, train.runs / "cope-text")


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_shown_once_after_an_interruption(train, monkeypatch, kind):
    """The rows between the last checkpoint and the crash come twice in time, but once in the mirror."""
    arguments = ["pe=rope", f"logger={kind}", "trainer.log_every=1", "trainer.val_every=6"]
    on_batch_end = callbacks.StepEnd.on_train_batch_end

    def crash(self, trainer, *arguments):
        on_batch_end(self, trainer, *arguments)
        if trainer.global_step == 3:
            raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(callbacks.StepEnd, "on_train_batch_end", crash)
        with pytest.raises(RuntimeError, match="power cut"):
            train(*arguments)
    outcome = train(*arguments)
    assert "after step 2" in outcome.out
    run = train.runs / "rope-text"
    check_metrics(kind, run)
    assert {step for step, key in mirrored(kind, run) if key == "lr"} == {1, 2, 3, 4, 5, 6}


TEXT_AND_TASK = [["pe=yarn"], ["pe=rope", "data=flip_flop", "name=yarn-text", "eval.lengths=[1,2]"]]


@pytest.mark.parametrize("arguments", TEXT_AND_TASK)
def test_tensorboard_shows_all_results(train, arguments):
    assert train(*arguments, "logger=tensorboard").code == 0
    run = train.runs / "yarn-text"
    events = tensorboard_events(run)
    scalars = {(tag, e.step): e.value for tag in events.Tags()["scalars"] for e in events.Scalars(tag)}

    def check(tag, at, part):
        for key, value in part.items():
            if isinstance(value, float | int):
                assert scalars[f"{tag}/{key}", at] == as_stored("tensorboard", value)

    results = json.loads((run / "results.json").read_text())
    for row in results["lengths"]:
        check(f"eval/{row['reading']}/{row['slice']}", row.pop("length"), row)
    for part in results["by_position"]:
        check(f"by_position/{part['reading']}", part.pop("start"), part)
    check("eval/validation", results["validation"].pop("length"), results["validation"])
    check("training", 0, flatten(results["training"]))
    for line in (run / "metrics.jsonl").read_text().splitlines():
        if "task" in (row := json.loads(line)):
            part = {"error": row["error"], "sequence_error": row["sequence_error"], "tokens": row["n"]}
            check(f"eval/{row['reading']}/{row['slice']}", row["length"], part)
    (image,) = events.Images("figures/extrapolation")
    assert image.width > 500
    plugin = events.SummaryMetadata("_hparams_/session_start_info").plugin_data
    assert plugin.plugin_name == "hparams"
    assert b"optim.lr" in plugin.content
    assert b"parameters.total" in plugin.content
    assert "config/text_summary" in events.Tags()["tensors"]


@pytest.mark.parametrize("arguments", TEXT_AND_TASK)
def test_wandb_shows_all_results(train, arguments):
    assert train(*arguments, "logger=wandb").code == 0
    run = train.runs / "yarn-text"
    records = wandb_records(run)
    results = json.loads((run / "results.json").read_text())
    (begun,) = [record.run for record in records if record.HasField("run")]
    assert (begun.display_name, begun.project, begun.run_group) == ("yarn-text", "ropewalk", "")
    assert list(begun.tags) == [results["encoding"], results["data"]]
    config = {item.key: json.loads(item.value_json) for item in begun.config.update}
    assert config["optim"]["lr"] == 0.002
    assert config["pe"]["base"] == 10000.0
    assert config["parameters"] == results["training"]["parameters"]
    logged, summary = {}, {}
    for record in records:
        if record.HasField("history"):
            logged |= items_of(record.history.item)
        if record.HasField("summary"):
            summary |= items_of(record.summary.update)
    (folder,) = run.glob("wandb/offline-run-*/files")
    measures = {"lengths": ("length", "bits_per_byte" if results["data"] == "text" else "error")}
    for name, rows in (("lengths", results["lengths"]), ("by_position", results["by_position"])):
        if not rows:
            continue
        table = json.loads((folder / logged[f"eval/{name}/path"]).read_text())
        assert [dict(zip(table["columns"], row, strict=True)) for row in table["data"]] == rows
        at, measure = measures.get(name, ("start", "loss"))
        curves = json.loads((folder / logged[f"eval/{name}_curves_table/path"]).read_text())
        assert sorted((x, y) for x, _, y in curves["data"]) == sorted((row[at], row[measure]) for row in rows)
    assert logged["figures/extrapolation/_type"] == "image-file"
    for row in results["lengths"]:
        for measure, value in row.items():
            if isinstance(value, int | float) and measure != "length":
                assert summary[f"eval/{row['reading']}/{row['slice']}/{measure}@{row['length']}"] == value
    assert summary["training/tokens_per_s"] == results["training"]["tokens_per_s"]


def test_wandb_groups_by_sweep(train, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)  # being logged in sends nothing
    assert train("pe=rope,nope", "logger=wandb", "-m").code == 0
    for name in ("rope-text", "nope-text"):
        (begun,) = [record.run for record in wandb_records(train.runs / name) if record.HasField("run")]
        assert (begun.run_group, begun.display_name) == ("pe=rope,nope", name)


def test_a_logger_changes_no_number(train):
    for kind in ("none", *KINDS):
        assert train("pe=rope", f"logger={kind}", f"name={kind}").code == 0
        assert rows_of(train.runs / kind) == rows_of(train.runs / "none")
        kept = Results.load(train.runs / kind / "results.json")
        assert kept.lengths == Results.load(train.runs / "none" / "results.json").lengths


@pytest.mark.parametrize("step", ["begin", "log", "publish", "end"])
def test_a_failing_logger_is_a_warning(train, monkeypatch, step):
    from evaluation.loggers import Csv

    def fail(*arguments):
        raise OSError("disk full")

    monkeypatch.setattr(Csv, step, fail)
    with pytest.warns(UserWarning, match="Csv failed, the run goes on without it: disk full"):
        assert train("pe=rope", "logger=csv").code == 0
    assert Results.load(train.runs / "rope-text" / "results.json").lengths


def test_tensorboard_missing_is_told(train, monkeypatch):
    for module in ("tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    outcome = train("pe=rope", "logger=tensorboard")
    assert outcome.code == 2
    assert 'pip install "ropewalk[tensorboard]"' in outcome.err
    assert not train.runs.exists()


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
