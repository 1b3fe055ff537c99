"""An idle hour of a whole node, its kubelet and its agent: nothing is written to the API server."""

import asyncio

import pytest

from agent.cluster import CORDON, HANDSHAKE, REGISTER
from agent.sandbox.apiserver_requests import merge_patch
from agent.sandbox.store import Json
from tests.builders import NODE, a_uuid
from tests.machine.one_node import Happening, play
from tests.machine.pods import Shape
from tests.machine.world import MachineWorld

HOUR = 3600.0
LONG = 300.0
"""Seconds in which whatever was begun is over."""


def play_with_a_pod(history: Happening) -> None:
    """The history of a node whose agent has reported, with one pod that runs."""

    async def whole(world: MachineWorld) -> None:
        world.create_and_schedule("p", Shape())
        await asyncio.sleep(LONG)
        assert 1 == len(world.running())
        await history(world)

    play(whole)


def writes(world: MachineWorld) -> int:
    assert world.agent is not None
    return world.agent.api.writes


def register(world: MachineWorld) -> str:
    notes: dict[str, str] = world.store.get("nodes", "", NODE)["metadata"]["annotations"]
    return notes[REGISTER]


async def nothing(_: MachineWorld) -> None:
    return


async def a_new_kubelet(world: MachineWorld) -> None:
    await world.restart_kubelet(lose=False)


async def a_kubelet_that_was_away(world: MachineWorld) -> None:
    await world.stop_kubelet(LONG)
    await asyncio.sleep(2 * LONG)


async def a_new_kubelet_without_its_records(world: MachineWorld) -> None:
    await world.restart_kubelet(lose=True)


async def an_outage_of_the_api_server(world: MachineWorld) -> None:
    world.faults.change(is_down=True, list_fails=False)
    await asyncio.sleep(LONG)
    world.faults.clear()


def write(world: MachineWorld, changes: Json) -> None:
    world.store.update("nodes", "", NODE, lambda held: merge_patch(held, changes))


async def what_others_write_on_the_node(world: MachineWorld) -> None:
    """A heartbeat, a label, a cordon, an annotation like ours, a scheduler's handshake."""
    for changes in (
        {"status": {"phase": "Running"}},
        {"metadata": {"labels": {"zone": "a"}}},
        {"metadata": {"annotations": {CORDON: a_uuid(0)}}},
        {"metadata": {"annotations": {"hami.io/node-register-other": "x"}}},
        {"metadata": {"annotations": {HANDSHAKE: "Requesting_2026-08-21 06:20:50"}}},
        {"metadata": {"annotations": {HANDSHAKE: None}}},
    ):
        write(world, changes)
        await asyncio.sleep(60)


async def settings_that_are_the_same(world: MachineWorld) -> None:
    world.set_split(world.split)


@pytest.mark.parametrize(
    "happening",
    [
        nothing,
        a_new_kubelet,
        a_kubelet_that_was_away,
        a_new_kubelet_without_its_records,
        an_outage_of_the_api_server,
        what_others_write_on_the_node,
        settings_that_are_the_same,
    ],
    ids=lambda one: one.__name__,
)
def test_it_writes_nothing(happening: Happening):
    async def history(world: MachineWorld) -> None:
        before, text = writes(world), register(world)

        await happening(world)
        await asyncio.sleep(HOUR)

        assert before == writes(world)
        assert text == register(world)

    play_with_a_pod(history)


def test_nor_does_an_agent_that_was_killed_and_starts_again():
    async def history(world: MachineWorld) -> None:
        world.kill_agent()
        await asyncio.sleep(HOUR)

        assert 0 == writes(world)

    play_with_a_pod(history)
