"""What befalls kubelet, agent and containers amid allocations, acted out by the whole agent."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import pytest

from agent.cluster import PHASE_SUCCESS
from agent.errors import Refusal
from agent.kubelet.door import container_response, grpc_error
from agent.ledger import Holder, KubeletEpoch
from agent.model import SliceId
from agent.sandbox.kubelet.endpoint import HEALTHY, ListedDevice
from agent.sandbox.kubelet.pods import KubeletEvent, SeenKind
from agent.wire.v1beta1 import ContainerAllocateResponse
from tests.app.story import a_story, told
from tests.fakes.chance import Seeded
from tests.fakes.clock import LoopClock
from tests.fakes.kubelet_rig import a_container_object, a_pod_object
from tests.machine.kubelet import RESOURCE, MemoryKubelet, StoryLine
from tests.machine.pods import Box, Shape
from tests.machine.world import SPLIT
from tests.services.allocation.plain_node import PlainNode, a_node
from tests.unit.core.allocation.plain_scene import ids

BIG = Shape((Box(mib=12000),))
SMALL = Shape((Box(mib=4000),))
DAY = 86_400.0
"""Seconds."""


@told
async def test_a_container_restarts_after_a_lost_checkpoint_while_another_pod_holds_the_lock():
    async with a_story() as story:
        uid = await story.runs("old", SMALL)
        await story.until(lambda: not story.lock)
        await story.world.restart_kubelet(lose=True)
        await asyncio.sleep(2)
        story.world.create("next", SMALL)
        lock = story.take_lock("next")

        await story.world.kubelet.container_died(uid, "c0")
        await story.until(lambda: story.results.get(("replay", "")))
        await story.running("old")

        assert lock == story.lock
        await story.placed("next", within=400)
        await story.running("next")


@told
async def test_overlapping_calls_after_a_lost_checkpoint_never_kill_the_kubelet():
    async with a_story() as story:
        for name in ("a", "b", "c", "d", "e", "f"):
            await story.runs(name, Shape((Box(mib=1000, cores=0),)))
        await story.world.restart_kubelet(lose=True)
        await asyncio.sleep(2)
        lives = story.world.kubelet.lives

        for turn in range(3):
            await story.world.end_containers(turn, 6)
            shape = Shape((Box(mib=100, cores=0),), seconds=2)
            story.world.create_and_schedule(f"new-{turn}", shape)
            for _ in range(20):
                story.world.crowd(60)  # so that a call lasts longer
                await asyncio.sleep(0.1)
            await asyncio.sleep(20)

        assert story.overlaps > 0
        assert lives == story.world.kubelet.lives
        assert [] == list(story.world.kubelet.history.of("panicked"))


@pytest.mark.parametrize("count", [3, 16])
@told
async def test_a_reboot_with_a_lost_checkpoint_gives_all_pods_their_old_answers(count):
    """The kubelet asks for all of them at once, and bounds the questions that it answers."""
    async with a_story() as story:
        story.world.set_split(count)
        names = [f"p{number}" for number in range(count)]
        shape = Shape((Box(mib=300, cores=0),))
        uids = [await story.runs(name, shape) for name in names]
        before = [story.asked(uid) for uid in uids]

        await story.world.reboot(lose=True)
        assert {"Running"} == {story.phase(name) for name in names}
        await story.running(*names, within=120)

        assert [times + 1 for times in before] == [story.asked(uid) for uid in uids]
        assert {("replay", ""): count} == story.results


@told
async def test_a_pod_that_another_handler_rejects_after_our_answer_gives_its_share_back():
    async with a_story() as story:
        await story.runs("beside", BIG)
        story.world.create("misplaced", Shape((Box(mib=12000),), misplaced=True))
        uid = await story.placed("misplaced")
        await story.until(lambda: story.phase("misplaced") == "Failed")
        assert "NodeAffinity" in story.message("misplaced")
        assert (uid, "c0") in story.world.audit.answers

        await story.runs("next", BIG)

        await story.until(lambda: not story.lock)


@told
async def test_containers_restart_after_the_split_count_was_lowered_under_them():
    async with a_story() as story:
        names = ("a", "b", "c")
        for name in names:
            await story.runs(name, SMALL)
        story.world.set_split(1)
        await asyncio.sleep(1)

        await story.world.end_containers(0, 3)
        await story.running(*names)
        await story.world.restart_kubelet(lose=False)
        await story.world.end_containers(0, 3)
        await story.running(*names)
        await story.world.reboot(lose=True)
        await story.running(*names, within=120)


@pytest.mark.parametrize("steps", range(11))
@told
async def test_an_agent_killed_at_any_await_of_an_allocate_loses_no_answer_and_gives_none_twice(
    steps,
):
    async with a_story(seed=steps + 1) as story:
        await story.runs("before", SMALL)
        uid = await story.bound("train", SMALL)
        await story.until(lambda: story.asked(uid), step=0.0002)
        assert "train" not in {row.pod for row in story.rows}
        story.world.kill_agent_at(steps, 3.0)
        await story.until(lambda: story.phase("train") != "Pending", within=60)

        if story.phase("train") == "Failed":
            assert "code = Unavailable" in story.message("train")
        else:
            await story.running("train")
            await story.until(lambda: story.bind_phase("train") == PHASE_SUCCESS)
        await story.until(lambda: not story.lock)
        await story.world.kubelet.until_allocatable(RESOURCE, 2 * SPLIT)
        await story.runs("next", SMALL)
        assert story.is_running("before")


@told
async def test_an_agent_that_was_away_for_a_day_closes_what_ended_and_keeps_what_runs():
    async with a_story() as story:
        await story.runs("stays", SMALL)
        await story.runs("goes", SMALL)
        story.world.kill_agent_at(0, DAY)
        await story.until(lambda: story.world.agent is None, 120)  # at rest it takes few steps
        story.world.delete(story.pod("goes"), 1)
        await asyncio.sleep(DAY)

        await story.until(lambda: story.world.agent is not None)
        await story.world.kubelet.until_allocatable(RESOURCE, 2 * SPLIT)
        await story.runs("comes", SMALL)

        await story.until(lambda: ["stays", "comes"] == [row.pod for row in story.rows], 120)
        assert story.is_running("stays")


# Plain mode beside a kubelet that lost its records and whose pod workers ask all at once.
#
# The kubelet is the model, which panics as kubelet 1.36 does; the answers are the real service's.
# Where it begins with another container in the 3 ms in which an answer is on its way and is booked,
# nobody can help it: these seeds have no such moment.


PODS = [f"u{number}" for number in range(6)]
OFFERED = (*ids(*range(8)), *ids(*range(8), gpu=1))
T = TypeVar("T")


class PlainPlugin:
    """The service as the kubelet reaches it."""

    def __init__(self, node: PlainNode, chance: Seeded) -> None:
        self._node = node
        self._chance = chance

    async def allocate(self, ids: tuple[str, ...]) -> ContainerAllocateResponse:
        """Plugin's."""
        wanted = tuple(map(SliceId, ids))
        return container_response(await self._call(self._node.service.allocate(wanted)))

    async def prefer(
        self, available: tuple[str, ...], must_include: tuple[str, ...], size: int
    ) -> tuple[str, ...]:
        """Plugin's."""
        offered, required = tuple(map(SliceId, available)), tuple(map(SliceId, must_include))
        return await self._call(self._node.service.prefer(offered, required, size))

    async def _call(self, answer: Awaitable[T]) -> T:
        await asyncio.sleep(self._chance.uniform(0.0003, 0.001))
        try:
            return await answer
        except Refusal as refusal:
            raise grpc_error(refusal) from refusal


class OverlapScene:
    """A kubelet with pods that run, and plain mode beside it."""

    def __init__(self, node: PlainNode, seed: int) -> None:
        self.node = node
        self.chance = Seeded(seed)
        self.kubelet = MemoryKubelet(LoopClock(), self.chance)
        self.plugin = PlainPlugin(node, self.chance)
        self.kubelet.history.listen(self._hear)

    async def serve(self) -> None:
        """Register, and offer all slices."""
        books = self.kubelet._life.books
        books.connected(RESOURCE, StoryLine(self.plugin, lambda: lambda: None, lambda _: True))
        books.listed(RESOURCE, [ListedDevice(text, HEALTHY, None) for text in OFFERED])
        await self.kubelet.until_allocatable(RESOURCE, len(OFFERED))
        self.kubelet.tick()

    async def admit(self, uid: str, containers: int = 1) -> None:
        """A pod of that many containers, with a slice each."""
        boxes = [a_container_object(f"c{one}", resource=RESOURCE) for one in range(containers)]
        await self.kubelet.admit(a_pod_object(uid, containers=boxes))

    async def lose_checkpoint(self) -> None:
        """A new kubelet without records, after it has heard of all its pods."""
        before, pods = self.count("admitted"), self.kubelet.node.pods.values()
        present = sum(not pod.is_rejected for pod in pods)
        await self.kubelet.restart(lose_checkpoint=True)
        await self.serve()
        await self.until(lambda: self.count("admitted") == before + present)
        await asyncio.sleep(2)

    async def kill_containers(self) -> None:
        """All containers end at once."""
        for uid, container in sorted(self.kubelet.node.running()):
            await self.kubelet.container_died(uid, container)

    async def until_all_run(self) -> None:
        """All containers of pods that are not rejected."""
        pods = self.kubelet.node.pods.values()
        await self.until(
            lambda: all(
                pod.is_rejected or {one.name for one in pod.spec.containers} == pod.running
                for pod in pods
            )
        )

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(300):
            await self.kubelet.history.until(holds)

    def count(self, kind: SeenKind) -> int:
        return len(list(self.kubelet.history.of(kind)))

    def _hear(self, event: KubeletEvent) -> None:
        if event.kind == "started":
            self.node.lose_checkpoint(KubeletEpoch(self.kubelet.lives, self.kubelet.lives))
            self.node.holds.ids = []
        elif event.kind == "allocated":
            held = tuple(map(SliceId, event.ids))
            self.node.book(Holder("default", f"{event.pod}-{event.container}", "main"), held)


@contextlib.asynccontextmanager
async def a_scene(seed: int = 2, containers: int = 1) -> AsyncIterator[OverlapScene]:
    async with a_node() as node:
        scene = OverlapScene(node, seed)
        slow(node, scene.chance)
        await scene.kubelet.start()
        try:
            await scene.serve()
            for uid in PODS[: 6 // containers]:
                await scene.admit(uid, containers)
            await scene.until_all_run()
            yield scene
        finally:
            await scene.kubelet.stop()


def slow(node: PlainNode, chance: Seeded) -> None:
    """A directory takes up to 200 ms to make, so that calls overlap."""
    prepare = node.hooks.prepare

    async def prepared(name: str, *, wipe: bool) -> None:
        await asyncio.sleep(chance.uniform(0, 0.2))
        await prepare(name, wipe=wipe)

    node.hooks.prepare = prepared  # type: ignore[method-assign]  # for the time of this node


@pytest.mark.parametrize("containers", [1, 2])
@told
async def test_overlapping_calls_of_plain_mode_after_a_lost_checkpoint_kill_no_kubelet(containers):
    async with a_scene(containers=containers) as scene:
        for turn in range(3):
            await scene.lose_checkpoint()
            await scene.kill_containers()
            await asyncio.sleep(0.3)
            await scene.admit(f"new-{turn}")
            await scene.until_all_run()

        assert scene.node.results["refused", "overlap"] > 0
        assert 0 == scene.count("panicked")
