"""JSON annotations of a Node as HAMi's scheduler reads them: by the rules of Go's encoding/json.

Keys match in any case; the last of equal keys wins, but all are checked; null sets nothing; an
integer has no fraction and no exponent.
Source: HAMi v2.10 pkg/device/devices.go, UnMarshalNodeDevices and DecodePairScores.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from agent.cluster import TEXT_LIMIT
from agent.errors import MalformedText, cap
from agent.hami.gojson import INT32, INT64, UINT32, UINT64, fold, is_float64
from agent.hami.register import (
    MigProfile,
    Placement,
    RegisteredGpu,
    decode_register_colon,
    is_json_form,
)
from agent.model import GpuUuid, Scores

_SCORE = "score annotation"

Reader = Callable[[object, str], object]
"""Checks one value and returns it; the text names its place. Raises MalformedText."""

Table = Mapping[str, tuple[str, Reader]]
"""The fields of an object: lower-case key -> attribute name and reader."""

_SURROGATE = re.compile("[\ud800-\udfff]")


class JsonObject(msgspec.Struct, frozen=True):
    """An object: its keys as written, in their order, with their values."""

    pairs: tuple[tuple[str, object], ...]


def decode_register(text: str) -> tuple[RegisteredGpu, ...]:
    """Decode the GPUs in the text's order; keys that no version of HAMi has are ignored.

    Fields that a scheduler's decoder checks but does not use are checked too: one wrong type loses
    the whole node. Unlike HAMi, an error returns no GPU at all.

    Raises:
        MalformedText: not a JSON array of objects, a value of another type or range, or no GPU.
    """
    if len(text) > TEXT_LIMIT:
        raise MalformedText(f"register annotation is over {TEXT_LIMIT} characters")
    value = _decode(text, "register annotation")
    if not isinstance(value, list) and value is not None:
        raise MalformedText("register annotation is JSON, but not an array")
    if not value:
        raise MalformedText("register annotation names no GPU")
    gpus = list[RegisteredGpu]()
    for place, element in enumerate(value):
        where = f"register annotation, GPU {place}"
        fields(element, _UNREAD, where)
        gpus.append(RegisteredGpu(**fields(element, _GPU, where)))
    return tuple(gpus)


def decode_either(text: str) -> tuple[RegisteredGpu, ...]:
    """Decode a register annotation of either form. Raises MalformedText."""
    return decode_register(text) if is_json_form(text) else decode_register_colon(text)


def decode_scores(text: str) -> Scores:
    """Decode the scores; unknown keys are ignored.

    Raises:
        MalformedText: not a JSON array of GPUs with whole points. A scheduler then rejects the
            whole node.
    """
    if len(text) > TEXT_LIMIT:
        raise MalformedText(f"{_SCORE} is over {TEXT_LIMIT} characters")
    value = _decode(text, _SCORE)
    if not isinstance(value, list):
        raise MalformedText(f"{_SCORE} is JSON, but not an array")
    scores = dict[GpuUuid, Mapping[GpuUuid, int]]()
    for place, element in enumerate(value):
        values = fields(element, _SCORED_GPU, f"{_SCORE}, GPU {place}")
        scores[GpuUuid(values.get("uuid", ""))] = values.get("points", {})
    return scores


def _decode(text: str, what: str) -> object:
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


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON value")


def _shown(value: object) -> str:
    """A value for a message, without the content of arrays and objects."""
    if isinstance(value, list):
        return "an array"
    if isinstance(value, JsonObject):
        return "an object"
    return "null" if value is None else cap(repr(value))


_PLACEMENT: Table = {
    "start": ("start", integer(UINT32)),
    "size": ("size", integer(UINT32)),
}
_PROFILE: Table = {
    "name": ("name", text),
    "memorymb": ("memory_mib", integer(INT32)),
    "core": ("core_percent", integer(INT32)),
    "slicecount": ("slice_count", integer(UINT32)),
    "placements": ("placements", array(record(Placement, _PLACEMENT))),
}
_GPU: Table = {
    "id": ("uuid", text),
    "index": ("index", integer(UINT64)),
    "count": ("split_count", integer(INT32)),
    "devmem": ("registered_mib", integer(INT32)),
    "devcore": ("core_percent", integer(INT32)),
    "type": ("type_name", text),
    "numa": ("numa", integer(INT64)),
    "mode": ("mode", text),
    "migprofiles": ("mig_profiles", array(record(MigProfile, _PROFILE))),
    "health": ("healthy", flag),
}
_TEMPLATE: Table = {
    "name": ("name", text),
    "core": ("core", integer(INT32)),
    "memory": ("memory", integer(INT32)),
    "count": ("count", integer(INT32)),
}
_PAIRS: Table = {
    "uuid": ("uuid", text),
    "score": ("score", mapping(integer(INT64))),
}
_UNREAD: Table = {
    "migtemplate": (
        "migtemplate",
        array(nullable(array(record(dict, _TEMPLATE)))),
    ),
    "devicevendor": ("devicevendor", text),
    "custominfo": ("custominfo", mapping(anything)),
    "devicepairscore": ("devicepairscore", record(dict, _PAIRS)),
}
"""Fields of HAMi's struct that the agent does not use; 2.10 does not decode the last one."""
_SCORED_GPU: Table = {
    "uuid": ("uuid", text),
    "score": ("points", mapping(integer(INT64))),
}
