"""Trackers show metrics.jsonl and the results, number by number, and cannot harm a run."""

import csv
import json
import re
import struct

import pytest
import torch
from conftest import rows_of

from evaluation import loggers
from evaluation.report import comparison, frame

QUICK = ("eval.by_position=false", "eval.far_copies=false", "eval.lengths=[1,2]")


@pytest.fixture(autouse=True)
def _nobody_is_logged_in(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_RUN_GROUP"):
        monkeypatch.delenv(name, raising=False)


def wandb_records(run):
    """What wandb would upload of its only offline run: protobuf messages in the log format of LevelDB."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its service has then written everything
    (path,) = run.glob("wandb/offline-run-*/*.wandb")
    assert json.loads((run / "environment.json").read_text())["run_id"] in path.name
    data, at, message, records = path.read_bytes(), 7, b"", []
    while at < len(data):
        at += -at % 32768 if -at % 32768 < 7 else 0  # the end of a block has no room for a header
        length, kind = struct.unpack_from("<HB", data, at + 4)
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole or the last part of a message
            records.append(Record.FromString(message))
            message = b""
    return records


def items_of(record) -> dict:
    return {"/".join([item.key] if item.key else item.nested_key): json.loads(item.value_json) for item in record}


def shown(kind, run) -> list[tuple[int, str, float]]:
    """(step, name, value) of everything that a tracker shows."""
    if kind == "csv":
        with (run / "csv" / "metrics.csv").open() as file:
            rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
        return [(int(row["step"]), key, value) for row in rows for key, value in row.items()]
    if kind == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
        return [(e.step, tag, e.value) for tag in events.Tags()["scalars"] for e in events.Scalars(tag)]
    history = [r.history for r in wandb_records(run) if r.HasField("history")]
    return [(h.step.num, key, value) for h in history for key, value in items_of(h.item).items()]


def as_stored(kind, value):
    return torch.tensor(value, dtype=torch.float32).item() if kind == "tensorboard" else value


@pytest.mark.parametrize("kind", ["csv", "tensorboard", "wandb"])
def test_every_row_is_shown_once_after_an_interruption(train, straight, monkeypatch, kind):
    """Rows between the last checkpoint and the crash come twice in time, but once in the tracker. No number changes."""
    options = ["pe=rope", "trainer.log_every=1", "trainer.val_every=6", *QUICK]
    log = loggers.Tracker.log

    def crash(tracker, row):
        log(tracker, row)
        if row["step"] == 4:
            raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(loggers.Tracker, "log", crash)
        with pytest.raises(RuntimeError, match="power cut"):
            train(*options, f"logger={kind}")
    assert "after step 2" in train(*options, f"logger={kind}").out
    run, without = train.runs / "rope-text", straight(*options)
    found: dict = {}
    for step, key, value in shown(kind, run):
        found.setdefault((step, key), []).append(value)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        for key, value in row.items():
            name = key if "/" in key else f"train/{key}"
            assert key == "step" or found[row["step"], name] == [as_stored(kind, value)], (row["step"], key)
    assert rows_of(run) == rows_of(without)
    assert frame.load(run).results.value.tolist() == frame.load(without).results.value.tolist()


@pytest.mark.parametrize("arguments", [["pe=yarn"], ["pe=rope", "data=flip_flop", "name=yarn-text"]])
def test_results_have_names_without_the_encoding(train, arguments):
    """One tracker after the other is given the same results."""
    assert train(*arguments, *QUICK, "eval.variants=[]", "logger=tensorboard").code == 0
    run = train.runs / "yarn-text"
    found = frame.load(run)
    (table,) = [table for table in comparison.tables(found) if table.kind == "lengths"]
    expected = {}
    for r in found.results[found.results.kind == "lengths"].itertuples():
        where = "" if len(table.parts) == 1 else f"{r.part}/"
        prefix = "zero_shot" if r.zero_shot else "eval"
        expected[f"{prefix}/{where}{r.unit.replace(' ', '_')}@{r.length}"] = as_stored("tensorboard", r.value)
    tags = {key: (step, value) for step, key, value in shown("tensorboard", run) if "@" in key}
    gains = {key: value for key, (_, value) in tags.items() if "/gain@" in key}
    tags = {key: value for key, value in tags.items() if key not in gains}
    assert tags == {key: (6, pytest.approx(x)) for key, x in expected.items()}
    assert ("zero_shot/bits_per_byte@32" in tags) == ("pe=yarn" in arguments)
    prefixes = {tag.partition("/")[0] for tag in tags if tag.endswith("bits_per_byte@32")}
    assert set(gains) == {f"{prefix}/gain@2x" for prefix in prefixes}
    assert not [key for key in tags if "yarn" in key or "rope" in key]


def test_wandb_has_everything(train):
    options = ["tags=[mine]", "group=knots", "notes=a try", "entity=us", "log_model=true"]
    outcome = train("pe=rope", "optim.lr=0.002", *QUICK, "logger=wandb", *(f"logger.{option}" for option in options))
    run = train.runs / "rope-text"
    (command,) = re.findall(r"wandb sync (.*)", outcome.out)
    assert next(run.glob("wandb/offline-run-*")).samefile(command)
    records = wandb_records(run)
    begun = next(record.run for record in records if record.HasField("run"))
    assert (begun.display_name, begun.project, begun.run_group) == ("rope-text", "ropewalk", "knots")
    assert (begun.notes, begun.entity, set(begun.tags)) == ("a try", "us", {"mine", "rope", "text", "seed 0"})
    config = {}
    for record in records:
        config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        config |= {item.key: json.loads(item.value_json) for item in record.config.update}
    assert (config["optim"]["lr"], config["pe"]["base"]) == (0.002, 10000.0)
    assert config["parameters"] == json.loads((run / "training.json").read_text())["parameters"]
    summary = {key: value for record in records for key, value in items_of(record.summary.update).items()}
    results = frame.load(run).results
    (mine,) = results[(results.length == 16) & ~results.zero_shot].value
    assert summary["eval/bits_per_byte@16"] == pytest.approx(mine)
    assert summary["eval/gain@2x"] == pytest.approx(mine - summary["eval/bits_per_byte@32"])
    assert summary["eval/safe_length"] in (0, 16, 32)
    assert (summary["eval/variant"], summary["zero_shot/variant"][:4]) == ("rope", "yarn")
    (folder,) = run.glob("wandb/offline-run-*/files")
    (path,) = folder.rglob("*.table.json")
    table = json.loads(path.read_text())
    assert table["columns"] == loggers.WANDB_COLUMNS
    assert len(table["data"]) == len(results)
    assert [r.request.log_artifact.artifact.type or r.artifact.type for r in records if r.HasField("artifact")]
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]


def test_wandb_never_asks_and_an_orderly_stop_is_no_failure(train):
    with pytest.warns(UserWarning, match="without `wandb login` or WANDB_API_KEY wandb stays offline"):
        assert train("pe=rope", *QUICK, "logger=wandb", "logger.mode=online", "trainer.time_limit=1e-9").code == 75
    records = wandb_records(train.runs / "rope-text")
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]


@pytest.mark.parametrize("step", ["open", "log_metrics", "finalize"])
def test_a_failing_logger_is_a_warning(train, monkeypatch, step):
    from lightning.fabric.loggers import CSVLogger

    def fail(*arguments, **options):
        raise OSError("disk full")

    monkeypatch.setattr(*((loggers, "open_logger") if step == "open" else (CSVLogger, step)), fail)
    with pytest.warns(UserWarning, match="logger=csv failed, the run goes on without it: disk full"):
        assert train("pe=rope", "logger=csv", *QUICK).code == 0
    assert (train.runs / "rope-text" / "training.json").exists()


def test_a_missing_package_is_told(train, monkeypatch):
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    outcome = train("pe=rope", "logger=tensorboard")
    assert (outcome.code, "pip install tensorboard" in outcome.err) == (2, True)
