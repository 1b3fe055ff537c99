"""The agent's own checks, and whether they make it ready or degraded."""

from collections.abc import Iterable

import msgspec

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
