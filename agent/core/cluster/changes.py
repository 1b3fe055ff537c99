"""What the watches of pods and Node deliver, and the Events that the agent writes."""

import datetime as dt

import msgspec

from agent.core.cluster.pods import NodeView, PodUid, PodView

NO_POD = PodUid("")


class PodList(msgspec.Struct, frozen=True):
    """The answer to a LIST of this node's pods."""

    pods: tuple[PodView, ...]
    resource_version: str


class PodChange(msgspec.Struct, frozen=True):
    """One frame of the pod watch. `pod` is None for a bookmark. `deleted`: it left this node."""

    resource_version: str
    pod: PodView | None = None
    deleted: bool = False


class NodeChange(msgspec.Struct, frozen=True):
    """One frame of the Node watch. `node` is None if the Node was deleted.

    `opened` marks the first frame: the watch is open, and the frame does not describe the Node.
    """

    node: NodeView | None = None
    opened: bool = False


class NodeEvent(msgspec.Struct, frozen=True):
    """An Event on this Node (`pod_uid` empty) or on a pod."""

    reason: str
    text: str
    warning: bool
    namespace: str = ""
    pod: str = ""
    pod_uid: PodUid = NO_POD


def version_number(version: str) -> int:
    """A resource version as a number; 0, which is older than all others, if it is no number."""
    return int(version) if version.isascii() and version.isdigit() else 0


class NodeCondition(msgspec.Struct, frozen=True):
    """A condition of the Node. As in node-problem-detector, true means a problem."""

    kind: str
    status: bool
    reason: str
    message: str
    since: dt.datetime
