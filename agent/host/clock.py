"""The one reader of wall time, and of the names of this boot and this machine."""

import datetime as dt
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
MACHINE_ID = Path("/etc/machine-id")


class SystemClock:
    """The Clock port on the machine's own clock."""

    def now(self) -> dt.datetime:
        """The present, aware, in UTC."""
        return dt.datetime.now(dt.UTC)


def boot_id(path: Path = BOOT_ID) -> str:
    """What names the present boot; empty where the kernel does not tell."""
    return _word(path)


def machine_id(path: Path = MACHINE_ID) -> str:
    """What names this machine across boots; empty where it has no name."""
    return _word(path)


def _word(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
