"""The verdict on one encoding against another, from texts that both read with the same seeds.

One number decides: the loss on the longest texts, which each side reads whole, or cut to train_len if that is better
for it. So a side that fails on long text is no easy prey, and one that only ignores far text gains nothing.

Whoever tries many encodings finds a "better" one by chance. Tries come one after another, and each verdict is read
before the next try is made, so a correction for all of them (Bonferroni, Holm) would come too late for the first ones.
Each try spends a share of 0.05 instead (alpha spending; Foster and Stine, JRSS B 70, 2008): try k names a better one by
chance with probability 0.03 / k², a worse one as often. These add up to less than 0.05 for any number of tries, so a
verdict stands when more are made.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import ndtri, stdtrit

from conf.errors import ConfigError
from lab.board.trials import Losses
from ropewalk.evaluation.statistics import Estimate, Sample, estimate, stacked

FIRST_LEVEL = 0.06  # two-sided; half of it, times the sum of 1 / k², pi² / 6, is 0.0493
# Of a try's level. The other measures share the rest.
DECIDING = 0.8


Samples = Mapping[int, Sample]  # by text length in tokens


class Finding(NamedTuple):
    """How much better an encoding is than the other by one measure, in bits; the interval is that of its level."""

    bits: float
    low: float
    high: float
    level: float
    error: float  # standard error of `bits`
    word: str  # better, not separated or worse


def read(of_seeds: Sequence[Losses]) -> Samples:
    """Return the losses of one side as one sample at each length, from those of each seed."""
    return {length: stacked([rows[length]["sample"] for rows in of_seeds]) for length in of_seeds[0]}


def judge(mine: Samples, against: Samples, *, train_len: int, longest: int, number: int) -> dict[str, Finding]:
    """Return what separates `mine` from `against`, by the name of the measure; the first one decides.

    Args:
        mine: bits by length in tokens, without lengths that the encoding is not defined for.
        against: of the same seeds and texts.
        longest: tokens of the longest texts; train_len if no longer ones were measured.
        number: of this try in its folder, counted from 1.

    Raises ValueError: the sides have other seeds or texts, or a loss at train_len is not finite.
    """
    # A length at which an encoding ends in NaN is one that it is not defined for.
    mine, against = ({n: s for n, s in side.items() if np.isfinite(s.values).all()} for side in (mine, against))
    for name, side in {"pe": mine, "against": against}.items():
        if train_len not in side:
            raise ConfigError(f"{name} ends in NaN or infinity at {train_len} tokens: a verdict needs a loss there")
    advantages: dict[str, Estimate] = {}
    if longest > train_len:
        end = f"{longest / train_len:g}x"
        advantages[f"{end} or cut"] = difference(_at_best(against, train_len), _at_best(mine, train_len))
        if longest in mine and longest in against:
            advantages[end] = difference(against[longest], mine[longest])
    advantages["1x"] = difference(against[train_len], mine[train_len])
    level = FIRST_LEVEL / number**2
    findings: dict[str, Finding] = {}
    for name, advantage in advantages.items():
        # Most of the level is that of the first measure, which decides.
        own_level = level * ((1 - DECIDING) / (len(advantages) - 1) if findings else DECIDING)
        e = at_level(advantage, own_level)
        word = "not separated" if not e.separated else "better" if e.value > 0 else "worse"
        error = advantage.half / float(stdtrit(advantage.freedom, 0.975))
        findings[name] = Finding(e.value, e.low, e.high, own_level, error, word)
    return findings


def difference(a: Sample, b: Sample) -> Estimate:
    """Estimate `a` minus `b`, paired by seed and text, so that the variation they share cancels.

    Raises ValueError: their seeds or texts differ.
    """
    if a.values.shape != b.values.shape or not np.array_equal(a.units, b.units):
        raise ValueError(f"only the same seeds and texts can be compared, not {a.values.shape} and {b.values.shape}")
    return estimate(Sample(a.values - b.values, a.units))


def at_level(e: Estimate, level: float) -> Estimate:
    """Return `e` with the interval of a two-sided test at `level`, at most 0.05.

    It has the degrees of freedom of the seeds: those of Satterthwaite's formula are many just where the seeds happen to
    agree, and the tails of such a distribution too thin. At 0.05, where both serve, it is the interval of `e`.
    """
    freedom = e.seeds - 1 if e.seeds > 1 else e.freedom
    half = e.half * float(stdtrit(freedom, 1 - level / 2) / stdtrit(freedom, 0.975))
    return e._replace(low=e.value - half, high=e.value + half)


def _at_best(side: Samples, train_len: int) -> Sample:
    """Return the longest text of a side, or the same text cut to train_len if that has the lower loss."""
    return min(side[train_len], side[max(side)], key=lambda sample: sample.values.sum())


def visible_lead(finding: Finding, seeds: int, of: int) -> float:
    """A true lead, in bits, that `of` seeds would find in about four of five tries at the level of a finding.

    Args:
        seeds: those of the finding, whose standard error is taken to fall with the root of their number.
    """
    # The interval of `of` seeds, and so much above it that a try in five falls short.
    quantile = stdtrit([seeds - 1, of - 1], 1 - finding.level / 2)
    half = (finding.high - finding.low) / 2 * quantile[1] / quantile[0]
    return float((half + ndtri(0.8) * finding.error) * np.sqrt(seeds / of))


def sentence(findings: Mapping[str, Finding]) -> str:
    """Say what was found, as in "8x or cut +0.021 ± 0.010 (better), 1x -0.004 ± 0.006 (not separated)"."""
    words = [f"{name} {f.bits:+z.3f} ± {(f.high - f.low) / 2:.3f} ({f.word})" for name, f in findings.items()]
    return ", ".join(words)
