"""RULER (Hsieh et al., arXiv 2404.06654): answers to the questions of `lab.measures.ruler_questions`.

Found: every token of the answer is the most probable one, so greedy decoding would write it. Gain: how many bits more
probable the answer is than after the text's twin, in which it is wrong; by chance 0, so that it shows the first traces
of retrieval in a small or untuned network.

For: retrieval with the weights of small and published models, read in any way. Shown: docs/log/released_models.md.
Leaves: when lm-eval, which has RULER for exported models, reads zero-shot variants.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Literal

import torch
from pydantic import Field

from conf.schema import Config
from data.base import IGNORE_INDEX, Data, EvalSet
from lab.measures.ruler_questions import TASKS, essay_lines, question
from ropewalk.evaluation.measures.base import Measure, Part, Plan
from ropewalk.evaluation.results import PartResult
from ropewalk.evaluation.scoring import Scorer


class Ruler(Measure):
    """The measure of every task at every length of the evaluation."""

    tasks: list[Literal[tuple(TASKS)]] = Field([*TASKS], min_length=1)  # type: ignore[valid-type]
    depths: int = Field(3, ge=2, le=2**31)  # places of a needle, evenly from the start of the context to its end
    trials: int = Field(20, ge=2, le=2**31)  # texts of each task, length and depth; the same for every network
    seed: int = Field(0, ge=0, lt=2**63)  # of the texts

    def plan(self, data: Data, cfg: Config) -> Plan | None:
        """Return the parts; None for tasks. Raises ValueError: a length has no room for a task of RULER."""
        if data.task:
            return None
        lengths = cfg.lengths
        tasks = [*dict.fromkeys(self.tasks)]
        filler = data.validation(max(lengths), self.trials * max(lengths))
        settings = {"lengths": lengths, "tasks": tasks, "depths": self.depths, "trials": self.trials, "seed": self.seed}
        settings |= data.tokenizer_identity() | {"texts": filler.texts_hash}
        # Made once for all variants.
        essay = cache(partial(essay_of, data, filler))
        texts = cache(partial(texts_of, data, essay, self.trials, self.seed))
        parts = []
        for task in tasks:
            # The shortest texts are made at once, so that a lack of room is an error before any work.
            for twin in (False, True):
                texts(task, min(lengths), 0.0, twin)
            places: list[float | None] = [None]
            if task.startswith("niah"):
                places = [i / (self.depths - 1) for i in range(self.depths)]
            for depth in places:
                parts += [Part(length, partial(_run, texts, task, length, depth)) for length in lengths]
        return Plan("ruler", settings, parts)


def _run(
    texts: Callable[..., EvalSet], task: str, length: int, depth: float | None, scorer: Scorer
) -> list[PartResult]:
    # In the twin the same answer is wrong: its probability there is what chance and the wording give.
    asked = scorer(texts(task, length, depth or 0.0, False))
    twins = scorer(texts(task, length, depth or 0.0, True))
    return [asked.measured(length, baseline=twins.nats, task=task, depth=depth)]


def texts_of(
    data: Data, essay: Callable[[int], Sequence[str]], trials: int, seed: int, task: str, length: int, depth: float,
    twin: bool,
) -> EvalSet:  # fmt: skip
    """Return a text for each trial. Only the answer is scored; what follows it fills up the length.

    Args:
        essay: the lines in which the question of a trial is hidden.
    """
    # A causal network cannot see the padding on the right from the answer, so any token will do.
    x = torch.zeros(trials, length + 1, dtype=torch.int32)
    y = torch.full_like(x, IGNORE_INDEX)
    for trial in range(trials):
        lines = essay(trial)
        ids, n = question(task, data.prompt, length, (seed, trial), depth=depth, twin=twin, essay=lines)
        end = len(ids)
        x[trial, :end] = torch.tensor(ids)
        y[trial, end - n : end] = torch.tensor(ids[-n:])
    return EvalSet("ruler", length, trials, partial(_batch, x, y))


def essay_of(data: Data, filler: EvalSet, trial: int) -> tuple[str, ...]:
    """Return the lines of the text of `filler` for a trial."""
    number = trial % filler.n
    (ids,), _ = filler.batch(number, number + 1)
    # Ends of documents have no bytes. They are not text, and could not be encoded again.
    if data.token_bytes is not None:
        ids = ids[data.token_bytes[ids] > 0]
    return essay_lines(data.decode(ids.tolist()))


def _batch(x: torch.Tensor, y: torch.Tensor, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x[first:last, :-1].long(), y[first:last, 1:].long()
