"""Trackers show metrics.jsonl and the results, number by number, and cannot harm a run."""

import csv
import json
import re
import struct
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from conftest import REPORT, rows_of
from lightning.fabric.loggers import CSVLogger

from ropewalk.evaluation import loggers
from ropewalk.report import frame, page
from ropewalk.report.table import results as long_table

QUICK = ("pe=rope", "eval.by_position=false", "eval.far_copies=false", "eval.lengths=[1,2]")


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
    environment = json.loads((run / "environment.json").read_text())
    assert environment["run_id"] in path.name

    # After 7 bytes of its own the file is blocks of parts: a header of 4 bytes of checksum, 2 of length and 1 of kind,
    # then the part. The last bytes of a block are left empty where they have no room for a header.
    block = 32768
    header = 7
    data = path.read_bytes()
    place = 7
    message = b""
    records = []
    while place < len(data):
        left_in_block = -place % block
        if left_in_block < header:
            place += left_in_block
        length, kind = struct.unpack_from("<HB", data, place + 4)
        start = place + header
        place = start + length
        message += data[start:place]
        is_whole_or_last = kind in (1, 4)
        if is_whole_or_last:
            records.append(Record.FromString(message))
            message = b""
    return records


def items_of(record) -> dict:
    """Name -> value."""
    values = {}
    for item in record:
        name = item.key or "/".join(item.nested_key)
        values[name] = json.loads(item.value_json)
    return values


def shown_by_csv(run):
    with (run / "csv" / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value:
                    yield int(row["step"]), name, float(value)


def shown_by_tensorboard(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            yield event.step, name, event.value


def shown_by_wandb(run):
    for record in wandb_records(run):
        if record.HasField("history"):
            for name, value in items_of(record.history.item).items():
                yield record.history.step.num, name, value


def as_float32(value):
    """TensorBoard has no other numbers."""
    return torch.tensor(value, dtype=torch.float32).item()


def written_rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def numbers(shown) -> dict:
    """(step, name) -> all values that a tracker shows there."""
    values = defaultdict(list)
    for step, name, value in shown:
        values[step, name].append(value)
    return values


def test_every_row_is_shown_once_after_an_interruption(train, straight, monkeypatch):
    """Rows between the last checkpoint and the crash come twice in time, but once in each tracker."""
    options = [*QUICK, "trainer.log_every=1", "trainer.val_every=6"]
    log = loggers.Tracker.log

    def crash(tracker, row):
        log(tracker, row)
        if row["step"] == 4:
            raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(loggers.Tracker, "log", crash)
        with pytest.raises(RuntimeError, match="power cut"):
            train(*options, "logger=[csv,tensorboard,wandb]")
    assert "after step 2" in train(*options, "logger=[csv,tensorboard,wandb]").out
    run = train.runs / "rope-text"

    by_csv = numbers(shown_by_csv(run))
    by_wandb = numbers(shown_by_wandb(run))
    by_tensorboard = numbers(shown_by_tensorboard(run))
    rows = written_rows(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert row["seconds"] > 0  # an axis of its own
        for key in row.keys() - {"step", "checksum"}:
            place = row["step"], key if "/" in key else f"train/{key}"
            assert by_csv[place] == by_wandb[place] == [row[key]]
            assert by_tensorboard[place] == [as_float32(row[key])]

    # Who watches changes no number.
    without = straight(*options)
    assert rows_of(run) == rows_of(without)
    assert frame.load(run).results.value.tolist() == frame.load(without).results.value.tolist()


@pytest.mark.parametrize("arguments", [["pe=yarn"], ["data=flip_flop", "name=yarn-text"]])
def test_tensorboard_has_results_without_the_encoding_in_their_names(train, arguments):
    assert train(*QUICK, *arguments, "eval.variants=[]", "logger=tensorboard").code == 0
    run = train.runs / "yarn-text"
    rows = frame.load(run).results
    expected = {}
    for row in rows[rows.kind == "lengths"].itertuples():
        prefix = "zero_shot" if row.zero_shot else "eval"
        part = f"{row.part}/" if rows.part.nunique() > 1 else ""
        name = f"{prefix}/{part}{row.unit.replace(' ', '_')}"
        expected[f"{name}@{row.length}", 6] = as_float32(row.value)
        expected[f"by_length/{name}", row.length] = as_float32(row.value)  # as a curve, whose step is the length
    values = {(name, step): value for step, name, value in shown_by_tensorboard(run)}
    results = {place: value for place, value in values.items() if "@" in place[0] or "by_length" in place[0]}
    gains = {place for place in results if "gain" in place[0]}
    assert {place: value for place, value in results.items() if place not in gains} == expected
    assert not re.search("yarn|rope", str(gains))


def test_wandb_has_everything(train, monkeypatch):
    monkeypatch.setattr(page, "html", REPORT)
    mine = ("logger.tags=[mine]", "logger.group=knots", "logger.notes=a try", "logger.log_model=true")
    outcome = train(*QUICK, "eval.far_copies=true", "logger=wandb", *mine)
    run = train.runs / "rope-text"
    (folder,) = run.glob("wandb/offline-run-*")
    (folder_to_sync,) = re.findall(r"wandb sync (.*)", outcome.out)
    assert folder.samefile(folder_to_sync)
    assert "WARNING" not in outcome.out + outcome.err  # neither a deprecated call nor a URL that is asked for offline

    records = wandb_records(run)
    (begun,) = begun_runs(records)
    assert (begun.display_name, begun.project, begun.run_group) == ("rope-text", "ropewalk", "knots")
    assert (begun.job_type, begun.notes, set(begun.tags)) == ("rope", "a try", {"mine", "rope", "text", "seed 0"})
    config = {}
    summary = {}
    for record in records:
        config |= items_of(record.run.config.update) | items_of(record.config.update)
        summary |= items_of(record.summary.update)
    assert config["pe"]["base"] == 10000.0
    assert config["parameters"] == json.loads((run / "training.json").read_text())["parameters"]

    table = long_table(frame.load(run))
    table = table[(table.line == "rope") & table.seed.isna()]
    rows = table[table.measure == "lengths"].set_index("length")
    (far,) = table.value[(table.measure == "far_copies") & (table.part == "far") & (table.quantity == "gain")]
    assert summary["eval/bits_per_byte@16"] == rows.value[16]
    assert (summary["eval/gain@2x"], summary["eval/verdict"]) == (rows.gain[32], rows.verdict[32])
    assert summary["eval/far_copies"] == far
    assert summary["zero_shot/variant"].startswith("yarn")

    # A chart of loss against length: rows of their own, with the length as their axis.
    (metric,) = [record.metric for record in records if record.metric.glob_name == "by_length/*"]
    assert (metric.step_metric, metric.summary.none) == ("by_length/tokens", True)
    shown = [items_of(record.history.item) for record in records if record.HasField("history")]
    curve = {row["by_length/tokens"]: row["by_length/eval/bits_per_byte"] for row in shown if "by_length/tokens" in row}
    assert curve == rows.value.to_dict()

    artifacts = {record.artifact.type: record.artifact for record in records if record.HasField("artifact")}
    assert {"model", "report"} <= set(artifacts)
    (file,) = artifacts["report"].manifest.contents
    # That of the complete run: without training.json it would say that the run is not finished.
    assert Path(file.local_path).read_text(encoding="utf-8") == REPORT(frame.load(run))


def begun_runs(records):
    return [record.run for record in records if record.HasField("run")]


def test_wandb_never_asks_and_an_orderly_stop_is_no_failure(train):
    with pytest.warns(UserWarning, match="without `wandb login` or WANDB_API_KEY wandb stays offline"):
        assert train(*QUICK, "logger=wandb", "logger.mode=online", "trainer.time_limit=1e-9").code == 75
    records = wandb_records(train.runs / "rope-text")
    (begun,) = begun_runs(records)
    assert begun.run_group == train.runs.name  # seeds of a folder, which wandb averages
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]


def test_trackio_has_each_row_once(train):
    trackio = pytest.importorskip("trackio", exc_type=ImportError)
    from trackio.sqlite_storage import SQLiteStorage

    assert train(*QUICK, "logger=trackio", "trainer.time_limit=1e-9").code == 75
    assert train(*QUICK, "logger=trackio").code == 0
    (run,) = trackio.Api().runs("ropewalk")
    rows = written_rows(train.runs / "rope-text")
    logs = SQLiteStorage.get_logs("ropewalk", run.name, run_id=run.id)
    shown = [entry["train/loss"] for entry in logs if "train/loss" in entry]
    assert (run.name, shown) == ("rope-text", [row["train/loss"] for row in rows])


@pytest.mark.parametrize("step", ["__init__", "log_metrics", "finalize"])
def test_a_failing_tracker_is_a_warning_and_the_others_go_on(train, monkeypatch, step):
    def fail(*arguments, **options):
        raise OSError("disk full")

    monkeypatch.setattr(CSVLogger, step, fail)
    with pytest.warns(UserWarning, match="logger=csv failed, the run goes on without it: disk full"):
        assert train(*QUICK, "logger=[csv,tensorboard]").code == 0
    assert any(name == "eval/gain@2x" for _, name, _ in shown_by_tensorboard(train.runs / "rope-text"))


def test_a_missing_package_is_told(train, monkeypatch):
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    outcome = train("logger=trackio")
    assert outcome.code == 2
    assert "pip install trackio" in outcome.err
