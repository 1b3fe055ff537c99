"""What removing set-aside directories left: the Event about those that stay, and the room."""

import math
from typing import Final

import msgspec

from agent.core.cluster.changes import NodeEvent

KEPT_EVENT: Final = "DirectoriesKept"


class Cleared(msgspec.Struct, frozen=True):
    """The result of one part of the work. `more`: there is more to do at once.

    `kept`: how many directories stay. `why`: the system's error for the first of them.
    """

    more: bool = False
    kept: int = 0
    why: str = ""


class DiskRoom(msgspec.Struct, frozen=True):
    """Free space on the directories' file system: bytes `available`, and free `inodes`.

    NaN: not known. Infinite inodes: the file system does not count them.
    """

    available: float = math.nan
    inodes: float = math.nan


def kept_event(cleared: Cleared) -> NodeEvent:
    """The Event that directories stay."""
    some = "a directory" if cleared.kept == 1 else f"{cleared.kept} directories"
    text = (
        f"The agent cannot remove {some} of containers that are gone ({cleared.why}). No pod waits "
        "for this. Remove them as root on the node: see DirectoriesKept in RUNBOOK.md."
    )
    return NodeEvent(KEPT_EVENT, text, warning=True)
