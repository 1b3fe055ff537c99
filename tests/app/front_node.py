"""The agent's front, joined as the composition root joins it, over ports in memory."""

import asyncio
import contextlib
import dataclasses
import types
from collections.abc import AsyncIterator
from functools import partial

from agent.app.back import AgentParts
from agent.app.front import Front, HostSignals, StartFacts
from agent.app.web import WebSubjects
from agent.cluster import NodeEvent
from agent.hami.register import ReportSettings, report_of
from agent.kit.tasks import Heartbeat
from agent.ledger import SourceFile, State
from agent.model import GpuUuid, SharedGpu, SliceGroup
from agent.ports import Driver
from agent.settings.sources import NodeFacts, Sources
from agent.settings.values import make_plan
from agent.state import Recovered
from tests.app.settings_room import SystemdSide, nothing_new, start_of
from tests.fakes.apiserver import EventSink
from tests.fakes.chance import Seeded
from tests.fakes.clock import LoopClock
from tests.fakes.disk import MemoryDisk
from tests.fakes.kubelet_side import FakeHookDirs, FakeSpecifications
from tests.fakes.offload import Inline
from tests.services.at_work import at_work

SETTINGS = """
health: {driverHang: 60}
paths: {state: /nowhere/state, run: /nowhere/run, kubeletSocket: %s/kubelet.sock}
"""
NO_BACK = types.SimpleNamespace(report=None)
BEFORE = State(boot_id="boot", machine_id="machine")


@dataclasses.dataclass
class FrontPlaces:
    """The state's disk, HAMi-core's directories, and the CDI specifications."""

    disk: MemoryDisk = dataclasses.field(default_factory=MemoryDisk)
    hooks: FakeHookDirs = dataclasses.field(default_factory=FakeHookDirs)
    cdi: FakeSpecifications = dataclasses.field(default_factory=FakeSpecifications)

    def lose(self, *files: str) -> None:
        """These files of HAMi-core vanish."""
        self.hooks.missing = files


def joined(
    driver: Driver,
    state: State = BEFORE,
    boot: str = "boot",
    settings: str = SETTINGS,
    places: FrontPlaces | None = None,
    plugins: str = "/nowhere",
) -> Front:
    """The front on that driver; `state` is what was on disk, `boot` the node's present one.

    `settings` is its own file; `plugins` is the kubelet's directory.
    """
    own = SourceFile("c.yaml", (settings % plugins).encode())
    plan = make_plan(Sources(own=own, host="node-1"))
    places = places or FrontPlaces()
    adapters = types.SimpleNamespace(
        driver=driver,
        clock=LoopClock(),
        disk=places.disk,
        random=Seeded(0),
        registrar=None,
        worker=Inline(),
        hooks=places.hooks,
        cdi=places.cdi,
        regions=Inline(),
    )
    found = StartFacts(boot, Recovered(state), start_of(plan), plan.settings(NodeFacts()))
    signals = HostSignals(asyncio.Event(), asyncio.Event(), SystemdSide())
    return Front(found, adapters, signals, nothing_new)  # type: ignore[arg-type]


def watched(front: Front) -> WebSubjects:
    """What readiness shows of it, without answers and without an API server."""
    return WebSubjects(Heartbeat(), parts=AgentParts(front, NO_BACK))  # type: ignore[arg-type]


@dataclasses.dataclass
class FrontNode:
    """The front at work, and what people are told."""

    front: Front
    told: list[NodeEvent]

    @property
    def groups(self) -> dict[GpuUuid, SliceGroup]:
        """What the kubelet is told of each GPU."""
        return {group.uuid: group for group in self.front.facts.slices.value.groups}

    @property
    def served(self) -> list[GpuUuid]:
        """The GPUs whose slices the kubelet may give out."""
        return [uuid for uuid, group in self.groups.items() if group.healthy]

    @property
    def registered(self) -> dict[GpuUuid, tuple[int, bool]]:
        """What schedulers are told: each GPU with its index and its health."""
        report = report_of(self.front.facts.inventory.value, {}, ReportSettings())
        return {gpu.uuid: (gpu.index, gpu.healthy) for gpu in report.gpus} if report else {}

    @property
    def reasons(self) -> list[str]:
        """The reasons of all that people were told."""
        return [event.reason for event in self.told]

    def shared(self, uuid: GpuUuid) -> SharedGpu:
        """That GPU in the inventory."""
        found = self.front.facts.inventory.value.find(uuid)
        assert found
        return found


@contextlib.asynccontextmanager
async def running(front: Front) -> AsyncIterator[FrontNode]:
    """Everything of the front that follows the driver, at work."""
    sink = EventSink()

    async def discover() -> None:
        # Any driver takes longer for a scan than the node's checks take.
        await asyncio.sleep(0.001)
        await front.discovery.run()

    async with at_work(
        *(front.state.run, front.follow_held, front.withholder.run, front.keeper.run),
        *(discover, front.health.run, front.samples.run, front.gpu_events),
        *(front.left_out, partial(front.notices.post_all, sink.post_event)),
    ):
        await asyncio.sleep(0.1)
        yield FrontNode(front, sink.posted)
