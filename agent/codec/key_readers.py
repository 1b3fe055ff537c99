"""Reads HAMi's files key by key: known keys are checked; a warning names each unknown one."""

from collections.abc import Callable, Iterable, Mapping

from agent.codec.faults import Faults
from agent.codec.known_keys import IgnoredKeys, KnownKey, nearest
from agent.codec.places import Place
from agent.core.errors import cap

Reader = Callable[[Place], object]
"""Checks one value and returns it. Raises SettingsError with its place."""


def read_known(
    place: Place, table: Mapping[str, Reader], passed: IgnoredKeys, faults: Faults | None = None
) -> tuple[KnownKey, ...]:
    """Read the known keys of a mapping in their order; null counts as absent.

    With `faults`, errors go there and the valid keys are returned.

    Raises:
        SettingsError: not a mapping, a repeated key, or a value of another type.
    """
    keys: list[KnownKey] = []
    wrong = Faults() if faults is None else faults
    with wrong.kept():
        for key, here, value in place.pairs():
            read = table.get(key)
            if read is None:
                passed.over(lambda: _unknown(key, here, table))  # noqa: B023 -- called at once
            elif not value.null:
                with wrong.kept():
                    keys.append(KnownKey(key, read(value), value.where))
    if faults is None:
        wrong.refuse()
    return tuple(keys)


def _unknown(key: str, here: Place, known: Iterable[str]) -> str:
    return str(here.fault(f"unknown key `{cap(key, 64)}`{nearest(key, known)}"))


def strict_whole(low: int, high: int) -> Reader:
    """A reader of whole numbers by the rule of Go's JSON: no fraction, no exponent."""
    return lambda place: place.integer(low, high)


def many(read: Reader, late: Callable[[Place], bool] = lambda _: False) -> Reader:
    """A reader of lists of such values; null is an empty list, as in Go. `late`: read last."""

    def read_all(place: Place) -> tuple[object, ...]:
        values: list[object] = []
        faults = Faults()
        for item in () if place.null else sorted(place.items(), key=late):
            with faults.kept():
                values.append(read(item))
        faults.refuse()
        return tuple(values)

    return read_all


def nested(table: Mapping[str, Reader], passed: IgnoredKeys) -> Reader:
    """A reader of mappings with these keys, as a dict; null has none."""

    def read(place: Place) -> dict[str, object]:
        keys = () if place.null else read_known(place, table, passed)
        return {known.key: known.value for known in keys}

    return read
