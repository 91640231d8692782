"""Packed documents: what stands where; losses and gradients. That none reaches another: see test_encodings.py."""

import pytest
import torch
from conftest import build_gpt
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from model.documents import find_documents

END = 49


@given(st.integers(1, 4), st.integers(1, 70), st.floats(0, 1), st.integers(0, 99))
def test_each_token_stands_once_after_those_of_its_document(n, length, share, seed):
    generator = torch.Generator().manual_seed(seed)
    idx = torch.where(torch.rand(n, length, generator=generator) < share, END, 0)
    documents = find_documents(idx, END)
    before = idx[:, :-1] == END
    if not before.any():
        assert documents is None
        return
    laid = torch.cat([rows.flatten() for rows in documents.rows])
    assert torch.equal(laid[documents.place], torch.arange(n * length).view(n, length))
    assert len(laid) < 2 * n * length + 16 * len(documents.rows[0])
    for row, pos in zip(before, documents.pos, strict=True):
        starts = [0, *(row.nonzero()[:, 0] + 1).tolist()]
        assert pos.tolist() == [t - max(start for start in starts if start <= t) for t in range(length)]
    where = torch.cat([torch.arange(rows.size(1)).expand_as(rows).flatten() for rows in documents.rows])
    assert torch.equal(where[documents.place], documents.pos)
    for rows in documents.rows:
        assert (rows - torch.arange(rows.size(1)) <= rows[:, :1]).all()  # of one document, and then padding


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["rope", "cope", "path_fox", "learned", "stick_breaking"])
def test_the_gradient_is_that_of_the_documents_one_by_one(name, checkpointing):
    generator = torch.Generator().manual_seed(0)
    conv = 4 if name == "learned" else None
    net = build_gpt(name, train_len=40, sinks=name == "rope", conv=conv, conv_at="ABCD").double()
    net.document_end, net.checkpointing = END, checkpointing
    idx, targets = torch.randint(49, (2, 2, 40), generator=generator)
    idx[0, [6, 7, 30]] = idx[1, 20] = END
    loss = net.train()(idx, targets=targets, documents=net.documents(idx))
    pieces = [part for row, sizes in zip((0, 1), ([7, 1, 23, 9], [21, 19]), strict=True)
              for part in zip(idx[row].split(sizes), targets[row].split(sizes), strict=True)]  # fmt: skip
    expected = sum(net(x[None], targets=y[None]) * len(x) for x, y in pieces) / idx.numel()
    torch.testing.assert_close(loss, expected)
    found, wanted = (torch.autograd.grad(value, list(net.parameters())) for value in (loss, expected))
    torch.testing.assert_close(found, wanted)


def test_compiled_once_whatever_the_documents():
    torch._dynamo.reset()
    net, counter = build_gpt("rope", train_len=40).train(), CompileCounter()
    net.document_end = END
    compiled, counts = torch.compile(net, dynamic=False, backend=counter), []
    for every in (30, 9, 3, 20, 2):
        idx = torch.arange(80).view(2, 40) % 49
        idx[:, ::every] = END
        documents = net.documents(idx)
        loss = compiled(idx, targets=idx, documents=documents)
        assert torch.equal(loss, net(idx, targets=idx, documents=documents))
        counts.append(counter.frame_count)
    assert len(set(counts[1:])) == 1  # PyTorch 2.11 compiles once more for another number of documents
    torch._dynamo.reset()
