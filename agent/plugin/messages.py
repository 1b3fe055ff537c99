"""The codec of the door: what is not a whole message of the API is refused, not guessed at.

The generated parser takes a truncated text for a shorter one and fails in several ways on a field
of the wrong kind, so requests are checked first, by the shapes below.
"""

import enum
from collections.abc import Mapping
from typing import Any, TypeAlias

from grpclib.encoding.base import CodecBase
from typing_extensions import override

from agent.core.errors import Gate, MalformedText, Refusal
from agent.plugin.status import grpc_error
from agent.wire.v1beta1 import (
    AllocateRequest,
    Empty,
    PreferredAllocationRequest,
    PreStartContainerRequest,
)


class Kind(enum.Enum):
    """What a field holds that is not a message."""

    TEXT = "text"
    NUMBER = "number"


Shape: TypeAlias = Mapping[int, "Kind | Shape"]
"""The fields of a message by number; a nested message is a shape again."""

SHAPES: Mapping[type, Shape] = {
    Empty: {},
    AllocateRequest: {1: {1: Kind.TEXT}},
    PreferredAllocationRequest: {1: {1: Kind.TEXT, 2: Kind.TEXT, 3: Kind.NUMBER}},
    PreStartContainerRequest: {1: Kind.TEXT},
}
"""The requests of the five calls."""

_VARINT_LIMIT = 10


class WireType(enum.IntEnum):
    """How a field says where it ends. Groups (3, 4) are not of this API."""

    VARINT = 0
    FIXED_64 = 1
    SIZED = 2
    FIXED_32 = 5


class StrictCodec(CodecBase):
    """Encodes what the handlers answer; decodes only what is well-formed."""

    __content_subtype__ = "proto"

    @override
    def encode(self, message: Any, message_type: Any) -> bytes:
        """The message as bytes; a Frame has them already."""
        if not isinstance(message, message_type):
            raise TypeError(f"a {message_type.__name__} was due, not a {type(message).__name__}")
        return bytes(message)

    @override
    def decode(self, data: bytes, message_type: Any) -> Any:
        """The message in `data`.

        Raises:
            GRPCError: INVALID_ARGUMENT, with what is wrong.
        """
        try:
            check(data, SHAPES[message_type])
            return message_type.FromString(data)
        except (MalformedText, UnicodeDecodeError) as error:
            sentence = f"The call holds no whole {message_type.__name__}: {error}."
            raise grpc_error(Refusal(Gate.MALFORMED_REQUEST, sentence)) from error


def check(data: bytes, shape: Shape) -> None:
    """Make sure that `data` is a whole message of that shape; unknown fields are allowed.

    Raises:
        MalformedText: it is cut short, or a field is not of its kind.
    """
    _check_fields(data, 0, len(data), shape)


def _check_fields(data: bytes, start: int, end: int, shape: Shape) -> None:
    at = start
    while at < end:
        if (size := _short_text(data, at, end, shape)) and at + size <= end:
            at += size
            continue
        tag, at = _varint(data, at, end)
        known = shape.get(tag >> 3)
        wire_type = tag & 7
        if tag < 8 or (known is not None and wire_type != _expected(known)):
            raise MalformedText(f"field {tag >> 3} before byte {at} is of the wrong kind")
        at, stop = _extent(data, at, end, wire_type)
        if stop > end:
            raise MalformedText(f"field {tag >> 3} before byte {at} is cut short")
        if isinstance(known, Mapping):
            _check_fields(data, at, stop, known)
        at = stop


def _short_text(data: bytes, at: int, end: int, shape: Shape) -> int:
    """Bytes of the field at `at` if it is a text with a head of two bytes, as nearly all are."""
    tag = data[at]
    if tag & 7 == 2 and at + 1 < end and data[at + 1] < 0x80 and shape.get(tag >> 3) is Kind.TEXT:
        return 2 + data[at + 1]
    return 0


def _expected(known: "Kind | Shape") -> int:
    return WireType.VARINT if known is Kind.NUMBER else WireType.SIZED


def _extent(data: bytes, at: int, end: int, wire_type: int) -> tuple[int, int]:
    """Where the value of a field begins and where it ends, by its own account."""
    match wire_type:
        case WireType.SIZED:
            size, at = _varint(data, at, end)
            return at, at + size
        case WireType.VARINT:
            return at, _varint(data, at, end)[1]
        case WireType.FIXED_64:
            return at, at + 8
        case WireType.FIXED_32:
            return at, at + 4
        case _:
            raise MalformedText(f"byte {at - 1} begins a field of the unknown kind {wire_type}")


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """A number and the place after it."""
    value = 0
    for place in range(at, min(end, at + _VARINT_LIMIT)):
        byte = data[place]
        value |= (byte & 0x7F) << (7 * (place - at))
        if byte < 0x80:
            return value, place + 1
    raise MalformedText(f"the number at byte {at} does not end")
