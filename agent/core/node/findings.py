"""The lines of `hami-agent doctor`: what was checked, what was found, and what to do about it."""

import enum
from collections.abc import Iterable
from typing import Final

import msgspec


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

    - `means`: the consequence for pods; empty: that of the check (`check_groups.CONSEQUENCES`).
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
