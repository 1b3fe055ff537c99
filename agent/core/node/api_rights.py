"""The rights that the agent needs at the API server; judges those it does not, and the clock."""

import datetime as dt
from collections.abc import Sequence
from typing import Final

import msgspec

from agent.core.node.findings import Finding, PreflightCheck


class Right(msgspec.Struct, frozen=True):
    """One permission: a verb on a resource. `name`: the object; empty: any object."""

    verb: str
    resource: str
    name: str = ""
    namespace: str = ""
    selector: str = ""
    """The field selector of the request."""

    @property
    def words(self) -> str:
        """Verb and resource, as in a ClusterRole."""
        return f"{self.verb} {self.resource}"

    @property
    def reads(self) -> bool:
        """Whether the verb only reads."""
        return self.verb in {"get", "list", "watch"}


def rights(node: str, *, node_condition: bool = False) -> tuple[Right, ...]:
    """The permissions that the agent on `node` needs, except the GET of a pod (`right_to_get`).

    `node_condition`: the agent writes the Node condition GpuDegraded.
    """
    condition = (Right("patch", "nodes/status", name=node),) if node_condition else ()
    return (
        Right("get", "nodes", name=node),
        Right("watch", "nodes", name=node),
        Right("patch", "nodes", name=node),
        Right("list", "pods", selector=f"spec.nodeName={node}"),
        Right("watch", "pods", selector=f"spec.nodeName={node}"),
        Right("patch", "pods/status"),
        Right("create", "events"),
        Right("patch", "events"),
        *condition,
    )


def right_to_get(pod: tuple[str, str]) -> Right:
    """The permission to GET a pod (namespace, name) of this node.

    It needs the name, because a node's own identity may read only the pods of its node.
    """
    return Right("get", "pods", namespace=pod[0], name=pod[1])


UNNEEDED: Final = (
    Right("list", "nodes"),
    Right("delete", "nodes"),
    Right("patch", "pods"),
    Right("create", "pods/exec"),
    Right("create", "pods/binding"),
    Right("list", "secrets"),
    Right("list", "configmaps"),
    Right("impersonate", "users"),
)
"""Rights that neither the agent's ClusterRole nor a node's own identity has."""
SKEW_LIMIT: Final = 2.0
"""Seconds."""
_RESOLUTION: Final = dt.timedelta(seconds=1)
"""Of the time in an HTTP header."""


def judge_excess(server: str, granted: Sequence[Right]) -> Finding:
    """Judge the rights of `UNNEEDED` that are granted."""
    if not granted:
        said = "none of the rights that the agent does not need is granted, as far as asked"
        return Finding.ok(PreflightCheck.EXCESS, server, said)
    return Finding.note(
        PreflightCheck.EXCESS,
        server,
        f"wider than needed: {', '.join(right.words for right in granted)}",
        "give the agent the chart's ClusterRole, or the kubeconfig of this node's own identity",
    )


def skew_of(server: dt.datetime, before: dt.datetime, after: dt.datetime) -> float:
    """By how many seconds the API server's clock is certainly ahead of this node's; < 0: behind.

    `server`: the time in an answer, cut to a second; `before` and `after`: this node's clock around
    the request. 0: they may be equal.
    """
    least = (server - after).total_seconds()
    most = (server + _RESOLUTION - before).total_seconds()
    return max(least, 0.0) + min(most, 0.0)


def judge_clock(server: str, skew: float | None) -> Finding:
    """Judge the difference of the clocks; None: the answers had no time."""
    check = PreflightCheck.CLOCK
    if skew is None:
        said = "its answers have no time (Date)"
        return Finding.unknown(check, server, said, "compare `date -u` on both machines")
    if abs(skew) <= SKEW_LIMIT:
        said = f"its clock and this node's differ by at most {SKEW_LIMIT:g} s"
        return Finding.ok(check, server, said)
    order = "ahead of" if skew > 0 else "behind"
    return Finding.note(
        check,
        server,
        f"its clock is {abs(skew):.0f} s {order} this node's",
        "synchronise both clocks (timedatectl, chronyc tracking)",
    )
