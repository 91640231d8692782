"""The rules of the board: what a verdict holds, what breaks a rule, and when an entry is a record.

The score is the gain over cutting the text at 8x, mean over two kinds of chains, as a share of what is possible, and at
least -100 %: who loses more is no worse than who loses all that could be gained, for both should cut the text. Each
seed of the training has evaluation texts of its own, so its score is one independent draw, and the scores of two
entries with the same seeds are paired. Their difference is tested by Student's distribution with one degree of freedom
less than seeds: with the variance between few seeds in the test itself, a small variance by chance names no record.

Every entry is one more test. A record needs p < 0.01 after Holm's correction (Scandinavian Journal of Statistics 6,
1979) for all entries so far, those that broke a rule included. Later ones do not count against it: of 30 equal entries
one is a false record on 1 % of simulated boards.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator
from scipy.special import stdtrit

from conf.schema import Section
from ropewalk.evaluation.statistics import Estimate, Sample, estimate, p_value

RATES = (0.75e-3, 1.5e-3, 3e-3, 6e-3, 12e-3)  # the learning rates that an entry may choose from
IN_WORDS = ", ".join(f"{rate:g}" for rate in RATES)
PARAMETERS, COST, ABOVE = 1.02, 2.0, 0.02  # at most: both as multiples of RoPE's; bits at 1x above RoPE
READING = 4.0  # at most: time of reading texts of 8x, as a multiple of RoPE's
LOWEST = -100.0  # percent: the least score
KINDS = ("chains that stay", "chains that change")
LEVEL = 0.01
FEW, MANY = 5, 20  # seeds of an entry; of the first one, and of one that may be a record
PROMISING = 0.2  # p-value of the first seeds below which the others are trained

# For each kind of chain a number for each seed.
Bits = Annotated[list[Annotated[list[float], Field(min_length=2)]], Field(min_length=2, max_length=2)]


class Measured(Section):
    """What was measured of an encoding, in bits per token."""

    gain: Bits  # of the whole text over the text cut to the training length
    possible: Bits  # the same for the best possible predictor
    excess: Bits  # loss at the training length, above that of the best possible predictor

    @model_validator(mode="after")
    def _of_the_same_seeds(self) -> Self:
        if len({len(of_kind) for of_kind in (*self.gain, *self.possible, *self.excess)}) > 1:
            raise ValueError("all numbers must be of the same seeds")
        return self

    def scores(self) -> np.ndarray:
        """The score of each seed, in percent of the possible."""
        return np.maximum(100 * np.sum(self.gain, axis=0) / np.sum(self.possible, axis=0), LOWEST)

    def better_than_possible(self) -> list[str]:
        """Where it is surely better than the best possible predictor, as only who sees the future is."""
        at_8x = np.array(self.excess) + np.array(self.possible) - np.array(self.gain)
        places = []
        for length, excess in (("1x", np.array(self.excess)), ("8x", at_8x)):
            for kind, of_seeds in zip(KINDS, excess, strict=True):
                if over_seeds(of_seeds).high < 0:
                    places.append(f"{length} on {kind}")
        return places


class Verdict(Section):
    """What verdict.json holds. Everything that the page says follows from the verdicts of all entries."""

    entry: str  # name of its folder
    number: int  # of the verdict on this board, from 1 on: a record beats what was there before it
    encoding: str
    source: str  # hash of encoding.py and pe.yaml
    commit: str
    seeds: list[int]
    lr: float
    help: dict[str, Any]  # options of the network, as {"conv": 4}
    parameters: float  # as a multiple of RoPE's
    cost: float  # time of a training step, as a multiple of RoPE's
    reading: float | None = None  # time of reading texts of 8x, likewise; None: judged before it was measured
    measured: Measured
    holder: str | None  # of the record, which was trained with the same seeds; None: there was none
    measured_of_holder: Measured | None
    made_by: dict[str, Any]  # command, versions, processor

    @model_validator(mode="after")
    def _has_a_number_for_each_seed(self) -> Self:
        sides = filter(None, (self.measured, self.measured_of_holder))
        if any(len(side.gain[0]) != len(self.seeds) for side in sides):
            raise ValueError(f"there must be a number for each of {len(self.seeds)} seeds")
        return self


class Row(NamedTuple):
    """A line of the board."""

    verdict: Verdict
    score: Estimate  # in percent of the possible
    ahead: Estimate | None  # of the holder; None: there was none
    p: float  # of this difference, after Holm's correction for all entries so far
    above: float  # bits at 1x above RoPE
    broken: list[str]  # rules; such an entry is struck through
    short_of: list[str]  # what keeps it from being a record, apart from its score

    @property
    def is_record(self) -> bool:
        """True also for the first entry, which has nobody to beat."""
        # The p-value has two sides.
        better = self.ahead is None or (self.ahead.value > 0 and self.p < LEVEL)
        return better and not self.broken and not self.short_of

    @property
    def remark(self) -> str:
        """What is to be said of an entry besides its numbers; "" for most."""
        return "; ".join([*self.broken, *self.short_of]) or ("record" if self.is_record else "")


def drawn_seeds(commit: str) -> list[int]:
    """The seeds of an entry, drawn from the commit that it is judged at."""
    digest = hashlib.shake_256(f"board {commit}".encode()).digest(4 * MANY)
    # As many bits as every generator takes.
    return (np.frombuffer(digest, dtype="<u4") >> 1).tolist()


def over_seeds(values: np.ndarray) -> Estimate:
    """Estimate the mean of numbers, one for each of at least two seeds, by Student's distribution."""
    return estimate(Sample(values[:, None], np.ones(1)))


def ahead_of(mine: Measured, holder: Measured) -> Estimate:
    """How far the scores of an encoding are ahead of the holder's, seed by seed."""
    return over_seeds(mine.scores() - holder.scores())


def is_promising(mine: Measured, holder: Measured) -> bool:
    """Whether more seeds may show a record."""
    ahead = ahead_of(mine, holder)
    return ahead.value > 0 and p_value(ahead) < PROMISING


def row_of(verdict: Verdict, earlier: Sequence[Row]) -> Row:
    """The line of an entry on the board that had the `earlier` lines, of which the first is RoPE's."""
    ahead, p = None, 1.0
    if verdict.measured_of_holder:
        ahead = ahead_of(verdict.measured, verdict.measured_of_holder)
        # Whatever was tested before may have named a record by chance.
        p, *_ = holm([p_value(ahead), *(p_value(row.ahead) for row in earlier if row.ahead)])
    above, bound = above_rope(verdict.measured, earlier[0].verdict.measured if earlier else verdict.measured)
    holder = holder_of(earlier)
    helped_by = ", ".join(f"{key}={value}" for key, value in verdict.help.items())
    of_records = [
        (not earlier or bound <= ABOVE, f"at 1x up to {bound:.3f} (limit {ABOVE})"),
        (not verdict.help, f"it has help from the network: {helped_by}"),
        (holder == verdict.holder,
         f"it was compared with {verdict.holder}, and the record is {holder}'s: judge it again"),
    ]  # fmt: skip
    score = over_seeds(verdict.measured.scores())
    return Row(verdict, score, ahead, p, above, broken_rules(verdict), unmet(of_records))


def above_rope(mine: Measured, rope: Measured) -> tuple[float, float]:
    """How many bits above RoPE an encoding is at 1x, and the upper end of the one-sided 95 % interval.

    Both are measured above the optimum, so they need not have the same texts and seeds.
    """
    a = over_seeds(np.mean(mine.excess, axis=0))
    b = over_seeds(np.mean(rope.excess, axis=0))
    quantile = float(stdtrit(min(a.freedom, b.freedom), 0.95))
    return a.value - b.value, a.value - b.value + quantile * float(np.hypot(a.error, b.error))


def broken_rules(verdict: Verdict) -> list[str]:
    """What an entry did that is against the rules."""
    drawn = drawn_seeds(verdict.commit)
    reading = verdict.reading or 0.0
    ahead = verdict.measured.better_than_possible()
    rules = [
        (verdict.parameters <= PARAMETERS, f"{verdict.parameters:.2f} times RoPE's parameters, at most {PARAMETERS}"),
        (verdict.cost <= COST, f"a step takes {verdict.cost:.1f} times RoPE's, at most {COST:g}"),
        (reading <= READING, f"reading texts of 8x takes {reading:.1f} times RoPE's, at most {READING:g}"),
        (verdict.lr in RATES, f"learning rate {verdict.lr:g}: choose one of {IN_WORDS}"),
        (verdict.seeds in (drawn[:FEW], drawn), f"its seeds are not those of commit {verdict.commit[:8]}"),
        (not ahead, f"better than the best possible predictor at {', '.join(ahead)}: it reads what it is to predict"),
    ]  # fmt: skip
    return unmet(rules)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return each p-value after Holm's correction for all (Scandinavian Journal of Statistics 6, 1979)."""
    order = np.argsort(p_values)
    factors = np.arange(len(order), 0, -1)
    stepped = np.maximum.accumulate(factors * np.sort(p_values))
    return np.minimum(stepped, 1)[np.argsort(order)].tolist()


def printed_p(p: float) -> str:
    """A p-value as all tables print it: a smaller one says nothing more of so few seeds."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def unmet(rules: Iterable[tuple[bool, str]]) -> list[str]:
    """What is to be said of the rules that are not kept, each of which comes with its words."""
    return [words for kept, words in rules if not kept]


def standings(verdicts: Iterable[Verdict]) -> list[Row]:
    """The lines of a board in the order in which they were judged."""
    rows: list[Row] = []
    for verdict in sorted(verdicts, key=lambda verdict: (verdict.number, verdict.entry)):
        rows.append(row_of(verdict, rows))
    return rows


def holder_of(rows: Sequence[Row]) -> str | None:
    """The entry that holds the record; None: there is none yet."""
    return next((row.verdict.entry for row in reversed(rows) if row.is_record), None)
