"""Trackers show metrics.jsonl and the results, number by number, and cannot harm a run."""

import ast
import html
import json
import re
import struct
from collections import defaultdict

import numpy as np
import pandas as pd
import pytest
from differences import differences
from process_helpers import On, power_cut
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from ropewalk.report import frame, loggers
from ropewalk.report.table import results as long_table
from ropewalk.run.directory import read_metrics

QUICK = ("pe=rope", "eval.by_position=false", "eval.far_copies=false", "eval.lengths=[1,2]")


@pytest.fixture(autouse=True)
def _nobody_is_logged_in(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_RUN_GROUP"):
        monkeypatch.delenv(name, raising=False)


def wandb_records(run):
    """Yield what wandb would upload of its only offline run: protobuf messages in the log format of LevelDB."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its service has then written everything
    (path,) = run.glob("wandb/offline-run-*/*.wandb")
    # After 7 bytes of its own the file has messages: a header of 4 bytes of checksum, 2 of length and 1 of kind, and
    # the content. Larger files divide messages over blocks of 32 KiB.
    data = path.read_bytes()
    assert len(data) < 2**15
    place = 7
    while place < len(data):
        start = place + 7
        (length,) = struct.unpack_from("<H", data, place + 4)
        place = start + length
        yield Record.FromString(data[start:place])


def items_of(record) -> dict:
    """Name -> value."""
    values = {}
    for item in record:
        name = item.key or "/".join(item.nested_key)
        values[name] = json.loads(item.value_json)
    return values


def shown_by_tensorboard(run):
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            yield event.step, name, event.value


def shown_by_wandb(run):
    for record in wandb_records(run):
        if record.HasField("history"):
            for name, value in items_of(record.history.item).items():
                yield record.history.step.num, name, value


def numbers(shown) -> dict:
    """(step, name) -> all values that a tracker shows there."""
    values = defaultdict(list)
    for step, name, value in shown:
        values[step, name].append(value)
    return values


def test_every_row_is_shown_once_after_an_interruption(train, straight):
    """Rows between the last checkpoint and the crash come twice in time, but once in each tracker."""
    options = [*QUICK, "trainer.log_every=1", "trainer.val_every=6"]
    with On("ropewalk.report.loggers.Trackers.log", 4, power_cut), pytest.raises(RuntimeError, match="power cut"):
        train(*options, "logger=[tensorboard,wandb]")

    assert "after step 2" in train(*options, "logger=[tensorboard,wandb]").out

    run = train.runs / "rope-text"

    by_wandb = numbers(shown_by_wandb(run))
    by_tensorboard = numbers(shown_by_tensorboard(run))
    rows = list(read_metrics(run))

    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]

    for row in rows:
        assert row["seconds"] > 0  # an axis of its own
        for key in row.keys() - {"step"}:
            place = row["step"], key if "/" in key else f"train/{key}"
            assert by_wandb[place] == [row[key]]
            assert by_tensorboard[place] == [np.float32(row[key])]  # it has no other numbers

    assert differences(run, straight(*options)) == []  # who watches changes no number


@pytest.mark.parametrize("step", ["__init__", "log_metrics", "finalize"])
def test_a_failing_tracker_is_a_warning_and_the_others_go_on(train, monkeypatch, step):
    def fail(*arguments, **options):
        raise OSError("disk full")

    monkeypatch.setattr(loggers.Wandb, step, fail)
    with pytest.warns(UserWarning, match="logger=wandb failed, the run goes on without it: disk full"):
        train(*QUICK, "logger=[wandb,tensorboard]")

    assert columns_of_tensorboard(train.runs / "rope-text")["eval/gain@2x"]


def columns_of_tensorboard(run) -> dict:
    """The row of HPARAMS."""
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    written = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    info = HParamsPluginData.FromString(written).session_start_info
    return {key: getattr(value, value.WhichOneof("kind")) for key, value in info.hparams.items()}


def test_tensorboard_has_no_chart_of_one_dot_and_first_what_matters(trained):
    run = trained(*QUICK, "logger=tensorboard")
    columns = columns_of_tensorboard(run)
    table = long_table(frame.load(run)).query("line == 'rope' and seed.isna()").set_index("length")
    sections = {name.partition("/")[0] for _, name, _ in shown_by_tensorboard(run)}

    assert sorted(columns)[:4] == ["Data", "Encoding", "Seed", "Training length"]  # as it shows them
    assert columns["Encoding"] == columns["pe.name"] == "rope"
    assert columns["eval/bits_per_byte@16"] == table.value[16]
    assert columns["eval/verdict"] == table.verdict[32]
    assert sorted(sections) == ["train", "val", "vs_length"]  # the order in which it shows them


def test_samples_are_in_the_log_and_in_trackers_and_change_no_number(train, straight):
    out = train(*QUICK, "trainer.sample_every=3", "logger=[tensorboard,wandb]").out
    run = train.runs / "rope-text"
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    in_tensorboard = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("samples/text_summary")]
    in_wandb = [html.unescape(page.read_text()) for page in run.glob("wandb/offline-run-*/files/media/html/samples_*")]
    texts = re.findall(r"text: .*\nwritten: .*", out)

    assert in_tensorboard == [f"```\n{text}\n```" for text in texts]
    assert len(texts) == len(in_wandb) == 2
    assert all(any(text in page for page in in_wandb) for text in texts)

    losses = [row["train/loss"] for row in read_metrics(run)]

    assert losses == [row["train/loss"] for row in read_metrics(straight(*QUICK))]


MINE = """
from lightning.fabric.loggers import Logger

class Mine(Logger):
    name = version = None

    def __init__(self, path):
        self.shown = []
        self.path = path

    def log_hyperparams(self, params):
        self.shown.append(params)

    def log_metrics(self, metrics, step):
        self.shown.append({"step": step} | metrics)

    def finalize(self, status):
        with open(self.path, "w") as file:
            file.write(repr([*self.shown, status]))
"""


def test_a_tracker_of_ones_own_sees_all_that_the_others_see(train, tmp_path, monkeypatch):
    (tmp_path / "my_trackers.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ROPEWALK_PLUGINS", "my_trackers")
    run = train.runs / "rope-text"
    train(*QUICK, "+logger.trackers.me={_target_: my_trackers.Mine, path: '{run}/{name}.shown'}")
    config, *shown, status = ast.literal_eval((run / "rope-text.shown").read_text())
    rows = list(read_metrics(run))

    assert (config["pe"]["name"], status) == ("rope", "success")
    assert [row["train/loss"] for row in shown[: len(rows)]] == [row["train/loss"] for row in rows]
    assert {row["step"] for row in shown[len(rows) + 1 :]} == {16, 32}  # loss against length
    assert "eval/gain at 2x" in shown[len(rows)]


def test_loggers_of_lightning_show_a_run(trained, tmp_path):
    csv = "{_target_: lightning.pytorch.loggers.CSVLogger, save_dir: '{run}', name: csv, version: ''}"
    run = trained(*QUICK, f"+logger.trackers.csv={csv}")
    shown = pd.read_csv(run / "csv" / "metrics.csv").dropna(subset="train/loss").set_index("step")

    for row in read_metrics(run):
        assert shown["train/loss"][row["step"]] == row["train/loss"]


def test_mlflow_shows_a_run(trained, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    run = trained(*QUICK, "logger=mlflow")
    client = mlflow.tracking.MlflowClient()
    (there,) = client.search_runs([client.get_experiment_by_name("ropewalk").experiment_id])
    losses = [(metric.step, metric.value) for metric in client.get_metric_history(there.info.run_id, "train/loss")]

    assert (there.info.run_name, there.info.status) == ("run", "FINISHED")
    assert there.data.params["pe/name"] == "rope"
    assert losses == [(row["step"], row["train/loss"]) for row in read_metrics(run)]


def test_trackio_shows_a_run(trained, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    run = trained(*QUICK, "logger=trackio")
    shown = trackio.SQLiteStorage.get_logs("ropewalk", "run")
    losses = [(row["step"], row["train/loss"]) for row in shown if "train/loss" in row]

    assert losses == [(row["step"], row["train/loss"]) for row in read_metrics(run)]


@pytest.mark.parametrize(
    ("tracker", "message"),
    [
        ("{_target_: os.system}", "logger.trackers.me._target_='os.system' is not a Logger class under lightning"),
        ("{path: x}", "logger.trackers.me needs a _target_"),
        (
            "{_target_: lightning.pytorch.loggers.CSVLogger}",
            "missing a required argument: 'save_dir'; it takes (save_dir",
        ),
    ],
)
def test_a_tracker_that_cannot_be_made_is_an_error_before_the_run(train, tracker, message):
    assert message in train(*QUICK, f"+logger.trackers.me={tracker}", code=2).err
    assert not train.runs.exists()


def test_wandb_has_the_results_of_the_report(trained, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    run = trained(*QUICK, "eval.far_copies=true", "logger=wandb")
    summary = {}
    projects = set()
    for record in wandb_records(run):
        projects.add(record.run.project)
        summary |= items_of(record.summary.update)

    table = long_table(frame.load(run))
    table = table[(table.line == "rope") & table.seed.isna()]
    rows = table[table.measure == "lengths"].set_index("length")
    (far,) = table.value[(table.measure == "far_copies") & (table.part == "far") & (table.quantity == "gain")]

    assert "theirs" in projects
    assert summary["eval/bits_per_byte@16"] == rows.value[16]
    assert summary["eval/gain@2x"] == rows.gain[32]
    assert summary["eval/verdict"] == rows.verdict[32]
    assert summary["eval/far_copies"] == far
    assert summary["zero_shot/variant"].startswith("yarn")
