"""How sure a number is: 95 % intervals over seeds and texts, paired differences, safe and useful lengths.

Everything is computed from sums per text. A measure is a ratio of sums, such as all bits over all bytes. Its interval
covers another draw of both the texts and the training seeds. With one seed it covers the texts alone.
"""

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy.special import fdtr, stdtrit


class Sample(NamedTuple):
    """One measure of one encoding. The measure is sum(values) / sum(units) over the texts, averaged over the seeds."""

    values: np.ndarray  # [S, T] summed over each text: bits, or 100 times the wrong tokens
    units: np.ndarray  # [T] what they are divided by: bytes, or tokens


class Estimate(NamedTuple):
    """A mean with its 95 % interval."""

    value: float
    low: float
    high: float
    std: float  # over the seeds; NaN with one
    seeds: int
    texts: int

    @property
    def half(self) -> float:
        """Half of the interval's width."""
        return (self.high - self.low) / 2

    @property
    def separated(self) -> bool:
        """Whether the interval excludes 0. With one seed that says nothing about another training run."""
        return self.low > 0 or self.high < 0


def estimate(sample: Sample) -> Estimate:
    """The mean of a measure and its interval.

    Seeds and texts are crossed random effects, with one value for each seed and text. The variance of the mean has two
    parts, from the mean squares of the two-way analysis of variance (Searle, Casella, McCulloch, Variance Components,
    1992): what differs between texts, and what differs between seeds beyond the noise within texts. The interval is
    Student's with Satterthwaite's degrees of freedom (Biometrics Bulletin 2, 1946): about T - 1 if seeds agree, S - 1
    if they do not. Few seeds tell little of the second part, so it is weighted by the probability that noise alone
    gives less. Three and more seeds then cover 92 to 98 %, whichever part is larger, where a bootstrap over seeds would
    cover far too little; two seeds that disagree by more than the texts cover 86 %.

    Raises:
        ValueError: nothing was scored.
    """
    scored = np.asarray(sample.units) > 0  # a text without any says nothing, and must not seem to make it surer
    values, units = np.asarray(sample.values, float)[:, scored], np.asarray(sample.units, float)[scored]
    seeds, texts = values.shape
    if not texts:
        raise ValueError("nothing was scored: no interval can be given")
    of_seeds = values.sum(1) / units.sum()  # [S]
    value, std = float(of_seeds.mean()), float(of_seeds.std(ddof=1)) if seeds > 1 else float("nan")
    x = (values - value * units) / units.mean()  # [S, T]; the linear part of the ratio, which has mean 0
    between_texts = seeds * x.mean(0).var(ddof=1) if texts > 1 else 0.0
    between_seeds = texts * x.mean(1).var(ddof=1) if seeds > 1 else 0.0
    residual = x - x.mean(1, keepdims=True) - x.mean(0, keepdims=True) + x.mean()
    noise = (residual**2).sum() / max((seeds - 1) * (texts - 1), 1)
    weight = fdtr(seeds - 1, (seeds - 1) * (texts - 1), between_seeds / noise) if noise > 0 and seeds > 1 else 1.0
    variance = between_texts + max(weight * (between_seeds - noise), 0.0)
    uncertainty = between_texts**2 / max(texts - 1, 1) + (weight * between_seeds) ** 2 / max(seeds - 1, 1)
    freedom = max(variance**2 / uncertainty if uncertainty > 0 else 1, seeds - 1)
    half = float(stdtrit(freedom, 0.975) * np.sqrt(variance / (seeds * texts))) if seeds * texts > 1 else float("nan")
    return Estimate(value, value - half, value + half, std, seeds, texts)


def difference(a: Sample, b: Sample) -> Estimate:
    """`a` minus `b`, paired: the same seeds in the same order, and the same texts. What they share cancels.

    Raises:
        ValueError: the seeds or the texts differ in number, or the texts in size.
    """
    if np.shape(a.values) != np.shape(b.values) or not np.array_equal(a.units, b.units):
        raise ValueError(
            f"only the same seeds and texts can be compared, not {np.shape(a.values)} with {np.shape(b.values)} "
            f"[seeds, texts], of {np.sum(a.units):g} and {np.sum(b.units):g} bytes or tokens"
        )
    return estimate(Sample(np.asarray(a.values) - np.asarray(b.values), a.units))


class Reach(NamedTuple):
    """How far an encoding may be read, and how far reading more text helps, in tokens."""

    safe: int | None  # 0: at no measured length; None: nothing was measured at train_len
    safe_open: bool  # nothing longer was measured: it may be more
    useful: int | None  # the shortest measured length if nothing longer helped; None where that has no meaning
    useful_open: bool


def reach(
    own: Mapping[int, Sample],
    cut: Mapping[int, Sample],
    train_len: int,
    tolerance: float,
    *,
    complete: bool = True,
    paired: bool = True,
) -> Reach:
    """Safe and useful length of one encoding.

    Safe: the longest length up to which, at every measured length, it is worse than the baseline by `tolerance` at
    most. Useful: the longest length up to which every step from one measured length to the next gained, with the
    interval above 0.

    Args:
        own: its samples by text length in tokens.
        cut: those of the weights read as they were trained. The baseline is the text cut to train_len tokens.
        complete: False if it is not defined at some of the lengths that were asked for.
        paired: the scored tokens are the same at every length; False for tasks, which have no useful length.
    """
    lengths = sorted(own)
    safe = 0 if train_len in cut else None
    for length in lengths:
        base = cut.get(min(length, train_len)) if train_len in cut else None
        if base is None or not estimate(own[length]).value - estimate(base).value <= tolerance:  # NaN is not safe
            break
        safe = length
    useful = lengths[0] if paired else None
    for shorter, longer in itertools.pairwise(lengths):
        if not paired or not difference(own[shorter], own[longer]).low > 0:
            break
        useful = longer
    longest = lengths[-1] if complete else -1
    return Reach(safe, safe == longest, useful, useful == longest)
