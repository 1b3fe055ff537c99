"""One life of the agent: its real services, joined as the composition root joins them.

Each of its ports waits a moment and can be the place where the process is killed: from then on
nothing that is left of it reaches anybody.
"""

import asyncio
import dataclasses
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import NoReturn, TypeVar

from agent.core.edits import EditSettings
from agent.core.errors import AgentError, StateError
from agent.core.holdings import KubeletEpoch
from agent.core.inventory import Inventory
from agent.core.ledger import ContainerKey, Ledger
from agent.core.match_settings import MatchSettings
from agent.core.pods import NodeView, PodTable, PodUid
from agent.core.ports import Clock
from agent.core.report_settings import ReportSettings
from agent.core.slices import Served, SliceId, SliceList
from agent.host.podresources import PodResourcesWitness
from agent.kit.cell import Cell
from agent.plugin.handlers import container_response
from agent.plugin.status import grpc_error
from agent.sandbox.kubelet.podstatus import _identity
from agent.services.allocation.inquiry import Peers, Views
from agent.services.allocation.service import Allocation, AllocationSettings
from agent.services.allocation.storage import Storage
from agent.services.listing import Listing
from agent.services.node import Node
from agent.services.outbox import Outbox, OutboxViews
from agent.services.pods import Pods
from agent.services.reconcile.service import Reconcile, ReconcilePeers, ReconcileViews
from agent.services.report import ReportCells, Reporter, ReportState
from agent.services.settlement import Settlement
from agent.services.state import StateService, recover
from agent.wire.v1 import (
    GetPodResourcesRequest,
    GetPodResourcesResponse,
    ListPodResourcesRequest,
    ListPodResourcesResponse,
)
from agent.wire.v1beta1 import ContainerAllocateResponse
from tests.builders import NODE
from tests.fakes.disk import MemoryDisk
from tests.fakes.kubelet_side import FakeHookDirs
from tests.machine.api import AgentApi, Faults, Store
from tests.machine.kubelet import NOWHERE, RESOURCE, MemoryKubelet, MemoryLife

MACHINE = "machine"
_CALL = (0.0003, 0.001)
_WRITE = (0.0005, 0.003)
T = TypeVar("T")


@dataclasses.dataclass
class Trouble:
    """So many calls of PodResources fail; each write takes so many seconds longer."""

    silent: int = 0
    write: float = 0.0


@dataclasses.dataclass(frozen=True)
class Host:
    """What outlives the agent."""

    store: Store
    faults: Faults
    kubelet: MemoryKubelet
    disk: MemoryDisk
    hooks: FakeHookDirs
    inventory: Cell[Inventory]
    epoch: Cell[KubeletEpoch | None]
    clock: Clock
    chance: random.Random
    trouble: Trouble = dataclasses.field(default_factory=Trouble)


class Steps:
    """The awaits of one life. It is killed at the one that `kill_at` names."""

    def __init__(self, kill: Callable[[], None]) -> None:
        self.is_over = False
        self._kill = kill
        self._left: int | None = None

    def kill_at(self, steps: int | None) -> None:
        """Die at the await that many awaits from now; None: live on."""
        self._left = steps

    async def __call__(self) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                self._kill()
        if self.is_over:
            await asyncio.Event().wait()


class _LifeDisk:
    """The disk of one life: a dead one writes no more."""

    place = "/state"

    def __init__(self, host: Host, step: Steps) -> None:
        self._host = host
        self._step = step

    async def read(self, name: str) -> bytes | None:
        return await self._host.disk.read(name)

    async def replace(self, name: str, data: bytes, *, keep: str | None = None) -> None:
        if self._step.is_over:
            raise StateError("the process was killed")
        await self._step()
        await asyncio.sleep(self._host.chance.uniform(*_WRITE) + self._host.trouble.write)
        await self._host.disk.replace(name, data, keep=keep)
        await self._step()


class _LifeHooks(FakeHookDirs):
    """The host directories, as one life reaches them."""

    def __init__(self, host: Host, step: Steps) -> None:
        super().__init__()
        self._hooks = host.hooks
        self._step = step

    async def prepare(self, name: str, *, wipe: bool) -> None:
        await self._step()
        await self._hooks.prepare(name, wipe=wipe)

    async def remove(self, name: str) -> None:
        await self._step()
        await self._hooks.remove(name)


class _Books:
    """The kubelet's socket of PodResources, dialled by one life."""

    def __init__(self, host: Host, step: Steps) -> None:
        self._host = host
        self._step = step

    async def get(
        self,
        message: GetPodResourcesRequest,
        *,
        timeout: float,  # noqa: ASYNC109 -- the stub's
    ) -> GetPodResourcesResponse:
        return await (await self._life()).lister.get(message)

    async def list(self, *, timeout: float) -> ListPodResourcesResponse:  # noqa: ASYNC109 -- the stub's
        return await (await self._life()).lister.list(ListPodResourcesRequest())

    async def _life(self) -> MemoryLife:
        """The kubelet that answers this call."""
        await self._step()
        await asyncio.sleep(self._host.chance.uniform(*_CALL))
        life, trouble = self._host.kubelet.life, self._host.trouble
        if life is None:
            raise ConnectionRefusedError("nobody listens")
        if trouble.silent:
            trouble.silent -= 1
            raise ConnectionResetError("the connection is lost")
        return life


class _LifeWitness(PodResourcesWitness):
    """The real client, over a call instead of a socket."""

    def __init__(self, books: _Books) -> None:
        self._socket = NOWHERE
        self._deadline = 1.0
        self._stub = books  # type: ignore[assignment]  # the two calls that it makes


class _Records:
    """The kubelet's checkpoint file."""

    def __init__(self, host: Host, step: Steps) -> None:
        self._host = host
        self._step = step

    async def read(self, resource: str) -> frozenset[ContainerKey] | None:
        await self._step()
        found = self._host.kubelet.drive.checkpoint
        if found is None:
            return None
        return frozenset(
            ContainerKey(PodUid(entry.pod_uid), entry.container)
            for entry in found.entries
            if entry.resource == resource
        )


class _Runtime:
    """The containers that have a live cgroup."""

    def __init__(self, host: Host, step: Steps) -> None:
        self._host = host
        self._step = step

    async def running(self, ids: frozenset[str]) -> frozenset[str]:
        await self._step()
        return ids & {
            str(_identity(pod, pod.spec.container(name))["containerID"]).partition("://")[2]
            for pod in self._host.kubelet.node.pods.values()
            for name in pod.running
        }


class AgentLife:
    """The agent from its start to its end. As a Plugin it takes the kubelet's calls."""

    def __init__(self, host: Host, state: StateService, step: Steps) -> None:
        self.step = step
        self.state = state
        self.pods: Cell[PodTable] = Cell(PodTable())
        self.node: Cell[NodeView | None] = Cell(None)
        self.slices: Cell[SliceList] = Cell(SliceList())
        self.is_dead = False
        self._host = host
        self._group = asyncio.TaskGroup()
        self._served = Cell(Served(RESOURCE))
        api = AgentApi(host.store, host.faults, host.chance, step)
        self.api = api
        self._node = Node(api, self.node, host.chance)
        self._pods = Pods(api, self.pods, host.clock, host.chance, self._served)
        witness = _LifeWitness(_Books(host, step))
        records = _Records(host, step)
        hooks = _LifeHooks(host, step)
        self.allocation = Allocation(
            views=Views(self.pods, self.node, host.inventory, state.ledger),
            peers=Peers(
                witness=witness,
                records=records,
                containers=_Runtime(host, step),
                refresh=self._pods.refresh,
                epoch=lambda: host.epoch.value,
                clock=host.clock,
                look=self._node.look,
            ),
            storage=Storage(self.commit, hooks),
            settings=AllocationSettings(MatchSettings(NODE), Cell(EditSettings())),
            say=lambda _: None,
        )
        self._outbox = Outbox(
            views=OutboxViews(state.ledger, self.pods),
            api=(api, api),
            commit=state.commit,
            clock=host.clock,
            random=host.chance,
        )
        self._settlement = Settlement(
            pods=self.pods,
            node=self.node,
            ledger=state.ledger,
            commit=state.commit,
            clock=host.clock,
        )
        self._reconcile = Reconcile(
            views=ReconcileViews(self.pods, state.ledger, host.epoch, self._served),
            peers=ReconcilePeers(witness, records, hooks, host.clock, self.allocation.adopt),
            commit=state.commit,
        )
        self._listing = Listing(host.inventory, self._served, self.slices)
        settings, said = Cell(ReportSettings()), Cell(ReportState())
        cells = ReportCells(host.inventory, self.node, self._node.returns, settings, said)
        self._reporter = Reporter(
            api, cells, self._node.saw, lambda _: None, host.clock, host.chance
        )

    async def commit(self, change: Callable[[Ledger], Ledger]) -> None:
        """The ledger's commit, for answers."""
        await self.state.commit(change)

    def in_background(self, activity: Coroutine[object, object, None]) -> None:
        """Something that nobody waits for."""
        self._group.create_task(activity)

    async def run(self) -> None:
        """Live until cancelled."""
        async with self._group as group:
            for service in (
                self.state.run,
                self._follow_held,
                self._listing.run,
                self._pods.run,
                self._node.run,
                self._outbox.run,
                self._settlement.run,
                self._reconcile.run,
                self._reporter.run,
            ):
                group.create_task(service())

    async def allocate(self, ids: tuple[str, ...]) -> ContainerAllocateResponse:
        """Plugin's."""
        return container_response(
            await self._call(self.allocation.allocate(tuple(map(SliceId, ids))))
        )

    async def prefer(
        self, available: tuple[str, ...], must_include: tuple[str, ...], size: int
    ) -> tuple[str, ...]:
        """Plugin's."""
        offered, required = tuple(map(SliceId, available)), tuple(map(SliceId, must_include))
        return await self._call(self.allocation.prefer(offered, required, size))

    async def _follow_held(self) -> NoReturn:
        async for ledger in self.state.ledger.follow():
            self._served.set(Served(RESOURCE, ledger.held_by_name()))
        raise AssertionError("the ledger is never closed")

    async def _call(self, answer: Awaitable[T]) -> T:
        """One call of the kubelet, which dies with either of the two."""

        async def attempt() -> T | AgentError:
            try:
                return await answer
            except AgentError as error:
                return error

        if self.is_dead:
            raise ConnectionResetError("the plugin is gone")
        task = self._group.create_task(attempt())
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            task.cancel()
            raise
        if task.cancelled():
            raise ConnectionResetError("the plugin is gone")
        result = task.result()
        if isinstance(result, AgentError):
            raise grpc_error(result)
        return result


async def start_agent(host: Host, kill: Callable[[], None], boot: str) -> AgentLife:
    """A new process, with what the disk kept of the one before."""
    found = await recover(host.disk, boot_id=boot, machine_id=MACHINE, resource=RESOURCE)
    step = Steps(kill)
    state = StateService(disk=_LifeDisk(host, step), recovered=found.state, boot_id=boot)
    return AgentLife(host, state, step)
