"""The check of a GPU: first the exactness of all encodings, then the tables of `scripts/bench.py`."""

import json
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from time import monotonic

from conf.errors import ConfigError
from conf.options import encoding, encoding_names
from lab.benchmarks import Options
from lab.benchmarks.measure import begun, markdown
from lab.kernels.check import checked, outcome_of
from model.position import PositionEncoding, Shape, build_encodings

# Encodings that together need all kernels: with these compiled, which takes the most time, the others start at once.
KINDS = ("rope", "alibi", "t5", "fire", "cope")
HEAD_DIMS = (64, 128)
EXACTNESS = 0.6  # the share of the time that checks of exactness may take


def check(wanted: Options) -> bool:
    """Print Markdown on a GPU; return whether something is not exact, or failed, or was left out.

    Raises ConfigError: there is no GPU, and none was named.
    """
    stop = monotonic() + 60 * wanted.minutes
    options = begun(wanted)
    if wanted.device == "auto" and options.device == "cpu":
        raise ConfigError("PyTorch finds no GPU here, so no kernel can run: device=cpu tries them in the interpreter")

    names = [str(name) for name in options.encodings or encoding_names()]
    problems = exactness(options, [name for name in KINDS if name in names], stop)
    if problems:
        print(f"**Kernels are usable: {'no' if any(problems.values()) else 'yes'}.**\n", flush=True)
    problems |= exactness(options, [name for name in names if name not in KINDS], stop)
    rows = [{"encoding": name, "problem": said or "none"} for name, said in problems.items()]
    print(*markdown(rows), sep="\n", flush=True)

    problems |= speed(options, stop)
    wrong = "; ".join(f"{name}: {said}" for name, said in problems.items() if said)
    print(f"\n**Not exact, or not checked**: {wrong}" if wrong else f"\nAll {len(rows)} checks are exact.")
    return bool(wrong)


def speed(options: Options, stop: float) -> dict[str, str]:
    """Print the tables of speed, and return what each says that could not be made, by its name."""
    problems = {}
    # Training comes last: a compiler takes half a minute for each encoding.
    for mode, batch in (("attention", options.batch), ("attention", 1), ("training", options.trainer["batch_size"])):
        table = in_time(stop, partial(outcome_of, bench(options, mode, batch)))
        print(f"\n## {mode}, batch {batch}\n\n{table}", flush=True)
        if "| " not in table:
            problems[f"speed of {mode}"] = table
    return problems


def exactness(options: Options, names: list[str], stop: float) -> dict[str, str]:
    """Compare encodings on the device with themselves in float64, each with heads of several widths.

    Args:
        names: of the encodings.
        stop: when all that `check` does must have ended, by the clock of `monotonic`; these comparisons end earlier.

    Returns:
        By encoding and width what is wrong, "" if nothing is.
    """
    stop -= 60 * (1 - EXACTNESS) * options.minutes
    # Made before the threads: Hydra composes one configuration at a time.
    cases = {}
    for name, head_dim in product(names, HEAD_DIMS):
        shape = Shape(4 * head_dim, 4, 2, head_dim, train_len=256, n_layer=2)
        cases[f"{name}, {head_dim} channels"] = build_encodings(encoding(name), shape)

    def problem(encodings: list[PositionEncoding]) -> str:
        return in_time(stop, partial(checked, encodings, options.device))

    # Several at a time, since compilers take most of it.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(cases, pool.map(problem, cases.values()), strict=True))


def in_time(stop: float, function: Callable[[float], str]) -> str:
    """What a call says that may take the seconds until `stop`; after it nothing begins."""
    seconds = stop - monotonic()
    return function(seconds) if seconds > 0 else "left out"


def bench(options: Options, mode: str, batch: int) -> list[str]:
    """The command of `scripts/bench.py` that prints a table, row by row, of the options of a check.

    It is a process of its own, so that one that hangs or fails ends with the rows that it has printed.
    """
    chosen = options.model_dump(include={"device", "train_len", "steps", "rounds", "dtype", "lengths", "kernels"})
    chosen |= {"mode": mode, "batch": batch, "encodings": options.encodings or KINDS}
    chosen |= {f"model.{key}": value for key, value in options.model.items()}
    program = str(Path(__file__).parents[2] / "scripts" / "bench.py")
    return [sys.executable, program, *(f"{key}={json.dumps(value)}" for key, value in chosen.items())]
