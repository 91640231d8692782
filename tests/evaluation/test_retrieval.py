"""Passkeys: the texts, and the scores of a model that retrieves, and of one that never looks."""

import base64
import copy
import math
import re
from itertools import product

import numpy as np
import pytest
import torch
from conftest import build_gpt

from data.text import TextFiles
from evaluation import retrieval, scoring
from evaluation.retrieval import passkeys as plan
from evaluation.retrieval import sequence
from evaluation.scoring import Scorer
from model.generation import generate

SENTENCES = {f" {who} {does} {when}." for who, does, when in product(*retrieval.FILLER)}
TEXT = re.compile(r"(.*) The key is( \d{5})\. Remember it\.(.*)\nWhat is the key\? The key is( \d{5})")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
LENGTH = 40  # tokens of `words`: the question and four or five sentences


def source(path, *more: str) -> TextFiles:
    """Text with a token for each word of ours, byte, and piece of `more`."""
    pieces = sorted({piece for text in SENTENCES for piece in re.findall(r" \w+", text)})
    pieces += [" key", " is", " Remember", " it", "What", " the", *more]
    ranks = [*(bytes([i]) for i in range(256)), *(piece.encode() for piece in dict.fromkeys(pieces))]
    path.write_text("".join(f"{base64.b64encode(piece).decode()} {i}\n" for i, piece in enumerate(ranks)))
    return TextFiles(files="none", tokenizer=str(path))


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """With tokens for some pairs of digits: keys have 4 to 6 tokens."""
    pairs = [f"{i}{j}" for i in range(10) for j in range(i)]
    return source(tmp_path_factory.mktemp("uneven") / "uneven.tiktoken", *pairs)


def scores(net, data, depth: float, trials: int) -> tuple[np.ndarray, np.ndarray]:
    """Whether each key is found, and the gain in bits, at one of the depths 0, 0.5 and 1."""
    found = plan(data, [LENGTH, 2 * LENGTH], depths=3, trials=trials)
    assert [job.length for job in found.jobs] == [LENGTH, 2 * LENGTH] * 3  # at each of the depths
    (m,) = found.jobs[round(4 * depth)].run(Scorer(net, data.token_bytes))
    assert (m.name, m.length, len(m.nats)) == (f"depth {depth:.2f}", LENGTH, trials)
    return np.equal(m.errors, 0), np.subtract(m.baseline_nats, m.nats) / math.log(2)


@pytest.mark.parametrize(("tokenizer", "length"), [("bytes", 101), ("uneven", 64)])
def test_texts_hold_filler_and_one_key_at_its_depth(tokenizer, length, request):
    data = TextFiles(files="none") if tokenizer == "bytes" else request.getfixturevalue(tokenizer)
    for trial, depth, told in product(range(2), DEPTHS, (0, 1)):
        ids, n = sequence(data.encode, trial, 3, length=length, depth=depth, told=told)
        assert len(ids) == length + 1
        match = TEXT.fullmatch(data.decode(ids))
        assert match is not None
        before, key, after, asked = match.groups()
        assert data.decode(ids[-n:]) == asked
        assert (key == asked) == (told == 0)
        fragment, *sentences = re.findall(r"[^.]*\.", before + after) or [""]
        assert "".join([fragment, *sentences]) == before + after
        assert set(sentences) <= SENTENCES
        assert any(sentence.endswith(fragment) for sentence in SENTENCES)
        assert before == "" or before.endswith(".")  # between sentences, at the end of one that is nearest
        tokens_before, tokens = len(data.encode(before)), len(data.encode(before)) + len(data.encode(after))
        assert abs(tokens_before - depth * tokens) <= max(len(data.encode(sentence)) for sentence in SENTENCES) / 2
        assert depth > 0 or before == ""
        assert depth < 1 or after == ""


def test_no_room_for_the_key_is_found_before_any_work():
    data = TextFiles(files="none")
    shortest = len(data.encode(retrieval.TOLD.format(key=" 12345") + retrieval.QUESTION + " 1234"))
    assert len(sequence(data.encode, 0, 0, length=shortest, depth=0.5)[0]) == shortest + 1
    with pytest.raises(ValueError, match=f"a text of {shortest - 1} tokens has no room .* which take {shortest}"):
        plan(data, [100, shortest - 1])


def brute_force(net, encode, trial: int, depth: float) -> tuple[bool, float]:
    """Found by generating token by token; the gain from float64 logits."""
    (own, n), (other, _) = (sequence(encode, trial, 0, length=LENGTH, depth=depth, told=told) for told in (0, 1))
    answer = [int(token) for token in generate(net, torch.tensor([own[:-n]]), n, temperature=0)]
    exact = copy.deepcopy(net).double().requires_grad_(False)
    bits = [
        sum(float(exact(torch.tensor([ids[:-1]]))[0].log_softmax(-1)[i, ids[i]]) for i in range(-n, 0))
        for ids in (own, other)
    ]
    return answer == own[-n:], (bits[0] - bits[1]) / math.log(2)


@pytest.mark.parametrize("name", ["alibi", "cope", "dynamic_ntk"])
def test_scores_are_those_of_generation(name, uneven, monkeypatch):
    net, data = build_gpt(name, vocab_size=uneven.vocab_size, train_len=LENGTH), uneven
    monkeypatch.setitem(scoring.BATCH_TOKENS, "cpu", 3 * LENGTH)  # 5 trials are 2 batches
    for depth in (0.0, 0.5):
        found, gains = scores(net, data, depth, 5)
        expected = [brute_force(net, data.encode, trial, depth) for trial in range(5)]
        assert found.tolist() == [right for right, _ in expected]
        np.testing.assert_allclose(gains, [gain for _, gain in expected], rtol=1e-4, atol=1e-4)


def test_beliefs_about_keys_gain_nothing(tmp_path):
    """Without attention a token is predicted from the one before it: sure of keys, but not of the one it read."""
    words = source(tmp_path / "words.tiktoken")
    net = build_gpt("rope", vocab_size=words.vocab_size, train_len=LENGTH)
    with torch.no_grad():
        net.head.weight.mul_(100)
        for block in net.blocks:
            block.attn.out.weight.zero_()
    found, gains = scores(net, words, 0.5, 20)
    assert not found.any()
    assert np.abs(gains).max() < 1e-4
