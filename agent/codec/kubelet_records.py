"""Reads the kubelet's checkpoint file: which containers it records, and their ids.

It does not verify the checksum: the kubelet rewrites the file with each list of a plugin, so it is
valid before the kubelet's first call. Source: kubelet pkg/kubelet/cm/devicemanager (checkpoint).
"""

from collections.abc import Mapping

import msgspec

from agent.core.cluster.pods import PodUid
from agent.core.errors import MalformedText, cap
from agent.core.inventory.slices import SliceId
from agent.core.state.ledger import ContainerKey


class _Entry(msgspec.Struct, frozen=True):
    """DeviceIDs are grouped by NUMA node, -1 for none."""

    pod_uid: str = msgspec.field(name="PodUID")
    container: str = msgspec.field(name="ContainerName")
    resource: str = msgspec.field(name="ResourceName")
    ids: dict[str, list[str] | None] | None = msgspec.field(name="DeviceIDs", default=None)


class _Data(msgspec.Struct, frozen=True):
    entries: list[_Entry] | None = msgspec.field(name="PodDeviceEntries", default=None)


class _File(msgspec.Struct, frozen=True):
    data: _Data = msgspec.field(name="Data")


def decode_records(content: bytes, resource: str) -> Mapping[ContainerKey, frozenset[SliceId]]:
    """The ids of `resource` of each container that holds some. Raises MalformedText.

    Init containers are among them until their pod ends.
    """
    try:
        entries = msgspec.json.decode(content, type=_File).data.entries or ()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedText(f"the kubelet's checkpoint: {cap(str(error), 120)}") from error
    return {
        ContainerKey(PodUid(entry.pod_uid), entry.container): _ids(entry)
        for entry in entries
        if entry.resource == resource
    }


def _ids(entry: _Entry) -> frozenset[SliceId]:
    return frozenset(SliceId(text) for ids in (entry.ids or {}).values() for text in ids or ())
