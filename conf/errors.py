"""Mistakes in a configuration, and the words about them. Imports little, so that a typo is answered at once."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from conf.foreign import foreign_hint


class ConfigError(ValueError):
    """A mistake in a configuration, with a line for each key that is wrong."""


def unknown_key(key: str, siblings: Iterable[str]) -> str:
    """Return the message about a key that does not exist: what it is here, if other programs have it (`conf.foreign`).

    Else it names the nearest of the keys `siblings`, which do exist, or all of them.
    """
    parent, dot, word = key.rpartition(".")
    hint = foreign_hint(key) or nearest(word, siblings, parent + dot)
    return f"{key}: no such key{hint}"


def nearest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return "; did you mean ...?" with the known word most like `word`, or else a list of all known words."""
    words = [name for name in known if name != "_target_"]
    known_of = {name.lower(): name for name in words}
    close = difflib.get_close_matches(word.lower(), known_of, n=1)
    if close:
        return f"; did you mean {prefix}{known_of[close[0]]}?"
    if words:
        return f"; available: {', '.join(words)}"
    return ""


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Join nested keys by dots: {"a": {"b": 1}} -> {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + str(key)] = value
    return flat
