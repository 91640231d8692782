"""Check a GPU that nothing has run on yet: print Markdown on whether it is exact, how fast it is and what it holds.

After about two minutes a line says whether kernels are usable. The last line is the verdict. What time did not allow is
named. Exit code 1: something is not exact, or failed, or was left out.

python scripts/check_gpu.py > gpu.md
python scripts/check_gpu.py kernels=false "encodings=[kerple,fox]" > blocks.md                       # without kernels
python scripts/check_gpu.py device=cpu model=tiny train_len=64 "encodings=[rope,t5]" "lengths=[128]"   # runs anywhere
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from conf.schema import ConfigError
from lab.benchmarks import Options
from lab.benchmarks.checklist import Checklist, Job
from lab.benchmarks.measure import markdown, on_this_machine, resolved
from ropewalk.app.cli import encoding_names, program

USABLE = ("window", "alibi", "cope")  # the flash kernel without a bias and with one, and CoPE's
LENGTHS = (320, 300)  # Triton compiles a kernel once for lengths that 16 divides, and once for others
BEYOND_A_CHUNK = 1152  # queries: CoPE's backward pass takes 1,024 at a time
EXACTNESS = 0.6  # the share of the time that checks of exactness may take
TWO_MINUTES = 2.0


@program("check_gpu", Options)
def main(options: Options) -> None:
    wanted = options
    options = resolved(options)
    if wanted.device == "auto" and options.device == "cpu":
        raise ConfigError("PyTorch finds no GPU here, so no kernel can run: device=cpu checks the rest on the CPU")
    print(on_this_machine(options), flush=True)
    at_once = max(1, (os.cpu_count() or 1) // 2)

    # bf16 first: it is what trains. fp32 tells rounding from a fault, where bf16 is wrong.
    first = exactness_jobs(options, [name for name in USABLE if options.encodings is None], "bf16-mixed")
    outcomes = Checklist(min(TWO_MINUTES, options.minutes), at_once).outcomes(first)
    if first:
        usable = "yes" if all(is_right(line) for line in outcomes.values()) else "no"
        print(f"\n**Kernels are usable: {usable}.**" if options.kernels else "\n**No kernel runs here.**", flush=True)
    checks = Checklist(EXACTNESS * options.minutes, at_once)
    others = exactness_jobs(options, options.encodings or encoding_names(), "bf16-mixed")
    outcomes |= checks.outcomes([job for job in others if job.name not in outcomes])
    wrong = [name for name, line in outcomes.items() if line and not is_right(line)]
    in_fp32 = exactness_jobs(options, {name.split(",")[0] for name in wrong}, "32-true")
    outcomes |= checks.outcomes(in_fp32)
    rows = [{"exactness": name, "worst gradient": said(line)} for name, line in outcomes.items()]
    print("", *markdown(rows), "", sep="\n", flush=True)

    speed = Checklist((1 - EXACTNESS) * options.minutes, 1)  # one after the other, since they are timed
    for name, table in speed.outcomes(speed_jobs(options)).items():
        print(f"## {name}\n\n{table or 'left out'}\n", flush=True)

    left_out = checks.left_out + speed.left_out
    print(verdict(wrong, left_out, len(outcomes)))
    sys.exit(bool(wrong or left_out))


def exactness_jobs(options: Options, names: Any, precision: str) -> list[Job]:
    """The checks of some encodings, each of both kinds of lengths."""
    jobs = []
    for name in names:
        lengths = (*LENGTHS, BEYOND_A_CHUNK) if "cope" in str(name) else LENGTHS
        for length in lengths:
            # In fp32 kernels do not run.
            kernels = options.kernels is True and precision == "bf16-mixed"
            arguments = [str(name), options.device, precision, str(kernels), str(length)]
            command = [sys.executable, "-m", "lab.benchmarks.exactness", *arguments]
            jobs.append(Job(f"{name}, {length}, {precision}", command))
    return jobs


def speed_jobs(options: Options) -> list[Job]:
    """Tables of `scripts/bench.py`: training, and attention of one text and of many."""
    model = options.model_dump(include={"device", "train_len", "steps", "rounds", "dtype", "lengths", "kernels"})
    common = [f"{key}={json.dumps(value)}" for key, value in model.items()]
    if options.encodings:
        common.append(f"encodings={json.dumps(options.encodings)}")
    bench = [sys.executable, "-m", "scripts.bench"]
    jobs = [Job("Training", [*bench, "mode=training", *common])]
    for batch in (options.batch, 1):
        jobs.append(Job(f"Attention, batch {batch}", [*bench, "mode=attention", f"batch={batch}", *common]))
    return jobs


def is_right(line: str) -> bool:
    """Whether a check ended, and its gradients are exact."""
    return line.startswith("{") and bool(json.loads(line.splitlines()[-1])["is_right"])


def said(line: str) -> str:
    """The outcome of a check as a cell."""
    if not line:
        return "left out"
    if not line.startswith("{"):
        return f"**{line}**".replace("|", "\\|")
    outcome = json.loads(line)
    return str(outcome["worst"]) + ("" if outcome["is_right"] else " **wrong**")


def verdict(wrong: Sequence[str], left_out: Sequence[str], n_checks: int) -> str:
    """One line on all of it."""
    if wrong:
        return f"**Not exact**: {'; '.join(wrong)}"
    if left_out:
        return f"No fault in what was checked; left out: {'; '.join(left_out)}"
    return f"All {n_checks} checks are exact."


if __name__ == "__main__":
    main()
