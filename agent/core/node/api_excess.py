"""Judges rights at the API server that the agent does not need, and the clock beside it."""

import datetime as dt
from collections.abc import Sequence
from typing import Final

from agent.core.node.api_rights import Right
from agent.core.node.findings import Finding, PreflightCheck

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
