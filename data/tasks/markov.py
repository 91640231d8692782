"""Texts with a Markov chain each: a testbed in which longer text always helps, and in which the best loss is known.

In-context learning of Markov chains: Edelman et al., arXiv 2402.11004; Akyürek et al., arXiv 2401.12973.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from data.base import IGNORE_INDEX, Data, EvalSet, hash_texts
from data.tasks.base import uniforms

MOST_COUNTS = 2**14  # entries in the transition counts of one text
BLOCK = 16  # texts of the forward algorithm at a time
DESCRIBED = 128  # texts whose best loss is told when a training starts


@dataclass(kw_only=True, eq=False)
class Markov(Data):
    """Text of a few symbols, each text with transition probabilities of its own.

        s3 s0 s7 s7 s3 s0 s7 s3 s0      after s3 comes s0, so far; no other text tells what comes after s3

    The rows of a text's transition matrix are drawn from a symmetric Dirichlet distribution, then its symbols from the
    matrix. Nothing that is learned about one text says anything about the next one: a model must read a text to predict
    it, and what it has read is worth more the longer it is. Every target counts, as in natural text, and lengths are
    compared on the same last targets. `optimum` is the loss of the best possible predictor.

    A text is a pure function of (options, seed, split, index); in validation and test the seed plays no part.
    """

    label: ClassVar[str] = "markov"
    version: ClassVar[int] = 1  # to be raised when the texts of the same options change

    symbols: int = 10  # V
    alpha: float = 0.2  # of the Dirichlet distribution; near 0 a symbol has one successor, far above 1 all are equal
    order: int = 1  # symbols that decide about the next one
    lag: int = 1  # how far back the nearest of them is; 1: it is the one before
    switch: float = 0.0  # probability, at each place, that the chain is drawn anew

    def __post_init__(self) -> None:
        self._check("symbols", 2, 128)
        self._check("alpha", 1e-3, 1e3)
        self._check("order", 1, 2)
        self._check("lag", 1, 2**16)
        self._check("switch", 0, 1)
        if self.symbols ** (self.order + 1) > MOST_COUNTS:
            most = int(MOST_COUNTS ** (1 / (self.order + 1)))
            raise ValueError(f"data.symbols={self.symbols} must be at most {most} with data.order={self.order}")

    def _check(self, option: str, low: float, high: float) -> None:
        value = getattr(self, option)
        if not low <= value <= high:
            raise ValueError(f"data.{option}={value} must be between {low:g} and {high:g}")

    @property
    def vocab(self) -> list[str]:
        """The symbol of each token id."""
        return [f"s{i}" for i in range(self.symbols)]

    @property
    def vocab_size(self) -> int:
        return self.symbols

    @property
    def reach(self) -> int:
        """Symbols at the start of a text that no chain decides about: they are uniform."""
        return self.lag + self.order - 1

    def draw(self, stream: str, indices: Sequence[int], length: int) -> np.ndarray:
        """The texts `indices` of a stream of random numbers, int64 [len(indices), length + 1]: inputs, last target."""
        if length <= self.reach:
            needs = f"markov needs more than {self.reach} tokens with data.lag={self.lag} and data.order={self.order}"
            raise ValueError(f"{needs}, not {length}: choose train_len and eval.lengths accordingly")
        n = len(indices)
        rows = np.arange(n)
        (draws,) = uniforms(stream, indices, length + 1)
        anew = np.zeros((n, length + 1), dtype=bool)
        if self.switch:
            (switch_draws,) = uniforms(f"{stream}/switch", indices, length + 1)
            anew = switch_draws < self.switch

        # No matrix is drawn. With the matrix integrated out, each symbol has its posterior probability given those
        # before it, which is a Polya urn for each context: the same distribution of texts, without a gamma variable.
        # A chain drawn anew begins with empty urns.
        tokens = (draws * self.symbols).astype(np.int64)  # right for the first ones; the others are replaced
        counts = np.zeros((n, self.symbols**self.order, self.symbols))
        for place in range(self.reach, length + 1):
            counts[anew[:, place]] = 0
            context = self._context(tokens, place)
            cumulative = np.cumsum(counts[rows, context] + self.alpha, axis=1)  # [n, V]
            drawn = draws[:, place : place + 1] * cumulative[:, -1:]
            symbol = (cumulative <= drawn).sum(axis=1)
            symbol = np.minimum(symbol, self.symbols - 1)  # where `drawn` was rounded up to the sum
            counts[rows, context, symbol] += 1
            tokens[:, place] = symbol
        return tokens

    def _context(self, tokens: np.ndarray, places: int | np.ndarray) -> np.ndarray:
        """The number of the context that decides about the token at each of the `places`, below symbols**order."""
        context = tokens[:, places - self.lag]
        for further in range(1, self.order):
            context = context * self.symbols + tokens[:, places - self.lag - further]
        return context

    def optimum(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of the best possible predictor, in nats: float64 [B, T], 0 where `y` is IGNORE_INDEX.

        It knows the options and reads the text from the first token of `x` on. Given the chain's contexts and symbols
        so far, the posterior mean of a row of Dirichlet(alpha) is (n_ab + alpha) / (n_a + V alpha). With `switch` it is
        averaged over the places at which the chain may have been drawn last.

        It is exact for texts from their start. In the end of a longer text the first symbol tells a little about the
        chain, by how often it occurs, which is left out: over all targets together at most log V nats less the entropy
        of the symbols' frequencies; see the tests.
        """
        tokens = torch.cat([x, y[:, -1:].clamp(min=0)], dim=1).numpy()  # [B, T + 1]
        places = np.arange(self.reach, tokens.shape[1])
        contexts = self._context(tokens, places)  # [B, T + 1 - reach]
        symbols = tokens[:, self.reach :]
        losses = np.full(y.shape, math.log(self.symbols))
        if self.switch:
            for start in range(0, len(tokens), BLOCK):  # whose tables fit into a cache
                block = slice(start, start + BLOCK)
                losses[block, self.reach - 1 :] = self._losses_with_switches(contexts[block], symbols[block])
        else:
            n_context = equal_before(contexts)
            n_pair = equal_before(contexts * self.symbols + symbols)
            losses[:, self.reach - 1 :] = -np.log(self._posterior_mean(n_pair, n_context))
        return torch.from_numpy(losses).masked_fill(y == IGNORE_INDEX, 0.0)

    def _posterior_mean(self, n_pair: np.ndarray, n_context: np.ndarray) -> np.ndarray:
        return (n_pair + self.alpha) / (n_context + self.symbols * self.alpha)

    def _losses_with_switches(self, contexts: np.ndarray, symbols: np.ndarray) -> np.ndarray:
        """Nats of each symbol, [B, N], by the forward algorithm over the place where the chain was drawn last.

        Exact, for no place is dropped: time and not memory grows with N * N. Adams and MacKay, arXiv 0710.3742.
        """
        pairs = contexts * self.symbols + symbols
        n, length = pairs.shape
        losses = np.empty((n, length))
        log_switch = math.log(self.switch)
        log_stay = math.log1p(-self.switch) if self.switch < 1 else -math.inf
        # Column s: log-probability that the chain was drawn last just before symbol s, given all symbols so far. They
        # stay logarithms, for the weight of a place may fall below the smallest float64 and rise again.
        log_weights = np.zeros((n, length))
        n_context = np.zeros((n, length))
        n_pair = np.zeros((n, length))
        for place in range(length):
            if place:
                log_weights[:, :place] += log_stay
                log_weights[:, place] = log_switch
            before = slice(0, place)
            upto = slice(0, place + 1)
            # How often this context, and this pair, occurred since each place: counted from the right.
            same_context = contexts[:, before] == contexts[:, place : place + 1]
            same_pair = pairs[:, before] == pairs[:, place : place + 1]
            np.cumsum(same_context[:, ::-1], axis=1, out=n_context[:, before][:, ::-1])
            np.cumsum(same_pair[:, ::-1], axis=1, out=n_pair[:, before][:, ::-1])
            joint = log_weights[:, upto] + np.log(self._posterior_mean(n_pair[:, upto], n_context[:, upto]))
            largest = joint.max(axis=1, keepdims=True)
            log_evidence = largest + np.log(np.exp(joint - largest).sum(axis=1, keepdims=True))
            losses[:, place] = -log_evidence[:, 0]
            log_weights[:, upto] = joint - log_evidence
            n_context[:, place] = n_pair[:, place] = 0
        return losses

    def train_batch(self, indices: Sequence[int], length: int, seed: int) -> tuple[Tensor, Tensor]:
        return inputs_and_targets(self.draw(f"train/{seed}", indices, length))

    def validation(self, length: int, tokens: int) -> EvalSet:
        n = max(1, tokens // length)
        return self._ends("validation", [length], length, n)[0]

    def eval_sets(self, lengths: Sequence[int], *, target_tokens: int, sequences: int) -> list[EvalSet]:
        return self._ends("test", lengths, target_tokens, sequences)

    def _ends(self, split: str, lengths: Sequence[int], target_tokens: int, n: int) -> list[EvalSet]:
        """The ends of the same `n` texts at each of the lengths."""
        longest = max(lengths)
        texts = cache(lambda: self.draw(split, range(n), longest))  # drawn once for all lengths
        texts_hash = hash_texts(self.label, self.version, asdict(self), split, longest, target_tokens, n)

        def batch(length: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
            x, y = inputs_and_targets(texts()[start:stop, longest - length :])
            y[:, : length - target_tokens] = IGNORE_INDEX
            return x, y

        return [EvalSet("text", length, n, partial(batch, length), texts_hash) for length in lengths]

    def identity(self) -> dict[str, Any]:
        return self.tokenizer_identity() | {"options": asdict(self), "version": self.version}

    def tokenizer_identity(self) -> dict[str, Any]:
        return {"testbed": self.label, "vocab": self.vocab}

    def describe(self, length: int) -> list[str]:
        best = self.optimum(*self.validation(length, DESCRIBED * length).batch(0, DESCRIBED)).mean().item()
        known = f"best possible loss at {length:,} tokens: about {best:.3f}, {best / math.log(2):.3f} bits per token"
        return [f"data: a Markov chain in each text, {self.symbols} symbols", f"  {known}"]

    def encode(self, text: str) -> list[int]:
        """Token ids of symbols separated by spaces."""
        ids = {symbol: i for i, symbol in enumerate(self.vocab)}
        unknown = [symbol for symbol in text.split() if symbol not in ids]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not a symbol of this text; there is: {' '.join(ids)}")
        return [ids[symbol] for symbol in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(f"s{i}" for i in ids)


def inputs_and_targets(tokens: np.ndarray) -> tuple[Tensor, Tensor]:
    """Of texts [B, T + 1]: what is read, and the token that follows each, int64 [B, T]; each in memory of its own."""
    return torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(tokens[:, 1:].copy())


def equal_before(values: np.ndarray) -> np.ndarray:
    """How many entries before each in its row are equal to it: int64, the shape of `values`, [B, N]."""
    # A stable sort puts equal entries side by side in their order, so that the place within its group is the count.
    order = np.argsort(values, axis=1, kind="stable")
    ascending = np.take_along_axis(values, order, axis=1)
    columns = np.arange(values.shape[1])
    starts_group = np.ones(values.shape, dtype=bool)
    starts_group[:, 1:] = ascending[:, 1:] != ascending[:, :-1]
    group_start = np.maximum.accumulate(np.where(starts_group, columns, 0), axis=1)
    counts = np.empty_like(order)
    np.put_along_axis(counts, order, columns - group_start, axis=1)
    return counts
