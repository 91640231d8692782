"""A checkpoint is opened in its own run, and says what it was trained to read."""

import torch
from conftest import build_gpt, pe_options

from model import serialization
from ropewalk.app.init_from import load_weights, opened

OPTIONS = ["pe=rope", "trainer.keep_checkpoints=9", "eval.variants=[]", "eval.lengths=[1]"]


def test_a_checkpoint_of_an_extended_model_has_its_new_length(trained):
    base = trained(*OPTIONS, name="base")
    longer = trained(*OPTIONS, f"init_from={base}", "train_len=32", name="longer")
    finished = opened(longer, step=4).description
    (longer / "model.json").unlink()
    assert opened(longer, step=4).description.items() <= finished.items()
    assert finished["original_len"] == 32


def test_a_tied_head_has_the_embedding_of_a_model_that_has_not_tied_them(tmp_path):
    """Whatever the order of names in a set, which others change."""
    base = build_gpt("rope", tie_embeddings=False)
    for others in range(20):
        weights = base.state_dict() | {f"other{i}": torch.zeros(1) for i in range(others)}
        serialization.save(base, tmp_path, pe=pe_options("rope"), weights=weights)
        net = build_gpt("rope", seed=1)
        load_weights(net, serialization.describe(tmp_path) | {"source": str(tmp_path)}, partial=True)
        torch.testing.assert_close(net.head.weight, base.embedding.weight)
