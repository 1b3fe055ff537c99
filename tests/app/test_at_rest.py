"""What the agent does while nothing happens: how often it wakes, and that it writes nothing.

Doors and clients need sockets; tests/bench counts the wake-ups of a whole process.
"""

import asyncio
import collections
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from agent.app.main import tell_systemd
from agent.cluster import CORDON, HANDSHAKE, REGISTER
from agent.ledger import Ledger
from agent.sandbox.apiserver_requests import merge_patch
from tests.app.front_node import BEFORE, SystemdSide, joined, runs
from tests.app.story import a_story, told
from tests.builders import NODE, a_gpu, a_row, a_uuid
from tests.fakes.driver import ScriptedDriver
from tests.machine.world import MachineWorld
from tests.services.at_work import at_work

HOUR, LONG = 3600.0, 300.0
"""Seconds; after the second whatever was begun is over."""
MINUTES = 10
DOORS = {"plugin", "registration", "rival"}
CLIENTS = {"node", "pods", "report", "settlement", "announcer", "pod_announcer", "reconcile"}


@pytest.mark.parametrize("containers", [0, 10])
async def test_at_rest_the_loop_wakes_at_shared_ticks(monkeypatch, tmp_path, containers):
    """How often a minute, by the seconds after a multiple of five."""
    uids = [f"{number:08}-0000-4000-8000-000000000000" for number in range(containers)]
    rows = tuple(a_row(pod_uid=uid, pod=f"pod-{uid}") for uid in uids)
    loop = asyncio.get_running_loop()
    call_at, moments = loop.call_at, set()

    def noted(when, callback, *args, context=None):
        def fire(*given):
            moments.add(round(loop.time() - began, 2))
            callback(*given)

        return call_at(when, fire, *args, context=context)

    began = loop.time()
    monkeypatch.setattr(loop, "call_at", noted)
    state = msgspec.structs.replace(BEFORE, ledger=Ledger(rows))
    front = joined(ScriptedDriver(a_gpu(index=n) for n in range(8)), state, plugins=str(tmp_path))
    standing = [run for name, run in runs(front).items() if name not in DOORS | CLIENTS]
    async with at_work(*standing, lambda: tell_systemd(SystemdSide(), front)):
        await asyncio.sleep(LONG + 2.5 + MINUTES * 60)

    late = collections.Counter(round(at % 5, 2) for at in moments if at > LONG + 2.5)
    assert {0.0: 12, 0.1: 12, 0.2: 6, 0.3: 6} == {at: late[at] / MINUTES for at in late if at < 0.4}
    assert 1 >= sum(count for at, count in late.items() if at >= 0.4)


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
