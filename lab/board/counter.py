"""A counter of pairs that forgets at one rate: the simplest predictor of Markov texts, without any training.

It knows the options of the chains, as the best possible predictor does, and nothing about when a chain was drawn anew.
Where chains stay the same and nothing is forgotten it is the best possible predictor.

python -m lab.board.counter     write board/counter.json, the counter's numbers for the seeds of the board's first entry
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from conf.files import read_json, write_json
from conf.schema import Section
from data.base import IGNORE_INDEX
from data.tasks.markov import Markov
from lab.board.rules import Measured
from ropewalk.run.directory import read_file

BOARD = Path("board")
NAME = "counter.json"
FIRST = "2026-11-25-rope"  # the entry whose seeds the texts are drawn from

DECAYS = (0.9, 0.93, 0.95, 0.96, 0.97, 0.98, 0.99, 0.995, 0.998, 1.0)


class Counted(Section):
    """What counter.json holds."""

    decays: list[float]  # for each kind of chain
    measured: Measured


def load(board: Path) -> Counted | None:
    """The counter's numbers on a board; None: it has none. Raises ConfigError: they are damaged."""
    file = board / NAME
    return read_file(file, Counted, remedy="write it again: python -m lab.board.counter") if file.exists() else None


def losses(chains: Markov, x: Tensor, y: Tensor, decay: float) -> Tensor:
    """Nats of each target, float64 [B, T], 0 where `y` is IGNORE_INDEX: see `Markov.optimum`.

    Args:
        decay: what each pair counts for, as a multiple of what it counted for a token before.
    """
    last = y[:, -1:].clamp(min=0)
    tokens = torch.cat([x, last], dim=1).numpy()  # [B, T + 1]
    n = len(tokens)
    texts = np.arange(n)
    found = np.full(y.shape, math.log(chains.symbols))
    counts = np.zeros((n, chains.symbols**chains.order, chains.symbols))
    for place in range(chains.reach, tokens.shape[1]):
        context = chains._context(tokens, place)
        symbol = tokens[:, place]
        weights = counts[texts, context] + chains.alpha  # [B, V]
        found[:, place - 1] = np.log(weights.sum(axis=1) / weights[texts, symbol])
        counts *= decay
        counts[texts, context, symbol] += 1
    is_scored = y != IGNORE_INDEX
    return torch.from_numpy(found) * is_scored


def best_decay(chains: Markov, length: int, texts: int = 512) -> float:
    """The decay of DECAYS with the lowest loss on texts of training, which no evaluation has."""
    x, y = chains.train_batch(range(texts), length, seed=0)
    y[:, : length // 2] = IGNORE_INDEX
    return min(DECAYS, key=lambda decay: float(losses(chains, x, y, decay).sum()))


def gains(chains: Markov, decay: float, lengths: Sequence[int], target_tokens: int, texts: int) -> tuple[float, ...]:
    """In bits per token: gain of the longest text over the shortest, possible gain, loss at the shortest above it."""
    found = []
    for eval_set in chains.eval_sets(lengths, target_tokens=target_tokens, sequences=texts):
        x, y = eval_set.batch(0, texts)
        for nats in (losses(chains, x, y, decay), chains.optimum(x, y)):
            found.append(float(nats.sum()) / (texts * target_tokens) / math.log(2))
    short, best_short, long, best_long = found
    return short - long, best_short - best_long, short - best_short


def counted(kinds: Sequence[Sequence[Markov]], train_len: int, longest: int, target_tokens: int, texts: int) -> Counted:
    """Measure the counter as an entry of the board.

    Args:
        kinds: for each kind of chain those of each seed, with texts of its own.
    """
    decays = [best_decay(of_seeds[0], longest) for of_seeds in kinds]
    rows = [
        [gains(chains, decay, (train_len, longest), target_tokens, texts) for chains in of_seeds]
        for of_seeds, decay in zip(kinds, decays, strict=True)
    ]
    gain, possible, excess = np.moveaxis(np.array(rows), -1, 0).round(6).tolist()
    return Counted(decays=decays, measured=Measured(gain=gain, possible=possible, excess=excess))


if __name__ == "__main__":
    from lab.board.texts import SWITCHES, DrawnTexts

    seeds = read_json(BOARD / FIRST / "verdict.json")["seeds"]
    kinds = [[DrawnTexts(switch=switch, texts=seed) for seed in seeds] for switch in SWITCHES]
    # As conf/enter.yaml has it.
    write_json(BOARD / NAME, counted(kinds, train_len=64, longest=512, target_tokens=8, texts=1024).model_dump())
