"""Passkeys: the texts, and the scores of a model that retrieves, and of one that never looks."""

import base64
import copy
import io
import json
import math
import re
from itertools import product

import matplotlib.image
import numpy as np
import pytest
import torch
from conftest import build_gpt
from rich.console import Console

from data.text import TextFiles
from evaluation import lengths, retrieval
from evaluation.retrieval import Cell, Passkey, evaluate, heat_map, sequence, trial_scores

SENTENCES = {f" {who} {does} {when}." for who, does, when in product(*retrieval.FILLER)}
TEXT = re.compile(r"(.*) The key is( \d{5})\. Remember it\.(.*)\nWhat is the key\? The key is( \d{5})")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
LENGTH = 40  # tokens of `words`: the question and four or five sentences


def source(path, *more: str) -> TextFiles:
    """Text with a token for each word of ours, byte, and piece of `more`."""
    pieces = sorted({piece for text in SENTENCES for piece in re.findall(r" \w+", text)})
    pieces += [" key", " is", " Remember", " it", "What", " the", *more]
    ranks = [*(bytes([i]) for i in range(256)), *(piece.encode() for piece in pieces)]
    path.write_text("".join(f"{base64.b64encode(piece).decode()} {i}\n" for i, piece in enumerate(ranks)))
    return TextFiles(files="none", tokenizer=str(path))


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return source(tmp_path_factory.mktemp("words") / "words.tiktoken")


@pytest.fixture(scope="module")
def uneven(tmp_path_factory):
    """With tokens for some pairs of digits: keys have 4 to 6 tokens."""
    pairs = [f"{i}{j}" for i in range(10) for j in range(i)]
    return source(tmp_path_factory.mktemp("uneven") / "uneven.tiktoken", *pairs)


@pytest.fixture(scope="module")
def copier(words):
    """A GPT that learned to answer with the key at depth 0, and never saw another depth."""
    net = build_gpt("rope", vocab_size=words.vocab_size, train_len=LENGTH, n_layer=1, dim=64, n_head=1, n_kv_head=1)
    optimizer = torch.optim.AdamW(net.train().parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=200, pct_start=0.1)
    for step in range(200):
        made = [sequence(words.encode, 16 * step + i, 1, length=LENGTH, depth=0.0) for i in range(16)]
        tokens = torch.tensor([ids for ids, _ in made])
        targets = tokens[:, 1:].clone()
        for row, (_, n) in zip(targets, made, strict=True):
            row[:-n] = -100
        net.loss(tokens[:, :-1], targets).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return net.eval()


@pytest.mark.parametrize("length", [64, 101, 400])
@pytest.mark.parametrize("tokenizer", ["bytes", "uneven"])
def test_texts_hold_filler_and_one_key_at_its_depth(tokenizer, length, request):
    data = TextFiles(files="none") if tokenizer == "bytes" else request.getfixturevalue(tokenizer)
    for trial, depth, told in product(range(3), DEPTHS, (0, 1)):
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


def test_texts_are_the_seeds(uneven):
    made = [sequence(uneven.encode, trial, seed, length=90, depth=0.5) for seed in (0, 1) for trial in range(20)]
    assert made == [
        sequence(uneven.encode, trial, seed, length=90, depth=0.5) for seed in (0, 1) for trial in range(20)
    ]
    assert len({uneven.decode(ids) for ids, _ in made}) == 40
    assert len({n for _, n in made}) > 1  # keys of different numbers of tokens


def test_no_room_for_the_key(uneven):
    data = TextFiles(files="none")
    shortest = len(data.encode(retrieval.TOLD.format(key=" 12345") + retrieval.QUESTION + " 1234"))
    assert len(sequence(data.encode, 0, 0, length=shortest, depth=0.5)[0]) == shortest + 1
    with pytest.raises(ValueError, match=f"a text of {shortest - 1} tokens has no room .* which take {shortest}"):
        sequence(data.encode, 0, 0, length=shortest - 1, depth=0.5)


def brute_force(net, encode, trial: int, depth: float) -> tuple[bool, float]:
    """Found by generating token by token; the gain from float64 logits."""
    (own, n), (other, _) = (sequence(encode, trial, 0, length=LENGTH, depth=depth, told=told) for told in (0, 1))
    answer = torch.stack(list(net.generate(torch.tensor([own[:-n]]), n, temperature=0)), dim=1)
    exact = copy.deepcopy(net).double().requires_grad_(False)
    bits = [
        sum(float(exact(torch.tensor([ids[:-1]]))[0].log_softmax(-1)[i, ids[i]]) for i in range(-n, 0))
        for ids in (own, other)
    ]
    return answer[0].tolist() == own[-n:], (bits[0] - bits[1]) / math.log(2)


@pytest.mark.parametrize("name", ["trained", "alibi", "cope", "dynamic_ntk"])
def test_scores_are_those_of_generation(name, words, uneven, copier, monkeypatch):
    net, data = copier, words
    if name != "trained":
        net, data = build_gpt(name, vocab_size=uneven.vocab_size, train_len=LENGTH), uneven
    monkeypatch.setattr(lengths, "BATCH_TOKENS", 3 * LENGTH)  # 5 trials are 2 batches
    for depth in (0.0, 0.5):
        found, gains = trial_scores(net, data.encode, LENGTH, depth, 5)
        expected = [brute_force(net, data.encode, trial, depth) for trial in range(5)]
        assert found.tolist() == [right for right, _ in expected]
        np.testing.assert_allclose(gains, [gain for _, gain in expected], rtol=1e-4, atol=1e-4)


def test_what_was_learned_is_found_where_it_was_learned(words, copier):
    found, gains = trial_scores(copier, words.encode, LENGTH, 0.0, 40)
    assert found.all()
    assert gains.min() > math.log2(retrieval.KEYS)
    elsewhere, _ = trial_scores(copier, words.encode, LENGTH, 1.0, 40)
    assert not elsewhere.any()


def test_beliefs_about_keys_gain_nothing(words):
    """Without attention a token is predicted from the one before it: sure of keys, but not of the one it read."""
    net = build_gpt("rope", vocab_size=words.vocab_size, train_len=LENGTH)
    with torch.no_grad():
        net.head.weight.mul_(100)
        for block in net.blocks:
            block.attn.out.weight.zero_()
    found, gains = trial_scores(net, words.encode, LENGTH, 0.5, 20)
    assert not found.any()
    assert np.abs(gains).max() < 1e-4


def test_lengths_without_a_position_are_reported(words):
    said = []
    net = build_gpt("learned", vocab_size=words.vocab_size, train_len=LENGTH, pe={"scale": 2.0})
    options = dict(lengths=[LENGTH, 2 * LENGTH, 3 * LENGTH], depths=3, trials=2)
    cells, skipped = evaluate(net, words, label=str.upper, progress=said.append, **options)
    assert skipped == {"SCALE 1, AS TRAINED": [2 * LENGTH, 3 * LENGTH], "SCALE 2": [3 * LENGTH]}
    assert [(c.reading, c.length, c.ratio, c.depth) for c in cells[::3]] == [
        ("SCALE 1, AS TRAINED", LENGTH, 1, 0), ("SCALE 2", LENGTH, 1, 0), ("SCALE 2", 2 * LENGTH, 2, 0)
    ]  # fmt: skip
    assert [cell.depth for cell in cells[:3]] == [0, 0.5, 1]
    assert len(said) == 3
    with net.reading(lambda pe: pe.readings()[1]):
        gains = trial_scores(net, words.encode, 2 * LENGTH, 0.5, 2)[1]
    assert (cells[-2].gain, cells[-2].gain_error) == pytest.approx((gains.mean(), abs(gains[0] - gains[1]) / 2))
    with pytest.raises(ValueError, match="a text of 9 tokens has no room"):
        evaluate(net, words, progress=said.append, **options | {"lengths": [LENGTH, 9]})
    assert len(said) == 3  # no work was begun


def results() -> Passkey:
    cells = [
        Cell(reading=name, length=n, ratio=n / 256, depth=d, trials=20, exact=d, gain=n / 256 - d, gain_error=0.25)
        for name in ("as trained", "scale 4") for n in (256, 512) for d in (0.0, 0.5, 1.0) if n == 256 or name[0] == "s"
    ]  # fmt: skip
    fields = dict(run="r", encoding="rope", data="code", seed=0, train_len=256)
    return Passkey(**fields, cells=cells, skipped={"as trained": [512]})


def test_round_trip(tmp_path):
    results().save(tmp_path / "passkey.json")
    assert Passkey.load(tmp_path / "passkey.json") == results()
    (tmp_path / "passkey.json").write_text(json.dumps(results().model_dump() | {"version": 2}))
    with pytest.raises(ValueError, match=r"passkey\.json is not a results file of version 1: version"):
        Passkey.load(tmp_path / "passkey.json")


def test_table():
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(results().table())
    lines = console.export_text().splitlines()
    assert ["512", "2", "0.50", "no position", "50% +1.50 ± 0.25"] in [re.split(r"\s*│\s*", row)[1:-1] for row in lines]


def test_heat_map(tmp_path):
    heat_map(results(), tmp_path / "figures" / "passkey.png")
    height, width, _ = matplotlib.image.imread(tmp_path / "figures" / "passkey.png").shape
    assert height > 400
    assert width > 400
