"""Judges the device files of NVIDIA's driver: whether they exist and may be opened."""

import enum
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from agent.core.node.findings import Finding, PreflightCheck, counted

CONTROL: Final = ("nvidiactl", "nvidia-uvm")
"""The device files that every CUDA program opens."""


class NodeAccess(enum.Enum):
    """What a device file allows this process."""

    OPEN = "can be opened"
    SEEN = "exists"
    """It was not opened: that would wake a GPU."""
    MISSING = "does not exist"
    DENIED = "may not be opened by this user"
    FORBIDDEN = "may not be opened: the device cgroup forbids it"
    FAILED = "cannot be opened"


class DeviceNode(msgspec.Struct, frozen=True):
    """A device file and what it allows. `reason`: the system's words for a failure."""

    path: str
    access: NodeAccess
    reason: str = ""


_ADVICE: Final = {
    NodeAccess.MISSING: "load the module on the host (nvidia-modprobe -u -c 0), or pass the file "
    "in",
    NodeAccess.DENIED: "run this check as root",
    NodeAccess.FORBIDDEN: "restart this container, because its rules for devices are older than "
    "the driver's files (systemd: DeviceAllow of the unit)",
    NodeAccess.FAILED: "look with nvidia-smi and for NVRM in the kernel's log (dmesg)",
}


def judge_access(nodes: Sequence[DeviceNode], gpus: int | None) -> Iterator[Finding]:
    """Judge the device files. `gpus`: how many GPUs the driver describes; None: not known."""
    check = PreflightCheck.ACCESS
    control = [node for node in nodes if node.path.rpartition("/")[2] in CONTROL]
    bad = [node for node in control if node.access not in {NodeAccess.OPEN, NodeAccess.SEEN}]
    for node in bad:
        said = node.access.value + (f" ({node.reason})" if node.reason else "")
        judged = Finding.unknown if node.access is NodeAccess.DENIED else Finding.wrong
        finding = judged(check, node.path, said, _ADVICE[node.access])
        yield finding.because_of(PreflightCheck.DRIVER)
    seen = len(nodes) - len(control)
    if gpus is not None and seen < gpus:
        yield Finding.note(
            check,
            "/dev/nvidiaN",
            f"{counted(gpus, 'GPU')} in the driver, {counted(seen, 'device file')} here",
            "pass all GPUs to this container (NVIDIA_VISIBLE_DEVICES=all), or create the missing "
            "ones on the host: nvidia-modprobe -c N",
        )
    elif not bad:
        said = f"can be opened; {counted(seen, 'file')} of GPUs"
        yield Finding.ok(check, ", ".join(node.path for node in control), said)
