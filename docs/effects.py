"""Effects: weighted sums of losses, with tests. docs/log/tables.yaml names them, and docs/results.py prints them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from math import prod
from typing import Any, NamedTuple

from lab.board.rules import holm, printed_p
from ropewalk.evaluation import statistics
from ropewalk.evaluation.statistics import Estimate, Sample, estimate, stacked
from ropewalk.report.answer import amount
from ropewalk.report.frame import Runs
from ropewalk.report.page import markdown_table
from ropewalk.report.table import of_one_setting

Weights = Mapping[str, float]  # by line: what its loss is multiplied by; they sum to 0


class Effect(NamedTuple):
    """A weighted sum of losses."""

    name: str
    times: float  # the length of the texts, as a multiple of the training length
    weights: Weights


def effects_of(of: Mapping[str, Any]) -> list[Effect]:
    """Return the effects of a section `of` tables.yaml, which are corrected together."""
    known = factorial(of["cells"], of["factors"]) if "cells" in of else {}
    effects = []
    for effect, terms in of["effects"].items():
        weights = dict(terms)
        at = weights.pop("at", of["at"])
        known[effect] = summed(weights, known)
        effects += [Effect(effect, times, known[effect]) for times in at]
    return effects


def summed(terms: Weights, known: Mapping[str, Weights]) -> Weights:
    """The weights of a sum of `terms`, each a line or one of the effects that are `known`."""
    total: Counter[str] = Counter()
    for term, factor in terms.items():
        for line, weight in known.get(term, {term: 1}).items():
            total[line] += factor * weight
    return total


def factorial(cells: str, factors: Mapping[str, Sequence[Any]]) -> dict[str, Weights]:
    """The effects in a design of all cells: by "a" the mean with less that without it, by "a x b" what b changes of a.

    Args:
        cells: the name of a cell's line, with each factor in braces.
        factors: by name: what stands in the place of the braces without and with it.
    """
    signs = {}
    for choice in product((0, 1), repeat=len(factors)):
        words = {name: values[on] for (name, values), on in zip(factors.items(), choice, strict=True)}
        signs[cells.format(**words)] = dict(zip(factors, [2 * on - 1 for on in choice], strict=True))
    effects: dict[str, Weights] = {}
    for number in (1, 2):
        for chosen in combinations(factors, number):
            share = 2**number / len(signs)
            effects[" x ".join(chosen)] = {
                line: share * prod(sign[name] for name in chosen) for line, sign in signs.items()
            }
    return effects


def rows(effects: Sequence[Effect], archives: Mapping[str, Runs]) -> list[str]:
    """Return a table of the effects in each of some archives, and the probability of each if it were 0.

    The interval is over seeds and texts, as everywhere. The test has seeds - 1 degrees of freedom, the fewest that it
    can have, and Holm's correction for all rows.

    Args:
        archives: by the words that tell one from the others, "" for a single one.
    """
    cells = []
    p_values = []
    for words, runs in archives.items():
        losses = runs.results[(runs.results.kind == "lengths") & (runs.results.quantity == "loss")]
        (train_len,) = losses.train_len.unique()  # of all lines
        (unit,) = losses.unit.unique()
        for name, times, weights in effects:
            length = round(times * train_len)
            e = effect(runs, length, weights)
            cells.append([f"{name}, {words}" if words else name, f"{length} tokens", e.seeds, amount(*e[:3], sign="+")])
            # One seed leaves no degree of freedom, and so no test.
            p_values.append(p_value(e) if e.seeds > 1 else 1.0)
    for row, p in zip(cells, holm(p_values), strict=True):
        row.append("" if row[2] == 1 else printed_p(p))
    return markdown_table([["effect", "at", "seeds", unit, "p"], *cells])


def effect(runs: Runs, length: int, weights: Weights) -> Estimate:
    """Return the weighted sum of the losses of some lines, over the seeds that all of them have, on the same texts.

    Raises ValueError: there is no such seed.
    """
    at_length = runs.results[(runs.results.kind == "lengths") & (runs.results.length == length)]
    by_seed: dict[str, dict[int, Sample]] = {line: {} for line in weights}
    for row in of_one_setting(at_length[at_length.line.isin(list(weights))]).itertuples():
        by_seed[row.line][row.seed] = row.sample
    shared = set.intersection(*map(set, by_seed.values()))
    if not shared:
        raise ValueError(f"no seed has all of {', '.join(weights)} at {length} tokens of the same texts")
    total = 0.0
    for line, weight in weights.items():
        sample = stacked([by_seed[line][seed] for seed in sorted(shared)])
        total = total + weight * sample.values
    return estimate(Sample(total, sample.units))


def p_value(e: Estimate) -> float:
    """Return the two-sided probability of an effect as large if it were 0, by Student's t over the seeds."""
    return statistics.p_value(e._replace(freedom=e.seeds - 1))
