"""An agent that gets little CPU, or whose watches are late, refuses no good pod for it."""

import asyncio
import contextlib

import pytest

from agent.kit import timing
from agent.sandbox.patching import merge_patch
from tests.app.story import a_story, told
from tests.machine.api import SlowGate
from tests.machine.kubelet import RESOURCE
from tests.machine.pods import NAMESPACE, Box, Shape
from tests.machine.virtual import stall, starved

WINDOW = 61.0
"""Seconds after which lag extends deadlines again as before."""

AWAITS = 9
"""More than an Allocate has."""

SMALL = Shape((Box(mib=1000, cores=0),))


class PodsInTurn:
    """Pods of a story, one after the other."""

    def __init__(self, story):
        self.story = story
        self.held = []
        self._number = 0
        self._asked = lambda: None
        story.world.kubelet.history.listen(self._hear)

    def _hear(self, event):
        loop = asyncio.get_running_loop()
        if event.kind == "allocating":
            self._asked()
            self._began = loop.time()
        elif event.kind in ("allocated", "allocate_refused"):
            self.held.append(loop.time() - self._began)

    async def run(self, asked=lambda: None, within=60.0, *, generated=False):
        """A pod that must run; `asked` is called when the kubelet asks for it.

        `generated`: its controller generated its name, so that no other pod can have it.
        """
        name, self._asked = f"p{self._number}", asked
        self._number += 1
        assert self.story.world.create(name, SMALL)
        if generated:
            own = {"metadata": {"generateName": "p"}}
            self.story.world.store.update(
                "pods", NAMESPACE, name, lambda held: merge_patch(held, own)
            )
        await self.story.placed(name)
        await self.story.until(
            lambda: self.story.is_running(name) or self.story.phase(name) == "Failed", within
        )
        assert self.story.is_running(name), self.story.message(name)
        self.story.world.delete(self.story.pod(name), 0)

    async def refused(self, within=60.0):
        """A pod that must not run; what its owner reads."""
        name, self._asked = f"p{self._number}", lambda: None
        self._number += 1
        await self.story.bound(name, SMALL)
        await self.story.until(lambda: self.story.phase(name) == "Failed", within)
        return self.story.message(name)


async def start_anew(story, ready=lambda: None):
    """The agent is killed and starts; return when it has registered."""
    story.world._away = 0.01
    story.world.kill_agent()
    await story.until(lambda: story.world.kubelet.allocatable(RESOURCE) == 0)
    ready()
    await story.world.kubelet.until_allocatable(RESOURCE, 8)


async def stalled(seconds, awaits=AWAITS):
    """The loop gets no processor for so long, at each await of an Allocate in turn."""
    async with a_story() as story:
        pods, step = PodsInTurn(story), story.world.agent.step
        for number in range(awaits):
            await pods.run(lambda at=number: step.stall_at(at, seconds))
            await asyncio.sleep(WINDOW)


@pytest.mark.parametrize("seconds", [0.1, 0.6, 1.0, 2.5, 5.0])
@told
async def test_a_stall_at_any_await_of_an_allocate_costs_no_pod(seconds):
    await stalled(seconds)


def test_a_planted_bug_that_takes_a_stall_for_silence_is_found(monkeypatch):
    monkeypatch.setattr(timing, "MOST", 0.0)
    with pytest.raises(ExceptionGroup, match="unhandled"):
        told(stalled)(seconds=5.0)


@pytest.mark.parametrize("seconds", [0.1, 0.4])
@told
async def test_stalls_at_all_awaits_of_an_allocate_cost_no_pod(seconds):
    async with a_story() as story:
        pods, step = PodsInTurn(story), story.world.agent.step

        def stall():
            for at in range(AWAITS):
                step.stall_at(at, seconds)

        for _ in range(3):
            await pods.run(stall)


@pytest.mark.parametrize("share", [0.5, 0.2, 0.1, 0.05])
@told
async def test_a_quota_costs_no_pod_not_even_after_a_minute_of_it(share):
    async with a_story() as story, starved(share):
        pods = PodsInTurn(story)
        for _ in range(20):
            await pods.run()


@pytest.mark.parametrize("late", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("share", [1.0, 0.1])
@told
async def test_watches_that_are_late_cost_no_pod(late, share):
    async with a_story() as story, contextlib.AsyncExitStack() as stack:
        faults, pods = story.world.faults, PodsInTurn(story)
        faults.pods, faults.node = (SlowGate(story.world.store, late) for _ in range(2))
        for _ in range(2):
            await start_anew(story)
            if share < 1:
                await stack.enter_async_context(starved(share))
            for _ in range(5):
                await pods.run()
        if share == 1:
            assert max(pods.held) < 1.0


@pytest.mark.parametrize("late", [0.3, 0.6, 1.9])
@told
async def test_where_answers_are_as_late_as_the_watches_a_watch_that_comes_in_time_is_enough(late):
    async with a_story() as story:
        faults, pods = story.world.faults, PodsInTurn(story)
        faults.pods, faults.node = (SlowGate(story.world.store, late) for _ in range(2))
        await start_anew(story)
        faults.trip = 2 * late
        await asyncio.sleep(20)
        for _ in range(3):
            await pods.run(generated=True)
            await asyncio.sleep(10)


@pytest.mark.parametrize(("trip", "lag"), [(0.0, 0.0), (0.5, 0.0), (0.5, 4.0), (0.0, 9.0)])
@told
async def test_a_call_at_the_moment_of_register_waits_for_the_first_list(trip, lag):
    async with a_story() as story:
        pods = PodsInTurn(story)

        def slow():
            story.world.faults.trip = trip

        await start_anew(story, slow)
        await pods.run(lambda: stall(lag))


@told
async def test_an_api_server_that_says_nothing_after_a_start_is_named_after_a_moment():
    async with a_story() as story:
        pods = PodsInTurn(story)
        await start_anew(story, lambda: setattr(story.world.faults, "trip", 60.0))
        message = await pods.refused()

        assert "[HA-2010]" in message
        assert 0.6 == pytest.approx(pods.held[-1], abs=0.05)


@told
async def test_where_the_processor_is_missing_nobody_else_is_blamed():
    async with a_story() as story:
        pods = PodsInTurn(story)
        await start_anew(story, lambda: setattr(story.world.faults, "trip", 60.0))
        story.world.host.trouble.starved = True
        async with starved(0.02):
            message = await pods.refused()

        assert "[HA-5006]" in message
        assert "too little CPU" in message


@pytest.mark.parametrize("generated", [True, False], ids=["generated", "its own name"])
@pytest.mark.parametrize(("node", "pods"), [(0.2, 0.0), (0.7, 0.0), (0.7, 0.7), (1.6, 1.6)])
@pytest.mark.parametrize("trip", [0.17, 0.28, 0.45, 0.55])
@told
async def test_slow_answers_while_a_watch_is_late_cost_no_pod(trip, node, pods, generated):
    """However late the Node's watch shows the lock, the lock's owner has 2 s."""
    async with a_story() as story:
        turns, faults, store = PodsInTurn(story), story.world.faults, story.world.store
        await asyncio.sleep(5)
        faults.node, faults.pods = SlowGate(store, node), SlowGate(store, pods)
        await start_anew(story)
        await asyncio.sleep(10)
        faults.trip = trip
        await asyncio.sleep(10)
        for _ in range(3):
            await turns.run(generated=generated)
            await asyncio.sleep(8)


@pytest.mark.parametrize("generated", [True, False], ids=["generated", "its own name"])
@pytest.mark.parametrize("trip", [0.18, 0.35, 0.5])
@told
async def test_watches_that_break_while_answers_are_slow_cost_no_pod(trip, generated):
    async with a_story() as story:
        turns, world = PodsInTurn(story), story.world
        await asyncio.sleep(10)
        world.faults.trip = trip
        for _ in range(15):
            world.faults.change(is_down=True, list_fails=False, is_alone=True)
            await asyncio.sleep(0.05)
            world.faults.clear()
            await asyncio.sleep(world.chance.uniform(0, 2.5))
            await turns.run(generated=generated)
            await asyncio.sleep(40)


@pytest.mark.parametrize("has_lock", [False, True], ids=["no lock", "another's lock"])
@told
async def test_a_node_that_cannot_be_read_is_not_called_another_schedulers_doing(has_lock):
    async with a_story() as story:
        turns, faults = PodsInTurn(story), story.world.faults
        if has_lock:
            await story.bound("first", SMALL)
            await story.until(lambda: story.is_running("first"))
        faults.node.hold(0)

        def cut_off(event):
            if event.kind == "allocating":
                faults.change(is_down=True, list_fails=False, is_alone=True)

        story.world.kubelet.history.listen(cut_off)

        said = await turns.refused()

        assert "[HA-2010]" in said
        assert "could not ask the API server" in said
        faults.clear()
