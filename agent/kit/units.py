"""How amounts are written for people, and how names with numbers are ordered. Pure."""

import datetime as dt
import re
from collections.abc import Collection
from typing import Final

import msgspec

UNKNOWN: Final = "-"


class Column(msgspec.Struct, frozen=True):
    """A column. `rank`: columns of the highest rank are left out first; 0: never.

    `least`: its cells may be cut to so many characters to fit; 0: they are not cut.
    """

    title: str
    rank: int = 0
    least: int = 0
    right: bool = False


def counted(number: int, noun: str) -> str:
    """The number with its noun, in the plural where it needs one, such as `2 GPUs`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def some(names: Collection[str], most: int = 3) -> str:
    """The first of the names in their order, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(sorted(names)[:most]) + more


def gib(mib: int | None, unit: str = " GiB") -> str:
    """MiB as GiB with one digit, such as `48.0 GiB`. `unit`: what stands behind the number."""
    return UNKNOWN if mib is None else f"{mib / 1024:.1f}{unit}"


def percent(share: int | None) -> str:
    """A share of something, such as `71 %`."""
    return UNKNOWN if share is None else f"{share} %"


def span(seconds: float) -> str:
    """A duration in its two greatest units, such as `12 min` or `3 h 5 min`; at least 0 s."""
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole} s"

    days, hours, minutes = whole // 86_400, whole // 3_600 % 24, whole // 60 % 60
    parts = [(days, "d"), (hours, "h"), (minutes if not days else 0, "min")]
    return " ".join(f"{number} {unit}" for number, unit in parts if number)


def age(since: dt.datetime | None, now: dt.datetime) -> str:
    """The time since then, as `span` writes it."""
    return UNKNOWN if since is None else span((now - since).total_seconds())


def by_number(name: str) -> tuple[tuple[int, str], ...]:
    """The order of names with numbers: gpu-2 is before gpu-10."""
    parts = re.findall(r"(\d+)|(\D+)", name)
    return tuple((int(digits or 0), text) for digits, text in parts)
