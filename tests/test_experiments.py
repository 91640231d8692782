"""Every experiment and every task works from its YAML on."""

import pytest
from conftest import ROOT, rows_of

import data as data_sources
from conf.cli import composed
from conf.sweep import configure
from data.base import IGNORE_INDEX
from evaluation.results import load_all

EXPERIMENTS = sorted(
    str(path.relative_to(ROOT / "conf/experiment").with_suffix(""))
    for path in (ROOT / "conf/experiment").rglob("*.yaml")
)
TASKS = sorted(path.stem for path in (ROOT / "conf/data").glob("*.yaml") if "data.tasks." in path.read_text())


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_has_samples(experiment, tmp_path):
    """At the length of training, and at every length it is measured at."""
    with composed("config", f"experiment={experiment}") as found:
        cfg = configure(found)
    source = cfg.data
    if "data.text." in source["_target_"]:  # a text of ours in place of a download
        (tmp_path / "corpus.txt").write_text("".join(f"{i} knots in a rope\n" for i in range(8_000)))
        source = {"name": "text", "_target_": "data.text.TextFiles", "files": f"{tmp_path}/*.txt", "tokenizer": "bytes"}
        source |= {"cache_dir": str(tmp_path / "cache"), "val_fraction": 0.5, "document_bytes": 16_384}
    data = data_sources.build(source)
    data.prepare()
    x, y = data.train_batch([0, 1], cfg.train_len, cfg.seed)
    assert x.shape == y.shape == (2, cfg.train_len)
    sets = data.eval_sets(cfg.lengths, target_tokens=cfg.target_tokens, sequences=2)
    assert {part.length for part in sets} == set(cfg.lengths)
    for part in [*sets, data.validation(cfg.train_len, cfg.trainer.val_tokens)]:
        x, y = part.batch(0, 1)
        assert x.shape == (1, part.length)
        assert (y != IGNORE_INDEX).any()
        assert 0 <= x.min() <= x.max() < data.vocab_size


@pytest.mark.parametrize("task", TASKS)
def test_every_task_trains(train, task):
    options = {"recall": ["data.pairs=2"], "variables": ["data.chains=1"]}.get(task, [])
    outcome = train(f"data={task}", "train_len=16", "eval.lengths=[1,2]", "pe=cope", *options)
    assert outcome.code == 0, outcome.err
    run = train.runs / f"cope-{task}"
    last = rows_of(run)[-1]
    assert last["step"] == 6
    assert 0 <= last["val/error"] <= 100
    assert "val/bits_per_byte" not in last
    found = load_all(run)
    assert {e.kind for e in found} == {"lengths"}
    assert all({m.length for m in e.measured} == {16, 32} for e in found)
    assert "% wrong" in outcome.out
