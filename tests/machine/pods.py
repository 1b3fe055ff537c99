"""The pods that histories create: their containers, and what a tenant may write on them."""

import asyncio
import dataclasses
import datetime as dt
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

from hypothesis import strategies as st

from agent.cluster import (
    ALLOCATED,
    BIND_PHASE,
    BIND_TIME,
    MUTEX_LOCK,
    PHASE_ALLOCATING,
    TO_ALLOCATE,
    VGPU_NODE,
)
from agent.model import Share
from agent.ports import Clock
from agent.sandbox.apiserver_requests import merge_patch
from agent.sandbox.kubelet.podloop import RUN_SECONDS
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.verbs import REGISTER_INTERVAL, BindError, HamiVerbs, encode_node_lock
from agent.sandbox.scheduler.webhook import admit_pod
from agent.sandbox.store import Json, StatusError
from tests.builders import NODE, a_uuid
from tests.fakes.scheduler_cluster import RecordedCluster
from tests.machine.api import Store
from tests.machine.kubelet import RESOURCE, MemoryKubelet

GPU_MIB = 16000
NAMESPACE = "team-a"


@dataclasses.dataclass(frozen=True)
class Box:
    """One container. `count` 0: it asks for no GPU; `mib` 0: for all of its GPUs' memory."""

    kind: str = "app"
    count: int = 1
    mib: int = 6000
    cores: int = 20


@dataclasses.dataclass(frozen=True)
class Shape:
    """A pod. `seconds`: its work ends by itself; `misplaced`: it selects other nodes.

    `forged`: its tenant wrote the scheduler's annotations on it, for so many MiB. `restarts`: its
    restartPolicy.
    """

    boxes: tuple[Box, ...] = (Box(),)
    seconds: int | None = None
    misplaced: bool = False
    forged: int | None = None
    restarts: str = ""


boxes = st.builds(
    Box,
    kind=st.sampled_from(("app", "app", "app", "app", "init", "sidecar")),
    count=st.sampled_from((1, 1, 1, 1, 0, 2)),
    mib=st.sampled_from((6000, 2000, 12000, 0)),
    cores=st.sampled_from((20, 0, 60)),
)


def _with_an_app(found: list[Box]) -> tuple[Box, ...]:
    """In the order of a spec; every pod has an app container, whether it needs GPUs or not."""
    inits = [box for box in found if box.kind != "app"]
    apps = [box for box in found if box.kind == "app"] or [Box()]
    return (*inits, *apps)[-3:]


shapes = st.builds(
    Shape,
    boxes=st.lists(boxes, min_size=1, max_size=3).map(_with_an_app),
    seconds=st.sampled_from((None, None, None, 2, 30)),
    misplaced=st.sampled_from((False, False, False, False, True)),
    forged=st.sampled_from((None, None, None, 1, 12000)),
)


def a_pod_object(name: str, shape: Shape, stamp: int, **spec: object) -> Json:
    """The pod as its owner sends it; `stamp` is Unix time, for a forged bind-time."""
    notes = {} if shape.seconds is None else {RUN_SECONDS: str(shape.seconds)}
    if shape.forged is not None:
        notes |= forged(shape, shape.forged, stamp)
    containers = [_container(f"c{place}", box) for place, box in enumerate(shape.boxes)]
    inits = [one for one, box in zip(containers, shape.boxes, strict=True) if box.kind != "app"]
    apps = [one for one, box in zip(containers, shape.boxes, strict=True) if box.kind == "app"]
    selector: Json = {"nodeSelector": {"zone": "elsewhere"}} if shape.misplaced else {}
    selector |= {"restartPolicy": shape.restarts} if shape.restarts else {}
    return {
        "metadata": {"name": name, "namespace": NAMESPACE, "annotations": notes},
        "spec": {"initContainers": inits, "containers": apps} | selector | spec,
    }


def forged(shape: Shape, mib: int, stamp: int) -> dict[str, str]:
    """What the scheduler writes, written by somebody else."""
    groups = "".join(
        "".join(f"{a_uuid(n)},NVIDIA,{mib},1:" for n in range(box.count)) + ";"
        for box in shape.boxes
    )
    return {
        VGPU_NODE: NODE,
        ALLOCATED: groups,
        TO_ALLOCATE: groups,
        BIND_PHASE: PHASE_ALLOCATING,
        BIND_TIME: str(stamp - 3600),
    }


def _container(name: str, box: Box) -> Json:
    limits: dict[str, str] = {}
    if box.count:
        limits[RESOURCE] = str(box.count)
        limits[f"{RESOURCE}cores"] = str(box.cores)
        if box.mib:
            limits[f"{RESOURCE}mem"] = str(box.mib)
    restart = {"restartPolicy": "Always"} if box.kind == "sidecar" else {}
    return {"name": name, "resources": {"limits": limits}} | restart


plain_shapes = st.sampled_from(
    (
        Shape((Box(mib=4000),)),
        Shape((Box(mib=4000),)),
        Shape((Box(mib=12000),)),
        Shape((Box(mib=2000), Box(mib=2000, cores=0))),
        Shape((Box("init", mib=6000), Box(mib=2000))),
        Shape((Box(mib=2000), Box(count=0), Box(mib=2000))),
    )
)


# Another machine's clock.


@dataclasses.dataclass
class ShiftedClock:
    """The clock of this machine, and so many seconds more."""

    clock: Clock
    ahead: float = 0.0

    def now(self) -> dt.datetime:
        """Its wall time."""
        return self.clock.now() + dt.timedelta(seconds=self.ahead)

    def jump(self) -> None:
        """Five minutes and more: whatever the scheduler locked has run out."""
        self.ahead += 310.0


# HAMi's scheduler as histories use it, and its memory of what it decided.
#
# What it wrote is remembered here, apart from the pods' annotations, which a tenant may change.

_TRIP = (0.002, 0.03)
Placement = tuple[tuple[Share, ...], ...]


class TimedCluster(RecordedCluster):
    """Each request but that of an Event takes a moment, so that others act in between."""

    def __init__(self, store: Store, chance: random.Random) -> None:
        super().__init__(store)
        self._chance = chance

    async def before(self, call: str) -> None:
        if not call.startswith("create"):
            await asyncio.sleep(self._chance.uniform(*_TRIP))


class Scheduler:
    """Filter and bind, one pod after the other. `placed`: what it gave, by pod UID.

    `unbound`: pods that it placed, and whose last bind failed.
    """

    def __init__(self, store: Store, clock: Clock, chance: random.Random) -> None:
        self.settings = SchedulerSettings(gpu_policy="binpack")
        self.clock = ShiftedClock(clock)
        self.placed: dict[str, Placement] = {}
        self.unbound: set[str] = set()
        self.bound_again: set[str] = set()
        self._store = store
        self._chance = chance
        self._busy = asyncio.Lock()
        self._restarted = asyncio.Event()
        self.restart()

    async def run(self) -> NoReturn:
        """Let whichever process there is send its Events and read the Nodes: as late as HAMi's."""
        while True:
            self._restarted.clear()
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one) for one in (self._hami.run(), self._read_nodes())]
                await self._restarted.wait()
                for task in tasks:
                    task.cancel()

    async def _read_nodes(self) -> NoReturn:
        while True:
            await asyncio.sleep(REGISTER_INTERVAL)
            await self._look()
            await self._hami.read_nodes()

    def restart(self) -> None:
        """A new process: what it knows of used GPUs is what the pods' annotations say."""
        self._restarted.set()
        cluster = TimedCluster(self._store, self._chance)
        self._hami = HamiVerbs(cluster, self.clock, self._chance, self.settings)
        self._nodes = self._store.subscribe("nodes", None)
        self._pods = self._store.subscribe("pods", None)

    def admit(self, pod: Json) -> Json:
        """The pod as the webhook lets it in."""
        return admit_pod(pod, self.settings)

    async def schedule(self, uid: str) -> None:
        """One scheduling cycle of one pod."""
        async with self._busy:
            await self._look()
            pod = self._find(uid)
            if pod is None or pod["spec"].get("nodeName"):
                return
            self.unbound.discard(uid)
            try:
                await self._place(pod)
            except (BindError, StatusError):
                self.unbound.add(uid)

    async def bind_again(self, uid: str) -> None:
        """A bind that had succeeded is tried once more: it takes the lock, fails, gives it back."""
        async with self._busy:
            pod = self._find(uid)
            if pod is None or uid not in self.placed:
                return
            self.bound_again.add(uid)
            metadata = pod["metadata"]
            try:
                await self._hami.bind(metadata["namespace"], metadata["name"], uid, NODE)
            except BindError:
                return

    async def stamp_again(self) -> None:
        """The owner's bind is tried again after the lock's time: a new stamp, the same owner."""
        async with self._busy:
            text = self.lock()
            if not text:
                return
            _, namespace, name = text.split(",")
            pod = next((p for p in self._store.select("pods") if _key(p) == (namespace, name)), {})
            if not pod or pod["metadata"]["uid"] not in self.placed:
                return
            now = self.clock.now()
            lock = encode_node_lock(now, namespace, name)
            self._write("nodes", ("", NODE), {MUTEX_LOCK: lock})
            marks = {BIND_TIME: str(int(now.timestamp())), BIND_PHASE: PHASE_ALLOCATING}
            self._write("pods", (namespace, name), marks)
            self.bound_again.add(pod["metadata"]["uid"])

    def lock(self) -> str:
        """The text of the lock on the Node, or nothing."""
        node = self._store.get("nodes", "", NODE)
        text: str = (node["metadata"].get("annotations") or {}).get(MUTEX_LOCK, "")
        return text

    async def _look(self) -> None:
        """Take in what the watches tell."""
        while (change := self._nodes.take()) is not None:
            await self._hami.see_node(change.type, change.object)
        while (change := self._pods.take()) is not None:
            self._hami.see_pod(change.type, change.object)

    async def _place(self, pod: Json) -> None:
        uid = pod["metadata"]["uid"]
        filtered = await self._hami.filter(pod, [NODE])
        if not filtered.nodes:
            return
        if filtered.groups is not None:
            self.placed[uid] = tuple(tuple(group) for group in filtered.groups)
            metadata = pod["metadata"]
            await self._hami.bind(metadata["namespace"], metadata["name"], uid, NODE)
        else:
            self._store.bind(*_key(pod), NODE, uid=uid)

    def _find(self, uid: str) -> Json | None:
        return next((p for p in self._store.select("pods") if p["metadata"]["uid"] == uid), None)

    def _write(self, resource: str, key: tuple[str, str], marks: Mapping[str, str]) -> None:
        changes = {"metadata": {"annotations": dict(marks)}}
        self._store.update(resource, *key, lambda held: merge_patch(held, changes))


def _key(pod: Json) -> tuple[str, str]:
    return pod["metadata"]["namespace"], pod["metadata"]["name"]


# What pods were given of each GPU: what is true, what HAMi counts, and whether one more fits.

Amount = tuple[int, int]
"""MiB and percent of compute."""
NONE: Amount = (0, 0)


class MachineRoom:
    """`granted`: what each pod's containers were given, by GPU. `pod` finds one at the API server.

    Thousands of pods that are over cost nothing: only those that the kubelet knows are looked at.
    """

    def __init__(
        self, kubelet: MemoryKubelet, scheduler: Scheduler, pod: Callable[[str], Json | None]
    ) -> None:
        self._past_init: defaultdict[str, set[str]] = defaultdict(set)
        """The init containers that have succeeded, by pod: a rejection hides them in its status."""
        self.granted: defaultdict[str, dict[str, Mapping[str, Amount]]] = defaultdict(dict)
        self._kubelet = kubelet
        self._scheduler = scheduler
        self._pod = pod

    def is_live(self, uid: str) -> bool:
        """Whether a pod counts: it is there, not over, and its node does not call it rejected."""
        pod, node = self._pod(uid), self._kubelet.node.pods.get(uid)
        is_over = pod is None or pod["status"].get("phase") in ("Succeeded", "Failed")
        return not is_over and node is not None and not node.is_rejected

    def excess(self, uid: str, gpu: str) -> str:
        """Why what was given of the GPU is too much for that pod to be served; empty: it is not.

        A pod alone must truly fit. With others, what is true or what HAMi counts must.
        """
        own, true, counted = self._sums(gpu)
        if _is_over(own.get(uid, NONE)):
            return f"{uid} alone takes {own[uid]}"
        return f"{true}, by HAMi {counted}" if _is_over(true) and _is_over(counted) else ""

    def is_oversold(self, uid: str) -> bool:
        """Whether the pods that were answered leave it no room: then the scheduler erred.

        HAMi does where it has written over what a bound pod has, or where a tenant has, and where
        it takes sidecars of one pod for init containers.
        """
        pod = self._pod(uid)
        groups = [group for group in self._scheduler.placed.get(uid, ()) if group]
        if pod is None:
            return False
        inits = pod["spec"].get("initContainers") or ()
        roles = [
            "sidecar" if one.get("restartPolicy") == "Always" else "init"
            for one in inits
            if (one.get("resources", {}).get("limits") or {}).get(RESOURCE)
        ]
        roles += ["app"] * (len(groups) - len(roles))
        for gpu in {str(share.uuid) for group in groups for share in group}:
            amounts = [_of_group(group, gpu) for group in groups]
            own = _true(roles[: len(amounts)], amounts)  # a request that HAMi drops has no group
            true = _sum((own, *(use for other, use in self._sums(gpu)[0].items() if other != uid)))
            counted = _counted(len(inits), amounts)
            counted = _sum((counted, self._sums(gpu, without=uid)[2]))
            if _is_over(own) or (_is_over(true) and _is_over(counted)):
                return True
        return False

    def is_full_by_status(self, uid: str) -> bool:
        """Whether another live pod of its GPUs has ended its init phase, and its status hides that.

        A rejection empties the status; while its containers run, the pod does not become Failed.
        """
        placed = self._scheduler.placed.get(uid, ())
        gpus = {str(share.uuid) for group in placed for share in group}
        return any(
            other != uid
            and any(gpus & given.keys() for given in self.granted[other].values())
            and self.is_live(other)
            and not ((self._pod(other) or {})["status"].get("initContainerStatuses"))
            and self._is_past_init(other)[0]
            and bool(self._past_init.get(other))
            for other in tuple(self.granted)
        )

    def _sums(self, gpu: str, without: str = "") -> tuple[Mapping[str, Amount], Amount, Amount]:
        """What each live pod truly takes of the GPU, the sum, and what HAMi 2.10 counts in all."""
        there = self._kubelet.node.pods
        live = [
            uid for uid in there if uid in self.granted and uid != without and self.is_live(uid)
        ]
        true, counted = {}, []
        for uid in live:
            boxes = [one for one in there[uid].spec.containers if one.limits.get(RESOURCE)]
            given = [self.granted[uid].get(one.name, {}).get(gpu, NONE) for one in boxes]
            ended, all_ended = self._is_past_init(uid)
            kept = [
                NONE if box.kind == "init" and ended else amount
                for box, amount in zip(boxes, given, strict=True)
            ]
            true[uid] = _true([box.kind for box in boxes], kept)
            inits = sum(one.kind != "app" for one in there[uid].spec.containers)
            counted.append(_counted(0, given[inits:]) if all_ended else _counted(inits, given))
        return true, _sum(true.values()), _sum(counted)

    def _is_past_init(self, uid: str) -> tuple[bool, bool]:
        """Whether the ordinary init containers have succeeded, and whether sidecars have, too."""
        pod = self._pod(uid) or {"spec": {}, "status": {}}
        found = pod["status"].get("initContainerStatuses") or ()
        well = self._past_init[uid]
        well |= {
            one["name"]
            for one in found
            if ((one.get("state") or {}).get("terminated") or {}).get("exitCode") == 0
        }
        inits = pod["spec"].get("initContainers") or ()
        ordinary = {one["name"] for one in inits if one.get("restartPolicy") != "Always"}
        return ordinary <= well, bool(well) and {one["name"] for one in inits} <= well


def _of_group(group: Sequence[Share], gpu: str) -> Amount:
    shares = [share for share in group if str(share.uuid) == gpu]
    mib = sum(share.memory_mib or GPU_MIB for share in shares)
    return mib, sum(share.core_percent for share in shares)


def _is_over(amount: Amount) -> bool:
    return amount[0] > GPU_MIB or amount[1] > 100


def _sum(amounts: Iterable[Amount]) -> Amount:
    mib, cores = zip(NONE, *amounts, strict=True)
    return sum(mib), sum(cores)


def _true(kinds: Sequence[str], amounts: Sequence[Amount]) -> Amount:
    """Kubernetes' sum: each init container beside the sidecars before it; sidecars and apps."""
    steps = list(zip(kinds, amounts, strict=True))
    lasting = [amount for kind, amount in steps if kind != "init"]
    peaks = [
        _sum((amount, *(before for kind, before in steps[:place] if kind == "sidecar")))
        for place, (kind, amount) in enumerate(steps)
        if kind == "init"
    ]
    mib, cores = zip(_sum(lasting), *peaks, strict=True)
    return max(mib), max(cores)


def _counted(inits: int, amounts: Sequence[Amount]) -> Amount:
    """The greater of the largest init container and the sum of the others.

    HAMi counts by places and gives none to a container without GPUs: behind an init container
    without any, an app container stands in the place of an init container.
    """
    peaks, apps = amounts[:inits], amounts[inits:]
    mib = max((0, *(mib for mib, _ in peaks), sum(mib for mib, _ in apps)))
    cores = max((0, *(cores for _, cores in peaks), sum(cores for _, cores in apps)))
    return mib, cores
