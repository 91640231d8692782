"""Whether the order of docs/log/prediction.yaml came true: the claims of docs/log/prediction.md, each with its verdict.

python -m lab.board.prediction runs/prediction
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from conf.files import read_yaml
from lab.board.ranks import correlations, ends, in_words
from ropewalk.report.answer import amount
from ropewalk.report.frame import load
from ropewalk.report.table import by_length, interval_columns, results

BREAK = ("rope", "p_rope")  # arms of which it is easy to say that they lose
ORDERS = ("by hand", "the board's score", "chains that stay", "chains that change")


def verdicts(table: pd.DataFrame, arms: dict[str, list[float]]) -> Iterator[str]:
    """Yield a line on what was run, one for each order, and one for each claim.

    Args:
        table: the long table of the runs, of one length, beside `fox`.
        arms: by name its place in the order by hand, and its gains in bits where chains stay and where they change.
    """
    of_seeds = table[table.seed.notna()].pivot(index="line", columns="seed", values="gain").dropna(how="all")
    of_arms = pd.DataFrame.from_dict(arms, orient="index", columns=["place", "stay", "change"])
    shown = of_arms[of_arms.index.isin(of_seeds.index)]
    score = shown.stay + shown.change  # its divisor is the same for all
    orders = np.stack((-shown.place, score, shown.stay, shown.change), axis=1)
    gains = of_seeds.loc[shown.index].dropna(axis="columns").to_numpy()  # of the seeds that all arms have
    holds = ~shown.index.isin(BREAK)
    everywhere, holding = correlations(orders, gains), correlations(orders[holds], gains[holds])
    yield f"{len(shown)} of {len(arms)} arms, each with {gains.shape[1]} seeds"
    for n, name in enumerate(ORDERS):
        yield f"{name}: {in_words(everywhere[:, n])}; of {sum(holds)} that may hold {in_words(holding[:, n])}"

    low, high = ends(everywhere[:, 1])
    refuted = high < 0.5 or holding[0, 1] < 0
    yield f"1, the board predicts: {said(low > 0.5 and holding[0, 1] > 0, refuted)}"
    low, high = ends(everywhere[:, 3] - everywhere[:, 2])
    yield f"2, chains that change predict better: {said(low > 0, high < 0)}"
    constant = table[table.seed.isna() & (table.line == "tenfold")]
    behind, low, high = constant[interval_columns("difference")].iloc[0]
    verdict = said(low > 0.01, low > -0.005 and high < 0.005)
    yield f"3, content matters at this size ({amount(behind, low, high, sign='+')}): {verdict}"
    yield f"4, the rule orders better than the hand: {said(everywhere[0, 1] > everywhere[0, 0], True)}"


def said(stands: bool, refuted: bool) -> str:
    if stands:
        return "stands"
    return "refuted" if refuted else "open"


def main(folder: Path) -> None:
    table = by_length(results(load(folder), reference="fox"))
    for line in verdicts(table[table.length == table.length.max()], read_yaml(Path("docs/log/prediction.yaml"))):
        print(line)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
