"""Which tokens of the text are in a training sample, a validation window, a sequence of an eval set."""

import itertools

import numpy as np
import pytest
import torch
from corpora import text_files, write_corpus
from hypothesis import given, settings
from hypothesis import strategies as st

from data import IGNORE_INDEX


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    source = text_files(write_corpus(root / "corpus", documents=80), root / "cache", val_fraction=0.3)
    source.prepare()
    return source


def places(windows, tokens):
    """Where each window stands in `tokens`: the texts are random enough for one place."""
    text, *wanted = ("".join(map(chr, ids)) for ids in (tokens, *windows))
    assert all(text.count(window) == 1 for window in wanted)
    return [text.find(window) for window in wanted]


@pytest.mark.parametrize("length", [100, 333])
def test_an_epoch_has_each_token_once(source, length):
    stream = source.prepared["train"].stream().tolist()
    windows = len(stream) // length
    epochs = []
    for epoch in (0, 1):
        x, y = source.train_batch(range(epoch * windows, (epoch + 1) * windows), length, 7)
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(x[:, 1:], y[:, :-1])
        starts = places(x.tolist(), stream + stream[: length - 1])
        assert y[:, -1].tolist() == [stream[(start + length) % len(stream)] for start in starts]
        seen = {(start + t) % len(stream) for start in starts for t in range(length)}
        assert len(seen) == windows * length
        epochs.append(starts)
    assert set(epochs[0]) != set(epochs[1])  # cut at other places, not only in another order
    assert sorted(epochs[0]) != epochs[0]
    assert not torch.equal(source.train_batch([0], length, 7)[0], source.train_batch([0], length, 8)[0])


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**15), min_size=1, max_size=8), st.integers(0, 2**32))
def test_a_sample_depends_on_its_index_alone(source, indices, seed):
    together = torch.stack(source.train_batch(indices, 64, seed))
    alone = [torch.stack(source.train_batch([index], 64, seed)) for index in indices]
    assert torch.equal(together, torch.cat(alone, dim=1))


def test_validation_has_each_target_once(source):
    stream = source.prepared["val"].stream().tolist()
    whole = source.validation(64, 10**9)
    x, y = whole.batch(0, whole.n)
    assert (whole.name, whole.length, whole.n) == ("text", 64, (len(stream) - 1) // 64)
    assert y.flatten().tolist() == stream[1 : whole.n * 64 + 1]
    assert torch.equal(x[:, 1:], y[:, :-1])
    part = source.validation(64, 5 * 64 + 10)  # fewer are spread over the split
    assert part.n == 5
    assert torch.equal(part.batch(0, 5)[1], y[[i * whole.n // 5 for i in range(5)]])
    assert source.validation(64, 1).n == 1


LENGTHS, TARGETS = [32, 50, 200], 20


def eval_sets(source, lengths=LENGTHS, target_tokens=TARGETS, sequences=12):
    return source.eval_sets(lengths, target_tokens=target_tokens, sequences=sequences)


def test_eval_sets_share_their_targets(source):
    parts = eval_sets(source)
    whole = parts[-1].batch(0, 12)
    assert [(p.name, p.length, p.n) for p in parts] == [("text", n, 12) for n in LENGTHS]
    for part in parts:
        x, y = part.batch(0, part.n)
        assert torch.equal(x, whole[0][:, -part.length :])
        assert torch.equal(y[:, -TARGETS:], whole[1][:, -TARGETS:])
        assert (y[:, :-TARGETS] == IGNORE_INDEX).all()
        assert (y[:, -TARGETS:] != IGNORE_INDEX).all()
        assert torch.equal(x[:, 1 - TARGETS :], y[:, -TARGETS:-1])
        alone = [torch.stack(part.batch(i, i + 1)) for i in range(part.n)]
        assert torch.equal(torch.cat(alone, dim=1), torch.stack((x, y)))


def test_what_identifies_the_texts(source):
    """Equal exactly where sequence i scores the same tokens: it depends on the longest length, not on the others."""
    base, (alone,) = eval_sets(source), eval_sets(source, [200])
    assert {part.texts_hash for part in base} == {alone.texts_hash}
    assert torch.equal(alone.batch(0, 12)[1][:, -TARGETS:], base[0].batch(0, 12)[1][:, -TARGETS:])
    others = [eval_sets(source, [32, 100]), eval_sets(source, target_tokens=19), eval_sets(source, sequences=11)]
    others.append([source.validation(64, 640), source.validation(50, 640)])
    assert len({alone.texts_hash, *(part.texts_hash for parts in others for part in parts)}) == 6


def test_segments_do_not_overlap_and_come_from_all_documents(source):
    stream, offsets = source.prepared["val"].stream().tolist(), source.prepared["val"].offsets.tolist()
    part = source.fully_scored(200, 10**6)
    starts = places(part.batch(0, part.n)[0].tolist(), stream)
    assert all(abs(a - b) >= 200 for a in starts for b in starts if a != b)
    owner = [max(d for d, begin in enumerate(offsets) if begin <= start) for start in starts]
    assert all(start + 200 < offsets[d + 1] - 1 for start, d in zip(starts, owner, strict=True))  # the last target too
    segments = [(b - a - 2) // 200 for a, b in itertools.pairwise(offsets)]
    assert sorted(owner) == sorted(d for d, n in enumerate(segments) for _ in range(n))
    turns = [owner[:i].count(d) for i, d in enumerate(owner)]
    assert turns == sorted(turns)
    assert turns[-1] > 0


def test_documents_too_short_for_the_evaluation(source):
    longest = int(np.diff(source.prepared["val"].offsets).max()) - 1
    assert source.fully_scored(longest - 1, 4).n == 1
    for lengths in ([10, 9000], [longest]):
        match = rf"no validation document has {max(lengths) + 1:,} tokens.*the longest.*{longest:,}; lower"
        with pytest.raises(ValueError, match=match):
            eval_sets(source, lengths, 5)


def test_a_corpus_too_short_for_a_window(source):
    train = source.prepared["train"].tokens
    assert source.train_batch([0], train - 1, 0)[0].shape == (1, train - 1)
    with pytest.raises(ValueError, match=rf"train split has {train:,} tokens"):
        source.train_batch([0], train, 0)
