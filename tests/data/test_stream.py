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


def starts_of(batch, stream):
    """The token of `stream` at which each window of a batch begins; its last target is in the stream, too.

    The text is random enough for a single place. A window that begins late goes on at the start of the stream.
    """
    x, y = batch
    continued = np.concatenate((stream, stream[: x.size(1)]))
    text = as_text(continued)
    windows = torch.cat((x, y[:, -1:]), dim=1)
    parts = [as_text(window) for window in windows.tolist()]

    assert torch.equal(x[:, 1:], y[:, :-1])
    assert all(text.count(part) == 1 for part in parts)

    return [text.find(part) for part in parts]


@pytest.mark.parametrize("length", [100, 333])
def test_an_epoch_has_each_token_once(source, length):
    stream = source.prepared["train"].stream()
    n = len(stream) // length
    epochs = []

    for indices in (range(n), range(n, 2 * n)):
        batch = source.train_batch(indices, length, 7)
        starts = starts_of(batch, stream)
        read = np.add.outer(starts, np.arange(length))
        epochs.append(starts)

        assert len(np.unique(read % len(stream))) == n * length

    assert set(epochs[0]) != set(epochs[1])  # cut at other places, not only in another order
    assert sorted(epochs[0]) != epochs[0]


def test_windows_are_those_of_this_version_whatever_else_is_in_a_batch(source):
    """A run that is resumed reads on in the order that it began with."""
    stream = source.prepared["train"].stream()

    assert starts_of(source.train_batch([0, 1, 2, 10**6], 100, 7), stream) == STARTS
    assert starts_of(source.train_batch([10**6], 100, 7), stream) == STARTS[3:]
    assert starts_of(source.train_batch([10**6], 100, 8), stream) != STARTS[3:]


def test_validation_has_each_target_once_and_fewer_windows_are_spread_over_it(source):
    stream = source.prepared["val"].stream()
    n = (len(stream) - 1) // 64

    def starts(tokens):
        part = source.validation(64, tokens)
        assert (part.name, part.length) == ("text", 64)
        return starts_of(part.batch(0, part.n), stream)

    assert starts(EVERYTHING) == [*range(0, 64 * n, 64)]
    assert starts(1) == [0]
    assert n % 7  # so that seven windows are not equally far from each other
    for i, start in enumerate(starts(7 * 64 + 10)):
        assert start == i * n // 7 * 64


LENGTHS = [32, 50, 200]
TARGETS = 20


def eval_sets(source, lengths=LENGTHS, target_tokens=TARGETS, sequences=12):
    return source.eval_sets(lengths, target_tokens=target_tokens, sequences=sequences)


@pytest.mark.parametrize("kind", ["text", "markov"])
def test_eval_sets_of_all_lengths_score_the_same_targets(source, kind):
    data = source if kind == "text" else Markov(order=2, switch=0.1)
    longest_x, longest_y = data.fully_scored(200, 12).batch(0, 12)

    assert torch.equal(longest_x[:, 1:], longest_y[:, :-1])

    for part, length in zip(eval_sets(data), LENGTHS, strict=True):
        expected_x = longest_x[:, -length:]
        expected_y = longest_y[:, -length:].clone()
        expected_y[:, :-TARGETS] = IGNORE_INDEX

        x, y = part.batch(0, 12)
        sixth, _ = part.batch(5, 6)

        assert (part.name, part.length, part.n) == ("text", length, 12)
        assert torch.equal(x, expected_x)
        assert torch.equal(y, expected_y)
        assert torch.equal(sixth, x[5:6])

        x.zero_()  # a batch is the caller's own

        assert torch.equal(part.batch(0, 12)[0], expected_x)


def test_the_hash_of_texts_is_equal_exactly_where_the_same_tokens_are_scored(source):
    (alone,) = eval_sets(source, [200])
    different = [
        alone,
        eval_sets(source, [32, 100])[0],
        eval_sets(source, target_tokens=19)[0],
        eval_sets(source, sequences=11)[0],
        source.validation(64, 640),
        source.validation(50, 640),
    ]

    assert len({part.texts_hash for part in different}) == len(different)
    assert {part.texts_hash for part in eval_sets(source)} == {alone.texts_hash}


def test_segments_do_not_overlap_and_come_from_all_documents(source):
    split = source.prepared["val"]
    part = source.fully_scored(200, 10**6)
    starts = starts_of(part.batch(0, part.n), split.stream())
    document = np.searchsorted(split.offsets, starts, side="right") - 1  # of each segment

    assert np.diff(sorted(starts)).min() >= 200

    # A segment and its last target lie before the end of the document it begins in.
    last_token = split.offsets[document + 1] - 1

    assert (np.add(starts, 200) < last_token).all()

    # Every document gives all that it has room for, which takes a last target and the end of the document.
    room = (np.diff(split.offsets) - 2) // 200
    segments = np.bincount(document, minlength=split.documents)

    assert segments.tolist() == room.tolist()


def test_texts_of_one_file_are_one_document(tmp_path):
    """Files are cut into documents, and documents into texts: the number of a text is that of its file."""
    for name, lines in {"aa": 300, "bb": 20, "cc": 200, "dd": 10, "ee": 20}.items():
        text = "".join(f"{name} line {i} of {lines}\n" for i in range(lines))
        (tmp_path / f"{name}.txt").write_text(text)
    source = prepared(tmp_path, tmp_path / "cache", document_bytes=1024, val_fraction=0.6)

    shorter, longer = eval_sets(source, [64, 128], 8, EVERYTHING)
    x, _ = longer.batch(0, longer.n)
    texts = map(source.decode, x.tolist())
    files = [text.split("\n")[1][:2] for text in texts]  # the first whole line names its file
    pairs = set(zip(files, longer.documents, strict=True))

    assert shorter.documents == longer.documents
    assert len(pairs) == len(set(files)) > 1
    assert len(pairs) == len(set(longer.documents))

    (few,) = eval_sets(source, [128], 8, 5)

    assert len(set(few.documents)) > 1  # of one file its documents, so that there are several


def test_too_little_text_is_an_error_that_says_how_much_there_is(source):
    sizes = np.diff(source.prepared["val"].offsets)
    longest = int(sizes.max()) - 1

    assert source.fully_scored(longest - 1, 4).n == 1

    with pytest.raises(ValueError, match=rf"no validation document has {longest + 1:,} tokens.*{longest:,}"):
        source.fully_scored(longest, 4)


def test_where_documents_are_masked_no_target_is_in_another_document(source):
    masked = read_otherwise(source, documents="mask")
    end = source.encoder.eot

    assert source.document_end is None
    assert masked.document_end == end

    for read in (
        lambda data: data.train_batch(range(300), 100, 0),
        lambda data: data.validation(64, EVERYTHING).batch(0, 50),
    ):
        x, y = read(source)
        masked_x, masked_y = read(masked)

        assert end in x
        assert torch.equal(masked_x, x)
        assert torch.equal(masked_y, y.masked_fill(x == end, IGNORE_INDEX))
