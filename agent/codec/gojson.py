"""JSON by the rules of Go's encoding/json, which HAMi's programs read and write with.

Decoding: keys match without regard to case, the last of equal keys wins (but all are checked), null
sets nothing, an integer has no fraction and no exponent. Encoding: no spaces, and what HTML could
misread escaped.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from agent.core.errors import MalformedText, cap

INT32 = (-(2**31), 2**31 - 1)
INT64 = (-(2**63), 2**63 - 1)
UINT32 = (0, 2**32 - 1)
UINT64 = (0, 2**64 - 1)

Reader = Callable[[object, str], object]
"""Checks one value and returns it; the text says where it stands. Raises MalformedText."""

Table = Mapping[str, tuple[str, Reader]]
"""Of an object: lower-case key -> attribute name and reader."""

_HTML = re.compile("[<>&\u2028\u2029]")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclasses.dataclass(frozen=True, slots=True)
class JsonObject:
    """An object: its keys as they are written, in their order, and their values."""

    pairs: tuple[tuple[str, object], ...]


def fold(key: str) -> str:
    """The key without regard to case, as Go folds it; the long s is the one special letter."""
    return key.lower().replace("\u017f", "s")


def encode(value: object) -> str:
    """The text of `value`; a lone surrogate, which no UTF-8 text can hold, becomes U+FFFD."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    whole = _SURROGATE.sub("\ufffd", text)
    return _HTML.sub(lambda match: f"\\u{ord(match[0]):04x}", whole)


def decode(text: str, what: str) -> object:
    """The value that `text` says, each object as an Object.

    Raises:
        MalformedText: `text` is no JSON; the sentence begins with `what`.
    """
    try:
        value: object = json.loads(text, object_pairs_hook=_object, parse_constant=_no_constant)
    except RecursionError as error:
        raise MalformedText(f"{what} is no JSON of HAMi's: nested too deep") from error
    except ValueError as error:
        raise MalformedText(f"{what} is no JSON: {cap(str(error))}") from error
    return value


def fields(value: object, table: Table, where: str) -> dict[str, Any]:
    """The fields of an object that the table knows, checked, by attribute name.

    Go merges a list or an object into the one that the same key gave before: nobody writes that,
    and it is refused.
    """
    if not isinstance(value, JsonObject):
        raise MalformedText(f"{where} is {_shown(value)}, no object")
    found: dict[str, Any] = {}
    for written, item in value.pairs:
        key = fold(written)
        if key not in table or item is None:
            continue
        name, read = table[key]
        if name in found and isinstance(item, list | JsonObject):
            raise MalformedText(f"{where}, {key} stands there twice")
        found[name] = read(item, f"{where}, {key}")
    return found


def nullable(read_item: Reader) -> Reader:
    """A reader that takes null, too, as None: an entry of a list that Go leaves at its zero."""
    return lambda value, where: None if value is None else read_item(value, where)


def text(value: object, where: str) -> str:
    """Reads a string."""
    if not isinstance(value, str):
        raise MalformedText(f"{where} is {_shown(value)}, no text")
    return _SURROGATE.sub("\ufffd", value)


def flag(value: object, where: str) -> bool:
    """Reads a boolean."""
    if not isinstance(value, bool):
        raise MalformedText(f"{where} is {_shown(value)}, no boolean")
    return value


def integer(bounds: tuple[int, int]) -> Reader:
    """A reader of integers between the bounds, both included."""
    low, high = bounds

    def read(value: object, where: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise MalformedText(f"{where} is {_shown(value)}, no integer from {low} to {high}")
        return value

    return read


def record(make: Callable[..., object], table: Table) -> Reader:
    """A reader of objects with these fields; null is one without any."""
    return lambda value, where: make(**({} if value is None else fields(value, table, where)))


def mapping(read_item: Reader) -> Reader:
    """A reader of objects with any keys, by their names; what is null is left out."""

    def read(value: object, where: str) -> dict[str, object]:
        if not isinstance(value, JsonObject):
            raise MalformedText(f"{where} is {_shown(value)}, no object")
        return {
            key: read_item(item, f"{where}, {cap(key)}")
            for key, item in value.pairs
            if item is not None
        }

    return read


def anything(value: object, where: str) -> object:
    """Reads any value; Go holds each number in a float64, which a greater one does not fit."""
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, list):
            pending += one
        elif isinstance(one, JsonObject):
            pending += (item for _, item in one.pairs)
        elif isinstance(one, int | float) and not is_float64(one):
            raise MalformedText(f"{where} holds a number that is too great")
    return value


def array(read_item: Reader) -> Reader:
    """A reader of arrays, item by item."""

    def read(value: object, where: str) -> tuple[object, ...]:
        if not isinstance(value, list):
            raise MalformedText(f"{where} is {_shown(value)}, no array")
        return tuple(read_item(item, f"{where}[{place}]") for place, item in enumerate(value))

    return read


def _object(pairs: list[tuple[str, object]]) -> JsonObject:
    return JsonObject(tuple(pairs))


def is_float64(value: float) -> bool:
    """True for a number that a float64 holds; an int may be too great."""
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON value")


def _shown(value: object) -> str:
    """A value for people; the inside of a structure, which may be deep, is not looked at."""
    if isinstance(value, list):
        return "an array"
    if isinstance(value, JsonObject):
        return "an object"
    return "null" if value is None else cap(repr(value))
