"""One node and its cluster in one history: who is there, and how they come and go."""

import asyncio
import contextlib
import datetime as dt
from collections.abc import AsyncIterator, Coroutine, Iterator

from agent.kit.cell import Cell
from agent.ledger import KubeletEpoch
from agent.model import Condition, Inventory
from agent.ports import Clock
from agent.sandbox.kubelet.podloop import KubeletPodLoop
from agent.sandbox.kubelet.pods import KubeletEvent
from agent.sandbox.store import Json
from agent.wire.v1beta1 import ContainerAllocateResponse
from tests.builders import NODE, a_gpu, a_health, a_shared_gpu, a_uuid
from tests.fakes.chance import Seeded
from tests.fakes.disk import MemoryDisk
from tests.machine.agent_life import AgentLife, start_agent
from tests.machine.api import ApiFaults, ApiGate, Store
from tests.machine.audit import Audit, AuditedHooks
from tests.machine.kubelet import RESOURCE, TIMINGS, MemoryKubelet, StoryLine, devices_of
from tests.machine.pods import GPU_MIB, Scheduler
from tests.machine.sides import MachineHost

SPLIT = 4
REGISTERS_WITHIN = (0.02, 0.4)
"""Seconds from a kubelet's socket to the agent's registration."""
REGISTERS_LATE = (0.4, 3.0)
"""The same of an agent that got no CPU: the kubelet has admitted pods without asking."""


class MachineSite:
    """Everything that takes part, and how it lives.

    `gpus`: how many there are, of `split` slices each. `late_registrations`: the share of them.
    """

    gpus = 2
    split = SPLIT
    late_registrations = 0.0
    timings = TIMINGS

    def __init__(self, seed: int, clock: Clock) -> None:
        self.clock = clock
        self.chance = Seeded(seed)
        self.store = Store(self.clock, self.chance)
        self.faults = self.make_faults()
        self.disk = MemoryDisk(self.chance)
        self.kubelet = MemoryKubelet(self.clock, self.chance, self.timings)
        self.scheduler = self.make_scheduler()
        self.audit = self.make_audit()
        hooks = AuditedHooks()
        hooks.audit = self.audit
        self.host = self.make_host(hooks)
        self.agent: AgentLife | None = None
        self.conditions = [Condition.OK] * self.gpus
        self._boots = 0
        self._away = 0.2
        self._is_over = False
        self._kubelet_turn = asyncio.Lock()
        self._agent_task: asyncio.Task[None] | None = None
        self._dies_after_answer = False
        self.listed_late: dt.datetime | None = None
        """When the kubelet began to take the agent's lists, if it had admitted pods by then."""
        self._group = asyncio.TaskGroup()
        self.kubelet.history.listen(self._hear)

    # What it is made of

    def make_faults(self) -> ApiFaults:
        """The agent's way to the API server."""
        return ApiFaults(self.store, ApiGate(self.store), ApiGate(self.store))

    def make_scheduler(self) -> Scheduler:
        """Who places the pods."""
        return Scheduler(self.store, self.clock, self.chance)

    def make_audit(self) -> Audit:
        """Who holds what is said against the truth."""
        return Audit(self.store, self.kubelet, self.scheduler, self.disk)

    def make_host(self, hooks: AuditedHooks) -> MachineHost:
        """What of the agent outlives its process."""
        return MachineHost(
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

    def make_pod_loop(self) -> KubeletPodLoop:
        """How the kubelet hears of its pods."""
        return KubeletPodLoop(self.kubelet, self.store, NODE, eager=True)

    def activities(self) -> Iterator[Coroutine[object, object, None]]:
        """What goes on for as long as it is there."""
        yield self.make_pod_loop().run()

    # Life and death

    @contextlib.asynccontextmanager
    async def living(self) -> AsyncIterator[None]:
        """It is there, and its agent serves, for as long as the block runs."""
        ready = asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(self._run(ready))
        try:
            await ready.wait()
            yield
        finally:
            self.task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self.task

    async def _run(self, ready: asyncio.Event) -> None:
        try:
            async with self._group as group:
                try:
                    for activity in self.activities():
                        group.create_task(activity)
                    self._show_gpus()
                    await self.kubelet.start()
                    await self.start_agent()
                    await self.kubelet.until_allocatable(RESOURCE, self.gpus * self.split)
                    ready.set()
                    await asyncio.Event().wait()
                finally:  # before the others are cancelled, who would still call it
                    self._is_over = True
                    self.kill_agent()
        finally:
            await self.kubelet.kill()

    def spawn(self, activity: Coroutine[object, object, object]) -> None:
        """Something that goes on while other things happen."""
        self._group.create_task(activity)

    async def start_agent(self) -> None:
        """The agent starts, unless it runs."""
        if self.agent is None:
            agent = await start_agent(self.host, self.kill_agent, f"boot-{self._boots}")
            self.agent = agent
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
            if life is not None and RESOURCE in life.devices.endpoints:
                life.devices.disconnected(RESOURCE)
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
        is_late = self.late_registrations and self.chance.random() < self.late_registrations
        within = REGISTERS_LATE if is_late else REGISTERS_WITHIN
        await asyncio.sleep(self.chance.uniform(*within))
        serving = self.kubelet.life
        if serving is None or serving is not life or agent is not self.agent:
            return
        serving.devices.connected(StoryLine(agent, self.audit.begins, self._answered))
        agent.streams.set(1)
        now, epoch = self.clock.now(), self.host.epoch.value
        is_prompt = epoch is not None and (now - epoch.since).total_seconds() < REGISTERS_LATE[0]
        self.listed_late = None if is_prompt else now
        async for listed in agent.slices.follow():
            if agent is not self.agent or serving is not self.kubelet.life:
                return
            if listed.generation:
                serving.devices.listed(RESOURCE, devices_of(listed))

    def _answered(self, response: ContainerAllocateResponse) -> bool:
        self.audit.answered(response)
        if self._dies_after_answer:
            self._dies_after_answer = False
            self.spawn(self.stop_kubelet(TIMINGS.after_panic))
            return False
        return True

    def _hear(self, event: KubeletEvent) -> None:
        if event.kind == "started":
            made = int(self.clock.now().timestamp() * 1e9)
            self.host.epoch.set(KubeletEpoch(self.kubelet.lives, made))
            if self.agent is not None:
                self.agent.streams.set(0)
                self.spawn(self._register(self.agent, self.kubelet.life))

    def pods(self) -> list[Json]:
        """All pods of the API server that are no mirrors, oldest name first."""
        return self.store.select("pods")

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

    def gpu_uuids(self) -> tuple[str, ...]:
        """The GPUs of the node, in their order."""
        return tuple(str(a_uuid(place)) for place in range(self.gpus))

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
        vars(self.host.trouble).update(silent=0, write=0.0, starved=False)
        self.faults.trip = 0.0
        self.conditions = [Condition.OK] * self.gpus
        self.split = type(self).split
        self._show_gpus()
        await self.start_kubelet()
        await self.start_agent()
        if self.agent is not None:
            self.agent.step.kill_at(None)
