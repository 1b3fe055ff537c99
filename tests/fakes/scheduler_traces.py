"""What HAMi's own scheduler wrote on a real cluster, and what the model writes, in one form."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from agent import cluster as annotations
from agent.hami.annotations import decode_node_lock
from agent.sandbox.apiserver_requests import merge_patch
from agent.sandbox.scheduler.loop import SchedulerModel
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.webhook import admit_pod
from agent.sandbox.store import Json, NotFoundError, ObjectStore
from tests.fakes.chance import Seeded
from tests.fakes.clock import LoopClock

_FOLDER = Path(__file__).parents[1] / "vectors" / "hami-traces"
_SUCCESS = {annotations.BIND_PHASE: "success"}
NODE = "node-a"
FILTER, LOCK, FREE, MARK, BIND = "filter", "lock", "free", "mark", "bind"


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One write of the scheduler, or the end of a lock; `second` is what it stamped."""

    t: float
    what: str
    pod: str
    second: int = 0


def recorded(name: str) -> list[Json]:
    """The rows of one recorded history."""
    return [json.loads(line) for line in (_FOLDER / f"{name}.jsonl").read_text().splitlines()]


def steps(rows: Iterable[Json]) -> list[TraceStep]:
    """The writes that concern the node's lock and the pods' placement, in their order."""
    found: list[TraceStep] = []
    held, pods = "", dict[str, Json]()
    for row in rows:
        if row["kind"] == "node":
            text = _marks(row).get(annotations.MUTEX_LOCK, "")
            if text != held:
                found += _lock_steps(row["t"], held, text)
            held = text
        elif row["kind"] == "pod" and row["type"] != "DELETED":
            uid = row["object"]["metadata"]["uid"]
            found += _pod_steps(row, pods.get(uid, {"object": {"metadata": {}, "spec": {}}}))
            pods[uid] = row
    return found


def gaps(found: list[TraceStep]) -> list[int]:
    """For each pod that was marked: the stamp of its lock minus its bind-time, in seconds."""
    locks: dict[str, int] = {}
    seconds: list[int] = []
    for step in found:
        if step.what == LOCK:
            locks[step.pod] = step.second
        elif step.what == MARK and step.pod in locks:
            seconds.append(locks[step.pod] - step.second)
    return seconds


def orders(found: list[TraceStep]) -> set[tuple[str, ...]]:
    """In which orders pods were placed, from the last filter before the lock to the binding."""
    seen: set[tuple[str, ...]] = set()
    for end, step in enumerate(found):
        if step.what == BIND:
            mine = [s.what for s in found[: end + 1] if s.pod == step.pod and s.what != FREE]
            begin = max(i for i, what in enumerate(mine) if what == LOCK)
            last = max(i for i, what in enumerate(mine[:begin]) if what == FILTER)
            seen.add(tuple(mine[last:]))
    return seen


def _lock_steps(t: float, held: str, text: str) -> Iterator[TraceStep]:
    if held:
        yield TraceStep(t, FREE, decode_node_lock(held).name)
    if text:
        lock = decode_node_lock(text)
        yield TraceStep(t, LOCK, lock.name, int(lock.stamp.timestamp()))


def _pod_steps(row: Json, before: Json) -> Iterator[TraceStep]:
    now, was, name = _marks(row), _marks(before), row["object"]["metadata"]["name"]
    for what, key in ((FILTER, annotations.VGPU_TIME), (MARK, annotations.BIND_TIME)):
        if key in now and now[key] != was.get(key):
            yield TraceStep(row["t"], what, name, int(now[key]))
    if row["object"]["spec"].get("nodeName") and not before["object"]["spec"].get("nodeName"):
        yield TraceStep(row["t"], BIND, name)


def _marks(row: Json) -> Json:
    marks: Json = row["object"]["metadata"].get("annotations") or {}
    return marks


class Play:
    """The model's scheduler on the node of a trace; a kubelet and an agent that answer at once."""

    def __init__(self, trace: list[Json], settings: SchedulerSettings, seed: int) -> None:
        self.rows: list[Json] = []
        self._store = ObjectStore(LoopClock(), Seeded(seed))
        self._settings = settings
        self._chance = Seeded(seed)
        self._zero = asyncio.get_running_loop().time()
        self._scheduler = SchedulerModel(self._store, LoopClock(), Seeded(seed), settings=settings)
        node = next(row["object"] for row in trace if row["kind"] == "node")
        offered = {"name": NODE, "annotations": dict(node["metadata"]["annotations"])}
        status = {"allocatable": {"nvidia.com/gpu": "80"}}
        self._store.create("nodes", {"metadata": offered, "status": status})

    def submit(self, name: str, spec: Json) -> None:
        """Create a pod through the webhook."""
        pod = {"metadata": {"name": name}, "spec": json.loads(json.dumps(spec))}
        self._store.create("pods", admit_pod(pod, self._settings))

    def delete(self, name: str) -> None:
        """Remove a pod at once."""
        self._store.delete("pods", "default", name, grace=0)

    async def until(self, what: str, name: str) -> None:
        """Wait until the pod is `bound` or `Running`; virtual time, so only a hang can fail."""
        async with asyncio.timeout(600):
            follower = self._store.subscribe("pods", None)
            while not self._is(what, name):
                await anext(follower)

    def _is(self, what: str, name: str) -> bool:
        try:
            pod = self._store.get("pods", "default", name)
        except NotFoundError:
            return False
        return (
            bool(pod["spec"].get("nodeName")) if what == "bound" else pod["status"]["phase"] == what
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Play"]:
        """All activities, for as long as the block runs."""
        async with asyncio.TaskGroup() as group:
            standing = [
                group.create_task(self._scheduler.run()),
                group.create_task(self._record("node", "nodes", group)),
                group.create_task(self._record("pod", "pods", group)),
            ]
            await asyncio.sleep(5)  # the scheduler has not just begun
            yield self
            for task in standing:
                task.cancel()

    async def _record(self, kind: str, resource: str, group: asyncio.TaskGroup) -> None:
        started: set[str] = set()
        async for change in self._store.subscribe(resource, None):
            t = asyncio.get_running_loop().time() - self._zero
            self.rows.append({"t": t, "kind": kind, "type": change.type, "object": change.object})
            uid = change.object["metadata"]["uid"]
            if kind == "pod" and change.object["spec"].get("nodeName") and uid not in started:
                started.add(uid)
                group.create_task(self._serve(change.object["metadata"]["name"], uid))

    async def _serve(self, name: str, uid: str) -> None:
        """What a kubelet and an agent do for a pod that is bound, if it is still there.

        Their times are those of the recordings.
        """
        await asyncio.sleep(self._chance.uniform(0.01, 0.03))
        if not self._still(name, uid):
            return
        await asyncio.sleep(self._chance.uniform(0.02, 0.06))
        held = self._store.get("nodes", "", NODE)["metadata"]["annotations"]
        if held.get(annotations.MUTEX_LOCK, "").endswith(f",default,{name}"):
            free = {"metadata": {"annotations": {annotations.MUTEX_LOCK: None}}}
            self._store.update("nodes", "", NODE, lambda node: merge_patch(node, free))
        self._patch(name, uid, {"metadata": {"annotations": _SUCCESS}})
        await asyncio.sleep(self._chance.uniform(0.15, 0.25))
        self._patch(name, uid, {"status": {"phase": "Running"}})

    def _patch(self, name: str, uid: str, changes: Json) -> None:
        if self._still(name, uid):
            self._store.update("pods", "default", name, lambda pod: merge_patch(pod, changes))

    def _still(self, name: str, uid: str) -> bool:
        found = self._store.select("pods", fields={"metadata.name": name})
        return bool(found) and found[0]["metadata"]["uid"] == uid
