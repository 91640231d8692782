"""Gains, leads and differences of simulated runs with their intervals, computed again from their texts.

Only numpy, pandas and scipy: the textbook's sums of squares in place of the project's classes.
"""

import json

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from synthetic import LENGTHS, TRAIN_LEN, write_run

from ropewalk.report import frame
from ropewalk.report.table import BEST_POSSIBLE, over_seeds, results

SEEDS = {
    "rope": [0, 1, 4],
    "fox": [1, 4, 5],
}
SHARED = [1, 4]
FALLS = 0.06  # bits of the best possible loss at each doubling
SUMMED = ["documents", "bytes", "nats", "optimum_nats"]


def analysis(values, units):
    """A ratio of sums with its 95 % interval: values [seeds, documents], units [documents]."""
    n_seeds, n = values.shape
    ratio = values.sum() / (n_seeds * units.sum())
    residuals = (values - ratio * units) * n / units.sum()  # of mean 0
    sum_of_documents = n_seeds * (residuals.mean(axis=0) ** 2).sum()
    sum_of_seeds = n * (residuals.mean(axis=1) ** 2).sum()
    sum_of_noise = (residuals**2).sum() - sum_of_documents - sum_of_seeds
    documents = sum_of_documents / (n - 1)
    seeds = sum_of_seeds / (n_seeds - 1)
    noise = sum_of_noise / (n - 1) / (n_seeds - 1)

    # What seeds add counts as far as it is more than noise, with the confidence that it is.
    weight = stats.f.cdf(seeds / noise, n_seeds - 1, (n - 1) * (n_seeds - 1))
    variance = documents + max(0, weight * (seeds - noise))
    spread = documents**2 / (n - 1) + (weight * seeds) ** 2 / (n_seeds - 1)
    freedom = max(n_seeds - 1, variance**2 / spread)
    half = stats.t.ppf(0.975, freedom) * np.sqrt(variance / n / n_seeds)
    return ratio, ratio - half, ratio + half


def sums_of(folder):
    """The sums over the texts of each document, by encoding, length and seed."""
    sums = {}
    for path in folder.glob("*/evals/*.json"):
        values = json.loads(path.read_text())
        for part in values["measured"]:
            key = values["variant"]["pe"]["name"], part["length"], values["seed"]
            texts = pd.DataFrame({name: part[name] for name in SUMMED})
            sums[key] = texts.groupby("documents").sum()
    return sums


def bits(sums, line, length, seeds, column="nats"):
    """[seeds, documents]"""
    by_seed = [sums[line, length, seed][column] for seed in seeds]
    return np.array(by_seed) / np.log(2)


def test_estimates_from_the_texts_alone(tmp_path):
    for seed in SEEDS["rope"]:
        write_run(tmp_path, "rope", seed, variants=["yarn"], noise=0.03, falls=FALLS)
    for seed in SEEDS["fox"]:
        write_run(tmp_path, "fox", seed, noise=0.03, falls=FALLS)
    sums = sums_of(tmp_path)
    table = over_seeds(results(frame.load(tmp_path)))
    table = table[table.line != BEST_POSSIBLE]
    assert len(table) == 3 * len(LENGTHS)

    for row in table.itertuples():
        trained = "rope" if row.zero_shot else row.encoding
        seeds = SEEDS[trained]
        shared = SHARED if trained == "fox" else seeds
        cut = min(row.length, TRAIN_LEN)
        own = bits(sums, row.encoding, row.length, seeds)
        own_shared = bits(sums, row.encoding, row.length, shared)
        expected = {
            "value": own,
            "gain": bits(sums, trained, cut, seeds) - own,
            "above": own - bits(sums, row.encoding, row.length, seeds, "optimum_nats"),
            "lead": bits(sums, "rope", cut, shared) - own_shared,
            "difference": own_shared - bits(sums, "rope", row.length, shared),
        }
        units = sums[row.encoding, row.length, seeds[0]].bytes.to_numpy()
        for name, of_documents in expected.items():
            if of_documents.any():  # not a line compared with itself
                prefix = "" if name == "value" else f"{name}_"
                found = [getattr(row, column) for column in (name, f"{prefix}low", f"{prefix}high")]
                assert found == pytest.approx(analysis(of_documents, units), rel=1e-9, abs=1e-12)

    is_longer = table.length > TRAIN_LEN
    possible = FALLS * np.log2(table.length / TRAIN_LEN)
    shares = (table.gain / possible)[is_longer]
    np.testing.assert_allclose(table.share[is_longer], shares)
    assert table.share[~is_longer].isna().all()  # of nothing
