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


class Attacker:
    """One child process that has begun."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def until_done(self) -> dict[str, int]:
        """What it says when it has come to its own end."""
        return await self._report()

    async def stopped(self) -> dict[str, int]:
        """What it says when it is told to stop."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        return await self._report()

    async def begun(self) -> None:
        """It is at work."""
        assert await self._line() == {"at": "work"}

    async def _report(self) -> dict[str, int]:
        report = await self._line()
        await self._process.wait()
        return report

    async def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            line = await self._process.stdout.readline()
        assert line, (await self._process.communicate())[1].decode()
        found: dict[str, Any] = json.loads(line)
        return found

    async def end(self) -> None:
        """Whatever it does, it is over."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


@contextlib.asynccontextmanager
async def attacker(program: str, *words: str | Path) -> AsyncIterator[Attacker]:
    """`python -m tests.hostile.lab.PROGRAM WORDS`, at work; it ends with the block."""
    process = await asyncio.create_subprocess_exec(
        *("setpriv", "--pdeathsig", "KILL"),
        *(sys.executable, "-m", f"tests.hostile.lab.{program}", *map(str, words)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        stdin=asyncio.subprocess.DEVNULL,
        cwd=TOP,
        env=ENVIRON,
    )
    found = Attacker(process)
    try:
        await found.begun()
        yield found
    finally:
        await found.end()


@contextlib.asynccontextmanager
async def at_work(tally: AttackTally, program: str, *words: str | Path) -> AsyncIterator[Attacker]:
    """The same; when the block ends well it is stopped, and what it tried is counted."""
    async with attacker(program, *words) as found:
        yield found
        tally.add(await found.stopped())


async def finished(tally: AttackTally, program: str, *words: str | Path) -> None:
    """The attacker comes to its own end, and what it tried is counted."""
    async with attacker(program, *words) as found:
        tally.add(await found.until_done())
