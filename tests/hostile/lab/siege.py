"""An attack, and whether the node withstands it: pods are served as usual, and nothing changes."""

import contextlib
import dataclasses
import hashlib
import os
import re
import stat
import statistics
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final

from agent.sandbox.lab.cluster import Places
from tests.hostile.lab.attackers import AttackTally
from tests.hostile.lab.node import Node, Tenant
from tests.process.agent_process import comes

# What lies on the node outside the tenants' own directories, to see that nothing changes it.

Entry = tuple[str, ...]
STATE = re.compile(r"\.?(state|journal)\..*")
"""The agent's own files, written anew with pods and refusals, under changing names."""
REPLACED = frozenset({"kubelet_internal_checkpoint", "lock"})
"""Written anew by the kubelet with every pod; by an agent that starts, which tells its process."""
CHANCE = re.compile(r"-[0-9a-f]{8}\.sock$")
"""The end of a socket's name that is another one with every kubelet."""


def snapshot(places: Places, *others: Path) -> dict[str, Entry]:
    """Every path with its type, mode, owner, number of names, inode and content.

    Of the directory above the containers' all is left out but what is named in `others`, which is
    taken whole; of sockets, and of files that are replaced with every pod, inode and content are.
    What the agent logs is no file of its own: the sandbox writes it.
    """
    found: dict[str, Entry] = {}
    containers = places.hook / "vgpu" / "containers"
    for above, folders, files in os.walk(places.root):
        here = Path(above)
        if here in {containers, places.cgroup}:
            folders.clear()
            continue
        for name in (*folders, *files):
            is_state = here == places.state and STATE.fullmatch(name)
            if is_state or here / name == places.log:
                continue
            found[CHANCE.sub("-*.sock", str(here / name))] = _entry(here / name)
    for other in others:
        for path in (other, *other.rglob("*")):
            found[str(path)] = _entry(path)
    found[str(places.state / "*")] = tuple(sorted(_states(places.state)))
    return found


def _states(directory: Path) -> set[str]:
    """Type, mode and owner of all files of the agent's state: they have the same."""
    found = set()
    for path in directory.iterdir():
        if STATE.fullmatch(path.name):
            try:
                found.add(" ".join(_owned(path.lstat())))
            except FileNotFoundError:
                continue  # it has its next name by now
    return found


def _owned(status: os.stat_result) -> Entry:
    return (stat.filemode(status.st_mode), str(status.st_uid), str(status.st_gid))


def _entry(path: Path) -> Entry:
    """What must stay as it is; a directory's size and times follow what is in it."""
    status = path.lstat()
    fixed = _owned(status)
    if path.name in REPLACED or stat.S_ISSOCK(status.st_mode):
        return (*fixed, str(status.st_nlink))
    if stat.S_ISREG(status.st_mode):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        return (*fixed, str(status.st_nlink), str(status.st_ino), content)
    return (*fixed, str(status.st_ino))


def changed(before: dict[str, Entry], after: dict[str, Entry]) -> dict[str, tuple[object, object]]:
    """What is not as it was: path → how it was, how it is."""
    paths = before.keys() | after.keys()
    return {
        path: (before.get(path), after.get(path))
        for path in sorted(paths)
        if before.get(path) != after.get(path)
    }


# What was tried, how often, and how long an Allocate took meanwhile, for people.


@dataclasses.dataclass(eq=False, slots=True)
class AttackTable:
    """A line for each attack, in their order."""

    lines: list[str] = dataclasses.field(default_factory=list)

    def text(self) -> str:
        """All of them."""
        return "\n".join([*self.lines, ""])


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
    """All attacks on one node; what comes of them stands in `table`."""

    node: Node
    table: AttackTable

    async def withstand(self, attack: Attack, begin: Begin) -> AttackTally:
        """The attack is made, and pods are served during it as before.

        Raises AssertionError: they are not, or something changed outside of tenants' directories.
        """
        for attempt in range(ATTEMPTS):
            is_last = attempt == ATTEMPTS - 1
            tally = AttackTally()
            try:
                usual = await self.usual()
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

    async def usual(self) -> list[float]:
        """The seconds of each Allocate while nobody attacks."""
        return await self.node.pods.row(self.node.is_alive)

    async def _attacked(self, attack: Attack, begin: Begin, tally: AttackTally) -> list[float]:
        """The attack once; the seconds of each Allocate in it."""
        node = self.node
        agent, memory = node.agent, node.resident()
        before = snapshot(node.cluster.places, node.neighbour)
        with self.noted(attack, tally):
            async with begin(tally):
                during = await node.pods.row(node.is_alive, tally.count)
                assert node.resident() < MOST
            await node.is_alive()
            assert agent == node.agent
            found = changed(before, snapshot(node.cluster.places, node.neighbour))
            assert not found, found
            assert [] == node.sums.problems
            assert node.resident() <= memory + GROWTH
            assert 0 < tally.tries
        if tally.goes_on is not None and not tally.beside:
            raise MissedError(attack.name)
        return during

    @contextlib.asynccontextmanager
    async def a_tenant(self) -> AsyncIterator[Tenant]:
        """A pod that runs; when the block is left, it is over and its directory is set aside."""
        tenant = await self.node.tenant(f"tenant-{next(self.node.pods.numbers)}")
        yield tenant
        await self.node.end(tenant)

    async def until_removed(self, tenant: Tenant) -> None:
        """Nothing is left of its directory, which was set aside."""
        assert await comes(lambda: not tenant.aside(), CLEARED), tenant.aside()
        assert not tenant.directory.exists()

    @contextlib.contextmanager
    def noted(self, attack: Attack, tally: AttackTally) -> Iterator[None]:
        """An attack that is not withstood stands in the table, too."""
        try:
            yield
        except BaseException:
            self.note(attack, tally, NO_ROUND, "failed")
            raise

    def note(self, attack: Attack, tally: AttackTally, found: Round, result: str) -> None:
        """One more line of the table."""
        usual, median, worst = (
            f"{1000 * one:.0f} ms" for one in (found.usual, found.median, found.worst)
        )
        self.table.lines.append(
            f"{attack.name} (THREATS {attack.threats}): {tally.tries} of {attack.most} tries in "
            f"{attack.seconds:.0f} s; Allocate {median} (usual {usual}, worst {worst}): {result}"
        )
