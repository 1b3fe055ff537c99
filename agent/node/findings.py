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

Verdict: TypeAlias = Literal["ok", "note", "unknown", "WRONG"]
"""The result of a check. A note keeps no agent from serving; unknown: it could not be made."""

OF_ONE_GPU: Final = "no new pod gets this GPU; pods that hold it may fail"
"""What a fault of one GPU means for pods."""
NO_OFFER: Final = "no new pod gets a GPU of this node; pods that run go on"
_SERVED: Final = "new pods with GPUs may be refused on this node; pods that run go on"

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
        "P-WITNESS": _SERVED,
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
        "P-RIGHTS": _SERVED,
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


class Finding(msgspec.Struct, frozen=True):
    """One line of the result: what was checked, what was found, and what to do about it.

    - `means`: the consequence for pods; empty: that of the check (`CHECKS`).
    - `causes`: the checks that, if they are wrong, explain why this one is.
    """

    check: str
    verdict: Verdict
    subject: str
    said: str
    advice: str = ""
    means: str = ""
    causes: tuple[str, ...] = ()

    @property
    def group(self) -> str:
        """The group of its check."""
        return GROUPS.get(self.check, "")  # an agent of another version has others

    @property
    def consequence(self) -> str:
        """What the finding means for pods; empty: nothing is wrong."""
        known = CHECKS.get(self.group, {}).get(self.check, "")
        return "" if self.verdict == "ok" else self.means or known


class When(msgspec.Struct, frozen=True):
    """A row of a rule: if it holds, this is the finding."""

    holds: bool
    verdict: Verdict
    said: str
    advice: str = ""
    means: str = ""
    causes: tuple[str, ...] = ()


def judged(check: str, subject: str, well: str, *rows: When) -> Finding:
    """The finding of the first row that holds; without one the check passed: `well`."""
    for row in rows:
        if row.holds:
            return Finding(check, row.verdict, subject, row.said, row.advice, row.means, row.causes)
    return Finding(check, "ok", subject, well)


def traced(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Make a note of each finding that follows from a wrong one, and name that one in it.

    So a fault is wrong in one line, and its consequences say where they come from.
    """
    every = tuple(findings)
    wrong = {one.check for one in every if one.verdict == "WRONG"}
    for one in every:
        causes = [cause for cause in one.causes if cause in wrong - {one.check}]
        if causes and one.verdict in {"WRONG", "note"}:
            said = f"{one.said} (follows from {', '.join(causes)})"
            yield msgspec.structs.replace(one, verdict="note", said=said)
        else:
            yield one


def in_groups(findings: Iterable[Finding], groups: frozenset[str]) -> tuple[Finding, ...]:
    """The findings of these groups, in the order of groups and checks."""
    order = list(GROUPS)
    chosen = [one for one in findings if one.group in groups]
    return tuple(sorted(chosen, key=lambda one: order.index(one.check)))


def counted(number: int, thing: str) -> str:
    """A number with its noun, for example `2 GPUs`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
