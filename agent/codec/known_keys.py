"""HAMi's files, key by key: what is known is checked, what is not is told and passed over."""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from agent.codec.faults import Faults
from agent.codec.places import Place
from agent.core.errors import cap

TOLD: Final = 20
"""Sentences about what was passed over in one file: the log is not for its content."""

Reader = Callable[[Place], object]
"""Checks one value and returns it. Raises SettingsError with its place."""


@dataclasses.dataclass(frozen=True, slots=True)
class KnownKey:
    """A known key that the file has, its value, and where it stands (`file:line:column`)."""

    key: str
    value: object
    where: str


class IgnoredKeys:
    """What was passed over: the first of it by sentences, the others by their number.

    `name` is what messages call the file.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._said: list[str] = []
        self._more = 0

    def over(self, say: Callable[[], str]) -> None:
        """One more; `say` makes its sentence, where that is still wanted."""
        if len(self._said) < TOLD:
            self._said.append(say())
        else:
            self._more += 1

    @property
    def warnings(self) -> tuple[str, ...]:
        """At most TOLD sentences, and one for the others."""
        more = (f"{self._name}: and {self._more} more are passed over",) if self._more else ()
        return (*self._said, *more)


def read_known(
    place: Place, table: Mapping[str, Reader], passed: IgnoredKeys, faults: Faults | None = None
) -> tuple[KnownKey, ...]:
    """The known keys of a mapping in their order; null is as good as absent.

    With `faults` what is wrong goes there, and what is right is returned.

    Raises:
        SettingsError: no mapping, a key twice, or a value of another type.
    """
    found: list[KnownKey] = []
    wrong = Faults() if faults is None else faults
    with wrong.kept():
        for key, here, value in place.pairs():
            read = table.get(key)
            if read is None:
                passed.over(lambda: _unknown(key, here, table))  # noqa: B023 -- said at once
            elif not value.null:
                with wrong.kept():
                    found.append(KnownKey(key, read(value), value.where))
    if faults is None:
        wrong.refuse()
    return tuple(found)


def _unknown(key: str, here: Place, known: Iterable[str]) -> str:
    return str(here.fault(f"unknown key `{cap(key, 64)}`{nearest(key, known)}"))


def nearest(name: str, known: Iterable[str], likeness: float = 0.75) -> str:
    """The hint behind an unknown name; empty when none is so alike (1: the same)."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=likeness)
    return f"; did you mean {close[0]}?" if close else ""


def strict_whole(low: int, high: int) -> Reader:
    """A whole number by the rule of Go's JSON: no fraction, no exponent."""
    return lambda place: place.integer(low, high)


def many(read: Reader) -> Reader:
    """A list of such values; null, which stands where Go leaves a value at its zero, is none."""

    def read_all(place: Place) -> tuple[object, ...]:
        found: list[object] = []
        faults = Faults()
        for item in () if place.null else place.items():
            with faults.kept():
                found.append(read(item))
        faults.refuse()
        return tuple(found)

    return read_all


def nested(table: Mapping[str, Reader], passed: IgnoredKeys) -> Reader:
    """A mapping with these keys, as a dict; null has none."""

    def read(place: Place) -> dict[str, object]:
        found = () if place.null else read_known(place, table, passed)
        return {one.key: one.value for one in found}

    return read
