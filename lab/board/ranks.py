"""What the board predicts: rank correlations of its scores with gains on source code, for docs/log/ranks.md.

python -m lab.board.ranks
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
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


def gains_at_8x(page: str) -> dict[str, float]:
    """The gain at 8x of each line of a table of the log, in bits per byte."""
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("|")]
    header = [cell.strip() for cell in rows[0]]
    column = header.index("gain at 8x")
    found = {}
    for cells in rows[2:]:
        number = re.match(r"[+-]\d+\.\d+", cells[column].strip())
        if number:
            found[cells[0].strip()] = float(number[0])
    return found


def predictors(folder: Path) -> dict[str, list[float]]:
    """By encoding of the board, as the pages call it: its numbers in the order of PREDICTORS, means over seeds."""
    found = {}
    for verdict in board.verdicts(folder):
        stay, change = np.mean(verdict.measured.gain, axis=1)
        name = READ_AS.get(verdict.encoding, verdict.encoding)
        found[name] = [float(np.mean(verdict.measured.scores())), float(stay), float(change)]
    return found


def correlations(of_board: Mapping[str, Sequence[float]], gains: Mapping[str, float]) -> dict[str, str]:
    """Spearman's correlation of each predictor with the gains, and that of the last less that of the one before.

    Each with its 95 % interval by a bootstrap over the encodings, which are those that both have.
    """
    lines = np.array([[*of_board[name], gains[name]] for name in of_board if name in gains])  # [lines, predictors + 1]
    drawn = np.random.default_rng(0).integers(len(lines), size=(DRAWS, len(lines)))
    samples = np.concatenate((lines[None], lines[drawn]))  # the first one has each line once
    found = [spearman(samples[:, :, [column, -1]]) for column in range(len(PREDICTORS))]
    found.append(found[-1] - found[-2])
    cells = {}
    for name, values in zip((*PREDICTORS, DIFFERENCE), found, strict=True):
        low, high = np.nanquantile(values[1:], [0.025, 0.975])
        cells[name] = f"{values[0]:.2f} ({low:.2f} to {high:.2f})"
    return cells


def spearman(pairs: np.ndarray) -> np.ndarray:
    """The rank correlation of each sample of pairs [n, lines, 2]: [n], NaN where all numbers of a column are equal."""
    ranks = rankdata(pairs, axis=1)
    deviations = ranks - ranks.mean(axis=1, keepdims=True)
    covariance = deviations.prod(axis=2).sum(axis=1)
    with np.errstate(invalid="ignore"):
        return covariance / np.sqrt((deviations**2).sum(axis=1).prod(axis=1))


def table(root: Path) -> str:
    """The table of docs/log/ranks.md about the board."""
    of_board = predictors(root / "board")
    columns = {}
    for page, words in PAGES.items():
        gains = gains_at_8x((root / f"docs/log/{page}.md").read_text(encoding="utf-8"))
        holding = {name: gain for name, gain in gains.items() if gain > HOLDS}
        for which, chosen in (("all", gains), ("those that hold", holding)):
            n = len(chosen.keys() & of_board.keys())
            columns[f"{words}, {which} ({n})"] = correlations(of_board, chosen)
    rows = [{"": name} | {words: cells[name] for words, cells in columns.items()} for name in (*PREDICTORS, DIFFERENCE)]
    return "\n".join(markdown(rows))


if __name__ == "__main__":
    print(table(Path()))
