"""Trackers that show metrics.jsonl and evals/ elsewhere: TensorBoard, wandb and loggers of Lightning's, or several.

On every start trackers are made anew and all rows are replayed, so each appears once, however often the run was
interrupted. A tracker that fails only warns.
"""

import inspect
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from html import escape
from importlib.util import find_spec
from typing import Any, Protocol

import pandas as pd

from conf import plugins
from conf.errors import ConfigError, flatten
from conf.files import printable
from ropewalk.report import frame, page
from ropewalk.report.answer import far_text
from ropewalk.report.table import headline, of_one_setting, over_seeds, results
from ropewalk.run.directory import RunDir, read_metrics
from ropewalk.run.processes import is_rank_zero
from ropewalk.run.stop import EXIT_INTERRUPTED, EXIT_STOPPED

WANDB_COLUMNS = [
    "measure", "variant", "zero_shot", "step", "task", "difficulty", "depth", "span_start", "span_end", "continuation",
    "length", "quantity", "unit", "value", "low", "high", "gain",
]  # fmt: skip
BY_LENGTH = "vs_length"  # section of the charts against length
PACKAGES = ("tensorboard", "wandb", "mlflow", "trackio")  # of the options of `logger`


class Tracker(Protocol):
    """What shows a run, which it gets as numbers, texts and results. Whatever it raises becomes a warning."""

    def log_metrics(self, values: Mapping[str, Any], step: int) -> None:
        """Show numbers by their names in charts, see `_chart_name`."""

    def log_text(self, text: str, step: int) -> None:
        """Show what the network writes."""

    def publish(self, runs: frame.Runs, table: pd.DataFrame) -> None:
        """Show the results of the run, alone in `runs`, and in their long `table`."""

    def finalize(self, status: str) -> None:
        """End with "success" or "failed"."""


class TensorBoard:
    """TensorBoard's files as a `Tracker`."""

    def __init__(self, run: RunDir, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What an earlier process wrote is deleted, since all rows are shown again.
        shutil.rmtree(run.path / "tensorboard", ignore_errors=True)
        self.writer = SummaryWriter(run.path / "tensorboard")
        self.config = config

    def log_metrics(self, values: Mapping[str, Any], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def log_text(self, text: str, step: int) -> None:
        self.writer.add_text("samples", f"```\n{text}\n```", step)

    def publish(self, runs: frame.Runs, table: pd.DataFrame) -> None:
        """Show what was configured and what came out as a row of HPARAMS, and curves over length."""
        from torch.utils.tensorboard.summary import hparams

        columns = {key: value for key, value in flatten(self.config).items() if not key.endswith("_target_")}
        # TensorBoard sorts the columns, capitals first, and shows only the first five unless asked.
        main = {"Data": columns["data.name"], "Encoding": columns["pe.name"], "Seed": columns["seed"]}
        columns = main | {"Training length": columns["train_len"]} | columns | summary_metrics(table)
        cells = {key: cell if isinstance(cell, bool | int | float) else str(cell) for key, cell in columns.items()}
        # As a metric of HPARAMS each number would be a chart with one dot, too. The table needs a metric: one it has.
        for summary in hparams(cells, {"val/loss": 0.0}):
            self.writer._get_file_writer().add_summary(summary)
        # There is no axis but the step, which is here a length.
        for length, values in length_curves(table).items():
            self.log_metrics(values, length)

    def finalize(self, status: str) -> None:
        self.writer.close()


class Wandb:
    """A wandb run as a `Tracker`.

    It takes the place of Lightning's, which prompts for a key and counts steps itself: replayed rows would appear
    twice.
    """

    def __init__(self, run: RunDir, config: dict[str, Any]) -> None:
        import wandb

        # wandb cannot append to the files of an earlier process. Their rows are replayed, so the files can go.
        for superseded in (run.path / "wandb").glob(f"offline-run-*-{run.run_id}"):
            shutil.rmtree(superseded)
        options = run.cfg.logger
        self.run = wandb.init(
            id=run.run_id,
            name=run.cfg.name,
            config=config,
            dir=run.path,
            project=options.project or os.environ.get("WANDB_PROJECT") or "ropewalk",
            entity=options.entity,
            notes=options.notes,
            tags=[*options.tags, run.cfg.pe["name"], run.cfg.data["name"], f"seed {run.cfg.seed}"],
            # A group of wandb's is a folder here, as a sweep fills one. Within it runs of one type, the seeds of an
            # encoding, are averaged. wandb reads the variable only once in a process, and a sweep has many runs in one.
            group=options.group or os.environ.get("WANDB_RUN_GROUP") or run.path.absolute().parent.name,
            job_type=run.cfg.pe["name"],
            mode=os.environ.get("WANDB_MODE") or options.mode,  # type: ignore[arg-type]
            resume="allow",
            reinit="finish_previous",  # that of an earlier job of a sweep, if it failed
            settings=wandb.Settings(console="off", init_timeout=30),
        )
        # Charts of these have the length as their axis. They need no summary: that has a number for each length.
        self.run.define_metric(f"{BY_LENGTH}/*", step_metric=f"{BY_LENGTH}/tokens", summary="none")

    def log_metrics(self, values: Mapping[str, Any], step: int) -> None:
        # When a run is resumed online, the server may already have the earlier steps.
        if step >= self.run.starting_step:
            self.run.log(dict(values), step=step)

    def log_text(self, text: str, step: int) -> None:
        import wandb

        self.run.log({"samples": wandb.Html(f"<pre>{escape(text)}</pre>")}, step=step)

    def publish(self, runs: frame.Runs, table: pd.DataFrame) -> None:
        """Show the results as a summary, curves over length, a table and the page."""
        import wandb

        self.run.summary.update(summary_metrics(table))
        # Without the rows over all seeds, which say the same of a single run.
        of_run = table.loc[table.seed.notna(), WANDB_COLUMNS]
        self.run.log({"eval/results": wandb.Table(dataframe=of_run.astype(object))})
        for length, values in length_curves(table).items():
            self.run.log({f"{BY_LENGTH}/tokens": length, **values})
        self.run.log({"eval/report": wandb.Html(page.html(runs), inject=False)})

    def finalize(self, status: str) -> None:
        self.run.finish(exit_code=int(status == "failed"))


class LightningTracker:
    """A logger of `logger.trackers`, a Logger of Lightning's or a subclass, as a `Tracker`.

    Lightning's loggers show numbers: they get no text, and of the results what is a number.
    """

    def __init__(self, logger: Any, config: dict[str, Any]) -> None:
        self.logger = logger
        self.logger.log_hyperparams(config)

    def log_metrics(self, values: Mapping[str, Any], step: int) -> None:
        self.logger.log_metrics(values, step)

    def log_text(self, text: str, step: int) -> None:
        """Show nothing."""

    def publish(self, runs: frame.Runs, table: pd.DataFrame) -> None:
        """Show the results at the last step, and curves over length."""
        metrics = summary_metrics(table)
        # MLflow has names without @.
        numbers = {name.replace("@", " at "): value for name, value in metrics.items() if not isinstance(value, str)}
        self.log_metrics(numbers, int(table.step.max()))
        for length, values in length_curves(table).items():
            self.log_metrics(values, length)

    def finalize(self, status: str) -> None:
        self.logger.finalize(status)


TRACKERS: dict[str, Callable[[RunDir, dict[str, Any]], Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb}


def tracker_factory(run: RunDir, name: str) -> Callable[[RunDir, dict[str, Any]], Tracker]:
    """Return what opens the tracker `name` of `logger.trackers`, as those of TRACKERS are opened.

    Raises ValueError: there is no such class, or its constructor does not take these options.
    """
    from lightning.fabric.loggers import Logger

    where = f"logger.trackers.{name}"
    cls, options = plugins.resolve(run.cfg.logger.trackers[name], Logger, "lightning", where)  # type: ignore[type-abstract]
    named = {"name": run.cfg.name, "run": run.path, "run_id": run.run_id}
    for key, value in options.items():
        if isinstance(value, str):
            options[key] = re.sub(r"\{(name|run|run_id)\}", lambda place: str(named[place[1]]), value)
    try:
        inspect.signature(cls).bind(**options)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}; it takes {inspect.signature(cls)}") from None
    return lambda run, config: LightningTracker(cls(**options), config)


class Trackers:
    """Shows rows of metrics.jsonl (`log`) and the results in evals/ (`publish`) on rank zero.

    It is a context manager, to be entered once the run directory exists.

    Args:
        facts: shown beside the configuration of the run.

    Raises ValueError: a package is not installed.
    """

    def __init__(self, run: RunDir, facts: Mapping[str, Any]) -> None:
        self.run = run
        self.config = run.cfg.model_dump() | dict(facts)
        # The options of `logger` have a flag for each name in TRACKERS.
        self.factories = {name: factory for name, factory in TRACKERS.items() if getattr(run.cfg.logger, name)}
        user_trackers = run.cfg.logger.trackers
        for name in [*self.factories, *user_trackers]:
            if name in PACKAGES and not find_spec(name):
                raise ValueError(f"logger={name} needs a package: pip install {name}")
        self.factories |= {name: tracker_factory(run, name) for name in user_trackers}
        # By name, on rank zero, once they are open. One that fails is taken out.
        self.trackers: dict[str, Tracker] = {}

    def _each(self, names: Iterable[str], act: Callable[[str], None]) -> None:
        """Do something with every tracker of these; one that fails is left out from then on."""
        for name in [*names]:
            # A full disk or a server that is down must not end a training.
            try:
                act(name)
            except Exception as error:
                self.trackers.pop(name, None)
                warnings.warn(f"logger={name} failed, the run goes on without it: {error}", stacklevel=3)

    def _open(self, name: str) -> None:
        self.trackers[name] = self.factories[name](self.run, self.config)

    def __enter__(self) -> None:
        self._each(self.factories if is_rank_zero() else [], self._open)
        # Rows of a run that is resumed: the new trackers have not seen them.
        if self.trackers and self.run.metrics.exists():
            for row in read_metrics(self.run.path):
                self.log(row)

    def log(self, row: Mapping[str, Any]) -> None:
        # Any of them can be an axis, train/seconds too.
        values = {_chart_name(name): value for name, value in row.items() if name != "step"}
        self._each(self.trackers, lambda name: self.trackers[name].log_metrics(values, row["step"]))

    def sample(self, text: str, step: int) -> None:
        """Show what the network writes, also on the terminal. It is in no file of the run, and so it is shown once."""
        if is_rank_zero():
            print(printable(text), flush=True)
        self._each(self.trackers, lambda name: self.trackers[name].log_text(text, step))

    def publish(self) -> None:
        """Show the results of a run that is complete."""
        self._each(self.trackers, self._publish)

    def _publish(self, name: str) -> None:
        runs = frame.load(self.run.path)
        self.trackers[name].publish(runs, results(runs))

    def __exit__(self, exc_type: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        stopped = isinstance(error, SystemExit) and error.code in (EXIT_STOPPED, EXIT_INTERRUPTED)
        status = "success" if error is None or stopped else "failed"
        self._each(self.trackers, lambda name: self.trackers[name].finalize(status))


def _chart_name(name: str) -> str:
    """The name of a number of metrics.jsonl in trackers, which group by what stands before the slash."""
    if "/" not in name:
        return f"train/{name}"
    return name.replace("position/", "val/position/")  # TensorBoard sorts its sections: train is the first by these


def summary_metrics(table: pd.DataFrame) -> dict[str, float | str]:
    """Return the results of one run at each length, by names that are the same for all encodings.

    "eval/bits_per_byte@512" is the network as trained, "zero_shot/..." the variant that is best at the longest text.
    Names like "eval/gain@8x", "eval/verdict" and "eval/far_copies" are also the same for all training lengths.
    """
    numbers = numbers_by_length(table)
    is_gain = numbers["name"].str.endswith("/gain")
    multiples = numbers.times.map("{:g}x".format)
    names = numbers["name"] + "@" + numbers.length.astype(str).mask(is_gain, multiples)
    metrics: dict[str, float | str] = dict(zip(names, numbers.number, strict=True))
    far = of_one_setting(far_text(table).query("measure == 'far_copies'")).set_index("line").value
    for prefix, last in numbers.drop_duplicates("prefix", keep="last").set_index("prefix").iterrows():
        others = {"variant": last.variant, "verdict": last.verdict, "far_copies": far.get(last.line)}
        metrics |= {f"{prefix}/{name}": value for name, value in others.items() if not pd.isna(value)}
    return metrics


def length_curves(table: pd.DataFrame) -> dict[int, dict[str, float]]:
    """Return the loss of one run, and its gain over cutting the text, by length in tokens and by name.

    Names like "vs_length/eval/bits_per_byte" and "vs_length/zero_shot/gain" are the same for all encodings.
    """
    numbers = numbers_by_length(table)
    numbers["name"] = f"{BY_LENGTH}/" + numbers["name"]
    return {
        length: dict(zip(at_length["name"], at_length.number, strict=True))
        for length, at_length in numbers.groupby("length")
    }


def numbers_by_length(table: pd.DataFrame) -> pd.DataFrame:
    """Return each loss or error of the best lines and each gain over the cut text, with a name and the row's columns.

    Names begin with "eval" for the final weights as trained, with "zero_shot" for the best other reading of them.
    """
    rows = over_seeds(table)
    # Of measurements with several settings one is shown, as on the page.
    rows = headline(rows[rows.step == rows.step.max()])
    rows = rows.assign(prefix=rows.zero_shot.astype(bool).map({False: "eval", True: "zero_shot"}))
    # Best at the longest text: of a task in the difficulty that is worst there.
    longest = rows[rows.length == rows.groupby("prefix").length.transform("max")]
    worst = longest.groupby(["prefix", "line"])["rank"].max()
    best = set(worst.groupby("prefix").idxmin())
    is_best = [(row.prefix, row.line) in best for row in rows.itertuples()]
    rows = rows[is_best].sort_values(["length", "part"])

    # After the part, if there are several.
    part = rows.part + "/" if rows.part.nunique() > 1 else ""
    units = rows.unit.str.replace(" ", "_")
    losses = rows.assign(name=rows.prefix + "/" + part + units, number=rows.value)
    longer = rows[(rows.length > rows.cut) & rows.gain.notna()]
    gains = longer.assign(name=longer.prefix + "/gain", number=longer.gain)
    return pd.concat([losses, gains]).sort_values("length", kind="stable", ignore_index=True)
