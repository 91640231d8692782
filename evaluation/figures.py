"""Pictures of an evaluation."""

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display is needed, nor looked for

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from evaluation.results import Results, Row


def draw(results: Results, path: Path) -> None:
    """A PNG of what was measured at each length: the errors of a task, the loss on text."""
    figure = errors(results) if results.validation.task else losses(results)
    lines, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=4, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def errors(results: Results) -> Figure:
    """Error of a task against the length, a line for each slice, a panel for each reading."""
    labels = list(dict.fromkeys(row.reading for row in results.lengths))
    figure, panels = plt.subplots(
        1, len(labels), figsize=(1 + 5 * len(labels), 4.2), squeeze=False, sharey=True, layout="constrained"
    )
    for axes, label in zip(panels[0], labels, strict=True):
        rows = [row for row in results.lengths if row.reading == label]
        for name in dict.fromkeys(row.slice for row in rows):
            own = [row for row in rows if row.slice == name]
            axes.plot([row.length for row in own], [row.error for row in own], "o-", label=name)
        _lengths(axes, rows)
        axes.set(xlabel="length in tokens", ylabel="wrong tokens in percent", ylim=(-3, 103), title=label)
        _mark(axes, results.train_len)
    task = results.validation.task
    figure.suptitle(f"{results.encoding} on {task}, trained at {results.train_len} tokens", fontsize=12)
    return figure


def losses(results: Results) -> Figure:
    """Loss against context length, and against position, a line for each reading, train_len marked."""
    figure, axes = plt.subplots(
        1, 2 if results.by_position else 1, figsize=(11 if results.by_position else 6, 4.2), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    labels = list(dict.fromkeys(row.reading for row in results.lengths))
    left = axes[0, 0]
    for label, name in dict.fromkeys((row.reading, row.slice) for row in results.lengths):
        rows = [row for row in results.lengths if (row.reading, row.slice) == (label, name)]
        same = name == results.lengths[0].slice  # the same tokens at each length; else sliding windows
        values = [results.measure(row) for row in rows]
        left.plot(
            [row.length for row in rows], values, "o-" if same else "o:", label=label if same else f"{label}, {name}"
        )
    _lengths(left, results.lengths)
    unit = "bits per byte" if results.in_bits else "loss in nats per token"
    left.set(xlabel="context length in tokens", ylabel=unit)
    left.set_title(f"same {results.lengths[0].tokens:,} tokens, growing context", fontsize=10)
    _mark(left, results.train_len)
    if results.by_position:
        right = axes[0, 1]
        for label in labels:
            bins = [b for b in results.by_position if b.reading == label]
            right.plot([(b.start + b.stop) / 2 for b in bins], [b.loss for b in bins], label=label)
        right.set(xlabel="position in the text", ylabel="loss in nats per token")
        right.set_title("loss by position, one pass at the longest length", fontsize=10)
        _mark(right, results.train_len)
    figure.suptitle(f"{results.encoding} on {results.data}, trained at {results.train_len} tokens", fontsize=12)
    return figure


def _lengths(axes: Axes, rows: list[Row]) -> None:
    axes.set_xscale("log", base=2)
    ticks = sorted({row.length for row in rows})
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.minorticks_off()


def _mark(axes: Axes, train_len: int) -> None:
    axes.axvline(train_len, color="gray", linestyle="--", linewidth=1, label="train_len")
    low, high = axes.get_ylim()
    if math.isfinite(high) and low > 0:
        axes.set_ylim(0.9 * low, high)
    axes.grid(alpha=0.25)
