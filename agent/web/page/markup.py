"""Builds HTML: text is escaped unless it is `Html`, and lists end where their room ends."""

import html
import re
from collections.abc import Iterable
from typing import Final

from agent.core.errors import cap

LONGEST: Final = 400
"""Characters of one text. A longer one is cut."""
LONGEST_VALUE: Final = 2_000
"""The same for the value of an attribute."""

_VOID: Final = frozenset({"input", "link", "meta"})
_DRAWN: Final = frozenset({"path"})
_OPEN: Final = frozenset({"dd", "dt", "li", "td", "th", "tr"})
"""Elements that the next one or the end of their parent closes: HTML asks for no end tag."""
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
"""Values of attributes that need no quotes."""


class Html(str):
    """Markup that was made here. Any other text is escaped."""

    __slots__ = ()


def text(foreign: str, limit: int = LONGEST) -> Html:
    """One line of text: without control characters, cut to `limit` characters, escaped.

    A space at an end stays, because it may part this text from an element.
    """
    if len(foreign) <= limit and foreign.isprintable():  # nearly always, and cap() is slow
        return Html(html.escape(foreign))
    before, after = foreign[:1].isspace(), foreign[1:][-1:].isspace()
    return Html(f"{' ' * before}{html.escape(cap(foreign, limit))}{' ' * after}")


def join(parts: Iterable[str]) -> Html:
    """All parts, one after the other."""
    return Html("".join(part if isinstance(part, Html) else text(part) for part in parts))


def element(name: str, /, *children: str, **attributes: str | bool) -> Html:
    """An element. `class_` and `for_` lose their underscore; others turn it into a hyphen.

    An attribute that is True has no value; one that is False or empty is left out.
    """
    start = name + "".join(map(_attribute, attributes.items()))
    if name in _DRAWN:
        return Html(f"<{start} />")
    end = "" if name in _VOID | _OPEN else f"</{name}>"
    return Html(f"<{start}>{join(children)}{end}")


def within(items: Iterable[Html], room: int) -> tuple[Html, int]:
    """As many of the items as have `room` bytes together, and their number."""
    taken: list[Html] = []
    for item in items:
        room -= size(item)
        if room < 0:
            break
        taken.append(item)
    return join(taken), len(taken)


def size(markup: str) -> int:
    """Bytes in UTF-8."""
    return len(markup.encode())


def _attribute(item: tuple[str, str | bool]) -> str:
    name, value = item[0].removesuffix("_").replace("_", "-"), item[1]
    if not value:
        return ""
    if value is True:
        return f" {name}"
    if _BARE.fullmatch(value):
        return f" {name}={value}"
    return f' {name}="{text(value, LONGEST_VALUE)}"'
