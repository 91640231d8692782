"""Sources of token sequences, each a class behind the interface `Data`; `build_data` makes the one configured."""

from data.base import IGNORE_INDEX, Data, EvalSet, build_data, resolve

__all__ = ["IGNORE_INDEX", "Data", "EvalSet", "build_data", "resolve"]
