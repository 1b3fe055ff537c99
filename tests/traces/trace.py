"""A recorded history: what the scheduler, the kubelet and the users did, and who was answered.

The API server's events hold the writes of the agent that ran there, too. Those are left out, for
the agent that is judged makes its own: a pod's bind-phase `success` with the consumed groups, which
nobody else writes, and the removal of the lock of a pod that was answered. Where the owner was not
answered, the scheduler took the lock over: that removal stays.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from agent.cluster import ALLOCATED, BIND_PHASE, MUTEX_LOCK, PHASE_SUCCESS, REGISTER, TO_ALLOCATE

FOLDER: Final = Path(__file__).parents[1] / "vectors" / "hami-traces"
NAMES: Final = tuple(sorted(path.stem for path in FOLDER.glob("*.jsonl")))
RESOURCE: Final = "nvidia.com/gpu"

Json = dict[str, Any]
Notes = Mapping[str, str | None]
"""Annotations that change; None: it goes."""


class Slot(NamedTuple):
    """One GPU of a share, as the scheduler wrote it."""

    gpu: str
    memory_mib: int
    core_percent: int


class PodEvent(NamedTuple):
    """Somebody but the agent wrote a pod. `notes` are the annotations that this changed."""

    t: float
    kind: str
    """ADDED, MODIFIED or DELETED."""
    pod: Json
    notes: Notes


class TracedNodeEvent(NamedTuple):
    """Somebody but the agent wrote annotations of the Node."""

    t: float
    notes: Notes


class TracedCall(NamedTuple):
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


class CallEnd(NamedTuple):
    """The kubelet had its answer: nothing behind it happens before."""

    t: float


Event = PodEvent | TracedNodeEvent | TracedCall | CallEnd


class Trace(NamedTuple):
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
        return self._replace(events=events)


@functools.cache
def load(name: str) -> Trace:
    """The trace of that name."""
    lines = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    meta, node, *rest = map(json.loads, lines)
    reading = _Reading(node["object"]["metadata"]["annotations"])
    told = (reading.event(line, rest[place:]) for place, line in enumerate(rest))
    events = tuple(event for event in told if event is not None)
    return Trace(name, meta["begin_unix"], node["object"], events, reading.settled, reading.owners)


class _Reading:
    """One pass through a trace's lines."""

    def __init__(self, node_notes: Json) -> None:
        self._node_notes = node_notes
        self._newest: dict[tuple[str, str], Json] = {}
        """The pods as they were last seen, by namespace and name."""
        self._asked: set[str] = set()
        self._answered: set[str] = set()
        self._lock = ""
        self.settled: dict[str, Notes] = {}
        self.owners: dict[str, str] = {}

    def event(self, line: Json, behind: list[Json]) -> Event | None:
        """What a line tells; None: what the agent wrote that ran there."""
        match line["kind"]:
            case "pod":
                return self._pod(line)
            case "node":
                return self._node(line)
            case "allocate":
                return self._call(line, behind)
            case "agent-answered" | "agent-refused":
                return CallEnd(line["t"])
            case other:
                raise AssertionError(f"unknown kind {other}")

    def _pod(self, line: Json) -> PodEvent | None:
        pod: Json = line["object"]
        metadata = pod["metadata"]
        key = metadata["namespace"], metadata["name"]
        before = self._newest.get(key, {"metadata": {"uid": ""}})
        if before["metadata"]["uid"] != metadata["uid"]:
            assert line["type"] == "ADDED"
            assert not pod["spec"]["nodeName"]
            before = {"metadata": {}}
        if pod["spec"]["nodeName"]:  # a Binding set both; the recorder cut the conditions
            pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
        notes = _difference(before["metadata"], metadata)
        self._newest[key] = pod
        if notes.get(BIND_PHASE) != PHASE_SUCCESS:
            return PodEvent(line["t"], line["type"], pod, notes)
        # One write of one writer: that nothing else changed with it is what tells it apart.
        assert {BIND_PHASE, TO_ALLOCATE} == notes.keys()
        assert (before["spec"], before["status"]) == (pod["spec"], pod["status"])
        self.settled[metadata["uid"]] = notes
        return None

    def _node(self, line: Json) -> TracedNodeEvent | None:
        metadata = line["object"]["metadata"]
        notes = dict(_difference({"annotations": self._node_notes}, metadata))
        self._node_notes = metadata["annotations"]
        if MUTEX_LOCK in notes:
            before, self._lock = self._lock, notes[MUTEX_LOCK] or ""
            if self._lock:
                _, namespace, name = self._lock.split(",")
                uid = self._newest[namespace, name]["metadata"]["uid"]
                assert self.owners.setdefault(self._lock, uid) == uid
            elif self.owners[before] in self._answered:
                del notes[MUTEX_LOCK]
        return TracedNodeEvent(line["t"], notes) if notes else None

    def _call(self, line: Json, behind: list[Json]) -> TracedCall:
        said = next(one for one in behind if one["kind"].startswith("agent-"))
        ids, container = tuple(line["ids"]), ""
        slots: tuple[Slot, ...] = ()
        if said["kind"] == "agent-refused":
            (pod,) = (
                pod
                for pod in self._newest.values()
                if pod["spec"]["nodeName"] and pod["metadata"]["uid"] not in self._asked
            )
        else:
            pod, container = self._newest[said["ns"], said["pod"]], said["ctr"]
            self._answered.add(pod["metadata"]["uid"])
            slots = _slots(pod, container)
        self._asked.add(pod["metadata"]["uid"])
        return TracedCall(line["t"], ids, pod, container, slots)


def _difference(before: Json, after: Json) -> Notes:
    old, new = before.get("annotations") or {}, after.get("annotations") or {}
    return {key: new.get(key) for key in {*old, *new} if old.get(key) != new.get(key)}


def _slots(pod: Json, container: str) -> tuple[Slot, ...]:
    """What the scheduler wrote for the container: `UUID,NVIDIA,MiB,percent:` a GPU, `;` a group."""
    text = pod["metadata"]["annotations"][ALLOCATED]
    groups = [group for group in text.split(";") if group]
    names = [
        one["name"]
        for one in (*pod["spec"]["initContainers"], *pod["spec"]["containers"])
        if RESOURCE in one.get("resources", {}).get("limits", {})
    ]
    assert len(names) == len(groups)
    parts = [one.split(",") for one in groups[names.index(container)].split(":") if one]
    return tuple(Slot(gpu, int(mib), int(percent)) for gpu, _, mib, percent in parts)
