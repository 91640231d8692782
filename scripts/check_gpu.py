"""Check a GPU that nothing has run on yet: print Markdown on whether it is exact, how fast it is and what it holds.

The check is that of trainer.kernels: outputs and all gradients in bf16 beside float64, by kernels where there are any,
each encoding in a process of its own. After about two minutes a line says whether kernels are usable. The last line is
the verdict. What time did not allow is named. Exit code 1: something is not exact, or failed, or was left out.

python scripts/check_gpu.py > gpu.md
python scripts/check_gpu.py "encodings=[kerple,fox]" minutes=3 > gpu.md
TRITON_INTERPRET=1 python scripts/check_gpu.py device=cpu "encodings=[t5]" "lengths=[128]"    # runs anywhere
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from time import monotonic

from conf.schema import ConfigError
from lab.benchmarks import Options
from lab.benchmarks.measure import markdown, on_this_machine, resolved
from lab.kernels.check import checked, outcome_of
from model.position import Shape, build_encodings
from ropewalk.app.cli import encoding, encoding_names, program

# Encodings that together need all kernels: with these compiled, which takes the most time, the others start at once.
KINDS = ("rope", "alibi", "t5", "fire", "cope")
HEAD_DIMS = (64, 128)
EXACTNESS = 0.6  # the share of the time that checks of exactness may take
LEFT_OUT = "left out"

Check = Callable[[str, int, float], str]  # (encoding, channels of a head, seconds) -> its problem, "" if there is none


@program("check_gpu", Options)
def main(options: Options) -> None:
    wanted = options
    options = resolved(options)
    if wanted.device == "auto" and options.device == "cpu":
        raise ConfigError("PyTorch finds no GPU here, so no kernel can run: device=cpu tries them in the interpreter")
    print(on_this_machine(options), flush=True)
    start = monotonic()

    def problem(name: str, head_dim: int, seconds: float) -> str:
        shape = Shape(4 * head_dim, 4, 2, head_dim, train_len=256, n_layer=2)
        return checked(list(dict.fromkeys(build_encodings(encoding(name), shape))), options.device, seconds)

    names = [str(name) for name in options.encodings or encoding_names()]
    stop = start + 60 * EXACTNESS * options.minutes
    problems = outcomes(problem, [name for name in KINDS if name in names], stop)
    if problems:
        usable = "no" if any(problems.values()) else "yes"
        print(f"\n**Kernels are usable: {usable}.**\n", flush=True)
    problems |= outcomes(problem, [name for name in names if name not in KINDS], stop)
    rows = [{"encoding": name, "problem": said or "none"} for name, said in problems.items()]
    print(*markdown(rows), sep="\n", flush=True)

    stop = start + 60 * options.minutes
    for mode, batch in (("training", 1), ("attention", options.batch), ("attention", 1)):
        table = speeds(options, mode, batch, stop - monotonic())
        print(f"\n## {mode}, batch {batch}\n\n{table}", flush=True)
        if "| " not in table:
            problems[f"speed of {mode}"] = table

    wrong = "; ".join(f"{name}: {said}" for name, said in problems.items() if said)
    print(f"\n**Not exact, or not checked**: {wrong}" if wrong else f"\nAll {len(rows)} checks are exact.")
    sys.exit(bool(wrong))


def outcomes(
    problem: Check, names: Sequence[str], stop: float, clock: Callable[[], float] = monotonic, at_once: int = 0
) -> dict[str, str]:
    """The problem of each encoding and each width of heads, several at a time, since compilers take most of it."""

    def within(case: tuple[str, int]) -> str:
        seconds = stop - clock()
        return problem(*case, seconds) if seconds > 0 else LEFT_OUT

    cases = list(product(names, HEAD_DIMS))
    with ThreadPoolExecutor(at_once or max(1, (os.cpu_count() or 1) // 2)) as pool:
        found = list(pool.map(within, cases))
    return {f"{name}, {head_dim} channels": said for (name, head_dim), said in zip(cases, found, strict=True)}


def speeds(options: Options, mode: str, batch: int, seconds: float) -> str:
    """A table of `scripts/bench.py`, or how it failed; rows that it had until its time was over."""
    if seconds <= 0:
        return LEFT_OUT
    chosen = options.model_dump(include={"device", "train_len", "steps", "rounds", "dtype", "lengths", "kernels"})
    chosen |= {"mode": mode, "batch": batch, "encodings": options.encodings or KINDS}
    arguments = [f"{key}={json.dumps(value)}" for key, value in chosen.items()]
    return outcome_of([sys.executable, "-m", "scripts.bench", *arguments], seconds)


if __name__ == "__main__":
    main()
