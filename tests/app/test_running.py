"""READY waits for the kubelet, not for ever."""

import asyncio
import contextlib

from agent.app.main import ANSWER_DEADLINE, ping_watchdog, tell_systemd
from agent.host.system import Systemd
from agent.kubelet.register import RegistrationState
from tests.app.front_node import joined
from tests.fakes.driver import ScriptedDriver


def elapsed(began: float) -> float:
    return asyncio.get_running_loop().time() - began


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
