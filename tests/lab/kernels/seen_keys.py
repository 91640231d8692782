"""Which keys each query sees, in tests of kernels: windows, and documents that begin elsewhere in each row."""

import torch


def first_seen(rows, length, *, window=None, documents=None):
    """The first key that each query sees, [rows, length]; `documents` are where those after the first begin."""
    i = torch.arange(length)
    first = torch.zeros(rows, length, dtype=torch.long)
    if documents:
        for row, begins in zip(first, documents, strict=True):
            for begin in begins:
                row[begin:] = begin
    if window:
        first = torch.maximum(first, i - window + 1)
    return first


def visible(first):
    """Whether each query sees each key, [rows, length, length]."""
    i = torch.arange(first.size(1))
    return (i <= i[:, None]) & (i >= first[:, :, None])


def ranges(first):
    """What kernels take: `first`, and the last query that sees each key, int32 [rows, length] each."""
    i = torch.arange(first.size(1)).expand_as(first).contiguous()
    last = torch.searchsorted(first, i, right=True) - 1
    return {"first": first.int(), "last": last.int()}
