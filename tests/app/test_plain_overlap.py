"""Plain mode beside a kubelet that lost its records and whose pod workers ask all at once.

The kubelet is the model, which panics as kubelet 1.36 does; the answers are the real service's.
Where it begins with another container in the 3 ms in which an answer is on its way and is booked,
nobody can help it: these seeds have no such moment.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import pytest

from agent.errors import Refusal
from agent.kubelet.door import container_response, grpc_error
from agent.ledger import Holder, KubeletEpoch
from agent.model import SliceId
from agent.sandbox.kubelet.devices import HEALTHY, ListedDevice
from agent.sandbox.kubelet.seen import KubeletEvent, SeenKind
from agent.wire.v1beta1 import ContainerAllocateResponse
from tests.app.story import told
from tests.fakes.chance import Seeded
from tests.fakes.clock import LoopClock
from tests.fakes.kubelet_rig import a_container_object, a_pod_object
from tests.machine.kubelet import RESOURCE, MemoryKubelet, StoryLine
from tests.services.allocation.plain_node import PlainNode, a_node
from tests.unit.core.allocation.plain_scene import ids

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
async def test_overlapping_calls_after_a_lost_checkpoint_never_kill_the_kubelet(containers):
    async with a_scene(containers=containers) as scene:
        for turn in range(3):
            await scene.lose_checkpoint()
            await scene.kill_containers()
            await asyncio.sleep(0.3)
            await scene.admit(f"new-{turn}")
            await scene.until_all_run()

        assert scene.node.results["refused", "overlap"] > 0
        assert 0 == scene.count("panicked")
