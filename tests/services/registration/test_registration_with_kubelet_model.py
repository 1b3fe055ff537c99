"""Registration, plugin server and directory watch together, against a kubelet on real sockets.

Time is real here: sockets and inotify do not follow a virtual clock.
"""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable
from functools import partial
from pathlib import Path

import pytest

from agent.kit.cell import Cell
from agent.kubelet.register import KubeletDirectory, Registration, register_plugin
from agent.sandbox.kubelet.model import KubeletModel, Timings
from tests.fakes.chance import Seeded
from tests.fakes.clock import LoopClock
from tests.fakes.door import RESOURCE, FakeDoor, a_group, a_list
from tests.services.at_work import at_work

pytestmark = pytest.mark.looptime(False)


class ModelledNode:
    """A kubelet and an agent's side of the plugin API, in directories below `root`."""

    def __init__(self, root: Path) -> None:
        self.plugins = root / "plugins"
        self.pod_resources = root / "pod-resources"
        self.kubelet = KubeletModel(
            self.plugins,
            self.pod_resources,
            LoopClock(),
            Seeded(),
            timings=Timings(socket=0.0, first_admission=(0.0, 0.0), container_retry=(0.1, 0.1)),
        )
        self.door = FakeDoor(self.plugins, a_list(1, a_group(0), a_group(1)), seed=1)
        server = self.door.server
        self.directory = KubeletDirectory(self.plugins)
        self.registration = Registration(
            Cell(RESOURCE),
            server,
            self.directory,
            partial(register_plugin, self.plugins / "kubelet.sock", fenced=False),
            Seeded(),
        )
        self.directory.listeners = [self.registration.heard]

    async def allocatable(self, count: int) -> None:
        """Wait until exactly `count` ids are allocatable."""
        async with asyncio.timeout(30):
            await self.kubelet.until_allocatable(RESOURCE, count)

    async def until_seen(self, kind: str, times: int) -> None:
        await self.kubelet.history.until(lambda: self.seen(kind) == times)

    def seen(self, kind: str) -> int:
        return sum(event.kind == kind for event in self.kubelet.history)


@contextlib.asynccontextmanager
async def a_node(root: Path) -> AsyncIterator[ModelledNode]:
    """A node whose agent and kubelet run."""
    node = ModelledNode(root)
    await node.kubelet.start()
    try:
        async with at_work(node.door.server.run, node.directory.run, node.registration.run):
            yield node
    finally:
        await node.kubelet.stop()


async def within(wait: Awaitable[object]) -> None:
    async with asyncio.timeout(30):
        await wait


async def test_a_connection_that_breaks_is_made_anew(tmp_path: Path):
    async with a_node(tmp_path) as node:
        for times in range(1, 6):
            await node.allocatable(20)
            server = node.door.server._current
            assert server is not None
            for transport in server._peers.value:
                transport.abort()
            await within(node.until_seen("disconnected", times))

        await node.allocatable(20)
        assert 6 == node.seen("registered")


async def test_a_directory_that_is_removed_and_made_anew_is_recovered_from(tmp_path: Path):
    async with a_node(tmp_path) as node:
        await node.allocatable(20)
        await node.kubelet.kill()
        shutil.rmtree(node.plugins)
        await within(node.registration.state.until(lambda state: not state.registered))

        await node.kubelet.start()

        await node.allocatable(20)
