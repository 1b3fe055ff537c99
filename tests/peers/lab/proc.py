"""What /proc tells of a process: its rights, and what it may write to."""

from collections.abc import Mapping
from pathlib import Path


def status_of(pid: int) -> Mapping[str, str]:
    """/proc/PID/status by name. Raises OSError: there is no such process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def writable(pid: int) -> frozenset[str]:
    """Where something is mounted for writing, as the process sees it. Raises OSError: as above."""
    lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    mounts = (line.split() for line in lines)
    return frozenset(one[4] for one in mounts if "rw" in one[5].split(","))
