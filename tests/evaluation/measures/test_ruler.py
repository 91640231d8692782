"""RULER: questions that a few lines of independent code answer, and the scores of networks of known behaviour."""

import base64
import copy
import re
from collections import Counter

import numpy as np
import pytest
import torch
from conftest import build_gpt
from scipy.special import zeta

from data.ruler import ESSAYS, NOISE, TASKS, essay_lines, question
from data.tasks.recall import Recall
from data.text import TextFiles
from evaluation import scoring
from evaluation.measures.ruler import ruler as plan
from evaluation.scoring import Scorer
from model.generation import generate

ESSAY = ("A sailor waits for rain.", "def knots(rope):", "Who mends the coat?")
OPTIONS = {"depths": 2, "trials": 3, "seed": 0}
SMALL = 160  # tokens of `words`: niah_single with one line of noise


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A source with a token for each word of the sentences, some pairs of digits, and each byte."""
    texts = [NOISE, *(bytes(question(task, list_bytes, 3000, (0, 0))[0]).decode() for task in TASKS)]
    pieces = sorted({piece for text in texts for piece in re.findall(r" ?[A-Za-z]+", text)})
    pieces += [f"{i}{j}" for i in range(10) for j in range(i)]
    path = tmp_path_factory.mktemp("words") / "words.tiktoken"
    ranks = [*(bytes([i]) for i in range(256)), *(piece.encode() for piece in pieces if len(piece) > 1)]
    path.write_text("".join(f"{base64.b64encode(piece).decode()} {i}\n" for i, piece in enumerate(ranks)))
    source = TextFiles(files="none", tokenizer=str(path))
    essays = torch.tensor([source.encode("\n".join(ESSAY * 40))])
    source.validation = lambda length, tokens: scoring.EvalSet("text", 1000, 1, lambda a, b: (essays, essays))
    return source


def list_bytes(text: str) -> list[int]:
    return list(text.encode())


def solve(text: str) -> tuple[set[str], list[str]]:
    """All answers to the question of a text, and those that it gives at its end; its sizes are those of RULER."""
    context, asked = text.rsplit("\n", 1)
    given = re.split(r"text (?:is|are)\b|(?:they|words|list) are:", asked)[-1]
    given = re.findall(r"[A-Za-z]+|\d{7}", given)
    if "magic" in asked:
        key = re.findall(r"numbers? for (\w+) ", asked)[-1]
        needles = re.findall(r"^One of the special magic numbers for (\w+) is: (\d{7})\.$", context, re.MULTILINE)
        assert len(set(needles)) == len(needles) in (1, 4)
        return {number for name, number in needles if name == key}, given
    if "VAR" in context:
        value, values = re.findall(r"the value (\d{5})", asked)[0], {}
        for name, source in re.findall(r"^VAR ([A-Z]{5}) = (?:VAR )?(\w{5})$", context, re.MULTILINE):
            values[name] = values.get(source, source)  # the chain stands in its order
        return {name for name, own in values.items() if own == value}, given
    if "numbered" in context:
        numbers, listed = zip(*re.findall(r"(\d+)\. (\w{6})", context), strict=True)
        assert list(map(int, numbers)) == [*range(1, len(listed) + 1)]
        counts = Counter(Counter(listed).values())
        assert counts.keys() == {30, 3} or counts.keys() == {6, 1}
        assert counts[max(counts)] == 10
        return {word for word, _ in Counter(listed).most_common(10)}, given
    coded = Counter(re.findall(r"(?<= )(?:\.\.\.|[a-z]{6})(?= |$)", context.split("coded words.")[1]))
    counts = [count for _, count in coded.most_common()]
    likely = range(int(counts[0] * zeta(2)), int((counts[0] + 1) * zeta(2)) + 2)  # words drawn in all
    ranks = np.arange(1, len(counts) + 1.0) ** -2 / zeta(2)
    assert any(counts == (n * ranks).astype(int).tolist() for n in likely)
    return {word for word, _ in coded.most_common(4)} - {"..."}, given


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("tokenizer", ["bytes", "words"])
def test_questions_have_one_answer(task, tokenizer, request):
    data = TextFiles(files="none") if tokenizer == "bytes" else request.getfixturevalue("words")
    for length, trial, depth in ((1300, 0, 0.0), (1301, 1, 0.5), (8192 if task == "cwe" else 2000, 2, 1.0)):
        texts = []
        for twin in (False, True):
            ids, n = question(task, data.encode, length, (7, trial), depth=depth, twin=twin, essay=ESSAY)
            text, answer = data.decode(ids[:-n]), data.decode(ids[-n:])
            assert re.fullmatch(r" \w+", answer)
            assert length + 1 - len(data.encode(f"\n{NOISE}")) < len(ids) <= length + 1
            found, given = solve(text)
            assert (found - {*given} == {answer.strip()}) == (not twin)
            assert len(given) == {"niah_multivalue": 3, "vt": 4, "cwe": 9, "fwe": 2}.get(task, 0)
            assert twin or len(found) == len(given) + 1
            texts.append((text, answer))
            again = question(task, data.encode, length, (7, trial), depth=depth, twin=twin, essay=ESSAY)
            assert again == (ids, n) != question(task, data.encode, length, (8, trial), twin=twin, essay=ESSAY)
        (own, answer), (other, same) = texts
        assert answer == same
        assert own.rsplit("\n", 1)[1] == other.rsplit("\n", 1)[1]  # the question
        if task.startswith("niah"):
            lines = own.split("\n")[1:-1]
            filler = [i for i, line in enumerate(lines) if "magic" not in line]
            assert {lines[i] for i in filler} == ({*ESSAY} if task in ESSAYS else {NOISE})
            (place,) = [i for i, line in enumerate(lines) if line.endswith(f":{answer}.")]
            assert sum(i < place for i in filler) == round(depth * len(filler))


def test_essays_are_whole_sentences_and_lines():
    text = "cut off. A sailor waits.  Who?\n\n  def knots():\n    return 2.5\n" + "rope " * 100
    rest = "rope " * 79 + "rope", "rope " * 19 + "rope"
    assert essay_lines(text) == ("A sailor waits.", "Who?", "  def knots():", "    return 2.5", *rest)
    assert essay_lines("") == (NOISE,)


def measured(net, data, task: str, lengths=(SMALL, 2 * SMALL)):
    """Of each depth, at the shorter of two lengths."""
    found = plan(data, lengths, tasks=[task], **OPTIONS)
    assert [job.length for job in found.jobs] == [*lengths] * (len(found.jobs) // 2)
    return [m for job in found.jobs[::2] for m in job.run(Scorer(net, data.token_bytes))]


def test_scores_are_those_of_generation(words, monkeypatch):
    """Found by generating token by token; the gain from float64 logits."""
    net = build_gpt("alibi", vocab_size=words.vocab_size, train_len=SMALL)
    monkeypatch.setitem(scoring.BATCH_TOKENS, "cpu", 2 * SMALL)  # 3 trials are 2 batches
    exact = copy.deepcopy(net).double().requires_grad_(False)
    for m, depth in zip(measured(net, words, "niah_single"), (0.0, 1.0), strict=True):
        assert (m.task, m.depth, m.length, len(m.nats)) == ("niah_single", depth, SMALL, 3)
        for trial in range(3):
            both = [
                question("niah_single", words.encode, SMALL, (0, trial), depth=depth, twin=x) for x in (False, True)
            ]
            ids, n = both[0]
            answer = [int(token) for token in generate(net, torch.tensor([ids[:-n]]), n, temperature=0)]
            assert (m.errors[trial] == 0) == (answer == ids[-n:])
            own, other = (
                sum(float(exact(torch.tensor([ids[:-1]]))[0].log_softmax(-1)[i, ids[i]]) for i in range(-n, 0))
                for ids, n in both
            )
            assert m.baseline_nats[trial] - m.nats[trial] == pytest.approx(own - other, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("task", TASKS)
def test_who_answers_right_finds_all_and_who_does_not_read_gains_nothing(task, words, monkeypatch):
    """A network without attention predicts from the token before; a stub for one solves the text that it reads."""
    lengths = (900, 1000)
    net = build_gpt("rope", vocab_size=words.vocab_size, train_len=SMALL, n_layer=1)
    with torch.no_grad():
        net.head.weight.mul_(100)
        for block in net.blocks:
            block.attn.out.weight.zero_()
    for m in measured(net, words, task, lengths):
        assert np.abs(np.subtract(m.nats, m.baseline_nats)).max() < 1e-3

    def solving(net, x, y):
        losses, wrong = torch.zeros(y.shape), torch.zeros(y.shape, dtype=torch.bool)
        for row, (ids, targets) in enumerate(zip(x.tolist(), y.tolist(), strict=True)):
            scored = [i for i, target in enumerate(targets) if target >= 0]
            found, given = solve(words.decode(ids[: scored[0] + 1]))
            answers = [words.encode(f" {answer}") for answer in found - {*given}]
            right = [targets[i] for i in scored] in answers
            losses[row, scored], wrong[row, scored] = (0.25 if right else 2.25), not right
        return losses, wrong

    monkeypatch.setattr(scoring, "token_losses", solving)
    for m in measured(net, words, task, lengths):
        assert (m.errors, len(m.nats)) == ([0, 0, 0], 3)
        assert np.subtract(m.baseline_nats, m.nats).tolist() == [2.0 * n for n in m.tokens]


def test_what_cannot_be_asked_is_found_before_any_work():
    data, letters = TextFiles(files="none"), torch.full((1, 1000), ord("a"))
    data.validation = lambda length, tokens: scoring.EvalSet("text", 1000, 1, lambda a, b: (letters, letters))
    with pytest.raises(ValueError, match=r"a text of 400 tokens has no room for vt, which takes (\d+)") as error:
        plan(data, [2000, 400], tasks=["vt"], **OPTIONS)
    least = int(re.findall(r"takes (\d+)", str(error.value))[0])
    assert len(question("vt", data.encode, least, (0, 0))[0]) == least + 1
    with pytest.raises(ValueError, match="ruler needs text, and this run was trained on the task recall"):
        plan(Recall(), [2000], tasks=["vt"], **OPTIONS)
