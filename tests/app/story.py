"""A node whose agent, kubelet, scheduler and API server act out one told sequence.

The agent's services are joined as the composition root joins them; the kubelet, the API server and
the scheduler are models. After each story all troubles end, and nothing may be left over.
"""

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

from agent.allocate.match import UnlockedPods
from agent.cluster import BIND_PHASE, MUTEX_LOCK
from agent.ledger import Row
from agent.sandbox.apiserver_requests import merge_patch
from agent.sandbox.scheduler.verbs import encode_node_lock
from agent.sandbox.store import Json
from agent.wire.v1beta1 import ContainerAllocateResponse
from tests.builders import NODE
from tests.machine.playing import silence
from tests.machine.pods import NAMESPACE, Shape
from tests.machine.refusals import left_over
from tests.machine.sides import VirtualClock, virtual
from tests.machine.world import MachineWorld

STEP = 0.02
"""Seconds of virtual time between two looks."""

SETTLED = 310.0
"""Seconds after which nothing may be left: longer than any patience of the agent."""


class AllocationStory:
    """What a story is told with. Pods are named by their names, present ones before gone ones."""

    def __init__(self, world: MachineWorld) -> None:
        self.world = world

    def pod(self, name: str) -> Json:
        """The pod at the API server."""
        return self.world.store.get("pods", NAMESPACE, name)

    def uid(self, name: str) -> str:
        return str(self.pod(name)["metadata"]["uid"])

    def phase(self, name: str) -> str:
        return str(self.pod(name)["status"].get("phase", ""))

    def message(self, name: str) -> str:
        """Why the pod failed."""
        return str(self.pod(name)["status"].get("message", ""))

    def bind_phase(self, name: str) -> str:
        """What the agent has written about the pod's allocation."""
        notes: Mapping[str, str] = self.pod(name)["metadata"].get("annotations") or {}
        return notes.get(BIND_PHASE, "")

    def is_bound(self, name: str) -> bool:
        return bool(self.pod(name)["spec"].get("nodeName"))

    def is_running(self, name: str) -> bool:
        """Whether all its app containers run on the node."""
        node = self.world.kubelet.node.pods.get(self.uid(name))
        apps = {one.name for one in node.spec.containers if one.kind == "app"} if node else set()
        return node is not None and bool(apps) and apps <= node.running

    def envs(self, name: str, container: str = "c0") -> Mapping[str, str]:
        """The environment that the container was given."""
        raw = self.world.audit.answers[(self.uid(name), container)]
        return ContainerAllocateResponse.parse(raw).envs

    def asked(self, uid: str) -> int:
        """How often the kubelet asked for a container of that pod."""
        return sum(event.pod == uid for event in self.world.kubelet.history.of("allocating"))

    @property
    def results(self) -> Mapping[tuple[str, ...], int]:
        """What the present agent answered, by result and reason."""
        assert self.world.agent is not None
        return dict(self.world.agent.allocation.results.items())

    @property
    def rows(self) -> tuple[Row, ...]:
        """The ledger of the present agent."""
        assert self.world.agent is not None
        return self.world.agent.state.ledger.value.rows

    @property
    def lock(self) -> str:
        """The lock on the Node, or nothing."""
        return self.world.scheduler.lock()

    async def until(
        self, holds: Callable[[], object], within: float = 30.0, step: float = STEP
    ) -> None:
        """Wait until `holds()`; TimeoutError after `within` virtual seconds."""
        async with asyncio.timeout(within):
            while not holds():  # noqa: ASYNC110 -- any of the models may make it true
                await asyncio.sleep(step)

    async def bound(self, name: str, shape: Shape, within: float = 30.0) -> str:
        """The pod, created and bound; its UID. The scheduler tries until it can."""
        if self.world.create(name, shape) is None:
            raise AssertionError(f"pod {name} was not let in")
        return await self.placed(name, within)

    async def placed(self, name: str, within: float = 30.0) -> str:
        """The pod that is there already, bound; its UID."""
        async with asyncio.timeout(within):
            while not self.is_bound(name):
                self.world.schedule(self.uid(name))
                with contextlib.suppress(TimeoutError):
                    await self.until(lambda: self.is_bound(name), 0.2, step=0.0005)
        return self.uid(name)

    async def runs(self, name: str, shape: Shape | None = None) -> str:
        """The pod, created, placed and running; its UID."""
        uid = await self.bound(name, shape or Shape())
        await self.running(name)
        return uid

    async def running(self, *names: str, within: float = 60.0) -> None:
        """The pods run, and the API server says so."""
        await self.until(
            lambda: all(self.is_running(one) and self.phase(one) == "Running" for one in names),
            within,
        )

    async def failed(self, name: str, gate: str, within: float = 60.0) -> None:
        """The pod is rejected with that id in its status."""
        await self.until(lambda: self.phase(name) == "Failed", within)
        assert f"[{gate}]" in self.message(name), self.message(name)

    async def cut_off_when_answered(self, uid: str) -> None:
        """The API server is away from the agent from the moment in which the pod is answered."""
        await self.until(lambda: (uid, "c0") in self.world.audit.answers, step=0.0005)
        self.world.faults.change(is_down=True, list_fails=False)

    def take_lock(self, name: str) -> str:
        """The scheduler has just taken the lock for that pod, and has not bound it yet."""
        text = encode_node_lock(self.world.scheduler.clock.now(), NAMESPACE, name)
        changes = {"metadata": {"annotations": {MUTEX_LOCK: text}}}
        self.world.store.update("nodes", "", NODE, lambda held: merge_patch(held, changes))
        return text

    def no_breach(self) -> None:
        assert [] == self.world.audit.breaches, self.world.audit.breaches


@contextlib.asynccontextmanager
async def a_story(
    seed: int = 1, unlocked: UnlockedPods = UnlockedPods.SCHEDULED
) -> AsyncIterator[AllocationStory]:
    """A node that is up; at the end nothing was broken and nothing is left over."""
    world = MachineWorld(seed, VirtualClock(asyncio.get_running_loop()))
    world.host = dataclasses.replace(world.host, unlocked=unlocked)
    async with world.living():
        story = AllocationStory(world)
        yield story
        story.no_breach()
        await world.heal()
        await asyncio.sleep(SETTLED)
        story.no_breach()
        assert [] == list(left_over(world, world.refusals.right))


def told(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The test, on a loop of its own, where seconds cost nothing; without a word in the log."""

    @functools.wraps(test)
    def run(**given: Any) -> None:
        with silence():
            virtual(test)(**given)

    return run
