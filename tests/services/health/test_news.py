"""GPUs that change are told of once, and the Node's condition is written when it changes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import pytest

from agent.cluster import NodeCondition, NodeEvent, NodeView, Phase, PodTable
from agent.errors import ApiError
from agent.health.judge import switched_off
from agent.inventory import Discovery, InventoryKeeper
from agent.kit.cell import Cell
from agent.ledger import Ledger
from agent.model import Condition, GpuFault, Inventory, SharingSettings, Trouble
from agent.report import follow_gpus, follow_left_out, keep_condition
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
from tests.fakes.clock import LoopClock, ManualClock
from tests.fakes.driver import ScriptedDriver
from tests.services.at_work import at_work

WELL = a_health()
BAD = a_health(condition=Condition.BAD, text="XID 48 [H-048]")
WORSE = msgspec.structs.replace(BAD, text="XID 79 [H-079]", action="reboot")


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


@pytest.mark.parametrize(
    ("first", "steps"),
    [
        (
            Inventory(),
            [
                ([BAD, WELL], 0.01, []),
                ([BAD, BAD], 0.01, ["GpuUnhealthy"]),
                ([WELL, BAD], 0.01, ["GpuUnhealthy", "GpuRecovered"]),
            ],
        ),
        (holding(BAD), [([WORSE], 0.01, ["GpuUnhealthy"]), ([WORSE], 60, ["GpuUnhealthy"])]),
        (holding(BAD), [([], 60, ["GpuInventoryChanged"])]),
    ],
    ids=["known at the start", "asks for another action", "ill and gone"],
)
async def test_what_changes_is_said_once(first, steps):
    said: list[str] = []
    inventory = Cell(first)
    async with running(telling(inventory, lambda event: said.append(event.reason))):
        for generation, (healths, seconds, expected) in enumerate(steps, 2):
            inventory.set(holding(*healths, generation=generation))
            await asyncio.sleep(seconds)
            assert expected == said


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


BROKEN = GpuFault("index 1", "Unknown Error")
LOST_TAIL = "; if this lasts, reboot the node [GpuLeftOut]"


class LeftOutBench:
    """A driver, the inventory, and what is said of it."""

    def __init__(self) -> None:
        self.driver = ScriptedDriver([a_gpu(index=0)])
        self.inventory = Cell(Inventory())
        self.events: list[NodeEvent] = []
        self.keeper = InventoryKeeper(self.inventory, Cell(SharingSettings()), ManualClock())
        self.discovery = Discovery(self.driver, self.keeper.found, ill=lambda _: False)
        self.left_out = partial(
            follow_left_out, self.keeper.left_out, self.inventory, self.events.append
        )

    @property
    def indexes(self) -> list[int]:
        return [shared.gpu.index for shared in self.inventory.value.gpus]

    async def rescan(self) -> None:
        self.discovery.rescan()
        await asyncio.sleep(1)


@asynccontextmanager
async def leaving_out(*faults: GpuFault) -> AsyncIterator[LeftOutBench]:
    bench = LeftOutBench()
    bench.driver.faults = list(faults)
    async with at_work(bench.keeper.run, bench.discovery.run, bench.left_out):
        await asyncio.sleep(1)
        yield bench


async def test_a_gpu_that_cannot_be_described_is_left_out_with_one_event():
    async with leaving_out(BROKEN) as bench:
        await asyncio.sleep(3600)

        assert [0] == bench.indexes
        (event,) = bench.events
        assert ("GpuLeftOut", True) == (event.reason, event.warning)
        assert (
            "GPU index 1 is not shared: Unknown Error; if this lasts, reset it or reboot the node "
            "[GpuLeftOut]"
        ) == event.text
        assert bench.driver.scans > 50
        bench.driver.faults.append(GpuFault("index 2", "no answer in time", Trouble.SILENT))
        await bench.rescan()
        assert ["GPU index 2 is not shared: no answer in time"] == [
            one.text.partition(";")[0] for one in bench.events[1:]
        ]


@pytest.mark.parametrize(
    ("judged", "gpus", "lost", "told"),
    [({}, [a_gpu(index=2)], (0, 7), [7]), ({a_uuid(0): switched_off(NOON)}, [], (0,), [0])],
    ids=["its health tells of it", "nobody looks after health"],
)
async def test_a_lost_gpu_that_was_shared_is_told_here_only_where_its_health_is_not(
    judged, gpus, lost, told
):
    async with leaving_out() as bench:
        bench.keeper.judged(judged)
        bench.driver.gpus = gpus
        bench.driver.faults = [GpuFault(a_uuid(n), "GPU is lost", Trouble.LOST) for n in lost]
        await bench.rescan()

        assert [f"GPU {a_uuid(n)} is not shared: GPU is lost{LOST_TAIL}" for n in told] == [
            event.text for event in bench.events
        ]
