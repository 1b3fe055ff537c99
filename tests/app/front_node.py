"""The agent, joined over ports in memory. What needs the API server does not run."""

import asyncio
import contextlib
import dataclasses
import types
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

from agent.allocate.match import UnlockedPods
from agent.app.agent import NodeAgent, StartFacts
from agent.app.web import WebDoors
from agent.cluster import NodeEvent
from agent.hami.annotations import ReportSettings, read_register, report_of
from agent.host.system import Systemd
from agent.kube.client import Connection
from agent.ledger import SourceFile, State
from agent.model import GpuUuid, SharedGpu, SliceGroup
from agent.ports import Driver
from agent.settings.reading import NodeValues, Sources, SourcesRead, make_plan
from agent.state import Recovered
from tests.fakes.apiserver import EventSink
from tests.fakes.chance import Seeded
from tests.fakes.disk import MemoryDisk
from tests.fakes.kubelet_side import FakeHookDirs, FakeSpecifications
from tests.fakes.offload import Inline
from tests.machine.sides import VirtualClock
from tests.services.allocating import Desk
from tests.services.at_work import at_work

PATHS = "paths: {state: /nowhere/state, run: /nowhere/run, kubeletSocket: %s/kubelet.sock}\n"
SETTINGS = f"health: {{driverHang: 60}}\n{PATHS}"
BEFORE = State(boot_id="boot", machine_id="machine")


class SystemdSide(Systemd):
    """What the service manager is told, by the first word of each message."""

    def __init__(self) -> None:
        super().__init__({})
        self.said: list[str] = []

    def tell(self, message: str) -> None:
        self.said.append(message.partition("=")[0].lower())


async def nothing_new(last: SourcesRead | None, good: Sources) -> SourcesRead:
    """A look at sources that are those in force."""
    return last or SourcesRead(good, make_plan(good))


def start_of(plan: NodeValues) -> SourcesRead:
    """A start with these settings."""
    return SourcesRead(plan.sources, plan)


@dataclasses.dataclass
class FrontPlaces:
    """The state's disk, HAMi-core's directories, and the CDI specifications."""

    disk: MemoryDisk = dataclasses.field(default_factory=MemoryDisk)
    hooks: FakeHookDirs = dataclasses.field(default_factory=FakeHookDirs)
    cdi: FakeSpecifications = dataclasses.field(default_factory=FakeSpecifications)
    regions: Inline = dataclasses.field(default_factory=Inline)

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
) -> NodeAgent:
    """The agent on that driver; `state` is what was on disk, `boot` the node's present one.

    `settings` is its own file; `plugins` is the kubelet's directory.
    """
    own = SourceFile("c.yaml", (settings % plugins).encode())
    plan = make_plan(Sources(own=own, host="node-1"))
    places = places or FrontPlaces()
    adapters = types.SimpleNamespace(
        driver=driver,
        clock=VirtualClock(asyncio.get_running_loop()),
        disk=places.disk,
        random=Seeded(0),
        registrar=None,
        worker=Inline(),
        hooks=places.hooks,
        cdi=places.cdi,
        regions=places.regions,
    )
    found = StartFacts(boot, Recovered(state), start_of(plan), plan.settings())
    return NodeAgent(
        found,
        adapters,  # type: ignore[arg-type]
        Connection(),
        SystemdSide(),
        asyncio.Event(),
        nothing_new,
    )


def watched(agent: NodeAgent) -> WebDoors:
    """What readiness shows of it, without an API server."""
    agent.report = None
    return WebDoors(agent.found.settings, agent=agent)


def runs(agent: NodeAgent) -> dict[str, Callable[[], Coroutine[object, object, None]]]:
    """Its standing tasks by name, none supervised."""
    return {one.name: one.run for one in (*agent.writers, *agent.services, *agent.doors)}


@dataclasses.dataclass
class FrontNode:
    """The agent at work, and what people are told."""

    front: NodeAgent
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
        gpus = read_register(report.register) if report else ()
        return {gpu.uuid: (gpu.index, gpu.healthy) for gpu in gpus}

    @property
    def reasons(self) -> list[str]:
        """The reasons of all that people were told."""
        return [event.reason for event in self.told]

    def desk(self) -> Desk:
        """What answers the kubelet, with its state, its directories and its GPUs."""
        adapters: Any = self.front.adapters
        return Desk(State(), adapters.disk, UnlockedPods.STRICT, self.front, adapters.hooks)

    def shared(self, uuid: GpuUuid) -> SharedGpu:
        """That GPU in the inventory."""
        found = self.front.facts.inventory.value.find(uuid)
        assert found
        return found


@contextlib.asynccontextmanager
async def running(front: NodeAgent) -> AsyncIterator[FrontNode]:
    """Everything that follows the driver, at work."""
    sink = EventSink()

    async def discover() -> None:
        # Any driver takes longer for a scan than the node's checks take.
        await asyncio.sleep(0.001)
        await front.discovery.run()

    standing = runs(front)
    names = ("state", "held", "withholder", "inventory", "health", "samples", "gpu_events")
    async with at_work(
        *(standing[name] for name in names),
        *(discover, standing["left_out"], partial(front.notices.post_all, sink.post_event)),
    ):
        await asyncio.sleep(0.1)
        yield FrontNode(front, sink.posted)
