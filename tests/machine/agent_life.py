"""One life of the agent: its real services, joined as the composition root joins them.

Each of its ports waits a moment and can be the place where the process is killed: from then on
nothing that is left of it reaches anybody.
"""

import asyncio
import gc
import random
import sys
import types
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import NoReturn, Protocol, TypeVar

from agent.allocate.match import MatchSettings
from agent.allocate.room import RequestRules
from agent.allocate.service import HamiAllocation
from agent.cluster import NodeView, PodTable
from agent.errors import AgentError
from agent.hami.annotations import ReportSettings
from agent.hookdirs import HostHookDirs
from agent.inventory import slice_list
from agent.kit.cell import Cell, News
from agent.kit.timing import IdleWaiter
from agent.kube.objects import NodeWatch, PodWatch
from agent.kubelet.door import container_response, grpc_error
from agent.ledger import EditSettings, KubeletEpoch, Ledger
from agent.model import Inventory, SliceId, SliceList
from agent.ports import Clock, Containers, NodeApi, PodApi, RecordsReader, Witness
from agent.reconcile import Reconcile
from agent.report import ReportCells, Reporter
from agent.settle import Settlement
from agent.state import StateService, recover
from agent.wire.v1beta1 import ContainerAllocateResponse
from tests.builders import NODE
from tests.machine.api import AgentApi
from tests.machine.kubelet import RESOURCE
from tests.machine.sides import (
    LifeDisk,
    LifeHooks,
    LifeWitness,
    MachineBooks,
    MachineHost,
    MachineRuntime,
    Steps,
)

MACHINE = "machine"
T = TypeVar("T")


class LifeApi(NodeApi, PodApi, Protocol):
    """Both ports of the API server in one."""


class AgentServices:
    """What answers the kubelet and what follows, joined as `agent/app/agent.py` joins it.

    `node` and `pods` are what the watches have shown, `streams` how many of its list streams the
    kubelet has open.
    """

    def __init__(
        self,
        state: StateService,
        api: LifeApi,
        kubelet: tuple[Witness, RecordsReader, Containers],
        hooks: HostHookDirs,
        *,
        inventory: Cell[Inventory],
        epoch: Cell[KubeletEpoch | None],
        match: MatchSettings,
        clock: Clock,
        chance: random.Random,
    ) -> None:
        self.state = state
        self.pods: Cell[PodTable] = Cell(PodTable())
        self.node: Cell[NodeView | None] = Cell(None)
        self.streams = Cell(0)
        self.watches = (
            NodeWatch(api, self.node, chance),
            PodWatch(api, self.pods, clock, chance, Cell(RESOURCE)),
        )
        node, pods = self.watches
        witness, records, containers = kubelet
        self.allocation = HamiAllocation(
            commit=self.commit,
            say=lambda _: None,
            pods=self.pods,
            node=self.node,
            inventory=inventory,
            ledger=state.ledger,
            match=Cell(match),
            edits=Cell(EditSettings()),
            witness=witness,
            records=records,
            containers=containers,
            hooks=hooks,
            refresh=pods.refresh,
            look_at_pod=pods.find_uid,
            look_at_node=node.refresh,
            epoch=lambda: epoch.value,
            streams=self.streams,
            clock=clock,
        )
        self.settlement = Settlement(
            pods=self.pods,
            lock=node.lock,
            ledger=state.ledger,
            node_api=api,
            pod_api=api,
            say=lambda _: None,
            clock=clock,
            chance=chance,
        )
        self.reconcile = Reconcile(
            pods=self.pods,
            ledger=state.ledger,
            epoch=epoch,
            taken=self.allocation.taken,
            calls=IdleWaiter(),
            witness=witness,
            records=records,
            hooks=hooks,
            clock=clock,
            resource=Cell(RESOURCE),
            adopt=self.allocation.adopt,
            commit=state.commit,
            say=lambda _: None,
        )

    @property
    def runs(self) -> tuple[Callable[[], Coroutine[object, object, None]], ...]:
        """Its standing activities."""
        watches = (watch.run for watch in self.watches)
        return self.state.run, *watches, self.settlement.run, self.reconcile.run

    async def commit(self, change: Callable[[Ledger], Ledger]) -> None:
        """The ledger's commit, for answers."""
        await self.state.commit(change)


class AgentLife(AgentServices):
    """The agent from its start to its end. As a Plugin it takes the kubelet's calls."""

    def __init__(self, host: MachineHost, state: StateService, step: Steps) -> None:
        self.step = step
        self.slices: Cell[SliceList] = Cell(SliceList())
        self.is_dead = False
        self._host = host
        self._group = asyncio.TaskGroup()
        self.api = AgentApi(host.store, host.faults, host.chance, step)
        node = MachineRuntime(host, step)
        super().__init__(
            state,
            self.api,
            (LifeWitness(MachineBooks(host, step)), node.read, node),
            LifeHooks(host, step),
            inventory=host.inventory,
            epoch=host.epoch,
            match=MatchSettings(
                NODE, unlocked_pods=host.unlocked, requests=RequestRules(known=True)
            ),
            clock=host.clock,
            chance=host.chance,
        )
        watch, _ = self.watches
        cells = ReportCells(host.inventory, self.node, watch.returns, Cell(ReportSettings()))
        self._reporter = Reporter(
            self.api, cells, watch.on_answer, lambda _: None, host.clock, host.chance
        )

    def in_background(self, activity: Coroutine[object, object, None]) -> None:
        """Something that nobody waits for."""
        self._group.create_task(activity)

    async def run(self) -> None:
        """Live until cancelled."""
        async with self._group as group:
            for service in (*self.runs, self._list, self.allocation.run, self._reporter.run):
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

    async def _list(self) -> NoReturn:
        """Keep the list for the kubelet, as the keeper of the inventory does."""
        news = News(self._host.inventory, self.state.ledger)
        while True:
            inventory, held = self._host.inventory.value, self.state.ledger.value.held_ids
            self.slices.set(slice_list(inventory, held, self.slices.value))
            await news.wait()

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


async def start_agent(host: MachineHost, kill: Callable[[], None], boot: str) -> AgentLife:
    """A new process, with what the disk kept of the one before."""
    found = await recover(host.disk, boot_id=boot, machine_id=MACHINE)
    step = Steps(kill)
    state = StateService(disk=LifeDisk(host, step), recovered=found.state, boot_id=boot)
    return AgentLife(host, state, step)


# What the agent of a history holds: the objects that can be reached from it, counted.

_ELSEWHERE = ("agent.sandbox.", "tests.")
_LOADED = (type, types.ModuleType, asyncio.AbstractEventLoop)


def live_objects(agent: object) -> Counter[str]:
    """Objects by type, without the models, the tests, the loop and what belongs to modules."""
    gc.collect()
    found: Counter[str] = Counter()
    left = [agent]
    seen = {id(agent), *(id(vars(module)) for module in list(sys.modules.values()))}
    while left:
        for one in _held_by(left.pop()):
            if id(one) not in seen:
                seen.add(id(one))
                left.append(one)
                found[type(one).__qualname__] += 1
    return found


def _held_by(one: object) -> Iterator[object]:
    for held in gc.get_referents(one):
        is_model = type(held).__module__.startswith(_ELSEWHERE)
        if not is_model and not isinstance(held, _LOADED):
            yield held
