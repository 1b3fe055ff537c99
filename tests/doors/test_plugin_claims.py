"""A bad GPU as the kubelet sees it, from the driver's report to the bytes on its streams.

Five claims, one for each defect that was measured in the best-known plugin for NVIDIA's GPUs: only
one of ten slices was marked, a bad GPU was forgotten when the kubelet restarted, an old stream took
the report from the new one, nothing ever recovered, and each GPU was a list of its own.
"""

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec
import pytest

from agent.core.health.reports import ProbeOutcome
from agent.core.health.settings import HealthSettings
from agent.core.inventory.gpu import GpuUuid, Scan
from agent.core.inventory.inventory import Inventory
from agent.core.inventory.slices import SharingSettings, SliceList
from agent.core.state.state import State
from agent.kit.cell import Cell
from agent.plugin.server import PluginServer
from agent.services.health.watch import HealthWatch
from agent.services.inventory.listing import Listing
from agent.services.inventory.service import InventoryKeeper
from agent.services.state import StateService, recover
from tests.builders import a_gpu, a_uuid
from tests.fakes.allocator import FakeAllocator
from tests.fakes.chance import Seeded
from tests.fakes.clock import LoopClock
from tests.fakes.disk import MemoryDisk
from tests.fakes.driver import ScriptedDriver
from tests.fakes.grpc_messages import GrpcPlugin

pytestmark = pytest.mark.looptime(False)

GPUS, SLICES = 8, 10
RESOURCE = "nvidia.com/gpu"
QUICK = HealthSettings(quiet=0.3, longest_quiet=0.3, probe_interval=0.05)
GATHERING = msgspec.structs.replace(QUICK, gather=0.5, coalesce=0.5)
"""On a busy machine 5 ms do not hold eight events together."""
Seen = Mapping[GpuUuid, int]


class ClaimingAgent:
    """One life of what stands between the driver and the streams."""

    def __init__(
        self,
        directory: Path,
        driver: ScriptedDriver,
        recovered: State,
        disk: MemoryDisk,
        settings: HealthSettings,
    ) -> None:
        clock, inventory = LoopClock(), Cell(Inventory())
        self.slices = Cell(SliceList())
        self.state = StateService(disk=disk, recovered=recovered, boot_id="boot")
        keeper = InventoryKeeper(inventory, Cell(SharingSettings()), clock, recovered.health)
        self.watch = HealthWatch(
            driver=driver,
            inventory=inventory,
            judged=keeper.judged,
            remember=self.state.remember,
            changed=lambda: None,
            settings=settings,
            clock=clock,
            recalled=recovered.health,
            boot_changed=False,
        )
        self.listing = Listing(inventory, keeper.held, self.slices)
        self.server = PluginServer(
            directory, Cell(RESOURCE), self.slices, FakeAllocator(), Seeded(0)
        )
        self.directory = directory
        keeper.found(Scan("570.1", tuple(a_gpu(index=n) for n in range(GPUS))))

    @property
    def path(self) -> Path:
        return self.directory / self.server.endpoint


@contextlib.asynccontextmanager
async def an_agent(
    directory: Path, driver: ScriptedDriver, disk: MemoryDisk, settings: HealthSettings = QUICK
) -> AsyncIterator[ClaimingAgent]:
    """An agent that serves; it knows what the disk knows."""
    found = await recover(disk, boot_id="boot", machine_id="machine")
    agent = ClaimingAgent(directory, driver, found.state, disk, settings)
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(run())
            for run in (agent.state.run, agent.listing.run, agent.watch.run, agent.server.run)
        ]
        await agent.server.rebind()
        await agent.slices.until(lambda listed: listed.generation > 0)
        yield agent
        for task in tasks:
            task.cancel()


@contextlib.contextmanager
def streams(agent: ClaimingAgent, count: int):
    """So many streams of lists."""
    plugin = GrpcPlugin(agent.path)
    try:
        yield [plugin.lists() for _ in range(count)]
    finally:
        plugin.close()


async def next_of(stream) -> Seen:
    """The next list: for each GPU, how many of its slices are unhealthy."""
    answer = await asyncio.to_thread(next, stream)
    bad = collections.Counter({a_uuid(n): 0 for n in range(GPUS)})
    bad.update(
        GpuUuid(one.ID.rpartition("-")[0]) for one in answer.devices if one.health == "Unhealthy"
    )
    assert GPUS * SLICES == len({one.ID for one in answer.devices})
    return bad


def ill(*numbers: int) -> Seen:
    return {a_uuid(n): SLICES if n in numbers else 0 for n in range(GPUS)}


async def test_an_xid_marks_all_ten_slices_of_its_gpu_and_none_of_another(tmp_path: Path):
    driver = ScriptedDriver()
    async with an_agent(tmp_path, driver, MemoryDisk()) as agent:
        with streams(agent, 1) as (stream,):
            assert ill() == await next_of(stream)
            driver.xid(a_uuid(0), 79)

            assert ill(0) == await next_of(stream)


async def test_a_bad_gpu_stays_bad_for_a_kubelet_that_restarts_and_for_an_agent_that_does(
    tmp_path: Path,
):
    driver, disk = ScriptedDriver(), MemoryDisk()
    async with an_agent(tmp_path, driver, disk) as agent:
        driver.xid(a_uuid(3), 48)
        await agent.slices.until(lambda listed: not listed.groups[3].healthy)
        await agent.server.rebind()
        with streams(agent, 1) as (stream,):
            assert ill(3) == await next_of(stream)
        await agent.state.flush()
    async with an_agent(tmp_path, driver, disk) as agent:
        with streams(agent, 1) as (stream,):
            assert ill(3) == await next_of(stream)


async def test_an_old_stream_takes_no_change_from_a_new_one(tmp_path: Path):
    driver = ScriptedDriver()
    async with an_agent(tmp_path, driver, MemoryDisk()) as agent:
        with streams(agent, 3) as (closed, stale, live):
            for stream in (closed, stale, live):
                await next_of(stream)
            closed.cancel()
            driver.xid(a_uuid(1), 79)

            assert ill(1) == await next_of(live)
            assert ill(1) == await next_of(stale)


async def test_a_gpu_that_is_well_again_is_listed_as_healthy_again(tmp_path: Path):
    driver = ScriptedDriver()
    async with an_agent(tmp_path, driver, MemoryDisk()) as agent:
        with streams(agent, 1) as (stream,):
            await next_of(stream)
            driver.xid(a_uuid(2), 54)
            assert ill(2) == await next_of(stream)

            assert ill() == await next_of(stream)


@pytest.mark.parametrize("how", ["events", "probes"])
async def test_gpus_that_are_lost_at_once_are_one_list(tmp_path: Path, how: str):
    driver = ScriptedDriver()
    # What probes say of all alike is the driver's trouble: one is well.
    lost = range(GPUS) if how == "events" else range(1, GPUS)
    async with an_agent(tmp_path, driver, MemoryDisk(), GATHERING) as agent:
        with streams(agent, 1) as (stream,):
            await next_of(stream)
            before = agent.slices.value.generation
            driver.outcomes = {a_uuid(n): ProbeOutcome.LOST for n in lost}
            if how == "events":
                for number in range(GPUS):
                    driver.xid(a_uuid(number), 79)
                    await asyncio.sleep(0)

            assert ill(*lost) == await next_of(stream)
            await asyncio.sleep(3 * GATHERING.coalesce)
            assert before + 1 == agent.slices.value.generation
