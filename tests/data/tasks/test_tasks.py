"""What every task must pass: each YAML of conf/data whose class is under data/tasks, with no list to keep."""

import json
import random

import numpy as np
import pytest
import torch
from conftest import ROOT, rows_of
from omegaconf import OmegaConf
from solvers import check

import data
from conf import schema
from conf.cli import compose
from data.base import IGNORE
from data.sampler import BatchSampler, train_loader
from data.tasks.base import Task

YAMLS = {path.stem: OmegaConf.to_container(OmegaConf.load(path)) for path in (ROOT / "conf" / "data").glob("*.yaml")}
TASKS = sorted(name for name, options in YAMLS.items() if options.get("_target_", "").startswith("data.tasks."))
LENGTH = 64


def build(name: str, **options) -> Task:
    task = data.build(YAMLS[name] | options)
    assert isinstance(task, Task)
    return task


@pytest.fixture(params=TASKS)
def task(request) -> Task:
    return build(request.param)


VARIANTS = [(name, {}) for name in TASKS] + [
    ("counting", {"variables": 3, "values": "random"}),
    ("counting", {"variables": 5, "balance": True}),
    ("counting", {"variables": 5, "values": "random", "balance": True}),
]


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_every_label_of_every_slice(name, options):
    task = build(name, **options)
    parts = task.slices([LENGTH, 2 * LENGTH], scored=1, sequences=1000)
    assert [(part.name, part.length) for part in parts] == [
        (name, length) for name in task.difficulties for length in (LENGTH, 2 * LENGTH)
    ]
    for part in [*parts, task.validation(LENGTH, 1000 * LENGTH)]:
        x, y = part.batch(0, part.n)
        assert x.shape == y.shape == (1000, part.length)
        assert x.dtype == y.dtype == torch.int64
        assert x.min() >= 0
        assert x.max() < task.vocab_size
        assert (y != IGNORE).any(1).all()
        check(task, x, y)


FIRST = {
    "flip_flop": "w 1 i 1 i 1 i 0 i 1 i 0 w 1 r 1",
    "selective_copy": "s13 s4 s5 . . s5 . . | s13 s4 s5 s5 - - -",
    "counting": "pass pass pass pass a=0 pass a=0 pass pass pass a? 0 - - - -",
    "recall": "k24 v18 k13 v5 k14 v6 k24 v18 . . . . k14 v6 k13 v5",
}


def test_samples_are_those_of_this_version(task):
    """Whoever changes them raises `version`: a run would not continue, nor be evaluated, on what it began with."""
    options = {"pairs": 3} if task.task == "recall" else {}
    x, _ = build(task.task, **options).train_batch([7], 16, 0)
    assert (task.version, task.decode(x[0].tolist())) == (1, FIRST[task.task])


def test_a_row_depends_on_its_index_alone(task):
    x, y = task.train_batch(range(40), LENGTH, 3)
    order = np.random.default_rng(0).permutation(40).tolist()
    for some in (order, order[:7], [39], [5, 5, 0]):
        part_x, part_y = task.train_batch(some, LENGTH, 3)
        assert torch.equal(part_x, x[some])
        assert torch.equal(part_y, y[some])
    part = task.slices([LENGTH], scored=1, sequences=40)[-1]
    whole, rest = part.batch(0, 40), part.batch(13, 40)
    assert torch.equal(whole[0][13:], rest[0])
    assert torch.equal(whole[1][13:], rest[1])


def test_samples_are_of_their_seed_and_split(task):
    """Nothing is repeated where chance would not: of counting's programs only the longer ones are many enough."""
    length = 512 if task.task == "counting" else LENGTH
    parts = [task.validation(length, 2000 * length), task.slices([length], scored=1, sequences=2000)[0]]
    batches = [task.train_batch(range(2000), length, seed) for seed in (0, 1)] + [p.batch(0, 2000) for p in parts]
    seen: set[tuple] = set()
    for x, y in batches:
        last = torch.where(y != IGNORE, torch.arange(length), 0).amax(1)
        long = [tuple(row) for row in x[last >= length // 2].tolist()]
        assert len(long) > 900
        assert len(set(long)) == len(long)
        assert seen.isdisjoint(long)
        seen.update(long)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_same_batches_for_any_number_of_workers(task, num_workers):
    def batches(workers):
        sampler = BatchSampler(batch_size=6, accumulate=1, rank=0, world_size=1, steps=4)
        return list(train_loader(task, sampler, length=LENGTH, seed=1, num_workers=workers))

    for (x, y), (x2, y2) in zip(batches(0), batches(num_workers), strict=True):
        assert torch.equal(x, x2)
        assert torch.equal(y, y2)


def test_global_random_state_is_neither_read_nor_changed(task):
    def seed_all(seed):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)

    def state():
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

    seed_all(0)
    before, first = state(), task.train_batch(range(5), LENGTH, 0)
    assert state() == before
    seed_all(1)
    assert torch.equal(first[0], task.train_batch(range(5), LENGTH, 0)[0])


def test_symbols_are_text(task):
    assert len(set(task.symbols)) == task.vocab_size
    assert not any(" " in symbol for symbol in task.symbols)
    ids = task.train_batch([0], LENGTH, 0)[0][0].tolist()
    assert task.encode(task.decode(ids)) == ids
    with pytest.raises(ValueError, match="'xyz' is not a symbol of this task; there is: "):
        task.encode("xyz")


def test_what_a_run_records_of_it(task):
    options = {key: value for key, value in YAMLS[task.task].items() if key not in ("name", "_target_")}
    assert json.loads(json.dumps(task.identity()))["options"] == options


@pytest.mark.parametrize("name", TASKS)
def test_end_to_end(train, name):
    outcome = train(f"data={name}", "pe=rope", "train_len=36", "eval.lengths=[1,2]", "eval.scored=1")
    assert outcome.code == 0, outcome.err
    run = train.runs / f"rope-{name}"
    slices = [(part, length) for part in build(name).difficulties for length in (36, 72)]
    results = json.loads((run / "results.json").read_text())
    rows = [row for row in rows_of(run) if "task" in row]
    assert [(row["slice"], row["length"]) for row in results["lengths"]] == slices
    assert [(row["slice"], row["length"]) for row in rows] == slices
    for row, result in zip(rows, results["lengths"], strict=True):
        assert row["task"] == result["task"] == name
        assert row["error"] == result["error"] <= row["sequence_error"] == result["sequence_error"] <= 100
        assert row["n"] == result["tokens"] >= result["sequences"] == 2
    assert all(part in outcome.out for part, _ in slices)


IMPOSSIBLE = {"flip_flop": 33, "selective_copy": 3, "counting": 3, "recall": 30}  # odd, or too short


@pytest.mark.parametrize("name", TASKS)
def test_a_length_that_is_not_possible_is_found_before_anything_is_written(train, name):
    length = IMPOSSIBLE[name]
    for train_len, lengths in ((length, "[1]"), (64, f"[1,{length / 64}]")):
        outcome = train(f"data={name}", "pe=rope", "eval.scored=1", f"train_len={train_len}", f"eval.lengths={lengths}")
        assert outcome.code == 2
        assert f" {length} tokens" in outcome.err or f"not {length}" in outcome.err
        assert "train_len and eval.lengths" in outcome.err
        assert "Traceback" not in outcome.err
        assert not train.runs.exists()


EXPERIMENTS = sorted(
    str(path.relative_to(ROOT / "conf" / "experiment").with_suffix(""))
    for path in (ROOT / "conf" / "experiment").rglob("*.yaml")
    if path.stem in TASKS
)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_and_has_its_samples(name):
    cfg = schema.check(compose(f"experiment={name}", "pe=cope"))
    assert cfg.data["name"] == name.split("/")[-1]
    task = data.build(cfg.data)
    parts = task.slices(list(cfg.lengths), scored=cfg.scored, sequences=cfg.eval.sequences)
    for part in [task.validation(cfg.train_len, cfg.trainer.val_tokens), *parts]:
        x, y = part.batch(0, 2)
        assert x.shape == (2, part.length)
        check(task, x, y)
