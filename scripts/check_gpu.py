"""Check a GPU that nothing has run on yet: print Markdown on whether it is exact, how fast it is and what it holds.

The check is that of trainer.kernels: outputs and all gradients in bf16 beside float64, by kernels where there are any,
each encoding in a process of its own. After about two minutes a line says whether kernels are usable. The last line is
the verdict. What time did not allow is named. Exit code 1: something is not exact, or failed, or was left out.

python scripts/check_gpu.py > gpu.md
python scripts/check_gpu.py "encodings=[kerple,fox]" minutes=3 > gpu.md
TRITON_INTERPRET=1 python scripts/check_gpu.py device=cpu "encodings=[t5]" "lengths=[128]"    # runs anywhere
"""

if __name__ == "__main__":  # before the imports below, which take seconds: a mistake is answered at once
    import start as start  # runs this program

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from time import monotonic

from conf.schema import ConfigError
from lab.benchmarks import Options
from lab.benchmarks.measure import begun, markdown
from lab.kernels.check import checked, outcome_of
from model.position import PositionEncoding, Shape, build_encodings
from ropewalk.app.cli import encoding, encoding_names, program

# Encodings that together need all kernels: with these compiled, which takes the most time, the others start at once.
KINDS = ("rope", "alibi", "t5", "fire", "cope")
HEAD_DIMS = (64, 128)
EXACTNESS = 0.6  # the share of the time that checks of exactness may take
LEFT_OUT = "left out"


@program(Options)
def main(wanted: Options) -> None:
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
    # Training comes last: a compiler takes half a minute for each encoding.
    for mode, batch in (("attention", options.batch), ("attention", 1), ("training", options.trainer["batch_size"])):
        table = speeds(options, mode, batch, stop)
        print(f"\n## {mode}, batch {batch}\n\n{table}", flush=True)
        if "| " not in table:
            problems[f"speed of {mode}"] = table
    wrong = "; ".join(f"{name}: {said}" for name, said in problems.items() if said)
    print(f"\n**Not exact, or not checked**: {wrong}" if wrong else f"\nAll {len(rows)} checks are exact.")
    sys.exit(bool(wrong))


def exactness(options: Options, names: list[str], stop: float) -> dict[str, str]:
    """The problem of each encoding and each width of heads, "" if there is none, in time for what comes after it."""
    stop -= 60 * (1 - EXACTNESS) * options.minutes
    # Made before the threads: Hydra composes one configuration at a time.
    cases = [(name, head_dim, encodings_of(name, head_dim)) for name, head_dim in product(names, HEAD_DIMS)]
    # Several at a time, since compilers take most of it.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(partial(problem, options.device, stop), [encodings for _, _, encodings in cases])
        return {f"{name}, {head_dim} channels": said for (name, head_dim, _), said in zip(cases, found, strict=True)}


def encodings_of(name: str, head_dim: int) -> list[PositionEncoding]:
    """An encoding for heads of so many channels, of two layers."""
    return build_encodings(encoding(name), Shape(4 * head_dim, 4, 2, head_dim, train_len=256, n_layer=2))


def problem(device: str, stop: float, encodings: list[PositionEncoding]) -> str:
    """What is wrong with the encodings of a network; nothing begins after `stop`."""
    seconds = stop - monotonic()
    return checked(encodings, device, seconds) if seconds > 0 else LEFT_OUT


def speeds(options: Options, mode: str, batch: int, stop: float) -> str:
    """A table of `scripts/bench.py`, or how it failed; rows that it had until its time was over."""
    chosen = options.model_dump(include={"device", "train_len", "steps", "rounds", "dtype", "lengths", "kernels"})
    chosen |= {"mode": mode, "batch": batch, "encodings": options.encodings or KINDS}
    chosen |= {f"model.{key}": value for key, value in options.model.items()}
    program = str(Path(__file__).with_name("bench.py"))
    command = [sys.executable, program, *(f"{key}={json.dumps(value)}" for key, value in chosen.items())]
    seconds = stop - monotonic()
    return outcome_of(command, seconds) if seconds > 0 else LEFT_OUT
