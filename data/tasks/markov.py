"""Texts with a Markov chain each: a testbed in which longer text always helps, and in which the best loss is known.

In-context learning of Markov chains: Edelman et al., arXiv 2402.11004; Akyürek et al., arXiv 2401.12973.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Annotated, Any, ClassVar

import numpy as np
import pandas as pd
import torch
from pydantic import Field
from torch import Tensor

from data.base import IGNORE_INDEX, EvalSet, hash_texts
from data.tasks.base import Generated, Share, Size, uniforms

MOST_COUNTS = 2**14  # entries in the transition counts of one text
BLOCK = 16  # texts of the forward algorithm at a time
DESCRIBED = 128  # texts whose best loss is told when a training starts


@dataclass(kw_only=True, eq=False)
class Markov(Generated):
    """Text of a few symbols, each text with transition probabilities of its own.

        s3 s0 s7 s7 s3 s0 s7 s3 s0      after s3 comes s0, so far; no other text tells what comes after s3

    The rows of a text's transition matrix are drawn from a symmetric Dirichlet distribution, then its symbols from the
    matrix. Nothing that is learned about one text says anything about the next one: a model must read a text to predict
    it, and what it has read is worth more the longer it is. Every target counts, as in natural text, and lengths are
    compared on the same last targets. `optimum` is the loss of the best possible predictor.
    """

    label: ClassVar[str] = "markov"

    symbols: Annotated[int, Field(ge=2, le=128)] = 10  # V
    # Of the Dirichlet distribution: near 0 a symbol has one successor, far above 1 all are equal.
    alpha: Annotated[float, Field(ge=1e-3, le=1e3)] = 0.2
    order: Annotated[int, Field(ge=1, le=2)] = 1  # symbols that decide about the next one
    lag: Size = 1  # how far back the nearest of them is; 1: it is the one before
    switch: Share = 0.0  # probability, at each place, that the chain is drawn anew

    def __post_init__(self) -> None:
        if self.symbols ** (self.order + 1) > MOST_COUNTS:
            most = int(MOST_COUNTS ** (1 / (self.order + 1)))
            raise ValueError(f"data.symbols={self.symbols} must be at most {most} with data.order={self.order}")

    @property
    def vocab(self) -> list[str]:
        return [f"s{i}" for i in range(self.symbols)]

    @property
    def reach(self) -> int:
        """Symbols at the start of a text that no chain decides about: they are uniform."""
        return self.lag + self.order - 1

    def draw(self, stream: str, indices: Sequence[int], length: int) -> np.ndarray:
        """The texts `indices` of a stream of random numbers, int64 [len(indices), length + 1]: inputs, last target."""
        needs = f"more than {self.reach} tokens with data.lag={self.lag} and data.order={self.order}"
        self.check_length(length, length > self.reach, needs)
        n = len(indices)
        rows = np.arange(n)
        (draws,) = uniforms(stream, indices, length + 1)
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
            weights = counts[rows, context] + self.alpha  # [n, V]
            cumulative = np.cumsum(weights, axis=1)  # the last column is the total
            drawn = draws[:, place] * cumulative[:, -1]
            symbol = (cumulative <= drawn[:, None]).sum(axis=1)  # how many symbols it has passed
            # The product may have been rounded up to the total, which lies beyond the last symbol.
            symbol = np.minimum(symbol, self.symbols - 1)
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

        It is exact for a text that is read from its start. Where a longer text was cut, the first symbol tells a little
        about the chain, for it was drawn by how often the chain has it, and this is left out. With order and lag 1 it
        is worth, over all targets together, at most log V nats less the mean entropy of those frequencies.
        """
        # Inputs and targets overlap but for the last target. If that one is not scored, any symbol does.
        last = y[:, -1:].clamp(min=0)
        tokens = torch.cat([x, last], dim=1).numpy()  # [B, T + 1]

        places = np.arange(self.reach, tokens.shape[1])
        contexts = self._context(tokens, places)  # [B, T + 1 - reach]
        symbols = tokens[:, self.reach :]
        pairs = contexts * self.symbols + symbols

        # The first symbols have no context, and all of them are equally probable.
        losses = np.full(y.shape, math.log(self.symbols))
        decided = losses[:, self.reach - 1 :]  # a view: the targets that a chain decides about
        if self.switch:
            # A few texts at a time, so that the tables of the forward algorithm fit into a cache.
            for start in range(0, len(tokens), BLOCK):
                block = slice(start, start + BLOCK)
                decided[block] = self._losses_with_switches(contexts[block], pairs[block])
        else:
            decided[:] = -self._log_posterior_mean(equal_before(pairs), equal_before(contexts))
        is_scored = y != IGNORE_INDEX
        return torch.from_numpy(losses) * is_scored

    def _log_posterior_mean(self, n_pair: np.ndarray, n_context: np.ndarray) -> np.ndarray:
        """Log-probability of a symbol that followed a context `n_pair` of `n_context` times."""
        probability = (n_pair + self.alpha) / (n_context + self.symbols * self.alpha)
        return np.log(probability)

    def _losses_with_switches(self, contexts: np.ndarray, pairs: np.ndarray) -> np.ndarray:
        """Nats of each symbol, [B, N], by the forward algorithm over the place where the chain was drawn last.

        Exact, for no place is dropped: time grows with N * N. Adams and MacKay, arXiv 0710.3742.

        Args:
            contexts: number of the context of each symbol, int64 [B, N].
            pairs: number of context and symbol together, int64 [B, N].
        """
        n, length = pairs.shape
        losses = np.empty((n, length))
        log_stay = math.log1p(-self.switch) if self.switch < 1 else -math.inf
        # Column s: log-probability that the chain was drawn last just before symbol s, given all symbols so far. Each
        # turn of the loop takes in one more column, which holds until then the logarithm of the probability of a draw
        # there: `switch`, but 1 at the first symbol, where every chain begins. They stay logarithms, for the weight of
        # a place may fall below the smallest float64 and rise again.
        log_weights = np.full((n, length), math.log(self.switch))
        log_weights[:, 0] = 0
        n_context = np.zeros((n, length))
        n_pair = np.zeros((n, length))
        for place in range(length):
            before = slice(0, place)
            upto = slice(0, place + 1)
            log_weights[:, before] += log_stay
            # How often this context, and this pair, occurred since each place: counted from the right. Since this
            # place itself, neither did, as the tables begin with zeros.
            same_context = contexts[:, before] == contexts[:, place, None]
            same_pair = pairs[:, before] == pairs[:, place, None]
            n_context[:, before] = sums_from(same_context)
            n_pair[:, before] = sums_from(same_pair)
            log_likelihood = self._log_posterior_mean(n_pair[:, upto], n_context[:, upto])
            joint = log_weights[:, upto] + log_likelihood
            # The logarithm of the sum of exponentials; numpy's logaddexp.reduce takes several times as long.
            largest = joint.max(axis=1, keepdims=True)
            sums = np.exp(joint - largest).sum(axis=1, keepdims=True)
            log_evidence = largest + np.log(sums)  # [B, 1]
            losses[:, place] = -log_evidence[:, 0]
            log_weights[:, upto] = joint - log_evidence
        return losses

    def train_batch(self, indices: Sequence[int], length: int, seed: int) -> tuple[Tensor, Tensor]:
        return inputs_and_targets(self.draw(f"train/{seed}", indices, length))

    def validation(self, length: int, tokens: int) -> EvalSet:
        return self._ends("validation", [length], length, max(1, tokens // length))[0]

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

    def tokenizer_identity(self) -> dict[str, Any]:
        return {"testbed": self.label, "vocab": self.vocab}

    def describe(self, length: int) -> list[str]:
        texts = self.validation(length, DESCRIBED * length)
        nats = float(self.optimum(*texts.batch(0, DESCRIBED)).mean())
        return [f"data: best possible loss at {length:,} tokens: about {nats:.3f} nats"]


def inputs_and_targets(tokens: np.ndarray) -> tuple[Tensor, Tensor]:
    """Split texts [B, T + 1] into inputs and targets, int64 [B, T], each in memory of its own."""
    return torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(tokens[:, 1:].copy())


def sums_from(values: np.ndarray) -> np.ndarray:
    """Sum of each entry and those to the right of it, [B, N]."""
    from_the_right = values[:, ::-1].cumsum(axis=1)
    return from_the_right[:, ::-1]


def equal_before(values: np.ndarray) -> np.ndarray:
    """Count the earlier entries of the row that equal each entry: int64 [B, N], for `values` [B, N] < MOST_COUNTS."""
    rows = np.arange(len(values))[:, None]
    of_row = (values + rows * MOST_COUNTS).ravel()  # numbers of different rows differ
    return pd.Series(of_row).groupby(of_row).cumcount().to_numpy().reshape(values.shape)
