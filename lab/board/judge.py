"""The verdict on one encoding against another, from texts that both read with the same seeds.

One number decides: the loss on the longest texts, which each side reads whole, or cut to train_len if that is better
for it. So a side that fails on long text is no easy prey, and one that only ignores far text gains nothing.

Whoever tries many encodings finds a "better" one by chance. Tries come one after another, and each verdict is read
before the next try is made, so a correction for all of them (Bonferroni, Holm) would come too late for the first ones.
Each try spends a share of 0.05 instead (alpha spending; Foster and Stine, JRSS B 70, 2008): try k names a better one by
chance with probability 0.03 / k², a worse one as often. These add up to less than 0.05 for any number of tries, so a
verdict stands when more are made.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from conf.schema import Config, flatten
from ropewalk.app.run_dir import RunDir
from ropewalk.evaluation.measures.lengths import length_settings
from ropewalk.evaluation.results import Evaluation, Row, load_all, main_rows
from ropewalk.evaluation.statistics import Estimate, Sample, Samples, at_level, difference, stacked

FIRST_LEVEL = 0.06  # two-sided; half of it, times the sum of 1 / k², pi² / 6, is 0.0493
# Of a try's level. The other measures share the rest.
DECIDING = 0.8


class Side(NamedTuple):
    """What was measured on one encoding. Both sides have the same seeds and texts."""

    losses: Samples  # bits by length in tokens, without lengths that the encoding is not defined for
    far_copies: Sample | None = None  # bits gained on what was said beyond train_len


class Finding(NamedTuple):
    """How much better an encoding is than the other by one measure, in bits; the interval is that of its level."""

    advantage: Estimate
    level: float

    def as_json(self) -> dict[str, float | str]:
        e = self.advantage
        return {"bits": e.value, "low": e.low, "high": e.high, "level": self.level, "word": self.word}

    @property
    def word(self) -> str:
        if not self.advantage.separated:
            return "not separated"
        return "better" if self.advantage.value > 0 else "worse"


def read(runs: Sequence[Config], pe: Mapping[str, Any]) -> Side:
    """Read what was measured of the encoding `pe` on the final weights of the runs, a seed each."""
    losses: dict[int, list[Sample]] = {}
    far_copies: list[Sample] = []
    for cfg in runs:
        for length, row in loss_rows(cfg, pe).items():
            losses.setdefault(length, []).append(row.sample)
        far_copies += _far_copies(_at_largest_scale(cfg, pe), cfg)
    of_seeds = {length: stacked(samples) for length, samples in losses.items()}
    return Side(of_seeds, stacked(far_copies) if far_copies else None)


def loss_rows(cfg: Config, pe: Mapping[str, Any]) -> dict[int, Row]:
    """Return the losses of the encoding `pe` on the final weights of a run, at train_len and at the longest length.

    A scaled encoding reads the training length as it was trained, and longer texts at its largest scale. A length that
    the encoding is not defined for is left out.
    """
    as_trained = [e for e in _final(cfg) if not e.variant.zero_shot]
    rows = {}
    for evaluations, of_length in ((as_trained, cfg.train_len), (_at_largest_scale(cfg, pe), max(cfg.lengths))):
        for (_, length), row in main_rows(evaluations, "lengths", length_settings(cfg)).items():
            if length == of_length:
                rows[length] = row
    return rows


def _final(cfg: Config) -> list[Evaluation]:
    """Return the results on the final weights of a run."""
    return [e for e in load_all(RunDir(cfg).path) if e.step == cfg.trainer.max_steps]


def _at_largest_scale(cfg: Config, pe: Mapping[str, Any]) -> list[Evaluation]:
    """Return the results on the final weights of a run, read by the encoding `pe` at its largest scale."""
    of_encoding = [e for e in _final(cfg) if e.variant.pe == pe]
    scale = max(e.variant.scale for e in of_encoding)
    return [e for e in of_encoding if e.variant.scale == scale]


def unit(cfg: Config) -> str:
    """Return what the losses of a run are measured in: "bits per byte" or "bits per token"."""
    rows = main_rows(load_all(RunDir(cfg).path), "lengths", {})
    return next(iter(rows.values())).unit


def _far_copies(evaluations: Sequence[Evaluation], cfg: Config) -> list[Sample]:
    """Return the gain on what was said beyond train_len, with the settings of `cfg`; empty if it was not measured."""
    asked = {"length": max(cfg.lengths), "sequences": cfg.eval.sequences}.items()
    samples = []
    for e in evaluations:
        if e.kind == "far_copies" and asked <= e.eval.items():
            gains = [row for row in e.rows() if row.quantity == "gain"]
            samples = [row.sample for row in gains if row.part.first >= cfg.train_len]
    if not any(sample.units.any() for sample in samples):
        return []
    values = np.sum([sample.values for sample in samples], axis=0)
    return [Sample(values, np.sum([sample.units for sample in samples], axis=0))]


def level_of(number: int) -> float:
    """Return the two-sided level of a folder's try `number`, counted from 1."""
    return FIRST_LEVEL / number**2


def judge(mine: Side, against: Side, *, train_len: int, longest: int, number: int) -> dict[str, Finding]:
    """Return what separates `mine` from `against`, by the name of the measure; the first one decides.

    Args:
        longest: tokens of the longest texts; train_len if no longer ones were measured.
        number: of this try in its folder, counted from 1.

    Raises ValueError: the sides have other seeds or texts, or no text of train_len was measured.
    """
    for side in (mine, against):
        if train_len not in side.losses:
            raise ValueError(f"nothing was measured at the training length of {train_len} tokens")
    advantages: dict[str, Estimate] = {}
    if longest > train_len:
        end = f"{longest / train_len:g}x"
        advantages[f"{end} or cut"] = difference(_at_best(against, train_len), _at_best(mine, train_len))
        if longest in mine.losses and longest in against.losses:
            advantages[end] = difference(against.losses[longest], mine.losses[longest])
    advantages["1x"] = difference(against.losses[train_len], mine.losses[train_len])
    if mine.far_copies and against.far_copies:
        advantages["far copies"] = difference(mine.far_copies, against.far_copies)
    level = level_of(number)
    others = (1 - DECIDING) * level / max(len(advantages) - 1, 1)
    findings: dict[str, Finding] = {}
    for name, advantage in advantages.items():
        own_level = others if findings else DECIDING * level
        findings[name] = Finding(at_level(advantage, own_level), own_level)
    return findings


def _at_best(side: Side, train_len: int) -> Sample:
    """Return the longest text of a side, or the same text cut to train_len if that has the lower loss."""

    def badness(sample: Sample) -> float:
        loss = float(sample.values.sum())
        return math.inf if math.isnan(loss) else loss

    return min(side.losses[train_len], side.losses[max(side.losses)], key=badness)


def sentence(findings: Mapping[str, Finding]) -> str:
    """Say what was found, as in "8x or cut +0.021 ± 0.010 (better), 1x -0.004 ± 0.006 (not separated)"."""
    words = []
    for name, found in findings.items():
        value = round(found.advantage.value, 3) + 0.0  # of -0.0 makes 0.0
        words.append(f"{name} {value:+.3f} ± {found.advantage.half:.3f} ({found.word})")
    return ", ".join(words)


def title(pe: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Name an encoding: with the options in which it differs from the other, if that is of the same name."""
    name = str(pe["name"])
    if name != other["name"]:
        return name
    options = flatten(pe)
    others = flatten(other)
    words = [f"{key} {value}" for key, value in options.items() if others.get(key) != value]
    return f"{name} ({', '.join(words)})"
