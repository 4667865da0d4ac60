"""HTML and SVG from Python: what is not markup already is escaped, so that no name can become a tag."""

import html
import re

_VOID = frozenset({"meta"})
"""HTML elements that have no end tag."""

_NOT_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that no XML document may hold, among them those that stand for undecodable bytes of a path."""


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def escaped(text: str) -> Markup:
    """Return ``text`` as markup that shows it."""
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(_NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)))


def joined(*children: str) -> Markup:
    """Return the children one after the other, each escaped unless it is markup."""
    return Markup("".join(map(escaped, children)))


def element(tag: str, *children: str, **attributes: str | float | None) -> Markup:
    """Return an element. ``class_`` is the attribute class, ``aria_label`` is aria-label; what is None is
    left out.
    """
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escaped(_text(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _VOID:
        return Markup(f"<{tag}{given}/>")
    return Markup(f"<{tag}{given}>{joined(*children)}</{tag}>")


def _text(value: str | float) -> str:
    """A number with a hundredth of a pixel at most."""
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
