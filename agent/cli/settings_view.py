"""Renders settings as a table for people and as JSON for programs."""

import json
from collections.abc import Iterable, Sequence
from typing import Final

from agent.settings.fields import Setting

_WIDEST: Final = 48
"""Columns reserved for a value; a longer one moves the next column."""
_GAP: Final = "  "


def plain(setting: Setting) -> dict[str, object]:
    """A setting for JSON; a duration is a number of seconds."""
    return {
        "key": setting.field.key,
        "value": _listed(setting.value),
        "origin": setting.origin,
    }


def table(settings: Sequence[Setting], *, origin: bool, columns: int) -> Iterable[str]:
    """Yield a line of headings and a line for each setting. Nothing is cut.

    A cell that would go beyond `columns` begins a new line.
    """
    rows = [("KEY", "VALUE", "FROM")]
    rows += [(setting.field.key, _text(setting), setting.origin) for setting in settings]
    keys = max(len(row[0]) for row in rows)
    values = min(max(len(row[1]) for row in rows), _WIDEST)
    for key, value, place in rows:
        cells = [f"{key:<{keys}}", f"{value:<{values}}", *([place] if origin else ())]
        yield from _folded(cells, columns)


def _folded(cells: Sequence[str], columns: int) -> Iterable[str]:
    """Join the cells to one line or several."""
    line = cells[0]
    for cell in cells[1:]:
        longer = f"{line}{_GAP}{cell}"
        if len(longer.rstrip()) > columns:
            yield f"{line.rstrip()}\n"
            longer = f"{_GAP}{_GAP}{cell}"
        line = longer
    yield f"{line.rstrip()}\n"


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _text(setting: Setting) -> str:
    value = setting.field.read.write(setting.value)
    if value is None:
        return "-"
    is_shown = isinstance(value, str) and value.isprintable() and value
    return str(value) if is_shown else json.dumps(_listed(value))
