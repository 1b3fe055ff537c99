"""What people are told of an API server that is away."""

import asyncio

from agent.app.web import WebDoors
from agent.cluster import PodTable
from agent.errors import ApiError
from agent.kit.cell import Cell
from agent.kube.objects import PodWatch
from tests.app.front_node import joined
from tests.builders import RESOURCE, a_pod
from tests.fakes.apiserver import FakeApi
from tests.fakes.chance import Seeded
from tests.fakes.clock import LoopClock
from tests.fakes.driver import ScriptedDriver
from tests.services.at_work import at_work

REFUSED = "watch pods: Connection refused"


class Away(FakeApi):
    """An API server that lists and then refuses to be followed, until it is back."""

    is_back = False

    async def watch_pods(self, resource_version):
        if not self.is_back:
            raise ApiError(REFUSED)
        async for change in super().watch_pods(resource_version):
            yield change


async def test_an_outage_is_told_with_its_cause_and_since_when_until_it_ends():
    api, table, clock = Away(), Cell(PodTable()), LoopClock()
    pods = PodWatch(api, table, clock, Seeded(1), Cell(RESOURCE))
    began = clock.now()
    async with at_work(pods.run):
        await asyncio.sleep(120)
        lost = table.value
        api.is_back = True
        await asyncio.sleep(60)
        api.put_pod(a_pod())
        await asyncio.sleep(1)

    assert (True, began, REFUSED) == (lost.stale, lost.lost_at, lost.lost_reason)
    assert (False, None, "") == (table.value.stale, table.value.lost_at, table.value.lost_reason)

    # What readiness, and so `status`, says of it.
    agent = joined(ScriptedDriver(()))
    agent.facts.pods.set(lost)
    checks = {one.name: one.text for one in WebDoors(agent.found.settings, agent=agent).checks()}
    assert f"down since {began:%Y-%m-%d %H:%M:%S} UTC: {REFUSED}; new pods may" in checks["api"]
