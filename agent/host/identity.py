"""Reads the name of this host and the ids of this boot and this machine."""

import socket
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MACHINE_ID = Path("/etc/machine-id")


def host_name() -> str:
    """This host's name, in the form in which the kubelet names its Node.

    Source: kubernetes pkg/util/node/node.go GetHostname.
    """
    return socket.gethostname().strip().lower()


def boot_id(path: Path = BOOT_ID) -> str:
    """The id of the present boot; empty if the kernel gives none."""
    return _word(path)


def machine_id(path: Path = MACHINE_ID) -> str:
    """The id of this machine, the same across boots; empty if it has none."""
    return _word(path)


def _word(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
