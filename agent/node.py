"""The agent's own checks, its rights, cordons."""

from collections.abc import Iterable

import msgspec

from agent.model import GpuUuid

# The agent's own checks, and whether they make it ready or degraded.

STANDBY = "instance"  # the check that fails while another agent serves the host


class Check(msgspec.Struct, frozen=True):
    """One check of the agent, as in `/api/v1`. `text` says what is wrong and what to do.

    Only a failed check that is `required` makes the agent unready; others degrade it.
    """

    name: str
    ok: bool
    text: str = ""
    required: bool = True


def is_ready(checks: Iterable[Check]) -> bool:
    """True when no required check fails."""
    return all(check.ok for check in checks if check.required)


# The rights of the agent at the API server.


class Right(msgspec.Struct, frozen=True):
    """One permission: a verb on a resource. `name`: of the object; empty: any object."""

    verb: str
    resource: str
    name: str = ""
    namespace: str = ""
    selector: str = ""

    @property
    def words(self) -> str:
        """Verb and resource, as in a ClusterRole."""
        return f"{self.verb} {self.resource}"


def rights(node: str, *, node_condition: bool = False) -> tuple[Right, ...]:
    """The permissions that the agent on `node` needs, except the GET of a pod of this node.

    That one needs the pod's name, because a node's own identity may read only the pods of its node.
    `node_condition`: the agent writes the Node condition GpuDegraded.
    """
    condition = (Right("patch", "nodes/status", name=node),) if node_condition else ()
    return (
        *(Right(verb, "nodes", name=node) for verb in ("get", "watch", "patch")),
        Right("list", "pods", selector=f"spec.nodeName={node}"),
        Right("watch", "pods", selector=f"spec.nodeName={node}"),
        Right("patch", "pods/status"),
        Right("create", "events"),
        Right("patch", "events"),
        *condition,
    )


# The annotation `hami.io/device-cordon` of a Node: a comma list of GPU UUIDs on which HAMi's
# scheduler, from 2.10 on, places no new pods. Spaces around a UUID and empty parts do not count
# (HAMi v2.10 pkg/device/nvidia/device.go).


def read_cordon(text: str | None) -> tuple[GpuUuid, ...]:
    """The UUIDs in the annotation, each once, in their order."""
    words = (word.strip() for word in (text or "").split(","))
    return tuple(dict.fromkeys(GpuUuid(word) for word in words if word))
