"""Reads the kubelet's checkpoint file: which containers it records, and their ids.

It does not verify the checksum: the kubelet rewrites the file with each list of a plugin, so it is
valid before the kubelet's first call. Source: kubelet pkg/kubelet/cm/devicemanager (checkpoint).
"""

from typing import TypeVar

import msgspec

from agent.core.cluster.pods import PodUid
from agent.core.errors import MalformedText, cap
from agent.core.inventory.slices import SliceId
from agent.core.state.ledger import ContainerKey


class _Entry(msgspec.Struct, frozen=True):
    pod_uid: str = msgspec.field(name="PodUID")
    container: str = msgspec.field(name="ContainerName")
    resource: str = msgspec.field(name="ResourceName")


class _HeldEntry(_Entry, frozen=True):
    """One container's ids, grouped by NUMA node (-1: none)."""

    ids: dict[str, list[str] | None] | None = msgspec.field(name="DeviceIDs", default=None)


class _Data(msgspec.Struct, frozen=True):
    entries: list[_Entry] | None = msgspec.field(name="PodDeviceEntries", default=None)


class _File(msgspec.Struct, frozen=True):
    data: _Data = msgspec.field(name="Data")


class _HeldData(msgspec.Struct, frozen=True):
    entries: list[_HeldEntry] | None = msgspec.field(name="PodDeviceEntries", default=None)


class _HeldFile(msgspec.Struct, frozen=True):
    data: _HeldData = msgspec.field(name="Data")


_Shape = TypeVar("_Shape", _File, _HeldFile)


def decode_records(content: bytes, resource: str) -> frozenset[ContainerKey]:
    """Decode which containers hold ids of `resource`. Raises MalformedText."""
    return frozenset(
        ContainerKey(PodUid(entry.pod_uid), entry.container)
        for entry in _decode(content, _File).data.entries or ()
        if entry.resource == resource
    )


def decode_held(content: bytes, resource: str) -> tuple[frozenset[SliceId], ...]:
    """Decode the ids of `resource` of each container that holds some. Raises MalformedText.

    Init containers are included until their pod ends; equal ids of one pod are returned once.
    """
    held = {
        (entry.pod_uid, _ids(entry)): None
        for entry in _decode(content, _HeldFile).data.entries or ()
        if entry.resource == resource
    }
    return tuple(ids for _, ids in held)


def _ids(entry: _HeldEntry) -> frozenset[SliceId]:
    return frozenset(SliceId(text) for ids in (entry.ids or {}).values() for text in ids or ())


def _decode(content: bytes, shape: type[_Shape]) -> _Shape:
    try:
        return msgspec.json.decode(content, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedText(f"the kubelet's checkpoint: {cap(str(error), 120)}") from error
