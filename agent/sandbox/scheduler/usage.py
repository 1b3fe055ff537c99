"""What the scheduler knows of pods: their use of GPUs, and quotas.

Sources: HAMi v2.10 pkg/scheduler/scheduler.go:onAddPod/onUpdatePod/onDelPod, pods.go,
pkg/device/quota.go.
Kubernetes counts the requests of pods against a ResourceQuota; HAMi counts what it gave them.
"""

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from agent import cluster as annotations
from agent.errors import MalformedText
from agent.hami.annotations import decode_pod_devices
from agent.model import GpuUuid, Share
from agent.sandbox.scheduler.model import CORES, MEMORY, Load, init_count, parse_quantity
from agent.sandbox.store import Json

TERMINAL: Final = frozenset({"Succeeded", "Failed"})
_PREFIX: Final = "limits."
_KEYS: Final = {_PREFIX + MEMORY: MEMORY, _PREFIX + CORES: CORES}


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
        running: defaultdict[GpuUuid, Load] = defaultdict(Load)
        for group in self.groups[self.inits :]:
            for share in group:
                running[share.uuid] += Load(0, share.memory_mib, share.core_percent)
            for uuid in {share.uuid for share in group}:
                running[uuid] += Load(slots=1)
        if self.is_past_init:
            return running
        peaks: dict[GpuUuid, Load] = {}
        for group in self.groups[: self.inits]:
            for share in group:
                peak = Load(1, share.memory_mib, share.core_percent)
                peaks[share.uuid] = peaks.get(share.uuid, Load()).greater(peak)
        return {
            uuid: peaks.get(uuid, Load()).greater(running.get(uuid, Load()))
            for uuid in {*peaks, *running}
        }


class Usage:
    """The reservations of all pods that count, by UID."""

    def __init__(self) -> None:
        self._reservations: dict[str, Reservation] = {}

    def __contains__(self, uid: str) -> bool:
        return uid in self._reservations

    def observe(self, pod: Json) -> None:
        """Take in a pod that was added or changed. Groups that cannot be decoded do not count.

        The groups are read when the pod is first seen, with the init containers' peak. The peak
        ends with the first later event in which all of them have succeeded, and never comes back.
        """
        metadata, uid = pod["metadata"], pod["metadata"]["uid"]
        noted = metadata.get("annotations") or {}
        node, known = noted.get(annotations.VGPU_NODE), self._reservations.get(uid)
        is_deleted = bool(metadata.get("deletionTimestamp"))
        if pod["status"].get("phase") in TERMINAL:
            self.forget(uid)
        elif node is None or is_deleted:
            return
        elif known is not None:
            # A late watch event can still have the node of an earlier placement.
            past = known.is_past_init or has_passed_init(pod)
            self._reservations[uid] = replace(known, is_past_init=past)
        else:
            with contextlib.suppress(MalformedText):
                groups = decode_pod_devices(noted.get(annotations.ALLOCATED, ""))
                namespace = metadata.get("namespace", "")
                found = Reservation(node, groups, init_count(pod), namespace=namespace)
                self._reservations[uid] = found

    def reserve(self, uid: str, reservation: Reservation) -> None:
        """Count a pod that was just placed. It replaces the pod's earlier reservation."""
        self._reservations[uid] = reservation

    def forget(self, uid: str) -> None:
        """Stop counting a pod."""
        self._reservations.pop(uid, None)

    def held(self, namespace: str) -> Load:
        """The sum that the pods of a namespace hold on all GPUs."""
        total = Load()
        for reservation in self._reservations.values():
            if reservation.namespace == namespace:
                total = sum(reservation.loads().values(), total)
        return total

    def loads(self, node: str) -> Mapping[GpuUuid, Load]:
        """The use of each GPU of a node."""
        total: defaultdict[GpuUuid, Load] = defaultdict(Load)
        for reservation in self._reservations.values():
            if reservation.node == node:
                for uuid, load in reservation.loads().items():
                    total[uuid] += load
        return total


def has_passed_init(pod: Json) -> bool:
    """True once every init container that has a status ended with exit code 0."""
    statuses = pod["status"].get("initContainerStatuses") or ()
    ended = [((status.get("state") or {}).get("terminated") or {}) for status in statuses]
    return bool(ended) and all(end.get("exitCode") == 0 for end in ended)


class Quotas:
    """The limits of all namespaces. If several quotas limit one resource, the last seen counts.

    `memory_factor` multiplies limits on memory, like requests.
    """

    def __init__(self, usage: Usage, memory_factor: int) -> None:
        self._usage = usage
        self._factor = max(memory_factor, 1)
        self._limits: dict[tuple[str, str], int] = {}
        self._seen: dict[tuple[str, str], Json] = {}

    def see(self, kind: str, quota: Json) -> None:
        """Take in a ResourceQuota that was ADDED, MODIFIED or DELETED.

        Its former limits end, even if another quota has the same limit.
        """
        namespace, name = quota["metadata"]["namespace"], quota["metadata"]["name"]
        for resource in _hard(self._seen.pop((namespace, name), {})):
            self._limits.pop((namespace, resource), None)
        if kind != "DELETED":
            self._seen[namespace, name] = quota
            for resource, limit in _hard(quota).items():
                self._limits[namespace, resource] = limit

    def fits(self, namespace: str, memory_mib: int, core_percent: int) -> bool:
        """Whether the namespace may hold this much more. A limit of 0 blocks all."""
        memory = self._limits.get((namespace, MEMORY))
        cores = self._limits.get((namespace, CORES))
        if memory is None and cores is None:
            return True
        held = self._usage.held(namespace)
        if memory is not None and held.memory_mib + memory_mib > memory * self._factor:
            return False
        return cores is None or held.core_percent + core_percent <= cores


def _hard(quota: Json) -> dict[str, int]:
    """HAMi's limits in the quota. A value that is not a whole number is ignored."""
    hard = (quota.get("spec") or {}).get("hard") or {}
    found = {_KEYS[key]: parse_quantity(value) for key, value in hard.items() if key in _KEYS}
    return {resource: limit for resource, limit in found.items() if limit is not None}
