"""What people can do about a GPU that the driver does not describe."""

from typing import Final

from agent.core.inventory.gpu import Trouble

_RESET: Final = "if that lasts, reset it or reboot the node"
_REMEDIES: Final = {
    Trouble.LOST: _RESET,
    Trouble.FAILED: _RESET,
    Trouble.RESET: "reset it or reboot the node",
    Trouble.SILENT: "it may be waking, which takes seconds where no persistence daemon runs; it is "
    "taken in as soon as it answers",
    Trouble.RELEASED: "take it back with hami-agent recheck",
    Trouble.UNPLACED: "take them back with hami-agent recheck all",
    Trouble.DENIED: "let the agent open its device file (/dev/nvidiaN), for which it needs the "
    "container runtime or the rights of root",
    Trouble.UNSUPPORTED: "use a driver that supports this GPU, or leave it out with "
    "sharing.filterUUIDs",
}


def remedy(trouble: Trouble) -> str:
    """What to do, to be read behind what is wrong."""
    return _REMEDIES[trouble]
