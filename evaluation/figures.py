"""Pictures of an evaluation."""

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display is needed, nor looked for

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from evaluation.results import Results


def extrapolation(results: Results, path: Path) -> None:
    """Loss against context length, and against position, a line for each reading, train_len marked; a PNG."""
    figure, axes = plt.subplots(
        1, 2 if results.by_position else 1, figsize=(11 if results.by_position else 6, 4.2), squeeze=False,
        layout="constrained",
    )  # fmt: skip
    labels = list(dict.fromkeys(row.reading for row in results.lengths))
    bits = all(row.bits_per_byte is not None for row in results.lengths)
    left = axes[0, 0]
    for label in labels:
        rows = [row for row in results.lengths if row.reading == label]
        values = [row.bits_per_byte if bits else row.loss for row in rows]
        left.plot([row.length for row in rows], values, "o-", label=label)
    left.set_xscale("log", base=2)
    ticks = sorted({row.length for row in results.lengths})
    left.set_xticks(ticks, [str(t) for t in ticks])
    left.minorticks_off()
    left.set(xlabel="context length in tokens", ylabel="bits per byte" if bits else "loss in nats per token")
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
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _mark(axes: Axes, train_len: int) -> None:
    axes.axvline(train_len, color="gray", linestyle="--", linewidth=1, label="train_len")
    low, high = axes.get_ylim()
    if math.isfinite(high) and low > 0:
        axes.set_ylim(0.9 * low, high)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
