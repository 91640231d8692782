"""Passkeys: does a network use what it read long ago? Filler text holds a key, and a question at its end asks for it.

Two scores. Found: greedy decoding answers with the whole key, by chance in 1 of 90,000 trials. Gain: how many bits more
probable the key is than after the same text with another key in it. By chance the gain is 0, so it shows the first
traces of retrieval, long before a whole key is found.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from data.base import IGNORE_INDEX, Data, EvalSet
from evaluation.results import Measured
from evaluation.scoring import Job, Plan, Scorer

FILLER = (
    ("The baker", "A sailor", "My aunt", "The old dog", "A gardener", "The postman", "Our teacher", "The miller"),
    ("counts the stars", "waits for rain", "sings", "mends a coat", "drinks tea", "feeds the ducks", "walks", "laughs"),
    ("at noon", "by the river", "in the snow", "before dawn", "under a tree", "on Sundays", "after work", "upstairs"),
)
TOLD = " The key is{key}. Remember it."
QUESTION = "\nWhat is the key? The key is"
KEYS, FIRST_KEY = 90_000, 10_000


def plan(data: Data, lengths: Sequence[int], *, depths: int = 5, trials: int = 20, seed: int = 0) -> Plan:
    """Passkeys at every length and depth; of `data` only the tokenizer is used.

    Nothing is generated: greedy decoding gives the key if and only if each of its tokens is the most probable one
    after those before it. There are `depths` places of the key, evenly from 0, the start of the text, to 1, right
    before the question, and `trials` texts at each length and depth, the same for every network; at least 2 of each.

    Raises ValueError: a task, which has no text, or a length without room for key and question.
    """
    if data.task:
        raise ValueError(f"measures: passkeys need text, and this run was trained on the task {data.task}")

    def batch(length: int, depth: float, told: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of trials start..stop-1; only the key is scored."""
        made = [sequence(data.encode, trial, seed, length, depth, told) for trial in range(start, stop)]
        tokens = torch.tensor([ids for ids, _ in made])  # int64 [B, length + 1]
        x, y = tokens[:, :-1], tokens[:, 1:].clone()
        for row, (_, scored) in zip(y, made, strict=True):
            row[:-scored] = IGNORE_INDEX
        return x, y

    def run(length: int, depth: float, score: Scorer) -> list[Measured]:
        sets = [EvalSet("passkeys", length, trials, partial(batch, length, depth, told)) for told in (0, 1)]
        asked, other = map(score, sets)
        return [asked.measured(f"depth {depth:.2f}", length, baseline=other.nats)]

    for told in (0, 1):
        batch(min(lengths), 0.0, told, 0, trials)  # all have room, or an error

    spread = [i / (depths - 1) for i in range(depths)]
    jobs = [Job(n, 2 * n * trials, partial(run, n, depth)) for depth in spread for n in lengths]
    settings = {"lengths": list(lengths), "depths": depths, "trials": trials, "seed": seed, **data.tokenizer_identity()}
    return Plan("passkeys", settings, jobs)


def sequence(
    encode: Callable[[str], list[int]], trial: int, seed: int, length: int, depth: float, told: int = 0
) -> tuple[list[int], int]:
    """The token ids of one text, length + 1 of them, and the number of tokens of the key at its end.

    The text is filler with a key in it, then the question, then the key that is asked for. Each trial draws its own
    filler and two keys. The first is asked for; key `told`, 0 or 1, stands in the filler, after the sentence that ends
    nearest to `depth`. The first sentence is cut at its beginning to fit the length. ValueError if there is no room.
    """
    rng = np.random.default_rng([seed, trial])
    asked, distance = rng.integers(KEYS), rng.integers(1, KEYS)
    keys = [f" {FIRST_KEY + key % KEYS}" for key in (asked, asked + distance)]
    needle, question, answer = encode(TOLD.format(key=keys[told])), encode(QUESTION), encode(keys[0])
    room = length + 1 - len(needle) - len(question) - len(answer)
    if room < 0:
        takes = f"no room for a key and the question about it, which take {length - room}"
        raise ValueError(f"a text of {length} tokens has {takes}: raise eval.lengths")
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
