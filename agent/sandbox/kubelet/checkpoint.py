"""The file `kubelet_internal_checkpoint`: its bytes, its checksum and its atomic replacement.

The checksum is FNV-1a (32 bit) over the text that Go's spew library prints for the value of
`Data` (kubelet 1.20 and later, checkpoint version 2).
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

FILE_NAME: Final = "kubelet_internal_checkpoint"
_FNV_OFFSET: Final = 0x811C9DC5
_FNV_PRIME: Final = 0x01000193
_HTML: Final[Mapping[int, str]] = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


class CheckpointError(Exception):
    """The file is corrupt. The kubelet continues without records."""


class CheckpointEntry(msgspec.Struct, frozen=True):
    """The ids of one container and resource, and the plugin's serialized answer for them.

    `numa` maps NUMA nodes (-1: none) to ids.
    """

    pod_uid: str = msgspec.field(name="PodUID")
    container: str = msgspec.field(name="ContainerName")
    resource: str = msgspec.field(name="ResourceName")
    numa: Mapping[int, Sequence[str]] = msgspec.field(name="DeviceIDs")
    response: bytes = msgspec.field(name="AllocResp")

    @property
    def ids(self) -> frozenset[str]:
        """The ids of all NUMA nodes."""
        return frozenset(device_id for members in self.numa.values() for device_id in members)


class Checkpoint(msgspec.Struct, frozen=True):
    """The content: entries, and the healthy ids of each registered resource."""

    entries: Sequence[CheckpointEntry] = ()
    registered: Mapping[str, Sequence[str]] = msgspec.field(default_factory=dict)


class _CheckpointData(msgspec.Struct, rename="pascal"):
    pod_device_entries: Sequence[CheckpointEntry] | None
    registered_devices: Mapping[str, Sequence[str]]


class _CheckpointFile(msgspec.Struct, rename="pascal"):
    data: _CheckpointData
    checksum: int


def checksum(content: Checkpoint) -> int:
    """The sum that the kubelet stores in `Checksum`."""
    value = _FNV_OFFSET
    for byte in _spew(content).encode():
        value = (value ^ byte) * _FNV_PRIME & 0xFFFFFFFF
    return value


def _spew(content: Checkpoint) -> str:
    entries = _list(_spew_entry(e) for e in content.entries) if content.entries else "<nil>"
    return (
        "(checkpoint.checkpointData){"
        f"PodDeviceEntries:([]checkpoint.PodDevicesEntry){entries} "
        f"RegisteredDevices:(map[string][]string){_spew_map(content.registered)}}}"
    )


def _spew_entry(entry: CheckpointEntry) -> str:
    return (
        f"{{PodUID:(string){entry.pod_uid} ContainerName:(string){entry.container} "
        f"ResourceName:(string){entry.resource} "
        f"DeviceIDs:(checkpoint.DevicesPerNUMA){_spew_map(entry.numa)} "
        f"AllocResp:([]uint8){_list(map(str, entry.response))}}}"
    )


def _spew_map(lists: Mapping[Any, Iterable[str]]) -> str:
    return "map" + _list(f"{key}:{_list(lists[key])}" for key in sorted(lists))


def _list(parts: Iterable[str]) -> str:
    return f"[{' '.join(parts)}]"


def encode(content: Checkpoint) -> bytes:
    """The content as one line of JSON, as Go's encoder writes it: maps sorted by their text."""
    entries = [
        msgspec.structs.replace(entry, numa={n: entry.numa[n] for n in sorted(entry.numa, key=str)})
        for entry in content.entries
    ]
    registered = {name: content.registered[name] for name in sorted(content.registered)}
    file = _CheckpointFile(_CheckpointData(entries or None, registered), checksum(content))
    return msgspec.json.encode(file).decode().translate(_HTML).encode()


def decode(raw: bytes) -> Checkpoint:
    """The content of a file. Raises CheckpointError: its form or its checksum is wrong."""
    try:
        file = msgspec.json.decode(raw, type=_CheckpointFile)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"checkpoint is not readable: {error}") from error
    content = Checkpoint(file.data.pod_device_entries or (), file.data.registered_devices)
    if file.checksum != checksum(content):
        raise CheckpointError("checkpoint is corrupted")
    return content


def replace(directory: Path, content: Checkpoint, chance: random.Random) -> None:
    """Replace the file atomically. Raises OSError.

    The temporary name is a dot and digits, as in the kubelet: watchers of the directory see it.
    """
    temporary = directory / f".{chance.randrange(10**8, 10**10)}"
    temporary.touch(mode=0o600, exist_ok=False)
    temporary.write_bytes(encode(content))
    temporary.replace(directory / FILE_NAME)


def load(directory: Path) -> Checkpoint:
    """The file's content; empty if there is no file. Raises CheckpointError, OSError."""
    try:
        return decode((directory / FILE_NAME).read_bytes())
    except FileNotFoundError:
        return Checkpoint()
