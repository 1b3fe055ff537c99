"""One life of the agent's health, from a driver to the bytes of its lists."""

import asyncio

from agent.errors import StateError
from agent.health.watch import HealthWatch
from agent.health.xids import HealthSettings
from agent.inventory import Discovery, InventoryKeeper, Listing
from agent.kit.cell import Cell
from agent.kubelet.door import DevicePlugin, Traffic
from agent.model import Inventory, Scan, SharingSettings, SliceList
from agent.state import StateService, recover
from agent.wire.v1beta1 import Empty
from tests.fakes.allocator import FakeAllocator
from tests.fakes.disk import MemoryDisk
from tests.machine.any_driver import AnyDriver
from tests.machine.virtual import VirtualClock

SLICES = 10
SETTINGS = HealthSettings(probe_interval=20.0)


class _LifeDisk:
    """The disk of one life: a dead one writes no more."""

    place = "/state"

    def __init__(self, disk: MemoryDisk) -> None:
        self._disk = disk
        self.is_dead = False

    async def read(self, name: str) -> bytes | None:
        return await self._disk.read(name)

    async def replace(self, name: str, data: bytes, *, keep: str | None = None) -> None:
        if self.is_dead:
            raise StateError("the process was killed")
        await asyncio.sleep(0.002)
        await self._disk.replace(name, data, keep=keep)


class GpuStream:
    """One kubelet's stream of lists."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.looked_at = 0
        """Frames that were looked at before."""
        self.task: asyncio.Task[None] | None = None

    async def read(self, plugin: DevicePlugin) -> None:
        async for frame in plugin.list_and_watch(Empty()):
            self.frames.append(bytes(frame))


class GpuLife:
    """One life of the agent, from the driver to its streams."""

    def __init__(self, driver: AnyDriver, clock: VirtualClock, disk: MemoryDisk) -> None:
        self._driver = driver
        self._clock = clock
        self.disk = _LifeDisk(disk)
        self.slices = Cell(SliceList())
        self.plugin = DevicePlugin(self.slices, FakeAllocator(), Traffic())

    async def run(self, boot: str) -> None:
        found = await recover(self.disk, boot_id=boot, machine_id="m")
        before = found.state
        state = StateService(disk=self.disk, recovered=before, boot_id=boot)
        inventory = Cell(Inventory())
        self.keeper = InventoryKeeper(
            inventory, Cell(SharingSettings(split_count=SLICES)), self._clock, before.health
        )

        def scanned(scan: Scan) -> None:
            self.keeper.found(scan)
            watch.scanned(scan)

        discovery = Discovery(self._driver, scanned)
        watch = HealthWatch(
            driver=self._driver,
            inventory=inventory,
            judged=self.keeper.judged,
            remember=state.remember,
            changed=discovery.rescan,
            settings=SETTINGS,
            clock=self._clock,
            recalled=before.health,
            boot_changed=bool(before.boot_id) and before.boot_id != boot,
        )
        listing = Listing(inventory, self.keeper.held, self.slices)
        async with asyncio.TaskGroup() as group:
            for run in (state.run, discovery.run, watch.run, listing.run):
                group.create_task(run())
