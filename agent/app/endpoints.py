"""One plugin server and one registration for each name of our resource that is served. Joined."""

import asyncio
import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import NoReturn

import structlog

from agent.app.adapters import Adapters
from agent.app.late import LateAllocator
from agent.app.policies import EXPECTED, POLICIES
from agent.core.cluster.changes import NodeEvent
from agent.core.inventory.slices import Served, SliceId, SliceList
from agent.core.ports import SocketWatch
from agent.core.reconcile.reconcile import check_start
from agent.core.state.ledger import Ledger
from agent.kit.cell import Cell
from agent.kit.supervisor import supervise
from agent.plugin.handlers import Fence
from agent.plugin.server import PluginServer, ServerTerms
from agent.plugin.sockets import Rival
from agent.plugin.traffic import Traffic
from agent.services.inventory.listing import Listing
from agent.services.registration.rival import Rivals
from agent.services.registration.service import Registration
from agent.settings.sections import Settings

log = structlog.get_logger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoint:
    """What serves one name, with the list under it."""

    lists: Cell[SliceList]
    server: PluginServer
    registration: Registration
    rival: Rival
    rivals: Rivals

    async def run(self, chance: random.Random) -> None:
        """Serve and keep registered until cancelled."""

        async def register() -> None:
            """No registration before the first list: an empty one would take every slice away."""
            await self.lists.until(lambda listed: listed.generation > 0)
            await self.registration.run()

        runs = {"plugin": self.server.run, "registration": register, "rival": self.rivals.run}
        async with asyncio.TaskGroup() as group:
            for name, run in runs.items():
                group.create_task(supervise(name, run, POLICIES[name], chance, EXPECTED))


@dataclasses.dataclass(frozen=True, slots=True)
class EndpointFacts:
    """What endpoints follow: the names, the lists by name, and the ledger for the fence.

    `directory` is the kubelet's. `say` posts an Event about the Node.
    """

    directory: SocketWatch
    served: Cell[Served]
    listing: Listing
    ledger: Cell[Ledger]
    say: Callable[[NodeEvent], None]


class Endpoints:
    """The endpoints of all names that are served. `traffic` counts the calls of all of them."""

    def __init__(
        self, settings: Settings, adapters: Adapters, facts: EndpointFacts, allocator: LateAllocator
    ) -> None:
        self._settings = settings
        self._adapters = adapters
        self._facts = facts
        self._allocator = allocator
        self._made: dict[str, Endpoint] = {}
        self.traffic = Traffic()
        self.registrations = self.present.registration.registrations

    @property
    def present(self) -> Endpoint:
        """The endpoint of the name that pods request now."""
        return self._of(self._facts.served.value.present)

    @property
    def former(self) -> tuple[Endpoint, ...]:
        """Those of former names by which slices are held yet."""
        return tuple(map(self._of, self._facts.served.value.names[1:]))

    @property
    def sockets(self) -> tuple[str, ...]:
        """The names in the kubelet's directory that are of interest to any of them."""
        names = ((one.server.endpoint, *one.rival.names) for one in self._made.values())
        return tuple(filter(None, itertools.chain.from_iterable(names)))

    def heard(self, name: str) -> None:
        """One of them came or went; under the empty name any may have."""
        for one in self._made.values():
            one.registration.heard(name)
            one.rivals.heard(name)

    async def run(self) -> NoReturn:
        """Serve every name as long as it is one; a new one before an old one goes."""
        async with asyncio.TaskGroup() as group:
            tasks: dict[str, asyncio.Task[None]] = {}
            async for served in self._facts.served.follow():
                for name in served.names:
                    if name not in tasks:
                        tasks[name] = group.create_task(self._of(name).run(self._adapters.random))
                for name in [name for name in tasks if name not in served.names]:
                    await _ended(tasks.pop(name))
                    self._made.pop(name, None)
                    self._facts.listing.forget(name)
                    log.info("resource.served_no_more", resource=name)
        raise AssertionError("the names are never closed")

    def _of(self, resource: str) -> Endpoint:
        if resource not in self._made:
            self._made[resource] = self._new(resource)
        return self._made[resource]

    def _new(self, resource: str) -> Endpoint:
        paths, chance = self._settings.paths, self._adapters.random
        lists = self._facts.listing.of(resource)
        server = PluginServer(
            paths.plugins,
            resource,
            lists,
            self._allocator.under(resource),
            chance,
            ServerTerms(self._fence(resource), self.traffic),
        )
        registration = Registration(
            resource,
            server,
            self._facts.directory,
            self._adapters.registrar,
            server.traffic.streams,
            chance,
        )
        if self._made:
            registration.registrations = self.registrations
        rival = Rival(paths.plugins, resource)
        rivals = Rivals(resource, rival, registration, self._facts.say)
        return Endpoint(lists, server, registration, rival, rivals)

    def _fence(self, resource: str) -> Fence | None:
        """Whether a container that holds slices by that name may start."""

        def check(ids: tuple[SliceId, ...]) -> None:
            check_start(self._facts.ledger.value.under(resource), ids)

        return check if self._settings.fenced else None


async def _ended(task: asyncio.Task[None]) -> None:
    """Cancel the task and see it out; what it failed of is its group's to tell."""
    task.cancel()
    await asyncio.wait((task,))
