"""What every task must pass: each YAML of conf/data whose class is a Task, with no list to keep."""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from solvers import check

from data import base as data
from data.base import IGNORE_INDEX

CONF = Path(__file__).resolve().parents[3] / "conf" / "data"


def options_of(name):
    """The options of a YAML, over those that it inherits."""
    values = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    for parent in values.pop("defaults", []):
        if parent != "_self_":
            values = options_of(parent) | values
    return values


YAMLS = {path.stem: options_of(path.stem) for path in CONF.glob("*.yaml")}
TASKS = sorted(name for name, options in YAMLS.items() if data.resolve(options["_target_"]).task)
LENGTH = 64


def build(name, **options):
    return data.build_data(YAMLS[name] | options)


@pytest.fixture(params=TASKS)
def task(request):
    return build(request.param)


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in TASKS), ("counting", {"variables": 5})])
def test_every_label_of_every_eval_set(name, options):
    task = build(name, **options)
    lengths = [LENGTH, 2 * LENGTH]
    n = 300
    parts = task.eval_sets(lengths, target_tokens=1, sequences=n)
    kinds = [(part.name, part.length) for part in parts]

    assert kinds == list(itertools.product(task.difficulties, lengths))
    parts.append(task.validation(LENGTH, n * LENGTH))
    assert len({part.texts_hash for part in parts}) == len(parts)
    for part in parts:
        x, y = part.batch(0, part.n)
        assert x.shape == y.shape == (n, part.length)
        assert x.dtype == y.dtype == torch.int64
        assert 0 <= x.min() <= x.max() < task.vocab_size
        assert (y != IGNORE_INDEX).any(1).all()
        check(task, x, y)
        assert torch.equal(part.batch(13, 14)[0], x[13:14])

    # The texts do not depend on the other lengths.
    alone = task.eval_sets([LENGTH], target_tokens=1, sequences=n)[0]
    assert torch.equal(alone.batch(0, 9)[0], parts[0].batch(0, 9)[0])


OPTIONS = {
    "flip_flop": {"ignore": st.floats(0, 1), "dense": st.floats(0, 1), "sparse": st.floats(0, 1)},
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
        "weights": st.sampled_from([[1, 50, 7], [1e-9, 0.5, 5], [1e-9, 0, 0], [50, 0, 500], [0.5, 1, 0]]),
    },
    "group": {"group": st.sampled_from(["z2", "z11", "s2", "s3", "s5", "a3", "a4"]), "generators": st.booleans()},
}


@pytest.mark.parametrize("name", TASKS)
@settings(max_examples=10)
@given(draw=st.data(), length=st.integers(0, 50), seed=st.integers(0, 9))
def test_any_options(name, draw, length, seed):
    """Every label is what the solver finds, or the length is not possible, and named."""
    options = {key: draw.draw(values, key) for key, values in OPTIONS[name].items()}
    task = build(name, **options)
    refusals = []

    for difficulty in task.difficulties:
        try:
            x, y = task.batch(f"any/{seed}", range(10), length, difficulty)
        except ValueError as error:
            refusals.append(str(error))
            continue
        assert x.shape == (10, length)
        check(task, x, y)
        x_alone, y_alone = task.batch(f"any/{seed}", [3], length, difficulty)
        assert torch.equal(x_alone[0], x[3])
        assert torch.equal(y_alone[0], y[3])
    for refusal in refusals:
        assert re.search(rf"\b{length}\b.*train_len and eval\.lengths", refusal)


@pytest.mark.parametrize(
    ("name", "options", "lengths"),  # tokens: too few or odd, and enough
    [
        ("flip_flop", {}, (2, 4)),
        ("flip_flop", {}, (5, 6)),
        ("selective_copy", {}, (3, 4)),
        ("copy", {}, (1, 2)),
        ("counting", {}, (3, 4)),
        ("group", {}, (1, 2)),
        # Each pair twice, but for the last token.
        ("recall", {"pairs": 3, "keys": 9, "key_len": 2, "value_len": 3}, (28, 29)),
        # Half of the tokens are pairs, of which one has to fit.
        ("recall", {"density": 0.5, "keys": 9, "key_len": 1, "value_len": 1}, (2, 3)),
    ],
)
def test_the_shortest_length(name, options, lengths):
    task = build(name, **options)
    impossible, shortest = lengths
    for difficulty in task.difficulties:
        with pytest.raises(ValueError, match=rf"\b{impossible}\b.*train_len and eval\.lengths"):
            task.batch("any", range(2), impossible, difficulty)
        check(task, *task.batch("any", range(9), shortest, difficulty))


def test_a_recall_with_fewer_keys_than_pairs_is_refused():
    task = build("recall", keys=9, density=1.0)
    check(task, *task.batch("any", range(2), 4 * 9 - 1, "near"))
    with pytest.raises(ValueError, match=r"\b39\b.*train_len and eval\.lengths"):
        task.batch("any", range(2), 4 * 10 - 1, "near")


@pytest.mark.parametrize(
    ("name", "option", "values"),
    [
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
    ],
)
def test_bad_options(name, option, values):
    for value in values:
        with pytest.raises(ValueError, match=rf"data\.{option}=.* must be "):
            build(name, **{option: value})


FIRST = {
    "flip_flop": (1, "w 1 i 1 i 1 i 0 i 1 i 0 w 1 r 1"),
    "selective_copy": (1, "s13 s4 s5 . . s5 . . | s13 s4 s5 s5 - - -"),
    "copy": (1, "s8 s8 s8 s6 s10 s12 s18 | s8 s8 s8 s6 s10 s12 s18 -"),
    "group": (1, "> acb bac cab acb bca abc bca acb cab bca bac bac cab acb bac"),
    "counting": (2, "pass pass pass a=0 pass pass pass pass a=0 pass pass pass pass a? 0 -"),
    "recall": (1, "k24 v18 k13 v5 k14 v6 k24 v18 . . . . k14 v6 k13 v5"),
}


def test_samples_are_those_of_this_version(task):
    """Whoever changes them raises `version`: a run would not continue, nor be evaluated, on what it began with."""
    options = {"recall": {"pairs": 3}}.get(task.task, {})
    x, _ = build(task.task, **options).train_batch([7], 16, 0)
    assert (task.version, task.decode(x[0].tolist())) == FIRST[task.task]


def test_samples_are_of_their_seed_and_split(task):
    """Nothing is repeated where chance would not: of counting's programs only the longer ones are many enough."""
    length = 512 if task.task == "counting" else LENGTH
    n = 300
    long_samples = []

    for x, y in (
        task.train_batch(range(n), length, 0),
        task.train_batch(range(n), length, 1),
        task.validation(length, n * length).batch(0, n),
        task.eval_sets([length], target_tokens=1, sequences=n)[0].batch(0, n),
    ):
        last_target = torch.where(y != IGNORE_INDEX, torch.arange(length), 0).amax(1)
        is_long = last_target >= length // 2
        assert is_long.sum() > 0.4 * n
        long_samples.append(x[is_long])
    together = torch.cat(long_samples)
    assert len(together.unique(dim=0)) == len(together)


@pytest.mark.parametrize("name", [*TASKS, "markov"])
def test_symbols_are_text_and_options_are_recorded(name):
    task = build(name)
    assert len(set(task.vocab)) == task.vocab_size
    assert not any(" " in symbol for symbol in task.vocab)
    ids = task.train_batch([0], LENGTH, 0)[0][0].tolist()
    assert task.encode(task.decode(ids)) == ids
    with pytest.raises(ValueError, match="'xyz' is not a symbol of this data; there is: "):
        task.encode("xyz")

    identity = task.identity()
    yaml = YAMLS[name]
    assert json.loads(json.dumps(identity)) == identity  # or no run could be resumed
    assert identity["options"] | {"name": yaml["name"], "_target_": yaml["_target_"]} == yaml
    assert type(task)().identity() == identity
    assert task.tokenizer_identity().items() <= identity.items()
