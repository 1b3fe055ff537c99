"""A changed inventory reaches the cache of every version of HAMi's scheduler, on virtual time.

The reporter and the scheduler's model meet at the API server only; the kubelet tells the Node how
many healthy slices there are, up to 10 s later than the agent.
"""

import asyncio
import contextlib
import datetime as dt
from collections.abc import AsyncIterator, Mapping
from typing import NoReturn

import msgspec
import pytest
from typing_extensions import override

from agent.cluster import HANDSHAKE
from agent.hami.annotations import ReportProfile, ReportSettings, read_register, report_of
from agent.model import Condition, Inventory
from agent.sandbox.scheduler.model import COUNT
from agent.sandbox.scheduler.registry import Registry, decode_handshake, read_offer
from agent.sandbox.store import Json
from tests.builders import NODE, a_gpu, a_health, a_shared_gpu, an_inventory
from tests.fakes.clock import LoopClock
from tests.services.at_work import at_work
from tests.services.report.reporting import Reporting, reporting

INTERVAL, MINUTE = 15.0, dt.timedelta(minutes=1)
KUBELET = 10.0
"""Seconds that a kubelet may take to tell the Node a new count."""

PROFILES = {
    "2.7.1": ReportProfile.COLON,
    "2.8": ReportProfile.JSON,  # it looks at the count of slices alone
    "2.9": ReportProfile.JSON,
    "2.10": ReportProfile.JSON,
}


class OldRegistry(Registry):
    """When a release before 2.10 reads a Node whose agent lives, and when it drops it.

    Source: HAMi v2.7.1 to v2.9 pkg/scheduler/scheduler.go:register, nvidia/device.go:CheckHealth.
    """

    def __init__(self, version: str) -> None:
        super().__init__()
        self._version = version
        self._count = ""

    @override
    def ingest(self, node: Json, now: dt.datetime) -> Mapping[str, str | None]:
        noted, count = node["metadata"]["annotations"], node["status"]["allocatable"][COUNT]
        word, stamp = decode_handshake(noted.get(HANDSHAKE, "Reported"))
        is_asked, is_first = word == "Requesting", self._version == "2.7.1"
        if is_first and is_asked and stamp and now.replace(tzinfo=None) - stamp >= MINUTE:
            self.forget(NODE)
            return {HANDSHAKE: f"Deleted_{now:%Y-%m-%d %H:%M:%S}"}
        asks = not is_asked and self._version != "2.8"
        if asks or (count != self._count and not is_first):
            found = read_offer(noted, is_json=False)
            assert found is not None
            self._nodes[NODE] = found
        self._count = count
        return {HANDSHAKE: f"Requesting_{now:%Y-%m-%d %H:%M:%S}"} if asks else {}


class SkewedScheduler:
    """The model of one version; it looks at the Node every 15 s."""

    def __init__(self, room: Reporting, version: str) -> None:
        self.room = room
        self.registry = Registry() if version == "2.10" else OldRegistry(version)
        self._clock = LoopClock()
        self._allocatable = 0

    async def count(self) -> None:
        async for inventory in self.room.inventory.follow():
            await asyncio.sleep(KUBELET)
            self._allocatable = sum(gpu.split_count for gpu in inventory.gpus if gpu.serving)

    async def look(self) -> NoReturn:
        while True:
            node = self.room.api.node
            assert node is not None
            seen = {
                "metadata": {"name": NODE, "annotations": dict(node.annotations)},
                "status": {"allocatable": {"nvidia.com/gpu": str(self._allocatable)}},
            }
            if writes := self.registry.ingest(seen, self._clock.now()):
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


@contextlib.asynccontextmanager
async def scheduled(version: str) -> AsyncIterator[SkewedScheduler]:
    """A node that the scheduler knows, just after one of its looks."""
    async with reporting(settings=ReportSettings(PROFILES[version])) as room:
        await room.settled()
        scheduler = SkewedScheduler(room, version)
        async with at_work(scheduler.count, scheduler.look):
            await asyncio.sleep(10 * INTERVAL + 0.01)
            assert scheduler.knows(room.inventory.value)
            yield scheduler


def gpus(*changes: dict[str, object], indexes: tuple[int, ...] = (0, 1)) -> Inventory:
    """GPUs of which the first ones are changed so."""
    found = [a_shared_gpu(gpu=a_gpu(index=index)) for index in indexes]
    for place, change in enumerate(changes):
        found[place] = msgspec.structs.replace(found[place], **change)
    return an_inventory(gpus=found, generation=2)


DOUBLE = 2 * a_shared_gpu().registered_mib
COUNTED = {
    "ill": gpus({"health": a_health(condition=Condition.BAD)}),
    "lost": gpus({"present": False}),
    "grown": gpus(indexes=(0, 1, 2)),
    "split": gpus({"split_count": 4}, {"split_count": 4}),
}
AS_MANY_SLICES = {
    "oversold": gpus({"registered_mib": DOUBLE}, {"registered_mib": DOUBLE}),
    "exchanged": gpus(indexes=(5, 6)),
}


@pytest.mark.parametrize("offset", [0.1, 14.9])
@pytest.mark.parametrize("change", [*COUNTED, *AS_MANY_SLICES])
@pytest.mark.parametrize("version", PROFILES)
async def test_a_changed_inventory_is_in_the_cache_soon(version, change, offset):
    """Within 15 s; 2.8 reads it so long after the kubelet's new count, if that changes."""
    is_counting = version == "2.8"
    if is_counting and change in AS_MANY_SLICES:
        return
    async with scheduled(version) as scheduler:
        await asyncio.sleep(offset)
        changed = (COUNTED | AS_MANY_SLICES)[change]
        scheduler.room.inventory.set(changed)

        await asyncio.sleep(INTERVAL + KUBELET * is_counting)

        assert scheduler.knows(changed)


async def test_an_old_scheduler_never_drops_a_node_whose_agent_lives():
    async with scheduled("2.7.1") as scheduler:
        for _ in range(1200):
            assert scheduler.knows(scheduler.room.inventory.value)
            await asyncio.sleep(1)
