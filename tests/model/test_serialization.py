"""A trained model on disk: what was changed in its files is refused, and no file is read without an end."""

import pytest
import torch
from conftest import build_gpt, edit, pe_options

from model import serialization

IDX = torch.arange(9)[None]


def test_a_saved_network_is_loaded_as_it_was(encoding, tmp_path):
    net = build_gpt(encoding, tie_embeddings=encoding < "n")
    serialization.save(net, tmp_path, pe=pe_options(encoding), tokenizer={"tokenizer": "x"})
    again = serialization.load(tmp_path)

    assert torch.equal(net(IDX), again(IDX))
    assert (again.head.weight is again.embedding.weight) == net.cfg.tie_embeddings


@pytest.fixture
def folder(tmp_path):
    net = build_gpt("yarn", vocab_size=50, vocab_multiple=64)  # so that tensors fit vocabularies of up to 64 tokens
    serialization.save(
        net,
        tmp_path,
        pe=pe_options("yarn"),
        tokenizer={"tokenizer": "x"},
        original_len=48,
    )
    return tmp_path


@pytest.mark.parametrize("key", ["train_len", "original_len"])
@pytest.mark.parametrize("value", [0, 16.5, 2**31])
def test_lengths_out_of_range_are_refused(folder, key, value):
    edit(folder / serialization.DESCRIPTION, **{key: value})

    with pytest.raises(ValueError, match=f"train_len={value} must be a whole number from 1"):
        serialization.describe(folder)


def test_an_original_length_without_a_checksum_is_not_believed_without_a_word(folder, capsys):
    """Scalings count from it, so that a damaged one gives other results. Older versions wrote no checksum."""
    edit(folder / serialization.DESCRIPTION, original_len=49)

    assert serialization.describe(folder)["original_len"] == 49
    assert "is of an older version, without a checksum: its original_len=49 is trusted" in capsys.readouterr().out
