"""Packed documents: what stands where; losses and gradients. That none reaches another: see test_encodings.py."""

import pytest
import torch
from conftest import assert_same, build_gpt, tokens
from hypothesis import given, settings
from hypothesis import strategies as st

from model.reading import WHOLE, packed

END = 49
NET = build_gpt("learned", train_len=40, n_layer=1, n_head=1, n_kv_head=1, dim=8)


@torch.no_grad()
@settings(max_examples=15)
@given(
    st.integers(1, 3),
    st.integers(1, 40),
    st.floats(0, 1),
    st.integers(0, 99),
)
def test_documents_of_any_length_are_read_as_if_alone(n, length, share, seed):
    """A learned table tells every position apart, and the rows of an attention have little padding."""
    draws = torch.rand(n, length, generator=torch.Generator().manual_seed(seed))
    idx = torch.where(draws < share, END, torch.arange(length) % END)
    reading = packed(idx, END)

    logits = NET(idx, reading)

    for text, text_logits in zip(idx, logits, strict=True):
        is_end = text[:-1] == END
        documents = text.tensor_split(is_end.nonzero().flatten() + 1)
        alone = [NET(document[None])[0] for document in documents]

        torch.testing.assert_close(text_logits, torch.cat(alone))
    if reading is not WHOLE:
        read = sum(rows.numel() for rows in reading.rows)
        assert read < 2 * n * length + 16 * len(reading.rows[0])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("name", "cfg"),
    [
        ("rope", {"sinks": True}),
        ("cope", {}),
        ("path_fox", {}),
        ("learned", {"conv": 4, "key_offset": True}),
        ("stick_breaking", {}),
    ],
)
def test_the_gradient_is_that_of_the_documents_one_by_one(name, cfg, checkpointing):
    """A token of a long document counts as much as one of a short one."""
    net = build_gpt(name, train_len=40, checkpointing=checkpointing, **cfg).double().train()
    idx, targets = tokens(40, 4, END).split(2)
    idx[0, [6, 7, 30]] = END
    idx[1, 20] = END
    sizes = [7, 1, 23, 9, 21, 19]
    expected = 0
    for x, y in zip(
        idx.flatten().split(sizes),
        targets.flatten().split(sizes),
        strict=True,
    ):
        share = x.numel() / idx.numel()
        expected = expected + share * net(x[None], targets=y[None])

    loss = net(idx, packed(idx, END), targets=targets)

    assert_same(loss, expected, [*net.parameters()])
