"""What the kernel tells of a process: its time on a core, its memory by kind, how often it woke."""

import time
from dataclasses import dataclass
from pathlib import Path

from tests.bench.figures import Figure

MEGA = 1e6
_RUN_TIME = 2
"""CPUCLOCK_SCHED of Linux' include/linux/posix-timers.h: user and system together."""


def cpu_seconds(pid: int) -> float:
    """Time on a core of all threads that it has or had. Raises OSError: it is gone."""
    return time.clock_gettime(~pid << 3 | _RUN_TIME)


@dataclass(frozen=True, slots=True)
class Weight:
    """Memory in bytes."""

    resident: int
    anonymous: int

    def figures(self, when: str, more: str = "") -> list[Figure]:
        """Both, in megabytes; `when`: of the agent's life."""
        how = f"smaps_rollup, {when}, 1 MB = 10^6 bytes; {more}"
        kinds = (("resident", self.resident, 56), ("anonymous", self.anonymous, 38))
        return [
            Figure(f"{kind} {when}", f"{kind} {when}", "MB", [size / MEGA], how, budget)
            for kind, size, budget in kinds
        ]


def weight(pid: int) -> Weight:
    """How much memory a process has. Raises OSError: it is gone."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    lines = (line.split() for line in text.splitlines() if line.endswith(" kB"))
    found = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
    return Weight(found["Rss"], found["Anonymous"])


def wake_ups(pid: int) -> int:
    """How often its present threads gave up a core, or lost it. Raises OSError: it is gone."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(
        int(line.split()[1])
        for thread in threads
        for line in (thread / "status").read_text().splitlines()
        if "voluntary_ctxt_switches" in line
    )
