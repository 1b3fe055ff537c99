"""Stories of a node and its cluster in which nothing fails.

A story says how quick everybody is and what owners of pods do at which second. It is drawn from a
seed and kept as data, and always played the same way, so one that went wrong can be told again.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NoReturn

from agent.allocate.match import UnlockedPods
from agent.ports import Clock
from agent.sandbox.kubelet.model import Timings
from agent.sandbox.kubelet.podloop import KubeletPodLoop
from agent.sandbox.scheduler.loop import SchedulerModel
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.verbs import REGISTER_INTERVAL
from agent.sandbox.store import Json, NotFoundError, StatusError
from tests.builders import NODE
from tests.fakes.chance import Seeded
from tests.machine.api import ApiFaults, LateGate
from tests.machine.audit import AuditedHooks, lock_of, uid_of
from tests.machine.calm_audit import CalmAudit
from tests.machine.kubelet import RESOURCE
from tests.machine.playing import silence
from tests.machine.pods import NAMESPACE, Box, Scheduler, Shape, TimedCluster, a_pod_object
from tests.machine.refusals import wrong_in
from tests.machine.sides import MachineHost, VirtualClock, VirtualLoop
from tests.machine.site import MachineSite
from tests.services.at_work import at_work


@dataclasses.dataclass(frozen=True)
class StoryPace:
    """How quick everybody is.

    `pods_late`, `node_late`: most seconds that a frame of the agent's watches takes. `is_slow`:
    HAMi's scheduler with its default client, 5 requests a second. `spread`: it takes the emptiest
    GPU first. `is_old`: a kubelet before 1.34. `hides`: the agent has a node's own identity, which
    is told 403 of a pod that is gone. `crowd`: how often others ask PodResources, in seconds.
    """

    pods_late: float
    node_late: float
    is_slow: bool
    spread: bool
    is_old: bool
    hides: bool
    unlocked: UnlockedPods
    crowd: float


@dataclasses.dataclass(frozen=True)
class Deed:
    """What owners of pods do at that second. `count` is how many, or how often.

    - burst: pods at once, each with a name of its own, or a generated one if `is_other`.
    - job: short pods, `at_once` at a time, removed some seconds after the last.
    - set: pods whose names return; the n-th of a name has the n-th shape, round and round. They
      start one by one, or all together if `is_other`.
    - deployment: pods with generated names; those of the next shape replace them in a roll.
    - roll: all deployments and sets are replaced, one by one, last one first.
    - delete: pods from the place-th one on, with that grace.
    - crash: the place-th container of those that run ends, `count` times, a second apart.
    - swap: a pod is deleted by force `after` seconds after its binding, and made again with the
      second shape `again_after` seconds later.
    """

    at: float
    kind: str
    name: str = ""
    shapes: tuple[Shape, ...] = ()
    count: int = 1
    at_once: int = 0
    is_other: bool = False
    place: int = 0
    grace: int = 30
    after: float = 0.0
    again_after: float = 0.0


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


_KINDS = ("burst", "job", "set", "deployment", "roll", "delete", "crash", "swap")
_OFTEN = (3, 3, 4, 2, 2, 4, 2, 4)
"""How often each is drawn."""


def _a_deed(number: int, chance: random.Random, shapes: list[Shape]) -> Deed:
    """A burst is at times as large as they come, of the smallest pods then: all are to fit."""
    at = round(chance.uniform(0.0, SECONDS), 2)
    (kind,) = chance.choices(_KINDS, weights=_OFTEN)
    name = {"deployment": "api", "set": "web", "swap": "one"}.get(kind, kind)
    deed, choice = Deed(at, kind, f"{name}{number}"), chance.choice
    more: dict[str, object] = {}
    match kind:
        case "burst":
            count = choice((3, 8, 8, 30))
            shape = choice(shapes) if count <= 8 else Shape((Box(mib=1000, cores=5),))
            shape = dataclasses.replace(shape, seconds=choice((None, 3, 8)))
            more = {"count": count, "shapes": (shape,), "is_other": chance.random() < 0.5}
        case "job":
            seconds, restarts = choice((1, 2, 5)), choice(("Never", "OnFailure"))
            short = dataclasses.replace(choice(shapes), seconds=seconds, restarts=restarts)
            more = {"shapes": (short,), "count": choice((4, 8, 12)), "at_once": choice((2, 4, 4))}
        case "set":
            more = {"shapes": tuple(chance.choices(shapes, k=3)), "is_other": chance.random() < 0.5}
            more["count"] = chance.randint(1, 4)
        case "deployment":
            more = {"shapes": tuple(chance.choices(shapes, k=2)), "count": 3}
        case "delete":
            more = {"grace": choice((0, 0, 1, 30)), "place": chance.randint(0, 40)}
            more["count"] = choice((1, 1, 3))
        case "crash":
            more = {"place": chance.randint(0, 40), "count": choice((1, 3))}
        case "swap":
            more = {
                "shapes": (choice(shapes), choice(shapes)),
                "after": choice((0.0, 0.0, 0.005, 0.02, 0.1, 1.0)),
                "again_after": choice((0.0, 0.0, 0.005, 0.1)),
                "count": choice((1, 1, 3)),
            }
    return dataclasses.replace(deed, **more)  # type: ignore[arg-type]


# The owners of pods: they look at the cluster and do what is missing.

OWNER = "owner"
"""The annotation that names a pod's controller."""

_REVISION = "revision"
_REACTION = (0.005, 0.1)
_TTL = 5.0
_BACKOFF_LIMIT = 6
_GIVEN_UP = 60
"""Rejected pods after which the owner of a deployment sees that it never starts."""


class Controller:
    """The owner of a job, a set or a deployment."""

    def __init__(self, deed: Deed, site: "CalmSite") -> None:
        self.revision = 0
        self._deed = deed
        self._site = site
        self._turns = [itertools.cycle(deed.shapes) for _ in range(deed.count)]
        self._done: set[str] = set()
        self._over_at: float | None = None

    def look(self, pods: Sequence[Json]) -> None:
        """Do what is missing."""
        own = [pod for pod in pods if _note(pod, OWNER) == self._deed.name]
        look = {"job": self._job, "set": self._set, "deployment": self._deployment}
        look[self._deed.kind](own)

    def _job(self, pods: Sequence[Json]) -> None:
        self._done |= {uid_of(pod) for pod in pods if phase(pod) == "Succeeded"}
        active = [pod for pod in pods if not is_over(pod) and not is_leaving(pod)]
        if sum(phase(pod) == "Failed" for pod in pods) > _BACKOFF_LIMIT:
            return
        left = self._deed.count - len(self._done) - len(active)
        for _ in range(min(left, self._deed.at_once - len(active))):
            self._create(self._deed.shapes[0])
        if left > 0 or active:
            return
        now = asyncio.get_running_loop().time()
        self._over_at = now if self._over_at is None else self._over_at
        if now - self._over_at >= _TTL:
            for pod in pods:
                self._delete(pod)

    def _set(self, pods: Sequence[Json]) -> None:
        by_name = {pod["metadata"]["name"]: pod for pod in pods}
        for place, turn in enumerate(self._turns):
            name = f"{self._deed.name}-{place}"
            pod = by_name.get(name)
            if pod is None:
                self._create(next(turn), name)
            if not self._deed.is_other and (pod is None or not is_ready(pod)):
                return
        old = [pod for pod in pods if _note(pod, _REVISION) != str(self.revision)]
        if old and all(map(is_ready, pods)):
            self._delete(max(old, key=lambda pod: str(pod["metadata"]["name"])))

    def _deployment(self, pods: Sequence[Json]) -> None:
        if sum(map(is_over, pods)) >= _GIVEN_UP:
            return
        wanted = self._deed.count
        alive = [pod for pod in pods if not is_leaving(pod) and not is_over(pod)]
        old = [pod for pod in alive if _note(pod, _REVISION) != str(self.revision)]
        missing = wanted - len(alive) + len(old)
        for _ in range(min(missing, wanted + 1 - len(alive))):
            self._create(self._deed.shapes[self.revision % len(self._deed.shapes)])
        if old and sum(map(is_ready, alive)) >= wanted:
            self._delete(old[0])

    def _create(self, shape: Shape, name: str = "") -> None:
        notes = {OWNER: self._deed.name, _REVISION: str(self.revision)}
        self._site.create(name or f"{self._deed.name}-", shape, notes, is_generated=not name)

    def _delete(self, pod: Json) -> None:
        self._site.remove(str(pod["metadata"]["name"]), self._deed.grace)


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


def _note(pod: Json, key: str) -> str:
    return str((pod["metadata"].get("annotations") or {}).get(key, ""))


class Placements(Scheduler):
    """Where everybody looks up what was placed. The audit keeps it, from what was written."""

    def restart(self) -> None:
        pass


class CalmSite(MachineSite):
    """A node without faults, with kube-scheduler and HAMi's as they are."""

    gpus = 4
    split = 10
    timings = Timings(
        container_start=(0.1, 0.4), init_run=(0.1, 2.0), crash_backoff=10.0, most_backoff=40.0
    )

    def __init__(self, seed: int, clock: Clock, pace: StoryPace) -> None:
        self.pace = pace
        super().__init__(seed, clock)
        self._owners: list[Controller] = []
        self._told = self.store.told
        self.store.told = self._tell
        self._swaps: dict[str, Deed] = {}
        """By pod name, with how often it is still to be made anew."""

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
        cluster = TimedCluster(self.store, self.chance)
        self.placer = SchedulerModel(
            self.store, self.clock, self.chance, settings=settings, cluster=cluster
        )
        return scheduler

    def make_audit(self) -> CalmAudit:
        audit = self.judge = CalmAudit(self.store, self.kubelet, self.scheduler, self.disk)
        audit.lenient = self.pace.is_old
        audit.serves_unlocked = self.pace.unlocked is not UnlockedPods.STRICT
        audit.was_shown = lambda text: text in self.faults.shown_locks
        every = self.gpus * self.split
        audit.all_listed = lambda: self.kubelet.allocatable(RESOURCE) == every
        return audit

    def make_host(self, hooks: AuditedHooks) -> MachineHost:
        host = super().make_host(hooks)
        return dataclasses.replace(host, unlocked=self.pace.unlocked, is_old=self.pace.is_old)

    def make_pod_loop(self) -> KubeletPodLoop:
        lag = (0.0, 0.01)
        return KubeletPodLoop(self.kubelet, self.store, NODE, eager=True, lag=lag)

    # What happens

    def begin(self, deed: Deed) -> None:
        """The owners of pods do it, or see to it from now on."""
        match deed.kind:
            case "burst":
                for number in range(deed.count):
                    name = f"{deed.name}-" if deed.is_other else f"{deed.name}-{number}"
                    self.create(name, deed.shapes[0], is_generated=deed.is_other)
            case "job" | "set" | "deployment":
                self._owners.append(Controller(deed, self))
                self.store.stir()
            case "roll":
                for one in self._owners:
                    one.revision += 1
                self.store.stir()
            case "delete":
                present = [pod for pod in self.pods() if not is_leaving(pod)]
                start = deed.place % len(present) if present else 0
                for pod in present[start : start + deed.count]:
                    self.remove(str(pod["metadata"]["name"]), deed.grace)
            case "crash":
                self.spawn(self._crash(deed))
            case _:
                self._swaps[deed.name] = deed
                self.create(deed.name, deed.shapes[0])

    async def look_after_pods(self) -> NoReturn:
        """Each owner looks after every change, a moment later."""
        while True:
            await self.store.until_news(_TTL)
            await asyncio.sleep(self.chance.uniform(*_REACTION))
            pods = self.store.select("pods")
            for one in self._owners:
                one.look(pods)

    def create(
        self, name: str, shape: Shape, notes: Mapping[str, str] = {}, *, is_generated: bool = False
    ) -> None:
        """A pod of that name, or with a name made of it; nothing if there is one."""
        pod = a_pod_object(name, shape, 0)
        pod["metadata"]["annotations"] |= notes
        if is_generated:
            pod["metadata"]["generateName"] = pod["metadata"].pop("name")
        with contextlib.suppress(StatusError):
            self.store.create("pods", self.scheduler.admit(pod))

    def remove(self, name: str, grace: int) -> None:
        with contextlib.suppress(NotFoundError):
            self.store.delete("pods", NAMESPACE, name, grace=grace)

    async def _crash(self, deed: Deed) -> None:
        running = sorted(self.kubelet.node.running())
        owner = running[deed.place % len(running)] if running else None
        for _ in range(deed.count):
            if owner is None or owner not in self.kubelet.node.running():
                return
            await self.kubelet.container_died(*owner)
            await asyncio.sleep(1.0)

    async def _swap(self, swap: Deed) -> None:
        await asyncio.sleep(swap.after)
        self.remove(swap.name, 0)
        await asyncio.sleep(swap.again_after)
        if swap.count > 1:
            self._swaps[swap.name] = dataclasses.replace(swap, count=swap.count - 1)
        self.create(swap.name, swap.shapes[1])

    def _tell(self, resource: str, before: Json | None, after: Json | None) -> None:
        self._told(resource, before, after)
        if resource != "pods" or before is None or after is None:
            return
        name = after["metadata"]["name"]
        is_bound = not before["spec"].get("nodeName") and after["spec"].get("nodeName")
        if is_bound and name in self._swaps:
            self.spawn(self._swap(self._swaps.pop(name)))

    async def crowd_in(self) -> NoReturn:
        """Others ask PodResources, too, for ever; with a pace of 0 they never do."""
        while True:
            await asyncio.sleep(self.pace.crowd or 1e6)
            self.kubelet.crowd(self.chance.choice((3, 10)))

    def drop_unbound(self) -> None:
        """Who found no place so far is not wanted any more."""
        for pod in self.pods():
            if not pod["spec"].get("nodeName"):
                self.remove(str(pod["metadata"]["name"]), 0)

    def is_settled(self) -> bool:
        """Whether nothing is under way any more."""
        node = self.store.get("nodes", "", NODE)
        bound = [pod for pod in self.pods() if pod["spec"].get("nodeName") and not is_over(pod)]
        is_up = all(not is_leaving(pod) and self._runs(pod) for pod in bound)
        return is_up and not lock_of(node) and self.placer.is_idle

    def _runs(self, pod: Json) -> bool:
        known = self.kubelet.node.pods.get(uid_of(pod))
        if known is None:
            return False
        return {one.name for one in known.spec.containers if one.kind != "init"} <= known.running


# A story is told.

SETTLES_WITHIN = 240.0
"""Seconds for all that was begun to come to its end: a burst of 30 with a slow queue takes most."""

TAIL = 135.0
"""Seconds after which no row, lock or effect may be left: the longest patience of the agent."""

_LOOK = 5.0


@dataclasses.dataclass(frozen=True)
class ToldVerdict:
    """What came of a story: what was wrong, and what was counted."""

    seed: int
    breaches: tuple[str, ...]
    tally: Mapping[str, int]


def tell_number(seed: int) -> ToldVerdict:
    """The story of that number, to its end or to the first breach, without a word in the log."""
    loop = VirtualLoop()
    try:
        with silence():
            return loop.run_until_complete(_played(a_story(seed), VirtualClock(loop)))
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _played(story: MachineStory, clock: VirtualClock) -> ToldVerdict:
    site = CalmSite(story.seed, clock, story.pace)
    async with site.living():
        found = await _course(story, site)
    return ToldVerdict(story.seed, tuple(found), Counter(site.judge.tally))


async def _course(story: MachineStory, site: CalmSite) -> list[str]:
    """All deeds, and time for what comes of them. What was wrong, if anything was."""
    judge, loop = site.judge, asyncio.get_running_loop()
    async with at_work(site.placer.run, site.crowd_in):
        await asyncio.sleep(REGISTER_INTERVAL + 1.0)  # then HAMi has seen the node's GPUs
        async with at_work(site.look_after_pods):
            began = loop.time()
            for deed in story.deeds:
                await asyncio.sleep(max(0.0, began + deed.at - loop.time()))
                if not judge.breaches:
                    site.begin(deed)
            ends, is_settled = loop.time() + SETTLES_WITHIN, False
            while loop.time() < ends and not judge.breaches and not is_settled:
                await asyncio.sleep(_LOOK)
                is_settled = site.is_settled()
        site.drop_unbound()
        if not judge.breaches:
            await asyncio.sleep(TAIL)
    judge.finish()
    return [*judge.breaches] or list(
        wrong_in(site, (), lambda _, pod: uid_of(pod) in judge.excused)
    )
