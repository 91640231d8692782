"""Which tokens of the text are in a training sample, a validation window, a sequence of an eval set."""

import itertools

import numpy as np
import pytest
import torch
from corpora import prepared, write_corpus
from hypothesis import given
from hypothesis import strategies as st

from data.base import IGNORE_INDEX


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    return prepared(write_corpus(root / "corpus", documents=80), root / "cache", val_fraction=0.3)


def read_otherwise(source, **options):
    """The same corpus, with other options."""
    return prepared(None, source.cache_dir, files=source.files, val_fraction=0.3, **options)


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


def lines_of(name, number):
    return "".join(f"{name} line {i} of {number}\n" for i in range(number))


def write_files(folder, **lines):
    """A text file of so many lines for each name."""
    folder.mkdir()
    for name, number in lines.items():
        (folder / f"{name}.txt").write_text(lines_of(name, number))
    return folder


def test_texts_of_one_file_are_one_document(tmp_path):
    """Files are cut into documents, and documents into texts: the number of a text is that of its file."""
    folder = write_files(tmp_path / "files", aa=300, bb=20, cc=200, dd=10, ee=20)
    source = prepared(folder, tmp_path / "cache", document_bytes=1024, val_fraction=0.6)
    split = source.prepared["val"]
    assert len(split.files) == split.documents > len(set(split.files.tolist())) > 1
    parts = source.eval_sets([64, 128], target_tokens=8, sequences=10**6)
    names = [source.decode(row.tolist()).split("\n")[1][:2] for row in parts[1].batch(0, parts[1].n)[0]]
    assert parts[0].documents == parts[1].documents
    by_name = dict(zip(names, parts[0].documents, strict=True))
    assert len(by_name) == len(set(by_name.values())) > 1
    assert parts[0].documents == [by_name[name] for name in names]
    (part,) = source.eval_sets([128], target_tokens=8, sequences=5)
    assert len(part.documents) == 5
    assert source.fully_scored(128, 10**6).documents == parts[0].documents


def test_without_a_second_file_its_pieces_are_the_documents(tmp_path):
    source = prepared(
        write_files(tmp_path / "files", aa=2000), tmp_path / "cache", document_bytes=1024, val_fraction=0.4
    )
    split = source.prepared["val"]
    (part,) = source.eval_sets([128], target_tokens=8, sequences=10**6)
    assert split.files.tolist() == list(range(split.documents))
    assert len(set(part.documents)) == split.documents > 1
    assert part.n > split.documents
    alone = prepared(None, source.cache_dir, files=source.files, document_bytes=1024, val_fraction=1e-9)
    (part,) = alone.eval_sets([128], target_tokens=8, sequences=10**6)
    assert alone.prepared["val"].documents == 1
    assert part.n > 1
    assert part.documents is None  # one piece: each text for itself


def test_texts_of_other_documents_are_other_texts(tmp_path, source):
    """The same tokens from one file or from several: results of the one are none of the other."""
    joined = write_files(tmp_path / "joined", aa=300, bb=60)
    pieces = prepared(joined, tmp_path / "cache", document_bytes=1024, val_fraction=0.6)
    before = pieces.eval_sets([128], target_tokens=8, sequences=10**6)[0]
    files = pieces.prepared["val"].files
    files[:] = np.arange(len(files)) // 2
    after = pieces.eval_sets([128], target_tokens=8, sequences=10**6)[0]
    assert torch.equal(before.batch(0, 5)[0], after.batch(0, 5)[0])
    assert before.documents != after.documents
    assert before.texts_hash != after.texts_hash


def test_too_short_for_a_window_or_the_evaluation(source):
    longest = int(np.diff(source.prepared["val"].offsets).max()) - 1
    assert source.fully_scored(longest - 1, 4).n == 1
    for lengths in ([10, 9000], [longest]):
        match = rf"no validation document has {max(lengths) + 1:,} tokens.*the longest.*{longest:,}; lower"
        with pytest.raises(ValueError, match=match):
            eval_sets(source, lengths, 5)
    train = source.prepared["train"].tokens
    assert source.train_batch([0], train - 1, 0)[0].shape == (1, train - 1)
    with pytest.raises(ValueError, match=rf"train split has {train:,} tokens"):
        source.train_batch([0], train, 0)
    with pytest.raises(ValueError, match=r"0 documents from 1,000,000 tokens on, 0 tokens: too few tokens for a wi"):
        read_otherwise(source, lengths={0: 0.5, 10**6: 0.5}).train_batch([0], 50, 0)


@pytest.mark.parametrize(("options", "shares"), [
    ({"min_tokens": 900}, {900: 1.0}), ({"lengths": {200: 1, 1000: 3.0}}, {200: 0.25, 1000: 0.75}),
    ({"lengths": {0: 0.5, 700: 0.3, 1200: 0.2}, "min_tokens": 300}, {300: 0.5, 700: 0.3, 1200: 0.2}),
])  # fmt: skip
def test_windows_by_length_of_the_documents(source, options, shares):
    source, n = read_otherwise(source, **options), 200
    split = source.prepared["train"]
    stream, offsets = split.stream().tolist(), split.offsets.tolist()
    documents = [stream[a:b] for a, b in itertools.pairwise(offsets)]
    x, y = source.train_batch(range(n), 50, 3)
    assert torch.equal(x[:, 1:], y[:, :-1])
    left = x.tolist()
    for least, share in shares.items():
        longer = [other for other in shares if other > least]
        own = [t for d in documents if least < len(d) <= min(longer, default=10**9) for t in d]
        text = "".join(map(chr, own + own[:49]))
        windows = [window for window in left if "".join(map(chr, window)) in text]
        assert abs(len(windows) - n * share) <= 2
        left = [window for window in left if window not in windows]
    assert left == []
    kept = sum(len(d) > min(shares) for d in documents)
    said = source.describe(50)
    assert f"  {len(documents) - kept} shorter documents are left out of training" in said
    told = [line.split()[0] for line in said if " of the training windows: " in line]
    assert told == [f"{share:.0%}" for share in shares.values()]
    alone = torch.cat([source.train_batch([i], 50, 3)[0] for i in range(n)])
    assert torch.equal(alone, x)


def test_no_target_in_another_document(source):
    masked, end = read_otherwise(source, documents="mask"), source.encoder.eot
    assert (source.document_end, masked.document_end) == (None, end)
    for crossing, found in [
        (source.train_batch(range(300), 100, 0), masked.train_batch(range(300), 100, 0)),
        (source.validation(64, 10**6).batch(0, 50), masked.validation(64, 10**6).batch(0, 50)),
    ]:
        x, y = crossing
        assert (x == end).any()
        assert torch.equal(found[0], x)
        assert torch.equal(found[1], y.masked_fill(x == end, IGNORE_INDEX))


def test_the_share_of_windows_within_one_document(source):
    sizes = np.diff(source.prepared["train"].offsets)
    exact = np.maximum(0, sizes - 100 + 1).sum() / sizes.sum()  # of all windows of 100 tokens
    (said,) = [int(line.split()[1].rstrip("%")) for line in source.describe(100) if "within one document" in line]
    assert said == pytest.approx(100 * exact, abs=3)
