"""Attackers are child processes of the tests; each says on its output what it tried."""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.process.agent_process import ENVIRON

TOP = Path(__file__).parents[3]
PATIENCE = 90.0
"""Seconds for an attacker to begin, or to come to its end."""


@dataclass(eq=False, slots=True)
class AttackTally:
    """What was tried, as far as it is over; `facts` is what the attackers found besides.

    `goes_on` tells whether what they left is still being removed: `beside` pods were served then.
    """

    tries: int = 0
    facts: dict[str, int] = field(default_factory=dict)
    goes_on: Callable[[], object] | None = None
    beside: int = 0
    served: int = 0
    remark: str = ""

    def add(self, report: dict[str, int]) -> None:
        """One attacker's last word."""
        self.tries += report.pop("tries")
        for name, count in report.items():
            self.facts[name] = self.facts.get(name, 0) + count

    def count(self) -> None:
        """One more pod was served."""
        self.served += 1
        self.beside += bool(self.goes_on and self.goes_on())

    def told(self) -> str:
        """What is said of it besides, after a comma."""
        beside = f"{self.beside} of {self.served} pods beside the removal" if self.goes_on else ""
        return "".join(f", {one}" for one in (beside, self.remark) if one)


@contextlib.asynccontextmanager
async def at_work(
    tally: AttackTally, program: str, *words: str | Path, to_end: bool = False
) -> AsyncIterator[None]:
    """`python -m tests.hostile.lab.PROGRAM WORDS`, at work, or `to_end`: at its own end.

    When the block ends well it is stopped, and what it tried is counted.
    """
    process = await asyncio.create_subprocess_exec(
        *("setpriv", "--pdeathsig", "KILL"),
        *(sys.executable, "-m", f"tests.hostile.lab.{program}", *map(str, words)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        stdin=asyncio.subprocess.DEVNULL,
        cwd=TOP,
        env=ENVIRON,
    )
    try:
        assert await _told(process) == {"at": "work"}
        report = await _told(process) if to_end else None
        yield
        if report is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            report = await _told(process)
        tally.add(report)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _told(process: asyncio.subprocess.Process) -> dict[str, Any]:
    """The next line that it says."""
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE):
        line = await process.stdout.readline()
    assert line, (await process.communicate())[1].decode()
    found: dict[str, Any] = json.loads(line)
    return found
