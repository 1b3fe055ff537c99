"""Encodes and decodes the messages of the device plugin API.

The generated classes do it, but for two paths with thousands of ids, on the loop: their encoder
takes 17 µs for each slice of a list, their parser 2.5 µs for each id of a request. Their parser
also accepts a text that is cut short. A property test compares both paths with Google's protobuf.
"""

import itertools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from betterproto2 import decode_varint, encode_varint
from grpclib.encoding.base import CodecBase
from typing_extensions import override

from agent.core.errors import SettingsError
from agent.core.inventory.slices import LIST_BYTES, SliceList
from agent.wire.v1beta1 import (
    AllocateRequest,
    ContainerAllocateRequest,
    ContainerPreferredAllocationRequest,
    Device,
    NumaNode,
    PreferredAllocationRequest,
    PreStartContainerRequest,
    TopologyInfo,
)

_HEAD = b"\x0a"  # of field 1: Device.ID, and an entry of the list
_TEXTS_1, _TEXTS_2, _NUMBER_3 = 0x0A, 0x12, 0x18
"""Tags of the requests: field 1 and 2 length-delimited, also of messages; field 3 a varint."""


def encode_list(listed: SliceList) -> bytes:
    """Encode a list, as bytes(ListAndWatchResponse) would.

    Raises:
        SettingsError: with all slices unhealthy, the list would be longer than the kubelet accepts;
            the text says how many slices fit.
    """
    parts: list[bytes] = []
    size = 0
    for group in listed.groups:
        # An unknown NUMA node is omitted: the kubelet never places a container on node -1.
        numa = -1 if group.numa is None else group.numa
        topology = TopologyInfo(nodes=[NumaNode(id=numa)]) if numa >= 0 else None
        worst = bytes(Device(health="Unhealthy", topology=topology))
        tail = bytes(Device(health="Healthy", topology=topology)) if group.healthy else worst
        # Neighbours with ids of one length differ only in the ids: the bytes between are equal.
        for length, texts in itertools.groupby((text.encode() for text in group.ids), len):
            ids, name = list(texts), _HEAD + encode_varint(length)
            head = _HEAD + encode_varint(len(name) + length + len(tail)) + name
            parts += (head, (tail + head).join(ids), tail)
            entry = len(name) + length + len(worst)
            size += len(ids) * (len(_HEAD + encode_varint(entry)) + entry)
    if size > LIST_BYTES:
        count = sum(len(group.ids) for group in listed.groups)
        raise SettingsError(
            f"{count} slices on {len(listed.groups)} GPUs make a list of {size} bytes when all are"
            f" unhealthy ({size // count} bytes a slice), more than the {LIST_BYTES} bytes that are"
            f" safe with the kubelet's limit of 4 MiB: lower the split count so that at most"
            f" {LIST_BYTES * count // size} slices are listed"
        )
    return b"".join(parts)


class PluginCodec(CodecBase):
    """The codec of the plugin's server. Lists are given to it as bytes, by encode_list()."""

    __content_subtype__ = "proto"

    @override
    def encode(self, message: Any, message_type: Any) -> bytes:
        """Encode a message."""
        return bytes(message)

    @override
    def decode(self, data: bytes, message_type: Any) -> Any:
        """Decode a request. Raises ValueError or EOFError if it is malformed."""
        if message_type is AllocateRequest:
            containers = map(_fields, _fields(data)[_TEXTS_1])
            return AllocateRequest(
                [ContainerAllocateRequest(_texts(fields[_TEXTS_1])) for fields in containers]
            )
        if message_type is PreferredAllocationRequest:
            containers = map(_fields, _fields(data)[_TEXTS_1])
            return PreferredAllocationRequest(
                [
                    ContainerPreferredAllocationRequest(
                        available_deviceIDs=_texts(fields[_TEXTS_1]),
                        must_include_deviceIDs=_texts(fields[_TEXTS_2]),
                        allocation_size=_int32(fields[_NUMBER_3]),
                    )
                    for fields in containers
                ]
            )
        if message_type is PreStartContainerRequest:
            return PreStartContainerRequest(_texts(_fields(data)[_TEXTS_1]))
        return message_type.parse(data)


def _fields(data: bytes) -> Mapping[int, list[Any]]:
    """The values in a message by tag, which is the number of a field and its encoding.

    A field that is encoded in another way than the API says is unknown, and ignored.
    """
    fields: defaultdict[int, list[Any]] = defaultdict(list)
    at, end = 0, len(data)
    value: Any
    while at < end:
        # Numbers of one byte, which are those of ids, without a call.
        tag, at = (data[at], at + 1) if data[at] < 0x80 else decode_varint(data, at)
        match tag & 7:
            case 0:
                value, at = decode_varint(data, at)
            case 2:
                is_short = at < end and data[at] < 0x80
                size, at = (data[at], at + 1) if is_short else decode_varint(data, at)
                value, at = data[at : at + size], at + size
            case 1 | 5 as kind:
                value, at = None, at + (8 if kind == 1 else 4)
            case kind:
                raise ValueError(f"a field is encoded in the unknown way {kind}")
        if tag < 8 or at > end:
            raise ValueError(f"field {tag >> 3} is cut short, or no field")
        fields[tag].append(value)
    return fields


def _texts(values: list[bytes]) -> list[str]:
    # All at once, unless a text holds the separator.
    texts = b"\0".join(values).decode().split("\0") if values else []
    return texts if len(texts) == len(values) else [value.decode() for value in values]


def _int32(values: list[int]) -> int:
    number = values[-1] & 0xFFFF_FFFF if values else 0
    return number - (1 << 32) if number >> 31 else number
