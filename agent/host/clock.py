"""Reads the wall clock and the ids of this boot and this machine."""

import datetime as dt
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MACHINE_ID = Path("/etc/machine-id")


class SystemClock:
    """The Clock port over the system clock."""

    def now(self) -> dt.datetime:
        """The current time, aware, in UTC."""
        return dt.datetime.now(dt.UTC)


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
