"""Check a GPU that nothing has run on yet: print Markdown on whether it is exact, how fast it is and what it holds.

The last line is the verdict. Exit code 1: an encoding fails, is less exact than on a CPU, or trains otherwise with
kernels than without. What does not fit into `minutes` is left out and named.

python scripts/check_gpu.py > gpu.md
python scripts/check_gpu.py kernels=false "encodings=[kerple,fox]" > blocks.md                       # without kernels
python scripts/check_gpu.py device=cpu model=tiny train_len=64 "encodings=[rope,t5]" "lengths=[128]"   # runs anywhere
"""

import sys
import time
from collections.abc import Callable
from functools import partial

from app.cli import encoding_names, program
from benchmarks import Options
from benchmarks.attention import attention, layers
from benchmarks.gpu import (
    FORWARD_TARGETS,
    LONG,
    TARGETS,
    TRAINED,
    agreement,
    exactness,
    profile,
    speed,
    verdict,
)
from benchmarks.measure import markdown, on_this_machine, resolved_device
from benchmarks.training import peers

# When each part must have begun its last row, as a share of `minutes`.
EXACTNESS_ENDS = 0.45
AGREEMENT_ENDS = 0.55
TARGETS_END = 0.85


@program("check_gpu", Options)
def main(options: Options) -> None:
    options = resolved_device(options)
    begun = time.monotonic()

    def before(share: float) -> bool:
        return time.monotonic() - begun < share * 60 * options.minutes

    print(f"{on_this_machine(options)}\n\n## Exactness\n")
    jobs = {str(spec): partial(exactness, options, spec) for spec in options.encodings or by_importance()}
    for spec in ("gpt_oss", "t5"):
        jobs[f"{spec}, sinks"] = partial(exactness, options, spec, sinks=True)
    for spec in ("rope", "kerple", "cope", "fire", "relative"):
        jobs[f"{spec}, documents"] = partial(exactness, options, spec, documents=True)
    for spec in ("cope", "stick_breaking", "path"):
        jobs[f"{spec}, {LONG} tokens"] = partial(exactness, options, spec, length=LONG)
    checks = [job() for job in jobs.values() if before(EXACTNESS_ENDS)]
    left_out = list(jobs)[len(checks) :]
    print(markdown(checks), flush=True)

    if options.kernels:
        specs = ("gemma3", "kerple", "cope")
        trainings = [agreement(options, spec) for spec in specs if before(AGREEMENT_ENDS)]
        left_out += [f"training with {spec}" for spec in specs[len(trainings) :]]
        print(f"\n## Loss after {TRAINED} steps\n\n{markdown(trainings)}", flush=True)
        checks += trainings

    # The table that the targets are for, and then the one where launches take most of the time, eager.
    options = options.model_copy(update={"encodings": options.encodings or by_importance()})
    rows = attention_table(options, partial(before, TARGETS_END))
    left_out += [f"speed of {name}" for name, _ in [*layers(options)][len(rows) :]]

    print("\n## Training, bf16-mixed, beside the speed of one large product\n", flush=True)
    steps = [
        speed(options, "eager", compile=False),
        speed(options, "compiled", compile=True),
        speed(options, "compiled, checkpointing", compile=True, checkpointing=True),
    ]
    if options.device == "cuda":
        steps.append(speed(options, "compiled, CUDA graphs", compile="graphs"))
    print(f"{markdown(steps)}\n\n```\n{profile(options)}```", flush=True)
    if options.batch > 1:
        attention_table(options.model_copy(update={"batch": 1, "compiled": False}), partial(before, 1.0))
    if options.nanogpt:
        print(f"\n## Beside nanoGPT\n\n{markdown(peers(options))}")

    kernels = "with" if options.kernels else "without"
    print(f"\n## Verdict, {kernels} kernels, after {(time.monotonic() - begun) / 60:.1f} minutes\n")
    if left_out:
        print(f"Left out after {options.minutes:g} minutes: {'; '.join(left_out)}.\n")
    print(verdict(checks, rows, steps))
    sys.exit(any(row["right"] != "yes" for row in checks))


def by_importance() -> list[str]:
    """All encodings, those with targets first."""
    names = encoding_names()
    with_targets = [name for name in (*TARGETS, *FORWARD_TARGETS) if name in names]
    return list(dict.fromkeys((*with_targets, *names)))


def attention_table(options: Options, in_time: Callable[[], bool]) -> list[dict[str, str]]:
    """Measure and print the table of attention; return its rows."""
    rows = attention(options, in_time)
    for row in rows:
        row["compiled: target"] = str(TARGETS.get(row[""], ""))
    print(f"\n## Attention, batch {options.batch}\n\n{markdown(rows)}", flush=True)
    return rows


if __name__ == "__main__":
    main()
