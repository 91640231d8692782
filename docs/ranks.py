"""How far a cheap comparison predicts a dearer one: a table of docs/log/ranks.md, which docs/results.py makes.

Two testbeds are compared by Spearman's rank correlation over the lines that both have: of the bits at the training
length, and of the gains at eight times the length. Lines are the same if encoding and options are, whatever the size of
the network and the learning rate; of several with other rates the best at the training length counts. The interval is
that of a bootstrap over the lines.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import rankdata, spearmanr, zscore

from conf.schema import GPTConfig
from model.position import Shape, parts, resolve
from ropewalk.app.cli import encoding
from ropewalk.report import frame
from ropewalk.report.page import markdown_table
from ropewalk.report.table import BEST_POSSIBLE, over_seeds, results

ROOT = Path(__file__).resolve().parents[1]
# Options of the network and of training that make a line another one, and what they are by default.
OPTIONS: dict[str, Any] = {
    "model.conv": None,
    "model.gate": "none",
    "model.key_offset": False,
    "model.sinks": False,
    "optim.pe_lr_scale": 1.0,
    "optim.schedule": "cosine",
    "trainer.short_window": None,
}
FOLLOWS = ("original_len", "max_distance")  # options that follow from train_len unless they are given
ARCHIVES = {
    "Markov": ("markov", "conv", "options", "why"),
    "Markov, switching": ("switch",),
    "Markov, larger network": ("larger",),
    "small, new options": ("code",),
}
PRINTED = {"small": "standard", "large": "large"}  # pages of docs/log
PAIRS = (
    ("Markov", "Markov, switching"),
    ("Markov", "Markov, larger network"),
    ("Markov", "small, new options"),
    ("Markov", "large"),
    ("Markov, larger network", "large"),
    ("small", "large"),
)


class Line(NamedTuple):
    """What one line of a comparison measured."""

    bits: float  # at the training length
    gain: float  # at eight times that length, over cutting the text


Lines = dict[str, Line]  # by the name that `line_name` returns


def table(root: Path) -> list[str]:
    """Return the table, from docs/results/*.jsonl.gz and the printed tables of the comparisons on source code."""
    testbeds: dict[str, Lines] = {}
    for name, archives in ARCHIVES.items():
        testbeds[name] = measured([root / f"docs/results/{archive}.jsonl.gz" for archive in archives])
    for name, page in PRINTED.items():
        testbeds[name] = printed((root / f"docs/log/{page}.md").read_text(encoding="utf-8"))

    header = ["of", "and", "lines", "bits at 1x", "gain at 8x"]
    rows = []
    for cheap, dear in PAIRS:
        shared = sorted(testbeds[cheap].keys() & testbeds[dear].keys())
        a = np.array([testbeds[cheap][line] for line in shared])
        b = np.array([testbeds[dear][line] for line in shared])
        cells = [correlation(a[:, column], b[:, column]) for column in range(2)]
        rows.append([cheap, dear, str(len(shared)), *cells])
    return markdown_table(header, rows)


def measured(archives: Iterable[Path]) -> Lines:
    """Return the lines of the runs in some archives that have the training length and eight times as much."""
    runs = frame.load(list(archives))
    table = over_seeds(results(runs))
    table = table[(table.measure == "lengths") & (table.quantity == "loss") & (table.line != BEST_POSSIBLE)]
    lines: Lines = {}
    for _, of_line in table.groupby(["section", "eval", "line"]):
        at = of_line.set_index("times")
        if not {1.0, 8.0} <= set(at.index):
            continue
        first = of_line.iloc[0]
        path = runs.results.path[runs.results.line == first.line].iloc[0]
        name = line_name(runs.configs[path])
        if first.zero_shot:
            name += f" read as {first.encoding}"
        line = Line(at.value[1.0], at.gain[8.0])
        if name not in lines or line.bits < lines[name].bits:
            lines[name] = line
    return lines


def line_name(config: Mapping[str, Any]) -> str:
    """Return the encoding of a run, with the options that differ from its YAML and from `OPTIONS`."""
    name = config["pe.name"]
    defaults = dict(OPTIONS)
    for part, options in parts(encoding(name)).items():
        prefix = f"pe.{part}." if part else "pe."
        defaults |= {prefix + option: class_name(value) for option, value in options.items()}
    words = [name]
    for key, option in sorted(config.items()):
        if key not in defaults or key.endswith(("name", *FOLLOWS)):
            continue
        value = class_name(option)
        if key in ("pe.base", "pe.proportion") and value == auto_value(config, key.removeprefix("pe.")):
            value = "auto"
        if value != defaults[key] and defaults[key] != "auto":
            words.append(f"{key}={json.dumps(value)}")
    return " ".join(words)


def class_name(value: Any) -> Any:
    """Return the last word of a class's place, which may move between two runs; other values as they are."""
    if isinstance(value, str) and "." in value:
        return value.rpartition(".")[2]
    return value


def auto_value(config: Mapping[str, Any], option: str) -> float:
    """Return what an encoding makes of "auto" for one of its options at the run's training length."""
    cls = resolve(config["pe._target_"])
    sizes = GPTConfig(dim=config["model.dim"], n_head=config["model.n_head"], head_dim=config["model.head_dim"])
    return getattr(cls(Shape.of(sizes, config["train_len"]), **{option: "auto"}), option)


def printed(page: str) -> Lines:
    """Return the lines of the table of a page, by the names of its rows."""
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("|")]
    header = [cell.strip() for cell in rows[0]]
    (at_1x,) = (i for i, cell in enumerate(header) if "(1x)" in cell)
    at_8x = header.index("gain at 8x")
    lines = {}
    for row in rows[2:]:
        name = re.sub(r", scale \d+", "", row[0].strip())
        lines[name] = Line(float(row[at_1x]), float(row[at_8x].split("±")[0]))
    return lines


def correlation(a: np.ndarray, b: np.ndarray) -> str:
    """Format Spearman's rank correlation of a and b [lines], with the 95 % interval of 10,000 resamples of lines."""
    rng = np.random.default_rng(0)
    chosen = np.stack([rng.integers(0, len(a), len(a)) for _ in range(10_000)])
    ranks_a = rankdata(a[chosen], axis=1)
    ranks_b = rankdata(b[chosen], axis=1)
    # A resample of equal values has no ranks.
    varies = (np.ptp(ranks_a, axis=1) > 0) & (np.ptp(ranks_b, axis=1) > 0)
    resampled = np.mean(zscore(ranks_a[varies], axis=1) * zscore(ranks_b[varies], axis=1), axis=1)
    low, high = np.percentile(resampled, [2.5, 97.5])
    return f"{spearmanr(a, b).statistic:.2f} ({low:.2f} to {high:.2f})"
