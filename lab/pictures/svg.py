"""Elements of SVG pictures, as text."""

from html import escape


def element(name: str, *content: str, **attributes: str | float) -> str:
    """Return an element.

    Args:
        content: what stands inside it, as SVG.
        attributes: fractions get one decimal; `look` is the class, and `_` in a name stands for `-`.
    """
    parts = [name]
    for attribute, value in attributes.items():
        key = "class" if attribute == "look" else attribute.replace("_", "-")
        if isinstance(value, float):
            value = f"{value:.1f}"
        parts.append(f'{key}="{escape(str(value))}"')
    start = " ".join(parts)
    if not content:
        return f"<{start}/>"
    return f"<{start}>{''.join(content)}</{name}>"


def text(x: float, y: float, words: str, look: str = "", anchor: str = "start") -> str:
    """Return words at a point of their base line, which is their start, middle or end."""
    return element("text", escape(words), look=look, x=x, y=y, text_anchor=anchor)
