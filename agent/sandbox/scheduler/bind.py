"""Placing a pod in the store: the annotations of the filter, the node lock, the binding.

Source: HAMi v2.10 pkg/scheduler/scheduler.go:Bind, pkg/util/nodelock/nodelock.go.
"""

from collections.abc import Mapping
from typing import Final

from agent.codec.nodelock import encode_node_lock
from agent.codec.pod import encode_pod_devices
from agent.core import annotations
from agent.core.ports import Clock
from agent.sandbox.api_errors import Json, NotFoundError, StatusError
from agent.sandbox.patching import merge_patch
from agent.sandbox.scheduler.events import EventRecorder
from agent.sandbox.scheduler.filter import NORMAL, WARNING, Notice
from agent.sandbox.scheduler.fit import Groups
from agent.sandbox.scheduler.lock import (
    Claim,
    ContentionError,
    LockError,
    claim_lock,
    is_released_by,
)
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.requests import init_count, pod_requests
from agent.sandbox.scheduler.usage import Usage
from agent.sandbox.store import ObjectStore

CONTENTION: Final = "node lock contention"


class BindError(Exception):
    """The pod was not bound; the text is the scheduler's."""

    @property
    def is_contention(self) -> bool:
        """True when another pod holds the node's lock."""
        return str(self).endswith(CONTENTION)


def placement_patch(node: str, groups: Groups, seconds: int) -> Json:
    """What the filter writes on the pod it placed; `seconds` is Unix time."""
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


class Binder:
    """The bind verb over the store."""

    def __init__(
        self, store: ObjectStore, clock: Clock, settings: SchedulerSettings, usage: Usage
    ) -> None:
        self._store = store
        self._clock = clock
        self._settings = settings
        self._usage = usage
        self._events = EventRecorder(store, clock, settings.scheduler_name)

    def bind(self, namespace: str, name: str, uid: str, node_name: str) -> None:
        """Lock the node, mark the pod as allocating, and bind it.

        Raises:
            BindError: any step failed; a lock that was taken is given back.
        """
        try:
            pod = self._store.get("pods", namespace, name)
        except NotFoundError as gone:
            self._usage.forget(uid)
            raise BindError(f'pod "{name}" not found') from gone
        try:
            self._store.get("nodes", "", node_name)
        except NotFoundError as gone:
            self._usage.forget(uid)
            self._say(pod, WARNING, "BindingFailed", f"failed to get node {node_name}")
            raise BindError(f'node "{node_name}" not found') from gone
        try:
            self._lock(pod, node_name)
            self._mark(pod)
            self._store.bind(namespace, name, node_name, uid=uid)
        except (LockError, StatusError) as failure:
            self._release(pod, node_name)
            self._say(pod, WARNING, "BindingFailed", str(failure))
            raise BindError(str(failure)) from failure
        text = f"Successfully binding node [{node_name}] to {namespace}/{name}"
        self._say(pod, NORMAL, "BindingSucceed", text)

    def _lock(self, pod: Json, node_name: str) -> None:
        """Take the lock; a pod whose only GPU is an init container's takes none."""
        if not any(pod_requests(pod, self._settings)[init_count(pod) :]):
            return
        timeout = self._settings.lock_timeout
        held, owner, now = self._read_lock(node_name), _owner(pod), self._clock.now()
        try:
            claim = claim_lock(held, owner, now, timeout, self._is_alive)
        except ContentionError as taken:
            span = _go_duration(int(timeout))
            text = f"node {node_name} has been locked within {span}: {CONTENTION}"
            raise ContentionError(text) from taken
        if claim is Claim.TAKE:
            self._write(node_name, {annotations.MUTEX_LOCK: encode_node_lock(now, *owner)})

    def _release(self, pod: Json, node_name: str) -> None:
        if is_released_by(self._read_lock(node_name), _owner(pod)):
            self._write(node_name, {annotations.MUTEX_LOCK: None})

    def _mark(self, pod: Json) -> None:
        marks = {
            annotations.BIND_PHASE: annotations.PHASE_ALLOCATING,
            annotations.BIND_TIME: str(int(self._clock.now().timestamp())),
        }
        patch = {"metadata": {"annotations": marks}}
        self._store.update("pods", *_owner(pod), lambda stored: merge_patch(stored, patch))

    def _read_lock(self, node_name: str) -> str | None:
        node = self._store.get("nodes", "", node_name)
        text: str | None = (node["metadata"].get("annotations") or {}).get(annotations.MUTEX_LOCK)
        return text

    def _write(self, node_name: str, marks: Mapping[str, str | None]) -> None:
        patch = {"metadata": {"annotations": marks}}
        self._store.update("nodes", "", node_name, lambda stored: merge_patch(stored, patch))

    def _is_alive(self, namespace: str, name: str) -> bool:
        try:
            self._store.get("pods", namespace, name)
        except NotFoundError:
            return False
        return True

    def _say(self, pod: Json, kind: str, reason: str, message: str) -> None:
        self._events.record(pod, Notice(kind, reason, message))


def _owner(pod: Json) -> tuple[str, str]:
    return pod["metadata"]["namespace"], pod["metadata"]["name"]


def _go_duration(seconds: int) -> str:
    """A duration as Go prints it, such as `5m0s`."""
    hours, rest = divmod(seconds, 3600)
    minutes, last = divmod(rest, 60)
    if hours:
        return f"{hours}h{minutes}m{last}s"
    return f"{minutes}m{last}s" if minutes else f"{last}s"
