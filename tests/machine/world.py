"""One node and its cluster in one history: what can happen there, and what must be at the end."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Coroutine

from agent.core.annotations import ALLOCATED
from agent.core.condition import Condition
from agent.core.holdings import KubeletEpoch
from agent.core.inventory import Inventory
from agent.core.pods import PodTable
from agent.core.ports import Clock
from agent.kit.cell import Cell
from agent.sandbox.api_errors import Json, StatusError
from agent.sandbox.kubelet.podloop import KubeletPodLoop
from agent.sandbox.kubelet.seen import Seen
from agent.sandbox.patching import merge_patch
from agent.wire.v1beta1 import ContainerAllocateResponse
from tests.builders import NODE, a_gpu, a_health, a_shared_gpu
from tests.fakes.chance import Seeded
from tests.fakes.disk import Faults as DiskFaults
from tests.fakes.disk import MemoryDisk, MemoryFiles
from tests.machine.agent_life import AgentLife, Host
from tests.machine.api import Faults, Store
from tests.machine.audit import Audit, AuditedHooks
from tests.machine.kubelet import RESOURCE, Line, MemoryKubelet, devices_of
from tests.machine.pods import GPU_MIB, NAMESPACE, Shape, a_pod_object
from tests.machine.scheduling import Scheduler

SPLIT = 4
REGISTERS_WITHIN = (0.02, 0.4)
"""Seconds from a kubelet's socket to the agent's registration."""


class World:
    """Everything that takes part. Methods are what may happen; each returns at once."""

    def __init__(
        self,
        seed: int,
        clock: Clock,
        life: Callable[..., Coroutine[object, object, AgentLife]],
    ) -> None:
        self.clock = clock
        self.chance = Seeded(seed)
        self.store = Store(self.clock, self.chance)
        self.faults = Faults(self.store)
        self.disk = MemoryDisk(self.chance)
        self.disk.files = MemoryFiles(self.chance, chunk=1 << 20)
        self.disk.faults = DiskFaults(self.disk.files)
        self.kubelet = MemoryKubelet(self.clock, self.chance)
        self.scheduler = Scheduler(self.store, self.clock, self.chance)
        self.audit = Audit(self.store, self.kubelet, self.scheduler, self.disk)
        self.audit.can_be_seen = self._can_be_seen
        self.audit.is_shown = self._is_shown
        self.audit.is_blind = self._is_blind
        hooks = AuditedHooks()
        hooks.audit = self.audit
        self.host = Host(
            self.store,
            self.faults,
            self.kubelet,
            self.disk,
            hooks,
            Cell(Inventory()),
            Cell[KubeletEpoch | None](None),
            self.clock,
            self.chance,
        )
        self.agent: AgentLife | None = None
        self.conditions = [Condition.OK, Condition.OK]
        self.split = SPLIT
        self._start_agent = life
        self._boots = 0
        self._away = 0.2
        self._is_over = False
        self._kubelet_turn = asyncio.Lock()
        self._agent_task: asyncio.Task[None] | None = None
        self._dies_after_answer = False
        self._group = asyncio.TaskGroup()
        self.kubelet.history.listen(self._hear)

    # Life and death

    async def run(self, ready: asyncio.Event) -> None:
        """Be, until cancelled."""
        try:
            async with self._group as group:
                loop = KubeletPodLoop(self.kubelet, self.store, NODE, eager=True)
                group.create_task(loop.run())
                self._show_gpus()
                await self.kubelet.start()
                await self.start_agent()
                await self.kubelet.until_allocatable(RESOURCE, 2 * SPLIT)
                ready.set()
                await asyncio.Event().wait()
        finally:
            self._is_over = True
            self.kill_agent()
            await self.kubelet.kill()

    def spawn(self, activity: Coroutine[object, object, object]) -> None:
        """Something that goes on while other things happen."""
        self._group.create_task(activity)

    async def start_agent(self) -> None:
        """The agent starts, unless it runs."""
        if self.agent is None:
            agent = self.agent = await self._start_agent(
                self.host, self.kill_agent, f"boot-{self._boots}"
            )
            agent.api.released = self.audit.released
            agent.api.annotated = self.audit.annotated
            self._agent_task = self._group.create_task(self._live(agent))
            self.spawn(self._register(agent, self.kubelet.life))

    def kill_agent(self) -> None:
        """SIGKILL."""
        agent, self.agent = self.agent, None
        if agent is not None and self._agent_task is not None:
            agent.is_dead = agent.step.is_over = True
            self._agent_task.cancel()
            life = self.kubelet.life
            if life is not None and RESOURCE in life.books.endpoints:
                life.books.disconnected(RESOURCE, "error reading from server: EOF")
            if not self._is_over:
                self.spawn(self._start_again())

    def kill_agent_at(self, steps: int, seconds: float) -> None:
        """SIGKILL, so many awaits from now; it starts again that much later."""
        if self.agent is not None:
            self.agent.step.kill_at(steps)
        self._away = seconds

    async def _start_again(self) -> None:
        await asyncio.sleep(self._away)
        await self.start_agent()

    async def _live(self, agent: AgentLife) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await agent.run()

    async def _register(self, agent: AgentLife, life: object) -> None:
        """What the registration does once it sees the kubelet's socket."""
        await asyncio.sleep(self.chance.uniform(*REGISTERS_WITHIN))
        serving = self.kubelet.life
        if serving is None or serving is not life or agent is not self.agent:
            return
        serving.books.connected(RESOURCE, Line(agent, self._answered))
        async for listed in agent.slices.follow():
            if agent is not self.agent or serving is not self.kubelet.life:
                return
            if listed.generation:
                serving.books.listed(RESOURCE, devices_of(listed))

    def _answered(self, response: ContainerAllocateResponse) -> bool:
        self.audit.answered(response)
        if self._dies_after_answer:
            self._dies_after_answer = False
            if self.kubelet.life is not None:
                self.kubelet.life.exit()
                return False
        return True

    def _is_shown(self, uid: str) -> bool:
        """Whether the agent knows the pod."""
        return self.agent is not None and uid in self.agent.pods.value.pods

    def _can_be_seen(self, uid: str) -> bool:
        """Whether the agent knows the pod, or could list it."""
        table = self.agent.pods.value if self.agent else PodTable()
        if uid in table.pods or uid in {stone.pod.uid for stone in table.tombstones}:
            return True
        return self.audit.pod(uid) is not None and not self._is_blind()

    def _is_blind(self) -> bool:
        """Whether the agent can list no pods."""
        return self.faults.is_down or self.faults.list_fails

    def _hear(self, event: Seen) -> None:
        if event.kind == "started":
            made = int(self.clock.now().timestamp() * 1e9)
            self.host.epoch.set(KubeletEpoch(self.kubelet.lives, made))
            if self.agent is not None:
                self.spawn(self._register(self.agent, self.kubelet._life))

    # What owners and tenants do

    def pods(self) -> list[Json]:
        """All pods of the API server that are no mirrors, oldest name first."""
        return self.store.select("pods")

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

    def create_stray(self, name: str, shape: Shape) -> None:
        """A pod that names its node itself, so that no scheduler sees it."""
        stamp = int(self.scheduler.clock.now().timestamp())
        pod = a_pod_object(name, shape, stamp, nodeName=NODE, schedulerName="other")
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

    def bind_again(self, uid: str) -> None:
        """The scheduler tries a bind that had succeeded once more."""
        self.spawn(self.scheduler.bind_again(uid))

    def stamp_again(self) -> None:
        """The lock's owner gets it anew."""
        self.spawn(self.scheduler.stamp_again())

    def delete(self, pod: Json, grace: int) -> None:
        """Somebody deletes a pod; 0: by force."""
        metadata = pod["metadata"]
        with contextlib.suppress(StatusError):
            self.store.delete("pods", metadata["namespace"], metadata["name"], grace=grace)

    def lie(self, pod: Json) -> None:
        """A tenant makes little of what a pod holds, and the scheduler, started again, believes."""
        uid, notes = pod["metadata"]["uid"], pod["metadata"].get("annotations") or {}
        groups = self.scheduler.placed.get(uid)
        if groups is None or ALLOCATED not in notes:
            return
        text = "".join("".join(f"{s.uuid},NVIDIA,1,0:" for s in group) + ";" for group in groups)
        changes = {"metadata": {"annotations": {ALLOCATED: text}}}
        name = pod["metadata"]["name"]
        self.store.update("pods", NAMESPACE, name, lambda held: merge_patch(held, changes))
        self.scheduler.restart()

    # What happens on the node

    def die_after_answer(self) -> None:
        """The kubelet dies when it gets the next answer, before it keeps it."""
        self._dies_after_answer = True

    async def restart_kubelet(self, *, lose: bool) -> None:
        """A new kubelet; `lose`: without the checkpoint of the last."""
        async with self._kubelet_turn:
            await self.kubelet.restart(lose_checkpoint=lose)

    async def stop_kubelet(self, seconds: float) -> None:
        """The kubelet is gone for a while."""
        async with self._kubelet_turn:
            await self.kubelet.kill()
        self.spawn(self._start_kubelet_after(seconds))

    async def _start_kubelet_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.start_kubelet()

    async def start_kubelet(self) -> None:
        """The kubelet is there again."""
        async with self._kubelet_turn:
            if self.kubelet._owner is None:
                await self.kubelet.start()

    async def reboot(self, *, lose: bool) -> None:
        """Power loss: of agent, kubelet and containers; all start again."""
        self._away = 0.2
        self.kill_agent()
        self._boots += 1
        self.disk.crash()
        async with self._kubelet_turn:
            await self.kubelet.reboot(lose_checkpoint=lose)

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
            self.kubelet.life.crowd(calls)

    def set_gpu(self, place: int, condition: Condition) -> None:
        """A GPU goes bad, is lost or comes back."""
        self.conditions[place] = condition
        self._show_gpus()

    def set_split(self, split: int) -> None:
        """The operator changes how many slices a GPU has."""
        self.split = split
        self._show_gpus()

    def _show_gpus(self) -> None:
        gpus = tuple(
            a_shared_gpu(
                gpu=a_gpu(index=place, memory_mib=GPU_MIB),
                health=a_health(condition=condition),
                split_count=self.split,
                present=condition is not Condition.LOST,
            )
            for place, condition in enumerate(self.conditions)
        )
        generation = self.host.inventory.value.generation + 1
        self.host.inventory.set(Inventory(generation, gpus))

    # The end

    async def heal(self) -> None:
        """Whatever was wrong is right again."""
        self._dies_after_answer = False
        self.faults.clear()
        vars(self.host.trouble).update(silent=0, write=0.0)
        self.conditions = [Condition.OK, Condition.OK]
        self.split = SPLIT
        self._show_gpus()
        await self.start_kubelet()
        await self.start_agent()
        if self.agent is not None:
            self.agent.step.kill_at(None)
