"""Check a GPU that nothing has run on yet: print Markdown on whether it is exact, how fast it is and what it holds.

The last line is the verdict. No job begins after `minutes`; what is left out for lack of time is named. Exit code 1: an
encoding is less exact than on a CPU, or its losses differ with and without kernels; something raised an error; the
kernels that a GPU should have do not work; or time did not suffice for all checks of exactness.

python scripts/check_gpu.py > gpu.md
python scripts/check_gpu.py kernels=false "encodings=[kerple,fox]" > blocks.md                       # without kernels
python scripts/check_gpu.py device=cpu model=tiny train_len=64 "encodings=[rope,t5]" "lengths=[128]"   # runs anywhere
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from conf.schema import ConfigError
from lab.benchmarks import Options
from lab.benchmarks.checklist import Checklist, Row
from lab.benchmarks.gpu import (
    AGREEING,
    AGREEING_STEPS,
    AGREEMENT_COLUMNS,
    EXACTNESS_COLUMNS,
    LONG,
    SPEED_COLUMNS,
    agreement,
    attention_columns,
    attention_jobs,
    exactness,
    profile,
    speed,
)
from lab.benchmarks.measure import on_this_machine, resolved_device
from lab.benchmarks.targets import (
    FORWARD_TARGETS,
    TARGETS,
    attention_comparisons,
    list_of_left_out,
    share_comparisons,
    verdict,
    wrong_checks,
)
from lab.benchmarks.training import check_nanogpt, configuration, peer
from ropewalk.app import cli
from ropewalk.app.cli import encoding_names, program
from ropewalk.training.hardware import kernel_problem

# When the last job of each part may begin, as a share of `minutes`. The profile, the table of batch 1 and nanoGPT have
# what is left.
EXACTNESS_ENDS = 0.4
AGREEMENT_ENDS = 0.5
TRAINING_ENDS = 0.65
ATTENTION_ENDS = 0.95


@program("check_gpu", Options)
def main(options: Options) -> None:
    checklist = Checklist(options.minutes)  # whose time has begun
    wanted = options
    options = resolved_device(options)
    check_options(wanted, options)
    missing = missing_kernels(wanted, options)
    print(on_this_machine(options), missing, sep="\n\n", flush=True)

    jobs = exactness_jobs(options)
    planned = len(jobs)
    checks = checklist.table("Exactness", EXACTNESS_COLUMNS, jobs, share=EXACTNESS_ENDS)
    if options.kernels:
        title = f"Losses of {AGREEING_STEPS} steps, with kernels and without"
        jobs = {f"training with {spec}": partial(agreement, options, spec) for spec in AGREEING}
        planned += len(jobs)
        checks += checklist.table(title, AGREEMENT_COLUMNS, jobs, share=AGREEMENT_ENDS)

    title = "Training, bf16-mixed, beside the speed of one large product"
    steps = checklist.table(title, SPEED_COLUMNS, speed_jobs(options), share=TRAINING_ENDS)
    # The table that the targets are for, and at the end the one where launches take most of the time, eager.
    options = options.model_copy(update={"encodings": options.encodings or by_importance()})
    rows = attention_table(checklist, options, share=ATTENTION_ENDS)
    checklist.part("Profile of two training steps", partial(profile, options), share=1.0)
    if options.batch > 1:
        attention_table(checklist, options.model_copy(update={"batch": 1, "compiled": False}), share=1.0)
    if options.nanogpt:
        nanogpt_table(checklist, options)

    kernels = "with" if options.kernels else "without"
    print(f"\n## Verdict, {kernels} kernels, after {checklist.minutes_spent():.1f} minutes\n")
    comparisons = attention_comparisons(rows) + share_comparisons(steps)
    left_out = list_of_left_out(checklist.left_out, options.minutes)
    compiled = [row for row in rows if "right" in row]
    checks += compiled
    planned += len(compiled)
    summary = verdict(checks, planned, checklist.failed, comparisons)
    print("\n\n".join(filter(None, [left_out, missing, summary])))
    kernels_are_wrong = bool(missing) and options.device == "cuda" and wanted.kernels is not False
    unchecked = len(checks) < planned
    sys.exit(unchecked or bool(checklist.failed or wrong_checks(checks)) or kernels_are_wrong)


def check_options(wanted: Options, options: Options) -> None:
    """Find mistakes of the user before anything is measured, since later an error is only a row that fails.

    Args:
        wanted: as given.
        options: with the device that was found.

    Raises:
        ConfigError: there is no GPU and no other device was asked for, or an option is wrong.
    """
    if wanted.device == "auto" and options.device == "cpu":
        raise ConfigError("PyTorch finds no GPU here, so no kernel can run: device=cpu checks the rest on the CPU")
    for spec in options.encodings or []:
        cli.encoding(spec)
    configuration(options, "rope")
    if options.nanogpt:
        check_nanogpt(options)


def missing_kernels(wanted: Options, options: Options) -> str:
    """Say in a line why no kernel runs; "" if kernels run.

    Args:
        wanted: as given.
        options: with the device and the kernels that were found.
    """
    if options.kernels:
        return ""
    reason = "kernels=false"
    if wanted.kernels is not False:
        reason = kernel_problem(options.device, options.dtype)
    return f"**No kernel runs here**: {reason}. So no kernel is checked."


def by_importance() -> list[str]:
    """All encodings, those with targets first."""
    return [*with_targets(), *without_targets()]


def with_targets() -> list[str]:
    """The encodings with targets, in the order of these."""
    names = encoding_names()
    return [name for name in (*TARGETS, *FORWARD_TARGETS) if name in names]


def without_targets() -> list[str]:
    """The other encodings, sorted."""
    return [name for name in encoding_names() if name not in with_targets()]


def exactness_jobs(options: Options) -> dict[str, Callable[[], Row]]:
    """Return the checks of `exactness`: encodings with targets, what else has targets, and the other encodings."""
    first: list[Any] = list(options.encodings or with_targets())
    jobs: dict[str, Callable[[], Row]] = {str(spec): partial(exactness, options, spec) for spec in first}
    for name in ("gpt_oss", "t5"):
        jobs[f"{name}, sinks"] = partial(exactness, options, name, sinks=True)
    for name in ("rope", "kerple", "cope", "fire", "relative"):
        jobs[f"{name}, documents"] = partial(exactness, options, name, documents=True)
    for name in ("cope", "stick_breaking", "path"):
        jobs[f"{name}, {LONG} tokens"] = partial(exactness, options, name, length=LONG)
    if not options.encodings:
        for name in without_targets():
            jobs[name] = partial(exactness, options, name)
    return jobs


def speed_jobs(options: Options) -> dict[str, Callable[[], Row]]:
    """Return the trainings whose speed is measured, the one with a target first."""
    jobs: dict[str, Callable[[], Row]] = {
        "compiled": partial(speed, options, compile=True),
        "eager": partial(speed, options, compile=False),
        "compiled, checkpointing": partial(speed, options, compile=True, checkpointing=True),
    }
    if options.device == "cuda":
        jobs["compiled, CUDA graphs"] = partial(speed, options, compile="graphs")
    return jobs


def attention_table(checklist: Checklist, options: Options, *, share: float) -> list[Row]:
    """Measure and print the table of attention at the batch of the options; return its rows."""
    title = f"Attention, batch {options.batch}"
    return checklist.table(title, attention_columns(options), attention_jobs(options), share=share)


def nanogpt_table(checklist: Checklist, options: Options) -> None:
    """Print the step of train.py beside nanoGPT's, a row for each shape."""
    jobs = {str(shape): partial(peer, options, shape) for shape in options.shapes}
    columns = ["network", "speed of train.py / nanogpt", "train.py, tokens/s"]
    checklist.table("Beside nanoGPT", columns, jobs, share=1.0)


if __name__ == "__main__":
    main()
