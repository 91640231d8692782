"""Retrieval from far text: results of far copies and RULER from beyond train_len, and how far RULER is answered."""

from collections.abc import Callable

import numpy as np

from ropewalk.evaluation import statistics
from ropewalk.evaluation.results import Part
from ropewalk.evaluation.statistics import Estimate, Sample
from ropewalk.report.comparison import Key, Table

# In percent: RULER's threshold for an effective length, the score of Llama-2-7B at 4,096 tokens.
EFFECTIVE = 85.6


def is_far(part: Part, length: int, train_len: int) -> bool:
    """Return whether text from beyond train_len is needed: the copied words or the needle lie that far back."""
    distance = part.first
    if np.isnan(distance):
        distance = (1 - part.depth) * length
    # Parts without a distance, such as means over tasks, have NaN here and are not far.
    return bool(distance >= train_len)


def pooled(table: Table, continuation: str | None = None) -> dict[str, Estimate]:
    """Return for each line the mean over all parts that need text from beyond train_len.

    Args:
        continuation: for far copies: only the tokens that are the "same" as after the earlier words, or an "other".
    """
    by_line: dict[str, dict[int, list[Sample]]] = {}
    for key, of_seeds in table.cells.items():
        part = table.parts[key.part]
        if not is_far(part, key.length, table.train_len) or continuation not in (None, part.continuation):
            continue
        by_seed = by_line.setdefault(key.line, {})
        for seed, sample in of_seeds.items():
            by_seed.setdefault(seed, []).append(sample)
    result = {}
    for line in table.lines.index:
        if line in by_line:
            result[line] = _pool(by_line[line])
    return result


def _pool(by_seed: dict[int, list[Sample]]) -> Estimate:
    """Return the mean over the parts of each seed, summed text by text.

    It is over the seeds that have all parts: a seed with fewer of them would answer another question.
    """
    n_parts = max(map(len, by_seed.values()))
    values = []
    units = np.zeros(0)
    for seed in sorted(by_seed):
        samples = by_seed[seed]
        if len(samples) == n_parts:
            values.append(np.sum([sample.values for sample in samples], axis=0))
            units = np.sum([sample.units for sample in samples], axis=0)
    return statistics.estimate(Sample(np.concatenate(values), units))


def effective(found: Table) -> dict[str, int]:
    """Return the longest length of each line up to which the mean over RULER's tasks is effective; 0 for none."""
    return _up_to(found, lambda e: e.value >= EFFECTIVE)


def above_chance(gain: Table) -> dict[str, int]:
    """Return the longest length of each line up to which the interval of the gain is above 0; 0 for none."""
    return _up_to(gain, lambda e: e.low > 0)


def _up_to(table: Table, holds: Callable[[Estimate], bool]) -> dict[str, int]:
    """Return the longest length of each line up to which `holds` is true of the mean over RULER's tasks."""
    reach = {}
    for line in table.lines.index:
        reach[line] = 0
        for length in table.lengths:
            e = table.means.get(Key(line, "mean", length))
            # A length that was not measured ends it as well: nothing is claimed across a gap.
            if e is None or not holds(e):
                break
            reach[line] = length
    return reach
