"""The groups of the checks of `doctor`, and what each failed check means for pods."""

import enum
from collections.abc import Iterable, Mapping
from typing import Final

from agent.core.node.findings import Finding, PreflightCheck


class CheckGroup(enum.StrEnum):
    """A group of checks, as `--only` and `--skip` name it, in the order of the output."""

    CONFIG = "config"
    DRIVER = "driver"
    KUBELET = "kubelet"
    AGENT = "agent"
    API = "api"
    SCHEDULER = "scheduler"
    LIBRARY = "library"
    PATHS = "paths"


MEMBERS: Final[Mapping[CheckGroup, tuple[PreflightCheck, ...]]] = {
    CheckGroup.CONFIG: (PreflightCheck.SETTINGS, PreflightCheck.HAMI_FILES, PreflightCheck.ENTRIES),
    CheckGroup.DRIVER: (PreflightCheck.DRIVER, PreflightCheck.ACCESS, PreflightCheck.CDI),
    CheckGroup.KUBELET: (
        PreflightCheck.KUBELET,
        PreflightCheck.WITNESS,
        PreflightCheck.PLUGIN,
        PreflightCheck.OFFER,
    ),
    CheckGroup.AGENT: (
        PreflightCheck.AGENT,
        PreflightCheck.SECOND,
        PreflightCheck.BYTECODE,
    ),
    CheckGroup.API: (
        PreflightCheck.NODE,
        PreflightCheck.RIGHTS,
        PreflightCheck.EXCESS,
        PreflightCheck.CLOCK,
    ),
    CheckGroup.SCHEDULER: (
        PreflightCheck.LABEL,
        PreflightCheck.REPORT,
        PreflightCheck.HANDSHAKE,
        PreflightCheck.WRITER,
        PreflightCheck.LOCK,
        PreflightCheck.LEFTOVERS,
        PreflightCheck.MONITOR,
    ),
    CheckGroup.LIBRARY: (PreflightCheck.LIBRARY, PreflightCheck.PRELOAD),
    CheckGroup.PATHS: (PreflightCheck.PATHS,),
}
ALL_GROUPS: Final = frozenset(CheckGroup)
FROM_API: Final = frozenset({CheckGroup.KUBELET, CheckGroup.API, CheckGroup.SCHEDULER})
"""The groups that ask the API server."""

NO_OFFER: Final = "no new pod gets a GPU of this node; pods that run go on"
_SERVED: Final = "new pods with GPUs may be refused on this node; pods that run go on"

CONSEQUENCES: Final[Mapping[PreflightCheck, str]] = {
    PreflightCheck.SETTINGS: "the agent does not start with these settings, or shares otherwise "
    "than they say",
    PreflightCheck.HAMI_FILES: "GPUs are shared by other settings than those of HAMi's release",
    PreflightCheck.ENTRIES: "the node that was meant shares its GPUs by other settings",
    PreflightCheck.DRIVER: NO_OFFER,
    PreflightCheck.ACCESS: "CUDA programs in containers, or the agent, cannot reach the GPU",
    PreflightCheck.CDI: "no new pod gets such a GPU; pods that run go on",
    PreflightCheck.KUBELET: NO_OFFER,
    PreflightCheck.WITNESS: _SERVED,
    PreflightCheck.PLUGIN: "the kubelet may ask the other plugin for the GPUs of a pod",
    PreflightCheck.OFFER: "pods stay Pending, or fail after they are placed here",
    PreflightCheck.AGENT: NO_OFFER,
    PreflightCheck.SECOND: "the kubelet asks the agent that registered last, and the other one "
    "does not know those pods",
    PreflightCheck.BYTECODE: "no pod is affected; each start takes more than twice as long",
    PreflightCheck.NODE: "the scheduler learns nothing new of this node's GPUs",
    PreflightCheck.RIGHTS: _SERVED,
    PreflightCheck.EXCESS: "no pod is affected; who takes over the agent gets these rights, too",
    PreflightCheck.CLOCK: "ages of locks and time stamps of the scheduler are misjudged",
    PreflightCheck.LABEL: "a DaemonSet that selects by this label does not run here",
    PreflightCheck.REPORT: "HAMi's scheduler places pods by these numbers",
    PreflightCheck.HANDSHAKE: "HAMi's scheduler may place pods by an older report, or none here",
    PreflightCheck.WRITER: "HAMi's scheduler places pods by numbers that are not the agent's",
    PreflightCheck.LOCK: "HAMi's scheduler binds no other pod with GPUs to this node",
    PreflightCheck.LEFTOVERS: "pods are not affected while the agent serves",
    PreflightCheck.MONITOR: "pods get their GPUs; what the monitor kept is not kept",
    PreflightCheck.LIBRARY: NO_OFFER,
    PreflightCheck.PRELOAD: "limits of memory and compute may not hold in new containers",
    PreflightCheck.PATHS: NO_OFFER,
}

_GROUPS: Final = {check: group for group, checks in MEMBERS.items() for check in checks}


def group_of(check: PreflightCheck) -> CheckGroup:
    """The group of a check."""
    return _GROUPS[check]


def in_groups(findings: Iterable[Finding], groups: frozenset[CheckGroup]) -> tuple[Finding, ...]:
    """The findings of these groups, in the order of groups and checks."""
    order = list(_GROUPS)
    chosen = [one for one in findings if group_of(one.point) in groups]
    return tuple(sorted(chosen, key=lambda one: order.index(one.point)))


def consequence(finding: Finding) -> str:
    """What the finding means for pods."""
    return finding.means or CONSEQUENCES[finding.point]
