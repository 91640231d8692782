"""Kernels in Triton, for GPUs: faster twins of encodings, which are their specification.

For: speed on GPUs. Has shown: exact on an H100, in 1.3 to 5 times the time of PyTorch's attention without positions,
CoPE at worst in 23. Leaves: what is no faster there.
"""

from collections.abc import Iterable, Sequence

from model.layout import Layout
from model.position.base import PositionEncoding


def problem(encodings: Sequence[PositionEncoding], device: str) -> str:
    """Say why these encodings cannot use kernels on a device; "" if they can, or if none of them has any.

    Kernels are compared with the encodings in PyTorch, in a process of its own: see `lab.kernels.check`.
    """
    from lab.kernels.check import checked  # needs Triton

    return checked(_with_twins(encodings), device)


def install(encodings: Iterable[PositionEncoding]) -> None:
    """Let these encodings use kernels, where there are any for their class."""
    from lab.kernels.twins import twin_of

    for pe in _with_twins(encodings):
        # Another class, as `fully_shard` gives to modules, and no attribute: a copy of the encoding, such as one at a
        # scale, would carry a method along that is bound to the original.
        pe.__class__ = twin_of(type(pe))  # type: ignore[arg-type]


def layout_of(encodings: Iterable[PositionEncoding], end: int) -> Layout | None:
    """The layout of packed documents where they are, for encodings that are all twins and can; otherwise None.

    Args:
        end: the token that ends a document.
    """
    from lab.kernels.in_place import InPlace, all_read_in_place

    return InPlace(end) if all_read_in_place(encodings) else None


def is_twin(pe: PositionEncoding) -> bool:
    """Whether `install` has changed the class of an encoding."""
    return getattr(type(pe), "is_twin", False)


def _with_twins(encodings: Iterable[PositionEncoding]) -> list[PositionEncoding]:
    """The distinct encodings that are no twins, and could be."""
    from lab.kernels.twins import bias_of

    return [pe for pe in dict.fromkeys(encodings) if not is_twin(pe) and bias_of(type(pe)) is not None]
