"""Placing a pod: the annotations of the filter, the node lock, the binding.

Source: HAMi v2.10 pkg/scheduler/scheduler.go:Bind, pkg/util/nodelock/nodelock.go.
"""

import asyncio
import enum
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import structlog

from agent.codec.nodelock import encode_node_lock
from agent.codec.pod import encode_pod_devices
from agent.core import annotations
from agent.core.ports import Clock
from agent.kit.backoff import Backoff
from agent.sandbox.api_errors import ConflictError, Json, NotFoundError, StatusError
from agent.sandbox.scheduler.cluster import Cluster
from agent.sandbox.scheduler.events import Events
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

log = structlog.get_logger(__name__)

_LOCK_TRIES: Final = 5
_LOCK_PAUSES: Final = (0.1, 0.2, 0.4, 0.8)
_LOCK_JITTER: Final = 0.5
_LATE: Final = "the API server was too slow"
_Marks = Mapping[str, str | None]


class BindError(Exception):
    """The pod was not bound; the text is the scheduler's."""


class _Fate(enum.Enum):
    """What the API server says of a pod whose binding failed here."""

    BOUND = "it is bound to the node all the same"
    NOT_BOUND = "it is not on the node"
    IN_DOUBT = "nobody can tell whose the node's lock is"


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
    """The bind verb over a cluster."""

    def __init__(
        self,
        cluster: Cluster,
        clock: Clock,
        settings: SchedulerSettings,
        usage: Usage,
        rng: random.Random,
        events: Events,
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._settings = settings
        self._usage = usage
        self._rng = rng
        self._events = events

    async def bind(
        self, namespace: str, name: str, uid: str, node_name: str, *, until: float | None = None
    ) -> None:
        """Lock the node, mark the pod as allocating, and bind it.

        `until`: when to give up and roll back, on the loop's clock. Other than HAMi, which fails
        such a bind and gives the lock away: a pod that has this node already is bound, and its
        lock stays as it is. The lock also stays while nobody knows what became of the binding;
        the pod's next bind finds it its own, and the lock's timeout ends it.

        Raises:
            BindError: any step failed; a lock that was taken is given back.
        """
        try:
            async with asyncio.timeout_at(until):
                pod = await self._find("pods", namespace, name, uid)
                await self._find_node(pod, uid, node_name)
        except TimeoutError as late:
            raise BindError(_LATE) from late
        if await self._is_bound(pod, uid, node_name):
            return
        try:
            async with asyncio.timeout_at(until):
                await self._lock(pod, node_name)
                await self._mark(pod, uid)
                await self._cluster.bind(namespace, name, uid, node_name)
        except (LockError, StatusError, TimeoutError) as failure:
            await self._settle(pod, node_name, failure)
        text = f"Successfully binding node [{node_name}] to {namespace}/{name}"
        await self._say(pod, NORMAL, "BindingSucceed", text)

    async def _find_node(self, pod: Json, uid: str, node_name: str) -> None:
        try:
            await self._find("nodes", "", node_name, uid)
        except BindError as error:
            if isinstance(error.__cause__, NotFoundError):
                await self._say(pod, WARNING, "BindingFailed", f"failed to get node {node_name}")
            raise

    async def _is_bound(self, pod: Json, uid: str, node_name: str) -> bool:
        """Whether an earlier bind did it. Raises BindError: the pod can never get this node."""
        held, name = pod["metadata"]["uid"], pod["metadata"]["name"]
        if held != uid:
            self._usage.forget(uid)
            raise BindError(f'pod "{name}" not found: the one of that name has UID {held}')
        taken = pod["spec"].get("nodeName")
        if taken and taken != node_name:
            text = f'pod {name} is already assigned to node "{taken}"'
            await self._say(pod, WARNING, "BindingFailed", text)
            raise BindError(text)
        return bool(taken)

    async def _settle(
        self, pod: Json, node_name: str, failure: LockError | StatusError | TimeoutError
    ) -> None:
        """After a step failed: return if the pod has the node all the same, else roll back.

        Raises:
            BindError: the pod is not bound, as far as anybody knows.
        """
        without_lock = isinstance(failure, LockError)
        fate = _Fate.NOT_BOUND if without_lock else await self._look(pod, node_name)
        if fate is _Fate.BOUND:
            return
        text = str(failure) or _LATE
        if fate is _Fate.NOT_BOUND:
            await self._release(pod, node_name)
        else:
            log.warning("scheduler.lock_kept", node=node_name, err=text)
        await self._say(pod, WARNING, "BindingFailed", text)
        raise BindError(text) from failure

    async def _look(self, pod: Json, node_name: str) -> _Fate:
        try:
            now = await self._cluster.get("pods", *_owner(pod))
        except NotFoundError:
            return _Fate.NOT_BOUND
        except StatusError:
            return _Fate.IN_DOUBT
        if now["spec"].get("nodeName") != node_name:
            return _Fate.NOT_BOUND
        is_same = now["metadata"]["uid"] == pod["metadata"]["uid"]
        return _Fate.BOUND if is_same else _Fate.IN_DOUBT

    async def _find(self, resource: str, namespace: str, name: str, uid: str) -> Json:
        """The pod or its node; when that is gone, what pod `uid` held is forgotten."""
        try:
            return await self._cluster.get(resource, namespace, name)
        except NotFoundError as gone:
            self._usage.forget(uid)
            raise BindError(f'{resource.removesuffix("s")} "{name}" not found') from gone
        except StatusError as failure:
            raise BindError(str(failure)) from failure

    async def _lock(self, pod: Json, node_name: str) -> None:
        """Take the lock; a pod whose only GPU is an init container's takes none."""
        if not any(pod_requests(pod, self._settings)[init_count(pod) :]):
            return
        timeout, owner = self._settings.lock_timeout, _owner(pod)

        async def take(held: str | None) -> _Marks:
            now = self._clock.now()
            try:
                claim = await claim_lock(held, owner, now, timeout, self._is_alive)
            except ContentionError as taken:
                span = _go_duration(int(timeout))
                text = f"node {node_name} has been locked within {span}: node lock contention"
                raise ContentionError(text) from taken
            if claim is Claim.HOLD:
                return {}
            return {annotations.MUTEX_LOCK: encode_node_lock(now, *owner)}

        await self._edit_lock(node_name, take)

    async def _release(self, pod: Json, node_name: str) -> None:
        """Give back what this pod holds; where that fails the lock's timeout must do it."""

        async def give_back(held: str | None) -> _Marks:
            return {annotations.MUTEX_LOCK: None} if is_released_by(held, _owner(pod)) else {}

        try:
            await self._edit_lock(node_name, give_back)
        except StatusError as failure:
            log.warning("scheduler.lock_not_released", node=node_name, err=str(failure))

    async def _edit_lock(
        self, node_name: str, decide: Callable[[str | None], Awaitable[_Marks]]
    ) -> None:
        """Write what `decide` makes of the lock's text, if the Node is still as it was read.

        A Node that changed in between is read and decided about again, five times in all
        (HAMi pkg/util/nodelock/nodelock.go:SetNodeLock).
        """
        pauses = Backoff(_LOCK_PAUSES, _LOCK_JITTER, self._rng)
        for tries_left in reversed(range(_LOCK_TRIES)):
            metadata = (await self._cluster.get("nodes", "", node_name))["metadata"]
            marks = await decide((metadata.get("annotations") or {}).get(annotations.MUTEX_LOCK))
            if not marks:
                return
            patch, version = {"metadata": {"annotations": marks}}, metadata["resourceVersion"]
            try:
                await self._cluster.patch("nodes", "", node_name, patch, version=version)
            except ConflictError:
                if not tries_left:
                    raise
                await asyncio.sleep(pauses.next())
            else:
                return

    async def _mark(self, pod: Json, uid: str) -> None:
        marks = {
            annotations.BIND_PHASE: annotations.PHASE_ALLOCATING,
            annotations.BIND_TIME: str(int(self._clock.now().timestamp())),
        }
        patch = {"metadata": {"annotations": marks}}
        await self._cluster.patch("pods", *_owner(pod), patch, uid=uid)

    async def _is_alive(self, namespace: str, name: str) -> bool:
        try:
            await self._cluster.get("pods", namespace, name)
        except NotFoundError:
            return False
        return True

    async def _say(self, pod: Json, kind: str, reason: str, message: str) -> None:
        await self._events.record(pod, Notice(kind, reason, message))


def _owner(pod: Json) -> tuple[str, str]:
    return pod["metadata"]["namespace"], pod["metadata"]["name"]


def _go_duration(seconds: int) -> str:
    """A duration as Go prints it, such as `5m0s`."""
    hours, rest = divmod(seconds, 3600)
    minutes, last = divmod(rest, 60)
    if hours:
        return f"{hours}h{minutes}m{last}s"
    return f"{minutes}m{last}s" if minutes else f"{last}s"
