"""Predictors and texts of known behaviour, in the place of a network and its data."""

import numpy as np
import torch

from data.base import IGNORE_INDEX, EvalSet
from ropewalk.evaluation.scoring import Scorer


class NoEncoding:
    """What is asked of an encoding that reads texts of any length in one way."""

    scales = (1.0,)
    max_len = window = None


class Planted(torch.nn.Module):
    """Reads text by `predict`: the tokens up to a place, and whatever lies before them is hidden -> probabilities.

    `read` has the number of tokens of each text that was read.
    """

    encodings = (NoEncoding(),)
    train_len = vocab_size = 10**6

    def __init__(self, predict, sees=10**6):
        super().__init__()
        self.predict = predict
        self.sees = sees
        self.embedding = torch.nn.Embedding(1, 1)
        self.read = []

    def hidden_states(self, x, reading, *, encodings):
        probabilities = []
        for text in x.tolist():
            self.read.append(len(text))
            for end in range(1, len(text) + 1):
                seen = text[max(0, end - self.sees) : end]
                probabilities.append(self.predict(seen))
        logits = np.log(probabilities).reshape(*x.shape, -1)
        return torch.tensor(logits, dtype=torch.float32)

    def in_pieces(self, function, hidden, targets):
        return [function(hidden, targets)]


class Texts:
    """Rows of tokens [n, T + 1] as text: every eval set is the ends of them."""

    task = token_bytes = document_end = text_start = None

    def __init__(self, tokens):
        self.tokens = torch.as_tensor(tokens)

    def part(self, length, target_tokens, sequences=10**6):
        rows = self.tokens[:sequences]
        x = rows[:, -length - 1 : -1]
        y = rows[:, -length:].clone()
        y[:, : length - target_tokens] = IGNORE_INDEX
        return EvalSet("text", length, len(rows), lambda a, b: (x[a:b], y[a:b].clone()), f"{target_tokens}")

    def eval_sets(self, lengths, *, target_tokens, sequences):
        return [self.part(length, target_tokens, sequences) for length in lengths]

    def fully_scored(self, length, sequences):
        return self.part(length, length, sequences)

    def validation(self, length, tokens):
        return self.part(length, length, tokens // length)

    def optimum(self, x, y):
        return None


TOKEN_BYTES = torch.arange(50) % 4
DATA = Texts(np.random.default_rng(0).integers(0, 50, (5, 129)))  # five texts of a vocabulary of 50 tokens
DATA.token_bytes = TOKEN_BYTES


def results_of(plan, net, token_bytes=None):
    """What a network measures by all jobs of a plan."""
    scorer = Scorer(net, token_bytes=token_bytes)
    return [measured for part in plan.parts for measured in part.run(scorer)]
