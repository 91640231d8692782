"""Judge an encoding against another: train what is missing, paired by seed, and end with one line.

python scripts/judge.py pe=mine                                  on data=markov, minutes on a CPU
python scripts/judge.py pe=mine pe.horizon=32 experiment=compare     on source code
python scripts/judge.py pe=yarn pe.scale=8 against=rerope seeds=5 data=text data.files='corpus/**/*.py'
ROPEWALK_PLUGINS=board python scripts/judge.py entry=board/2026-11-30-mine     the encoding of an entry of the board

The other keys are those of train.py and hold for both sides, but for pe.*. The same command resumes. The verdict lies
in RUNS_DIR/verdicts/ as JSON. Each verdict of a folder is a try and makes the intervals of later ones wider: see
lab/board/judge.py. Exit code: 0 better, 3 not separated, 4 worse; others as of train.py.
"""

if __name__ == "__main__":  # before the imports below, which take seconds: a mistake is answered at once
    import start as start  # runs this program

import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from pydantic import Field

from conf.schema import Config, ConfigError, Section, parse
from data.base import build_data
from lab.board import board, judge, trials
from ropewalk.app.cli import encoding, plain, quoted
from ropewalk.app.run_dir import RunDir
from ropewalk.files import write_json

CODES = {"better": 0, "not separated": 3, "worse": 4}


class Arguments(Section):
    entry: str | None
    against: str | dict[str, Any]
    seeds: int = Field(ge=2, le=1000)
    runs_dir: str


def main(composed: DictConfig) -> None:
    values = plain(composed)
    args = parse(Arguments, {key: values[key] for key in Arguments.model_fields})
    mine, against = configurations(args)
    seeds = [mine.seed + i for i in range(args.seeds)]
    sides = [[trials.run_of(cfg, seed=seed) for seed in seeds] for cfg in (mine, against)]
    path, number = trials.begin(Path(args.runs_dir), *sides)
    losses = trials.measured(sides)
    of_sides = map(judge.read, losses)
    findings = judge.judge(*of_sides, train_len=mine.train_len, longest=max(mine.lengths), number=number)
    deciding, *_ = findings
    unit = losses[0][0][mine.train_len]["unit"]
    verdict = {
        "sentence": f"{mine.pe['name']} against {against.pe['name']}: {judge.sentence(findings)}; {unit}; "
        f"{args.seeds} seeds; try {number} of {args.runs_dir}: intervals for {number}",
        "verdict": findings[deciding].word,
        "decided_by": deciding,
        "unit": unit,
        "measures": {name: finding._asdict() for name, finding in findings.items()},
        "try": number,
        "encoding": mine.pe,
        "against": against.pe,
        "seeds": seeds,
        "runs": [str(RunDir(run).path) for side in sides for run in side],
    }
    write_json(path, verdict)
    print(verdict["sentence"])
    sys.exit(CODES[findings[deciding].word])


def configurations(args: Arguments) -> tuple[Config, Config]:
    """Return the configurations of both sides.

    Raises ConfigError: one is mistaken, both are the same, or the data are a task.
    """
    overrides = {override.lstrip("+~").partition("=")[0]: override for override in HydraConfig.get().overrides.task}
    asked = {key: override for key, override in overrides.items() if key not in Arguments.model_fields}
    if not asked.keys() & {"data", "experiment", "init_from"}:
        asked["data"] = "data=markov"
    asked["runs_dir"] = f"runs_dir={quoted(args.runs_dir)}"
    chosen = {"pe": board.load(Path(args.entry)).pe} if args.entry else {}
    mine = trials.configuration(*asked.values(), **chosen)
    # The options on the command line are those of `pe`; `against` has its own.
    shared = [override for key, override in asked.items() if key.partition(".")[0] != "pe"]
    against = trials.configuration(*shared, pe=encoding(args.against, "against"))
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
