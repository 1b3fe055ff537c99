"""How long a process lives, by the kernel's own clock."""

import os
import time
from pathlib import Path
from typing import Final

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_STARTED: Final = 19
"""Place of the start time behind the name of the program, in proc_pid_stat(5)."""


def age_of(pid: int) -> float:
    """Seconds since a process was made, in steps of 10 ms. Raises OSError: it is gone."""
    _, _, text = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")
    started = int(text.split()[_STARTED]) / _TICKS
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
