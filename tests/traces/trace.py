"""A recorded history: what the scheduler, the kubelet and the users did, and who was answered.

The API server's events hold the writes of the agent that ran there, too. Those are left out, for
the agent that is judged makes its own: a pod's bind-phase `success` with the consumed groups, which
nobody else writes, and the removal of the lock of a pod that was answered. Where the owner was not
answered, the scheduler took the lock over: that removal stays.
"""

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from agent.cluster import ALLOCATED, BIND_PHASE, MUTEX_LOCK, PHASE_SUCCESS, REGISTER, TO_ALLOCATE

FOLDER: Final = Path(__file__).parents[1] / "vectors" / "hami-traces"
NAMES: Final = tuple(sorted(path.stem for path in FOLDER.glob("*.jsonl")))
RESOURCE: Final = "nvidia.com/gpu"

Json = dict[str, Any]
Notes = Mapping[str, str | None]
"""Annotations that change; None: it goes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """One GPU of a share, as the scheduler wrote it."""

    gpu: str
    memory_mib: int
    core_percent: int


@dataclasses.dataclass(frozen=True, slots=True)
class PodEvent:
    """Somebody but the agent wrote a pod. `notes` are the annotations that this changed."""

    t: float
    kind: str
    """ADDED, MODIFIED or DELETED."""
    pod: Json
    notes: Notes


@dataclasses.dataclass(frozen=True, slots=True)
class TracedNodeEvent:
    """Somebody but the agent wrote annotations of the Node."""

    t: float
    notes: Notes


@dataclasses.dataclass(frozen=True, slots=True)
class TracedCall:
    """An Allocate. `container` is empty where it was refused; `pod` is the pod at its begin.

    Of `ids` only the number counts: in a replay the kubelet takes those that are preferred there.
    """

    t: float
    ids: tuple[str, ...]
    pod: Json
    container: str
    slots: tuple[Slot, ...]

    @property
    def uid(self) -> str:
        uid: str = self.pod["metadata"]["uid"]
        return uid


@dataclasses.dataclass(frozen=True, slots=True)
class CallEnd:
    """The kubelet had its answer: nothing behind it happens before."""

    t: float


Event = PodEvent | TracedNodeEvent | TracedCall | CallEnd


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """`settled`: by UID, what the recorded agent wrote on the pod. `owners`: UIDs by lock."""

    name: str
    begin: float
    node: Json
    events: tuple[Event, ...]
    settled: Mapping[str, Notes]
    owners: Mapping[str, str]

    @property
    def gpus(self) -> list[Json]:
        """The GPUs as they are registered."""
        told: list[Json] = json.loads(self.node["metadata"]["annotations"][REGISTER])
        return told

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of all slices."""
        return tuple(f"{one['id']}-{n}" for one in self.gpus for n in range(one["count"]))

    @property
    def calls(self) -> tuple[TracedCall, ...]:
        return tuple(event for event in self.events if isinstance(event, TracedCall))

    def until_refused(self, number: int) -> "Trace":
        """The history up to the refusal of that number, from 0: nobody does anything after it."""
        refused = [call.t for call in self.calls if not call.container][number]
        end = next(e.t for e in self.events if isinstance(e, CallEnd) and e.t >= refused)
        events = tuple(event for event in self.events if event.t <= end)
        return dataclasses.replace(self, events=events)


@functools.cache
def load(name: str) -> Trace:
    lines = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return _Reading([json.loads(line) for line in lines]).trace(name)


class _Reading:
    """One pass through a trace's lines."""

    def __init__(self, lines: list[Json]) -> None:
        self._lines = lines
        self._newest: dict[tuple[str, str], Json] = {}
        """The pods as they were last seen, by namespace and name."""
        self._asked: set[str] = set()
        self._answered: set[str] = set()
        self._lock = ""
        self._settled: dict[str, Notes] = {}
        self._owners: dict[str, str] = {}

    def trace(self, name: str) -> Trace:
        meta, node, *rest = self._lines
        assert (meta["kind"], node["kind"], node["type"]) == ("meta", "node", "LISTED")
        self._node_notes: Json = node["object"]["metadata"]["annotations"]
        events = tuple(self._events(rest))
        return Trace(name, meta["begin_unix"], node["object"], events, self._settled, self._owners)

    def _events(self, lines: list[Json]) -> Iterator[Event]:
        for place, line in enumerate(lines):
            match line["kind"]:
                case "pod":
                    yield from self._pod(line)
                case "node":
                    yield from self._node(line)
                case "allocate":
                    yield self._call(line, lines[place:])
                case "agent-answered" | "agent-refused":
                    yield CallEnd(line["t"])
                case other:
                    raise AssertionError(f"unknown kind {other}")

    def _pod(self, line: Json) -> Iterator[PodEvent]:
        pod: Json = line["object"]
        metadata = pod["metadata"]
        key = metadata["namespace"], metadata["name"]
        before = self._newest.get(key)
        if before is None or before["metadata"]["uid"] != metadata["uid"]:
            assert line["type"] == "ADDED"
            assert not pod["spec"]["nodeName"]
            before = None
        if pod["spec"]["nodeName"]:  # a Binding set both; the recorder cut the conditions
            pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
        notes = _difference((before or {"metadata": {}})["metadata"], metadata)
        self._newest[key] = pod
        if notes.get(BIND_PHASE) == PHASE_SUCCESS:
            # One write of one writer: that nothing else changed with it is what tells it apart.
            assert before is not None
            assert {BIND_PHASE, TO_ALLOCATE} == notes.keys()
            assert (before["spec"], before["status"]) == (pod["spec"], pod["status"])
            self._settled[metadata["uid"]] = notes
        else:
            yield PodEvent(line["t"], line["type"], pod, notes)

    def _node(self, line: Json) -> Iterator[TracedNodeEvent]:
        metadata = line["object"]["metadata"]
        notes = dict(_difference({"annotations": self._node_notes}, metadata))
        self._node_notes = metadata["annotations"]
        if MUTEX_LOCK in notes:
            before, self._lock = self._lock, notes[MUTEX_LOCK] or ""
            if self._lock:
                _, namespace, name = self._lock.split(",")
                uid = self._newest[namespace, name]["metadata"]["uid"]
                assert self._owners.setdefault(self._lock, uid) == uid
            elif self._owners[before] in self._answered:
                del notes[MUTEX_LOCK]
        if notes:
            yield TracedNodeEvent(line["t"], notes)

    def _call(self, line: Json, behind: list[Json]) -> TracedCall:
        said = next(one for one in behind if one["kind"].startswith("agent-"))
        ids = tuple(line["ids"])
        if said["kind"] == "agent-refused":
            waiting = [
                pod
                for pod in self._newest.values()
                if pod["spec"]["nodeName"] and pod["metadata"]["uid"] not in self._asked
            ]
            assert len(waiting) == 1
            self._asked.add(waiting[0]["metadata"]["uid"])
            return TracedCall(line["t"], ids, waiting[0], "", ())
        pod = self._newest[said["ns"], said["pod"]]
        uid = pod["metadata"]["uid"]
        self._asked.add(uid)
        self._answered.add(uid)
        slots = _slots(pod, said["ctr"])
        assert sorted(said["gpus"]) == sorted(slot.gpu for slot in slots)
        return TracedCall(line["t"], ids, pod, said["ctr"], slots)


def _difference(before: Json, after: Json) -> Notes:
    old, new = before.get("annotations") or {}, after.get("annotations") or {}
    return {key: new.get(key) for key in {*old, *new} if old.get(key) != new.get(key)}


def containers(pod: Json) -> list[Json]:
    """Those that ask for GPUs, in the order in which the kubelet asks for them."""
    spec = pod["spec"]
    return [
        one
        for one in (*spec["initContainers"], *spec["containers"])
        if RESOURCE in one.get("resources", {}).get("limits", {})
    ]


def _slots(pod: Json, container: str) -> tuple[Slot, ...]:
    """What the scheduler wrote for the container: `UUID,NVIDIA,MiB,percent:` a GPU, `;` a group."""
    text = pod["metadata"]["annotations"][ALLOCATED]
    groups = [group for group in text.split(";") if group]
    names = [one["name"] for one in containers(pod)]
    assert len(names) == len(groups)
    parts = [one.split(",") for one in groups[names.index(container)].split(":") if one]
    return tuple(Slot(gpu, int(mib), int(percent)) for gpu, _, mib, percent in parts)
