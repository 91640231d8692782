"""The targets of `scripts/check_gpu.py`, and its verdict on what was measured."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lab.benchmarks.attention import BASE
from lab.benchmarks.checklist import Row

# The most that both passes of an encoding should take, compiled, in bf16 at a batch of 16, as a ratio to SDPA's.
TARGETS = {
    "rope": 1.15, "nope, window of T/8": 0.6, "nope, documents of T/8": 0.5, "nope, sinks": 1.05, "kerple": 3.0,
    "cope": 6.0, "cope, gates about 1/2": 2.5, "fox": 2.0, "alibi": 1.5, "t5": 3.0, "fire": 4.0, "relative": 5.0,
    "relative_capped": 2.5, "profiles": 2.5, "stick_breaking": 4.0, "path": 5.0, "pope": 2.2, "nape": 1.5,
    "fox_rope": 2.0, "path_fox": 5.0,
}  # fmt: skip
FORWARD_TARGETS = {"rerope": 2.0, "self_extend": 2.0, "dca": 2.0}  # the same of the forward pass of readings, eager
MEMORY_TARGET = 2.0  # the most memory of both passes, as a ratio to SDPA's
# PaTH holds as much as 63 tensors of the size of q in 16 bit: its keys, their gradients and sums are in fp32, several
# times. SDPA held 6 on an H100. See docs/log/performance.md.
MEMORY_TARGETS = {"path": 12.0, "path_fox": 12.0}
SHARE_TARGET = 0.38  # the least share of the speed of a large product that compiled training of `small` reaches


class Comparison(NamedTuple):
    """A number that was measured, and the most that it should be, or the least."""

    what: str
    value: float
    target: float
    at_least: bool = False

    @property
    def is_met(self) -> bool:
        if self.at_least:
            return self.value >= self.target
        return self.value <= self.target

    def __str__(self) -> str:
        return f"{self.what} ({self.value:.3g}, target {self.target:g})"


def first_number(cell: str) -> float:
    """The number that a cell begins with: a median stands before its quartiles."""
    return float(cell.split()[0])


def target_of(name: str) -> str:
    """The target of time as a cell of the table of attention; "" without one."""
    if name in TARGETS:
        return f"{TARGETS[name]:g}"
    if name in FORWARD_TARGETS:
        return f"{FORWARD_TARGETS[name]:g} forward"
    return ""


def attention_comparisons(rows: Sequence[Row]) -> list[Comparison]:
    """Compare time and memory of every row of attention with its targets.

    Args:
        rows: at the batch that the targets are for, with the columns "name" and "tokens".
    """
    # Without SDPA's row at a length, memory has nothing to be compared with there.
    base_megabytes = {row["tokens"]: first_number(row["MB"]) for row in rows if row["name"] == BASE}
    comparisons = []
    for row in rows:
        comparisons += time_comparisons(row)
        if row["name"] in TARGETS and row["tokens"] in base_megabytes:
            ratio = first_number(row["MB"]) / base_megabytes[row["tokens"]]
            target = MEMORY_TARGETS.get(row["name"], MEMORY_TARGET)
            comparisons.append(Comparison(f"memory of {row['']}", ratio, target))
    return comparisons


def time_comparisons(row: Row) -> list[Comparison]:
    """Compare the time of a row of attention with its target, if it has one and the row has its pass."""
    name = row["name"]
    comparisons = []
    if name in TARGETS and "compiled" in row:
        comparisons.append(Comparison(row[""], first_number(row["compiled"]), TARGETS[name]))
    if name in FORWARD_TARGETS:
        ratio = first_number(row["forward"])
        comparisons.append(Comparison(f"{row['']}, forward", ratio, FORWARD_TARGETS[name]))
    return comparisons


def share_comparisons(steps: Sequence[Row]) -> list[Comparison]:
    """Compare the utilisation of compiled training with its target, if it was measured."""
    comparisons = []
    for row in steps:
        if row[""] == "compiled":
            share = first_number(row["share"])
            comparisons.append(Comparison("share of a large product in training", share, SHARE_TARGET, at_least=True))
    return comparisons


def wrong_checks(checks: Sequence[Row]) -> list[str]:
    """The names of rows of `exactness` and `agreement` that are not right."""
    return [row[""] for row in checks if row["right"] != "yes"]


def verdict(checks: Sequence[Row], planned: int, failed: Sequence[str], comparisons: Sequence[Comparison]) -> str:
    """Return a line: which checks are not right, what failed, and which targets are missed.

    Args:
        checks: rows of `exactness` and `agreement`.
        planned: as many of them as there should be.
        failed: names of what raised an error.
        comparisons: with targets.
    """
    wrong = wrong_checks(checks)
    if not checks:
        sentences = ["**nothing was checked**"]
    elif wrong:
        sentences = [f"not exact: {'; '.join(wrong)}"]
    elif len(checks) < planned:
        sentences = [f"**only {len(checks)} of {planned} checks ran**, and are exact"]
    else:
        sentences = [f"all {planned} checks are exact"]
    if failed:
        sentences.append(f"**failed**: {'; '.join(failed)}")
    sentences.append(met_and_missed(comparisons))
    return "; ".join(sentences)


def met_and_missed(comparisons: Sequence[Comparison]) -> str:
    """Say how many targets are met, and which are missed."""
    if not comparisons:
        return "no target was measured"
    missed = [str(comparison) for comparison in comparisons if not comparison.is_met]
    message = f"{len(comparisons) - len(missed)} of {len(comparisons)} targets met"
    if missed:
        message += f", missed: {'; '.join(missed)}"
    return message


def list_of_left_out(names: Mapping[str, Sequence[str]], minutes: float) -> str:
    """Say what time did not allow: the names of jobs below the titles of their tables; "" if nothing."""
    if not names:
        return ""
    lines = [f"Left out after {minutes:g} minutes:\n"]
    for title, jobs in names.items():
        line = f"- {title}"
        if jobs:
            line += f": {'; '.join(jobs)}"
        lines.append(line)
    return "\n".join(lines)
