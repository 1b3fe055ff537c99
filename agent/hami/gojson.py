"""JSON and numbers as Go writes and reads them."""

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from agent.errors import MalformedText, cap

# Compares two texts of an annotation by the value that a scheduler reads from them.


def same(one: str | None, other: str | None, read: Callable[[str], object]) -> bool:
    """True when `read` returns equal values for both, or both are absent.

    A text that cannot be decoded (`read` raises MalformedText) equals only itself.
    """
    if one == other:
        return True
    if one is None or other is None:
        return False
    try:
        return read(one) == read(other)
    except MalformedText:
        return False


# JSON by the rules of Go's encoding/json, which HAMi's programs use.
#
# Decoding: keys match in any case; the last of equal keys wins, but all are checked; null sets
# nothing; an integer has no fraction and no exponent. Encoding: no spaces; characters special in
# HTML are escaped.

INT32 = (-(2**31), 2**31 - 1)
INT64 = (-(2**63), 2**63 - 1)
UINT32 = (0, 2**32 - 1)
UINT64 = (0, 2**64 - 1)

Reader = Callable[[object, str], object]
"""Checks one value and returns it; the text names its place. Raises MalformedText."""

Table = Mapping[str, tuple[str, Reader]]
"""The fields of an object: lower-case key -> attribute name and reader."""

_DECIMAL = re.compile(r"([+-]?)0*([0-9]{1,19})")
"""A sign and digits, no space, no underscore; leading zeros apart."""
_HTML = re.compile("[<>&\u2028\u2029]")
_SURROGATE = re.compile("[\ud800-\udfff]")


class JsonObject(msgspec.Struct, frozen=True):
    """An object: its keys as written, in their order, with their values."""

    pairs: tuple[tuple[str, object], ...]


def fold(key: str) -> str:
    """Fold the case of a key as Go does; the long s is the only special letter."""
    return key.lower().replace("\u017f", "s")


def encode(value: object) -> str:
    """Encode `value`; a lone surrogate, which UTF-8 cannot hold, becomes U+FFFD."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    valid = _SURROGATE.sub("\ufffd", text)
    return _HTML.sub(lambda match: f"\\u{ord(match[0]):04x}", valid)


def decode(text: str, what: str) -> object:
    """Decode `text`, each object as a JsonObject.

    Raises:
        MalformedText: `text` is not JSON; the message begins with `what`.
    """
    try:
        value: object = json.loads(
            text,
            object_pairs_hook=lambda pairs: JsonObject(tuple(pairs)),
            parse_constant=_no_constant,
        )
    except RecursionError as error:
        raise MalformedText(f"{what} is not JSON of HAMi's: nested too deep") from error
    except ValueError as error:
        raise MalformedText(f"{what} is not JSON: {cap(str(error))}") from error
    return value


def fields(value: object, table: Table, where: str) -> dict[str, Any]:
    """Read the fields of an object that the table knows, by attribute name.

    A list or an object whose key is repeated is refused: Go would merge them, and no program
    writes them. Raises MalformedText.
    """
    if not isinstance(value, JsonObject):
        raise MalformedText(f"{where} is {_shown(value)}, not an object")
    values: dict[str, Any] = {}
    for written, item in value.pairs:
        key = fold(written)
        if key not in table or item is None:
            continue
        name, read = table[key]
        if name in values and isinstance(item, list | JsonObject):
            raise MalformedText(f"{where}, {key} stands there twice")
        values[name] = read(item, f"{where}, {key}")
    return values


def parse_int(text: str, bounds: tuple[int, int]) -> int | None:
    """Parse a decimal as Go's ParseInt does; None: it is none, or outside the inclusive bounds."""
    match = _DECIMAL.fullmatch(text)
    value = int(match[1] + match[2]) if match else None
    return value if value is not None and bounds[0] <= value <= bounds[1] else None


def nullable(read_item: Reader) -> Reader:
    """A reader that also accepts null, as None: Go leaves such an entry of a list at its zero."""
    return lambda value, where: None if value is None else read_item(value, where)


def text(value: object, where: str) -> str:
    """Read a string."""
    if not isinstance(value, str):
        raise MalformedText(f"{where} is {_shown(value)}, not a text")
    return _SURROGATE.sub("\ufffd", value)


def flag(value: object, where: str) -> bool:
    """Read a boolean."""
    if not isinstance(value, bool):
        raise MalformedText(f"{where} is {_shown(value)}, not a boolean")
    return value


def integer(bounds: tuple[int, int]) -> Reader:
    """A reader of integers within the inclusive bounds."""
    low, high = bounds

    def read(value: object, where: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise MalformedText(f"{where} is {_shown(value)}, not an integer from {low} to {high}")
        return value

    return read


def record(make: Callable[..., object], table: Table) -> Reader:
    """A reader of objects with these fields; null has none."""
    return lambda value, where: make(**({} if value is None else fields(value, table, where)))


def mapping(read_item: Reader) -> Reader:
    """A reader of objects with any keys; null values are omitted."""

    def read(value: object, where: str) -> dict[str, object]:
        if not isinstance(value, JsonObject):
            raise MalformedText(f"{where} is {_shown(value)}, not an object")
        return {
            key: read_item(item, f"{where}, {cap(key)}")
            for key, item in value.pairs
            if item is not None
        }

    return read


def anything(value: object, where: str) -> object:
    """Read any value; a number that no float64 holds is refused, as in Go."""
    pending = [value]
    while pending:
        inner = pending.pop()
        if isinstance(inner, list):
            pending += inner
        elif isinstance(inner, JsonObject):
            pending += (item for _, item in inner.pairs)
        elif isinstance(inner, int | float) and not is_float64(inner):
            raise MalformedText(f"{where} holds a number that is too great")
    return value


def array(read_item: Reader) -> Reader:
    """A reader of arrays, item by item."""

    def read(value: object, where: str) -> tuple[object, ...]:
        if not isinstance(value, list):
            raise MalformedText(f"{where} is {_shown(value)}, not an array")
        return tuple(read_item(item, f"{where}[{place}]") for place, item in enumerate(value))

    return read


def is_float64(value: float) -> bool:
    """True for a finite number that a float64 holds."""
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON value")


def _shown(value: object) -> str:
    """A value for a message, without the content of arrays and objects."""
    if isinstance(value, list):
        return "an array"
    if isinstance(value, JsonObject):
        return "an object"
    return "null" if value is None else cap(repr(value))
