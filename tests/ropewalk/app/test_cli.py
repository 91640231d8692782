"""Text that comes from files stands for itself on Hydra's command line and in what Hydra composes."""

from itertools import product

import pytest
from omegaconf import OmegaConf

from conf.schema import ConfigError
from ropewalk.app.cli import composed, encoding, literal, plain, quoted

PIECES = ["\\", "'", "${oc.env:SECRET}", "${", "$", "}", " ", "\n"]


def test_text_stands_for_itself(monkeypatch):
    """All orders of three pieces that Hydra or OmegaConf read as something else."""
    monkeypatch.setenv("SECRET", "hunter2")
    texts = ["".join(pieces) for pieces in product(PIECES, repeat=3)]
    overrides = [f"+texts.t{i}={quoted(text)}" for i, text in enumerate(texts)]
    with composed("pe/nope", *overrides) as config:
        assert [*plain(config)["texts"].values()] == texts
    nested = {"a": [texts, {"b": texts[0], "n": None}], "x": 1.5, "y": (True, texts[1])}
    resolved = OmegaConf.to_container(OmegaConf.create(literal(nested)), resolve=True)
    assert resolved == nested | {"y": [True, texts[1]]}


def test_an_encoding_is_not_looked_for_outside_of_its_group(tmp_path):
    (tmp_path / "mine.yaml").write_text("name: mine\n")
    for name in ("../data/text", f"../../../../../../../../..{tmp_path}/mine"):
        with pytest.raises(ConfigError, match=r"is no name of an encoding: leave out \.\."):
            encoding(name)


def test_an_encoding_in_a_folder_of_the_users_is_found_by_its_name(tmp_path):
    (tmp_path / "pe").mkdir()
    (tmp_path / "pe" / "mine.yaml").write_text("defaults: [rope, _self_]\nbase: 5.0\n")
    with composed("draw", f"hydra.searchpath=[file://{tmp_path}]"):
        assert encoding("mine") == encoding("rope") | {"base": 5.0}


def test_the_name_of_a_run_may_have_an_equals_sign(train):
    """As those of a sweep over train_len."""
    outcome = train("init_from=runs/rope-train_len=32")
    assert outcome.code == 2
    assert "runs/rope-train_len=32/model.json is missing" in outcome.err
