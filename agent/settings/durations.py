"""Durations as settings say them: `500ms`, `2s`, `10m`, `1h`; a number alone is seconds."""

import math
import re
from decimal import Decimal
from typing import Final

from agent.settings.fields import Kind, Value, WrongValue, decimal

HOW: Final = "As 500ms, 2s, 10m or 1h; a number alone is seconds."
"""What the sentence of each setting that is a duration says of its unit."""

_UNITS: Final = {"h": Decimal(3600), "m": Decimal(60), "s": Decimal(1), "ms": Decimal("0.001")}
_FORM: Final = re.compile("([0-9]{1,20}(?:[.][0-9]{1,400})?)(ms|s|m|h)")
_PATTERN: Final = "^[0-9]+([.][0-9]+)?(ms|s|m|h)?$"


def seconds_of(text: str) -> float | None:
    """The seconds of a duration with a unit; None for what is none."""
    found = _FORM.fullmatch(text)
    return None if found is None else float(Decimal(found[1]) * _UNITS[found[2]])


def written(seconds: float) -> str:
    """A duration as the files say it, in the greatest unit that it is a whole number of.

    `seconds` is finite and not negative. seconds_of() gives exactly the same number.
    """
    exact = Decimal(repr(float(seconds)))
    for unit, size in _UNITS.items():
        if exact >= size and not exact % size:
            return f"{int(exact / size)}{unit}"
    return f"{exact:f}s"


def duration(low: float, high: float) -> Kind:
    """A duration from `low` to `high` seconds; its value is seconds."""

    def read(value: object) -> float:
        found = seconds_of(value) if isinstance(value, str) else None
        if found is None:
            found = decimal(value)
        if not math.isfinite(found):
            raise WrongValue("expected a duration such as 500ms, 2s, 10m or 1h")
        if not low <= found <= high:
            raise WrongValue(f"expected {written(low)} to {written(high)}")
        return found

    number = {"type": "number", "minimum": low, "maximum": high}
    text = {"type": "string", "pattern": _PATTERN}
    return Kind(read, {"anyOf": [text, number]}, _written)


def _written(value: Value) -> Value:
    return written(value) if isinstance(value, int | float) else value
