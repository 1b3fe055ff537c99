"""Joins what is known about the use of containers: samples, and the Event at a limit.

It loads with the back half, because a registration needs none of it.
"""

from collections.abc import Awaitable, Callable, Mapping

import msgspec

from agent.app.adapters import Adapters
from agent.app.front import Front
from agent.host.hook.processes import ContainerProcesses
from agent.host.hook.regions import HostRegions
from agent.services.usage.pressure import MemoryPressure
from agent.services.usage.service import ContainerUsage
from agent.settings.sections import Settings


class UsageServices(msgspec.Struct, frozen=True):
    """The services that read and write HAMi-core's regions."""

    containers: ContainerUsage
    pressure: MemoryPressure

    @property
    def runs(self) -> Mapping[str, Callable[[], Awaitable[None]]]:
        """Their standing activities by task name."""
        return {"usage": self.containers.run, "pressure": self.pressure.run}


def join_usage(settings: Settings, adapters: Adapters, front: Front) -> UsageServices:
    """Join them."""
    facts, state, paths = front.facts, front.state, settings.paths
    regions = HostRegions(paths.hook, adapters.regions, ContainerProcesses(paths.cgroup))
    containers = ContainerUsage(
        regions,
        state.ledger,
        facts.pods,
        facts.inventory,
        adapters.clock,
        switches=settings.feedback and not settings.observe,
        observes=settings.observe,
    )
    return UsageServices(
        containers=containers,
        pressure=MemoryPressure(
            containers.newest, state.ledger, facts.inventory, front.notices.say
        ),
    )
