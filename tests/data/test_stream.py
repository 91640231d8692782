"""Which tokens of the text are in a training sample, a validation window, a sequence of an eval set."""

import numpy as np
import pytest
import torch
from corpora import prepared, write_corpus
from hypothesis import given, settings
from hypothesis import strategies as st

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


@pytest.mark.parametrize("length", [100, 333])
def test_an_epoch_has_each_token_once(source, length):
    stream = source.prepared["train"].stream()
    n = len(stream) // length
    continued = np.concatenate((stream, stream[: length - 1]))  # the last window goes on at the start
    starts = []

    for epoch in (0, 1):
        x, y = source.train_batch(range(epoch * n, (epoch + 1) * n), length, 7)
        starts.append(places(x.tolist(), continued))
        read = np.add.outer(starts[epoch], np.arange(length)) % len(stream)
        last_targets = np.add(starts[epoch], length) % len(stream)

        assert x.dtype == y.dtype == torch.int64
        assert len(np.unique(read)) == n * length
        assert torch.equal(x[:, 1:], y[:, :-1])
        assert y[:, -1].tolist() == stream[last_targets].tolist()

    assert set(starts[0]) != set(starts[1])  # cut at other places, not only in another order
    assert sorted(starts[0]) != starts[0]


def test_windows_are_those_of_this_version(source):
    """A run that is resumed reads on in the order that it began with."""
    stream = source.prepared["train"].stream()
    x, _ = source.train_batch([0, 1, 2, 10**6], 100, 7)
    assert places(x.tolist(), np.concatenate((stream, stream[:99]))) == STARTS


@given(indices=st.lists(st.integers(0, 10**15), min_size=1, max_size=4), seed=st.integers(0, 2**32))
@settings(max_examples=8)
def test_a_window_depends_on_its_index_and_the_seed_alone(source, indices, seed):
    together = source.train_batch(indices, 64, seed)
    alone = [source.train_batch([index], 64, seed) for index in indices]
    of_another_seed = source.train_batch(indices, 64, seed + 1)

    for rows, rows_alone, others in zip(together, zip(*alone, strict=True), of_another_seed, strict=True):
        assert torch.equal(rows, torch.cat(rows_alone))
        assert not torch.equal(rows, others)


def test_validation_has_each_target_once_and_fewer_windows_are_spread_over_it(source):
    stream = source.prepared["val"].stream().tolist()
    whole = source.validation(64, EVERYTHING)
    part = source.validation(64, 5 * 64 + 10)
    x, y = whole.batch(0, whole.n)

    assert (whole.name, whole.length, whole.n) == ("text", 64, (len(stream) - 1) // 64)
    assert y.flatten().tolist() == stream[1 : whole.n * 64 + 1]
    assert torch.equal(x[:, 1:], y[:, :-1])

    spread = [i * whole.n // 5 for i in range(5)]

    assert part.n == 5
    assert torch.equal(part.batch(0, 5)[1], y[spread])
    assert source.validation(64, 1).n == 1


LENGTHS = [32, 50, 200]
TARGETS = 20


def eval_sets(source, lengths=LENGTHS, target_tokens=TARGETS, sequences=12):
    return source.eval_sets(lengths, target_tokens=target_tokens, sequences=sequences)


@pytest.mark.parametrize("kind", ["text", "markov"])
def test_eval_sets_of_all_lengths_score_the_same_targets(source, kind):
    data = source if kind == "text" else Markov(order=2, switch=0.1)
    longest_x, longest_y = data.fully_scored(200, 12).batch(0, 12)

    assert (longest_y != IGNORE_INDEX).all()

    for part, length in zip(eval_sets(data), LENGTHS, strict=True):
        x, y = part.batch(0, 12)

        assert (part.name, part.length, part.n) == ("text", length, 12)
        assert torch.equal(x, longest_x[:, -length:])
        assert torch.equal(y[:, -TARGETS:], longest_y[:, -TARGETS:])
        assert torch.equal(x[:, 1 - TARGETS :], y[:, -TARGETS:-1])
        assert (y[:, :-TARGETS] == IGNORE_INDEX).all()
        assert torch.equal(part.batch(5, 6)[0], x[5:6])

        x.zero_()  # a batch is the caller's own

        assert part.batch(0, 12)[0].any()


def test_the_hash_of_texts_is_equal_exactly_where_the_same_tokens_are_scored(source):
    """They depend on the longest length, not on the others."""
    (alone,) = eval_sets(source, [200])
    others = [
        eval_sets(source, [32, 100])[0],
        eval_sets(source, target_tokens=19)[0],
        eval_sets(source, sequences=11)[0],
        source.validation(64, 640),
        source.validation(50, 640),
    ]

    assert {part.texts_hash for part in eval_sets(source)} == {alone.texts_hash}
    assert len({part.texts_hash for part in [*others, alone]}) == 6


def test_segments_do_not_overlap_and_come_from_all_documents(source):
    split = source.prepared["val"]
    part = source.fully_scored(200, 10**6)
    starts = places(part.batch(0, part.n)[0].tolist(), split.stream().tolist())
    document_of_segment = np.searchsorted(split.offsets, starts, side="right") - 1
    segments_of_document = np.bincount(document_of_segment, minlength=split.documents)

    assert np.diff(sorted(starts)).min() >= 200

    # A segment and its last target lie before the end of the document it begins in.
    last_tokens = split.offsets[document_of_segment + 1] - 1

    assert (np.add(starts, 200) < last_tokens).all()

    # Every document gives all that it has room for, which takes a last target and the end of the document.
    room = (np.diff(split.offsets) - 2) // 200

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

    shorter, longer = eval_sets(source, [64, 128], 8, 10**6)
    texts = [source.decode(row.tolist()) for row in longer.batch(0, longer.n)[0]]
    files = [text.split("\n")[1][:2] for text in texts]  # the first whole line names its file

    assert shorter.documents == longer.documents == source.fully_scored(128, 10**6).documents

    pairs = set(zip(files, longer.documents, strict=True))

    assert len(pairs) == len(set(files)) == len(set(longer.documents)) > 1

    (few,) = eval_sets(source, [128], 8, 5)

    assert len(set(few.documents)) > 1  # of one file its documents, so that there are several


def test_too_little_text_is_an_error_that_says_how_much_there_is(source):
    longest = int(np.diff(source.prepared["val"].offsets).max()) - 1

    assert source.fully_scored(longest - 1, 4).n == 1
    with pytest.raises(ValueError, match=rf"no validation document has {longest + 1:,} tokens.*{longest:,}"):
        eval_sets(source, [longest], 5)

    train_tokens = source.prepared["train"].tokens

    assert source.train_batch([0], train_tokens - 1, 0)[0].shape == (1, train_tokens - 1)
    with pytest.raises(ValueError, match=rf"train split has {train_tokens:,} tokens"):
        source.train_batch([0], train_tokens, 0)

    none_so_long = read_otherwise(source, min_tokens=10**6)

    with pytest.raises(ValueError, match=r"documents of at least 1,000,000 tokens have 0 tokens, too few for a window"):
        none_so_long.train_batch([0], 50, 0)


def test_windows_of_long_documents_alone(source):
    chosen = read_otherwise(source, min_tokens=900)
    split = source.prepared["train"]
    documents = np.split(split.stream(), split.offsets[1:-1])
    long_ones = [document for document in documents if len(document) > 900]
    stream = np.concatenate(long_ones)

    x, y = chosen.train_batch(range(len(stream) // 100), 100, 3)

    starts = places(x.tolist(), np.concatenate((stream, stream[:99])))

    assert len(set(starts)) == len(stream) // 100
    assert torch.equal(x[:, 1:], y[:, :-1])

    left_out = len(documents) - len(long_ones)

    assert f"  {left_out} documents of less than 900 tokens are left out of training" in chosen.describe(50)


def test_where_documents_are_masked_no_target_is_in_another_document(source):
    masked = read_otherwise(source, documents="mask")
    end = source.encoder.eot
    batches = []
    for data in (source, masked):
        batches.append([*data.train_batch(range(300), 100, 0), *data.validation(64, 10**6).batch(0, 50)])

    assert (source.document_end, masked.document_end) == (None, end)

    x, y, val_x, val_y = batches[0]
    expected = [
        x,
        y.masked_fill(x == end, IGNORE_INDEX),
        val_x,
        val_y.masked_fill(val_x == end, IGNORE_INDEX),
    ]

    assert (x == end).any()
    assert (val_x == end).any()
    assert all(map(torch.equal, batches[1], expected))


@pytest.mark.parametrize(("share", "documents", "warns"), [(0.4, 4, True), (0.43, 5, False)])
def test_a_validation_of_few_documents_is_a_warning(tmp_path, share, documents, warns):
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(f"{i} " * 200)
    source = prepared(tmp_path, tmp_path / "cache", val_fraction=share)

    assert source.prepared["val"].documents == documents
    assert any(f"val has {documents} documents" in line for line in source.describe(50)) == warns
