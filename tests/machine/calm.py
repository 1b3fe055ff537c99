"""A node and its cluster in which nothing fails."""

import asyncio
import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import NoReturn, Protocol

from agent.allocate.match import UnlockedPods
from agent.ports import Clock
from agent.sandbox.kubelet.model import Timings
from agent.sandbox.kubelet.podloop import KubeletPodLoop
from agent.sandbox.scheduler.loop import SchedulerModel
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.store import Json, NotFoundError, StatusError
from tests.builders import NODE
from tests.fakes.chance import Seeded
from tests.machine.agent_life import AgentLife
from tests.machine.api import ApiFaults, LateGate, Store
from tests.machine.audit import AuditedHooks, lock_of
from tests.machine.calm_audit import CalmAudit
from tests.machine.kubelet import RESOURCE
from tests.machine.pods import NAMESPACE, Box, Scheduler, Shape, TimedCluster, a_pod_object
from tests.machine.sides import MachineHost
from tests.machine.site import MachineSite

# Stories of a cluster in which nothing fails: drawn from a seed, kept as data.
#
# A story says how quick everybody is and what owners of pods do at which second. The same story is
# always played the same way, so one in which something went wrong can be told again.


@dataclasses.dataclass(frozen=True)
class StoryPace:
    """How quick everybody is.

    `pods_late`, `node_late`: most seconds that a frame of the agent's watches takes. `is_slow`:
    HAMi's scheduler with its default client, 5 requests a second. `spread`: it takes the emptiest
    GPU first. `is_old`: a kubelet before 1.34. `hides`: the agent has a node's own identity, which
    is told 403 of a pod that is gone. `crowd`: how often others ask PodResources, in seconds.
    """

    pods_late: float = 0.0
    node_late: float = 0.0
    is_slow: bool = True
    spread: bool = False
    is_old: bool = False
    hides: bool = False
    unlocked: UnlockedPods = UnlockedPods.SCHEDULED
    crowd: float = 0.0


@dataclasses.dataclass(frozen=True)
class Burst:
    """So many pods at once, each with a name of its own; `prefix` + number, or a generated one."""

    at: float
    count: int
    shape: Shape
    prefix: str
    is_generated: bool = False


@dataclasses.dataclass(frozen=True)
class Job:
    """Short pods, so many in all and so many at a time, removed some seconds after the last."""

    at: float
    name: str
    shape: Shape
    completions: int
    parallelism: int


@dataclasses.dataclass(frozen=True)
class StatefulSet:
    """Pods whose names return: the n-th pod of a name has the n-th shape, round and round."""

    at: float
    name: str
    shapes: tuple[Shape, ...]
    replicas: int
    is_parallel: bool = False


@dataclasses.dataclass(frozen=True)
class Deployment:
    """Pods with generated names; a roll replaces them one by one by those of the next shape."""

    at: float
    name: str
    shapes: tuple[Shape, ...]
    replicas: int


@dataclasses.dataclass(frozen=True)
class Roll:
    """All of the deployments roll; all pods of the stateful sets are replaced, last one first."""

    at: float


@dataclasses.dataclass(frozen=True)
class Delete:
    """The pod at that place among those that are there is deleted, and `count` - 1 after it."""

    at: float
    place: int
    grace: int
    count: int = 1


@dataclasses.dataclass(frozen=True)
class Crash:
    """The container at that place among those that run ends, as often, a second apart."""

    at: float
    place: int
    times: int


@dataclasses.dataclass(frozen=True)
class Swap:
    """A pod is deleted by force so many seconds after its binding, and made again with `then`."""

    at: float
    name: str
    shape: Shape
    then: Shape
    after: float
    again_after: float
    times: int = 1


Deed = Burst | Job | StatefulSet | Deployment | Roll | Delete | Crash | Swap


@dataclasses.dataclass(frozen=True)
class MachineStory:
    """One history. `seed` is also that of everything that is left to chance while it is played."""

    seed: int
    pace: StoryPace
    deeds: tuple[Deed, ...]


OLD_KUBELETS = 0.1
UNLOCKED = 0.15
SECONDS = 20.0
"""Within which all deeds begin."""

_APPS = (
    Shape((Box(mib=2000),)),
    Shape((Box(mib=2000),)),
    Shape((Box(mib=1000),)),
    Shape((Box(mib=3000, cores=0),)),
    Shape((Box(mib=4000),)),
    Shape((Box(mib=9000),)),
    Shape((Box(mib=2000), Box(mib=1000, cores=0))),
    Shape((Box(mib=1000), Box(count=0), Box(mib=2000))),
    Shape((Box(mib=1000, cores=10), Box(mib=2000, cores=10), Box(mib=500, cores=10))),
    Shape((Box(count=2, mib=2000),)),
    Shape((Box(count=2, mib=1000), Box(mib=2000))),
    Shape((Box("init", mib=9000), Box(mib=2000))),
    Shape((Box("init", mib=2000), Box("init", count=2, mib=3000), Box(mib=2000))),
    Shape((Box("init", count=0), Box(mib=3000))),
    Shape((Box("sidecar", mib=1000), Box(mib=2000))),
    Shape((Box("sidecar", count=0), Box(mib=2000), Box(mib=1000))),
    Shape((Box("init", mib=4000), Box("sidecar", mib=1000), Box(mib=2000), Box(mib=1000))),
    Shape((Box("init", count=2, mib=1000), Box(count=2, mib=1000))),
)
_LOCKLESS = Shape((Box("init", mib=3000), Box(count=0)))
"""HAMi takes no lock for it: its only request is an init container's."""


def a_story(seed: int) -> MachineStory:
    """The story of that number."""
    chance = Seeded(seed)
    pace = _a_pace(chance)
    shapes = [chance.choice(_APPS) for _ in range(4)]
    if pace.unlocked is UnlockedPods.UNIQUE or seed % 3 == 0:
        shapes[0] = _LOCKLESS
    deeds = tuple(_a_deed(number, chance, shapes) for number in range(chance.randint(2, 7)))
    return MachineStory(seed, pace, tuple(sorted(deeds, key=lambda deed: deed.at)))


def _a_pace(chance: random.Random) -> StoryPace:
    is_unlocked = chance.random() < UNLOCKED
    return StoryPace(
        pods_late=chance.choice((0.01, 0.3, 1.0, 2.0, 2.0)),
        node_late=chance.choice((0.01, 0.3, 1.0, 2.0, 2.0)),
        is_slow=chance.random() < 0.7,
        spread=chance.random() < 0.5,
        is_old=chance.random() < OLD_KUBELETS,
        hides=chance.random() < 0.3,
        unlocked=UnlockedPods.UNIQUE if is_unlocked else UnlockedPods.SCHEDULED,
        crowd=chance.choice((0.0, 0.0, 0.0, 0.5)),
    )


Draw = Callable[[int, float, random.Random, list[Shape]], Deed]


def _a_deed(number: int, chance: random.Random, shapes: list[Shape]) -> Deed:
    at = round(chance.uniform(0.0, SECONDS), 2)
    draw = chance.choices([kind for kind, _ in _KINDS], weights=[weight for _, weight in _KINDS])
    return draw[0](number, at, chance, shapes)


def _a_job(number: int, at: float, chance: random.Random, shapes: list[Shape]) -> Deed:
    seconds = chance.choice((1, 2, 5))
    policy = chance.choice(("Never", "OnFailure"))
    short = dataclasses.replace(chance.choice(shapes), seconds=seconds, restarts=policy)
    return Job(at, f"job{number}", short, chance.choice((4, 8, 12)), chance.choice((2, 4, 4)))


def _a_stateful_set(number: int, at: float, chance: random.Random, shapes: list[Shape]) -> Deed:
    several = tuple(chance.choices(shapes, k=3))
    is_parallel = chance.random() < 0.5
    return StatefulSet(at, f"web{number}", several, chance.randint(1, 4), is_parallel)


def _a_deletion(number: int, at: float, chance: random.Random, shapes: list[Shape]) -> Deed:
    grace = chance.choice((0, 0, 1, 30))
    return Delete(at, chance.randint(0, 40), grace, chance.choice((1, 1, 3)))


def _a_swap(number: int, at: float, chance: random.Random, shapes: list[Shape]) -> Deed:
    return Swap(
        at,
        f"one{number}",
        chance.choice(shapes),
        chance.choice(shapes),
        after=chance.choice((0.0, 0.0, 0.005, 0.02, 0.1, 1.0)),
        again_after=chance.choice((0.0, 0.0, 0.005, 0.1)),
        times=chance.choice((1, 1, 3)),
    )


def _a_burst(number: int, at: float, chance: random.Random, shapes: list[Shape]) -> Deed:
    """At times as large as they come, of the smallest pods then: all are to find room."""
    count = chance.choice((3, 8, 8, 30))
    shape = chance.choice(shapes) if count <= 8 else Shape((Box(mib=1000, cores=5),))
    shape = dataclasses.replace(shape, seconds=chance.choice((None, 3, 8)))
    return Burst(at, count, shape, f"b{number}", chance.random() < 0.5)


_KINDS: tuple[tuple[Draw, int], ...] = (
    (_a_burst, 3),
    (_a_job, 3),
    (_a_stateful_set, 4),
    (lambda n, at, dice, shapes: Deployment(at, f"api{n}", tuple(dice.choices(shapes, k=2)), 3), 2),
    (lambda _, at, *__: Roll(at), 2),
    (_a_deletion, 4),
    (lambda _, at, dice, __: Crash(at, dice.randint(0, 40), dice.choice((1, 3))), 2),
    (_a_swap, 4),
)


# The owners of pods in stories without faults: they look at the cluster and do what is missing.

OWNER = "owner"
"""The annotation that names a pod's controller."""

_REVISION = "revision"
_REACTION = (0.005, 0.1)
_GRACE = 30
_TTL = 5.0
_BACKOFF_LIMIT = 6
_GIVEN_UP = 60
"""Rejected pods after which the owner of a deployment sees that it never starts."""


class Create(Protocol):
    """Make a pod of that name, or with a name made of it."""

    def __call__(
        self, name: str, shape: Shape, notes: Mapping[str, str], *, generated: bool = False
    ) -> None: ...


class Controllers:
    """All of them; each is asked after every change, a moment later."""

    def __init__(self, store: Store, chance: random.Random, create: Create) -> None:
        self._store = store
        self._chance = chance
        self._create = create
        self._all: list[_Controller] = []

    def begin(self, wanted: Job | StatefulSet | Deployment) -> None:
        """There is one more."""
        made: _Controller
        match wanted:
            case Job():
                made = _Jobs(wanted, self._store, self._create)
            case StatefulSet():
                made = _StatefulSets(wanted, self._store, self._create)
            case Deployment():
                made = _Deployments(wanted, self._store, self._create)
        self._all.append(made)
        self._store.stir()

    def roll(self) -> None:
        """Their owners want other pods."""
        for one in self._all:
            one.revision += 1
        self._store.stir()

    async def run(self) -> None:
        """Look and act, for ever."""
        while True:
            await self._store.until_news(_TTL)
            await asyncio.sleep(self._chance.uniform(*_REACTION))
            pods = self._store.select("pods")
            for one in self._all:
                one.look([pod for pod in pods if owner_of(pod) == one.name])


class _Controller:
    def __init__(self, name: str, store: Store, create: Create) -> None:
        self.name = name
        self.revision = 0
        self._store = store
        self._make = create

    def look(self, pods: Sequence[Json]) -> None:
        raise NotImplementedError

    def _create(self, name: str, shape: Shape, *, generated: bool) -> None:
        notes = {OWNER: self.name, _REVISION: str(self.revision)}
        self._make(name, shape, notes, generated=generated)

    def _delete(self, pod: Json, grace: int = _GRACE) -> None:
        metadata = pod["metadata"]
        try:
            self._store.delete("pods", metadata["namespace"], metadata["name"], grace=grace)
        except NotFoundError:
            return


class _Jobs(_Controller):
    def __init__(self, job: Job, store: Store, create: Create) -> None:
        super().__init__(job.name, store, create)
        self._job = job
        self._done: set[str] = set()
        self._over_at: float | None = None

    def look(self, pods: Sequence[Json]) -> None:
        self._done |= {uid(pod) for pod in pods if phase(pod) == "Succeeded"}
        active = [pod for pod in pods if not is_over(pod) and not is_leaving(pod)]
        if sum(phase(pod) == "Failed" for pod in pods) > _BACKOFF_LIMIT:
            return
        left = self._job.completions - len(self._done) - len(active)
        for _ in range(min(left, self._job.parallelism - len(active))):
            self._create(f"{self.name}-", self._job.shape, generated=True)
        if left > 0 or active:
            return
        now = asyncio.get_running_loop().time()
        self._over_at = now if self._over_at is None else self._over_at
        if now - self._over_at >= _TTL:
            for pod in pods:
                self._delete(pod)


class _StatefulSets(_Controller):
    def __init__(self, wanted: StatefulSet, store: Store, create: Create) -> None:
        super().__init__(wanted.name, store, create)
        self._wanted = wanted
        self._turns = [itertools.cycle(wanted.shapes) for _ in range(wanted.replicas)]

    def look(self, pods: Sequence[Json]) -> None:
        by_name = {pod["metadata"]["name"]: pod for pod in pods}
        for place, turn in enumerate(self._turns):
            pod = by_name.get(f"{self.name}-{place}")
            if pod is None:
                self._create(f"{self.name}-{place}", next(turn), generated=False)
            if not self._wanted.is_parallel and (pod is None or not is_ready(pod)):
                return
        old = [pod for pod in pods if _revision_of(pod) != self.revision]
        if old and all(map(is_ready, pods)):
            self._delete(max(old, key=lambda pod: str(pod["metadata"]["name"])))


class _Deployments(_Controller):
    def __init__(self, wanted: Deployment, store: Store, create: Create) -> None:
        super().__init__(wanted.name, store, create)
        self._wanted = wanted

    def look(self, pods: Sequence[Json]) -> None:
        if sum(map(is_over, pods)) >= _GIVEN_UP:
            return
        wanted = self._wanted.replicas
        alive = [pod for pod in pods if not is_leaving(pod) and not is_over(pod)]
        new = [pod for pod in alive if _revision_of(pod) == self.revision]
        old = [pod for pod in alive if _revision_of(pod) != self.revision]
        shape = self._wanted.shapes[self.revision % len(self._wanted.shapes)]
        for _ in range(min(wanted - len(new), wanted + 1 - len(alive))):
            self._create(f"{self.name}-", shape, generated=True)
        if old and sum(map(is_ready, alive)) >= wanted:
            self._delete(old[0])


def owner_of(pod: Json) -> str:
    """The name of its controller."""
    return str((pod["metadata"].get("annotations") or {}).get(OWNER, ""))


def uid(pod: Json) -> str:
    return str(pod["metadata"]["uid"])


def phase(pod: Json) -> str:
    return str(pod["status"].get("phase", ""))


def is_over(pod: Json) -> bool:
    """Whether it has ended."""
    return phase(pod) in ("Succeeded", "Failed")


def is_leaving(pod: Json) -> bool:
    """Whether it is being deleted."""
    return "deletionTimestamp" in pod["metadata"]


def is_ready(pod: Json) -> bool:
    """Whether all of it runs."""
    conditions = pod["status"].get("conditions") or ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _revision_of(pod: Json) -> int:
    return int(pod["metadata"]["annotations"][_REVISION])


TIMINGS = Timings(
    container_start=(0.1, 0.4), init_run=(0.1, 2.0), crash_backoff=10.0, most_backoff=40.0
)


class CalmPlacer(SchedulerModel):
    """kube-scheduler and HAMi's as they are, with requests that take a moment."""

    def __init__(
        self, store: Store, clock: Clock, chance: random.Random, settings: SchedulerSettings
    ) -> None:
        cluster = TimedCluster(store, chance)
        super().__init__(store, clock, chance, settings=settings, cluster=cluster)


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
