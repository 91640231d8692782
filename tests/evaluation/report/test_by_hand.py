"""Safe and useful lengths, and how many differences are separated, computed again from evals/*.json.

Only json, numpy and scipy: the textbook's sums of squares in place of the project's classes.
"""

import itertools
import json

import numpy as np
import pytest
from scipy import stats
from synthetic import TEXTS, TRAIN_LEN, write_run

from evaluation.report import answer, comparison, frame, grids

SEEDS = (0, 1, 4)
ENCODINGS = {"rope": ("yarn", "rerope"), "alibi": (), "cope": (), "fox": (), "nope": ()}


def analysis(values, units):
    """Mean, standard error and degrees of freedom of a ratio of sums: values [seeds, documents], units [documents]."""
    n_seeds, n = values.shape
    ratio = values.sum() / (n_seeds * units.sum())
    if not values.any():  # a line compared with itself
        return 0.0, 0.0, 1.0
    x = (values - ratio * units) * n / units.sum()
    square_of_documents = n_seeds * sum((x[:, j].mean() - x.mean()) ** 2 for j in range(n)) / (n - 1)
    square_of_seeds = n * sum((x[i].mean() - x.mean()) ** 2 for i in range(n_seeds)) / (n_seeds - 1)
    total = ((x - x.mean()) ** 2).sum()
    rest = total - square_of_documents * (n - 1) - square_of_seeds * (n_seeds - 1)
    noise = rest / ((n - 1) * (n_seeds - 1))
    weight = stats.f.cdf(square_of_seeds / noise, n_seeds - 1, (n - 1) * (n_seeds - 1))
    variance = square_of_documents + max(0, weight * (square_of_seeds - noise))
    spread = square_of_documents**2 / (n - 1) + (weight * square_of_seeds) ** 2 / (n_seeds - 1)
    return ratio, np.sqrt(variance / n / n_seeds), max(n_seeds - 1, variance**2 / spread)


def read(folder):
    """Bits [seeds, documents] and bytes [documents], by line and length."""
    files: dict[str, list] = {}
    for path in sorted(folder.glob("*/evals/*.json")):
        results = json.loads(path.read_text())
        line = results["run"].split("-")[0]
        if results["variant"]["zero_shot"]:
            line += f" read as {results['variant']['label']}"
        files.setdefault(line, []).append((results["seed"], results["measured"]))
    measured: dict[str, dict] = {}
    for line, of_seeds in files.items():
        for place, part in enumerate(of_seeds[0][1]):
            names = sorted(set(part["documents"]))
            rows = []
            for _, parts in sorted(of_seeds, key=lambda of_seed: of_seed[0]):
                sums = dict.fromkeys(names, 0.0)
                for name, nats in zip(parts[place]["documents"], parts[place]["nats"], strict=True):
                    sums[name] += nats / np.log(2)
                rows.append(list(sums.values()))
            size = [
                sum(b for b, d in zip(part["bytes"], part["documents"], strict=True) if d == name) for name in names
            ]
            measured.setdefault(line, {})[part["length"]] = np.array(rows), np.array(size)
    return measured


def safe(own, trained, tolerance):
    """The longest length up to which the one-sided 95 % bound over the cut text is within the tolerance."""
    reached = 0
    for length in sorted(own):
        values, units = own[length]
        cut, _ = trained[min(length, TRAIN_LEN)]
        mean, error, freedom = analysis(values - cut, units)
        if mean + stats.t.ppf(0.95, freedom) * error > tolerance:
            break
        reached = length
    return reached


def useful(own):
    """The longest length up to which each step had the lower end of its 95 % interval above 0."""
    lengths = sorted(own)
    for shorter, longer in itertools.pairwise(lengths):
        mean, error, freedom = analysis(own[shorter][0] - own[longer][0], own[longer][1])
        if mean - stats.t.ppf(0.975, freedom) * error <= 0:
            return shorter
    return lengths[-1]


def simulated(folder, draw):
    """Runs of several seeds; texts of unequal sizes, several of a document; each run and document has a drift."""
    rng = np.random.default_rng(draw)
    documents = [f"file {i}" for i in np.sort(rng.integers(0, 11, TEXTS))]
    sizes = rng.integers(40, 90, TEXTS)
    for pe, variants in ENCODINGS.items():
        for seed in SEEDS:
            run = write_run(folder, pe, seed, variants=variants, noise=0.03)
            of_run = rng.normal(0, 0.004)
            for path in run.glob("evals/*.json"):
                results = json.loads(path.read_text())
                of_document = {name: rng.normal(0, 0.02) for name in set(documents)}
                for part in results["measured"]:
                    doublings = np.log2(part["length"] / TRAIN_LEN)
                    drift = np.array([of_run + of_document[name] for name in documents]) * doublings * np.log(2)
                    bits = np.array(part["nats"]) / np.array(part["bytes"]) + drift
                    part["nats"] = (bits * sizes).tolist()
                    part["bytes"] = sizes.tolist()
                    part["documents"] = documents
                path.write_text(json.dumps(results))


@pytest.mark.parametrize("draw", range(3))
def test_safe_and_useful_lengths_from_the_files_alone(tmp_path, draw):
    simulated(tmp_path, draw)
    (table,) = comparison.tables(frame.load(tmp_path))
    measured = read(tmp_path)
    assert set(measured) == set(table.lines.index)
    outcomes = set()
    for line, own in measured.items():
        trained = measured[line.split(" ")[0]]
        assert table.useful[line] == useful(own)
        assert table.safe[line] == safe(own, trained, 0.02)
        for tolerance in (0.005, 0.01, 0.02, 0.05, 0.1):
            assert table.safe_at[tolerance][line] == safe(own, trained, tolerance)
            outcomes.add((tolerance, table.safe_at[tolerance][line]))
    assert len(outcomes) > 12  # of 5 tolerances and 6 lengths
    (grid,) = [grid for grid in grids.numbers(table) if grid.title == "Safe length by tolerance in bits per byte"]
    assert list(grid.frame) == ["0.005", "0.01", "0.02", "0.05", "0.1"]
    words = {0: "none", 128: "0.5x", 256: "1x", 512: "2x", 1024: "4x", 2048: ">= 8x"}
    for line in measured:
        assert list(grid.frame.loc[line]) == [words[table.safe_at[float(column)][line]] for column in grid.frame]

    differences = []
    for line in set(measured) - {"rope"}:
        for length, (values, units) in measured[line].items():
            mean, error, freedom = analysis(values - measured["rope"][length][0], units)
            differences.append(abs(mean) > stats.t.ppf(0.975, freedom) * error)
    assert answer.how_sure(table).endswith(
        f" Of 30 differences to rope {sum(differences)} are separated from 0; of equal lines about 1.5 would be, by "
        "chance alone."
    )
