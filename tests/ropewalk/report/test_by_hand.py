"""Gains, leads and differences of simulated runs with their intervals, computed again from their texts.

Only numpy, pandas and scipy: the textbook's sums of squares in place of the project's classes.
"""

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from synthetic import LENGTHS, TEXTS, TRAIN_LEN, edited, write_run

from ropewalk.report import frame
from ropewalk.report.table import BEST_POSSIBLE, over_seeds, results

SEEDS = {
    "rope": (0, 1, 4),
    "alibi": (0, 1, 4),
    "fox": (1, 4, 5),
}


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


def simulated(folder, falls):
    """Write runs of several seeds, with texts of unequal sizes, several of a document.

    Returns the sums [documents] of their nats, optimum_nats and bytes, by line, length and seed. The nats of the best
    possible fall by so much a byte each time that the text doubles.
    """
    rng = np.random.default_rng(0)
    of_texts = {
        "bytes": rng.integers(40, 90, TEXTS).tolist(),
        "documents": [f"file {i}" for i in rng.integers(0, 11, TEXTS)],
    }
    for pe, seeds in SEEDS.items():
        for seed in seeds:
            write_run(folder, pe, seed, variants=("yarn",) if pe == "rope" else (), noise=0.03)
    sums = {}
    for path in folder.glob("*/evals/*.json"):
        with edited(path) as values:
            line = values["run"].split("-")[0]
            if values["variant"]["zero_shot"]:
                line += f" read as {values['variant']['label']}"
            for part in values["measured"]:
                best = 1 - falls * np.log2(part["length"])
                part |= of_texts | {"optimum_nats": [size * best for size in of_texts["bytes"]]}
                texts = pd.DataFrame({name: part[name] for name in ("documents", "bytes", "nats", "optimum_nats")})
                sums[line, part["length"], values["seed"]] = texts.groupby("documents").sum()
    return sums


@pytest.mark.parametrize("falls", [0.0, 0.06])
def test_estimates_from_the_texts_alone(tmp_path, falls):
    sums = simulated(tmp_path, falls)
    table = over_seeds(results(frame.load(tmp_path)))
    table = table[table.line != BEST_POSSIBLE]
    assert len(table) == len(LENGTHS) * 4
    for row in table.itertuples():
        cut = min(row.length, TRAIN_LEN)
        trained = row.line.split(" ")[0]
        seeds = SEEDS[trained]
        shared = [seed for seed in seeds if seed in SEEDS["rope"]]
        units = sums[row.line, row.length, seeds[0]].bytes.to_numpy()

        def bits(line, length, seeds, column="nats"):
            return np.array([sums[line, length, seed][column] for seed in seeds]) / np.log(2)

        own, own_shared = (bits(row.line, row.length, of_line) for of_line in (seeds, shared))
        expected = {
            "value": own,
            "gain": bits(trained, cut, seeds) - own,
            "above": own - bits(row.line, row.length, seeds, "optimum_nats"),
            "lead": bits("rope", cut, shared) - own_shared,
            "difference": own_shared - bits("rope", row.length, shared),
        }
        for name, of_documents in expected.items():
            prefix = f"{name}_".removeprefix("value_")
            found = [getattr(row, column) for column in (name, f"{prefix}low", f"{prefix}high")]
            if of_documents.any():  # not a line compared with itself
                ratio, error, freedom = analysis(of_documents, units)
                half = stats.t.ppf(0.975, freedom) * error
                assert found == pytest.approx([ratio, ratio - half, ratio + half], rel=1e-9, abs=1e-12)
        possible = falls * np.log2(row.length / cut) * units.sum() / np.log(2)
        share = expected["gain"].mean(axis=0).sum() / (possible or np.nan)
        assert (row.share, row.seeds, row.cut) == pytest.approx((share, 3, TRAIN_LEN), nan_ok=True)
