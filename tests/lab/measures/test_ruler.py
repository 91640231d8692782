"""RULER: questions that a few lines of independent code answer, and the scores of networks of known behaviour."""

import re
from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import build_gpt
from planted import results_of

from data import hf_tokenizer
from data.base import EvalSet
from data.text import TextFiles
from lab.measures.ruler import Ruler
from lab.measures.ruler_questions import TASKS, question
from model.generation import generate

SMALL = 160  # tokens of `words`: niah_single with one line of noise


def list_bytes(text: str) -> list[int]:
    return list(text.encode())


def needles(context: str, asked: str) -> set[str]:
    """The numbers of the key that is asked for."""
    key = re.findall(r"numbers? for (\w+) ", asked)[-1]
    return set(re.findall(rf"magic numbers for {key} is: (\d+)\.", context))


def variables(context: str, asked: str) -> set[str]:
    """The value that is asked for, and what it is assigned to in the order of the text."""
    found = set(re.findall(r"the value (\d+)", asked))
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", context):
        if source in found:
            found.add(name)
    return found


def most_common(n: int, context: str, asked: str) -> set[str]:
    words = Counter(re.findall(r"\b[a-z]{6}\b", context))
    return {word for word, _ in words.most_common(n)}


SOLVERS = {
    "niah_single": needles,
    "niah_multikey": needles,
    "niah_multivalue": needles,
    "vt": variables,
    "cwe": partial(most_common, 10),
    "fwe": partial(most_common, 3),
}


@pytest.mark.parametrize("length", [1300, 1301, 2000])
@pytest.mark.parametrize("task", TASKS)
def test_the_answer_follows_from_the_text_and_is_wrong_in_its_twin(task, length):
    """A twin asks the same of another text."""
    solve = SOLVERS[task]

    ids, n = question(task, list_bytes, length, (7, length))
    twin_ids, twin_n = question(task, list_bytes, length, (7, length), twin=True)

    answer = bytes(ids[-n:]).decode().strip()
    context, asked = bytes(ids[:-n]).decode().rsplit("\n", 1)
    twin, asked_of_twin = bytes(twin_ids[:-twin_n]).decode().rsplit("\n", 1)

    assert length - 90 < len(ids) <= length + 1  # one more line has 89 bytes
    assert answer in solve(context, asked)
    assert answer not in solve(twin, asked)
    assert answer not in asked
    assert asked_of_twin == asked
    assert twin_ids[-n:] == ids[-n:]


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_needle_lies_at_its_depth(depth):
    ids, _ = question("niah_single", list_bytes, 1300, (7, 0), depth=depth)
    _, *lines, _ = bytes(ids).decode().split("\n")
    is_needle = ["magic" in line for line in lines]

    assert is_needle.index(True) == round(depth * (len(lines) - 1))


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A source whose vocabulary was trained on the questions, so that most words are one token."""
    path = tmp_path_factory.mktemp("words") / "words.tiktoken"
    questions = [bytes(question(task, list_bytes, 3000, (0, 0))[0]).decode() for task in TASKS]
    hf_tokenizer.train(questions, 1000, path)
    source = TextFiles(files="none", tokenizer=str(path))
    source.prepared = {"val": SimpleNamespace(bytes=1, token_bytes=1)}
    essay = torch.tensor([source.encode("A sailor waits for rain.\nWho mends the coat?\n" * 40)])
    source.validation = lambda length, tokens: EvalSet("text", length, 1, lambda first, last: (essay, essay))
    return source


def measure(net, data, task, lengths=(SMALL, 2 * SMALL)):
    """The results of each depth, at the shorter of two lengths."""
    plan = Ruler(tasks=[task], depths=2, trials=3).plan(data, SimpleNamespace(lengths=[*lengths]))
    return results_of(plan, net, data.token_bytes)[::2]


@torch.no_grad()
def test_the_scores_of_ruler_are_those_of_generation(words):
    """Found by generating token by token; the gain from logits."""
    net = build_gpt("alibi", vocab_size=words.vocab_size, train_len=SMALL)

    def log_probability(ids, n):
        """Of the last n tokens."""
        log_p = net(torch.tensor([ids[:-1]])).log_softmax(-1)
        answer = torch.tensor(ids[-n:])[:, None]
        return log_p[0, -n:].gather(-1, answer).sum().item()

    results = measure(net, words, "niah_single")

    assert [result.depth for result in results] == [0.0, 1.0]

    for result in results:
        for trial in range(3):
            ask = partial(
                question,
                "niah_single",
                words.encode,
                SMALL,
                (0, trial),
                depth=result.depth,
            )
            ids, n = ask()
            generated = generate(net, torch.tensor([ids[:-n]]), n, temperature=0)
            is_right = [int(token) for token in generated] == ids[-n:]
            gain = log_probability(ids, n) - log_probability(*ask(twin=True))

            assert (result.errors[trial] == 0) == is_right
            assert result.baseline_nats[trial] - result.nats[trial] == pytest.approx(gain, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("task", TASKS)
def test_a_network_that_does_not_read_gains_nothing(task, words):
    """Without attention it predicts from the token before."""
    net = build_gpt("rope", vocab_size=words.vocab_size, train_len=SMALL, n_layer=1)
    with torch.no_grad():
        net.head.weight.mul_(100)
        net.blocks[0].attn.out.weight.zero_()
    for result in measure(net, words, task, lengths=(900, 1000)):
        np.testing.assert_allclose(result.nats, result.baseline_nats, atol=1e-3)
