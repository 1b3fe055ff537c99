"""GPUs that change are told of once, and the Node's condition is written when it changes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial

import msgspec
import pytest

from agent.cluster import NodeCondition, NodeEvent, NodeView, Phase, PodTable
from agent.errors import ApiError
from agent.kit.cell import Cell
from agent.ledger import Ledger
from agent.model import Condition, Inventory
from agent.report import follow_gpus, keep_condition
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


def holding(*healths, generation: int = 1) -> Inventory:
    gpus = [a_shared_gpu(gpu=a_gpu(index=n), health=one) for n, one in enumerate(healths)]
    return an_inventory(gpus=gpus, generation=generation)


def telling(inventory, say, rows=(), pods=None):
    """What tells about that inventory; `pods`: of the node, None: not listed yet."""
    table = PodTable() if pods is None else PodTable({pod.uid: pod for pod in pods}, synced=True)
    return partial(follow_gpus, inventory, Cell(Ledger(tuple(rows))), Cell(table), Cell(()), say)


@contextlib.asynccontextmanager
async def running(run) -> AsyncIterator[None]:
    async with at_work(run):
        await asyncio.sleep(0.01)
        yield


A_NODE = NodeView("node-1", "the-uid", "1")


class Status:
    """The Node's status; `failures` are for the next writes."""

    def __init__(self, *failures: ApiError) -> None:
        self.failures = list(failures)
        self.written: list[NodeCondition] = []

    async def set_condition(self, condition: NodeCondition) -> None:
        if self.failures:
            raise self.failures.pop()
        self.written.append(condition)


def keeping(status: Status, inventory: Cell[Inventory], node: Cell[NodeView | None] | None = None):
    shown: Cell[NodeView | None] = Cell(A_NODE) if node is None else node
    return partial(keep_condition, status.set_condition, inventory, shown, LoopClock())


async def test_a_node_that_is_created_again_gets_the_condition_again_and_a_changed_one_does_not():
    status, node = Status(), Cell[NodeView | None](None)
    async with running(keeping(status, Cell(holding(BAD)), node)):
        assert [] == status.written
        changed = msgspec.structs.replace(A_NODE, resource_version="2")
        again = msgspec.structs.replace(A_NODE, uid="another")
        for seen, count in ((A_NODE, 1), (changed, 1), (None, 1), (changed, 1), (again, 2)):
            node.set(seen)
            await asyncio.sleep(0.01)
            assert count == len(status.written)

    assert [True, True] == [one.status for one in status.written]


async def test_what_the_condition_says_may_change_and_it_is_so_since_it_was_so_first():
    status, inventory = Status(), Cell(Inventory())
    gone = a_shared_gpu(gpu=a_gpu(index=1), present=False, there=False)
    async with running(keeping(status, inventory)):
        inventory.set(an_inventory(gpus=(a_shared_gpu(), gone)))
        await asyncio.sleep(60)
        ill = a_shared_gpu(health=a_health(condition=Condition.BAD, since=NOON))
        inventory.set(an_inventory(gpus=(ill, gone), generation=2))
        await asyncio.sleep(60)

    first, second = status.written
    assert first.since == second.since
    assert first.message != second.message


@pytest.mark.parametrize(
    ("pods", "told"),
    [
        (None, ["one", "two"]),
        ([a_pod(uid=a_pod_uid(1), phase=Phase.FAILED), a_pod(uid=a_pod_uid(2))], ["two"]),
        ([a_pod(uid=a_pod_uid(1))], ["one"]),
    ],
    ids=["not listed yet", "one has ended", "one is gone"],
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


# A GPU that is not shared is told in one Event, with the reason; its neighbours are shared.
