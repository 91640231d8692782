"""Evaluate a finished run anew: at other lengths, on more text, or with its weights read by other encodings.

python scripts/evaluate.py run=runs/yarn-code eval.lengths=[1,2,4,8,16] eval.sequences=128
python scripts/evaluate.py run=runs/rope-code pe=linear,ntk,dynamic_ntk,yarn,llama3 pe.scale=8

Keys are those of the `eval` and `pe` sections. The first form rewrites the run's results.json and figures. The second
trains nothing: each encoding reads the same weights, at its scale, beside the run's own; it writes swap.json and
figures/swap.png. Options that an encoding shares with the run's, such as the base, stay as they were.
"""

from pathlib import Path

import yaml

import conf.cli
import data as data_sources
from conf.rundir import check_identity, find, read_config
from conf.schema import Config, ConfigError, check, nearest
from conf.swap import swaps
from data.base import Data
from evaluation import figures, lengths
from evaluation.results import PositionBin, Results, Row
from model import store
from model.machine import Machine, tune_cpu
from train import evaluate, report


def main(arguments: dict[str, str]) -> None:
    if "run" not in arguments:
        raise ConfigError("run=... is missing: the run directory to evaluate")
    path = find(arguments.pop("run"))
    values = read_config(path) | {"runs_dir": str(path.parent), "name": path.name}
    own = {key: value for key, value in arguments.items() if key != "pe" and not key.startswith("pe.")}
    for key, value in own.items():
        section, _, option = key.partition(".")
        if section != "eval" or option not in values["eval"]:
            known = ["run", "pe", "pe.OPTION", *(f"eval.{k}" for k in values["eval"])]
            raise ConfigError(f"{key}: there is no such key" + nearest(key, known))
        values["eval"][option] = yaml.safe_load(value)
    cfg = check(values)
    others = swaps(path, values, arguments)
    data = data_sources.build(cfg.data)
    data.prepare(progress=True)
    check_identity(path, data.identity())
    device = Machine.choose(accelerator=cfg.trainer.accelerator, precision=32).device
    if device == "cpu":
        tune_cpu()
    readings = slice(1) if others else slice(None)  # beside others, only as trained
    results = evaluate(store.load(path).to(device), data, cfg, readings=readings, progress=print)
    if others:
        results = with_swaps(results, path, cfg, others, data, device)
    elif (path / "results.json").is_file():
        results.training = Results.load(path / "results.json").training
    if not results.lengths:
        raise ConfigError(f"eval.lengths: nothing has a position at {min(cfg.lengths)} tokens: lower it")
    results.save(path / ("swap.json" if others else "results.json"))
    figures.draw(results, path / "figures" / ("swap.png" if others else "extrapolation.png"))
    report(results)


def with_swaps(results: Results, path: Path, own: Config, others: list[Config], data: Data, device: str) -> Results:
    """The run's own results as trained, and beside them each of the others at its scale."""
    rows: list[Row] = []
    bins: list[PositionBin] = []
    skipped: dict[str, list[int]] = {}

    def add(found: Results | lengths.Lengths, measured: list[Row], label: str) -> None:
        rows.extend(row.model_copy(update={"reading": label}) for row in measured)
        bins.extend(b.model_copy(update={"reading": label}) for b in found.by_position)
        for missing in found.skipped.values():
            skipped[label] = missing

    add(results, results.lengths, f"{results.encoding}, as trained")
    for cfg in others:
        name = cfg.pe["name"]
        net = store.load(path, pe=cfg.pe).to(device)
        *_, last = readings = net.encodings[0].readings()
        if cfg.pe == own.pe and len(readings) == 1:
            continue  # it is there already
        print(f"with {name}")
        found = lengths.evaluate(net, data, cfg, readings=slice(len(readings) - 1, None), progress=print)
        add(found, found.rows, f"{name}, {last.label}".removesuffix(", as trained"))
    return results.model_copy(update={"lengths": rows, "by_position": bins, "skipped": skipped})


if __name__ == "__main__":
    conf.cli.script(main)
