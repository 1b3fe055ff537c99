"""JSON annotations of a Node as HAMi's scheduler reads them: by the rules of Go's encoding/json.

Keys match in any case; the last of equal keys wins; null sets nothing; an integer has no fraction
and no exponent. Refused, although Go takes it and no program writes it: a repeated key whose values
are lists, objects or of two types, and null in place of a MIG profile.
Source: HAMi v2.10 pkg/device/devices.go, UnMarshalNodeDevices and DecodePairScores.
"""

import json
import math
import re
from typing import Any, Final, TypeVar

import msgspec

from agent.cluster import TEXT_LIMIT
from agent.errors import MalformedText, cap
from agent.hami.gojson import fold
from agent.hami.register import (
    WHAT,
    Int32,
    Int64,
    MigProfile,
    Placement,
    RegisteredGpu,
    decode_register_colon,
    is_json_form,
)
from agent.model import GpuUuid, Scores

_SCORE: Final = "score annotation"
_T = TypeVar("_T")
_PLACE: Final = re.compile(r"\$\[(\d+)\]")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class _MigTemplate(msgspec.Struct, frozen=True):
    name: str = ""
    core: Int32 = 0
    memory: Int32 = 0
    count: Int32 = 0


class _PairPoints(msgspec.Struct, frozen=True):
    uuid: GpuUuid = GpuUuid("")
    score: dict[GpuUuid, Int64] = {}


class _UnreadOfGpu(msgspec.Struct, frozen=True):
    """Fields of HAMi's struct that the agent does not use; 2.10 does not decode the last one."""

    migtemplate: tuple[tuple[_MigTemplate | None, ...] | None, ...] = ()
    devicevendor: str = ""
    custominfo: dict[str, Any] = {}
    devicepairscore: _PairPoints | None = None


_NAMES: Final = {
    fold(field.encode_name): field.encode_name
    for struct in (RegisteredGpu, MigProfile, Placement, _MigTemplate, _PairPoints, _UnreadOfGpu)
    for field in msgspec.structs.fields(struct)
}
"""The names of all fields by their folded form."""


def decode_register(text: str) -> tuple[RegisteredGpu, ...]:
    """Decode the GPUs in the text's order; keys that no version of HAMi has are ignored.

    Fields that a scheduler's decoder checks but does not use are checked too: one wrong type loses
    the whole node. Unlike HAMi, an error returns no GPU at all.

    Raises:
        MalformedText: not a JSON array of objects, a value of another type or range, or no GPU.
    """
    gpus: tuple[RegisteredGpu, ...] = ()
    if text != "null":
        _decode(text, _UnreadOfGpu, WHAT)
        gpus = _decode(text, RegisteredGpu, WHAT)
    if not gpus:
        raise MalformedText(f"{WHAT} names no GPU")
    return gpus


def decode_either(text: str) -> tuple[RegisteredGpu, ...]:
    """Decode a register annotation of either form. Raises MalformedText."""
    return decode_register(text) if is_json_form(text) else decode_register_colon(text)


def decode_scores(text: str) -> Scores:
    """Decode the scores; unknown keys are ignored.

    Raises:
        MalformedText: not a JSON array of GPUs with whole points. A scheduler then rejects the
            whole node.
    """
    return {pair.uuid: pair.score for pair in _decode(text, _PairPoints, _SCORE)}


def _decode(text: str, kind: type[_T], what: str) -> tuple[_T, ...]:
    """One value for each GPU. Raises MalformedText, whose text begins with `what`."""
    if len(text) > TEXT_LIMIT:
        raise MalformedText(f"{what} is over {TEXT_LIMIT} characters")
    try:
        value = json.loads(
            text, object_pairs_hook=_object, parse_float=_number, parse_constant=_number
        )
        return msgspec.convert(value, tuple[kind, ...])  # type: ignore[valid-type]
    except RecursionError as error:
        raise MalformedText(f"{what} is not JSON of HAMi's: nested too deep") from error
    except msgspec.ValidationError as error:
        said = _PLACE.sub(r"GPU \1", str(error))
        raise MalformedText(f"{what} cannot be read: {cap(said)}") from error
    except ValueError as error:
        raise MalformedText(f"{what} is not JSON: {cap(str(error))}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, item in pairs:
        name = _NAMES.get(fold(key), key)
        if item is None:
            continue
        before = found.get(name, item)
        if type(before) is not type(item) or (name in found and isinstance(item, list | dict)):
            raise ValueError(f"{cap(name)} stands there twice")
        found[name] = _SURROGATE.sub("\ufffd", item) if isinstance(item, str) else item
    return found


def _number(text: str) -> float:
    """Raises ValueError for what is no number of JSON, and for what no float64 holds."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{cap(text)} is not a JSON value")
    return value
