"""What the agent does while nothing happens: how often it wakes, and that it writes nothing.

Doors and clients need sockets; tests/bench counts the wake-ups of a whole process.
"""

import asyncio
import collections
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.app.main import tell_systemd
from agent.cluster import CORDON, HANDSHAKE, REGISTER
from agent.ledger import Ledger
from agent.sandbox.apiserver_requests import merge_patch
from tests.app.front_node import BEFORE, FrontPlaces, joined, runs
from tests.app.settings_room import SystemdSide
from tests.app.story import a_story, told
from tests.builders import NODE, a_gpu, a_row, a_uuid
from tests.fakes.driver import ScriptedDriver
from tests.machine.world import MachineWorld
from tests.services.at_work import at_work

GPUS = 8
HOUR, LONG = 3600.0, 300.0
"""Seconds; after the second whatever was begun is over."""
START = 302.5
"""Seconds after which nothing of a start is under way any more."""
MINUTES = 10
END = START + MINUTES * 60
DOORS = {"plugin", "registration", "rival"}
CLIENTS = {"node", "pods", "report", "settlement", "announcer", "pod_announcer", "reconcile"}


Handed = set[tuple[str, float]]
"""A thread that gets work, and when: work of one moment is handed over together."""


def now() -> float:
    return round(asyncio.get_running_loop().time(), 2)


def count(handed: Handed, thread: str, owner: object, method: str) -> None:
    """Note each call of the method as work for that thread."""
    call = getattr(owner, method)

    async def counted(*args, **options):
        handed.add((thread, now()))
        return await call(*args, **options)

    setattr(owner, method, counted)


class Wakes:
    """The moments at which a timer of the loop fires."""

    def __init__(self, loop: asyncio.AbstractEventLoop, monkeypatch) -> None:
        self.moments: set[float] = set()
        self._call_at = loop.call_at
        monkeypatch.setattr(loop, "call_at", self.call_at)

    def call_at(self, when, callback, *args, context=None):
        return self._call_at(when, self._fire, callback, *args, context=context)

    def _fire(self, callback, *args) -> None:
        self.moments.add(now())
        callback(*args)


def a_minute(moments) -> dict[float, float]:
    """How many a minute, by the seconds after a multiple of five."""
    found = collections.Counter(round(moment % 5, 2) for moment in moments if START < moment < END)
    return {phase: count / MINUTES for phase, count in sorted(found.items())}


@contextlib.asynccontextmanager
async def an_agent(ledger: Ledger, handed: Handed, plugins: Path) -> AsyncIterator[None]:
    """All standing tasks without doors and clients."""
    places = FrontPlaces()
    driver = ScriptedDriver(a_gpu(index=number) for number in range(GPUS))
    for thread, owner, method in (
        ("gpus", driver, "_answer"),
        ("state", places.disk, "check"),
        ("disk", places.hooks, "facts"),
        ("clearing", places.hooks, "clear"),
        ("regions", places.regions, "call"),
    ):
        count(handed, thread, owner, method)
    state = msgspec.structs.replace(BEFORE, ledger=ledger)
    front = joined(driver, state, places=places, plugins=str(plugins))
    standing = [run for name, run in runs(front).items() if name not in DOORS | CLIENTS]
    async with at_work(*standing, lambda: tell_systemd(SystemdSide(), front)):
        yield


async def rest(
    ledger: Ledger, monkeypatch, plugins: Path
) -> tuple[dict[float, float], dict[str, float]]:
    """What wakes the loop in a minute, and how often each thread is woken in one."""
    handed: Handed = set()
    wakes = Wakes(asyncio.get_running_loop(), monkeypatch)
    async with an_agent(ledger, handed, plugins):
        await asyncio.sleep(END)
    threads = {thread for thread, at in handed if START < at < END}
    return a_minute(wakes.moments), {
        thread: sum(a_minute(at for of, at in handed if of == thread).values())
        for thread in sorted(threads)
    }


@pytest.mark.parametrize(("containers", "more"), [(0, {}), (10, {"regions": 12})])
async def test_at_rest_the_loop_wakes_at_shared_ticks_and_each_thread_once_a_round(
    monkeypatch, tmp_path, containers, more
):
    uids = [f"{number:08}-0000-4000-8000-000000000000" for number in range(containers)]
    rows = tuple(a_row(pod_uid=uid, pod=f"pod-{uid}") for uid in uids)
    loop, threads = await rest(Ledger(rows), monkeypatch, tmp_path)

    assert {0.0: 12, 0.1: 12, 0.2: 6, 0.3: 6} == loop
    assert {"clearing": 1, "disk": 6, "gpus": 12, "state": 6, **more} == threads


# An idle hour of the whole node, its kubelet and its agent: nothing is written to the API server.


async def nothing(_: MachineWorld) -> None:
    return


async def same_settings(world: MachineWorld) -> None:
    world.set_split(world.split)


async def an_outage_of_the_api_server(world: MachineWorld) -> None:
    world.faults.change(is_down=True, list_fails=False)
    await asyncio.sleep(LONG)
    world.faults.clear()


def write(world: MachineWorld, changes: Any) -> None:
    world.store.update("nodes", "", NODE, lambda held: merge_patch(held, changes))


async def what_others_write_on_the_node(world: MachineWorld) -> None:
    """A heartbeat, a label, a cordon, an annotation like ours, a scheduler's handshake."""
    notes = ({CORDON: a_uuid(0)}, {"hami.io/node-register-other": "x"})
    asked = ({HANDSHAKE: "Requesting_2026-08-21 06:20:50"}, {HANDSHAKE: None})
    for changes in (
        {"status": {"phase": "Running"}},
        {"metadata": {"labels": {"zone": "a"}}},
        *({"metadata": {"annotations": one}} for one in (*notes, *asked)),
    ):
        write(world, changes)
        await asyncio.sleep(60)


HAPPENINGS: dict[str, Callable[[MachineWorld], Awaitable[None]]] = {
    "nothing": nothing,
    "a new kubelet": lambda world: world.restart_kubelet(lose=False),
    "one without its records": lambda world: world.restart_kubelet(lose=True),
    "a kubelet that was away": lambda world: world.stop_kubelet(LONG),
    "the same settings": same_settings,
    "an outage": an_outage_of_the_api_server,
    "what others write": what_others_write_on_the_node,
}


@pytest.mark.parametrize("happening", HAPPENINGS.values(), ids=HAPPENINGS)
@told
async def test_nothing_that_leaves_the_node_as_it_is_makes_the_agent_write(happening):
    async with a_story() as story:
        await story.runs("p")
        await asyncio.sleep(LONG)
        before = story.world.agent.api.writes, register(story)

        await happening(story.world)
        await asyncio.sleep(HOUR)

        assert before == (story.world.agent.api.writes, register(story))


@told
async def test_nor_does_an_agent_write_that_was_killed_and_starts_again():
    async with a_story() as story:
        await story.runs("p")
        await asyncio.sleep(LONG)
        story.world.kill_agent()
        await asyncio.sleep(HOUR)

        assert 0 == story.world.agent.api.writes


def register(story) -> str:
    return story.world.store.get("nodes", "", NODE)["metadata"]["annotations"][REGISTER]
