"""Settings for people, as a table, and for programs, as JSON."""

import json
from collections.abc import Iterable, Sequence
from typing import Final

from agent.settings.fields import Setting

API_VERSION: Final = "hami-agent/v1"


def plain(setting: Setting) -> dict[str, object]:
    """A setting for JSON. A duration is a number of seconds there."""
    return {
        "key": setting.field.key,
        "value": _listed(setting.value),
        "origin": setting.origin,
    }


def table(settings: Sequence[Setting], *, origin: bool, width: int) -> Iterable[str]:
    """Lines that fit `width` columns: the last column is cut, never wrapped."""
    rows = [("KEY", "VALUE", "FROM")]
    rows += [(one.field.key, _text(one), one.origin) for one in settings]
    keys = max(len(row[0]) for row in rows)
    values = min(max(len(row[1]) for row in rows), 48)
    for key, value, place in rows:
        line = f"{key:<{keys}}  {value:<{values}}"
        yield fit(f"{line}  {place}" if origin else line, width)


def fit(line: str, width: int) -> str:
    """One line of at most `width` columns, the cut marked."""
    line = line.rstrip()
    return (line if len(line) <= width else line[: width - 1] + "…") + "\n"


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _text(setting: Setting) -> str:
    """The value as the files say it."""
    value = setting.field.read.write(setting.value)
    if value is None:
        return "-"
    return json.dumps(_listed(value)) if not isinstance(value, str) else value or '""'
