"""GPUs that change are told of once, and the Node's condition is written when it changes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from agent.cluster import NodeCondition, NodeEvent, Phase, PodTable
from agent.errors import ApiError
from agent.kit.cell import Cell
from agent.ledger import Ledger
from agent.model import Condition, Inventory
from agent.report import CALM, GpuCondition, GpuEvents
from tests.builders import (
    NOON,
    a_gpu,
    a_health,
    a_pod,
    a_pod_uid,
    a_row,
    a_share,
    a_shared_gpu,
    a_uuid,
    an_inventory,
)
from tests.fakes.clock import LoopClock
from tests.services.at_work import at_work

WELL = a_health()
BAD = a_health(condition=Condition.BAD, text="XID 48 [H-048]")
LOST = a_health(condition=Condition.LOST, cause="lost", text="out of reach [H-LOST]")


def holding(*healths, generation: int = 1) -> Inventory:
    gpus = [a_shared_gpu(gpu=a_gpu(index=n), health=one) for n, one in enumerate(healths)]
    return an_inventory(gpus=gpus, generation=generation)


def telling(inventory, say, rows=(), pods=None) -> GpuEvents:
    """The Events about that inventory; `pods`: of the node, None: not listed yet."""
    table = PodTable() if pods is None else PodTable({pod.uid: pod for pod in pods}, synced=True)
    return GpuEvents(inventory, Cell(Ledger(tuple(rows))), Cell(table), Cell(()), say)


@contextlib.asynccontextmanager
async def running(service) -> AsyncIterator[None]:
    async with at_work(service.run):
        await asyncio.sleep(0.01)
        yield


async def test_what_changes_is_said_and_what_was_known_at_the_start_is_not():
    said: list[NodeEvent] = []
    inventory = Cell(Inventory())
    async with running(telling(inventory, said.append)):
        inventory.set(holding(BAD, WELL))
        await asyncio.sleep(0.01)
        inventory.set(holding(BAD, BAD, generation=2))
        await asyncio.sleep(0.01)
        inventory.set(holding(WELL, BAD, generation=3))
        await asyncio.sleep(0.01)

    assert ["GpuUnhealthy", "GpuRecovered"] == [event.reason for event in said]


async def test_a_gpu_that_stutters_is_said_to_be_silent_once_and_well_when_it_lasts():
    said: list[str] = []
    inventory = Cell(holding(WELL))
    silent = a_health(condition=Condition.UNMONITORED, cause="driver", text="does not answer")
    events = telling(inventory, lambda event: said.append(event.reason))
    async with running(events):
        for turn in range(100):
            inventory.set(holding(silent, generation=2 * turn + 2))
            await asyncio.sleep(5)
            inventory.set(holding(WELL, generation=2 * turn + 3))
            await asyncio.sleep(CALM - 1)
        assert ["GpuDriverUnresponsive"] == said
        await asyncio.sleep(2)
        assert ["GpuDriverUnresponsive", "GpuRecovered"] == said
        await asyncio.sleep(10 * CALM)

    assert ["GpuDriverUnresponsive", "GpuRecovered"] == said


async def test_a_gpu_that_is_taken_back_and_answers_is_not_said_to_be_unhealthy():
    said: list[str] = []
    free = a_health(condition=Condition.UNMONITORED, cause="released", serving=False)
    unasked = msgspec.structs.replace(free, cause="driver")
    inventory = Cell(holding(free))
    events = telling(inventory, lambda event: said.append(event.reason))
    async with running(events):
        inventory.set(holding(unasked, generation=2))
        await asyncio.sleep(1)
        inventory.set(holding(WELL, generation=3))
        await asyncio.sleep(2 * CALM)
        assert ["GpuRecovered"] == said
        inventory.set(holding(free, generation=4))
        await asyncio.sleep(1)
        inventory.set(holding(unasked, generation=5))
        await asyncio.sleep(2 * CALM)

    assert ["GpuRecovered", "GpuReleased", "GpuUnhealthy"] == said


async def test_an_ill_gpu_that_is_gone_for_good_is_said_to_be_gone_once_and_later():
    said: list[str] = []
    inventory = Cell(holding(BAD))
    events = telling(inventory, lambda event: said.append(event.text))
    async with running(events):
        inventory.set(an_inventory(gpus=(), generation=2))
        await asyncio.sleep(CALM - 1)
        assert [] == said
        await asyncio.sleep(10 * CALM)

    assert [f"no longer shared: GPU 0 ({a_uuid(0)})"] == said


async def test_telling_ends_with_the_inventory():
    inventory = Cell(holding(WELL))
    inventory.close()

    await telling(inventory, lambda _: None).run()


class Status:
    """The Node's status; `failures` are for the next writes."""

    def __init__(self, *failures: ApiError) -> None:
        self.failures = list(failures)
        self.written: list[NodeCondition] = []

    async def set_condition(self, condition: NodeCondition) -> None:
        if self.failures:
            raise self.failures.pop()
        self.written.append(condition)


async def test_the_condition_is_written_at_the_start_and_when_it_says_something_else():
    status, inventory = Status(), Cell(Inventory())
    async with running(GpuCondition(status.set_condition, inventory, LoopClock())):
        for generation, healths in enumerate([(WELL,), (WELL,), (BAD,), (BAD,), (WELL,)], 1):
            inventory.set(holding(*healths, generation=generation))
            await asyncio.sleep(0.01)

    assert [False, True, False] == [one.status for one in status.written]


async def test_what_the_condition_says_may_change_and_it_is_so_since_it_was_so_first():
    status, inventory = Status(), Cell(Inventory())
    gone = a_shared_gpu(gpu=a_gpu(index=1), present=False, there=False)
    async with running(GpuCondition(status.set_condition, inventory, LoopClock())):
        inventory.set(an_inventory(gpus=(a_shared_gpu(), gone)))
        await asyncio.sleep(60)
        ill = a_shared_gpu(health=a_health(condition=Condition.BAD, since=NOON))
        inventory.set(an_inventory(gpus=(ill, gone), generation=2))
        await asyncio.sleep(60)

    first, second = status.written
    assert first.since == second.since
    assert first.message != second.message


async def test_a_condition_that_was_not_written_is_written_when_the_service_starts_again():
    status, inventory = Status(ApiError("down")), Cell(holding(BAD))
    service = GpuCondition(status.set_condition, inventory, LoopClock())
    with pytest.raises(ApiError):
        await service.run()
    async with running(service):
        pass

    assert [True] == [one.status for one in status.written]


@pytest.mark.parametrize(
    ("pods", "told"),
    [
        (None, ["one", "two"]),
        ([a_pod(uid=a_pod_uid(1)), a_pod(uid=a_pod_uid(2))], ["one", "two"]),
        ([a_pod(uid=a_pod_uid(1), phase=Phase.FAILED), a_pod(uid=a_pod_uid(2))], ["two"]),
        ([a_pod(uid=a_pod_uid(1))], ["one"]),
        ([], []),
    ],
    ids=["not listed yet", "both run", "one has ended", "one is gone", "all are gone"],
)
async def test_no_pod_that_is_gone_or_has_ended_is_told_about_its_gpu(pods, told):
    said: list[NodeEvent] = []
    shares = (a_share(uuid=a_uuid(0)),)
    rows = [
        a_row(pod_uid=a_pod_uid(number), pod=name, shares=shares)
        for number, name in ((1, "one"), (2, "two"))
    ]
    inventory = Cell(holding(WELL))
    async with running(telling(inventory, said.append, rows, pods)):
        inventory.set(holding(BAD, generation=2))
        await asyncio.sleep(0.01)

    assert told == [event.pod for event in said if event.reason == "GpuDegradedForPod"]
