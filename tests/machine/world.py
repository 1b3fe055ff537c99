"""What can happen in one history, to a node and its cluster."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Coroutine, Iterator

from agent.cluster import ALLOCATED, REGISTER
from agent.model import Condition
from agent.ports import Clock
from agent.sandbox.apiserver_requests import merge_patch
from agent.sandbox.store import Json, StatusError
from tests.builders import NODE
from tests.machine.pods import NAMESPACE, Shape, a_pod_object
from tests.machine.refusals import Refusals
from tests.machine.site import SPLIT, MachineSite

__all__ = ["SPLIT", "MachineWorld"]


class MachineWorld(MachineSite):
    """A node. Methods are what may happen there; each returns at once."""

    def __init__(self, seed: int, clock: Clock) -> None:
        super().__init__(seed, clock)
        self.refusals = Refusals(self)

    @property
    def is_api_away(self) -> bool:
        """Whether nobody can reach the API server."""
        return self.faults.is_down and not self.faults.is_alone

    @contextlib.asynccontextmanager
    async def living(self) -> AsyncIterator[None]:
        """It is there, and HAMi's scheduler, which starts once the Node has the agent's report."""
        async with super().living():
            while REGISTER not in str(self.store.get("nodes", "", NODE)["metadata"]):
                await self.store.until_news(1.0)
            self.scheduler.restart()
            yield

    def activities(self) -> Iterator[Coroutine[object, object, None]]:
        yield from super().activities()
        yield self.scheduler.run()

    # What owners and tenants do

    def create(self, name: str, shape: Shape) -> str | None:
        """A pod for the scheduler; its UID, or None: it is denied or there is one already."""
        stamp = int(self.scheduler.clock.now().timestamp())
        pod = a_pod_object(name, shape, stamp)
        try:
            uid: str = self.store.create("pods", self.scheduler.admit(pod))["metadata"]["uid"]
        except StatusError:
            return None
        return uid

    def create_and_schedule(self, name: str, shape: Shape) -> None:
        """A pod that the scheduler takes up at once."""
        uid = self.create(name, shape)
        if uid is not None:
            self.schedule(uid)

    def create_anew(self, pod: Json, shape: Shape) -> None:
        """A pod is deleted by force, and its controller makes another one of its name."""
        self.delete(pod, 0)
        self.create_and_schedule(pod["metadata"]["name"], shape)

    def create_stray(self, name: str, shape: Shape, scheduler: str = "other") -> None:
        """A pod that names its node itself, so that no scheduler sees it."""
        stamp = int(self.scheduler.clock.now().timestamp())
        pod = a_pod_object(name, shape, stamp, nodeName=NODE, schedulerName=scheduler)
        with contextlib.suppress(StatusError):
            self.store.create("pods", pod)

    def create_static(self, name: str, shape: Shape) -> None:
        """A pod of a file on the node: the API server hears of it when it is admitted."""
        pod = a_pod_object(f"{name}-{NODE}", dataclasses.replace(shape, forged=None), 0)
        pod["metadata"]["uid"] = f"{self.chance.getrandbits(128):032x}"
        self.spawn(self.kubelet.admit(pod))

    def schedule(self, uid: str) -> None:
        """The scheduler takes the pod up."""
        self.spawn(self.scheduler.schedule(uid))

    def delete(self, pod: Json, grace: int) -> None:
        """Somebody deletes a pod; 0: by force."""
        metadata = pod["metadata"]
        with contextlib.suppress(StatusError):
            self.store.delete("pods", metadata["namespace"], metadata["name"], grace=grace)

    def lie(self, pod: Json, amounts: str = "1,0") -> None:
        """A tenant makes little or much of what a pod holds; the restarted scheduler believes."""
        uid, notes = pod["metadata"]["uid"], pod["metadata"].get("annotations") or {}
        groups = self.scheduler.placed.get(uid)
        if groups is None or ALLOCATED not in notes:
            return
        shares = ("".join(f"{s.uuid},NVIDIA,{amounts}:" for s in group) for group in groups)
        if self.edit(pod["metadata"]["name"], "".join(f"{group};" for group in shares)):
            self.scheduler.restart()
            self.refusals.lies += 1

    def edit(self, name: str, text: str) -> bool:
        """A tenant writes what a pod is given; False: there is no such pod any more."""
        changes = {"metadata": {"annotations": {ALLOCATED: text}}}
        try:
            self.store.update("pods", NAMESPACE, name, lambda held: merge_patch(held, changes))
        except StatusError:
            return False
        return True

    # What happens on the node

    def die_after_answer(self) -> None:
        """The kubelet dies when it gets the next answer, before it keeps it."""
        self._dies_after_answer = True

    async def restart_kubelet(self, *, lose: bool) -> None:
        """A new kubelet; `lose`: without the checkpoint of the last."""
        async with self._kubelet_turn:
            await self.kubelet.restart(lose_checkpoint=lose)

    async def restart_while_dying(
        self, place: int, before: int, after: list[float], *, lose: bool, silent: int
    ) -> None:
        """A new kubelet; so many containers end before its process begins, others so long after.

        `silent`: so many calls of PodResources fail from then on.
        """
        async with self._kubelet_turn:
            await self.kubelet.kill()
            await self.end_containers(place, before)
            if lose:
                self.kubelet._lose_checkpoint()
            self.host.trouble.silent += silent
            for number, seconds in enumerate(after):
                self.spawn(self._end_after(seconds, place + number))
            await self.kubelet.start()

    async def _end_after(self, seconds: float, place: int) -> None:
        await asyncio.sleep(seconds)
        await self.end_containers(place, 1)

    async def reboot(self, *, lose: bool) -> None:
        """Power loss: of agent, kubelet and containers; all start again."""
        self._away = 0.2
        self.kill_agent()
        self._boots += 1
        self.disk.crash()
        async with self._kubelet_turn:
            await self.kubelet.restart(lose_checkpoint=lose, reboot=True)

    def running(self) -> list[tuple[str, str]]:
        """The containers that run now."""
        return sorted(self.kubelet.node.running())

    async def end_containers(self, place: int, count: int) -> None:
        """So many containers end on their own, from that one on."""
        running = self.running()
        for uid, container in (
            (running[place % len(running) :] + running)[:count] if running else ()
        ):
            await self.kubelet.container_died(uid, container)

    def crowd(self, calls: int) -> None:
        """Others ask PodResources as fast as they can."""
        if self.kubelet.life is not None:
            self.kubelet.crowd(calls)
            self.refusals.crowded_at = asyncio.get_running_loop().time()

    def set_gpu(self, place: int, condition: Condition) -> None:
        """A GPU goes bad, is lost or comes back."""
        self.conditions[place] = condition
        self._show_gpus()

    def set_split(self, split: int) -> None:
        """The operator changes how many slices a GPU has."""
        self.split = split
        self._show_gpus()
