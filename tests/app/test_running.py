"""What systemd and people are told: READY, signs of life, an API server that is away."""

import asyncio
import contextlib

from agent.app.main import ANSWER_DEADLINE, ping_watchdog, tell_systemd
from agent.app.web import WebDoors
from agent.cluster import PodTable
from agent.errors import ApiError
from agent.host.system import Systemd
from agent.kit.cell import Cell
from agent.kube.objects import PodWatch
from agent.kubelet.register import RegistrationState
from tests.app.front_node import joined
from tests.builders import RESOURCE, a_pod
from tests.fakes.apiserver import FakeApi
from tests.fakes.chance import Seeded
from tests.fakes.clock import LoopClock
from tests.fakes.driver import ScriptedDriver
from tests.services.at_work import at_work


class HeardSystemd(Systemd):
    """What systemd hears, and when; it wants a sign of life in 30 s."""

    def __init__(self, watchdog: float = 30.0) -> None:
        super().__init__({})
        self.watchdog = watchdog
        self.heard: list[tuple[float, str]] = []

    def tell(self, message: str) -> None:
        self.heard.append((asyncio.get_running_loop().time(), message))


async def test_the_watchdog_hears_every_10_s_and_without_one_the_pings_end():
    notifier = HeardSystemd()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(35):
            await ping_watchdog(notifier)
    await ping_watchdog(HeardSystemd(0))

    assert [(second, "WATCHDOG=1") for second in (0, 10, 20, 30)] == notifier.heard


async def test_ready_waits_for_the_first_word_about_the_kubelet_but_not_for_ever():
    for later, expected in ((1.0, 1.0), (60.0, ANSWER_DEADLINE)):
        front, notifier, loop = (
            joined(ScriptedDriver(())),
            HeardSystemd(),
            asyncio.get_running_loop(),
        )
        state, began = front.registration.state, loop.time()
        loop.call_later(later, state.set, RegistrationState(text="its socket is not there"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(61):
                await tell_systemd(notifier, front)

        told = [(round(at - began, 3), message) for at, message in notifier.heard]
        assert (expected, "READY=1") == told[0]
        assert "STATUS=its socket is not there" == told[-1][1]


# An API server that is away.

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
