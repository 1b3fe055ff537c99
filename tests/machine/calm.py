"""A node and its cluster in which nothing fails."""

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Callable, Coroutine, Mapping
from typing import NoReturn

from agent.allocate.candidates import UnlockedPods
from agent.ports import Clock
from agent.sandbox.api_errors import Json, NotFoundError, StatusError
from agent.sandbox.kubelet.model import Timings
from agent.sandbox.kubelet.podloop import KubeletPodLoop
from agent.sandbox.scheduler.loop import SchedulerModel
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.verbs import HamiVerbs
from tests.builders import NODE
from tests.machine.agent_life import AgentLife
from tests.machine.api import ApiFaults, LateGate, Store
from tests.machine.audit import AuditedHooks, lock_of
from tests.machine.calm_audit import CalmAudit
from tests.machine.controllers import Controllers, is_leaving, is_over
from tests.machine.kubelet import RESOURCE
from tests.machine.pods import NAMESPACE, Shape, a_pod_object
from tests.machine.scheduling import Scheduler, TimedCluster
from tests.machine.sides import MachineHost
from tests.machine.site import MachineSite
from tests.machine.stories import (
    Burst,
    Crash,
    Deed,
    Delete,
    Deployment,
    Job,
    Roll,
    StatefulSet,
    StoryPace,
    Swap,
)

TIMINGS = Timings(
    container_start=(0.1, 0.4), init_run=(0.1, 2.0), crash_backoff=10.0, most_backoff=40.0
)


class CalmPlacer(SchedulerModel):
    """kube-scheduler and HAMi's as they are, with requests that take a moment."""

    def __init__(
        self, store: Store, clock: Clock, chance: random.Random, settings: SchedulerSettings
    ) -> None:
        super().__init__(store, clock, chance, settings=settings)
        cluster = TimedCluster(store, chance)
        self._hami = HamiVerbs(cluster, clock, chance, settings, eager=False)

    @property
    def is_idle(self) -> bool:
        """Whether no pod is being placed or waits for its next try: what is left fits nowhere."""
        waiting = self._pending._waiting.values()
        return self._pending.next_due() is None and not any(one.is_taken for one in waiting)


class Placements(Scheduler):
    """Where everybody looks up what was placed. The audit keeps it, from what was written."""

    def restart(self) -> None:
        pass


class CalmSite(MachineSite):
    """A node without faults."""

    gpus = 4
    split = 10
    timings = TIMINGS

    def __init__(
        self,
        seed: int,
        clock: Clock,
        life: Callable[..., Coroutine[object, object, AgentLife]],
        pace: StoryPace,
    ) -> None:
        self.pace = pace
        super().__init__(seed, clock, life)
        self.controllers = Controllers(self.store, self.chance, self.create)
        self._told = self.store.told
        self.store.told = self._tell
        self._swaps: dict[str, tuple[Swap, int]] = {}
        """By pod name, and how often it is still to be made anew."""

    def make_faults(self) -> ApiFaults:
        gates = (LateGate(self.store, most) for most in (self.pace.pods_late, self.pace.node_late))
        faults = ApiFaults(self.store, *gates)
        faults.hides = self.pace.hides
        return faults

    def make_scheduler(self) -> Scheduler:
        scheduler = Placements(self.store, self.clock, self.chance)
        settings = SchedulerSettings(gpu_policy="spread" if self.pace.spread else "binpack")
        if not self.pace.is_slow:
            settings = settings.quick()
        self.placer = CalmPlacer(self.store, self.clock, self.chance, settings)
        return scheduler

    def make_audit(self) -> CalmAudit:
        audit = self.judge = CalmAudit(self.store, self.kubelet, self.scheduler, self.disk)
        audit.lenient = self.pace.is_old
        audit.serves_unlocked = self.pace.unlocked is not UnlockedPods.STRICT
        audit.was_shown = lambda text: text in self.faults.shown_locks
        audit.all_listed = self._offers_all
        return audit

    def make_host(self, hooks: AuditedHooks) -> MachineHost:
        host = super().make_host(hooks)
        return dataclasses.replace(host, unlocked=self.pace.unlocked, is_old=self.pace.is_old)

    def make_pod_loop(self) -> KubeletPodLoop:
        lag = (0.0, 0.01)
        return KubeletPodLoop(self.kubelet, self.store, NODE, eager=True, lag=lag)

    def _offers_all(self) -> bool:
        return self.kubelet.allocatable(RESOURCE) == self.gpus * self.split

    # What happens

    def begin(self, deed: Deed) -> None:
        """The owners of pods do it, or see to it from now on."""
        self.judge.say("deed", deed)
        match deed:
            case Burst():
                for number in range(deed.count):
                    name = f"{deed.prefix}-" if deed.is_generated else f"{deed.prefix}-{number}"
                    self.create(name, deed.shape, {}, generated=deed.is_generated)
            case Job() | StatefulSet() | Deployment():
                self.controllers.begin(deed)
            case Roll():
                self.controllers.roll()
            case Delete():
                self._delete(deed)
            case Crash():
                self.spawn(self._crash(deed))
            case Swap():
                self._swaps[deed.name] = (deed, deed.times)
                self.create(deed.name, deed.shape, {})

    def create(
        self, name: str, shape: Shape, notes: Mapping[str, str], *, generated: bool = False
    ) -> None:
        """A pod of that name, or with a name made of it; nothing if there is one."""
        pod = a_pod_object(name, shape, 0)
        pod["metadata"]["annotations"] |= notes
        if generated:
            pod["metadata"]["generateName"] = pod["metadata"].pop("name")
        with contextlib.suppress(StatusError):
            self.store.create("pods", self.scheduler.admit(pod))

    def _delete(self, deed: Delete) -> None:
        present = [pod for pod in self.pods() if not is_leaving(pod)]
        start = deed.place % len(present) if present else 0
        for pod in present[start : start + deed.count]:
            self._remove(str(pod["metadata"]["name"]), deed.grace)

    def _remove(self, name: str, grace: int) -> None:
        with contextlib.suppress(NotFoundError):
            self.store.delete("pods", NAMESPACE, name, grace=grace)

    async def _crash(self, deed: Crash) -> None:
        running = sorted(self.kubelet.node.running())
        if not running:
            return
        owner = running[deed.place % len(running)]
        for _ in range(deed.times):
            if owner not in self.kubelet.node.running():
                return
            self.judge.say("dies", *owner)
            await self.kubelet.container_died(*owner)
            await asyncio.sleep(1.0)

    async def _swap(self, swap: Swap, left: int) -> None:
        await asyncio.sleep(swap.after)
        self._remove(swap.name, 0)
        await asyncio.sleep(swap.again_after)
        if left > 1:
            self._swaps[swap.name] = (swap, left - 1)
        self.create(swap.name, swap.then, {})

    def _tell(self, resource: str, before: Json | None, after: Json | None) -> None:
        self._told(resource, before, after)
        if resource != "pods" or before is None or after is None:
            return
        name = after["metadata"]["name"]
        is_bound = not before["spec"].get("nodeName") and after["spec"].get("nodeName")
        if is_bound and name in self._swaps:
            self.spawn(self._swap(*self._swaps.pop(name)))

    async def crowd_in(self, pause: float) -> NoReturn:
        """Others ask PodResources, too, for ever; 0: they never do."""
        while True:
            await asyncio.sleep(pause or 1e6)
            if self.kubelet.life is not None:
                self.kubelet.life.crowd(self.chance.choice((3, 10)))

    def drop_unbound(self) -> None:
        """Who found no place so far is not wanted any more."""
        for pod in self.pods():
            if not pod["spec"].get("nodeName"):
                self._remove(str(pod["metadata"]["name"]), 0)

    def is_settled(self) -> bool:
        """Whether nothing is under way any more."""
        node = self.store.get("nodes", "", NODE)
        bound = [pod for pod in self.pods() if pod["spec"].get("nodeName") and not is_over(pod)]
        is_up = all(not is_leaving(pod) and self._runs(pod) for pod in bound)
        return is_up and not lock_of(node) and self.placer.is_idle

    def _runs(self, pod: Json) -> bool:
        known = self.kubelet.node.pods.get(pod["metadata"]["uid"])
        if known is None:
            return False
        return {one.name for one in known.spec.containers if one.kind != "init"} <= known.running
