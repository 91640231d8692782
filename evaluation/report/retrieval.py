"""Retrieval from far text: what of far copies and of RULER lies beyond train_len, and how far RULER is answered."""

from collections.abc import Callable

import numpy as np

from evaluation import statistics
from evaluation.report.comparison import Key, Table
from evaluation.results import Part
from evaluation.statistics import Estimate, Sample

EFFECTIVE = 85.6  # percent: the threshold of RULER, which Llama-2-7B has at 4,096 tokens


def is_far(part: Part, length: int, train_len: int) -> bool:
    """Whether text from beyond train_len is needed: the copied words or the needle lie that far back."""
    distance = part.first
    if np.isnan(distance):
        distance = (1 - part.depth) * length
    return bool(distance >= train_len)  # not of NaN, where there is no distance


def pooled(table: Table, continuation: str | None = None) -> dict[str, Estimate]:
    """For each line the mean over all parts that need text from beyond train_len, text by text.

    It is over the seeds that have all of these parts.

    Args:
        continuation: of far copies: only the tokens that are the "same" as after the earlier words, or an "other".
    """
    far = []
    for key in table.cells:
        part = table.parts[key.part]
        if is_far(part, key.length, table.train_len) and continuation in (None, part.continuation):
            far.append(key)
    result = {}
    for line in table.lines.index:
        by_seed: dict[int, list[Sample]] = {}
        for key in far:
            if key.line == line:
                for seed, sample in table.cells[key].items():
                    by_seed.setdefault(seed, []).append(sample)
        if by_seed:
            most = max(map(len, by_seed.values()))
            complete = [by_seed[seed] for seed in sorted(by_seed) if len(by_seed[seed]) == most]
            values = [np.sum([sample.values for sample in samples], axis=0) for samples in complete]
            units = np.sum([sample.units for sample in complete[0]], axis=0)
            result[line] = statistics.estimate(Sample(np.concatenate(values), units))
    return result


def effective(found: Table) -> dict[str, int]:
    """For each line the longest length up to which the mean over RULER's tasks is effective; 0 if it is nowhere."""
    return _up_to(found, lambda e: e.value >= EFFECTIVE)


def above_chance(gain: Table) -> dict[str, int]:
    """For each line the longest length up to which the gain has its interval above 0; 0 if it does nowhere."""
    return _up_to(gain, lambda e: e.low > 0)


def _up_to(table: Table, holds: Callable[[Estimate], bool]) -> dict[str, int]:
    """For each line the longest length up to which its mean over the tasks holds."""
    reach = {}
    for line in table.lines.index:
        reach[line] = 0
        for length in table.lengths:
            e = table.means.get(Key(line, "mean", length))
            if e is None or not holds(e):
                break
            reach[line] = length
    return reach
