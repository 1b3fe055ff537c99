"""What checks of a node find: the lines of `doctor`, their order, and readiness."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal, TypeAlias

import msgspec

# The agent's own checks, and whether they make it ready or degraded.

STANDBY = "instance"
"""The check that fails while another agent serves the host."""


class Check(msgspec.Struct, frozen=True):
    """One check of the agent, as in `/api/v1`. `text` says what is wrong and what to do.

    A failed check that is not `required` degrades the agent but never makes it unready.
    """

    name: str
    ok: bool
    text: str = ""
    required: bool = True


def is_ready(checks: Iterable[Check]) -> bool:
    """True when no required check fails."""
    return all(check.ok for check in checks if check.required)


def degraded(checks: Iterable[Check]) -> tuple[Check, ...]:
    """The checks that fail without making the agent unready."""
    return tuple(check for check in checks if not check.ok and not check.required)


# The lines of `hami-agent doctor`: what was checked, what was found, and what to do about it.

Verdict: TypeAlias = Literal["ok", "note", "unknown", "wrong"]
"""The result of a check. A note keeps no agent from serving; unknown: it could not be made."""

OF_ONE_GPU: Final = "no new pod gets this GPU; pods that hold it may fail"
"""What a fault of one GPU means for pods."""

NO_OFFER: Final = "no new pod gets a GPU of this node; pods that run go on"
LAST_GOOD: Final = "the agent shares by the last good settings, and starts with them"
SERVED: Final = "new pods with GPUs may be refused on this node; pods that run go on"

CHECKS: Final[Mapping[str, Mapping[str, str]]] = {
    "config": {
        "P-SETTINGS": "the agent does not start with these settings, or shares "
        "otherwise than they say",
        "P-HAMI": "GPUs are shared by other settings than those of HAMi's release",
        "P-ENTRIES": "the node that was meant shares its GPUs by other settings",
    },
    "driver": {
        "P-DRIVER": NO_OFFER,
        "P-ACCESS": "CUDA programs in containers, or the agent, cannot reach the GPU",
        "P-CDI": "no new pod gets such a GPU; pods that run go on",
    },
    "kubelet": {
        "P-KUBELET": NO_OFFER,
        "P-WITNESS": SERVED,
        "P-PLUGIN": "the kubelet may ask the other plugin for the GPUs of a pod",
        "P-OFFER": "pods stay Pending, or fail after they are placed here",
    },
    "agent": {
        "P-AGENT": NO_OFFER,
        "P-SECOND": "the kubelet asks the agent that registered last, and the other "
        "one does not know those pods",
    },
    "api": {
        "P-NODE": "the scheduler learns nothing new of this node's GPUs",
        "P-RIGHTS": SERVED,
        "P-EXCESS": "no pod is affected; who takes over the agent gets these rights, too",
        "P-CLOCK": "ages of locks and time stamps of the scheduler are misjudged",
    },
    "scheduler": {
        "P-LABEL": "a DaemonSet that selects by this label does not run here",
        "P-REPORT": "HAMi's scheduler places pods by these numbers",
        "P-HANDSHAKE": "HAMi's scheduler may place pods by an older report, or none here",
        "P-WRITER": "HAMi's scheduler places pods by numbers that are not the agent's",
        "P-LOCK": "HAMi's scheduler binds no other pod with GPUs to this node",
        "P-LEFTOVERS": "pods are not affected while the agent serves",
        "P-MONITOR": "pods get their GPUs; what the monitor kept is not kept",
    },
    "library": {
        "P-LIBRARY": NO_OFFER,
        "P-PRELOAD": "limits of memory and compute may not hold in new containers",
    },
    "paths": {"P-PATHS": NO_OFFER},
}
"""The checks by group, in the order of the output, each with what its failure means for pods."""

GROUPS: Final = {check: group for group, checks in CHECKS.items() for check in checks}
ALL_GROUPS: Final = frozenset(CHECKS)
FROM_API: Final = ("kubelet", "api", "scheduler")
"""The groups that ask the API server."""

_CLUSTER: Final = ("P-NODE", "P-RIGHTS", "P-SETTINGS")

CAUSES: Final[Mapping[str, tuple[str, ...]]] = {
    "P-ACCESS": ("P-DRIVER",),
    "P-WITNESS": ("P-KUBELET",),
    "P-OFFER": ("P-REPORT", "P-AGENT", "P-KUBELET", "P-DRIVER", "P-SECOND", "P-PLUGIN"),
    "P-REPORT": ("P-AGENT", "P-RIGHTS", "P-DRIVER", "P-WRITER"),
    "P-HANDSHAKE": ("P-AGENT", "P-RIGHTS", "P-KUBELET", "P-DRIVER"),
    # The agent's own checks, which are the subjects of P-AGENT.
    "state": ("P-PATHS",),
    "server": ("P-KUBELET", "P-PATHS"),
    "registered": ("P-KUBELET", "P-DRIVER"),
    "stream": ("P-KUBELET",),
    "api": _CLUSTER,
    "api_synced": _CLUSTER,
    "report": (*_CLUSTER, "P-WRITER"),
    "settings": ("P-SETTINGS",),
    "inventory": ("P-DRIVER",),
    "driver": ("P-DRIVER",),
    "gpus": ("P-DRIVER",),
    "gpus_answering": ("P-DRIVER",),
    "cdi": ("P-CDI",),
    "offer": ("P-LIBRARY", "P-PRELOAD", "P-PATHS", "P-KUBELET"),
}
"""The checks that explain why one is wrong, if they are wrong themselves."""

_LATE: Final = ("offer", "cdi")
"""The agent's own checks that fail only until it looks again. Others have causes that no check of
doctor sees: `settings` also fails while pods hold slices."""


class Finding(msgspec.Struct, frozen=True, rename={"check": "id"}):
    """One line of the result, as `-o json` has it: what was checked and found, and what to do.

    `means`: the consequence for pods. `concluded` fills in that of the check, and the group.
    """

    check: str
    verdict: Verdict
    subject: str
    said: str
    advice: str = ""
    means: str = ""
    group: str = ""


class When(msgspec.Struct, frozen=True):
    """A row of a rule: if it holds, this is the finding."""

    holds: bool
    verdict: Verdict
    said: str
    advice: str = ""
    means: str = ""


def judged(check: str, subject: str, well: str, *rows: When) -> Finding:
    """The finding of the first row that holds; without one the check passed: `well`."""
    for row in rows:
        if row.holds:
            return Finding(check, row.verdict, subject, row.said, row.advice, row.means)

    return Finding(check, "ok", subject, well)


def concluded(findings: Iterable[Finding], groups: frozenset[str]) -> Iterator[Finding]:
    """The findings of these groups, in the order of groups and checks.

    One that follows from a wrong one among them is a note that names it, so that a fault is wrong
    in one line.
    """
    order = list(GROUPS)
    chosen = (one for one in findings if GROUPS[one.check] in groups)
    every = sorted(chosen, key=lambda one: order.index(one.check))
    wrong = {one.check for one in every if one.verdict == "wrong"}
    well = {one.check for one in every} - {one.check for one in every if one.verdict != "ok"}

    for one in every:
        group, verdict, said = GROUPS[one.check], one.verdict, one.said
        means = "" if verdict == "ok" else one.means or CHECKS[group][one.check]
        is_of_agent = one.check == "P-AGENT"
        likely = CAUSES.get(one.subject if is_of_agent else one.check, ())

        if verdict in {"wrong", "note"}:
            if causes := [cause for cause in likely if cause in wrong]:
                verdict, said = "note", f"{said} (follows from {', '.join(causes)})"
            elif one.subject in _LATE and (fixed := [cause for cause in likely if cause in well]):
                # One output must not contradict itself.
                said = f"{said} (now ok: {', '.join(fixed)}; the agent looks every 10 s)"

        yield msgspec.structs.replace(one, verdict=verdict, said=said, means=means, group=group)
