"""Sources of token sequences, each a class behind the interface `Data`; `build` makes the one configured."""

from data.base import IGNORE_INDEX, Data, EvalSet, build, resolve

__all__ = ["IGNORE_INDEX", "Data", "EvalSet", "build", "resolve"]
