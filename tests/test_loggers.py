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

from ropewalk.evaluation import loggers
from ropewalk.report import frame, page
from ropewalk.report.table import results as long_table

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


SHOWN_BY = {"csv": shown_by_csv, "tensorboard": shown_by_tensorboard, "wandb": shown_by_wandb}


def shown(kind, run) -> list[tuple[int, str, float]]:
    """(step, name, value) of everything that a tracker shows."""
    return list(SHOWN_BY[kind](run))


def as_stored(kind, value):
    """TensorBoard has float32."""
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
    run = train.runs / "rope-text"
    without = straight(*options)

    values_shown = defaultdict(list)
    for step, name, value in shown(kind, run):
        values_shown[step, name].append(value)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        step = row.pop("step")
        del row["checksum"]
        for key, value in row.items():
            name = key if "/" in key else f"train/{key}"
            assert values_shown[step, name] == [as_stored(kind, value)], (step, key)
    assert rows_of(run) == rows_of(without)
    assert frame.load(run).results.value.tolist() == frame.load(without).results.value.tolist()


@pytest.mark.parametrize("arguments", [["pe=yarn"], ["pe=rope", "data=flip_flop", "name=yarn-text"]])
def test_results_have_names_without_the_encoding(train, arguments):
    """One tracker after the other is given the same results."""
    assert train(*arguments, *QUICK, "eval.variants=[]", "logger=tensorboard").code == 0
    run = train.runs / "yarn-text"
    runs = frame.load(run)
    n_parts = runs.results[runs.results.kind == "lengths"].part.nunique()
    expected = {}
    for row in runs.results[runs.results.kind == "lengths"].itertuples():
        prefix = "zero_shot" if row.zero_shot else "eval"
        part = "" if n_parts == 1 else f"{row.part}/"
        unit = row.unit.replace(" ", "_")
        expected[f"{prefix}/{part}{unit}@{row.length}"] = as_stored("tensorboard", row.value)

    at_lengths = [(step, name, value) for step, name, value in shown("tensorboard", run) if "@" in name]
    assert {step for step, _, _ in at_lengths} == {6}
    gains = {name: value for _, name, value in at_lengths if "/gain@" in name}
    values = {name: value for _, name, value in at_lengths if name not in gains}
    assert values == pytest.approx(expected)
    prefixes = {name.partition("/")[0] for name in values if name.endswith("bits_per_byte@32")}
    assert set(gains) == {f"{prefix}/gain@2x" for prefix in prefixes}
    assert ("zero_shot/bits_per_byte@32" in values) == ("pe=yarn" in arguments)

    # The same numbers as curves, whose step is the length.
    curves = {}
    for length, name, value in shown("tensorboard", run):
        prefix, _, rest = name.partition("/")
        if prefix == "by_length":
            of_gain = rest.endswith("/gain")
            curves[f"{rest}@{times(length)}" if of_gain else f"{rest}@{length}"] = value
    assert curves == values | gains
    for name in values:
        assert "yarn" not in name
        assert "rope" not in name


def times(length):
    return f"{length // 16}x"


def test_tensorboard_sorts_runs_by_results(train):
    """The table of hyperparameters has nested options as rows and results as columns."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    assert train("pe=rope", "optim.lr=0.002", *QUICK, "eval.far_copies=true", "logger=tensorboard").code == 0
    run = train.runs / "rope-text"
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    contents = events.SummaryMetadata
    begun = metadata.parse_session_start_info_plugin_data(contents(metadata.SESSION_START_INFO_TAG).plugin_data.content)
    assert begun.hparams["optim/lr"].number_value == 0.002
    assert begun.hparams["pe/name"].string_value == "rope"
    table = metadata.parse_experiment_plugin_data(contents(metadata.EXPERIMENT_TAG).plugin_data.content)
    columns = {info.name.tag for info in table.metric_infos}
    assert columns >= {"eval/gain@2x", "eval/far_copies", "parameters/total"}
    assert columns <= set(events.Tags()["scalars"])
    assert "hp_metric" not in columns


def test_wandb_has_everything(train, monkeypatch):
    monkeypatch.setattr(page, "html", REPORT)
    outcome = train(
        "pe=rope",
        "optim.lr=0.002",
        *QUICK,
        "eval.far_copies=true",
        "logger=wandb",
        "logger.tags=[mine]",
        "logger.group=knots",
        "logger.notes=a try",
        "logger.entity=us",
        "logger.log_model=true",
    )
    run = train.runs / "rope-text"
    (folder,) = run.glob("wandb/offline-run-*")
    (folder_to_sync,) = re.findall(r"wandb sync (.*)", outcome.out)
    assert folder.samefile(folder_to_sync)

    records = wandb_records(run)
    (begun,) = [record.run for record in records if record.HasField("run")]
    assert begun.display_name == "rope-text"
    assert begun.project == "ropewalk"
    assert begun.run_group == "knots"
    assert begun.job_type == "rope"
    assert begun.notes == "a try"
    assert begun.entity == "us"
    assert set(begun.tags) == {"mine", "rope", "text", "seed 0"}

    config = {}
    summary = {}
    for record in records:
        config |= items_of(record.run.config.update)
        config |= items_of(record.config.update)
        summary |= items_of(record.summary.update)
    assert config["optim"]["lr"] == 0.002
    assert config["pe"]["base"] == 10000.0
    training = json.loads((run / "training.json").read_text())
    assert config["parameters"] == training["parameters"]
    assert summary["parameters/total"] == training["parameters"]["total"]

    runs = frame.load(run)
    results = runs.results
    (at_train_len,) = results[(results.length == 16) & ~results.zero_shot].value
    assert summary["eval/bits_per_byte@16"] == pytest.approx(at_train_len)
    assert summary["eval/gain@2x"] == pytest.approx(at_train_len - summary["eval/bits_per_byte@32"])
    table = long_table(runs)
    (verdict,) = table.verdict[
        (table.length == 32) & (table.line == table.base) & (table.measure == "lengths") & table.seed.isna()
    ]
    assert summary["eval/verdict"] == verdict
    assert summary["eval/variant"] == "rope"
    assert summary["zero_shot/variant"].startswith("yarn")
    assert summary["eval/far_copies"] == pytest.approx(gain_on_far_copies(runs))

    # A chart of loss against length: rows of their own, with the length as their axis.
    (metric,) = [record.metric for record in records if record.metric.glob_name == "by_length/*"]
    assert (metric.step_metric, metric.summary.none) == ("by_length/tokens", True)
    rows = [items_of(record.history.item) for record in records if record.HasField("history")]
    curve = {}
    for row in rows:
        if "by_length/tokens" in row:
            curve[row["by_length/tokens"]] = row["by_length/eval/bits_per_byte"]
    assert curve == {length: summary[f"eval/bits_per_byte@{length}"] for length in (16, 32)}

    (path,) = (folder / "files").rglob("*.table.json")
    table = json.loads(path.read_text())
    assert table["columns"] == loggers.WANDB_COLUMNS
    assert len(table["data"]) >= len(results)

    artifacts = {record.artifact.type: record.artifact for record in artifact_records(records)}
    assert {"model", "report"} <= set(artifacts)
    (file,) = artifacts["report"].manifest.contents
    assert file.path == "report.html"
    # That of the complete run: without training.json it would say that the run is not finished.
    assert Path(file.local_path).read_text(encoding="utf-8") == REPORT(frame.load(run))
    assert exit_codes(records) == [0]


def test_wandb_groups_runs_by_their_folder(train):
    """Seeds of an encoding are one job type of one group, which wandb averages."""
    assert train("pe=rope", *QUICK, "logger=wandb", "trainer.max_steps=1").code == 0
    run = train.runs / "rope-text"
    (begun,) = [record.run for record in wandb_records(run) if record.HasField("run")]
    assert (begun.run_group, begun.job_type) == (train.runs.name, "rope")


def artifact_records(records):
    return [record for record in records if record.HasField("artifact")]


def gain_on_far_copies(runs):
    """Bits gained on all tokens after words that last occurred beyond 16 tokens, the training length."""
    results = runs.results
    chosen = results[(results.kind == "far_copies") & (results.quantity == "gain") & ~results.zero_shot]
    longest = chosen[(chosen.length == 32) & (chosen.span_start >= 16)]
    return sum(s.values.sum() for s in longest["sample"]) / sum(s.units.sum() for s in longest["sample"])


def exit_codes(records):
    return [record.exit.exit_code for record in records if record.HasField("exit")]


def test_a_key_is_looked_for_without_a_deprecated_part_of_wandb(capfd):
    assert loggers._wandb_mode("auto") == "offline"
    assert "deprecated" not in capfd.readouterr().err


def test_wandb_never_asks_and_an_orderly_stop_is_no_failure(train):
    with pytest.warns(UserWarning, match="without `wandb login` or WANDB_API_KEY wandb stays offline"):
        assert train("pe=rope", *QUICK, "logger=wandb", "logger.mode=online", "trainer.time_limit=1e-9").code == 75
    assert exit_codes(wandb_records(train.runs / "rope-text")) == [0]


@pytest.mark.parametrize("step", ["open", "log_metrics", "finalize"])
def test_a_failing_logger_is_a_warning(train, monkeypatch, step):
    from lightning.fabric.loggers import CSVLogger

    def fail(*arguments, **options):
        raise OSError("disk full")

    if step == "open":
        monkeypatch.setattr(loggers, "open_logger", fail)
    else:
        monkeypatch.setattr(CSVLogger, step, fail)
    with pytest.warns(UserWarning, match="logger=csv failed, the run goes on without it: disk full"):
        assert train("pe=rope", "logger=csv", *QUICK).code == 0
    assert (train.runs / "rope-text" / "training.json").exists()


def test_a_missing_package_is_told(train, monkeypatch):
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    outcome = train("pe=rope", "logger=tensorboard")
    assert outcome.code == 2
    assert "pip install tensorboard" in outcome.err
