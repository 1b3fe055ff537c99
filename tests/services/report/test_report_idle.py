"""Nothing is written when nothing changed: an idle hour, and whatever happens without meaning.

The services that find GPUs, judge them, list them and report them run together here.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine

import msgspec
import pytest

from agent.cluster import CORDON, HANDSHAKE, MUTEX_LOCK, NodeView
from agent.errors import ApiError, ApiGone, DriverError
from agent.hami.annotations import ReportSettings
from agent.health.judge import HealthSettings
from agent.health.watch import HealthWatch
from agent.inventory import Discovery, InventoryKeeper
from agent.kit.cell import Cell
from agent.kube.objects import NodeWatch
from agent.model import DriverEvent, EventKind, Inventory, SharingSettings, SliceList
from agent.report import ReportCells, Reporter
from tests.builders import a_gpu, a_uuid
from tests.fakes.apiserver import FakeApi
from tests.fakes.clock import LoopClock
from tests.fakes.driver import ScriptedDriver
from tests.services.at_work import at_work
from tests.services.report.reporting import SCORED, Chance

HOUR = 3600.0


class IdleAgent:
    """All that stands between the driver and the annotation."""

    def __init__(self, gpus: int, api: FakeApi, settings: ReportSettings | None = None) -> None:
        clock, inventory, view = LoopClock(), Cell(Inventory()), Cell[NodeView | None](None)
        self.api = api
        self.driver = ScriptedDriver(a_gpu(index=n) for n in range(gpus))
        self.sharing = Cell(SharingSettings())
        self.report = Cell(settings or ReportSettings())
        self.slices = Cell(SliceList())
        self.keeper = InventoryKeeper(inventory, self.sharing, clock, slices=self.slices)
        self.discovery = Discovery(self.driver, self.keeper.found, ill=lambda _: False)
        self.health = HealthWatch(
            driver=self.driver,
            inventory=inventory,
            judged=self.keeper.judged,
            remember=lambda _: None,
            changed=self.discovery.rescan,
            settings=HealthSettings(),
            clock=clock,
            recalled={},
            boot_changed=False,
        )
        self.node = NodeWatch(api, view, Chance(0.5))
        cells = ReportCells(inventory, view, self.node.returns, self.report)
        self.reporter = Reporter(
            api, cells, self.node.on_answer, lambda _: None, clock, Chance(0.5)
        )


@contextlib.asynccontextmanager
async def running(agent: IdleAgent) -> AsyncIterator[IdleAgent]:
    """The agent, once it has reported."""
    async with at_work(
        *(agent.keeper.run, agent.discovery.run, agent.health.run),
        *(agent.node.run, agent.reporter.run),
    ):
        async with asyncio.timeout(60):
            await agent.reporter.unreported.until(lambda why: not why)
        yield agent


@contextlib.asynccontextmanager
async def settled(gpus: int, settings: ReportSettings | None = None) -> AsyncIterator[IdleAgent]:
    """An agent that has made its one write."""
    api = FakeApi()
    api.create_node({"other": "kept"})
    async with running(IdleAgent(gpus, api, settings)) as agent:
        assert 1 == api.writes
        yield agent


@pytest.mark.parametrize("settings", [ReportSettings(), SCORED], ids=["plain", "scored"])
@pytest.mark.parametrize("gpus", [1, 8, 16])
async def test_an_idle_hour_costs_no_write_and_no_list(gpus: int, settings: ReportSettings):
    async with settled(gpus, settings) as agent:
        await asyncio.sleep(HOUR)

        assert 1 == agent.api.writes
        assert {"watch_node": 1, "annotate_node": 1} == dict(agent.api.calls)
        assert 1 == agent.slices.value.generation
        assert agent.driver.scans >= 60


async def heartbeats(agent: IdleAgent) -> None:
    """The kubelet touches the Node: a new version, nothing that we read."""
    for _ in range(10):
        agent.api.touch_node()
        await asyncio.sleep(300)


async def foreign_labels(agent: IdleAgent) -> None:
    agent.api.label_node({"zone": "a"})
    await asyncio.sleep(60)
    agent.api.label_node({"zone": "b", "gpu": "on"})


async def foreign_annotations(agent: IdleAgent) -> None:
    for key, text in (
        *(("other", "changed"), ("hami.io/node-register-other", "x"), (CORDON, a_uuid(0))),
        (MUTEX_LOCK, "2026-08-21T06:20:50Z,team-a,train-0"),
    ):
        agent.api.edit_node({key: text})
        await asyncio.sleep(60)
        agent.api.edit_node({key: None})


async def a_schedulers_handshake(agent: IdleAgent) -> None:
    for text in ("Requesting_2026-08-21 06:20:50", None, "Deleted_2026-08-21 06:20:50", "x"):
        agent.api.edit_node({HANDSHAKE: text})
        await asyncio.sleep(60)


async def ended_watches(agent: IdleAgent) -> None:
    for _ in range(5):
        agent.api.end_watches()
        await asyncio.sleep(60)


async def an_outage(agent: IdleAgent) -> None:
    agent.api.begin_outage()
    await asyncio.sleep(600)
    agent.api.end_outage()


async def equal_scans(agent: IdleAgent) -> None:
    for _ in range(10):
        agent.driver.report(DriverEvent(EventKind.CHANGED))
        await asyncio.sleep(5)
    agent.driver.gpus = [msgspec.structs.replace(gpu) for gpu in agent.driver.gpus]
    agent.discovery.rescan()


async def a_silent_moment_of_the_driver(agent: IdleAgent) -> None:
    agent.driver.failure = DriverError("the driver is being updated")
    await asyncio.sleep(20)
    agent.driver.failure = None


async def slices_that_are_taken_and_given_back(agent: IdleAgent) -> None:
    ids = agent.slices.value.groups[0].ids[:3]
    agent.keeper.hold({a_uuid(0): ids})
    await asyncio.sleep(60)
    agent.keeper.hold({})


Happening = Callable[[IdleAgent], Coroutine[object, object, None]]


def at_once(*steps: Callable[[IdleAgent], object]) -> Happening:
    """All of it happens in one moment."""

    async def happening(agent: IdleAgent) -> None:
        for step in steps:
            step(agent)

    return happening


OTHER_NODES = SharingSettings(filter_uuids=frozenset({"GPU-of-another-node"}))
NOTHINGS: dict[str, Happening] = {
    "heartbeats": heartbeats,
    "foreign labels": foreign_labels,
    "foreign annotations": foreign_annotations,
    "a scheduler's handshake": a_schedulers_handshake,
    "ended watches": ended_watches,
    "a lost place": at_once(
        lambda agent: agent.api.fail(ApiGone("too old", status=410), count=3, call="watch_node"),
        lambda agent: agent.api.forget_history(),
    ),
    "an outage": an_outage,
    "a refused watch": at_once(
        lambda agent: agent.api.fail(ApiError("no", status=403), count=5, call="watch_node"),
        lambda agent: agent.api.end_watches(),
    ),
    "equal scans": equal_scans,
    "turned scans": at_once(
        lambda agent: agent.driver.gpus.reverse(), lambda agent: agent.discovery.rescan()
    ),
    "another driver version": at_once(
        lambda agent: setattr(agent.driver, "version", "580.1"),
        lambda agent: agent.discovery.rescan(),
    ),
    "a silent moment of the driver": a_silent_moment_of_the_driver,
    # 13 and 31 are the application's fault.
    "harmless XIDs": at_once(
        *(lambda agent, number=number: agent.driver.xid(a_uuid(0), number) for number in (13, 31))
    ),
    "equal settings": at_once(
        lambda agent: agent.sharing.set(SharingSettings()),
        lambda agent: agent.report.set(ReportSettings()),
    ),
    # What only the kubelet is told is no matter of the scheduler's.
    "a setting of lists alone": at_once(lambda agent: agent.sharing.set(OTHER_NODES)),
    "slices that are taken and given back": slices_that_are_taken_and_given_back,
}


@pytest.mark.parametrize("happening", NOTHINGS.values(), ids=NOTHINGS)
async def test_what_changes_nothing_writes_nothing(happening: Happening):
    async with settled(8) as agent:
        await happening(agent)
        await asyncio.sleep(HOUR)

        assert 1 == agent.api.writes
        assert not agent.reporter.unreported.value
