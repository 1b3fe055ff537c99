"""HAMi's part of scheduling: its state of nodes and pods, the node lock, and its verbs.

Source: HAMi v2.10 pkg/scheduler/scheduler.go, pkg/device/nvidia/device.go:LockNode,
pkg/util/nodelock/nodelock.go (LockNode, SetNodeLock, ReleaseNodeLock). The number and order of the
requests are HAMi's, because each waits in the client's queue.
"""

import asyncio
import datetime as dt
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NoReturn

import structlog

from agent import cluster as annotations
from agent.cluster import NodeLock
from agent.errors import MalformedText
from agent.hami.annotations import TYPE_WORD, decode_node_lock, encode_stamp
from agent.kit.tasks import Backoff
from agent.model import Share
from agent.ports import Clock
from agent.sandbox.scheduler.cluster import EventRecorder, QueuedCluster, SchedulerCluster
from agent.sandbox.scheduler.filter import NORMAL, WARNING, Filtered, Groups, Notice, filter_pod
from agent.sandbox.scheduler.model import COUNT, SchedulerSettings, init_count, pod_requests
from agent.sandbox.scheduler.registry import REQUESTING, Registry
from agent.sandbox.scheduler.usage import Quotas, Reservation, Usage
from agent.sandbox.scheduler.webhook import WebhookAdmission, review_pod
from agent.sandbox.store import Json, NotFoundError, StatusError

_PAUSES: Final = (0.1, 0.2, 0.4, 0.8)
"""Between the five tries of a write, as said in _STRATEGY."""
_JITTER: Final = 0.5
_STRATEGY: Final = "{Duration:100ms Factor:2 Jitter:0.5 Steps:5 Cap:0s}"
LOCK_TIMEOUT: Final = 300
"""Seconds until a lock may be taken over."""
_CONTENTION: Final = ": node lock contention"
log = structlog.get_logger(__name__)
REGISTER_INTERVAL: Final = 15.0


def encode_node_lock(stamp: dt.datetime, namespace: str, name: str) -> str:
    """Encode a lock as the scheduler does, in whole seconds of UTC."""
    return f"{encode_stamp(stamp)},{namespace},{name}"


def encode_pod_devices(groups: Sequence[Sequence[Share]]) -> str:
    """Encode the devices annotation: every device ends with `:`, every group with `;`.

    Source: HAMi v2.10 pkg/device/devices.go, EncodePodSingleDevice.
    """
    return "".join(
        "".join(
            f"{share.uuid},{TYPE_WORD},{share.memory_mib},{share.core_percent}:" for share in group
        )
        + ";"
        for group in groups
    )


class LockError(Exception):
    """The lock cannot be taken; the text is the scheduler's."""


class ContentionError(LockError):
    """Another existing pod holds the lock; it is not tried again."""


class NodeLocks:
    """Takes and releases the locks of nodes for pods.

    Writes to the lock of one node are serialised; the first read of `take` is not.
    """

    def __init__(self, cluster: SchedulerCluster, clock: Clock, rng: random.Random) -> None:
        self._cluster = cluster
        self._clock = clock
        self._rng = rng
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def take(self, node_name: str, pod: Json) -> None:
        """Lock the node for the pod. A lock with the pod's namespace and name counts as its own.

        Raises:
            ContentionError: another existing pod took it less than LOCK_TIMEOUT ago.
            LockError: the text is not a lock, or it could not be written.
            StatusError: the API server refuses the read.
        """
        text = _lock_of(await self._node(node_name))
        if text is not None:
            lock = parse_lock(text)
            if (self._clock.now() - lock.stamp).total_seconds() <= LOCK_TIMEOUT:
                if (lock.namespace, lock.name) == _owner(pod):
                    return
                if lock.owner is None or await self._is_alive(*lock.owner):
                    said = f"node {node_name} has been locked within 5m0s"
                    raise ContentionError(said + _CONTENTION)
            await self._remove(node_name, pod, whoever=True)
        await self._set(node_name, pod)

    async def release(self, node_name: str, pod: Json) -> None:
        """Remove the pod's lock, or one without an owner; any other stays.

        Raises:
            LockError: it could not be written.
            StatusError: the API server refuses the read.
        """
        await self._remove(node_name, pod, whoever=False)

    async def _set(self, node_name: str, pod: Json) -> None:
        """Write the lock if there is none. Its time is taken before the wait in the queue."""
        owner = _owner(pod)

        async def write() -> None:
            node = await self._node(node_name)
            held = _lock_of(node)
            if held is None:
                await self._patch(node, encode_node_lock(self._clock.now(), *owner))
            elif not held.endswith(",{},{}".format(*owner)):
                raise ContentionError(f"node {node_name} is locked")

        async with self._turns[node_name]:
            if _lock_of(await self._node(node_name)) is not None:
                raise ContentionError(f"node {node_name} is locked{_CONTENTION}")
            await self._insist("set", node_name, write)

    async def _remove(self, node_name: str, pod: Json, *, whoever: bool) -> None:
        """Remove the lock as first read, if it is the pod's, without an owner, or `whoever`."""
        ending = ",{},{}".format(*_owner(pod))
        async with self._turns[node_name]:
            first = _lock_of(await self._node(node_name))
            if first is None or not (whoever or "," not in first or first.endswith(ending)):
                return

            async def write() -> None:
                node = await self._node(node_name)
                held = _lock_of(node)
                if held is None:
                    return
                by_text = whoever or "," not in held
                if (held == first) if by_text else held.endswith(ending):
                    await self._patch(node, None)

            await self._insist("release", node_name, write)

    async def _insist(
        self, verb: str, node_name: str, write: Callable[[], Awaitable[None]]
    ) -> None:
        """Try a refused write up to five times in all. ContentionError ends it at once."""
        pauses = Backoff(_PAUSES, _JITTER, self._rng)
        said = f"failed to {verb} node lock (node={node_name}, retry strategy={_STRATEGY})"
        for tries_left in reversed(range(len(_PAUSES) + 1)):
            try:
                return await write()
            except ContentionError as taken:
                raise ContentionError(f"{said}: {taken}{_CONTENTION}") from taken
            except StatusError as refusal:
                if not tries_left:
                    raise LockError(f"{said}: {refusal}") from refusal
                await asyncio.sleep(pauses.next())
        return None

    async def _node(self, node_name: str) -> Json:
        return await self._cluster.request("get", "nodes", "", node_name)

    async def _patch(self, node: Json, text: str | None) -> None:
        metadata = node["metadata"]
        patch = {"metadata": {"annotations": {annotations.MUTEX_LOCK: text}}}
        version = metadata["resourceVersion"]
        await self._cluster.request("patch", "nodes", "", metadata["name"], patch, version=version)

    async def _is_alive(self, namespace: str, name: str) -> bool:
        try:
            await self._cluster.request("get", "pods", namespace, name)
        except NotFoundError:
            return False
        return True


def parse_lock(text: str) -> NodeLock:
    """Parse a lock. Raises LockError, whose text is that of HAMi and of Go."""
    stamp, *names = text.split(",")
    if len(names) not in (0, 2):
        parts = len(names) + 1
        raise LockError(f"malformed lock annotation: expected 3 parts, got {parts} from {text}")
    try:
        return decode_node_lock(text)
    except MalformedText as malformed:
        # Go names the first part that is wrong; this one is right for a text without a year.
        layout, wrong = "2006-01-02T15:04:05Z07:00", f'cannot parse "{stamp}" as "2006"'
        raise LockError(f'parsing time "{stamp}" as "{layout}": {wrong}') from malformed


def _lock_of(node: Json) -> str | None:
    text: str | None = (node["metadata"].get("annotations") or {}).get(annotations.MUTEX_LOCK)
    return text


def _owner(pod: Json) -> tuple[str, str]:
    return pod["metadata"]["namespace"], pod["metadata"]["name"]


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


class HamiVerbs:
    """One HAMi scheduler: its state and its verbs.

    `eager`: ingest a changed Node at once, which HAMi does only every 15 s. All requests go through
    one client queue, also Events, which are sent while `run` runs. A decision does not wait, so
    verbs of several pods may run at the same time.
    """

    def __init__(
        self,
        cluster: SchedulerCluster,
        clock: Clock,
        rng: random.Random,
        settings: SchedulerSettings,
        *,
        eager: bool,
    ) -> None:
        self.settings = settings
        self.usage = Usage()
        self.quotas = Quotas(self.usage, settings.memory_factor)
        self.queue = QueuedCluster(cluster, settings.kube_qps, settings.kube_burst)
        self._recorder = EventRecorder(self.queue, clock, settings.scheduler_name)
        self._events: asyncio.Queue[tuple[Json, Notice]] = asyncio.Queue()
        self._clock = clock
        self._rng = rng
        self._eager = eager
        self._registry = Registry()
        self._registering = asyncio.Lock()
        """HAMi's filter waits while nodes are ingested; its bind does not."""
        self._locks = NodeLocks(self.queue, clock, rng)
        self._pods: dict[tuple[str, str], Json] = {}
        self._signatures: dict[str, object] = {}
        """Pods and Nodes as last seen: the bind of HAMi 2.9 and later reads them from here."""

    async def run(self) -> NoReturn:
        """Send Events for ever, one after another. Events that wait at the end are lost."""
        while True:
            await self._recorder.record(*await self._events.get())

    async def see_node(self, kind: str, node: Json) -> bool:
        """Take in an event of a Node. Returns whether it can make a pod fit."""
        name, signature = node["metadata"]["name"], _signature(node)
        if kind == "DELETED":
            self._registry.forget(name)
            self._signatures.pop(name, None)
            return False
        if self._signatures.get(name) == signature:
            return False
        self._signatures[name] = signature
        if kind == "ADDED" or self._eager:
            async with self._registering:
                await self._ingest(node)
        return True

    def see_pod(self, kind: str, pod: Json) -> None:
        """Take in an event of a pod."""
        if kind == "DELETED":
            self._pods.pop(_owner(pod), None)
            self.usage.forget(pod["metadata"]["uid"])
        else:
            self._pods[_owner(pod)] = pod
            self.usage.observe(pod)

    async def ingest(self, nodes: Sequence[Json]) -> bool:
        """Ingest all nodes, as HAMi does every 15 s. Returns whether an offer changed."""
        before = self._registry.changes
        async with self._registering:
            for node in nodes:
                await self._ingest(node)
        return self._registry.changes != before

    async def filter(self, pod: Json, candidates: Sequence[str]) -> Filtered:
        """Choose a node for the pod, reserve its shares there and write them on the pod.

        The write goes by name without a UID, so it can hit a pod that was created again meanwhile.

        Raises:
            StatusError: the pod could not be written; nothing is reserved.
        """
        async with self._registering:
            pass  # wait while nodes are ingested
        metadata = pod["metadata"]
        filtered = self._decide(pod, candidates)
        if filtered.groups is not None:
            seconds = int(self._clock.now().timestamp())
            changes = placement_patch(filtered.nodes[0], filtered.groups, seconds)
            try:
                await self.queue.request(
                    "patch", "pods", metadata["namespace"], metadata["name"], changes
                )
            except StatusError as refusal:
                self.usage.forget(metadata["uid"])
                self._tell(pod, WARNING, "FilteringFailed", str(refusal))
                raise
        for notice in filtered.notices:
            self._events.put_nowait((pod, notice))
        return filtered

    def review(self, pod: Json) -> WebhookAdmission:
        """The webhook's answer for a new pod."""
        return review_pod(pod, self.settings, self.quotas)

    async def bind(self, namespace: str, name: str, uid: str, node_name: str) -> None:
        """Lock the node, mark the pod as allocating, and bind it.

        As in HAMi since 2.5, the clock for `hami.io/bind-time` is read first, although each later
        request may wait in the client's queue without a deadline. Only the API server checks the
        UID of the pod and whether it is bound.

        Raises:
            BindError: a step failed; the pod's lock, also of an earlier bind, is released.
        """
        pod = self._pods.get((namespace, name))
        if pod is None:
            self.usage.forget(uid)
            raise BindError(f'pod "{name}" not found')
        if node_name not in self._signatures:
            self._tell(pod, WARNING, "BindingFailed", f"failed to get node {node_name}")
            self.usage.forget(pod["metadata"]["uid"])
            raise BindError(f'node "{node_name}" not found')
        marks = {
            annotations.BIND_PHASE: annotations.PHASE_ALLOCATING,
            annotations.BIND_TIME: str(int(self._clock.now().timestamp())),
        }
        try:
            if self._needs_lock(pod):
                await self._locks.take(node_name, pod)
            patch = {"metadata": {"annotations": marks}}
            await self.queue.request("patch", "pods", namespace, name, patch)
            binding = {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": name, "namespace": namespace, "uid": uid},
                "target": {"apiVersion": "v1", "kind": "Node", "name": node_name},
            }
            await self.queue.request("bind", "pods", namespace, name, binding)
        except (LockError, StatusError) as failure:
            await self._release(pod, node_name)
            self._tell(pod, WARNING, "BindingFailed", str(failure))
            raise BindError(str(failure)) from failure
        text = f"Successfully binding node [{node_name}] to {namespace}/{name}"
        self._tell(pod, NORMAL, "BindingSucceed", text)

    def _tell(self, pod: Json, kind: str, reason: str, text: str) -> None:
        self._events.put_nowait((pod, Notice(kind, reason, text)))

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
        return any(pod_requests(pod, self.settings)[init_count(pod) :])

    def _decide(self, pod: Json, candidates: Sequence[str]) -> Filtered:
        """Choose and reserve without a wait, so that the next decision counts this one."""
        uid = pod["metadata"]["uid"]
        self.usage.forget(uid)
        states = {name: self._registry.state(name, self.usage.loads(name)) for name in candidates}
        registered = {name: state for name, state in states.items() if state is not None}
        filtered = filter_pod(pod, candidates, registered, self.settings, self._rng, self.quotas)
        if filtered.groups is not None:
            namespace = pod["metadata"]["namespace"]
            held = Reservation(
                filtered.nodes[0], filtered.groups, init_count(pod), namespace=namespace
            )
            self.usage.reserve(uid, held)
        return filtered

    async def _ingest(self, node: Json) -> None:
        name = node["metadata"]["name"]
        writes = self._registry.ingest(node, self._clock.now())
        if not writes:
            return
        try:
            # As in HAMi, an unused read comes first.
            await self.queue.request("get", "nodes", "", name)
            patch = {"metadata": {"annotations": writes}}
            node = await self.queue.request("patch", "nodes", "", name, patch)
        except StatusError as refusal:  # written again at the next ingestion
            log.info("scheduler.handshake_lost", node=name, err=str(refusal))
        else:
            self._signatures[name] = _signature(node)


def is_closed(node: Json) -> bool:
    """Whether the Node is unschedulable."""
    return bool((node.get("spec") or {}).get("unschedulable"))


def _signature(node: Json) -> object:
    """The part of a Node whose change can make a pod fit or cause an ingestion."""
    noted = node["metadata"].get("annotations") or {}
    keys = (annotations.REGISTER, annotations.CORDON, annotations.MUTEX_LOCK)
    return (
        *(noted.get(key) for key in keys),
        REQUESTING in noted.get(annotations.HANDSHAKE, ""),
        ((node.get("status") or {}).get("allocatable") or {}).get(COUNT),
        is_closed(node),
    )
