"""Joins the device plugin server, its registration, and the watch for another plugin."""

import asyncio
import random
from collections.abc import Callable

import msgspec

from agent.app.adapters import Adapters
from agent.app.late import LateAllocator
from agent.app.policies import EXPECTED, POLICIES
from agent.core.cluster.changes import NodeEvent
from agent.core.inventory.slices import SliceId, SliceList
from agent.core.ports import SocketWatch
from agent.core.reconcile.mismatch import check_start
from agent.core.state.ledger import Ledger
from agent.kit.cell import Cell
from agent.kit.tasks import supervise
from agent.plugin.registration import Registration
from agent.plugin.rival import Rival, Rivals
from agent.plugin.server import PluginServer
from agent.settings.sections import Settings


class Endpoint(msgspec.Struct, frozen=True):
    """The device plugin server of our resource, with the list that it serves."""

    lists: Cell[SliceList]
    server: PluginServer
    registration: Registration
    rival: Rival
    rivals: Rivals
    chance: random.Random

    @property
    def sockets(self) -> tuple[str, ...]:
        """The names of the sockets to watch in the kubelet's directory."""
        return tuple(filter(None, (self.server.endpoint, *self.rival.names)))

    def heard(self, name: str) -> None:
        """Take note that a socket came or went. The empty name stands for all."""
        self.registration.heard(name)
        self.rivals.heard(name)

    async def run(self) -> None:
        """Serve and keep registered until cancelled."""

        async def register() -> None:
            """Wait for the first list: registering an empty one would remove every slice."""
            await self.lists.until(lambda listed: listed.generation > 0)
            await self.registration.run()

        runs = {"plugin": self.server.run, "registration": register, "rival": self.rivals.run}
        async with asyncio.TaskGroup() as group:
            for name, run in runs.items():
                group.create_task(supervise(name, run, POLICIES[name], self.chance, EXPECTED))


class EndpointFacts(msgspec.Struct, frozen=True):
    """What the endpoint follows: our resource's name, its list, and the ledger for the fence.

    `directory`: the kubelet's. `say`: posts an Event about the Node.
    """

    directory: SocketWatch
    resource: Cell[str]
    lists: Cell[SliceList]
    ledger: Cell[Ledger]
    say: Callable[[NodeEvent], None]


def join_endpoint(
    settings: Settings, adapters: Adapters, facts: EndpointFacts, allocator: LateAllocator
) -> Endpoint:
    """Build the endpoint. `allocator` answers the kubelet's calls."""

    def check(ids: tuple[SliceId, ...]) -> None:
        """Check that the container that holds these slices may start. Raises Refusal."""
        check_start(facts.ledger.value, ids)

    plugins, resource, chance = settings.paths.plugins, facts.resource, adapters.random
    fence = check if settings.fenced else None
    server = PluginServer(plugins, resource, facts.lists, allocator, chance, fence)
    registration = Registration(
        resource, server, facts.directory, adapters.registrar, server.traffic.streams, chance
    )
    rival = Rival(plugins, resource)
    rivals = Rivals(rival, registration, facts.say)
    return Endpoint(facts.lists, server, registration, rival, rivals, chance)
