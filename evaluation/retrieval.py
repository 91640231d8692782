"""Retrieval: does a network use what it read long ago? Far copies ask it on natural text, passkeys on made-up text.

Far copies are the tokens that complete a repeated sequence, by the distance of its last occurrence in octaves: the loss
with the whole text against the loss with the text cut to train_len, where a far occurrence is out of sight. It is an
induction score (Olsson et al., arXiv 2209.11895) on natural text; compare LongPPL (arXiv 2410.23771).

Passkeys: filler text holds a key, and a question at its end asks for it. Found: greedy decoding answers with the whole
key, by chance in 1 of 90,000 trials. Gain: how many bits more probable the key is than after the same text with another
key in it, by chance 0, so that it shows the first traces of retrieval.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from conf.schema import Config
from data.base import IGNORE_INDEX, Data, EvalSet
from evaluation.results import Measured
from evaluation.scoring import Job, Plan, Scorer

MATCH_BYTES, MATCH_TOKENS = 8, 3  # a repeated sequence has about so many bytes, and at least so many tokens
FILLER = (
    ("The baker", "A sailor", "My aunt", "The old dog", "A gardener", "The postman", "Our teacher", "The miller"),
    ("counts the stars", "waits for rain", "sings", "mends a coat", "drinks tea", "feeds the ducks", "walks", "laughs"),
    ("at noon", "by the river", "in the snow", "before dawn", "under a tree", "on Sundays", "after work", "upstairs"),
)
TOLD = " The key is{key}. Remember it."
QUESTION = "\nWhat is the key? The key is"
KEYS, FIRST_KEY = 90_000, 10_000


def copy_distances(tokens: np.ndarray, n: int) -> np.ndarray:
    """How many tokens ago each token was last preceded by the same `n` tokens: int64, 0 where it never was.

    `tokens` is int64 [T]. A token that differs from the earlier continuation is no copy, and a nearer copy hides those
    further back.
    """
    distances = np.zeros(len(tokens), dtype=np.int64)
    if len(tokens) <= n:
        return distances
    grams = np.lib.stride_tricks.sliding_window_view(tokens, n + 1)  # [T - n, n + 1]; the last one is the target
    ids = np.unique(grams, axis=0, return_inverse=True)[1].reshape(-1)
    order = np.argsort(ids, kind="stable")
    again = ids[order[1:]] == ids[order[:-1]]
    distances[order[1:][again] + n] = (order[1:] - order[:-1])[again]
    return distances


def far_copies(data: Data, cfg: Config) -> Plan | None:
    """The measure for `cfg.eval`; None for tasks, and where no length is beyond train_len.

    The targets from number train_len on are scored twice: with the whole text before them, and in windows of train_len
    tokens, half of that apart, which leave each target between train_len / 2 and train_len tokens of context.
    """
    length, short = max(cfg.lengths), cfg.train_len
    texts = data.fully_scored(length, cfg.eval.sequences) if length > short else None
    if texts is None:
        return None
    bytes_per_token = 1.0 if data.token_bytes is None else float(data.token_bytes[texts.batch(0, 1)[1]].float().mean())
    n = max(MATCH_TOKENS, round(MATCH_BYTES / max(bytes_per_token, 1)))
    octaves = int(np.log2(length)) + 1
    step = max(1, short // 2)
    starts = [*range(step, length - short, step), length - short]  # of the windows

    @lru_cache(1)  # for all variants
    def octave_of_copies() -> Tensor:
        """Of each target, int64 [texts, length]; -1: not scored."""
        x, y = texts.batch(0, texts.n)
        tokens = torch.cat([x[:, :1], y], dim=1).numpy()
        distances = np.stack([copy_distances(row, n)[1:] for row in tokens])
        distances[:, :short] = 0  # these have nothing that could be cut
        return torch.from_numpy(np.frexp(distances)[1].astype(np.int64) - 1)

    def run(score: Scorer) -> list[Measured]:
        octave = octave_of_copies()
        whole = score(texts, octave, octaves)
        baseline, scored_to = np.zeros_like(whole.nats), short
        for start in starts:
            window = slice(start, start + short)
            own = octave[:, window].clone()
            own[:, : scored_to - start] = -1
            scored_to = window.stop

            def cut(first: int, last: int, window: slice = window) -> tuple[Tensor, Tensor]:
                x, y = texts.batch(first, last)
                return x[:, window], y[:, window]

            baseline += score(EvalSet("cut", short, texts.n, cut), own, octaves).nats
        scored = [i for i in range(octaves) if whole.tokens[:, i].any()]
        return [whole.measured(f"distance {2**i}-{2 ** (i + 1) - 1}", length, i, baseline) for i in scored]

    settings = {"length": length, "cut": short, "match": n, "sequences": cfg.eval.sequences, "texts": texts.texts_hash}
    return Plan("far_copies", settings, [Job(length, texts.n * (length + len(starts) * short), run)])


def passkeys(data: Data, lengths: Sequence[int], *, depths: int = 5, trials: int = 20, seed: int = 0) -> Plan:
    """Passkeys at every length and depth; of `data` only the tokenizer is used.

    Nothing is generated: greedy decoding gives the key if and only if each of its tokens is the most probable one. The
    key has `depths` places, evenly from 0, the start of the text, to 1, right before the question. There are `trials`
    texts at each length and depth, the same for every network; at least 2 of each. Raises ValueError: a task, which has
    no text, or a length without room for key and question.
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

    The text is filler with a key in it, the question, and the key that is asked for. Each trial draws its own filler
    and two keys: the first is asked for; key `told`, 0 or 1, stands after the sentence that ends nearest to `depth`.
    The first sentence is cut at its beginning to fit the length. ValueError if there is no room.
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
