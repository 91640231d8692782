"""Every experiment works from its YAML on."""

import pytest
from conftest import ROOT

from data.base import IGNORE_INDEX, build_data
from ropewalk.app.compose import composed
from ropewalk.app.configure import configure, train_values

FOLDER = ROOT / "conf" / "experiment"
EXPERIMENTS = sorted(str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.rglob("*.yaml"))
DATA = sorted(path.stem for path in (ROOT / "conf" / "data").glob("*.yaml") if "@package" in path.read_text())


@pytest.fixture
def text(tmp_path) -> dict:
    """Options of a text of ours, in place of a download."""
    lines = [f"{i} knots in a rope\n" for i in range(8_000)]
    (tmp_path / "corpus.txt").write_text("".join(lines))
    return {
        "name": "text",
        "_target_": "data.text.TextFiles",
        "files": f"{tmp_path}/*.txt",
        "tokenizer": "bytes",
        "cache_dir": str(tmp_path / "cache"),
        "val_fraction": 0.5,
        "document_bytes": 16_384,
    }


@pytest.mark.parametrize(
    "option", [*(f"experiment={name}" for name in EXPERIMENTS), *(f"data={name}" for name in DATA)]
)
def test_every_experiment_has_samples(option, text):
    """At the length of training, and at every length it is measured at."""
    with composed("train", option) as values:
        cfg = configure(values)
    is_text = "data.text." in cfg.data["_target_"]
    data = build_data(text if is_text else cfg.data)
    data.prepare()
    x, y = data.train_batch([0, 1], cfg.train_len, cfg.seed)

    assert x.shape == y.shape == (2, cfg.train_len)

    sets = data.eval_sets(cfg.lengths, target_tokens=cfg.target_tokens, sequences=2)

    assert {part.length for part in sets} == set(cfg.lengths)

    for part in [*sets, data.validation(cfg.train_len, cfg.trainer.val_tokens)]:
        _, y = part.batch(0, 1)

        assert (y != IGNORE_INDEX).any()


@pytest.mark.parametrize("name", DATA)
def test_data_bring_settings_beneath_an_experiment_and_the_command_line(name):
    own = train_values(f"data={name}")
    steps = own["trainer"]["max_steps"]

    assert steps != train_values()["trainer"]["max_steps"]

    own["trainer"]["max_steps"] = 5

    assert train_values(f"data={name}", "trainer.max_steps=5") == own

    quick = train_values(f"data={name}", "experiment=quick")

    assert quick["trainer"]["max_steps"] == 100
    assert quick["optim"]["lr"] == own["optim"]["lr"]
