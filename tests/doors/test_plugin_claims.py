"""A bad GPU as the kubelet sees it, from the driver's report to the bytes on its stream.

The best-known plugin for NVIDIA's GPUs marked one of ten slices, nothing ever recovered, and each
GPU was a list of its own. tests/machine/gpu_world.py holds the same for restarts and old streams.
"""

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec
import pytest

from agent.health.judge import HealthSettings
from agent.health.watch import HealthWatch
from agent.inventory import InventoryKeeper, Listing
from agent.kit.cell import Cell
from agent.kubelet.door import PluginServer
from agent.ledger import State
from agent.model import GpuUuid, Inventory, ProbeOutcome, Scan, SharingSettings, SliceList
from agent.state import StateService
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

    def __init__(self, directory: Path, driver: ScriptedDriver, settings: HealthSettings) -> None:
        clock, inventory = LoopClock(), Cell(Inventory())
        self.slices = Cell(SliceList())
        self.state = StateService(
            disk=MemoryDisk(), recovered=State(machine_id="m"), boot_id="boot"
        )
        keeper = InventoryKeeper(inventory, Cell(SharingSettings()), clock)
        self.watch = HealthWatch(
            driver=driver,
            inventory=inventory,
            judged=keeper.judged,
            remember=self.state.remember,
            changed=lambda: None,
            settings=settings,
            clock=clock,
            recalled={},
            boot_changed=False,
        )
        self.listing = Listing(inventory, keeper.held, self.slices)
        self.server = PluginServer(
            directory, Cell(RESOURCE), self.slices, FakeAllocator(), Seeded(0)
        )
        self.directory = directory
        keeper.found(Scan("570.1", tuple(a_gpu(index=n) for n in range(GPUS))))


@contextlib.asynccontextmanager
async def an_agent(
    directory: Path, driver: ScriptedDriver, settings: HealthSettings = QUICK
) -> AsyncIterator[ClaimingAgent]:
    """An agent that serves."""
    agent = ClaimingAgent(directory, driver, settings)
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


@contextlib.asynccontextmanager
async def a_stream(agent: ClaimingAgent):
    """A kubelet's stream of lists."""
    plugin = GrpcPlugin(agent.directory / agent.server.endpoint)
    try:
        yield plugin.lists()
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


async def test_an_xid_marks_all_ten_slices_of_its_gpu_until_it_is_well_again(tmp_path: Path):
    driver = ScriptedDriver()
    async with an_agent(tmp_path, driver) as agent, a_stream(agent) as stream:
        assert ill() == await next_of(stream)
        driver.xid(a_uuid(2), 54)

        assert ill(2) == await next_of(stream)
        assert ill() == await next_of(stream)


@pytest.mark.parametrize("how", ["events", "probes"])
async def test_gpus_that_are_lost_at_once_are_one_list(tmp_path: Path, how: str):
    driver = ScriptedDriver()
    # What probes say of all alike is the driver's trouble: one is well.
    lost = range(GPUS) if how == "events" else range(1, GPUS)
    async with an_agent(tmp_path, driver, GATHERING) as agent, a_stream(agent) as stream:
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
