"""What is known of a file's keys: those that were found, and hints for unknown ones."""

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

TOLD: Final = 20
"""Warnings about ignored keys of one file; further ones are only counted."""

LIKENESS: Final = 0.65
"""The least likeness of a name in a hint (1: equal). Less misleads."""


class KnownKey(msgspec.Struct, frozen=True):
    """A known key in the file, its value and its place (`file:line:column`)."""

    key: str
    value: object
    where: str


class IgnoredKeys:
    """The ignored parts of a file, which messages call `name`: warnings, then a count."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._warnings: list[str] = []
        self._more = 0

    def over(self, warning: Callable[[], str]) -> None:
        """Add one; `warning` is called only for the first TOLD."""
        if len(self._warnings) < TOLD:
            self._warnings.append(warning())
        else:
            self._more += 1

    @property
    def warnings(self) -> tuple[str, ...]:
        """At most TOLD warnings, and one with the number of the others."""
        more = (f"{self._name}: and {self._more} more are passed over",) if self._more else ()
        return (*self._warnings, *more)


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name, in any case; empty if no known one is similar."""
    import difflib  # noqa: PLC0415 -- only a mistake needs it

    names = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=LIKENESS)
    return f"; did you mean {names[close[0]]}?" if close else ""
