"""HAMi's part of scheduling: its verbs, the node lock, its client's queue and its Events.

Source: HAMi v2.10 pkg/scheduler/scheduler.go, pkg/device/nvidia/device.go:LockNode,
pkg/util/nodelock/nodelock.go; client-go's util/flowcontrol with the values of HAMi's
`--kube-qps` and `--kube-burst`. The number and order of the requests are HAMi's, because each
waits in the client's queue.
"""

import asyncio
import contextlib
import datetime as dt
import hashlib
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from agent import cluster as annotations
from agent.cluster import HANDSHAKE
from agent.errors import MalformedText
from agent.hami.annotations import TYPE_WORD, decode_node_lock, encode_stamp
from agent.kit.tasks import Allowance
from agent.model import Share
from agent.ports import Clock
from agent.sandbox.apiserver_requests import merge_patch
from agent.sandbox.scheduler.filter import NORMAL, WARNING, Filtered, Groups, Notice, filter_pod
from agent.sandbox.scheduler.model import COUNT, SchedulerSettings, init_count, pod_requests
from agent.sandbox.scheduler.registry import Quotas, Registry, Reservation, Usage
from agent.sandbox.store import Json, NotFoundError, ObjectStore, StatusError

_PAUSES: Final = (0.1, 0.2, 0.4, 0.8)
"""Seconds between the five tries of a write."""
_CONTENTION: Final = ": node lock contention"
LOCK_TIMEOUT: Final = 300
"""Seconds until a lock may be taken over."""
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


class StoreCluster:
    """The reads and writes of the scheduler, over an object store in this process: none waits."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store

    async def request(self, verb: str, *where: str, body: Json | None = None) -> Json:
        """One request: get, create, a merge patch, or bind of a pod; returns the object.

        `where`: resource, namespace (ignored for nodes) and name. A patch that names a
        resourceVersion is only for this version of the object. Raises StatusError.
        """
        given, (resource, namespace, name) = body or {}, where
        match verb:
            case "get":
                return self.store.get(resource, namespace, name)
            case "create":
                return self.store.create(resource, given)
            case "patch":
                return self.store.update(
                    *(resource, namespace, name), lambda held: merge_patch(held, given)
                )
            case _:
                node, uid = given["target"]["name"], given["metadata"]["uid"]
                return self.store.bind(namespace, name, node, uid=uid)


def event_about(pod: Json, notice: Notice, component: str, now: dt.datetime) -> Json:
    """A new Event about a pod. Unlike client-go, nothing combines those of the same text."""
    metadata, stamp = pod["metadata"], encode_stamp(now)
    text = f"{metadata['uid']} {notice} {now.timestamp()}".encode()
    name = f"{metadata['name']}.{hashlib.sha256(text).hexdigest()[:16]}"
    about = {part: metadata[part] for part in ("namespace", "name", "uid")}
    return {
        "metadata": {"name": name, "namespace": metadata["namespace"]},
        "involvedObject": {"apiVersion": "v1", "kind": "Pod", **about},
        "type": notice.type,
        "reason": notice.reason,
        "message": notice.message,
        "source": {"component": component},
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
    }


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

    All requests go through one client queue, also Events, which are sent while `run` runs. A
    decision does not wait, so verbs of several pods may run at the same time.
    """

    def __init__(
        self, cluster: StoreCluster, clock: Clock, rng: random.Random, settings: SchedulerSettings
    ) -> None:
        self.settings = settings
        self.usage = Usage()
        self.quotas = Quotas(self.usage, settings.rules.memory_factor)
        self._cluster = cluster
        self._allowance = Allowance(settings.kube_burst, 1 / settings.kube_qps)
        self._events: asyncio.Queue[Json] = asyncio.Queue()
        self._clock = clock
        self._rng = rng
        self._registry = Registry()
        self._registering = asyncio.Lock()
        """HAMi's filter waits while nodes are ingested; its bind does not."""
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By node: writes to its lock are serialised; the first read of `_take_lock` is not."""
        self._pods: dict[tuple[str, str], Json] = {}
        self._nodes: dict[str, Json] = {}
        """Pods and Nodes as last seen: the bind of HAMi 2.9 and later reads them from here."""

    async def run(self) -> NoReturn:
        """Send Events for ever, one after another. Events that wait at the end are lost."""
        while True:
            event = await self._events.get()
            where = ("events", event["metadata"]["namespace"], event["metadata"]["name"])
            with contextlib.suppress(StatusError):
                await self.request("create", *where, body=event)

    async def request(self, verb: str, *where: str, body: Json | None = None) -> Json:
        """See `StoreCluster.request`. The client sends `kube_burst` at once, then `kube_qps`.

        Requests are sent in the order of their calls; one that waits delays only its caller.
        """
        now = asyncio.get_running_loop().time()
        wait = self._allowance.wait(now)
        self._allowance.spend(now)
        if wait:
            await asyncio.sleep(wait)
        return await self._cluster.request(verb, *where, body=body)

    async def see_node(self, kind: str, node: Json) -> bool:
        """Take in an event of a Node. Returns whether kube-scheduler tries refused pods again.

        As in HAMi, a Node that comes or goes makes it read all Nodes, and a changed one does not.
        """
        name = node["metadata"]["name"]
        before = self._nodes.pop(name, {"metadata": {}})
        if kind == "DELETED":
            self._registry.forget(name)
        else:
            self._nodes[name] = node
        is_eager = self.settings.eager and _facts(before, HANDSHAKE) != _facts(node, HANDSHAKE)
        if kind != "MODIFIED" or is_eager:
            await self.read_nodes()
        return kind == "ADDED" or _facts(before) != _facts(node)

    def see_pod(self, kind: str, pod: Json) -> bool:
        """Take in an event of a pod. Returns whether it makes room for others."""
        if kind == "DELETED":
            self._pods.pop(_owner(pod), None)
            return self.usage.forget(pod["metadata"]["uid"])
        self._pods[_owner(pod)] = pod
        return self.usage.observe(pod)

    async def read_nodes(self) -> None:
        """Take in what the Nodes offer, as HAMi does also every REGISTER_INTERVAL."""
        async with self._registering:
            for name, node in list(self._nodes.items()):
                writes = dict(self._registry.ingest(node, self._clock.now()))
                patch = {"metadata": {"annotations": writes}}
                with contextlib.suppress(StatusError):  # written when the Nodes are read next
                    # As in HAMi, an unused read comes before a write.
                    for verb in ("get", "patch") if writes else ():
                        await self.request(verb, "nodes", "", name, body=patch)

    async def filter(self, pod: Json, candidates: Sequence[str]) -> Filtered:
        """Choose a node for the pod, reserve its shares there and write them on the pod.

        The write goes by name without a UID, so it can hit a pod that was created again meanwhile.

        Raises:
            StatusError: the pod could not be written; nothing is reserved.
        """
        async with self._registering:
            pass  # wait while nodes are ingested
        # Chosen and reserved without a wait, so that the next decision counts this one.
        uid, namespace = pod["metadata"]["uid"], pod["metadata"]["namespace"]
        self.usage.forget(uid)
        states = {name: self._registry.state(name, self.usage.loads(name)) for name in candidates}
        registered = {name: state for name, state in states.items() if state is not None}
        filtered = filter_pod(pod, candidates, registered, self.settings, self._rng, self.quotas)
        if filtered.groups is not None:
            held = (filtered.nodes[0], filtered.groups, init_count(pod))
            self.usage.reserve(uid, Reservation(*held, namespace=namespace))
            seconds = int(self._clock.now().timestamp())
            patch = placement_patch(filtered.nodes[0], filtered.groups, seconds)
            try:
                await self.request("patch", "pods", *_owner(pod), body=patch)
            except StatusError as refusal:
                self.usage.forget(uid)
                self._tell(pod, WARNING, "FilteringFailed", str(refusal))
                raise
        for notice in filtered.notices:
            self._tell(pod, *notice)
        return filtered

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
        if node_name not in self._nodes:
            self._tell(pod, WARNING, "BindingFailed", f"failed to get node {node_name}")
            self.usage.forget(pod["metadata"]["uid"])
            raise BindError(f'node "{node_name}" not found')
        marks = {
            annotations.BIND_PHASE: annotations.PHASE_ALLOCATING,
            annotations.BIND_TIME: str(int(self._clock.now().timestamp())),
        }
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name, "namespace": namespace, "uid": uid},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node_name},
        }
        # A pod of which only init containers request GPUs takes no lock.
        needs_lock = any(pod_requests(pod, self.settings)[init_count(pod) :])
        where = ("pods", namespace, name)
        try:
            if needs_lock:
                await self._take_lock(node_name, pod)
            patch = {"metadata": {"annotations": marks}}
            await self.request("patch", *where, body=patch)
            await self.request("bind", *where, body=binding)
        except (BindError, StatusError) as failure:
            if needs_lock:
                await self._release_lock(node_name, pod)
            self._tell(pod, WARNING, "BindingFailed", str(failure))
            raise BindError(str(failure)) from failure
        text = f"Successfully binding node [{node_name}] to {namespace}/{name}"
        self._tell(pod, NORMAL, "BindingSucceed", text)

    async def _take_lock(self, node: str, pod: Json) -> None:
        """Lock the node for the pod. A lock with the pod's namespace and name counts as its own.

        Raises:
            BindError: another existing pod took it less than LOCK_TIMEOUT ago, or the text is not
                a lock.
            StatusError: the API server refuses a request.
        """
        owner, first = _owner(pod), (await self._read_lock(node))[0]

        def lock(held: str | None) -> str:
            # The time is taken before the wait in the queue.
            if held is not None and not held.endswith(",{},{}".format(*owner)):
                raise BindError(f"node {node} is locked{_CONTENTION}")
            return held or encode_node_lock(self._clock.now(), *owner)

        if first is not None:
            try:
                known = decode_node_lock(first)
            except MalformedText as malformed:
                raise BindError(f"malformed lock annotation: {malformed}") from malformed
            if (self._clock.now() - known.stamp).total_seconds() <= LOCK_TIMEOUT:
                if (known.namespace, known.name) == owner:
                    return
                if known.owner is None or await self._is_alive(*known.owner):
                    raise BindError(f"node {node} has been locked within 5m0s{_CONTENTION}")
            await self._change_lock(node, lambda held: None if held == first else held)
        await self._change_lock(node, lock)

    async def _is_alive(self, namespace: str, name: str) -> bool:
        try:
            await self.request("get", "pods", namespace, name)
        except NotFoundError:
            return False
        return True

    async def _release_lock(self, node: str, pod: Json) -> None:
        """Remove the pod's lock, or one without an owner. If that fails, its timeout ends it."""
        ending = ",{},{}".format(*_owner(pod))

        def free(held: str | None) -> str | None:
            return None if held is None or "," not in held or held.endswith(ending) else held

        with contextlib.suppress(StatusError):
            await self._change_lock(node, free)

    async def _change_lock(self, node: str, change: Callable[[str | None], str | None]) -> None:
        """Write the changed text of the lock. A refused write is tried five times in all.

        Each try reads the lock again, and a refused read counts as a try.
        """
        async with self._turns[node]:
            held, _ = await self._read_lock(node)
            if change(held) == held:
                return
            for pause in (*_PAUSES, None):
                try:
                    held, version = await self._read_lock(node)
                    if (text := change(held)) != held:
                        metadata = {"annotations": {annotations.MUTEX_LOCK: text}} | version
                        body = {"metadata": metadata}
                        await self.request("patch", "nodes", "", node, body=body)
                except StatusError:
                    if pause is None:
                        raise
                    await asyncio.sleep(pause)
                else:
                    return

    async def _read_lock(self, node: str) -> tuple[str | None, Json]:
        """The text of the lock, and which version of the Node has it."""
        metadata = (await self.request("get", "nodes", "", node))["metadata"]
        text = (metadata.get("annotations") or {}).get(annotations.MUTEX_LOCK)
        return text, {"resourceVersion": metadata["resourceVersion"]}

    def _tell(self, pod: Json, kind: str, reason: str, text: str) -> None:
        notice, name = Notice(kind, reason, text), self.settings.scheduler_name
        self._events.put_nowait(event_about(pod, notice, name, self._clock.now()))


def is_closed(node: Json) -> bool:
    """Whether the Node is unschedulable."""
    return bool((node.get("spec") or {}).get("unschedulable"))


def _facts(node: Json, *ignored: str) -> object:
    """What of a Node makes kube-scheduler try a pod again, but for these annotations."""
    noted = node["metadata"].get("annotations") or {}
    offered = ((node.get("status") or {}).get("allocatable") or {}).get(COUNT)
    return {key: noted[key] for key in noted.keys() - ignored}, offered, is_closed(node)
