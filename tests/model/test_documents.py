"""Packed documents: what stands where; losses and gradients. That none reaches another: see test_encodings.py."""

import subprocess
import sys

import pytest
import torch
from conftest import ROOT, build_gpt, tokens
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from model.reading import WHOLE, packed

END = 49


@given(st.integers(1, 4), st.integers(1, 70), st.floats(0, 1), st.integers(0, 99))
def test_each_token_stands_once_after_those_of_its_document(n, length, share, seed):
    draws = torch.rand(n, length, generator=torch.Generator().manual_seed(seed))
    idx = torch.where(draws < share, END, 0)
    reading = packed(idx, END)
    if not (idx[:, :-1] == END).any():
        assert reading is WHOLE
        return
    # Every token of the batch has its place in the rows, which have not much more room.
    in_rows = torch.cat([rows.flatten() for rows in reading.rows])
    assert torch.equal(in_rows[reading.place], torch.arange(n * length).view(n, length))
    assert len(in_rows) < 2 * n * length + 16 * len(reading.rows[0])

    for text, pos in zip(idx.tolist(), reading.pos.tolist(), strict=True):
        start = 0
        for t in range(length):
            assert pos[t] == t - start
            if text[t] == END:
                start = t + 1
    # The place within a row is the position within the document.
    columns = []
    for rows in reading.rows:
        column = torch.arange(rows.size(1))
        columns.append(column.expand_as(rows).flatten())
        assert (rows - column <= rows[:, :1]).all()  # of one document, and then padding
    assert torch.equal(torch.cat(columns)[reading.place], reading.pos)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["rope", "cope", "path_fox", "learned", "stick_breaking"])
def test_the_gradient_is_that_of_the_documents_one_by_one(name, checkpointing):
    """Of RoPE with sinks, and of a learned table with a convolution and offset keys."""
    cfg = {"rope": {"sinks": True}, "learned": {"conv": 4, "key_offset": True}}.get(name, {})
    net = build_gpt(name, train_len=40, checkpointing=checkpointing, **cfg).double().train()
    idx, targets = tokens(40, 4, END).split(2)
    idx[0, [6, 7, 30]] = END
    idx[1, 20] = END
    sizes = [[7, 1, 23, 9], [21, 19]]
    loss = net(idx, packed(idx, END), targets=targets)

    total = 0.0
    for row in range(2):
        documents = zip(idx[row].split(sizes[row]), targets[row].split(sizes[row]), strict=True)
        for x, y in documents:
            total += net(x[None], targets=y[None]) * len(x)
    expected = total / idx.numel()
    torch.testing.assert_close(loss, expected)
    parameters = list(net.parameters())
    gradients = torch.autograd.grad(loss, parameters)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, parameters))


@pytest.mark.long
def test_compiled_once_whatever_the_documents():
    torch._dynamo.reset()
    net = build_gpt("rope", train_len=40).train()
    counter = CompileCounter()
    compiled = torch.compile(net, dynamic=False, backend=counter)
    counts = []
    for every in (30, 9, 3, 20, 2):
        idx = torch.arange(80).view(2, 40) % 49
        idx[:, ::every] = END
        reading = packed(idx, END)
        loss = compiled(idx, reading, targets=idx)
        assert torch.equal(loss, net(idx, reading, targets=idx))
        counts.append(counter.frame_count)
    assert len(set(counts[1:])) == 1  # PyTorch 2.11 compiles once more for another number of documents
    torch._dynamo.reset()


@pytest.mark.long
def test_the_compiler_is_not_imported_before_it_is_used():
    """It takes a second, which `--help` and every message about a mistake would wait for."""
    code = "import sys, train; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
