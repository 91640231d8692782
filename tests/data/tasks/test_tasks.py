"""What every task must pass: each YAML of conf/data whose class is a Task, with no list to keep."""

import json
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
YAMLS = {path.stem: OmegaConf.to_container(OmegaConf.load(path)) for path in CONF.glob("*.yaml")}
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
    parts = task.eval_sets([LENGTH, 2 * LENGTH], target_tokens=1, sequences=500)
    assert [(p.name, p.length) for p in parts] == [(d, n) for d in task.difficulties for n in (LENGTH, 2 * LENGTH)]
    parts.append(task.validation(LENGTH, 500 * LENGTH))
    assert len({part.texts_hash for part in parts}) == len(parts)
    for part in parts:
        x, y = part.batch(0, part.n)
        assert x.shape == y.shape == (500, part.length)
        assert x.dtype == y.dtype == torch.int64
        assert 0 <= x.min() <= x.max() < task.vocab_size
        assert (y != IGNORE_INDEX).any(1).all()
        check(task, x, y)
        assert torch.equal(part.batch(13, 14)[0], x[13:14])
    (alone, *_) = task.eval_sets([LENGTH], target_tokens=1, sequences=500)  # does not depend on other lengths
    assert torch.equal(alone.batch(0, 9)[0], parts[0].batch(0, 9)[0])


OPTIONS = {
    "flip_flop": {name: st.floats(0, 1) for name in ("ignore", "dense", "sparse")},
    "selective_copy": {"kinds": st.integers(2, 30)},
    "copy": {"kinds": st.integers(2, 30)},
    "recall": {
        "pairs": st.integers(1, 9), "density": st.none() | st.floats(0, 1), "keys": st.integers(9, 15),
        "values": st.integers(2, 30), "key_len": st.integers(1, 3), "value_len": st.integers(1, 3),
        "gap_power": st.sampled_from([0.0, 0.01, 1.0, 2.0]),
    },
    "counting": {
        "variables": st.integers(1, 26), "cap": st.sampled_from([1, 2, 10, 99]),
        "weights": st.sampled_from([[1, 50, 7], [1e-9, 0.5, 5], [1e-9, 0, 0], [50, 0, 500], [0.5, 1, 0]]),
    },
    "variables": {"chains": st.integers(1, 5), "hops": st.integers(1, 4)},
    "group": {"group": st.sampled_from(["z2", "z11", "s2", "s3", "s5", "a3", "a4"]), "generators": st.booleans()},
}  # fmt: skip


def shortest(name, o, length):
    """The shortest length that is possible with these options, given the length that was asked for."""
    if name == "recall":
        pair = o["key_len"] + o["value_len"]
        pairs = o["pairs"] if o["density"] is None else max(1, int(o["density"] * (length + 1)) // (2 * pair))
        return 2 * pair * pairs - 1 if pairs <= o["keys"] ** o["key_len"] else length + 1
    if name == "variables":
        return 3 * o["chains"] * (o["hops"] + 2) - 1
    return {"group": 2, "copy": 2}.get(name, 4) + (name == "flip_flop" and length % 2) * length


@pytest.mark.parametrize("name", TASKS)
@settings(max_examples=20)
@given(draw=st.data(), length=st.integers(0, 50), seed=st.integers(0, 9))
def test_any_options(name, draw, length, seed):
    """Every label is what the solver finds; a length that is not possible is named."""
    options = {key: draw.draw(values, key) for key, values in OPTIONS[name].items()}
    task = build(name, **options)
    for difficulty in task.difficulties:
        if length < shortest(name, options, length):
            with pytest.raises(ValueError, match=rf"\b{length}\b.*train_len and eval\.lengths"):
                task.batch("any", range(2), length, difficulty)
            continue
        x, y = task.batch(f"any/{seed}", range(10), length, difficulty)
        assert x.shape == (10, length)
        check(task, x, y)
        alone = task.batch(f"any/{seed}", [3], length, difficulty)
        assert torch.equal(torch.stack(alone)[:, 0], torch.stack((x, y))[:, 3])


BAD = {"counting": {"variables": [0, 27], "cap": [0, 100], "weights": [[1, 1], [0, 1, 1], [1, -1, 1], [1, 1, 21]]}}
BAD |= {"flip_flop": {name: [-0.1, 1.1] for name in OPTIONS["flip_flop"]}, "group": {"group": ["s7", "z1", "d4", "s"]}}
BAD |= {"recall": {"keys": [0, 10**12], "pairs": [0, 33], "values": [1, 10**12], "density": [-0.1, 1.1]}}
BAD["recall"] |= {"key_len": [0, 9], "value_len": [0], "gap_power": [-1]}
BAD |= {name: {"kinds": [1, 10**12]} for name in ("copy", "selective_copy")}
BAD |= {"variables": {"chains": [0, 9], "hops": [0, 26]}}


@pytest.mark.parametrize(("name", "option"), [(name, option) for name in BAD for option in BAD[name]])
def test_bad_options(name, option):
    for value in BAD[name][option]:
        with pytest.raises(ValueError, match=rf"data\.{option}=.* must be "):
            build(name, **{option: value})


FIRST = {
    "flip_flop": (1, "w 1 i 1 i 1 i 0 i 1 i 0 w 1 r 1"),
    "selective_copy": (1, "s13 s4 s5 . . s5 . . | s13 s4 s5 s5 - - -"),
    "copy": (1, "s8 s8 s8 s6 s10 s12 s18 | s8 s8 s8 s6 s10 s12 s18 -"),
    "group": (1, "> acb bac cab acb bca abc bca acb cab bca bac bac cab acb bac"),
    "variables": (1, ". y = 2 n = y o = n . . . . ? y"),
    "counting": (2, "pass pass pass a=0 pass pass pass pass a=0 pass pass pass pass a? 0 -"),
    "recall": (1, "k24 v18 k13 v5 k14 v6 k24 v18 . . . . k14 v6 k13 v5"),
}


def test_samples_are_those_of_this_version(task):
    """Whoever changes them raises `version`: a run would not continue, nor be evaluated, on what it began with."""
    options = {"recall": {"pairs": 3}, "variables": {"chains": 1}}.get(task.task, {})
    x, _ = build(task.task, **options).train_batch([7], 16, 0)
    assert (task.version, task.decode(x[0].tolist())) == FIRST[task.task]


def test_samples_are_of_their_seed_and_split(task):
    """Nothing is repeated where chance would not: of counting's programs only the longer ones are many enough."""
    length = 512 if task.task == "counting" else LENGTH
    parts = [task.validation(length, 1000 * length), task.eval_sets([length], target_tokens=1, sequences=1000)[0]]
    batches = [task.train_batch(range(1000), length, seed) for seed in (0, 1)] + [p.batch(0, 1000) for p in parts]
    seen: set[tuple] = set()
    for x, y in batches:
        last = torch.where(y != IGNORE_INDEX, torch.arange(length), 0).amax(1)
        long = {tuple(row) for row in x[last >= length // 2].tolist()}
        assert len(long) == (last >= length // 2).sum() > 450
        assert seen.isdisjoint(long)
        seen |= long


def test_symbols_are_text_and_options_are_recorded(task):
    assert len(set(task.vocab)) == task.vocab_size
    assert not any(" " in symbol for symbol in task.vocab)
    ids = task.train_batch([0], LENGTH, 0)[0][0].tolist()
    assert task.encode(task.decode(ids)) == ids
    with pytest.raises(ValueError, match="'xyz' is not a symbol of this data; there is: "):
        task.encode("xyz")
    options = {key: value for key, value in YAMLS[task.task].items() if key not in ("name", "_target_")}
    assert json.loads(json.dumps(task.identity())) == task.identity()  # or no run could be resumed
    assert task.identity()["options"] == options
    assert build(task.task).identity() == type(task)().identity()
