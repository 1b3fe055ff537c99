"""An attack, and whether the node withstands it: pods are served as usual, and nothing changes.

Attackers are child processes of the tests; each says on its output what it tried.
"""

import asyncio
import contextlib
import dataclasses
import json
import signal
import statistics
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final

from tests.hostile.lab.node import Node
from tests.process.agent_process import ENVIRON, ROOT

PATIENCE = 90.0
"""Seconds for an attacker to begin, or to come to its end."""


@dataclasses.dataclass(eq=False, slots=True)
class AttackTally:
    """What was tried, as far as it is over; `facts` is what the attackers found besides.

    `goes_on` tells whether what they left is still being removed: `beside` pods were served then.
    """

    tries: int = 0
    facts: dict[str, int] = dataclasses.field(default_factory=dict)
    goes_on: Callable[[], object] | None = None
    beside: int = 0
    served: int = 0

    def add(self, report: dict[str, int]) -> None:
        """One attacker's last word."""
        self.tries += report.pop("tries")
        self.facts |= {name: self.facts.get(name, 0) + count for name, count in report.items()}

    def count(self) -> None:
        """One more pod was served."""
        self.served += 1
        self.beside += bool(self.goes_on and self.goes_on())

    def told(self) -> str:
        """What is said of it besides, after a comma."""
        return f", {self.beside} of {self.served} pods beside the removal" if self.goes_on else ""


@contextlib.asynccontextmanager
async def at_work(
    tally: AttackTally, *words: str | Path, to_end: bool = False
) -> AsyncIterator[None]:
    """`python -m tests.hostile.lab.programs WORDS`, at work, or `to_end`: at its own end.

    When the block ends well it is stopped, and what it tried is counted.
    """
    process = await asyncio.create_subprocess_exec(
        *("setpriv", "--pdeathsig", "KILL"),
        *(sys.executable, "-m", "tests.hostile.lab.programs", *map(str, words)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        stdin=asyncio.subprocess.DEVNULL,
        cwd=ROOT,
        env=ENVIRON,
    )

    async def told() -> dict[str, Any]:
        """The next line that it says."""
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            line = await process.stdout.readline()
        assert line, (await process.communicate())[1].decode()
        found: dict[str, Any] = json.loads(line)
        return found

    try:
        assert await told() == {"at": "work"}
        report = await told() if to_end else None
        yield
        if report is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            report = await told()
        tally.add(report)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


# What was tried, how often, and how long an Allocate took meanwhile.

TIMES: Final = 2.0
"""During an attack an Allocate may take so many times as long as usual, in the median."""
FLOOR: Final = 0.010
"""Seconds beyond that which belong to a machine with other work to do."""
WORST: Final = 1.0
"""Seconds that no single one may exceed. SECURITY.md promises these three figures."""
ATTEMPTS: Final = 3
"""Slow is only what is slow again, beside a usual time that is measured anew: other work on this
machine can stall a disk or a process for a second."""
GROWTH: Final = 32
"""MiB that the agent may have more after an attack than before."""
MOST: Final = 160
"""MiB that it may have at any time: the DaemonSet's limit is 192."""
CLEARED: Final = 120.0
"""Seconds in which what a tenant left is removed, on a slow disk."""


class MissedError(AssertionError):
    """The attack was over before the first pod was served, so its round shows nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Attack:
    """`threats`: lines of THREATS.md. `most` tries within `seconds`, `rate` a second at most."""

    name: str
    threats: str
    most: int
    seconds: float
    rate: float = 1_000_000.0

    @property
    def bounds(self) -> tuple[str, str, str]:
        """As an attacker's program takes them."""
        return f"{self.most}", f"{self.seconds}", f"{self.rate}"


Begin = Callable[[AttackTally], AbstractAsyncContextManager[object]]
"""Inside of the context the attack goes on; afterwards its tries are counted."""


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """Seconds of the Allocates before an attack and in it."""

    usual: float
    median: float
    worst: float

    @property
    def is_slow(self) -> bool:
        """Whether the attack is felt by other tenants."""
        return self.median > TIMES * self.usual + FLOOR or self.worst > WORST


NO_ROUND: Final = Round(0, 0, 0)


@dataclasses.dataclass(eq=False, slots=True)
class Siege:
    """All attacks on one node; what comes of them stands in `lines`, for people."""

    node: Node
    lines: list[str]

    async def withstand(self, attack: Attack, begin: Begin) -> AttackTally:
        """The attack is made, and pods are served during it as before.

        Raises AssertionError: they are not, or something changed.
        """
        for attempt in range(ATTEMPTS):
            is_last = attempt == ATTEMPTS - 1
            tally = AttackTally()
            try:
                usual = await self.node.pods.row(self.node.is_alive)
                during = await self._attacked(attack, begin, tally)
            except MissedError:
                if is_last:
                    self.note(attack, tally, NO_ROUND, "failed")
                    raise
                continue
            round_ = Round(statistics.median(usual), statistics.median(during), max(during))
            if not round_.is_slow or is_last:
                break
        self.note(attack, tally, round_, "slow" if round_.is_slow else f"ok{tally.told()}")
        assert not round_.is_slow, round_
        return tally

    async def _attacked(self, attack: Attack, begin: Begin, tally: AttackTally) -> list[float]:
        """The attack once; the seconds of each Allocate in it. One that fails is noted, too."""
        node = self.node
        agent, memory = node.agent, node.resident()
        try:
            async with begin(tally):
                during = await node.pods.row(node.is_alive, tally.count)
                assert node.resident() < MOST
            await node.is_alive()
            assert agent == node.agent
            assert [("mine", 0o100600)] == node.theirs()
            assert [] == node.sums.problems
            assert node.resident() <= memory + GROWTH
            assert 0 < tally.tries
        except BaseException:
            self.note(attack, tally, NO_ROUND, "failed")
            raise
        if tally.goes_on is not None and not tally.beside:
            raise MissedError(attack.name)
        return during

    def note(self, attack: Attack, tally: AttackTally, found: Round, result: str) -> None:
        """One more line of the table."""
        usual, median, worst = (
            f"{1000 * one:.0f} ms" for one in (found.usual, found.median, found.worst)
        )
        self.lines.append(
            f"{attack.name} (THREATS {attack.threats}): {tally.tries} of {attack.most} tries in "
            f"{attack.seconds:.0f} s; Allocate {median} (usual {usual}, worst {worst}): {result}"
        )
