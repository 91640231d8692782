"""Words of the report are written once, as Markdown with bold, and rendered for a page or a terminal."""

import re
from collections.abc import Iterable, Sequence
from html import escape

_TOKEN = re.compile(r"(\\.|\*\*)")  # an escaped character, or where bold begins or ends


def escaped(text: object) -> str:
    """Any text as Markdown that shows it."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", str(text).replace("\n", " "))


def bold(text: str) -> str:
    """Any text as bold Markdown."""
    return f"**{escaped(text)}**"


def to_plain(markdown: str) -> str:
    """The words alone."""
    words = []
    for token in _TOKEN.split(markdown):
        if token != "**":
            words.append(token[1:] if _TOKEN.fullmatch(token) else token)
    return "".join(words)


def to_html(markdown: str) -> str:
    """HTML with <b> for bold."""
    parts = []
    is_bold = False
    for token in _TOKEN.split(markdown):
        if token == "**":
            is_bold = not is_bold
            parts.append("<b>" if is_bold else "</b>")
        else:
            parts.append(escape(token[1:] if _TOKEN.fullmatch(token) else token))
    return "".join(parts)


def table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a table; the cells are any text."""
    every = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(escaped(cell) for cell in row) + " |" for row in every]
