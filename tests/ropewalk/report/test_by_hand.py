"""Means, gains and differences with their intervals, computed again from evals/*.json.

Only json, numpy and scipy: the textbook's sums of squares in place of the project's classes.
"""

import json
from collections import defaultdict

import numpy as np
import pytest
from scipy import stats
from synthetic import TEXTS, TRAIN_LEN, edited, write_run

from ropewalk.report import frame
from ropewalk.report.table import BEST_POSSIBLE, over_seeds, results

SEEDS = {"rope": (0, 1, 4), "alibi": (0, 1, 4), "cope": (0, 1, 4), "fox": (1, 4, 5)}


def analysis(values, units):
    """Mean, standard error and degrees of freedom of a ratio of sums: values [seeds, documents], units [documents]."""
    n_seeds, n = values.shape
    freedom_of_seeds = n_seeds - 1
    freedom_of_noise = (n - 1) * freedom_of_seeds
    # The residuals of the ratio, and their sums of squares.
    ratio = values.sum() / (n_seeds * units.sum())
    x = (values - ratio * units) * n / units.sum()
    centred = x - x.mean()
    of_documents = n_seeds * (centred.mean(axis=0) ** 2).sum()
    of_seeds = n * (centred.mean(axis=1) ** 2).sum()
    noise = ((centred**2).sum() - of_documents - of_seeds) / freedom_of_noise
    square_of_documents = of_documents / (n - 1)
    square_of_seeds = of_seeds / freedom_of_seeds

    # What seeds add counts as far as it is more than noise, with the confidence that it is.
    weight = stats.f.cdf(square_of_seeds / noise, freedom_of_seeds, freedom_of_noise)
    variance = square_of_documents + max(0, weight * (square_of_seeds - noise))
    spread = square_of_documents**2 / (n - 1) + (weight * square_of_seeds) ** 2 / freedom_of_seeds
    return ratio, np.sqrt(variance / n / n_seeds), max(freedom_of_seeds, variance**2 / spread)


def sums_by_document(values, documents):
    """The sum of what the texts of each document have, by the names of documents in order."""
    _, places = np.unique(documents, return_inverse=True)
    return np.bincount(places, weights=values)


def read(folder):
    """Bits [documents] by line, length and seed, the optimum by length; bytes [documents]."""
    measured = defaultdict(lambda: defaultdict(dict))
    optimum = {}
    for path in sorted(folder.glob("*/evals/*.json")):
        results = json.loads(path.read_text())
        line = results["run"].split("-")[0]
        if results["variant"]["zero_shot"]:
            line += f" read as {results['variant']['label']}"
        for part in results["measured"]:
            nats, best = (sums_by_document(part[name], part["documents"]) for name in ("nats", "optimum_nats"))
            measured[line][part["length"]][results["seed"]] = nats / np.log(2)
            optimum[part["length"]] = best / np.log(2)
            sizes = sums_by_document(part["bytes"], part["documents"])
    return measured, optimum, sizes


def minus(one, other):
    """Differences [seeds, documents] over the seeds that both have."""
    return np.array([one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())])


def simulated(folder, draw):
    """Runs of several seeds; texts of unequal sizes, several of a document.

    The best possible loss falls with the length but in the first draw, where longer text is worth nothing.
    """
    rng = np.random.default_rng(draw)
    changes = {
        "bytes": rng.integers(40, 90, TEXTS).tolist(),
        "documents": [f"file {i}" for i in np.sort(rng.integers(0, 11, TEXTS))],
    }
    for pe, seeds in SEEDS.items():
        for seed in seeds:
            run = write_run(folder, pe, seed, variants=("yarn", "rerope") if pe == "rope" else (), noise=0.03)
            for path in run.glob("evals/*.json"):
                with edited(path) as values:
                    for part in values["measured"]:
                        falls = 0.06 * np.log2(part["length"]) if draw else 0.0
                        part |= changes | {"optimum_nats": [size * (1 - falls) for size in changes["bytes"]]}


@pytest.mark.parametrize("draw", range(2))
def test_estimates_from_the_files_alone(tmp_path, draw):
    simulated(tmp_path, draw)
    measured, optimum, units = read(tmp_path)
    table = over_seeds(results(frame.load(tmp_path)))
    assert set(table.line) == {*measured, BEST_POSSIBLE}
    for row in table[table.line != BEST_POSSIBLE].itertuples():
        values = measured[row.line][row.length]
        shorter = min(row.length, TRAIN_LEN)
        cut = measured[row.line.split(" ")[0]][shorter]
        expected = {
            "value": np.array(list(values.values())),
            "gain": minus(cut, values),
            "lead": minus(measured["rope"][shorter], values),
            "above": np.array(list(values.values())) - optimum[row.length],
            "difference": minus(values, measured["rope"][row.length]),
        }
        for name, of_documents in expected.items():
            if of_documents.any():  # not a line compared with itself
                prefix = "" if name == "value" else f"{name}_"
                found = [getattr(row, column) for column in (name, f"{prefix}low", f"{prefix}high")]
                mean, error, freedom = analysis(of_documents, units)
                half = stats.t.ppf(0.975, freedom) * error
                assert found == pytest.approx([mean, mean - half, mean + half], rel=1e-9, abs=1e-12)
        possible = (optimum[shorter] - optimum[row.length]).sum()
        share = minus(cut, values).mean(axis=0).sum() / possible if possible > 0 else np.nan
        assert row.share == pytest.approx(share, nan_ok=True)
        assert (row.seeds, row.cut) == (3, TRAIN_LEN)
