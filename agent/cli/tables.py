"""Lays out tables that fit the terminal. Pure.

It is our own and not a library's: `status` also runs in the agent's image, which has none.
"""

import unicodedata
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

GAP: Final = "  "
LEAST: Final = 6
"""Characters to which a column that may be cut is cut at most."""


class Column(msgspec.Struct, frozen=True):
    """A column. `rank`: columns of the highest rank are left out first; 0: never.

    `flexible`: its cells may be cut to fit; `right`: it is aligned to the right.
    """

    title: str
    rank: int = 0
    flexible: bool = False
    right: bool = False


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Yield a line of titles and a line for each row, none wider than `width` if that is possible.

    It cuts flexible columns first, then leaves columns out by their rank, then cuts the lines.
    """
    kept = list(range(len(columns)))
    while True:
        sizes = {
            place: max(wide(columns[place].title), *(wide(row[place]) for row in rows), 0)
            for place in kept
        }
        excess = sum(sizes.values()) + len(GAP) * (len(kept) - 1) - width
        for place in sorted(kept, key=lambda place: -sizes[place]):
            if excess > 0 and columns[place].flexible:
                smaller = max(min(LEAST, sizes[place]), sizes[place] - excess)
                excess -= sizes[place] - smaller
                sizes[place] = smaller
        last = max(kept, key=lambda place: (columns[place].rank, place))
        if excess <= 0 or columns[last].rank == 0:
            break
        kept.remove(last)
    titles = [column.title for column in columns]
    for row in (titles, *rows):
        cells = [_cell(row[place], sizes[place], right=columns[place].right) for place in kept]
        yield shorten(GAP.join(cells).rstrip(), width)


def wide(text: str) -> int:
    """The number of columns that a terminal takes for the text."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def shorten(text: str, width: int) -> str:
    """Cut the text to `width` columns; an ellipsis marks the cut."""
    if wide(text) <= width:
        return text
    kept = ""
    for char in text:
        if wide(kept + char) > width - 1:
            break
        kept += char
    return kept + "…"


def _cell(text: str, size: int, *, right: bool) -> str:
    text = shorten(text, size)
    blank = " " * (size - wide(text))
    return blank + text if right else text + blank
