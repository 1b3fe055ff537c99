"""The sizes of container directories: which of them are large, and the Event about it."""

import math
from collections.abc import Iterator
from typing import Final

import msgspec

from agent.core.cluster.changes import NO_POD, NodeEvent
from agent.core.cluster.pods import PodUid
from agent.core.containers.container_edits import container_directory
from agent.core.state.ledger import Ledger

LARGE_EVENT: Final = "DirectoryLarge"
MIB: Final = 2**20
LARGE_MIB: Final = 256
LARGE_ENTRIES: Final = 10_000
"""HAMi-core needs a few files of about 2 MiB and makes no directory."""
DEEPEST: Final = 16
"""The depth of nested directories up to which the agent measures."""


class DirectorySize(msgspec.Struct, frozen=True):
    """The size of one directory: `allocated` bytes in `entries` files and directories.

    - `closed`: how many directories the agent may not look into.
    - `is_deep`: directories are nested deeper than DEEPEST; the deeper ones are not counted.
    - `more`: the measurement has not ended.
    """

    allocated: int = 0
    entries: int = 0
    closed: int = 0
    is_deep: bool = False
    more: bool = False

    @property
    def is_large(self) -> bool:
        """Whether the directory has more than HAMi-core can need, or cannot be measured."""
        beyond = self.allocated > LARGE_MIB * MIB or self.entries > LARGE_ENTRIES
        return beyond or self.is_deep or self.closed > 0


class DiskRoom(msgspec.Struct, frozen=True):
    """Free space on the directories' file system: bytes `available`, and free `inodes`.

    NaN: not known. Infinite inodes: the file system does not count them.
    """

    available: float = math.nan
    inodes: float = math.nan


class Measured(msgspec.Struct, frozen=True):
    """The names of the large directories, and the free space."""

    large: frozenset[str] = frozenset()
    room: DiskRoom = DiskRoom()


class OwnedDirectory(msgspec.Struct, frozen=True):
    """A container directory and the container that it belongs to.

    `pod_uid` empty: only the pod's name is known. `pod` empty: the pod is not known.
    """

    name: str
    container: str = ""
    namespace: str = ""
    pod: str = ""
    pod_uid: PodUid = NO_POD


def owned_directories(ledger: Ledger) -> Iterator[OwnedDirectory]:
    """The directories of all rows, whether they exist or not."""
    for row in (row for row in ledger.rows if row.has_directory):
        name = container_directory(row.key.pod_uid, row.key.container)
        container = row.holder.container if row.holder else ""
        yield OwnedDirectory(name, container, row.namespace, row.pod, row.pod_uid)


def large_event(owned: OwnedDirectory, size: DirectorySize) -> NodeEvent:
    """The Event about a large directory: on the pod, or on the Node if its UID is not known."""
    text = (
        f"{_who(owned)} keeps {_what(size)} in its directory of HAMi-core, which needs about 2 MiB "
        f"there; more than {LARGE_MIB} MiB or {LARGE_ENTRIES:,} entries are too much. When "
        "that file system is full, new GPU pods of this node are refused (HA-5003). Ask the pod's "
        "owner why. Without a good reason, delete the pod; its directory is then removed."
    )
    event = NodeEvent(LARGE_EVENT, text, warning=True)
    if not owned.pod_uid:
        return event
    return msgspec.structs.replace(
        event, namespace=owned.namespace, pod=owned.pod, pod_uid=owned.pod_uid
    )


def _who(owned: OwnedDirectory) -> str:
    if not owned.pod:
        return f"A container that the kubelet has not named ({owned.name})"
    if not owned.pod_uid:
        return f"Container {owned.container} of pod {owned.namespace}/{owned.pod}"
    return f"Container {owned.container}"


def _what(size: DirectorySize) -> str:
    """The size in words. Beyond a bound the rest was not measured."""
    entries = "1 entry" if size.entries == 1 else f"{size.entries:,} entries"
    partly = "at least " if size.is_large else ""
    parts = [f"{partly}{size.allocated / MIB:,.0f} MiB in {entries}"]
    if size.is_deep:
        parts.append(f"more than {DEEPEST} directories in each other")
    if size.closed:
        some = "a directory" if size.closed == 1 else f"{size.closed:,} directories"
        parts.append(f"{some} that the agent may not look into")
    return " and ".join(parts)
