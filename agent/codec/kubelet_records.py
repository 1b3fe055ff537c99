"""The kubelet's own checkpoint file, read only for which containers it records.

Its checksum is not verified here: a kubelet rewrites the file with each list of a plugin, so by
the time it asks for anything the file is its own. Source: kubelet pkg/kubelet/cm/devicemanager
(checkpoint); DeviceIDs and AllocResp are of no use here.
"""

import msgspec

from agent.core.errors import MalformedText, cap
from agent.core.ledger import ContainerKey
from agent.core.pods import PodUid


class _Entry(msgspec.Struct, frozen=True):
    pod_uid: str = msgspec.field(name="PodUID")
    container: str = msgspec.field(name="ContainerName")
    resource: str = msgspec.field(name="ResourceName")


class _Data(msgspec.Struct, frozen=True):
    entries: list[_Entry] | None = msgspec.field(name="PodDeviceEntries", default=None)


class _File(msgspec.Struct, frozen=True):
    data: _Data = msgspec.field(name="Data")


def decode_records(content: bytes, resource: str) -> frozenset[ContainerKey]:
    """The containers that hold ids of `resource`. Raises MalformedText."""
    try:
        file = msgspec.json.decode(content, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedText(f"the kubelet's checkpoint: {cap(str(error), 120)}") from error
    return frozenset(
        ContainerKey(PodUid(entry.pod_uid), entry.container)
        for entry in file.data.entries or ()
        if entry.resource == resource
    )
