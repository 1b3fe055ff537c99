"""Remedies for a GPU that the driver does not describe."""

from typing import Final

from agent.core.inventory.gpu import Trouble

_RESET: Final = "if this lasts, reset it or reboot the node"
_REMEDIES: Final = {
    Trouble.LOST: _RESET,
    Trouble.FAILED: _RESET,
    Trouble.RESET: "reset it or reboot the node",
    Trouble.SILENT: "it may still be initialising, which takes seconds without the persistence "
    "daemon; it is shared as soon as it answers",
    Trouble.RELEASED: "take it back with hami-agent recheck",
    Trouble.UNPLACED: "take them back with hami-agent recheck all",
    Trouble.DENIED: "let the agent open its device file (/dev/nvidiaN), through the container "
    "runtime or as root",
    Trouble.UNSUPPORTED: "use a driver that supports this GPU, or leave it out with "
    "sharing.filterUUIDs",
}


def remedy(trouble: Trouble) -> str:
    """What a person can do, as the end of a sentence that says what is wrong."""
    return _REMEDIES[trouble]
