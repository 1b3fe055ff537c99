"""Binds a pod: the annotations of the filter, the node lock, the binding.

Source: HAMi v2.10 pkg/scheduler/scheduler.go:Bind, pkg/device/nvidia/device.go:LockNode.
"""

import random
from dataclasses import dataclass, field

import structlog

from agent.codec.pod import encode_pod_devices
from agent.core.cluster import annotations
from agent.core.ports import Clock
from agent.sandbox.api_errors import Json, StatusError
from agent.sandbox.scheduler.cluster import SchedulerCluster
from agent.sandbox.scheduler.events import Events
from agent.sandbox.scheduler.filter import NORMAL, WARNING, Groups, Notice
from agent.sandbox.scheduler.lock import LockError, NodeLocks
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.requests import init_count, pod_requests
from agent.sandbox.scheduler.usage import Informers, Usage

log = structlog.get_logger(__name__)


class BindError(Exception):
    """The pod was not bound; the text is the scheduler's."""


def placement_patch(node: str, groups: Groups, seconds: int) -> Json:
    """The patch that the filter writes on a placed pod; `seconds` is Unix time."""
    text = encode_pod_devices(groups)
    return {
        "metadata": {
            "annotations": {
                annotations.VGPU_NODE: node,
                annotations.VGPU_TIME: str(seconds),
                annotations.TO_ALLOCATE: text,
                annotations.ALLOCATED: text,
            },
            "labels": {annotations.VGPU_NODE: node},
        }
    }


@dataclass(frozen=True, slots=True)
class Memory:
    """The scheduler's local state: pods and nodes as last seen, and the use of GPUs."""

    usage: Usage = field(default_factory=Usage)
    seen: Informers = field(default_factory=Informers)


class Binder:
    """The bind verb over a cluster."""

    def __init__(
        self,
        cluster: SchedulerCluster,
        clock: Clock,
        settings: SchedulerSettings,
        rng: random.Random,
        events: Events,
        memory: Memory,
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._settings = settings
        self._events = events
        self._usage = memory.usage
        self._seen = memory.seen
        self._locks = NodeLocks(cluster, clock, rng, settings.lock_timeout)

    async def bind(self, namespace: str, name: str, uid: str, node_name: str) -> None:
        """Lock the node, mark the pod as allocating, and bind it.

        As in HAMi since 2.5, the clock for `hami.io/bind-time` is read first, although each later
        request may wait in the client's queue without a deadline. Only the API server checks the
        UID of the pod and whether it is bound.

        Raises:
            BindError: a step failed; the pod's lock, also of an earlier bind, is released.
        """
        pod = self._seen.get("pods", namespace, name)
        if pod is None:
            self._usage.forget(uid)
            raise BindError(f'pod "{name}" not found')
        if self._seen.get("nodes", "", node_name) is None:
            await self._say(pod, WARNING, "BindingFailed", f"failed to get node {node_name}")
            self._usage.forget(pod["metadata"]["uid"])
            raise BindError(f'node "{node_name}" not found')
        marks = {
            annotations.BIND_PHASE: annotations.PHASE_ALLOCATING,
            annotations.BIND_TIME: str(int(self._clock.now().timestamp())),
        }
        try:
            if self._needs_lock(pod):
                await self._locks.take(node_name, pod)
            patch = {"metadata": {"annotations": marks}}
            await self._cluster.patch("pods", namespace, name, patch)
            await self._cluster.bind(namespace, name, uid, node_name)
        except (LockError, StatusError) as failure:
            await self._release(pod, node_name)
            await self._say(pod, WARNING, "BindingFailed", str(failure))
            raise BindError(str(failure)) from failure
        text = f"Successfully binding node [{node_name}] to {namespace}/{name}"
        await self._say(pod, NORMAL, "BindingSucceed", text)

    async def _release(self, pod: Json, node_name: str) -> None:
        """Release the pod's lock. If that fails, only the lock's timeout ends it."""
        if not self._needs_lock(pod):
            return
        try:
            await self._locks.release(node_name, pod)
        except (LockError, StatusError) as failure:
            log.warning("scheduler.lock_not_released", node=node_name, err=str(failure))

    def _needs_lock(self, pod: Json) -> bool:
        """Whether the pod takes the lock: not if only init containers request GPUs."""
        return any(pod_requests(pod, self._settings)[init_count(pod) :])

    async def _say(self, pod: Json, kind: str, reason: str, message: str) -> None:
        await self._events.record(pod, Notice(kind, reason, message))
