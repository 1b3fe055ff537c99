"""What has become of directories that were set aside, and what is said of those that stay."""

import dataclasses
from typing import Final

from agent.core.cluster.changes import NodeEvent

KEPT_EVENT: Final = "DirectoriesKept"


@dataclasses.dataclass(frozen=True, slots=True)
class Cleared:
    """After one part of the work. `more`: there is more to do at once.

    `kept` directories stay, the first of them for the reason `why`, in the system's words.
    """

    more: bool = False
    kept: int = 0
    why: str = ""


def kept_event(cleared: Cleared) -> NodeEvent:
    """That directories stay, and who can remove them."""
    some = "a directory" if cleared.kept == 1 else f"{cleared.kept} directories"
    text = (
        f"The agent cannot remove {some} of containers that are gone ({cleared.why}). No pod waits "
        "for this. Root on the node can: RUNBOOK.md says how under DirectoriesKept."
    )
    return NodeEvent(KEPT_EVENT, text, warning=True)
