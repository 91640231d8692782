"""Evaluate a finished run anew: at other lengths, on more text, or with its weights read by other encodings.

python scripts/evaluate.py run=runs/yarn-code eval.lengths=[1,2,4,8,16] eval.sequences=128
python scripts/evaluate.py run=runs/rope-code pe=linear,ntk,dynamic_ntk,yarn,llama3 pe.scale=8

Keys are those of the `eval` and `pe` sections. The first form rewrites the run's results.json and figures. The second
trains nothing: each encoding reads the same weights, at its scale, beside the run's own; it writes swap.json and
figures/swap.png. Options that an encoding shares with the run's, such as the base, stay as they were.
"""

from pathlib import Path
from typing import Any

import yaml

import conf.cli
import data as data_sources
from conf.parent import check_family, inherit_encoding
from conf.rundir import check_identity, find, read_config
from conf.schema import Config, ConfigError, check, nearest
from data.base import Data
from evaluation import figures, lengths
from evaluation.results import PositionBin, Results, Row
from model import store
from model.machine import Machine, keep_freed_memory
from train import evaluate, report


def main(arguments: dict[str, str]) -> None:
    if "run" not in arguments:
        raise ConfigError("run=... is missing: the run directory to evaluate")
    path = find(arguments.pop("run"))
    values = read_config(path) | {"runs_dir": str(path.parent), "name": path.name}
    swapped = swaps(path, arguments)
    for key, value in arguments.items():
        section, _, option = key.partition(".")
        if section != "eval" or option not in values["eval"]:
            known = ["run", "pe", "pe.OPTION", *(f"eval.{k}" for k in values["eval"])]
            raise ConfigError(f"{key}: there is no such key" + nearest(key, known))
        values["eval"][option] = yaml.safe_load(value)
    cfg = check(values)
    others = [check(values | {"pe": pe}) for pe in swapped]  # all of them before any work
    data = data_sources.build(cfg.data)
    data.prepare(progress=True)
    check_identity(path, data.identity())
    device = Machine.choose(accelerator=cfg.trainer.accelerator, precision=32).device
    if device == "cpu":
        keep_freed_memory()
    own = slice(1) if others else slice(None)  # beside others, only as trained
    results = evaluate(store.load(path).to(device), data, cfg, readings=own, progress=print)
    if others:
        results = with_swaps(results, path, [other for other in others if other.pe != cfg.pe], data, device)
    elif (path / "results.json").is_file():
        results.training = Results.load(path / "results.json").training
    results.save(path / ("swap.json" if others else "results.json"))
    figures.extrapolation(results, path / "figures" / ("swap.png" if others else "extrapolation.png"))
    report(results)


def swaps(path: Path, arguments: dict[str, str]) -> list[dict[str, Any]]:
    """The encodings asked for by pe=A,B and pe.OPTION=VALUE, which are taken out of `arguments`."""
    parent = store.describe(path)
    names = arguments.pop("pe", "")
    given = {key: yaml.safe_load(arguments.pop(key)) for key in list(arguments) if key.startswith("pe.")}
    chosen = []
    for name in names.split(",") if names else []:
        chosen.append(inherit_encoding(parent, conf.cli.compose(f"pe={name}")["pe"], given))
    for key, value in given.items():
        takers = [pe for pe in chosen if key.removeprefix("pe.") in pe]
        if not takers:
            known = sorted({f"pe.{option}" for pe in chosen for option in pe})
            raise ConfigError(f"{key}: none of pe={names} has this option" + nearest(key, known))
        for pe in takers:
            pe[key.removeprefix("pe.")] = value
    for pe in chosen:
        check_family(parent, pe, parent["train_len"], remedy="fine-tune with train.py init_from=... instead")
    return chosen


def with_swaps(results: Results, path: Path, others: list[Config], data: Data, device: str) -> Results:
    """The run's own results as trained, and beside them each other encoding at its scale."""
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
        print(f"with {name}")
        net = store.load(path, pe=cfg.pe).to(device)
        last = len(net.encodings[0].readings()) - 1
        found = lengths.evaluate(net, data, cfg, readings=slice(last, None), progress=print)
        add(found, found.rows, f"{name}, {found.rows[0].reading}".removesuffix(", as trained"))
    return results.model_copy(update={"lengths": rows, "by_position": bins, "skipped": skipped})


if __name__ == "__main__":
    conf.cli.script(main)
