"""Standing tasks in tiers: the state outlives knowledge, knowledge outlives the doors."""

import asyncio
import dataclasses
import random
from collections.abc import Awaitable, Callable, Sequence

from agent.app.parts import Parts
from agent.app.policies import EXPECTED, POLICIES
from agent.core.ports import ServiceNotifier
from agent.kit.news import news
from agent.kit.supervisor import supervise
from agent.kit.tiers import Task

Run = Callable[[], Awaitable[None]]

STATUS_PERIOD = 10.0
"""Seconds between signs of life where systemd does not ask for them more often."""


@dataclasses.dataclass(frozen=True, slots=True)
class Extra:
    """Standing tasks of the process itself."""

    heartbeat: Run
    notify: Run
    reload: Run
    web: Run


def tiers(parts: Parts, extra: Extra, chance: random.Random) -> Sequence[Sequence[Task]]:
    """All standing tasks, the outermost tier first."""
    knowing, following = parts.knowing, parts.following

    def task(name: str, run: Run) -> Task:
        async def keep() -> None:
            await supervise(name, run, POLICIES[name], chance, EXPECTED)

        return Task(name, keep)

    async def register() -> None:
        """No registration before the first list: an empty one would take every slice away."""
        await parts.facts.slices.until(lambda listed: listed.generation > 0)
        await parts.registration.run()

    return (
        (task("heartbeat", extra.heartbeat), task("state", parts.state.run)),
        (
            task("inventory", knowing.keeper.run),
            task("held", parts.follow_held),
            task("listing", knowing.listing.run),
            task("discovery", knowing.discovery.run),
            task("health", knowing.health.run),
            task("node", knowing.node.run),
            task("pods", knowing.pods.run),
            task("kubelet", knowing.kubelet.run),
            task("recent", knowing.recent.run),
            task("reconcile", following.reconcile.run),
            task("settlement", following.settlement.run),
            task("outbox", following.outbox.run),
            task("announcer", following.announcer.run),
        ),
        (
            task("plugin", parts.server.run),
            task("registration", register),
            task("report", following.report.run),
            task("notify", extra.notify),
            task("reload", extra.reload),
            task("web", extra.web),
        ),
    )


async def tell_systemd(notifier: ServiceNotifier, parts: Parts) -> None:
    """READY once everything runs, then the state in one line, and signs of life."""
    notifier.ready()
    watchdog = notifier.watchdog
    period = watchdog.total_seconds() / 3 if watchdog else STATUS_PERIOD
    text = ""
    while True:
        state, listed = parts.registration.state.value, parts.facts.slices.value
        slices = sum(len(group.ids) for group in listed.groups if group.healthy)
        now = f"{slices} slices on offer; " + (state.text or "registered with the kubelet")
        if now != text:
            text = now
            notifier.status(text)
        notifier.alive()
        await news(parts.registration.state, parts.facts.slices, within=period)


async def reload_on(asked: asyncio.Event, reload: Callable[[], None]) -> None:
    """Read the settings again whenever `asked` is set."""
    while True:
        await asked.wait()
        asked.clear()
        reload()
