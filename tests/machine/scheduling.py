"""HAMi's scheduler as histories use it, and its memory of what it decided.

What it wrote is remembered here, apart from the pods' annotations, which a tenant may change.
"""

import asyncio
import random
from collections.abc import Mapping
from typing import NoReturn

from agent.cluster import BIND_PHASE, BIND_TIME, MUTEX_LOCK, PHASE_ALLOCATING
from agent.hami.pod import encode_node_lock
from agent.model import Share
from agent.ports import Clock
from agent.sandbox.api_errors import Json, StatusError
from agent.sandbox.patching import merge_patch
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.verbs import BindError, HamiVerbs
from agent.sandbox.scheduler.webhook import admit_pod
from tests.builders import NODE
from tests.fakes.scheduler_cluster import RecordedCluster
from tests.machine.api import Store
from tests.machine.shifted import ShiftedClock

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
        """Send the Events of whichever process there is: they wait in its queue, too."""
        while True:
            self._restarted.clear()
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(self._hami.run())
                await self._restarted.wait()
                sending.cancel()

    def restart(self) -> None:
        """A new process: what it knows of used GPUs is what the pods' annotations say."""
        self._restarted.set()
        cluster = TimedCluster(self._store, self._chance)
        self._hami = HamiVerbs(cluster, self.clock, self._chance, self.settings, eager=True)
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
