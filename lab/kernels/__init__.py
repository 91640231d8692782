"""Kernels in Triton, for GPUs: faster twins of encodings, which are their specification.

For: speed on GPUs. Has shown: exact in Triton's interpreter; no GPU has run them. Leaves: what is no faster there.
"""

from collections.abc import Sequence

from model.position.base import PositionEncoding


def problem(encodings: Sequence[PositionEncoding], device: str) -> str:
    """Say why these encodings cannot use kernels on a device; "" if they can."""
    return "they are not installed in this version"


def install(encodings: Sequence[PositionEncoding]) -> None:
    """Let these encodings use kernels, where there are any for their class."""
