"""Standing tasks in tiers. The doors stop first, then what observes the host, then the state."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from agent.app.back import Back, PlainBack, Run
from agent.app.front import Front
from agent.app.policies import EXPECTED, POLICIES
from agent.errors import DirectoryLost
from agent.kit.cell import Cell, News
from agent.kit.tasks import Task, supervise
from agent.kit.timing import until_tick
from agent.kubelet.register import RegistrationState
from agent.ports import ServiceNotifier

OBSERVING = frozenset({"node", "announcer", "usage"})
"""Tasks of agent.app.back with `observe`: none acts on pods, locks, rows or directories."""

STATUS_PERIOD = 10.0
"""Seconds after which the status line is computed again without news."""

MEETING = 5.0
"""Seconds that READY waits for the kubelet. A silent kubelet or driver is no failed start."""


class AgentParts(msgspec.Struct, frozen=True):
    """The agent's services. `observe`: they neither register nor write."""

    front: Front
    back: Back | PlainBack
    observe: bool = False


class WritableDirectory(Protocol):
    """The kubelet's directory, in which this process could write."""

    @property
    def path(self) -> Path:
        """Its path."""
        ...

    def is_lost(self) -> bool:
        """True if it was created again and this process sees it read-only."""
        ...


class ProcessTasks(msgspec.Struct, frozen=True):
    """Standing tasks of the process itself.

    `mounts` ends the process when it fails: this process never sees the new mounts.
    """

    heartbeat: Run
    notify: Run
    web: Run
    web_socket: Run
    mounts: Task


def tiers(
    parts: AgentParts, extra: ProcessTasks, chance: random.Random
) -> Sequence[Sequence[Task]]:
    """All standing tasks, the outermost tier first."""
    front, knowing = parts.front, parts.front.knowing
    runs = dict(parts.back.runs)
    report = runs.pop("report", None)
    if parts.observe:
        runs = {name: run for name, run in runs.items() if name in OBSERVING}

    def task(name: str, run: Run) -> Task:
        async def keep() -> None:
            await supervise(name, run, POLICIES[name], chance, EXPECTED)

        return Task(name, keep)

    async def discover() -> None:
        """Wait for the Node's labels before the first scan: the first list may depend on them."""
        await front.settings.await_labels()
        await knowing.discovery.run()

    async def reported(report: Run) -> None:
        """Wait for the Node's labels before the first report: profiles may depend on them."""
        await front.settings.labelled.wait()
        await report()

    return (
        (task("heartbeat", extra.heartbeat), task("state", front.state.run)),
        (
            task("settings", front.settings.run),
            task("journal", front.journal.run),
            task("inventory", knowing.keeper.run),
            task("left_out", knowing.left_out.run),
            task("gpu_events", knowing.gpu_events.run),
            task("cordons", knowing.cordons.run),
            task("held", front.follow_held),
            *(() if parts.observe else (task("withholder", knowing.withholder.run),)),
            *(() if parts.observe else (task("clearing", knowing.clearing.run),)),
            *(() if parts.observe else (task("room", knowing.clearing.follow_room),)),
            task("listing", knowing.listing.run),
            task("discovery", discover),
            task("health", knowing.health.run),
            task("samples", knowing.samples.run),
            task("kubelet", knowing.kubelet.run),
            task("recent", knowing.recent.run),
            *(task(name, run) for name, run in runs.items()),
        ),
        (
            *(() if parts.observe else (Task("endpoint", front.endpoint.run), extra.mounts)),
            *((task("report", partial(reported, report)),) if report is not None else ()),
            task("notify", extra.notify),
            task("web", extra.web),
            task("web_socket", extra.web_socket),
        ),
    )


async def met(state: Cell[RegistrationState], within: float = MEETING) -> None:
    """Wait for the first result at the kubelet, `within` seconds at most.

    Then the kubelet registered or refused the plugin's socket, or there is no kubelet.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within):
            await state.until(lambda now: now != RegistrationState())


async def lost(state: Cell[RegistrationState], written: WritableDirectory) -> None:
    """Watch the kubelet's directory. Raises DirectoryLost: this process cannot write there."""
    while not written.is_lost():
        await News(state).wait(until_tick(STATUS_PERIOD))
    raise DirectoryLost(
        f"{written.path} was created again, and this process cannot write there: restart the agent"
    )


async def tell_systemd(notifier: ServiceNotifier, parts: AgentParts) -> None:
    """Send READY after the first result at the kubelet, then each new status line."""
    front = parts.front
    if not parts.observe:
        await met(front.registration.state)
    notifier.ready()
    text = ""
    while True:
        state, listed = front.registration.state.value, front.facts.slices.value
        slices = sum(len(group.ids) for group in listed.groups if group.healthy)
        now = f"{slices} slices on offer; {state.text}"
        if parts.observe:
            now = f"observing, nothing is registered; {slices} slices would be on offer"
        if now != text:
            text = now
            notifier.status(text)
        changed = News(front.registration.state, front.facts.slices)
        await changed.wait(until_tick(STATUS_PERIOD))


@contextlib.asynccontextmanager
async def alive(notifier: ServiceNotifier) -> AsyncIterator[None]:
    """Ping systemd's watchdog while the block runs, also while a standby waits."""
    if notifier.watchdog is None:
        yield
        return
    period = notifier.watchdog.total_seconds() / 3

    async def beat() -> None:
        while True:
            notifier.alive()
            await asyncio.sleep(until_tick(period))

    async with asyncio.TaskGroup() as group:
        beating = group.create_task(beat())
        yield
        beating.cancel()
