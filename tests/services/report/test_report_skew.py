"""A changed inventory reaches the cache of every version of HAMi's scheduler, on virtual time.

The reporter and the scheduler's model meet at the API server only; the kubelet tells the Node how
many healthy slices there are, up to 10 s later than the agent.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import msgspec
import pytest

from agent.hami.annotations import ReportProfile, ReportSettings, read_register, report_of
from agent.model import Condition, Inventory
from agent.sandbox.scheduler.registry import Registry, Version
from tests.builders import NODE, a_gpu, a_health, a_shared_gpu, an_inventory
from tests.fakes.clock import LoopClock
from tests.services.at_work import at_work
from tests.services.report.reporting import Reporting, reporting

INTERVAL = 15.0
KUBELET = 10.0
"""Seconds that a kubelet may take to tell the Node a new count."""

PROFILES = {
    Version.V2_7: ReportProfile.COLON,
    Version.V2_8: ReportProfile.JSON,
    Version.V2_9: ReportProfile.JSON,
    Version.V2_10: ReportProfile.JSON,
}
COUNTING = (Version.V2_8,)
"""Versions that look at the count alone."""
READING = tuple(version for version in PROFILES if version not in COUNTING)
OFFSETS = (0.1, 14.9)
"""Seconds from the last look of the scheduler to the change."""


class SkewedScheduler:
    """The model of one version; it looks at the Node every 15 s."""

    def __init__(self, room: Reporting, version: Version, kubelet: float) -> None:
        self.room = room
        self.version = version
        self.registry = Registry(version)
        self.writes = 0
        self.late = 0.0
        """Seconds from its look to what it writes about it: it looks at all nodes first."""
        self._kubelet = kubelet
        self._clock = LoopClock()
        self._allocatable = 0

    async def count(self) -> None:
        async for inventory in self.room.inventory.follow():
            await asyncio.sleep(self._kubelet)
            self._allocatable = sum(gpu.split_count for gpu in inventory.gpus if gpu.serving)

    async def look(self) -> NoReturn:
        while True:
            node = self.room.api.node
            if node is not None:
                seen: dict[str, Any] = {
                    "metadata": {"name": NODE, "annotations": dict(node.annotations)},
                    "status": {"allocatable": {"nvidia.com/gpu": str(self._allocatable)}},
                }
                writes = self.registry.ingest(seen, self._clock.now())
                await asyncio.sleep(self.late)
                self.writes += bool(writes)
                if writes:
                    self.room.api.edit_node(writes)
            await asyncio.sleep(INTERVAL)

    def knows(self, inventory: Inventory) -> bool:
        """Its cache says of each GPU what a text of this inventory says."""
        state = self.registry.state(NODE, {})
        report = report_of(inventory, {}, self.room.settings.value)
        assert report is not None
        return state is not None and [*read_register(report.register)] == [
            gpu.capacity for gpu in state.gpus
        ]

    async def seconds_until(self, inventory: Inventory, within: float) -> float:
        """Seconds until the cache says so; the deadline fails the test."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.timeout(within + 1.0):
            while not self.knows(inventory):  # noqa: ASYNC110 -- a cache tells nobody
                await asyncio.sleep(0.1)
        return loop.time() - began


@contextlib.asynccontextmanager
async def scheduled(
    version: Version, *, kubelet: float = KUBELET, chance: float = 0.0
) -> AsyncIterator[SkewedScheduler]:
    """A node that the scheduler knows, just after one of its looks."""
    settings = ReportSettings(PROFILES[version])
    async with reporting(settings=settings, chance=chance) as room:
        await room.settled()
        scheduler = SkewedScheduler(room, version, kubelet)
        async with at_work(scheduler.count, scheduler.look):
            await asyncio.sleep(10 * INTERVAL + 0.01)
            assert scheduler.knows(room.inventory.value)
            yield scheduler


def ill(inventory: Inventory) -> Inventory:
    first = msgspec.structs.replace(inventory.gpus[0], health=a_health(condition=Condition.BAD))
    return msgspec.structs.replace(inventory, gpus=(first, *inventory.gpus[1:]), generation=2)


def lost(inventory: Inventory) -> Inventory:
    first = msgspec.structs.replace(inventory.gpus[0], present=False)
    return msgspec.structs.replace(inventory, gpus=(first, *inventory.gpus[1:]), generation=2)


def grown(_: Inventory) -> Inventory:
    return an_inventory(count=3, generation=2)


def split(inventory: Inventory) -> Inventory:
    gpus = tuple(msgspec.structs.replace(gpu, split_count=4) for gpu in inventory.gpus)
    return msgspec.structs.replace(inventory, gpus=gpus, generation=2)


def oversold(inventory: Inventory) -> Inventory:
    """As many slices as before."""
    gpus = tuple(
        msgspec.structs.replace(gpu, registered_mib=2 * gpu.registered_mib)
        for gpu in inventory.gpus
    )
    return msgspec.structs.replace(inventory, gpus=gpus, generation=2)


def exchanged(_: Inventory) -> Inventory:
    """Other GPUs, as many slices."""
    return an_inventory(gpus=[a_shared_gpu(gpu=a_gpu(index=n)) for n in (5, 6)], generation=2)


Change = Callable[[Inventory], Inventory]
COUNTED: tuple[Change, ...] = (ill, lost, grown, split)
SILENT: tuple[Change, ...] = (oversold, exchanged)


def name_of(one: object) -> str:
    return getattr(one, "__name__", None) or getattr(one, "value", None) or str(one)


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("change", COUNTED + SILENT, ids=name_of)
@pytest.mark.parametrize("version", READING, ids=name_of)
async def test_a_changed_inventory_is_in_the_cache_within_15_seconds(
    version: Version, change: Change, offset: float
):
    async with scheduled(version) as scheduler:
        await asyncio.sleep(offset)
        changed = change(scheduler.room.inventory.value)
        scheduler.room.inventory.set(changed)

        assert await scheduler.seconds_until(changed, INTERVAL) <= INTERVAL


@pytest.mark.parametrize("kubelet", [1.0, KUBELET])
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("change", COUNTED, ids=name_of)
async def test_2_8_reads_it_within_15_seconds_of_the_kubelets_new_count(
    change: Change, offset: float, kubelet: float
):
    async with scheduled(Version.V2_8, kubelet=kubelet) as scheduler:
        await asyncio.sleep(offset)
        changed = change(scheduler.room.inventory.value)
        scheduler.room.inventory.set(changed)

        assert await scheduler.seconds_until(changed, INTERVAL + kubelet) <= INTERVAL + kubelet


@pytest.mark.parametrize("version", [Version.V2_7], ids=name_of)
async def test_old_schedulers_never_drop_a_node_whose_agent_lives(version: Version):
    async with scheduled(version) as scheduler:
        loop = asyncio.get_running_loop()
        end = loop.time() + 3600
        while loop.time() < end:
            assert scheduler.knows(scheduler.room.inventory.value)
            await asyncio.sleep(1)
