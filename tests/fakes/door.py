"""A plugin server that runs, as the composition would run it."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

from agent.kit.cell import Cell
from agent.kubelet.door import Fence, PluginServer
from agent.ledger import ContainerEdits, MountEdit, NodeEdit
from agent.model import SliceGroup, SliceId, SliceList
from tests.builders import a_uuid
from tests.fakes.chance import Seeded
from tests.fakes.grpc_messages import GrpcPlugin

RESOURCE = "nvidia.com/gpu"


def a_group(gpu: int = 0, *, slices: int = 10, healthy: bool = True, numa: int | None = 0):
    """The slices of one GPU as the list names them."""
    uuid = a_uuid(gpu)
    return SliceGroup(uuid, tuple(f"{uuid}-{n}" for n in range(slices)), healthy, numa)  # type: ignore[misc]


def a_list(generation: int = 1, *groups: SliceGroup) -> SliceList:
    """Two GPUs of ten slices unless `groups` are given."""
    return SliceList(generation, groups or (a_group(0), a_group(1, numa=1)))


def a_server(
    directory: Path, resource: str = RESOURCE, chance: random.Random | None = None
) -> PluginServer:
    """A server that lists two GPUs; nothing of it runs yet."""
    server = PluginServer(directory, Cell(resource), Cell(a_list()), chance or Seeded())
    server.allocator = FakeAllocator()
    return server


class FakeDoor:
    """The server with the cell that it lists and the allocator behind it."""

    def __init__(
        self, directory: Path, listed: SliceList, seed: int, fence: Fence | None = None
    ) -> None:
        self.directory = directory
        self.lists = Cell(listed)
        self.resource = Cell(RESOURCE)
        self.allocator = FakeAllocator()
        self.running: asyncio.Task[None]
        self.server = PluginServer(directory, self.resource, self.lists, Seeded(seed), fence)
        self.server.allocator = self.allocator

    async def end(self) -> None:
        """As SIGTERM ends it; returns when it has ended."""
        self.running.cancel()
        await asyncio.wait((self.running,))

    @property
    def path(self) -> Path:
        """Where it serves now."""
        return self.directory / self.server.endpoint


@contextlib.asynccontextmanager
async def a_door(
    directory: Path, listed: SliceList | None = None, *, seed: int = 0, fence: Fence | None = None
) -> AsyncIterator[FakeDoor]:
    """A server that serves, until the block is left."""
    door = FakeDoor(directory, listed or a_list(), seed, fence)
    async with asyncio.TaskGroup() as group:
        door.running = group.create_task(door.server.run())
        await door.server.rebind()
        yield door
        door.running.cancel()


@contextlib.asynccontextmanager
async def a_plugin(
    directory: Path, listed: SliceList | None = None, *, fence: Fence | None = None
) -> AsyncIterator[tuple[FakeDoor, GrpcPlugin]]:
    """The same with a client of its own that is connected to it."""
    async with a_door(directory, listed, fence=fence) as door:
        plugin = GrpcPlugin(door.path)
        yield door, plugin
        plugin.close()


class FakeAllocator:
    """Answers every request with edits that name its ids, sorted."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.failure: Exception | None = None
        self.open = asyncio.Event()
        self.open.set()
        self.preferred: tuple[str, ...] | None = None
        self.preferring = 0

    async def allocate(self, ids: tuple[SliceId, ...]) -> ContainerEdits:
        self.asked.append(ids)
        await self.open.wait()
        if self.failure is not None:
            raise self.failure
        return ContainerEdits(
            envs=(("EMPTY", ""), ("IDS", ",".join(sorted(ids)))),
            mounts=(MountEdit("/usr/local/vgpu", "/usr/local/vgpu/lock", read_only=False),),
            nodes=(NodeEdit("/dev/nvidia0", "/dev/nvidia0", "rwm"),),
            annotations=(("a", "b"),),
            cdi_names=("vendor.com/gpu=0",),
        )

    async def prefer(
        self, available: tuple[SliceId, ...], must_include: tuple[SliceId, ...], size: int
    ) -> tuple[SliceId, ...]:
        self.preferring += 1
        await self.open.wait()
        chosen = self.preferred or sorted(available, reverse=True)[:size]
        return tuple(map(SliceId, chosen))
