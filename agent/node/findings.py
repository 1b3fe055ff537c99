"""What checks of a node find: the lines of `doctor`, their order, and readiness."""

import enum
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

# The agent's own checks, and whether they make it ready or degraded.

STANDBY = "instance"
"""The check that fails while another agent serves the host."""


class Check(msgspec.Struct, frozen=True):
    """One check of the agent. `text` says what is wrong and what to do.

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


class PreflightCheck(enum.Enum):
    """A check of `doctor`. The value is the id that the runbook explains."""

    SETTINGS = "P-SETTINGS"
    HAMI_FILES = "P-HAMI"
    ENTRIES = "P-ENTRIES"
    DRIVER = "P-DRIVER"
    ACCESS = "P-ACCESS"
    CDI = "P-CDI"
    KUBELET = "P-KUBELET"
    WITNESS = "P-WITNESS"
    PLUGIN = "P-PLUGIN"
    OFFER = "P-OFFER"
    AGENT = "P-AGENT"
    SECOND = "P-SECOND"
    BYTECODE = "P-BYTECODE"
    NODE = "P-NODE"
    RIGHTS = "P-RIGHTS"
    EXCESS = "P-EXCESS"
    CLOCK = "P-CLOCK"
    LABEL = "P-LABEL"
    REPORT = "P-REPORT"
    HANDSHAKE = "P-HANDSHAKE"
    WRITER = "P-WRITER"
    LOCK = "P-LOCK"
    LEFTOVERS = "P-LEFTOVERS"
    MONITOR = "P-MONITOR"
    LIBRARY = "P-LIBRARY"
    PRELOAD = "P-PRELOAD"
    PATHS = "P-PATHS"


class PreflightVerdict(enum.Enum):
    """The result of a check. A note keeps no agent from serving."""

    OK = "ok"
    NOTE = "note"
    UNKNOWN = "unknown"
    """The check could not be made."""
    WRONG = "WRONG"


OF_ONE_GPU: Final = "no new pod gets this GPU; pods that hold it may fail"
"""What a fault of one GPU means for pods."""


class Finding(msgspec.Struct, frozen=True):
    """One line of the result: what was checked, what was found, and what to do about it.

    - `means`: the consequence for pods; empty: that of the check (`CONSEQUENCES`).
    - `causes`: the checks that, if they are wrong, explain why this one is.
    """

    point: PreflightCheck
    verdict: PreflightVerdict
    subject: str
    said: str
    advice: str = ""
    means: str = ""
    causes: tuple[PreflightCheck, ...] = ()

    @classmethod
    def ok(cls, point: PreflightCheck, subject: str, said: str) -> "Finding":
        """The check passed."""
        return cls(point, PreflightVerdict.OK, subject, said)

    @classmethod
    def note(
        cls, point: PreflightCheck, subject: str, said: str, advice: str = "", means: str = ""
    ) -> "Finding":
        """The agent serves, but the operator should know this."""
        return cls(point, PreflightVerdict.NOTE, subject, said, advice, means)

    @classmethod
    def unknown(cls, point: PreflightCheck, subject: str, said: str, advice: str = "") -> "Finding":
        """The check could not be made."""
        return cls(point, PreflightVerdict.UNKNOWN, subject, said, advice)

    @classmethod
    def wrong(
        cls, point: PreflightCheck, subject: str, said: str, advice: str = "", means: str = ""
    ) -> "Finding":
        """The agent does not start, or does not serve as it should."""
        return cls(point, PreflightVerdict.WRONG, subject, said, advice, means)

    def because_of(self, *causes: PreflightCheck) -> "Finding":
        """The same finding; if one of `causes` is wrong, it is only a consequence."""
        return msgspec.structs.replace(self, causes=causes)


def traced(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Make a note of each finding that follows from a wrong one, and name that one in it.

    So a fault is wrong in one line, and its consequences say where they come from.
    """
    every = tuple(findings)
    wrong = {one.point for one in every if one.verdict is PreflightVerdict.WRONG}
    told = []
    for one in every:
        causes = [cause.value for cause in one.causes if cause in wrong - {one.point}]
        if causes and one.verdict in {PreflightVerdict.WRONG, PreflightVerdict.NOTE}:
            said = f"{one.said} (follows from {', '.join(causes)})"
            told.append(msgspec.structs.replace(one, verdict=PreflightVerdict.NOTE, said=said))
        else:
            told.append(one)
    return tuple(told)


def counted(number: int, thing: str) -> str:
    """A number with its noun, for example `2 GPUs`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


# The groups of the checks of `doctor`, and what each failed check means for pods.


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


ALL_GROUPS: Final = frozenset(CheckGroup)
FROM_API: Final = (CheckGroup.KUBELET, CheckGroup.API, CheckGroup.SCHEDULER)
"""The groups that ask the API server."""

NO_OFFER: Final = "no new pod gets a GPU of this node; pods that run go on"
_SERVED: Final = "new pods with GPUs may be refused on this node; pods that run go on"

CHECKS: Final[Mapping[CheckGroup, Mapping[PreflightCheck, str]]] = {
    CheckGroup.CONFIG: {
        PreflightCheck.SETTINGS: "the agent does not start with these settings, or shares "
        "otherwise than they say",
        PreflightCheck.HAMI_FILES: "GPUs are shared by other settings than those of HAMi's release",
        PreflightCheck.ENTRIES: "the node that was meant shares its GPUs by other settings",
    },
    CheckGroup.DRIVER: {
        PreflightCheck.DRIVER: NO_OFFER,
        PreflightCheck.ACCESS: "CUDA programs in containers, or the agent, cannot reach the GPU",
        PreflightCheck.CDI: "no new pod gets such a GPU; pods that run go on",
    },
    CheckGroup.KUBELET: {
        PreflightCheck.KUBELET: NO_OFFER,
        PreflightCheck.WITNESS: _SERVED,
        PreflightCheck.PLUGIN: "the kubelet may ask the other plugin for the GPUs of a pod",
        PreflightCheck.OFFER: "pods stay Pending, or fail after they are placed here",
    },
    CheckGroup.AGENT: {
        PreflightCheck.AGENT: NO_OFFER,
        PreflightCheck.SECOND: "the kubelet asks the agent that registered last, and the other "
        "one does not know those pods",
        PreflightCheck.BYTECODE: "no pod is affected; each start takes more than twice as long",
    },
    CheckGroup.API: {
        PreflightCheck.NODE: "the scheduler learns nothing new of this node's GPUs",
        PreflightCheck.RIGHTS: _SERVED,
        PreflightCheck.EXCESS: "no pod is affected; who takes over the agent gets these rights, "
        "too",
        PreflightCheck.CLOCK: "ages of locks and time stamps of the scheduler are misjudged",
    },
    CheckGroup.SCHEDULER: {
        PreflightCheck.LABEL: "a DaemonSet that selects by this label does not run here",
        PreflightCheck.REPORT: "HAMi's scheduler places pods by these numbers",
        PreflightCheck.HANDSHAKE: "HAMi's scheduler may place pods by an older report, or none "
        "here",
        PreflightCheck.WRITER: "HAMi's scheduler places pods by numbers that are not the agent's",
        PreflightCheck.LOCK: "HAMi's scheduler binds no other pod with GPUs to this node",
        PreflightCheck.LEFTOVERS: "pods are not affected while the agent serves",
        PreflightCheck.MONITOR: "pods get their GPUs; what the monitor kept is not kept",
    },
    CheckGroup.LIBRARY: {
        PreflightCheck.LIBRARY: NO_OFFER,
        PreflightCheck.PRELOAD: "limits of memory and compute may not hold in new containers",
    },
    CheckGroup.PATHS: {
        PreflightCheck.PATHS: NO_OFFER,
    },
}
"""The checks in the order of the output, and what it means for pods that one has failed."""
_GROUPS: Final = {check: group for group, checks in CHECKS.items() for check in checks}


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
    return finding.means or CHECKS[group_of(finding.point)][finding.point]
