"""Effects: differences between lines of some runs and differences of those, with tests; docs/results.py prints them."""

from collections.abc import Mapping
from itertools import product

from scipy import stats

from lab.board.correction import holm
from ropewalk.evaluation.statistics import Estimate, Sample, estimate, stacked
from ropewalk.report.answer import amount
from ropewalk.report.frame import Runs
from ropewalk.report.page import markdown_table

Weights = Mapping[str, float]  # by line: what its loss is multiplied by; they sum to 0
Effects = Mapping[str, tuple[float, Weights]]  # by name: the length as a multiple of the training length, the weights


def rows(runs: Runs, effects: Effects) -> list[str]:
    """Return a table of weighted sums of losses, and the probability of each if it were 0.

    The interval is over seeds and texts, as everywhere. The test has seeds - 1 degrees of freedom, the fewest that it
    can have, and Holm's correction for all effects.
    """
    losses = runs.results[(runs.results.kind == "lengths") & (runs.results.quantity == "loss")]
    (train_len,) = losses.train_len.unique()  # of all lines
    (unit,) = losses.unit.unique()
    estimates = {}
    for name, (multiple, weights) in effects.items():
        estimates[name] = effect(runs, round(multiple * train_len), weights)
    corrected = holm([p_value(e) for e in estimates.values()])
    cells = []
    for (name, e), p in zip(estimates.items(), corrected, strict=True):
        shown = "< 0.001" if p < 0.001 else f"{p:.3f}"
        if e.seeds == 1:  # which leaves no degree of freedom
            shown = ""
        length = f"{effects[name][0] * train_len:g} tokens"
        cells.append([name, length, e.seeds, amount(*e[:3], sign="+"), shown])
    return markdown_table([["effect", "at", "seeds", unit, "p"], *cells])


def effect(runs: Runs, length: int, weights: Weights) -> Estimate:
    """Return the weighted sum of the losses of some lines, over the seeds that all of them have."""
    at_length = runs.results[(runs.results.kind == "lengths") & (runs.results.length == length)]
    by_seed: dict[str, dict[int, Sample]] = {line: {} for line in weights}
    for row in at_length[at_length.line.isin(list(weights))].itertuples():
        by_seed[row.line][row.seed] = row.sample
    shared = set.intersection(*map(set, by_seed.values()))
    total = 0.0
    for line, weight in weights.items():
        sample = stacked([by_seed[line][seed] for seed in sorted(shared)])
        total = total + weight * sample.values
    return estimate(Sample(total, sample.units))


def p_value(e: Estimate) -> float:
    """Return the two-sided probability of an effect as large if it were 0, by Student's t over the seeds."""
    return float(2 * stats.t.sf(abs(e.value) / e.error, e.seeds - 1))


def of_norm() -> dict[str, tuple[float, Weights]]:
    """What each repair of RoPE is worth at 8x, with and without the norm of queries and keys: docs/log/qk_norm.md."""
    effects: dict[str, tuple[float, Weights]] = {}
    for word, norm in (("normed", "norm-true"), ("not normed", "norm-false")):
        rope, p_rope, ssmax = f"rope-{norm}", f"p_rope-{norm}", f"rope-ssmax-{norm}"
        effects |= {
            f"angles, {word}": (8, {rope: 1, p_rope: -1}),
            f"keys, {word}": (8, {rope: 1, ssmax: -1}),
            f"keys by log, {word}": (8, {rope: 1, f"{rope} read as rope": -1}),
            f"keys after angles, {word}": (8, {p_rope: 1, f"p_rope-ssmax-{norm}": -1}),
            f"angles minus keys, {word}": (8, {ssmax: 1, p_rope: -1}),
            f"keys less keys after angles, {word}": (8, {rope: 1, ssmax: -1, p_rope: -1, f"p_rope-ssmax-{norm}": 1}),
        }
    for name in ("angles", "keys"):
        _, normed = effects[f"{name}, normed"]
        _, plain = effects[f"{name}, not normed"]
        negated = {line: -weight for line, weight in plain.items()}
        effects[f"{name}, normed minus not"] = (8, {**normed, **negated})
    return effects


def of_dropping() -> dict[str, tuple[float, Weights]]:
    """What dropping RoPE costs at 1x and is worth at 8x, by what else carries order: docs/log/dropping.md."""
    effects: dict[str, tuple[float, Weights]] = {}
    for order in ("none", "key_offset", "conv", "window", "memory"):
        dropped, kept, nope = f"dropped-{order}", f"kept-{order}", f"nope-{order}"
        effects |= {
            f"dropped minus kept, {order}": (1, {dropped: 1, kept: -1}),
            f"dropped minus kept, {order} ": (8, {dropped: 1, kept: -1}),
            f"dropped minus NoPE from scratch, {order}": (8, {dropped: 1, nope: -1}),
        }
    return effects


def of_newer() -> dict[str, tuple[float, Weights]]:
    """By how much each newer encoding is behind an older one at 8x: docs/log/newer.md."""
    repaired = "p_rope"  # with ssmax
    pairs = [
        ("lerope (optim.pe_lr_scale 1.0)", repaired),
        ("lerope (optim.pe_lr_scale 10.0)", repaired),
        ("scale_invariant", repaired),
        ("scale_invariant", "rope"),
        ("half_rope_nope", "window-nope"),
        ("gated_delta", "fox"),
        ("gated_delta (model.conv 4)", "fox (model.conv 4)"),
        ("gated_delta-nope", "window-nope"),
    ]
    return {f"{newer} minus {older}": (8, {newer: 1, older: -1}) for newer, older in pairs}


def of_features() -> dict[str, tuple[float, Weights]]:
    """What four features of a network cost after an extension, and each more of them: docs/log/olmpool.md."""
    # In each pair the second is the feature.
    choices = {
        "length": ("128", "32"),
        "norm": ("false", "true"),
        "heads": ("four", "one"),
        "window": ("none", "quarter"),
    }
    lines = {}
    for switches in product((0, 1), repeat=len(choices)):
        words = [f"{name}-{values[on]}" for (name, values), on in zip(choices.items(), switches, strict=True)]
        lines["extended-" + "-".join(words)] = switches
    effects: dict[str, tuple[float, Weights]] = {}
    for place, name in enumerate(choices):
        effects[name] = (1, {line: (2 * switches[place] - 1) / 8 for line, switches in lines.items()})
    # The slope of a least-squares line through all 16 over the number of features, of mean 2 and sum of squares 16.
    effects["each feature more"] = (1, {line: (sum(switches) - 2) / 16 for line, switches in lines.items()})
    return effects
