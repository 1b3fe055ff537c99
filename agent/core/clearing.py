"""What has become of directories that were set aside, and what is said of those that stay."""

import dataclasses
from typing import Final

from agent.core.changes import NodeEvent

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
    some = "1 directory" if cleared.kept == 1 else f"{cleared.kept} directories"
    text = (
        f"{some} of containers that are gone cannot be removed by the agent ({cleared.why}); no "
        "pod waits for that. Root can remove them as RUNBOOK.md says under DirectoriesKept."
    )
    return NodeEvent(KEPT_EVENT, text, warning=True)
