"""Which tokens of the text are in a training sample, a validation window, a sequence of an eval set."""

import numpy as np
import pytest
import torch
from corpora import prepared, write_corpus

from data.base import IGNORE_INDEX
from data.tasks.markov import Markov

EVERYTHING = 10**9  # more tokens than any split has
STARTS = [48824, 38324, 40424, 53655]  # tokens, of windows 0, 1, 2 and a million


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    root = tmp_path_factory.mktemp("text")
    corpus = write_corpus(root / "corpus", documents=80)
    return prepared(corpus, root / "cache", val_fraction=0.3)


def read_otherwise(source, **options):
    """The same corpus, with other options."""
    return prepared(None, source.cache_dir, files=source.files, val_fraction=0.3, **options)


def as_text(ids):
    """One character for each token, so that windows can be looked for as strings."""
    return "".join(map(chr, ids))


def places(windows, tokens):
    """The start of each window in `tokens`, which is random enough for a single one."""
    text = as_text(tokens)
    starts = []
    for window in map(as_text, windows):
        assert text.count(window) == 1
        starts.append(text.find(window))
    return starts


def documents_in(split):
    """The tokens of each document, its last one the end of the document."""
    stream = split.stream()
    return [document.tolist() for document in np.split(stream, split.offsets[1:-1])]


@pytest.mark.parametrize("length", [100, 333])
def test_an_epoch_has_each_token_once(source, length):
    stream = source.prepared["train"].stream()
    n = len(stream) // length
    continued = np.concatenate((stream, stream[: length - 1]))  # the last window goes on at the start
    starts = []

    for epoch in (0, 1):
        x, y = source.train_batch(range(epoch * n, (epoch + 1) * n), length, 7)
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(x[:, 1:], y[:, :-1])
        starts.append(places(x.tolist(), continued))
        read = np.add.outer(starts[epoch], np.arange(length)) % len(stream)
        assert len(np.unique(read)) == n * length
        last_targets = np.add(starts[epoch], length) % len(stream)
        assert y[:, -1].tolist() == stream[last_targets].tolist()

    assert set(starts[0]) != set(starts[1])  # cut at other places, not only in another order
    assert sorted(starts[0]) != starts[0]
    of_seeds = [source.train_batch([0], length, seed)[0] for seed in (7, 8)]
    assert not torch.equal(*of_seeds)


def test_windows_are_those_of_this_version(source):
    """A run that is resumed reads on in the order that it began with."""
    stream = source.prepared["train"].stream()
    x, _ = source.train_batch([0, 1, 2, 10**6], 100, 7)
    assert places(x.tolist(), np.concatenate((stream, stream[:99]))) == STARTS


@pytest.mark.parametrize("indices", [[0], [10**15, 3, 3, 0], [5, 4, 10**9]])
@pytest.mark.parametrize("seed", [0, 2**32])
def test_a_sample_depends_on_its_index_alone(source, indices, seed):
    together = source.train_batch(indices, 64, seed)
    alone = [source.train_batch([index], 64, seed) for index in indices]
    for rows, rows_alone in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.equal(rows, torch.cat(rows_alone))


def test_validation_has_each_target_once(source):
    stream = source.prepared["val"].stream().tolist()
    whole = source.validation(64, EVERYTHING)

    assert (whole.name, whole.length, whole.n) == ("text", 64, (len(stream) - 1) // 64)
    x, y = whole.batch(0, whole.n)
    assert y.flatten().tolist() == stream[1 : whole.n * 64 + 1]
    assert torch.equal(x[:, 1:], y[:, :-1])

    # Fewer windows are spread over the split.
    part = source.validation(64, 5 * 64 + 10)
    spread = [i * whole.n // 5 for i in range(5)]
    assert part.n == 5
    assert torch.equal(part.batch(0, 5)[1], y[spread])
    assert source.validation(64, 1).n == 1


LENGTHS = [32, 50, 200]
TARGETS = 20


def eval_sets(source, lengths=LENGTHS, target_tokens=TARGETS, sequences=12):
    return source.eval_sets(lengths, target_tokens=target_tokens, sequences=sequences)


@pytest.mark.parametrize("kind", ["text", "markov"])
def test_eval_sets_share_their_targets(source, kind):
    data = source if kind == "text" else Markov(order=2, switch=0.1)
    parts = eval_sets(data)
    longest_x, longest_y = data.fully_scored(200, 12).batch(0, 12)

    assert (longest_y != IGNORE_INDEX).all()
    for part, length in zip(parts, LENGTHS, strict=True):
        assert (part.name, part.length, part.n) == ("text", length, 12)
        x, y = part.batch(0, 12)
        assert torch.equal(part.batch(5, 6)[0], x[5:6])
        assert torch.equal(x, longest_x[:, -length:])
        assert torch.equal(y[:, -TARGETS:], longest_y[:, -TARGETS:])
        assert torch.equal(x[:, 1 - TARGETS :], y[:, -TARGETS:-1])
        assert (y[:, :-TARGETS] == IGNORE_INDEX).all()
        x.zero_()  # a batch is the caller's own
        assert part.batch(0, 12)[0].any()


def test_what_identifies_the_texts(source):
    """Equal exactly where sequence i scores the same tokens: it depends on the longest length, not on the others."""
    base = eval_sets(source)
    (alone,) = eval_sets(source, [200])

    assert {part.texts_hash for part in base} == {alone.texts_hash}
    others = [
        eval_sets(source, [32, 100])[0],
        eval_sets(source, target_tokens=19)[0],
        eval_sets(source, sequences=11)[0],
        source.validation(64, 640),
        source.validation(50, 640),
    ]
    assert len({part.texts_hash for part in [*others, alone]}) == 6


def test_segments_do_not_overlap_and_come_from_all_documents(source):
    split = source.prepared["val"]
    stream = split.stream().tolist()
    part = source.fully_scored(200, 10**6)
    starts = places(part.batch(0, part.n)[0].tolist(), stream)

    assert np.diff(sorted(starts)).min() >= 200

    # A segment and its last target lie before the end of the document it begins in.
    document_of_segment = np.searchsorted(split.offsets, starts, side="right") - 1
    last_tokens = split.offsets[document_of_segment + 1] - 1
    assert (np.add(starts, 200) < last_tokens).all()

    # Every document gives all that it has room for, which takes a last target and the end of the document.
    room = (np.diff(split.offsets) - 2) // 200
    segments_of_document = np.bincount(document_of_segment, minlength=split.documents)
    assert segments_of_document.tolist() == room.tolist()

    # First come the first segments of all documents, then the second ones, ...
    turns = [list(document_of_segment[:i]).count(document) for i, document in enumerate(document_of_segment)]
    assert turns == sorted(turns)
    assert turns[-1] > 0


def test_texts_of_one_file_are_one_document(tmp_path):
    """Files are cut into documents, and documents into texts: the number of a text is that of its file."""
    for name, lines in {"aa": 300, "bb": 20, "cc": 200, "dd": 10, "ee": 20}.items():
        text = "".join(f"{name} line {i} of {lines}\n" for i in range(lines))
        (tmp_path / f"{name}.txt").write_text(text)
    source = prepared(tmp_path, tmp_path / "cache", document_bytes=1024, val_fraction=0.6)
    split = source.prepared["val"]

    assert len(split.files) == split.documents > len(set(split.files.tolist())) > 1

    shorter, longer = source.eval_sets([64, 128], target_tokens=8, sequences=10**6)
    assert shorter.documents == longer.documents == source.fully_scored(128, 10**6).documents
    files = []
    for row in longer.batch(0, longer.n)[0]:
        first_whole_line = source.decode(row.tolist()).split("\n")[1]
        files.append(first_whole_line[:2])
    pairs = set(zip(files, shorter.documents, strict=True))
    assert len(pairs) == len(set(files)) == len(set(shorter.documents)) > 1
    (part,) = source.eval_sets([128], target_tokens=8, sequences=5)
    assert len(set(part.documents)) > 1  # of one file its documents, so that there are several


def test_too_short_for_a_window_or_the_evaluation(source):
    longest = int(np.diff(source.prepared["val"].offsets).max()) - 1
    assert source.fully_scored(longest - 1, 4).n == 1
    for lengths in ([10, 9000], [longest]):
        message = rf"no validation document has {max(lengths) + 1:,} tokens.*the longest.*{longest:,}; lower"
        with pytest.raises(ValueError, match=message):
            eval_sets(source, lengths, 5)

    train_tokens = source.prepared["train"].tokens
    assert source.train_batch([0], train_tokens - 1, 0)[0].shape == (1, train_tokens - 1)
    with pytest.raises(ValueError, match=rf"train split has {train_tokens:,} tokens"):
        source.train_batch([0], train_tokens, 0)

    none_so_long = read_otherwise(source, min_tokens=10**6)
    with pytest.raises(ValueError, match=r"documents of at least 1,000,000 tokens have 0 tokens, too few for a window"):
        none_so_long.train_batch([0], 50, 0)


def test_windows_of_long_documents_alone(source):
    chosen = read_otherwise(source, min_tokens=900)
    documents = documents_in(source.prepared["train"])
    long_ones = [document for document in documents if len(document) > 900]
    stream = "".join(as_text(document) for document in long_ones)
    x, y = chosen.train_batch(range(len(stream) // 100), 100, 3)
    starts = places(x.tolist(), [*map(ord, stream), *map(ord, stream[:99])])

    assert len(set(starts)) == len(stream) // 100
    assert torch.equal(x[:, 1:], y[:, :-1])
    left_out = len(documents) - len(long_ones)
    assert f"  {left_out} documents of less than 900 tokens are left out of training" in chosen.describe(50)


def test_no_target_in_another_document(source):
    masked = read_otherwise(source, documents="mask")
    end = source.encoder.eot

    assert (source.document_end, masked.document_end) == (None, end)

    def batches(data):
        return [data.train_batch(range(300), 100, 0), data.validation(64, 10**6).batch(0, 50)]

    for (x, y), (x_masked, y_masked) in zip(batches(source), batches(masked), strict=True):
        assert (x == end).any()
        assert torch.equal(x_masked, x)
        assert torch.equal(y_masked, y.masked_fill(x == end, IGNORE_INDEX))


@pytest.mark.parametrize(("share", "documents", "warns"), [(0.4, 4, True), (0.43, 5, False)])
def test_a_validation_of_few_documents_is_a_warning(tmp_path, share, documents, warns):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(20):
        (folder / f"{i}.txt").write_text(f"{i} " * 200)
    source = prepared(folder, tmp_path / "cache", val_fraction=share)
    assert source.prepared["val"].documents == documents
    assert any(f"val has {documents} documents" in line for line in source.describe(50)) == warns
