"""JSON by the rules of Go's encoding/json, which HAMi's programs read and write with.

Decoding: keys match without regard to case, the last of equal keys wins, null sets nothing, an
integer has no fraction and no exponent. Encoding: no spaces, and what HTML could misread escaped.
"""

import json
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


def encode(value: object) -> str:
    """The text of `value`; a lone surrogate, which no UTF-8 text can hold, becomes U+FFFD."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    whole = _SURROGATE.sub("\ufffd", text)
    return _HTML.sub(lambda match: f"\\u{ord(match[0]):04x}", whole)


def decode(text: str, what: str) -> object:
    """The value that `text` says, keys in lower case, fields that are null left out.

    Raises:
        MalformedText: `text` is no JSON; the sentence begins with `what`.
    """
    try:
        value: object = json.loads(text, object_pairs_hook=_folded, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedText(f"{what} is no JSON: {cap(str(error))}") from error
    return value


def fields(value: object, table: Table, where: str) -> dict[str, Any]:
    """The fields of an object that the table knows, checked, by attribute name."""
    if not isinstance(value, dict):
        raise MalformedText(f"{where} is {_shown(value)}, no object")
    return {
        name: read(value[key], f"{where}, {key}")
        for key, (name, read) in table.items()
        if key in value
    }


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


def array(read_item: Reader) -> Reader:
    """A reader of arrays, item by item."""

    def read(value: object, where: str) -> tuple[object, ...]:
        if not isinstance(value, list):
            raise MalformedText(f"{where} is {_shown(value)}, no array")
        return tuple(read_item(item, f"{where}[{place}]") for place, item in enumerate(value))

    return read


def _folded(pairs: list[tuple[str, object]]) -> dict[str, object]:
    return {key.lower(): value for key, value in pairs if value is not None}


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON value")


def _shown(value: object) -> str:
    """A value for people; the inside of a structure, which may be deep, is not looked at."""
    if isinstance(value, list):
        return "an array"
    if isinstance(value, dict):
        return "an object"
    return "null" if value is None else cap(repr(value))
