"""RULER: questions that a few lines of independent code answer, and the scores of networks of known behaviour."""

import copy
import re
from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import build_gpt
from planted import results_of
from scipy.special import zeta

from data import hf_tokenizer
from data.tasks.recall import Recall
from data.text import TextFiles
from lab.measures.ruler import Ruler
from lab.measures.ruler_questions import ESSAYS, NOISE, TASKS, essay_lines, question
from model.generation import generate
from ropewalk.evaluation import scoring

ESSAY = ("A sailor waits for rain.", "def knots(rope):", "Who mends the coat?")
SMALL = 160  # tokens of `words`: niah_single with one line of noise


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A source whose vocabulary was trained on the questions, so that most words are one token."""
    path = tmp_path_factory.mktemp("words") / "words.tiktoken"
    questions = [bytes(question(task, list_bytes, 3000, (0, 0))[0]).decode() for task in TASKS]
    hf_tokenizer.train(questions, 1000, path)

    source = TextFiles(files="none", tokenizer=str(path))
    essays = source.encode("\n".join(ESSAY * 40))
    source.validation = validation_of(essays)
    return source


def validation_of(ids):
    """In the place of a source's `validation`: the text of `ids`, from which essays are taken."""
    x = torch.tensor([ids])
    return lambda length, tokens: scoring.EvalSet(
        "text",
        1000,
        1,
        lambda start, stop: (x, x),
    )


def list_bytes(text: str) -> list[int]:
    return list(text.encode())


def solve(text: str) -> tuple[set[str], list[str]]:
    """All answers to the question of a text, and those that it gives at its end; its sizes are those of RULER."""
    context, asked = text.rsplit("\n", 1)
    ending = re.split(r"text (?:is|are)\b|(?:they|words|list) are:", asked)[-1]
    given = re.findall(r"[A-Za-z]+|\d{7}", ending)
    if "magic" in asked:
        return solve_needles(context, asked), given
    if "VAR" in context:
        return solve_variables(context, asked), given
    if "numbered" in context:
        return solve_common_words(context), given
    return solve_frequent_words(context), given


def solve_needles(context: str, asked: str) -> set[str]:
    key = re.findall(r"numbers? for (\w+) ", asked)[-1]
    needles = re.findall(r"^One of the special magic numbers for (\w+) is: (\d{7})\.$", context, re.MULTILINE)
    assert len(set(needles)) == len(needles) in (1, 4)
    return {number for name, number in needles if name == key}


def solve_variables(context: str, asked: str) -> set[str]:
    value_asked, *_ = re.findall(r"the value (\d{5})", asked)
    values = {}
    for name, source in re.findall(r"^VAR ([A-Z]{5}) = (?:VAR )?(\w{5})$", context, re.MULTILINE):
        values[name] = values.get(source, source)  # the chain stands in its order
    return {name for name, value in values.items() if value == value_asked}


def solve_common_words(context: str) -> set[str]:
    """The ten words of a numbered list that come most often: 30 times where others come 3 times, or 6 and 1."""
    words = Counter(re.findall(r"\d+\. (\w{6})", context))
    common = dict(words.most_common(10))
    others = words - Counter(common)
    assert {*common.values()} | {*others.values()} in ({30, 3}, {6, 1})
    assert max(others.values()) < min(common.values()) == max(common.values())
    return {*common}


def solve_frequent_words(context: str) -> set[str]:
    """The three words that come most often but for "...": word r of n comes n / (zeta(2) r^2) times, rounded down."""
    words = re.findall(r"(?<= )(?:\.\.\.|[a-z]{6})(?= |$)", context.split("coded words.")[1])
    coded = Counter(words).most_common()
    counts = [count for _, count in coded]
    share_of_rank = 1 / (zeta(2) * np.arange(1, len(counts) + 1) ** 2)
    # How many were drawn in all, as the most frequent one tells.
    least = int(counts[0] / share_of_rank[0])
    most = int((counts[0] + 1) / share_of_rank[0])
    expected = [(n * share_of_rank).astype(int).tolist() for n in range(least, most + 1)]
    assert counts in expected
    return {word for word, _ in coded[:4]} - {"..."}


# Answers that stand in the question; no other task has any.
GIVEN = {"niah_multivalue": 3, "vt": 4, "cwe": 9, "fwe": 2}


@pytest.fixture(params=["bytes", "words"])
def data(request):
    return TextFiles(files="none") if request.param == "bytes" else request.getfixturevalue("words")


def asked(data, task, length, trial, depth, twin=False):
    """A question of `length` tokens as text, its answer, and how many tokens both have."""
    ids, n = question(
        task,
        data.encode,
        length,
        (7, trial),
        depth=depth,
        twin=twin,
        essay=ESSAY,
    )
    text = data.decode(ids[:-n])
    answer = data.decode(ids[-n:])
    return text, answer, len(ids)


trials = pytest.mark.parametrize(
    ("length", "trial", "depth"),
    [
        (1300, 0, 0.0),
        (1301, 1, 0.5),
        (2000, 2, 1.0),
    ],
)


@trials
@pytest.mark.parametrize("task", TASKS)
def test_a_question_has_one_answer_which_is_wrong_in_its_twin(task, data, length, trial, depth):
    """A twin asks the same of another text."""
    text, answer, n_tokens = asked(data, task, length, trial, depth)
    twin, twin_answer, _ = asked(data, task, length, trial, depth, twin=True)
    one_more_line = len(data.encode(f"\n{NOISE}"))
    solutions, given = solve(text)
    of_twin, given_in_twin = solve(twin)

    assert length + 1 - one_more_line < n_tokens <= length + 1
    assert re.fullmatch(r" \w+", answer)
    assert solutions - {*given} == {answer.strip()}
    assert len(given) == len(solutions) - 1 == GIVEN.get(task, 0)

    assert twin_answer == answer
    assert twin.splitlines()[-1] == text.splitlines()[-1]  # the question
    assert of_twin - {*given_in_twin} != {answer.strip()}


@trials
@pytest.mark.parametrize("task", [task for task in TASKS if task.startswith("niah")])
def test_a_needle_lies_at_its_depth(task, data, length, trial, depth):
    text, answer, _ = asked(data, task, length, trial, depth)
    lines = text.split("\n")[1:-1]
    before, _ = "\n".join(lines).split(f":{answer}.")
    filler = [line for line in lines if "magic" not in line]
    n_before = sum("magic" not in line for line in before.split("\n"))

    assert set(filler) == set(ESSAY if task in ESSAYS else [NOISE])
    assert n_before == round(depth * len(filler))


def test_questions_are_those_of_their_seed():
    first, again, other = (question("vt", list_bytes, 1300, (seed, 0)) for seed in (7, 7, 8))
    assert first == again != other


def test_essays_are_whole_sentences_and_lines():
    text = "cut off. A sailor waits.  Who?\n\n  def knots():\n    return 2.5\n" + "rope " * 100
    wrapped = ("rope " * 79 + "rope", "rope " * 19 + "rope")

    assert essay_lines(text) == (
        "A sailor waits.",
        "Who?",
        "  def knots():",
        "    return 2.5",
        *wrapped,
    )
    assert essay_lines("") == (NOISE,)


def measure(net, data, task, lengths=(SMALL, 2 * SMALL)):
    """The results of each depth, at the shorter of two lengths."""
    ruler = Ruler(tasks=[task], depths=2, trials=3)
    plan = ruler.plan(data, SimpleNamespace(lengths=[*lengths]))
    results = results_of(plan, net, data.token_bytes)
    assert [result.length for result in results] == [*lengths] * (len(results) // 2)
    return results[::2]


def test_the_scores_of_ruler_are_those_of_generation(words, monkeypatch):
    """Found by generating token by token; the gain from float64 logits."""
    net = build_gpt("alibi", vocab_size=words.vocab_size, train_len=SMALL)
    monkeypatch.setitem(scoring.BATCH_TOKENS, "cpu", 2 * SMALL)  # 3 trials are 2 batches
    exact_net = copy.deepcopy(net).double().requires_grad_(False)

    def log_probability(ids, n):
        """Of the last n tokens."""
        log_p = exact_net(torch.tensor([ids[:-1]])).log_softmax(-1)
        answer = torch.tensor(ids[-n:])[:, None]
        return log_p[0, -n:].gather(-1, answer).sum().item()

    results = measure(net, words, "niah_single")

    assert [result.depth for result in results] == [0.0, 1.0]

    for result in results:
        assert (result.task, len(result.nats)) == ("niah_single", 3)
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
            assert result.baseline_nats[trial] - result.nats[trial] == pytest.approx(gain, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("task", TASKS)
def test_a_network_that_does_not_read_gains_nothing(task, words):
    """Without attention it predicts from the token before."""
    net = build_gpt("rope", vocab_size=words.vocab_size, train_len=SMALL, n_layer=1)
    with torch.no_grad():
        net.head.weight.mul_(100)
        net.blocks[0].attn.out.weight.zero_()
    for result in measure(net, words, task, lengths=(900, 1000)):
        np.testing.assert_allclose(result.nats, result.baseline_nats, atol=1e-3)


def test_what_cannot_be_asked_is_found_before_any_work():
    data = TextFiles(files="none")
    data.validation = validation_of([ord("a")] * 1000)

    with pytest.raises(ValueError, match=r"a text of 400 tokens has no room for vt, which takes (\d+)") as error:
        Ruler(tasks=["vt"]).plan(data, SimpleNamespace(lengths=[400, 2000]))

    least = int(re.findall(r"takes (\d+)", str(error.value))[0])
    ids, _ = question("vt", data.encode, least, (0, 0))

    assert len(ids) == least + 1
    assert Ruler().plan(Recall(), SimpleNamespace(lengths=[2000])) is None
