"""Tries: what `scripts/judge.py` does, from the command line to the file of a verdict."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from pydantic import BaseModel, Field

from conf.errors import ConfigError
from conf.files import checksum, write_json
from conf.schema import Config, Section
from data.base import build_data
from lab.board import board, judge, trials
from ropewalk.app.compose import quoted
from ropewalk.app.resolve import base_model, check_readable, options_for_model, with_windows_in_tokens
from ropewalk.run.directory import RunDir, lock, read_file

ENOUGH = 5  # seeds that still find something after many tries
CODES = {"better": 0, "not separated": 3, "worse": 4}  # exit codes


class Arguments(Section, extra="ignore"):  # the other keys are those of train.py: see `configurations`
    entry: str | None
    against: str | dict[str, Any]
    seeds: int = Field(ge=3, le=1000)  # of two equal ones more than 5 % would be told apart
    runs_dir: str


class Try(BaseModel):
    """What the file of a verdict holds from the start of its try on, among more."""

    number: int = Field(alias="try", ge=1)  # in its folder: it decides the intervals


def judged(args: Arguments) -> int:
    """Train what is missing of both sides, write and print the verdict; return the exit code."""
    mine, against = configurations(args)

    seeds = list(range(mine.seed, mine.seed + args.seeds))
    runs_by_side = [[trials.run_of(cfg, seed=seed) for seed in seeds] for cfg in (mine, against)]
    path, number = begin(Path(args.runs_dir), *runs_by_side)

    losses = trials.train_and_measure(runs_by_side)
    samples = map(judge.read, losses)
    findings = judge.judge(*samples, train_len=mine.train_len, longest=max(mine.lengths), number=number)
    deciding, *_ = findings

    unit = losses[0][0][mine.train_len]["unit"]
    leads = []
    for n in sorted({args.seeds, ENOUGH}):
        lead = judge.visible_lead(findings[deciding], args.seeds, n)
        leads.append(f"{n} seeds a lead of {lead:.3f}")
    verdict = {
        "sentence": f"{mine.pe['name']} against {against.pe['name']}: {judge.sentence(findings)}; {unit}; "
        f"try {number} of {args.runs_dir}: intervals for {number}; "
        f"about four of five tries would find, with {', '.join(leads)}",
        "verdict": findings[deciding].word,
        "decided_by": deciding,
        "unit": unit,
        "measures": {name: finding._asdict() for name, finding in findings.items()},
        "try": number,
        "encoding": mine.pe,
        "against": against.pe,
        "seeds": seeds,
        "runs": [str(RunDir(cfg).path) for runs in runs_by_side for cfg in runs],
    }
    write_json(path, verdict)
    print(verdict["sentence"])
    return CODES[findings[deciding].word]


def configurations(args: Arguments) -> tuple[Config, Config]:
    """Return the configurations of both sides: those that train.py would make of the command line.

    Raises ConfigError: one is mistaken, both are the same, or the data are a task.
    """
    asked = {}
    for override in HydraConfig.get().overrides.task:
        key = override.lstrip("+~").partition("=")[0]
        if key not in Arguments.model_fields:
            asked[key] = override
    if not asked.keys() & {"data", "experiment", "init_from"}:
        asked["data"] = "data=markov"
    asked["runs_dir"] = f"runs_dir={quoted(args.runs_dir)}"

    chosen = {"pe": board.load(Path(args.entry)).pe} if args.entry else {}
    mine = trials.configuration(*asked.values(), **chosen)
    # The options on the command line are those of `pe`; `against` has its own, and those of the model they start from.
    base = with_windows_in_tokens(base_model(mine.init_from), mine.train_len)
    if base and args.entry:
        raise ConfigError("an entry trains from scratch: leave out init_from, or give the encoding as pe=NAME")
    pe = options_for_model(base, args.against, "against")
    if base and not mine.init_partial:
        check_readable(base, pe, remedy="init_partial=true starts from them all the same", dropping=True)
    against = trials.configuration(*asked.values(), pe=pe)

    if mine.pe == against.pe:
        raise ConfigError(f"pe={mine.pe['name']} and against are the same: choose the encoding to judge with pe=NAME")
    task = build_data(mine.data).task
    if task:
        raise ConfigError(
            f"data={task} is a task, which some seeds learn and others do not: judge on text or data=markov, and "
            "compare tasks with scripts/report.py"
        )
    if mine.train_len not in mine.lengths:
        raise ConfigError(f"eval.lengths={mine.eval.lengths} lacks the training length: add 1")
    return mine, against


def begin(folder: Path, mine: Sequence[Config], against: Sequence[Config]) -> tuple[Path, int]:
    """Return the file of a verdict and the number of this try in the folder, which is counted once it has begun.

    A try that is repeated keeps its number. Another encoding, option, source, seed or evaluation is another try.
    """
    settings = [[cfg.name, cfg.eval.model_dump()] for cfg in [*mine, *against]]
    path = folder / "verdicts" / f"{mine[0].pe['name']}-{checksum(settings)[:8]}.json"
    # Two tries at once must not get one number.
    with lock(path.parent):
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_json(path, {"try": len([*path.parent.glob("*.json")]) + 1, "encoding": mine[0].pe})
    return path, read_file(path, Try, remedy="restore it: the number of the try decides its intervals").number
