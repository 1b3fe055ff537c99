"""HAMi's files, key by key: what is known is checked, what is not is told and passed over."""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping

from agent.codec.places import FLOAT, Place
from agent.core.errors import cap

Reader = Callable[[Place], object]
"""Checks one value and returns it. Raises SettingsError with its place."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A known key that the file has, its value, and where it stands (`file:line:column`)."""

    key: str
    value: object
    where: str


def read_known(place: Place, table: Mapping[str, Reader], warnings: list[str]) -> tuple[Found, ...]:
    """The known keys of a mapping in their order; null is as good as absent.

    Raises:
        SettingsError: no mapping, a key twice, or a value of another type.
    """
    found: list[Found] = []
    for key, here, value in place.pairs():
        read = table.get(key)
        if read is None:
            warnings.append(str(here.fault(f"unknown key `{cap(key, 64)}`{nearest(key, table)}")))
        elif not value.null:
            found.append(Found(key, read(value), value.where))
    return tuple(found)


def nearest(name: str, known: Iterable[str], likeness: float = 0.75) -> str:
    """The hint behind an unknown name; empty when none is so alike (1: the same)."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=likeness)
    return f"; did you mean {close[0]}?" if close else ""


def whole(low: int, high: int) -> Reader:
    """A whole number; Helm writes great ones with an exponent, so `1e+06` counts as whole."""

    def read(place: Place) -> int:
        if place.node.tag == FLOAT:
            number = place.number()
            if number == int(number) and low <= number <= high:
                return int(number)
        return place.integer(low, high)

    return read


def strict_whole(low: int, high: int) -> Reader:
    """A whole number by the rule of Go's JSON: no fraction, no exponent."""
    return lambda place: place.integer(low, high)


def many(read: Reader) -> Reader:
    """A list of such values."""
    return lambda place: tuple(read(item) for item in place.items())


def nested(table: Mapping[str, Reader], warnings: list[str]) -> Reader:
    """A mapping with these keys, as a dict."""
    return lambda place: {one.key: one.value for one in read_known(place, table, warnings)}
