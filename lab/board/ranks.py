"""What the board predicts: rank correlations of its scores with gains on source code, for docs/log/ranks.md.

python -m lab.board.ranks
"""

import re
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import rankdata

from lab.benchmarks.measure import markdown
from lab.board import board

HOLDS = -0.1  # bits: who gains less at 8x on source code breaks there
DRAWS = 10_000
# What a page of the log calls an entry of the board, unless it is the same.
READ_AS = {
    "yarn": "rope read as yarn, scale 8",
    "self_extend": "rope read as self_extend, scale 8",
    "linear": "rope read as linear, scale 8",
    "ntk": "rope read as ntk, scale 8",
    "llama3": "rope read as llama3, scale 8",
    "dynamic_ntk": "rope read as dynamic_ntk, scale 1",
    "rerope": "rope read as rerope",
    "dca": "rope read as dca",
}
PREDICTORS = ("the board's score", "chains that stay, alone", "chains that change, alone")
DIFFERENCE = "the last less the one before"
PAGES = {"large": "large code (11M)", "standard": "small code (1M)"}


def gains_at_8x(page: str) -> pd.Series:
    """The gain at 8x of each line of a table of the log, in bits per byte."""
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("|")]
    header = [cell.strip() for cell in rows[0]]
    column = header.index("gain at 8x")
    found = {}
    for cells in rows[2:]:
        number = re.match(r"[+-]\d+\.\d+", cells[column].strip())
        if number:
            found[cells[0].strip()] = float(number[0])
    return pd.Series(found, name="gain")


def predictors(folder: Path) -> dict[str, list[float]]:
    """By encoding of the board, as the pages call it: its numbers in the order of PREDICTORS, means over seeds."""
    found = {}
    for verdict in board.verdicts(folder):
        stay, change = np.mean(verdict.measured.gain, axis=1)
        name = READ_AS.get(verdict.encoding, verdict.encoding)
        found[name] = [float(np.mean(verdict.measured.scores())), float(stay), float(change)]
    return found


def correlations(orders: np.ndarray, gains: np.ndarray) -> np.ndarray:
    """Spearman's correlation of each order with the mean gains: [1 + DRAWS, orders], the first one of what is there.

    The others are of a bootstrap that draws the seeds of each line, and then lines.

    Args:
        orders: numbers by which the lines are ordered [lines, orders].
        gains: [lines, seeds].
    """
    n, seeds = gains.shape
    random = np.random.default_rng(0)
    lines = random.integers(n, size=(1 + DRAWS, n))
    drawn = random.integers(seeds, size=(1 + DRAWS, n, seeds))
    lines[0], drawn[0] = np.arange(n), np.arange(seeds)
    means = gains[np.arange(n)[:, None], drawn].mean(2)  # [1 + DRAWS, lines]
    means = np.take_along_axis(means, lines, 1)  # a line that is drawn twice has the same gain twice
    return np.stack([spearman(np.stack((order[lines], means), 2)) for order in orders.T], 1)


def spearman(pairs: np.ndarray) -> np.ndarray:
    """The rank correlation of each sample of pairs [n, lines, 2]: [n], NaN where all numbers of a column are equal."""
    ranks = rankdata(pairs, axis=1)
    deviations = ranks - ranks.mean(axis=1, keepdims=True)
    covariance = deviations.prod(axis=2).sum(axis=1)
    with np.errstate(invalid="ignore"):
        return covariance / np.sqrt((deviations**2).sum(axis=1).prod(axis=1))


def ends(samples: np.ndarray) -> np.ndarray:
    """The ends of the 95 % interval of `correlations` of one order, or of differences of them."""
    return np.nanquantile(samples[1:], [0.025, 0.975])


def in_words(samples: np.ndarray) -> str:
    """A correlation with its interval."""
    low, high = ends(samples)
    return f"{samples[0]:.2f} ({low:.2f} to {high:.2f})"


def table(root: Path) -> str:
    """The table of docs/log/ranks.md about the board."""
    of_board = pd.DataFrame.from_dict(predictors(root / "board"), orient="index", columns=[*PREDICTORS])
    columns = {"": [*PREDICTORS, DIFFERENCE]}
    for page, words in PAGES.items():
        gains = gains_at_8x((root / f"docs/log/{page}.md").read_text(encoding="utf-8"))
        for which, chosen in (("all", gains), ("those that hold", gains[gains > HOLDS])):
            lines = of_board.join(chosen, how="inner")  # of both, in the order of the board
            found = correlations(lines[[*PREDICTORS]].to_numpy(), lines[["gain"]].to_numpy())
            difference = found[:, -1] - found[:, -2]
            columns[f"{words}, {which} ({len(lines)})"] = [in_words(of) for of in (*found.T, difference)]
    return "\n".join(markdown(pd.DataFrame(columns).to_dict("records")))


if __name__ == "__main__":
    print(table(Path()))
