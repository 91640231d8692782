"""Text that comes from files stands for itself on Hydra's command line and in what Hydra composes."""

from itertools import product

from omegaconf import OmegaConf

from ropewalk.app.cli import composed, encoding, literal, plain, quoted

PIECES = ["\\", "'", "${oc.env:SECRET}", "${", "$", "}", " ", "\n"]


def test_text_stands_for_itself(monkeypatch):
    """All orders of three pieces that Hydra or OmegaConf read as something else."""
    monkeypatch.setenv("SECRET", "hunter2")
    texts = ["".join(pieces) for pieces in product(PIECES, repeat=3)]
    overrides = [f"+texts.t{i}={quoted(text)}" for i, text in enumerate(texts)]
    with composed("pe/nope", *overrides) as config:
        assert [*plain(config)["texts"].values()] == texts

    nested = {"list": [texts, {"text": texts[0], "none": None}], "number": 1.5, "truth": True}
    config = OmegaConf.create(literal(nested))

    assert OmegaConf.to_container(config, resolve=True) == nested


def test_an_encoding_in_a_folder_of_the_users_is_found_by_its_name(tmp_path):
    (tmp_path / "pe").mkdir()
    (tmp_path / "pe" / "mine.yaml").write_text("defaults: [rope, _self_]\nbase: 5.0\n")
    with composed("draw", f"hydra.searchpath=[file://{tmp_path}]"):
        assert encoding("mine") == encoding("rope") | {"base": 5.0}
