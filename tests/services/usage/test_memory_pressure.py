"""The Event about a container that has filled its memory limit."""

import asyncio
import contextlib

import msgspec
import pytest

from agent.hami.region import RegionState
from agent.kit.cell import Cell
from agent.ledger import Decider, Ledger
from agent.model import Inventory
from agent.usage import PRESSURE_PERIOD, ContainerUse, MemoryPressure
from tests.builders import (
    G1,
    G2,
    NOON,
    POD_UID,
    a_container_use,
    a_gpu,
    a_gpu_use,
    a_row,
    a_shared_gpu,
    an_inventory,
)

ROW = a_row()
FULL = a_container_use(a_gpu_use(mib=2960, limit_mib=3000))
HALF = a_container_use(a_gpu_use(mib=1500, limit_mib=3000))


class PressureScene:
    """A service with its ledger, the use that it sees, and the Events that it posted."""

    def __init__(self, *before) -> None:
        self.ledger = Cell(Ledger(tuple(before)))
        self.uses = {}
        self.said = []
        inventory: Cell[Inventory] = Cell(an_inventory(gpus=[a_shared_gpu(gpu=a_gpu(uuid=G1))]))
        self.service = MemoryPressure(self.uses.get, self.ledger, inventory, self.said.append)

    async def shows(self, use, row=ROW) -> None:
        """Let the container use that much for a while."""
        self.ledger.set(Ledger((row,)))
        self.uses[row.key] = use
        await asyncio.sleep(2 * PRESSURE_PERIOD)

    @contextlib.asynccontextmanager
    async def running(self):
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(self.service.run())
            yield self
            task.cancel()


async def test_a_container_that_fills_its_limit_is_told_of_once():
    async with PressureScene().running() as scene:
        await scene.shows(HALF)
        assert [] == scene.said
        await scene.shows(FULL)
        await scene.shows(HALF)
        await scene.shows(FULL)

    (event,) = scene.said
    assert ("MemoryLimitReached", False) == (event.reason, event.warning)
    assert (ROW.namespace, ROW.pod, POD_UID) == (event.namespace, event.pod, event.pod_uid)
    assert "Container main uses 2,960 of its 3,000 MiB of GPU 0." in event.text


async def test_a_container_that_takes_its_place_is_told_of_again():
    async with PressureScene().running() as scene:
        await scene.shows(FULL)
        await scene.shows(FULL, a_row(container="other"))
        await scene.shows(FULL)

    assert 3 == len(scene.said)


async def test_a_container_that_was_full_before_the_agent_started_is_not_told_of_again():
    async with PressureScene(ROW).running() as scene:
        await scene.shows(None)
        await scene.shows(FULL)

    assert [] == scene.said


async def test_a_container_of_an_earlier_agent_that_fills_its_limit_later_is_told_of():
    async with PressureScene(ROW).running() as scene:
        await scene.shows(HALF)
        await scene.shows(FULL)

    assert 1 == len(scene.said)


@pytest.mark.parametrize(
    "use",
    [
        a_container_use(a_gpu_use(mib=5000, limit_mib=0)),
        a_container_use(a_gpu_use(mib=2900, limit_mib=3000)),
        ContainerUse(NOON, RegionState.UNREADABLE, reason="it is a link"),
    ],
)
async def test_without_a_limit_or_below_it_or_without_a_region_there_is_no_event(use):
    async with PressureScene().running() as scene:
        await scene.shows(use)

    assert [] == scene.said


async def test_in_plain_mode_there_is_no_pod_to_tell_of():
    async with PressureScene().running() as scene:
        await scene.shows(FULL, msgspec.structs.replace(ROW, decided_by=Decider.KUBELET))

    assert [] == scene.said


async def test_a_gpu_that_left_the_inventory_is_named_by_its_uuid():
    async with PressureScene().running() as scene:
        await scene.shows(a_container_use(a_gpu_use(G2, mib=3000)))

    assert G2 in scene.said[0].text
