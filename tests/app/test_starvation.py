"""An agent that gets little CPU, or whose watches are late, refuses no good pod for it."""

import asyncio
import contextlib

import pytest

from agent.sandbox.apiserver_requests import merge_patch
from tests.app.story import a_story, told
from tests.machine.api import ApiGate
from tests.machine.kubelet import RESOURCE
from tests.machine.pods import NAMESPACE, Box, Shape
from tests.machine.sides import stall, starved

WINDOW = 61.0
"""Seconds after which lag extends deadlines again as before."""

AWAITS = 9
"""More than an Allocate has."""

SMALL = Shape((Box(mib=1000, cores=0),))
GENERATED = pytest.mark.parametrize("generated", [True, False], ids=["generated", "its own name"])
"""Whether a controller generated the pod's name, so that no other pod can have it."""


class PodsInTurn:
    """Pods of a story, one after the other."""

    def __init__(self, story):
        self.story, self.world, self.faults = story, story.world, story.world.faults
        self.held = []
        self._number = 0
        self._asked = lambda: None
        self.world.kubelet.history.listen(self._hear)

    def _hear(self, event):
        loop = asyncio.get_running_loop()
        if event.kind == "allocating":
            self._asked()
            self._began = loop.time()
        elif event.kind in ("allocated", "allocate_refused"):
            self.held.append(loop.time() - self._began)

    def slow_watches(self, node, pods):
        """From now on frames of the watches come so many seconds late."""
        self.faults.node, self.faults.pods = (
            ApiGate(self.world.store, late) for late in (node, pods)
        )

    async def run(self, asked=lambda: None, within=60.0, *, generated=False):
        """A pod that must run; `asked` is called when the kubelet asks for it."""
        name, self._asked = f"p{self._number}", asked
        self._number += 1
        assert self.world.create(name, SMALL)
        if generated:
            own = {"metadata": {"generateName": "p"}}
            self.world.store.update("pods", NAMESPACE, name, lambda held: merge_patch(held, own))
        await self.story.placed(name)
        await self.story.until(
            lambda: self.story.is_running(name) or self.story.phase(name) == "Failed", within
        )
        assert self.story.is_running(name), self.story.message(name)
        self.world.delete(self.story.pod(name), 0)

    async def refused(self, within=60.0):
        """A pod that must not run; what its owner reads."""
        name, self._asked = f"p{self._number}", lambda: None
        self._number += 1
        await self.story.bound(name, SMALL)
        await self.story.until(lambda: self.story.phase(name) == "Failed", within)
        return self.story.message(name)

    async def start_anew(self, ready=lambda: None):
        """The agent is killed and starts; return when it has registered."""
        self.world._away = 0.01
        self.world.kill_agent()
        await self.story.until(lambda: self.world.kubelet.allocatable(RESOURCE) == 0)
        ready()
        await self.world.kubelet.until_allocatable(RESOURCE, 8)


@contextlib.asynccontextmanager
async def pods_in_turn():
    async with a_story() as story:
        yield PodsInTurn(story)


@pytest.mark.parametrize("seconds", [0.1, 0.6, 1.0, 2.5, 5.0])
@told
async def test_a_stall_at_any_await_of_an_allocate_costs_no_pod(seconds):
    """The loop gets no processor for so long, at each await of an Allocate in turn."""
    async with pods_in_turn() as pods:
        step = pods.world.agent.step
        for number in range(AWAITS):
            await pods.run(lambda at=number: step.stall_at(at, seconds))
            await asyncio.sleep(WINDOW)


SCENES = [
    # A quota, also after a minute of it; watches that are late, in an agent that starts anew.
    *((0.0, 0.0, 0.0, share, 20) for share in (0.5, 0.2, 0.1, 0.05)),
    *((late, late, 0.0, share, 10) for late in (0.6, 2.0) for share in (1.0, 0.1)),
    # However late the Node's watch shows the lock, the lock's owner has 2 s.
    *(
        (node, late, trip, 1.0, 3)
        for node, late in ((0.2, 0.0), (0.7, 0.0), (0.7, 0.7), (1.6, 1.6))
        for trip in (0.17, 0.28, 0.45, 0.55)
    ),
]
GENERATED_SCENES = [(late, late, 2 * late, 1.0, 3) for late in (0.3, 0.6, 1.9)]
"""Where answers are as late as the watches, a watch that comes in time is enough."""


@pytest.mark.parametrize(
    ("node", "late", "trip", "share", "count", "generated"),
    [(*scene, False) for scene in SCENES] + [(*one, True) for one in (*SCENES, *GENERATED_SCENES)],
)
@told
async def test_an_agent_that_gets_little_or_hears_late_refuses_no_pod(
    node, late, trip, share, count, generated
):
    async with pods_in_turn() as pods, contextlib.AsyncExitStack() as stack:
        pods.slow_watches(node, late)
        await pods.start_anew()
        if share < 1:
            await stack.enter_async_context(starved(share))
        await asyncio.sleep(10)
        pods.faults.trip = trip
        await asyncio.sleep(20)
        for _ in range(count):
            await pods.run(generated=generated)
            await asyncio.sleep(8 if trip else 0)
        assert share < 1 or trip or max(pods.held) < 1.0


@pytest.mark.parametrize(("trip", "lag"), [(0.0, 0.0), (0.5, 0.0), (0.5, 4.0), (0.0, 9.0)])
@told
async def test_a_call_at_the_moment_of_register_waits_for_the_first_list(trip, lag):
    async with pods_in_turn() as pods:
        await pods.start_anew(lambda: setattr(pods.faults, "trip", trip))
        await pods.run(lambda: stall(lag))


@pytest.mark.parametrize(
    ("share", "said"),
    [(1.0, ["[HA-2010]"]), (0.02, ["[HA-5006]", "too little CPU"])],
    ids=["a silent API server", "no processor"],
)
@told
async def test_who_keeps_an_answer_back_is_named_after_a_moment_and_nobody_else(share, said):
    async with pods_in_turn() as pods, contextlib.AsyncExitStack() as stack:
        await pods.start_anew(lambda: setattr(pods.faults, "trip", 60.0))
        if share < 1:
            pods.world.host.trouble.starved = True
            await stack.enter_async_context(starved(share))
        message = await pods.refused()

        assert all(text in message for text in said)
        assert share < 1 or 0.6 == pytest.approx(pods.held[-1], abs=0.05)


@GENERATED
@pytest.mark.parametrize("trip", [0.18, 0.35, 0.5])
@told
async def test_watches_that_break_while_answers_are_slow_cost_no_pod(trip, generated):
    async with pods_in_turn() as pods:
        await asyncio.sleep(10)
        pods.faults.trip = trip
        for _ in range(15):
            pods.faults.change(is_down=True, list_fails=False, is_alone=True)
            await asyncio.sleep(0.05)
            pods.faults.clear()
            await asyncio.sleep(pods.world.chance.uniform(0, 2.5))
            await pods.run(generated=generated)
            await asyncio.sleep(40)


@pytest.mark.parametrize("has_lock", [False, True], ids=["no lock", "another's lock"])
@told
async def test_a_node_that_cannot_be_read_is_not_called_another_schedulers_doing(has_lock):
    async with pods_in_turn() as pods:
        if has_lock:
            await pods.story.bound("first", SMALL)
            await pods.story.until(lambda: pods.story.is_running("first"))
        pods.faults.node.hold(0)

        def cut_off(event):
            if event.kind == "allocating":
                pods.faults.change(is_down=True, list_fails=False, is_alone=True)

        pods.world.kubelet.history.listen(cut_off)

        said = await pods.refused()

        assert "[HA-2010]" in said
        assert "could not ask the API server" in said
        pods.faults.clear()
