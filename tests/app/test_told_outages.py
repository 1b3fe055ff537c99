"""What is told of an API server that is away, and of a kubelet that comes anew."""

import asyncio
from functools import partial

import msgspec

from agent.app.web import WebDoors
from agent.cluster import PodTable
from agent.errors import ApiError
from agent.kit.cell import Cell
from agent.kube.objects import PodWatch
from agent.ledger import KubeletEpoch
from agent.state import NodeJournal
from tests.app.front_node import joined
from tests.builders import EPOCH, NOON, RESOURCE, a_pod
from tests.fakes.apiserver import FakeApi
from tests.fakes.chance import Seeded
from tests.fakes.clock import LoopClock, ManualClock
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
    journal, epoch = NodeJournal(clock), Cell[KubeletEpoch | None](EPOCH)
    pods = PodWatch(api, table, clock, Seeded(1), Cell(RESOURCE))
    began = clock.now()
    async with at_work(pods.run, partial(journal.follow, table, epoch)):
        await asyncio.sleep(120)
        lost = table.value
        api.is_back = True
        await asyncio.sleep(60)
        api.put_pod(a_pod())
        await asyncio.sleep(1)

    assert (True, began, REFUSED) == (lost.stale, lost.lost_at, lost.lost_reason)
    assert (False, None, "") == (table.value.stale, table.value.lost_at, table.value.lost_reason)
    back, gone = journal.changes
    assert ("ApiServerLost", True, f"cannot be followed: {REFUSED}") == (
        gone.reason,
        gone.warning,
        gone.text.partition("pods ")[2],
    )
    assert ("ApiServerBack", False) == (back.reason, back.warning)

    # What readiness, and so `status`, says of it.
    agent = joined(ScriptedDriver(()))
    agent.facts.pods.set(lost)
    checks = {one.name: one.text for one in WebDoors(agent.found.settings, agent=agent).checks()}
    assert f"down since {began:%Y-%m-%d %H:%M:%S} UTC: {REFUSED}; new pods may" in checks["api"]


async def test_another_kubelet_is_a_change_and_its_absence_is_none():
    journal, epoch = NodeJournal(ManualClock(NOON)), Cell[KubeletEpoch | None](None)
    async with at_work(partial(journal.follow, Cell(PodTable()), epoch)):
        for seen in (EPOCH, None, EPOCH, None, msgspec.structs.replace(EPOCH, inode=9)):
            epoch.set(seen)
            await asyncio.sleep(1)

    assert ["KubeletRestarted"] == [one.reason for one in journal.changes]
