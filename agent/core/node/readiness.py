"""What the agent says of itself: single checks, and what they add up to."""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One claim about the agent. `text` is a sentence for people: what is wrong and what to do.

    A check that is not `required` can degrade the agent; it never makes it unready.
    """

    name: str
    ok: bool
    text: str = ""
    required: bool = True


def is_ready(checks: Iterable[Check]) -> bool:
    """True when every required check holds."""
    return all(check.ok for check in checks if check.required)


def degraded(checks: Iterable[Check]) -> tuple[Check, ...]:
    """The checks that fail without making the agent unready."""
    return tuple(check for check in checks if not check.ok and not check.required)
