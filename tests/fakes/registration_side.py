"""The kubelet's directory, a server of ours in it and a kubelet that answers, all in memory."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Self

from agent.errors import KubeletError
from agent.kit.cell import Cell
from agent.kubelet.register import KubeletDirectory, Registration
from agent.ledger import KubeletEpoch
from tests.fakes.chance import Seeded

RESOURCE = "nvidia.com/gpu"


class KubeletSide(KubeletDirectory):
    """Plays KubeletDirectory, Register and PluginServer for one resource; time is the loop's.

    `answer` is what Register does; the usual one opens a stream. `calls` holds the moment and the
    endpoint of each Register, `looks` the number of times that the kubelet's socket was looked at.
    """

    def __init__(self) -> None:
        super().__init__(Path("/plugins"))
        self.resource = Cell(RESOURCE)
        self.files: set[str] = set()
        self.present: KubeletEpoch | None = None
        self.streams: Cell[int] = Cell(0)
        self.calls: list[tuple[float, str]] = []
        self.registered = ""
        self.looks = 0
        self.binds = 0
        self.bind_delay = 0.0
        self.bind_failure: Exception | None = None
        self.served = ""
        self.answer: Callable[[], None] = self.open_stream
        self.delay = 0.0
        self.heard: Callable[[str], None] = lambda _: None
        self._names: asyncio.Queue[str] = asyncio.Queue()
        self._endpoint = ""

    @classmethod
    def started(cls) -> Self:
        """One whose kubelet is there."""
        side = cls()
        side.start_kubelet()
        return side

    # The world

    def start_kubelet(self) -> None:
        """A new process: streams are gone with the old one, all sockets are swept."""
        self.streams.set(0)
        for name in sorted(self.files):
            self.remove(name)
        self.touch_kubelet()

    def touch_kubelet(self) -> None:
        """kubelet.sock is made anew, and nothing else happens."""
        old = self.present or KubeletEpoch(inode=7)
        self.present = KubeletEpoch(old.inode, old.ctime_ns + 1)
        self.report("kubelet.sock")

    def stop_kubelet(self) -> None:
        """Its streams break; its socket file goes too."""
        self.streams.set(0)
        self.present = None
        self.report("kubelet.sock")

    def remove(self, name: str) -> None:
        self.files.discard(name)
        self.report(name)

    def report(self, name: str) -> None:
        self._names.put_nowait(name)
        self.heard(name)

    def open_stream(self) -> None:
        self.streams.set(self.streams.value + 1)

    # KubeletDirectory

    def read(self, name: str) -> KubeletEpoch | None:
        if name != self.kubelet:
            return KubeletEpoch() if name in self.files else None
        self.looks += 1
        return self.present

    async def changes(self) -> AsyncGenerator[str, None]:
        while True:
            yield await self._names.get()

    # Register

    async def register(self, endpoint: str, resource: str) -> None:
        assert endpoint in self.files
        assert 0 == self.streams.value, "Register while a stream is open"
        self.calls.append((asyncio.get_running_loop().time(), endpoint))
        self.registered = resource
        if self.present is None:
            raise KubeletError("kubelet.sock is not there")
        await asyncio.sleep(self.delay)
        self.answer()

    # PluginServer

    @property
    def endpoint(self) -> str:
        return self._endpoint

    async def rebind(self) -> None:
        self.files.discard(self._endpoint)
        self._endpoint = ""
        self.streams.set(0)
        if self.bind_failure is not None:
            raise self.bind_failure
        self.binds += 1
        self.served = self.resource.value
        await asyncio.sleep(self.bind_delay)
        self._endpoint = f"hami-gpu-{self.binds:08x}.sock"
        self.files.add(self._endpoint)


def raising(error: Exception) -> Callable[[], None]:
    """An answer that is an error."""

    def answer() -> None:
        raise error

    return answer


@contextlib.asynccontextmanager
async def a_registration(side: KubeletSide) -> AsyncIterator[Registration]:
    """A registration that runs, until the block is left."""
    registration = Registration(
        side.resource,
        side,  # type: ignore[arg-type]
        side,
        side.register,
        Seeded(3),
    )
    side.heard = registration.heard
    async with asyncio.TaskGroup() as group:
        running = group.create_task(registration.run())
        yield registration
        running.cancel()


def gaps(calls: list[tuple[float, str]]) -> list[float]:
    """Seconds between calls."""
    times = [at for at, _ in calls]
    return [later - earlier for earlier, later in itertools.pairwise(times)]
