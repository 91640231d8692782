"""Words of the report are written once, as Markdown with bold, and rendered for a page or a terminal."""

import re
from collections.abc import Iterable, Sequence
from html import escape

# An escaped character, or where bold begins or ends. Splitting by it keeps both, so that each is rendered once.
_TOKEN = re.compile(r"(\\.|\*\*)")


def escaped(text: object) -> str:
    """Escape any text, so that Markdown shows it as it is."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", str(text).replace("\n", " "))


def bold(text: str) -> str:
    """Return any text as bold Markdown."""
    return f"**{escaped(text)}**"


def to_plain(markdown: str) -> str:
    """Render Markdown with bold as plain text."""
    words = markdown.replace("**", "")
    return re.sub(r"\\(.)", r"\1", words)


def to_html(markdown: str) -> str:
    """Render Markdown with bold as HTML."""
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
    """Return the lines of a table; the cells are any text."""
    lines = []
    for row in [header, ["---"] * len(header), *rows]:
        cells = " | ".join(map(escaped, row))
        lines.append(f"| {cells} |")
    return lines
