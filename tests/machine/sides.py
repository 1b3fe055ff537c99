"""What the agent has to do with on its node: the disk, host directories and the kubelet's books.

Each belongs to one life of the agent: its calls wait a moment, and a dead one reaches nobody.
"""

import asyncio
import contextlib
import dataclasses
import datetime as dt
import functools
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any

from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent.allocate.match import UnlockedPods
from agent.cluster import PodUid
from agent.errors import StateError
from agent.kit.cell import Cell
from agent.kit.timing import Lag
from agent.ledger import ContainerKey, KubeletEpoch
from agent.model import Inventory, SliceId
from agent.ports import Clock
from agent.sandbox.kubelet.model import Life
from agent.sandbox.kubelet.podloop import container_id
from agent.wire.v1 import (
    ContainerResources,
    GetPodResourcesRequest,
    GetPodResourcesResponse,
    ListPodResourcesRequest,
    ListPodResourcesResponse,
    PodResources,
)
from agent.witness import CALL_DEADLINE, PodResourcesWitness
from tests.builders import NODE, NOON
from tests.fakes.disk import MemoryDisk
from tests.fakes.kubelet_side import FakeHookDirs
from tests.machine.api import ApiFaults, Store
from tests.machine.kubelet import NOWHERE, MemoryKubelet

# An event loop without sockets, pipes or waits: when nothing is ready, its clock jumps.

_TURN = 1e-6
"""Seconds for one turn of the loop: a wait for less than a clock can show would have no end."""


class StandstillError(Exception):
    """Everybody waits, and nothing will ever happen again."""


class _Skip:
    """In the place of a selector: a wait is a jump of the clock."""

    def __init__(self) -> None:
        self.now = 0.0

    def select(self, timeout: float | None) -> Sequence[object]:
        """No file is ever ready."""
        if timeout is None:
            raise StandstillError
        self.now += max(timeout, _TURN)
        return ()


class VirtualLoop(asyncio.BaseEventLoop):
    """Seconds cost nothing here, and the same program takes the same steps every time."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = _Skip()

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._selector.now

    def stall(self, seconds: float) -> None:
        """The process gets no processor for so long: nothing runs, and the clock goes on."""
        self._selector.now += seconds

    def _process_events(self, events: object) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """No other thread has to wake it."""


def stall(seconds: float) -> None:
    """Let the running loop, a VirtualLoop, get no processor for so long."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.stall(seconds)


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The test, on a loop whose clock it can stall."""

    @functools.wraps(test)
    def run(**given: Any) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(**given))

    return run


@contextlib.asynccontextmanager
async def starved(share: float, period: float = 0.1) -> AsyncIterator[None]:
    """During the block the loop runs for that share of each period only, as under a CPU quota."""

    async def starve() -> None:
        while True:
            await asyncio.sleep(share * period)
            stall((1 - share) * period)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(starve())
        try:
            yield
        finally:
            task.cancel()


class VirtualClock:
    """Wall time that passes as a loop's clock does; it can be looked at from outside."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def now(self) -> dt.datetime:
        """Noon, and the loop's seconds since."""
        return NOON + dt.timedelta(seconds=self._loop.time())


_CALL = (0.0003, 0.001)
_WRITE = (0.0005, 0.003)


@dataclasses.dataclass
class MachineTrouble:
    """So many calls of PodResources fail, so many have; each write takes so many seconds longer.

    `starved`: the process gets next to no processor.
    """

    silent: int = 0
    failed: int = 0
    write: float = 0.0
    starved: bool = False


@dataclasses.dataclass(frozen=True)
class MachineHost:
    """What outlives the agent.

    `is_old`: its kubelet is one before 1.34. It has no Get, and lists pods that have ended.
    """

    store: Store
    faults: ApiFaults
    kubelet: MemoryKubelet
    disk: MemoryDisk
    hooks: FakeHookDirs
    inventory: Cell[Inventory]
    epoch: Cell[KubeletEpoch | None]
    clock: Clock
    chance: random.Random
    trouble: MachineTrouble = dataclasses.field(default_factory=MachineTrouble)
    unlocked: UnlockedPods = UnlockedPods.SCHEDULED
    is_old: bool = False


class Steps:
    """The awaits of one life. It is killed at the one that `kill_at` names.

    `stall_at` names one, at which the loop does not run for some seconds.
    """

    def __init__(self, kill: Callable[[], None]) -> None:
        self.is_over = False
        self._kill = kill
        self._left: int | None = None
        self._stalls: list[tuple[int, float]] = []

    def stall_at(self, steps: int, seconds: float) -> None:
        """Get no processor for so long at the await that many awaits from now."""
        self._stalls.append((steps, seconds))

    def kill_at(self, steps: int | None) -> None:
        """Die at the await that many awaits from now; None: live on."""
        self._left = steps

    async def __call__(self) -> None:
        stalls, self._stalls = self._stalls, []
        for left, seconds in stalls:
            if left:
                self._stalls.append((left - 1, seconds))
            else:
                stall(seconds)
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                self._kill()
        if self.is_over:
            await asyncio.Event().wait()


class LifeDisk:
    """The disk of one life: a dead one writes no more."""

    place = "/state"

    def __init__(self, host: MachineHost, step: Steps) -> None:
        self._host = host
        self._step = step

    async def read(self, name: str) -> bytes | None:
        return await self._host.disk.read(name)

    async def replace(self, name: str, data: bytes, *, keep: str | None = None) -> None:
        if self._step.is_over:
            raise StateError("the process was killed")
        await self._step()
        await asyncio.sleep(self._host.chance.uniform(*_WRITE) + self._host.trouble.write)
        await self._host.disk.replace(name, data, keep=keep)
        await self._step()


class LifeHooks(FakeHookDirs):
    """The host directories, as one life reaches them."""

    def __init__(self, host: MachineHost, step: Steps) -> None:
        super().__init__()
        self._hooks = host.hooks
        self._step = step

    async def prepare(self, name: str, *, wipe: bool) -> None:
        await self._step()
        await self._hooks.prepare(name, wipe=wipe)

    async def remove(self, name: str) -> None:
        await self._step()
        await self._hooks.remove(name)


class MachineBooks:
    """The kubelet's socket of PodResources, dialled by one life."""

    def __init__(self, host: MachineHost, step: Steps) -> None:
        self._host = host
        self._step = step

    async def get(self, message: GetPodResourcesRequest) -> GetPodResourcesResponse:
        life = await self._life()
        if self._host.is_old:
            raise GRPCError(Status.UNIMPLEMENTED, "unknown method Get")
        return await life.lister.get(message)

    async def list(self) -> ListPodResourcesResponse:
        answer = await (await self._life()).lister.list(ListPodResourcesRequest())
        answer.pod_resources += self._ended() if self._host.is_old else ()
        return answer

    def _ended(self) -> Iterator[PodResources]:
        """The pods of this node that have ended and are not deleted."""
        for pod in self._host.store.select("pods"):
            is_here = pod["spec"].get("nodeName") == NODE
            if is_here and pod["status"].get("phase") in ("Succeeded", "Failed"):
                boxes = [ContainerResources(one["name"]) for one in pod["spec"]["containers"]]
                yield PodResources(pod["metadata"]["name"], pod["metadata"]["namespace"], boxes)

    async def _life(self) -> Life:
        """The kubelet that answers this call."""
        await self._step()
        await asyncio.sleep(self._host.chance.uniform(*_CALL))
        life, trouble = self._host.kubelet.life, self._host.trouble
        if life is None:
            raise ConnectionRefusedError("nobody listens")
        if trouble.silent:
            trouble.silent -= 1
            trouble.failed += 1
            raise ConnectionResetError("the connection is lost")
        return life


class LifeWitness(PodResourcesWitness):
    """The real client, over a call instead of a socket."""

    def __init__(self, books: MachineBooks) -> None:
        self._socket = NOWHERE
        self._deadline = CALL_DEADLINE
        self._lag = Lag()
        self._stub = books  # type: ignore[assignment]  # the two calls that it makes


class MachineRuntime:
    """What the node itself tells: the kubelet's checkpoint file, and who has a live cgroup."""

    def __init__(self, host: MachineHost, step: Steps) -> None:
        self._kubelet = host.kubelet
        self._step = step

    async def read(self, resource: str) -> dict[ContainerKey, frozenset[SliceId]] | None:
        await self._step()
        found = self._kubelet.drive.checkpoint
        if found is None:
            return None
        return {
            ContainerKey(PodUid(entry.pod_uid), entry.container): frozenset(
                SliceId(text) for ids in entry.numa.values() for text in ids
            )
            for entry in found.entries
            if entry.resource == resource
        }

    async def begun(self) -> frozenset[PodUid]:
        await self._step()
        known = self._kubelet.node.pods
        return frozenset(PodUid(uid) for uid, pod in known.items() if pod.has_cgroup)

    async def running(self, ids: frozenset[str]) -> frozenset[str]:
        await self._step()
        return ids & {
            container_id(pod, name)
            for pod in self._kubelet.node.pods.values()
            for name in pod.running
        }
