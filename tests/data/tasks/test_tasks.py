"""What every task must pass: each YAML of conf/data whose class is a Task, with no list to keep."""

import itertools
import json
import re

import pytest
import torch
from conftest import ROOT, data_options
from hypothesis import given, settings
from hypothesis import strategies as st
from solvers import check

from data import base as data
from data.base import IGNORE_INDEX

YAMLS = {path.stem: data_options(path.stem) for path in (ROOT / "conf" / "data").glob("*.yaml")}
TASKS = sorted(YAMLS.keys() - {"code", "text", "hf", "markov"})
ALL = [*TASKS, "markov"]
LENGTH = 64


def build(name, **options):
    return data.build_data(YAMLS[name] | options)


@pytest.mark.parametrize("name", TASKS)
def test_eval_sets_have_the_labels_that_their_symbols_imply(name):
    task = build(name)
    n = 300
    lengths = [LENGTH, 2 * LENGTH]
    parts = task.eval_sets(lengths, target_tokens=1, sequences=n)

    assert [(part.name, part.length) for part in parts] == list(itertools.product(task.difficulties, lengths))

    parts.append(task.validation(LENGTH, n * LENGTH))
    for part in parts:
        x, y = part.batch(0, part.n)

        assert x.shape == y.shape == (n, part.length)

        check(task, x, y)

    assert len({part.texts_hash for part in parts}) == len(parts)


OPTIONS = {
    "flip_flop": {
        "ignore": st.floats(0, 1),
        "dense": st.floats(0, 1),
        "sparse": st.floats(0, 1),
    },
    "selective_copy": {"kinds": st.integers(2, 30)},
    "copy": {"kinds": st.integers(2, 30)},
    "recall": {
        "pairs": st.integers(1, 9),
        "density": st.none() | st.floats(0, 1),
        "keys": st.integers(9, 15),
        "values": st.integers(2, 30),
        "key_len": st.integers(1, 3),
        "value_len": st.integers(1, 3),
        "gap_power": st.sampled_from([0.0, 0.01, 1.0, 2.0]),
    },
    "counting": {
        "variables": st.integers(1, 26),
        "cap": st.sampled_from([1, 2, 10, 99]),
        "weights": st.sampled_from(
            [
                [1, 50, 7],
                [1e-9, 0.5, 5],
                [1e-9, 0, 0],
                [50, 0, 500],
                [0.5, 1, 0],
            ]
        ),
    },
    "group": {
        "group": st.sampled_from(["z2", "z11", "s2", "s3", "s5", "a3", "a4"]),
        "generators": st.booleans(),
    },
}


@pytest.mark.parametrize("name", TASKS)
@settings(max_examples=25)
@given(
    draw=st.data(),
    length=st.integers(0, 50),
    seed=st.integers(0, 9),
)
def test_labels_are_right_with_any_options_or_the_length_is_refused(name, draw, length, seed):
    options = {key: draw.draw(values, key) for key, values in OPTIONS[name].items()}
    task = build(name, **options)
    difficulty = draw.draw(st.sampled_from(task.difficulties))
    try:
        x, y = task.batch(f"any/{seed}", range(10), length, difficulty)
    except ValueError as error:
        if not re.search(rf"\b{length}\b.*train_len and eval\.lengths", str(error)):
            raise
        return

    assert x.shape == (10, length)

    check(task, x, y)


# The last length that is impossible, too short or odd, and the next one.
LIMITS = [
    ("flip_flop", {}, (2, 4)),
    ("flip_flop", {}, (5, 6)),
    ("selective_copy", {}, (3, 4)),
    ("copy", {}, (1, 2)),
    ("counting", {}, (3, 4)),
    ("group", {}, (1, 2)),
    # Each pair twice, but for the last token.
    ("recall", {"pairs": 3, "keys": 9, "key_len": 2, "value_len": 3}, (28, 29)),
    # Half of the tokens are pairs, of which one has to fit.
    ("recall", {"density": 0.5, "keys": 9}, (2, 3)),
    # More pairs than there are keys: the longest length.
    ("recall", {"density": 1.0, "keys": 9}, (39, 35)),
]


@pytest.mark.parametrize(("name", "options", "lengths"), LIMITS)
def test_lengths_at_which_a_task_is_impossible_are_refused(name, options, lengths):
    task = build(name, **options)
    impossible, possible = lengths
    for difficulty in task.difficulties:
        with pytest.raises(ValueError, match=rf"\b{impossible}\b.*train_len and eval\.lengths"):
            task.batch("any", range(2), impossible, difficulty)
        x, y = task.batch("any", range(9), possible, difficulty)
        check(task, x, y)


OUT_OF_RANGE = [
    ("flip_flop", "ignore", [-0.1, 1.1]),
    ("flip_flop", "dense", [-0.1, 1.1]),
    ("flip_flop", "sparse", [-0.1, 1.1]),
    ("copy", "kinds", [1, 10**12]),
    ("selective_copy", "kinds", [1, 10**12]),
    ("recall", "keys", [0, 10**12]),
    ("recall", "pairs", [0, 33]),
    ("recall", "values", [1, 10**12]),
    ("recall", "density", [-0.1, 1.1]),
    ("recall", "key_len", [0, 9]),
    ("recall", "value_len", [0]),
    ("recall", "gap_power", [-1]),
    ("counting", "variables", [0, 27]),
    ("counting", "cap", [0, 100]),
    ("counting", "weights", [[1, 1], [0, 1, 1], [1, -1, 1], [1, 1, 21]]),
    ("group", "group", ["s7", "z1", "d4", "s"]),
    ("markov", "symbols", [1, 129]),
    ("markov", "alpha", [0.0009, 1001]),
    ("markov", "order", [0, 3]),
    ("markov", "lag", [0]),
    ("markov", "switch", [-0.1, 1.1]),
]


@pytest.mark.parametrize(("name", "option", "values"), OUT_OF_RANGE)
def test_an_option_out_of_range_is_an_error_that_names_it(name, option, values):
    for value in values:
        with pytest.raises(ValueError, match=rf"data\.{option}=.* (must|should) "):
            build(name, **{option: value})


FIRST = [
    ("flip_flop", {}, 1, "w 1 i 1 w 1 i 1 w 1 i 1 r 1 r 1"),
    ("selective_copy", {}, 1, ". s0 . s7 . s8 . s5 | s0 s7 s8 s5 - - -"),
    ("copy", {}, 1, "s11 | s11 - - - - - - - - - - - - -"),
    ("group", {"group": "s3"}, 1, "> bac abc abc bac bac cba cab bac bca bac acb cba cab bac cab"),
    ("counting", {}, 2, "pass a=0 a++ a? 1 - - - - - - - - - - -"),
    ("recall", {"pairs": 3, "keys": 32, "values": 32}, 1, "k7 v27 k5 v21 k0 v29 . k0 v29 . . k5 v21 . . k7"),
    ("markov", {}, 1, "s0 s4 s5 s3 s8 s0 s4 s0 s7 s3 s7 s3 s9 s9 s9 s9"),
    ("markov", {"order": 2}, 1, "s0 s4 s5 s3 s8 s0 s5 s0 s8 s3 s5 s4 s9 s9 s8 s7"),
    ("markov", {"lag": 3}, 1, "s0 s4 s5 s3 s8 s0 s5 s0 s7 s0 s5 s4 s9 s9 s8 s7"),
    ("markov", {"switch": 0.15}, 1, "s0 s4 s5 s3 s8 s0 s5 s0 s7 s3 s7 s3 s9 s9 s9 s9"),
]


@pytest.mark.parametrize(("name", "options", "version", "text"), FIRST)
def test_samples_are_those_of_this_version(name, options, version, text):
    """Whoever changes them raises `version`: a run would not continue, nor be evaluated, on what it began with."""
    task = build(name, **options)
    x, _ = task.train_batch([3], 16, 0)

    assert (task.version, task.decode(x[0].tolist())) == (version, text)


@pytest.mark.parametrize("name", ALL)
def test_seeds_and_splits_share_no_sample_and_each_depends_on_its_index_alone(name):
    """Nothing is repeated where chance would not: of counting's programs only the longer ones are many enough."""
    task = build(name)
    length = 512 if name == "counting" else LENGTH
    n = 300
    validation = task.validation(length, n * length)
    test, *_ = task.eval_sets([length], target_tokens=length, sequences=n)
    assert validation.n == test.n == n
    batches = [
        task.train_batch(range(n), length, 0),
        task.train_batch(range(n), length, 1),
        validation.batch(0, n),
        test.batch(0, n),
    ]
    alone, _ = task.train_batch([17], length, 0)
    long_samples = []
    for x, y in batches:
        is_long = (y[:, length // 2 :] != IGNORE_INDEX).any(1)
        assert is_long.sum() > 0.4 * n
        long_samples.append(x[is_long])
    together = torch.cat(long_samples)

    assert len(together.unique(dim=0)) == len(together)
    assert torch.equal(alone[0], batches[0][0][17])


@pytest.mark.parametrize("name", ALL)
def test_samples_can_be_written_as_text_and_the_options_are_recorded(name):
    task = build(name)
    x, _ = task.train_batch([0], LENGTH, 0)
    ids = x[0].tolist()

    assert task.encode(task.decode(ids)) == ids

    with pytest.raises(ValueError, match="'xyz' is not a symbol of this data; its symbols are: "):
        task.encode("xyz")

    identity = task.identity()
    options = {key: value for key, value in YAMLS[name].items() if key not in ("name", "_target_")}

    assert json.loads(json.dumps(identity)) == identity  # or no run could be resumed
    assert identity["options"] == options
