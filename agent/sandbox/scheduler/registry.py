"""What the scheduler knows: the registered nodes with their GPUs, the pods' use of them, quotas.

Source: HAMi v2.10 pkg/scheduler/scheduler.go (register, onAddPod, onUpdatePod, onDelPod), pods.go,
pkg/device/devices.go:CheckHealth, pkg/device/nvidia/device.go, pkg/device/quota.go.
"""

import contextlib
import datetime as dt
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from agent import cluster as annotations
from agent.errors import MalformedText, cap
from agent.hami.annotations import decode_either, decode_pod_devices, is_json_form
from agent.model import GpuUuid, Share
from agent.sandbox.scheduler import model
from agent.sandbox.scheduler.model import (
    CORES,
    MEMORY,
    GpuView,
    Load,
    RegisteredNode,
    parse_quantity,
)
from agent.sandbox.store import Json

TERMINAL: Final = frozenset({"Succeeded", "Failed"})
REQUESTING: Final = "Requesting"
_WORDS: Final = ("Reported", REQUESTING, "Deleted")
"""An agent's or plugin's: the report is new. The scheduler's: it read the report and waits; nobody
answered, and the node's GPUs are dropped."""
_STALE: Final = dt.timedelta(seconds=60)
_STAMP: Final = "%Y-%m-%d %H:%M:%S"


def decode_handshake(text: str) -> tuple[str, dt.datetime | None]:
    """Decode the word at the beginning of the text, and the time after it; None: it has none.

    The time is naive if the text names no zone: a scheduler writes its local time without it, and
    those of v2.4 have dots in the date. Schedulers act on the word even without a valid time.
    Raises MalformedText: the text begins with none of the words.
    """
    word = next(filter(text.startswith, _WORDS), "")
    if not word:
        words = ", ".join(_WORDS)
        raise MalformedText(f"handshake {cap(text)!r} begins with none of {words}")
    # A plugin's time is Go's: date, time, offset, zone, and a monotonic clock.
    date, time, offset, *_ = [*text.removeprefix(word)[1:].split(" "), "", "", ""]
    offset = "" if offset.startswith("m=") else offset
    stamp = None
    with contextlib.suppress(ValueError):
        stamp = dt.datetime.fromisoformat(f"{date.replace('.', '-')}T{time}{offset}")
    return word, stamp


class Checkup(NamedTuple):
    """What HAMi's refresh rule says of a node. `asks`: write `Requesting_<now>`."""

    healthy: bool
    refresh: bool
    asks: bool


def check_node(seen: dict[str, object], node: Json, now: dt.datetime) -> Checkup:
    """Apply HAMi's refresh rule to one node. `seen`: the node as last seen, by name; updated."""
    name, noted = node["metadata"]["name"], node["metadata"].get("annotations") or {}
    offered = ((node.get("status") or {}).get("allocatable") or {}).get(model.COUNT, "")
    handshake, allocatable = noted.get(annotations.HANDSHAKE, ""), parse_quantity(offered) or 0
    asks, is_fresh = REQUESTING not in handshake, True
    with contextlib.suppress(ValueError):  # a request without a time never runs out
        stamp = dt.datetime.strptime(handshake.partition("_")[2], _STAMP).replace(tzinfo=dt.UTC)
        is_fresh = now - stamp < _STALE
    sight = (allocatable, noted.get(annotations.REGISTER, "")) if allocatable else None
    before = seen.get(name)
    seen[name] = sight
    if sight is None:
        return Checkup(before is None and (asks or is_fresh), asks, asks)
    return Checkup(True, asks or sight != before, asks)


def read_offer(noted: Mapping[str, str], *, is_json: bool = True) -> RegisteredNode | None:
    """The node of these annotations, its GPUs unused; None if none can be decoded.

    HAMi reads only JSON; not `is_json`: whatever form its scheduler reads.
    """
    text = noted.get(annotations.REGISTER, "")
    if is_json and not is_json_form(text):
        return None
    try:
        gpus = decode_either(text)
    except MalformedText:
        return None
    cordoned = {word.strip() for word in noted.get(annotations.CORDON, "").split(",")} - {""}
    return RegisteredNode(tuple(map(GpuView, gpus)), frozenset(cordoned))


class Registry:
    """The scheduler's registered nodes. Only `ingest` and `forget` change them."""

    def __init__(self) -> None:
        self._seen: dict[str, object] = {}
        self._nodes: dict[str, RegisteredNode] = {}

    def ingest(self, node: Json, now: dt.datetime) -> Mapping[str, str | None]:
        """Ingest one node. Returns the annotations that must be written (None deletes).

        As in HAMi, the former offer stays if the text cannot be decoded.
        """
        name = node["metadata"]["name"]
        offer = read_offer(node["metadata"].get("annotations") or {})
        checkup = check_node(self._seen, node, now)
        if checkup.healthy and checkup.refresh and offer is not None:
            self._nodes[name] = offer
        elif not checkup.healthy and name in self._nodes:
            self.forget(name)
            return {annotations.HANDSHAKE: None}
        stamp = f"{REQUESTING}_{now.strftime(_STAMP)}"
        return {annotations.HANDSHAKE: stamp} if checkup.asks else {}

    def forget(self, name: str) -> None:
        """Drop a node, with its counts."""
        self._nodes.pop(name, None)
        self._seen.pop(name, None)

    def state(self, name: str, loads: Mapping[GpuUuid, Load]) -> RegisteredNode | None:
        """A registered node with the use of its GPUs, or None."""
        node = self._nodes.get(name)
        return node.with_loads(loads) if node else None


# The use of GPUs. Kubernetes counts the requests of pods against a ResourceQuota; HAMi counts what
# it gave them.


@dataclass(frozen=True, slots=True)
class Reservation:
    """The shares of one pod on one node: groups as written, init containers first."""

    node: str
    groups: Sequence[Sequence[Share]]
    inits: int
    is_past_init: bool = False
    namespace: str = ""

    def loads(self) -> Mapping[GpuUuid, Load]:
        """Per GPU: max(peak of the init containers, sum of the others)."""
        inits: defaultdict[GpuUuid, list[Load]] = defaultdict(list)
        apps: defaultdict[GpuUuid, list[Load]] = defaultdict(list)
        first = self.inits if self.is_past_init else 0
        for position, group in enumerate(self.groups[first:], first):
            for one in group:
                found = inits if position < self.inits else apps
                found[one.uuid].append(Load(1, one.memory_mib, one.core_percent))
        # Init containers run one after another, before the others.
        sums = {uuid: sum(apps[uuid], Load()) for uuid in {*inits, *apps}}
        return {uuid: Load(*map(max, apps, Load(), *inits[uuid])) for uuid, apps in sums.items()}


class Usage:
    """The reservations of all pods that count, by UID."""

    def __init__(self) -> None:
        self._reservations: dict[str, Reservation] = {}

    def observe(self, pod: Json) -> bool:
        """Take in a pod that was added or changed. Returns whether it holds less than before.

        The groups are read when the pod is first seen, with the init containers' peak; those that
        cannot be decoded do not count. The peak ends with the first later event in which all init
        containers have succeeded, and never comes back.
        """
        metadata, uid = pod["metadata"], pod["metadata"]["uid"]
        noted = metadata.get("annotations") or {}
        node, known = noted.get(annotations.VGPU_NODE), self._reservations.get(uid)
        if pod["status"].get("phase") in TERMINAL:
            return self.forget(uid)
        if node is None or metadata.get("deletionTimestamp"):
            return False
        if known is None:
            with contextlib.suppress(MalformedText):
                groups = decode_pod_devices(noted.get(annotations.ALLOCATED, ""))
                namespace = metadata.get("namespace", "")
                found = Reservation(node, groups, model.init_count(pod), namespace=namespace)
                self._reservations[uid] = found
        elif not known.is_past_init:
            # Its init phase is over once every init container that has a status ended with 0.
            told = pod["status"].get("initContainerStatuses") or ()
            ended = [((one.get("state") or {}).get("terminated") or {}) for one in told]
            if ended and all(end.get("exitCode") == 0 for end in ended):
                # A late watch event can still have the node of an earlier placement.
                self._reservations[uid] = replace(known, is_past_init=True)
                return True
        return False

    def reserve(self, uid: str, reservation: Reservation) -> None:
        """Count a pod that was just placed. It replaces the pod's earlier reservation."""
        self._reservations[uid] = reservation

    def forget(self, uid: str) -> bool:
        """Stop counting a pod. Returns whether it counted."""
        return self._reservations.pop(uid, None) is not None

    def held(self, namespace: str) -> Load:
        """The sum that the pods of a namespace hold on all GPUs."""
        mine = (one for one in self._reservations.values() if one.namespace == namespace)
        return sum((load for one in mine for load in one.loads().values()), Load())

    def loads(self, node: str) -> Mapping[GpuUuid, Load]:
        """The use of each GPU of a node."""
        total: defaultdict[GpuUuid, Load] = defaultdict(Load)
        for reservation in self._reservations.values():
            if reservation.node == node:
                for uuid, load in reservation.loads().items():
                    total[uuid] += load
        return total


class Quotas:
    """The limits of all namespaces. If several quotas limit one resource, the last seen counts.

    `memory_factor` multiplies limits on memory, like requests.
    """

    def __init__(self, usage: Usage, memory_factor: int) -> None:
        self._usage = usage
        self._factor = max(memory_factor, 1)
        self._limits: dict[tuple[str, str], dict[str, int]] = {}

    def see(self, kind: str, quota: Json) -> None:
        """Take in a ResourceQuota that was ADDED, MODIFIED or DELETED."""
        key = (quota["metadata"]["namespace"], quota["metadata"]["name"])
        self._limits.pop(key, None)
        if kind != "DELETED":
            # A value that is not a whole number is ignored.
            hard = (quota.get("spec") or {}).get("hard") or {}
            found = {one: parse_quantity(hard.get(f"limits.{one}")) for one in (MEMORY, CORES)}
            self._limits[key] = {one: most for one, most in found.items() if most is not None}

    def fits(self, namespace: str, memory_mib: int, core_percent: int) -> bool:
        """Whether the namespace may hold this much more. A limit of 0 blocks all."""
        limits: dict[str, int] = {}
        for (where, _), hard in self._limits.items():
            limits |= hard if where == namespace else {}
        held = self._usage.held(namespace) if limits else Load()
        memory = limits.get(MEMORY, float("inf")) * self._factor
        cores = limits.get(CORES, float("inf"))
        return held.memory_mib + memory_mib <= memory and held.core_percent + core_percent <= cores
