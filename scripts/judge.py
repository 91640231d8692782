"""Judge an encoding against another: train what is missing, paired by seed, and end with one line.

python scripts/judge.py pe=mine                                  on data=markov, minutes on a CPU
python scripts/judge.py pe=mine pe.horizon=32 experiment=compare     on source code
python scripts/judge.py pe=yarn pe.scale=8 against=rerope seeds=5 data=text data.files='corpus/**/*.py'

The other keys are those of train.py and hold for both sides, but for pe.*. The same command resumes. The verdict lies
in RUNS_DIR/verdicts/ as JSON. Each verdict of a folder is a try and makes the intervals of later ones wider: see
lab/board/judge.py. Exit code: 0 better, 3 not separated, 4 worse; others as of train.py.
"""

if __name__ == "__main__":  # before the imports below, which take seconds: a mistake is answered at once
    from start import run

    run("scripts.judge")

import json
import sys
from pathlib import Path
from typing import Any, Literal

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from pydantic import Field

from conf.schema import Config, ConfigError, Section, parse
from data.base import build_data
from lab.board import judge, tries
from lab.board.judge import Finding
from lab.board.tries import Contestant
from ropewalk.app.cli import encoding, plain, program, quoted
from ropewalk.app.init_from import train_values
from ropewalk.app.resolve import for_this_machine, resolve
from ropewalk.app.run_dir import RunDir, read_training
from ropewalk.files import write_json
from ropewalk.training.hardware import reset_peak_memory
from train import train

CODES = {"better": 0, "not separated": 3, "worse": 4}


class Arguments(Section):
    against: str | dict[str, Any]
    seeds: int = Field(ge=2, le=1000)
    format: Literal["text", "json"]
    runs_dir: str


@program("judge")
def main(composed: DictConfig) -> None:
    values = plain(composed)
    args = parse(Arguments, {key: values[key] for key in Arguments.model_fields})
    mine, against = tries.contestants(*configurations(args), args.seeds)
    runs = {str(cfg.name): cfg for cfg in against.runs + mine.runs}
    for cfg in runs.values():
        RunDir(cfg).check()
    path, number = tries.begin(Path(args.runs_dir), mine, against)
    for i, cfg in enumerate(runs.values(), 1):
        print(f"\njudge: run {i} of {len(runs)}, {cfg.name}")
        reset_peak_memory()
        train(cfg)
    findings = judge.judge(
        judge.read(mine.runs, mine.pe),
        judge.read(against.runs, against.pe),
        train_len=cfg.train_len,
        longest=max(cfg.lengths),
        number=number,
    )
    seconds = sum(read_training(RunDir(run).path).seconds for run in runs.values())
    verdict = report(findings, mine, against, number, seconds)
    write_json(path, verdict)
    if args.format == "json":
        print(json.dumps(verdict))
    else:
        print(verdict["sentence"])
    sys.exit(CODES[verdict["verdict"]])


def configurations(args: Arguments) -> tuple[Config, Config]:
    """Return the configurations of both sides.

    Raises ConfigError: one is mistaken, both are the same, or the data are a task.
    """
    shared = [f"runs_dir={quoted(args.runs_dir)}"]
    of_encoding = []
    keys = set()
    for override in HydraConfig.get().overrides.task:
        key = override.lstrip("+~").partition("=")[0]
        keys.add(key)
        if key.partition(".")[0] == "pe":
            of_encoding.append(override)
        elif key not in Arguments.model_fields:
            shared.append(override)
    if not keys & {"data", "experiment", "init_from"}:
        shared.append("data=markov")
    mine = for_this_machine(resolve(train_values(*shared, *of_encoding)))[0]
    # The options on the command line are those of `pe`; `against` has its own.
    others = train_values(*shared) | {"pe": encoding(args.against, "against")}
    against = for_this_machine(resolve(others))[0]
    if mine.pe == against.pe:
        raise ConfigError(f"pe={mine.pe['name']} and against are the same: choose the encoding to judge with pe=NAME")
    task = build_data(mine.data).task
    if task:
        remedy = "judge on text or data=markov, and compare tasks with scripts/report.py"
        raise ConfigError(f"data={task} is a task, which some seeds learn and others do not: {remedy}")
    if mine.train_len not in mine.lengths:
        raise ConfigError(f"eval.lengths={mine.eval.lengths} lacks the training length: add 1")
    return mine, against


def report(
    findings: dict[str, Finding], mine: Contestant, against: Contestant, number: int, seconds: float
) -> dict[str, Any]:
    """Return the verdict as JSON has it, with the sentence that a reader gets."""
    deciding, *_ = findings
    folder = mine.runs[0].runs_dir
    unit = judge.unit(mine.runs[0])
    names = f"{judge.title(mine.pe, against.pe)} against {judge.title(against.pe, mine.pe)}"
    cost = f"{len(mine.runs)} seeds, {seconds / 60:.0f} min of training"
    widened = f"try {number} of {folder}: intervals for {number}"
    return {
        "sentence": f"{names}: {judge.sentence(findings)}; {unit}; {cost}; {widened}",
        "verdict": findings[deciding].word,
        "decided_by": deciding,
        "unit": unit,
        "measures": {name: found.as_json() for name, found in findings.items()},
        "try": number,
        "encoding": mine.pe,
        "against": against.pe,
        "seeds": [run.seed for run in mine.runs],
        "runs": [str(RunDir(run).path) for run in mine.runs + against.runs],
        "seconds": seconds,
    }
