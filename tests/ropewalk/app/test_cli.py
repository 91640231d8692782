"""Text that comes from files stands for itself on Hydra's command line."""

from itertools import product

from ropewalk.app.compose import composed, plain, quoted

PIECES = ["\\", "'", "${oc.env:SECRET}", "${", "$", "}", " ", "\n"]


def test_text_stands_for_itself(monkeypatch):
    """All orders of three pieces that Hydra or OmegaConf read as something else."""
    monkeypatch.setenv("SECRET", "hunter2")
    texts = ["".join(pieces) for pieces in product(PIECES, repeat=3)]
    overrides = [f"+texts.t{i}={quoted(text)}" for i, text in enumerate(texts)]
    with composed("pe/nope", *overrides) as config:
        assert [*plain(config)["texts"].values()] == texts
