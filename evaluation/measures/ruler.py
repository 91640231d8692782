"""RULER (Hsieh et al., arXiv 2404.06654) for a network: `data.ruler` asks.

Found: every token of the answer is the most probable one, so greedy decoding would write it. Gain: how many bits more
probable the answer is than after the text's twin, in which it is wrong; by chance 0, so that it shows the first traces
of retrieval in a small or untuned network.
"""

from collections.abc import Sequence
from functools import cache, partial

import torch

from data.base import IGNORE_INDEX, Data, EvalSet
from data.ruler import essay_lines, question
from evaluation.results import Measured
from evaluation.scoring import Job, Plan, Scorer


def ruler(data: Data, lengths: Sequence[int], *, tasks: Sequence[str], depths: int, trials: int, seed: int) -> Plan:
    """Every task at every length; those with a needle at `depths` places, evenly from the start of the context to its
    end. There are `trials` texts of each, the same for every network.

    Raises ValueError: data without text, or a length without room for a task.
    """
    if data.task:
        raise ValueError(f"measures: ruler needs text, and this run was trained on the task {data.task}")
    tasks = [*dict.fromkeys(tasks)]
    settings = {"lengths": list(lengths), "tasks": tasks, "depths": depths, "trials": trials, "seed": seed}
    texts = data.validation(max(lengths), trials * max(lengths))
    settings |= data.tokenizer_identity() | {"texts": texts.texts_hash}

    @cache
    def essay(trial: int) -> tuple[str, ...]:
        ids = texts.batch(trial % texts.n, trial % texts.n + 1)[0][0]
        words = ids if data.token_bytes is None else ids[data.token_bytes[ids] > 0]  # without ends of documents
        return essay_lines(data.decode(words.tolist()))

    @cache  # for all variants
    def made(task: str, length: int, depth: float, twin: bool) -> EvalSet:
        """A text for each trial, filled up after the answer, the only part that is scored."""
        x = torch.zeros(trials, length + 1, dtype=torch.int32)
        y = torch.full_like(x, IGNORE_INDEX)
        for trial in range(trials):
            ids, n = question(task, data.encode, length, (seed, trial), depth=depth, twin=twin, essay=essay(trial))
            x[trial, : len(ids)] = torch.tensor(ids)
            y[trial, len(ids) - n : len(ids)] = torch.tensor(ids[-n:])
        return EvalSet("ruler", length, trials, lambda a, b: (x[a:b, :-1].long(), y[a:b, 1:].long()))

    def run(task: str, length: int, depth: float, name: str, score: Scorer) -> list[Measured]:
        own, other = (score(made(task, length, depth, twin)) for twin in (False, True))
        return [own.measured(name, length, baseline=other.nats)]

    jobs = []
    for task in tasks:
        for twin in (False, True):
            made(task, min(lengths), 0.0, twin)  # all have room, or an error
        places = [i / (depths - 1) for i in range(depths)] if task.startswith("niah") else [0.0]
        for depth in places:
            name = f"{task} depth {depth:.2f}" if len(places) > 1 else task
            jobs += [Job(n, 2 * n * trials, partial(run, task, n, depth, name)) for n in lengths]
    return Plan("ruler", settings, jobs)
