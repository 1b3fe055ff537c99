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
from tests.services.at_work import at_work

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
        async with at_work(self.service.run):
            yield self


UNREADABLE = ContainerUse(NOON, RegionState.UNREADABLE, reason="it is a link")
NO_LIMIT = a_container_use(a_gpu_use(mib=5000, limit_mib=0))
BELOW = a_container_use(a_gpu_use(mib=2900, limit_mib=3000))
OTHER = a_row(container="other")


@pytest.mark.parametrize(
    ("before", "shown", "count"),
    [
        ((), [(HALF, ROW), (FULL, ROW), (HALF, ROW), (FULL, ROW)], 1),
        ((), [(FULL, ROW), (FULL, OTHER), (FULL, ROW)], 3),
        ((ROW,), [(None, ROW), (FULL, ROW)], 0),
        ((ROW,), [(HALF, ROW), (FULL, ROW)], 1),
        ((), [(NO_LIMIT, ROW), (BELOW, ROW), (UNREADABLE, ROW)], 0),
        # In plain mode there is no pod to tell of.
        ((), [(FULL, msgspec.structs.replace(ROW, decided_by=Decider.KUBELET))], 0),
    ],
    ids=["once", "each", "full before the start", "full after it", "not full", "plain"],
)
async def test_a_container_that_fills_its_limit_is_told_of_once(before, shown, count):
    async with PressureScene(*before).running() as scene:
        for use, row in shown:
            await scene.shows(use, row)

    assert count == len(scene.said)
    for event in scene.said:
        assert ("MemoryLimitReached", False) == (event.reason, event.warning)
        assert (ROW.namespace, ROW.pod, POD_UID) == (event.namespace, event.pod, event.pod_uid)
        assert " uses 2,960 of its 3,000 MiB of GPU 0." in event.text
        assert event.text.startswith(("Container main", "Container other"))


async def test_a_gpu_that_left_the_inventory_is_named_by_its_uuid():
    async with PressureScene().running() as scene:
        await scene.shows(a_container_use(a_gpu_use(G2, mib=3000)))

    assert G2 in scene.said[0].text
