"""Retrieval: whether a model uses what it read long ago, asked for a key that filler text told once.

Two scores. `exact`: greedy decoding answers with the whole key; by chance in one of 90,000 trials. `gain`: by how many
bits the key is more probable than in the same text telling another key; by chance 0, whatever a model believes about
keys in general, so that it shows the first traces of retrieval long before a key is found as a whole.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from rich.table import Table

from data.base import IGNORE, Data, Slice
from evaluation.lengths import batches, token_losses
from evaluation.results import Part, Saved
from model.gpt import GPT

FILLER = (
    ("The baker", "A sailor", "My aunt", "The old dog", "A gardener", "The postman", "Our teacher", "The miller"),
    ("counts the stars", "waits for rain", "sings", "mends a coat", "drinks tea", "feeds the ducks", "walks", "laughs"),
    ("at noon", "by the river", "in the snow", "before dawn", "under a tree", "on Sundays", "after work", "upstairs"),
)
TOLD = " The key is{key}. Remember it."
QUESTION = "\nWhat is the key? The key is"
KEYS, FIRST_KEY = 90_000, 10_000
NOTE = f"""\
(keys found by greedy decoding: 1 in {KEYS:,} by chance; and by how many bits the key is more probable than it is where
the text tells another: 0 by chance, ± standard error. A small or briefly trained model finds no whole key: the bits
tell whether it retrieves at all)"""

Encode = Callable[[str], list[int]]


class Cell(Part):
    """One way of reading, at one length and depth."""

    reading: str  # a label of PositionEncoding.readings, with the encoding's name where there are several
    length: int  # tokens the model reads, all of the key but its last token among them
    ratio: float  # length / train_len
    depth: float  # where the key stands: 0 at the start, 1 right before the question
    trials: int
    exact: float  # share of the trials in which greedy decoding gives the key
    gain: float  # mean bits by which the key is more probable than where the text tells another
    gain_error: float  # its standard error


class Passkey(Saved):
    """The schema of passkey.json, version 1."""

    run: str
    encoding: str  # that it was trained with
    data: str
    seed: int  # of the texts
    train_len: int
    skipped: dict[str, list[int]]  # reading -> lengths it is not defined for
    cells: list[Cell]

    def table(self) -> Table:
        """For the terminal: a line for each length and depth, a column for each reading."""
        labels = list(dict.fromkeys([*(cell.reading for cell in self.cells), *self.skipped]))
        table = Table(title=f"{self.run}: passkeys found by length and depth, and gain in bits", title_justify="left")
        for heading in ("length", "x train_len", "depth", *labels):
            table.add_column(heading, justify="right")
        cells = {(cell.reading, cell.length, cell.depth): cell for cell in self.cells}
        for length, depth in self.places:
            found = [cells.get((label, length, depth)) for label in labels]
            values = [f"{c.exact:.0%} {c.gain:+.2f} ± {c.gain_error:.2f}" if c else "no position" for c in found]
            table.add_row(str(length), f"{length / self.train_len:g}", f"{depth:.2f}", *values)
        return table

    @property
    def places(self) -> list[tuple[int, float]]:
        """Every length with every depth."""
        lengths = {cell.length for cell in self.cells} | {n for found in self.skipped.values() for n in found}
        depths = {cell.depth for cell in self.cells}
        return [(length, depth) for length in sorted(lengths) for depth in sorted(depths)]


class Retrieval(NamedTuple):
    cells: list[Cell]
    skipped: dict[str, list[int]]


def evaluate(
    net: GPT,
    data: Data,
    *,
    lengths: Sequence[int],
    depths: int,
    trials: int,
    seed: int = 0,
    readings: slice = slice(None),
    label: Callable[[str], str] = str,
    progress: Callable[[str], None] | None = None,
) -> Retrieval:
    """Every reading of the encoding at every length and depth.

    Args:
        data: for its tokenizer alone.
        lengths: in tokens.
        depths: how many, evenly from 0 to 1; at least 2.
        trials: for each length and depth: texts and keys that are the same for every network and reading; at least 2.
        readings: which of the encoding's readings; default all.
        label: gives the reading in a cell its name, from the label it has.
        progress: called with a few words before each reading and length.

    Raises:
        ValueError: a length without room for the key and the question, or data that no text can be written in.
    """
    result = Retrieval([], {})
    spread = [i / (depths - 1) for i in range(depths)]
    for trial in range(trials):  # before any work: is there room in all of them?
        for told in (0, 1):
            sequence(data.encode, trial, seed, length=min(lengths), depth=0.0, told=told)
    for i in range(len(net.encodings[0].readings()))[readings]:
        with net.reading(lambda pe: pe.readings()[i]) as pe:  # noqa: B023 - called at once
            name = label(pe.label)
            for length in lengths:
                if pe.max_len is not None and length > pe.max_len:
                    result.skipped.setdefault(name, []).append(length)
                    continue
                if progress:
                    progress(f"passkeys in {length:,} tokens, {name}")
                for depth in spread:
                    found, gains = trial_scores(net, data.encode, length, depth, trials, seed)
                    cell = Cell(
                        reading=name, length=length, ratio=length / net.train_len, depth=depth, trials=trials,
                        exact=float(found.mean()), gain=float(gains.mean()),
                        gain_error=float(gains.std(ddof=1)) / math.sqrt(trials),
                    )  # fmt: skip
                    result.cells.append(cell)
    return result


def trial_scores(
    net: GPT, encode: Encode, length: int, depth: float, trials: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Of each trial, whether greedy decoding finds the key, and the gain in bits: bool and float64 [trials].

    Greedy decoding gives the key if and only if each of its tokens is the most probable one after those before it,
    so a single pass over text and key tells. (An encoding whose angles follow the length of the text reads a little
    differently token by token, see `DynamicNTK`.)
    """
    device = next(net.parameters()).device
    nats, right = [], []
    for told in (0, 1):  # the key that is asked for, and another
        part = Slice("passkey", length, trials, partial(_batch, encode, seed, length, depth, told))
        scores = [token_losses(net, x, y) for x, y in batches(part, None, device)]
        nats.append(np.concatenate([losses.double().sum(1).cpu().numpy() for losses, _ in scores]))
        right.append(np.concatenate([~wrong.any(1).cpu().numpy() for _, wrong in scores]))
    return right[0], (nats[1] - nats[0]) / math.log(2)


def sequence(
    encode: Encode, trial: int, seed: int, *, length: int, depth: float, told: int = 0
) -> tuple[list[int], int]:
    """length + 1 tokens, filler with a key in it, the question and the key, and how many of the last are the key's.

    Every trial has filler and two keys of its own; the first is asked for, number `told` stands in the text, behind the
    sentence that ends nearest to `depth`. The filler's first sentence lacks as much of its beginning as is too much.

    Raises:
        ValueError: the length has no room for the key and the question.
    """
    rng = np.random.default_rng([seed, trial])
    asked, distance = rng.integers(KEYS), rng.integers(1, KEYS)
    keys = [f" {FIRST_KEY + key % KEYS}" for key in (asked, asked + distance)]
    needle, question, answer = encode(TOLD.format(key=keys[told])), encode(QUESTION), encode(keys[0])
    room = length + 1 - len(needle) - len(question) - len(answer)
    if room < 0:
        raise ValueError(
            f"a text of {length} tokens has no room for a key and the question about it, which take {length - room}: "
            f"raise lengths"
        )
    sentences: list[list[int]] = []  # the last one first
    after, missing = [0], room  # tokens after the last, the last but one, ... sentence
    while missing:
        text = " ".join(words[rng.integers(len(words))] for words in FILLER)
        sentences.append(encode(f" {text}.")[-missing:])
        missing -= len(sentences[-1])
        after.append(room - missing)
    at = min(range(len(after)), key=lambda i: abs(after[i] - (1 - depth) * room))
    sentences.insert(at, needle)
    return [token for piece in (*sentences[::-1], question, answer) for token in piece], len(answer)


def _batch(
    encode: Encode, seed: int, length: int, depth: float, told: int, start: int, stop: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of trials start..stop-1; the key alone is scored."""
    made = [sequence(encode, trial, seed, length=length, depth=depth, told=told) for trial in range(start, stop)]
    tokens = torch.tensor([ids for ids, _ in made], dtype=torch.int64)  # [B, length + 1]
    x, y = tokens[:, :-1], tokens[:, 1:].clone()
    for row, (_, scored) in zip(y, made, strict=True):
        row[:-scored] = IGNORE
    return x, y


def heat_map(results: Passkey, path: Path) -> None:
    """Both scores by length and depth, a column of panels for each reading; a PNG."""
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(cell.reading for cell in results.cells))
    lengths, depths = (sorted(set(values)) for values in zip(*results.places, strict=True))
    figure = Figure(figsize=(1.5 + (1 + 0.8 * len(lengths)) * len(labels), 2 + 0.8 * len(depths)), layout="constrained")
    panels = figure.subplots(2, len(labels), squeeze=False, sharex=True, sharey=True)
    most = min(max(1.0, *(abs(cell.gain) for cell in results.cells)), math.log2(KEYS))  # the bits of a key
    for row, score, low, high, colours, title in (
        (0, "exact", 0.0, 1.0, "viridis", "keys found"),
        (1, "gain", -most, most, "RdBu", "gain in bits"),
    ):
        for axes, label in zip(panels[row], labels, strict=True):
            values = np.full((len(depths), len(lengths)), np.nan)
            for cell in (cell for cell in results.cells if cell.reading == label):
                at = depths.index(cell.depth), lengths.index(cell.length)
                values[at] = getattr(cell, score)
                axes.text(
                    at[1], at[0], f"{values[at]:.0%}" if score == "exact" else f"{values[at]:+.2f}",
                    ha="center", va="center", fontsize=8, bbox=dict(facecolor="white", alpha=0.7, lw=0, pad=1),
                )  # fmt: skip
            image = axes.imshow(values, vmin=low, vmax=high, cmap=colours, aspect="auto")
            axes.set_facecolor("0.85")  # lengths without a position
            axes.set_xticks(range(len(lengths)), [f"{n}\n{n / results.train_len:g}x" for n in lengths], fontsize=8)
            axes.set_yticks(range(len(depths)), [f"{d:.2f}" for d in depths], fontsize=8)
            axes.set_title(label if row == 0 else "", fontsize=10)
        figure.colorbar(image, ax=panels[row], label=title)
    figure.supxlabel("length in tokens, and in multiples of train_len", fontsize=10)
    figure.supylabel("depth of the key", fontsize=10)
    figure.suptitle(f"passkeys, {results.encoding} on {results.data}, trained at {results.train_len} tokens")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
