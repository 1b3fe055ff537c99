"""Pods, Nodes and Events of the API server: as values, as requests, and followed by watches."""

import asyncio
import contextlib
import datetime as dt
import functools
import hashlib
import math
import random
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from fractions import Fraction

import msgspec
import structlog
from typing_extensions import override

from agent.cluster import (
    ALLOCATED,
    BIND_PHASE,
    BIND_TIME,
    CORE_POLICY_ENV,
    DEFAULT_PRIORITY,
    GPU_DEGRADED,
    MIRROR,
    MUTEX_LOCK,
    NOT_HERE,
    NOT_WHOLE,
    TO_ALLOCATE,
    VGPU_NODE,
    ContainerView,
    NodeCondition,
    NodeEvent,
    NodeView,
    Phase,
    PodChange,
    PodList,
    PodTable,
    PodUid,
    PodView,
    Role,
    Tombstone,
    version_number,
)
from agent.errors import (
    ApiConflict,
    ApiError,
    ApiForbidden,
    ApiGone,
    ApiNotFound,
    MalformedText,
    cap,
)
from agent.hami.annotations import (
    INT32,
    LENGTH_LIMIT,
    decode_pod_devices,
    decode_stamp,
    encode_stamp,
)
from agent.kit.cell import Cell
from agent.kit.tasks import HEALTHY_AFTER, Allowance, Backoff
from agent.kit.timing import Lag, Tally, loop_time
from agent.kube.client import (
    MERGE_PATCH,
    OPENED,
    SHORTEST,
    WRITER,
    ApiRequest,
    KubeSession,
    Raw,
    fetch_list,
    inside,
    objects_in,
    path_of,
    read_object,
    text_in,
    texts_in,
)
from agent.ports import Clock, NodeApi, PodApi

log = structlog.get_logger(__name__)

# Decodes Kubernetes quantities (`2`, `1k`, `1.5Gi`) to whole numbers.

_QUANTITY = re.compile(
    r"([+-]?)([0-9]{1,64}(?:\.[0-9]{0,64})?|\.[0-9]{1,64})(?:([eE][+-]?[0-9]{1,2})|([A-Za-z]{0,2}))"
)
_SUFFIXES = {
    "": Fraction(1),
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 10**3),
    **{suffix: Fraction(1000 ** (n + 1)) for n, suffix in enumerate("kMGTPE")},
    **{f"{suffix}i": Fraction(1024 ** (n + 1)) for n, suffix in enumerate("KMGTPE")},
}


def decode_quantity(text: str) -> int | None:
    """Decode a quantity, rounded up as Kubernetes' Quantity.Value does; None: it is not one."""
    exact = _exact(text)
    return None if exact is None else math.ceil(exact)


def decode_whole(text: str) -> int | None:
    """Decode a whole quantity; None: it is not one. An API server rewrites 3000 to `3k`."""
    exact = _exact(text)
    return int(exact) if exact is not None and exact.denominator == 1 else None


def _exact(text: str) -> Fraction | None:
    # As ParseQuantity of k8s.io/apimachinery pkg/api/resource.
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    sign, digits, exponent, suffix = match.groups()
    factor = Fraction(10) ** int(exponent[1:]) if exponent else _SUFFIXES.get(suffix)
    return None if factor is None else Fraction(sign + digits) * factor


# Decodes Pods and Nodes of the API server to views, with only the fields that decide something.

WORDS_KEPT = (BIND_PHASE, BIND_TIME, VGPU_NODE)
TEXT_KEPT = 1024
"""Characters kept of a text: tenants can write long ones, and what HAMi writes is short."""

CONTROL_ENV, PRIORITY_ENV = "CUDA_DISABLE_CONTROL", "CUDA_TASK_PRIORITY"
GO_TRUE = frozenset({"1", "t", "T", "TRUE", "true", "True"})
"""The texts that Go's strconv.ParseBool reads as true."""
_ATOI = re.compile(r"\s*([+-]?[0-9]{1,19})", re.ASCII)
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def decode_pod(obj: Mapping[str, object], resource: str) -> PodView:
    """Decode a pod, with each container's request of `resource`.

    A field that is missing or of another type counts as absent: the API server checked it, and one
    malformed pod must not hide the others. Raises MalformedText: it has no UID or no name.
    """
    metadata, spec, status = (inside(obj, key) for key in ("metadata", "spec", "status"))
    annotations = texts_in(metadata, "annotations")
    uid, name = _identity(metadata, "pod")
    groups, groups_error = None, ""
    try:
        if ALLOCATED in annotations:
            groups = decode_pod_devices(annotations[ALLOCATED], is_served=True)
    except MalformedText as error:
        groups_error = str(error)
    kept = {key: annotations[key][:TEXT_KEPT] for key in WORDS_KEPT if key in annotations}
    waiting = annotations.get(TO_ALLOCATE)
    if waiting is not None and len(waiting) <= LENGTH_LIMIT:  # a longer one is no pod's
        kept[TO_ALLOCATE] = waiting
    phase = text_in(status, "phase") or Phase.PENDING
    conditions = {text_in(each, "type") for each in objects_in(status, "conditions")}
    return PodView(
        uid=PodUid(uid),
        namespace=text_in(metadata, "namespace"),
        name=name,
        node=text_in(spec, "nodeName"),
        phase=next((known for known in Phase if known == phase), Phase.UNKNOWN),
        created=decode_moment(metadata.get("creationTimestamp")) or EPOCH,
        containers=tuple(_containers(spec, status, resource)),
        annotations=kept,
        static=MIRROR in annotations,
        scheduled="PodScheduled" in conditions,
        started=bool(text_in(status, "startTime")),
        scheduler=text_in(spec, "schedulerName"),
        runtime_class=text_in(spec, "runtimeClassName"),
        reusable_name=not text_in(metadata, "generateName"),
        reason=text_in(status, "reason"),
        message=text_in(status, "message")[:TEXT_KEPT],
        resource_version=text_in(metadata, "resourceVersion"),
        groups=groups,
        groups_error=groups_error,
    )


def decode_node(obj: Mapping[str, object]) -> NodeView:
    """Decode a Node with all its annotations and labels. Raises MalformedText, as decode_pod."""
    metadata = inside(obj, "metadata")
    uid, name = _identity(metadata, "node")
    version, labels = text_in(metadata, "resourceVersion"), texts_in(metadata, "labels")
    return NodeView(name, uid, version, texts_in(metadata, "annotations"), labels)


def _identity(metadata: Mapping[str, object], kind: str) -> tuple[str, str]:
    uid, name = text_in(metadata, "uid"), text_in(metadata, "name")
    if uid and name:
        return uid, name
    known = cap(name or uid) or "without a name"
    raise MalformedText(f"{kind} {known}: metadata.uid and metadata.name must both be texts")


def _containers(
    spec: Mapping[str, object], status: Mapping[str, object], resource: str
) -> Iterator[ContainerView]:
    """Init containers and sidecars first, then app containers, as the kubelet admits them."""
    for kind in ("initContainers", "containers"):
        # Their statuses: initContainerStatuses, containerStatuses.
        known = {text_in(each, "name"): each for each in objects_in(status, f"{kind[:-1]}Statuses")}

        for item in objects_in(spec, kind):
            policy = text_in(item, "restartPolicy")
            if kind == "containers":
                role = Role.APP
                # A container's own policy wins, and its rules may start it again after any exit.
                policy = "Always" if item.get("restartPolicyRules") else policy
                policy = policy or text_in(spec, "restartPolicy")
            elif policy == "Always":
                role = Role.SIDECAR
            else:
                role, policy = Role.INIT, "OnFailure"
            yield _container(item, role, policy, known.get(text_in(item, "name"), {}), resource)


def _container(
    item: Mapping[str, object],
    role: Role,
    restarts: str,
    status: Mapping[str, object],
    resource: str,
) -> ContainerView:
    """One container with its status. `restarts`: the policy by which the kubelet starts it."""
    state, last = inside(status, "state"), inside(status, "lastState")
    terminated, before = inside(state, "terminated"), inside(last, "terminated")
    container_id = text_in(status, "containerID").rpartition("://")[2]
    starts = [
        decode_moment(text) or EPOCH
        for parent in (state, last)
        for kind in ("running", "terminated")
        if (text := text_in(parent, kind, "startedAt"))
    ]
    is_over = restarts == "Never" or (restarts == "OnFailure" and terminated.get("exitCode") == 0)
    ended_at = decode_moment(terminated.get("finishedAt")) or EPOCH if terminated else None
    env = [(text_in(each, "name"), text_in(each, "value")) for each in objects_in(item, "env")]

    # As HAMi-core reads it, with atoi.
    number = _ATOI.match(_literal(item, PRIORITY_ENV, str(DEFAULT_PRIORITY)))

    amounts = {**inside(item, "resources", "requests"), **inside(item, "resources", "limits")}
    count = decode_quantity(str(amounts.pop(resource, 0))) or 0
    # An extended resource has a domain.
    others = ((name, decode_whole(str(amounts[name]))) for name in sorted(amounts) if "/" in name)

    return ContainerView(
        name=text_in(item, "name"),
        role=role,
        count=max(0, count),
        control_disabled=any(name == CONTROL_ENV and value in GO_TRUE for name, value in env),
        running_id=container_id if isinstance(state.get("running"), Mapping) else None,
        has_run=bool(container_id) or "terminated" in state or "terminated" in last,
        started_at=max(starts, default=None),
        ended_at=ended_at if is_over else None,
        succeeded=0 in (terminated.get("exitCode"), before.get("exitCode")),
        priority=max(INT32[0], min(int(number[1]), INT32[1])) if number else 0,
        core_policy=_literal(item, CORE_POLICY_ENV),
        resource=resource,
        others=tuple((name, NOT_WHOLE if whole is None else whole) for name, whole in others),
    )


def _literal(item: Mapping[str, object], name: str, absent: str = "") -> str:
    """The last entry of a variable counts; `absent`: none, or its value is taken from elsewhere."""
    given = [env for env in objects_in(item, "env") if text_in(env, "name") == name]
    if not given or "valueFrom" in given[-1] or "$(" in text_in(given[-1], "value"):
        return absent
    return text_in(given[-1], "value")


def decode_moment(text: object) -> dt.datetime | None:
    """A time of the API server; None for any other value."""
    try:
        return decode_stamp(text) if isinstance(text, str) and text else None
    except MalformedText:
        return None


# The ports NodeApi and PodApi over the API server.

METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"
"""Half the bytes of a Node, little of a pod; a server without support sends all."""


class KubeApi:
    """The ports NodeApi and PodApi. The views of pods count requests of `resource`.

    A GET and a LIST without a version are answered from the server's storage, not from a cache.
    """

    def __init__(self, session: KubeSession, node: str, resource: str = "") -> None:
        self._session = session
        self._node = node
        self._resource = resource
        self._path = path_of("nodes", node)
        self._selector = ("fieldSelector", f"spec.nodeName={node}")

    async def watch_node(self) -> AsyncIterator[NodeView | None]:
        """Send one WATCH by name without a version: the server first sends the present Node."""
        request = ApiRequest("watch", "nodes", path_of("nodes"), accept=METADATA_ONLY)
        is_shown, here = False, request.asking(fieldSelector=f"metadata.name={self._node}")
        async for kind, node in self._session.watch(here, _shown):
            # A bookmark says nothing, but the first one shows that there is no Node before it.
            if kind != OPENED and not (kind == "BOOKMARK" and is_shown):
                is_shown = True
                yield node

    async def get_node(self) -> NodeView | None:
        """As in the port."""
        with contextlib.suppress(ApiNotFound):
            return await self._session.fetch(
                ApiRequest("get", "nodes", self._path, accept=METADATA_ONLY), read_node
            )
        return None

    async def annotate_node(
        self, annotations: Mapping[str, str | None], version: str = ""
    ) -> NodeView:
        """Send one merge patch. Raises ApiConflict: the Node has another version than this one."""
        expected = {"resourceVersion": version} if version else {}
        body = {"metadata": {"annotations": dict(annotations), **expected}}
        return await self._session.fetch(
            ApiRequest("patch", "nodes", self._path, (), body, MERGE_PATCH, METADATA_ONLY),
            read_node,
        )

    async def release_lock(self, key: str, value: str) -> None:
        """Send one JSON patch: nothing changes unless annotation `key` is exactly `value`."""
        pointer = "/metadata/annotations/" + key.replace("~", "~0").replace("/", "~1")
        body = ({"op": "test", "path": pointer, "value": value}, {"op": "remove", "path": pointer})
        form = "application/json-patch+json"
        await self._session.call(
            ApiRequest("patch", "nodes", self._path, (), body, form, METADATA_ONLY)
        )

    async def set_condition(self, condition: NodeCondition) -> None:
        """Create or replace the condition."""
        status, since = str(condition.status), encode_stamp(condition.since)
        entry = {"status": status, "reason": condition.reason, "message": condition.message}
        stamps = dict.fromkeys(("lastHeartbeatTime", "lastTransitionTime"), since)
        await self.patch_condition({"type": GPU_DEGRADED, **entry, **stamps})

    async def patch_condition(self, entry: Mapping[str, str]) -> None:
        """Send one strategic merge patch of one condition; `$patch: delete` removes it."""
        body, form = {"status": {"conditions": [entry]}}, "application/strategic-merge-patch+json"
        await self._session.call(
            ApiRequest("patch", "nodes/status", f"{self._path}/status", (), body, form)
        )

    async def list_pods(self) -> PodList:
        """As in the port, in as many pages as needed."""
        request = ApiRequest("list", "pods", path_of("pods"), (self._selector,))
        version, pods = await fetch_list(self._session, request, self._pod)
        return PodList(tuple(pods), version)

    async def get_pod(self, namespace: str, name: str) -> PodView | None:
        """As in the port."""
        with contextlib.suppress(ApiNotFound):
            path = path_of("namespaces", namespace, "pods", name)
            pod = await self._session.fetch(ApiRequest("get", "pods", path), self._pod)
            return pod if pod.node == self._node else None
        return None

    async def watch_pods(self, resource_version: str) -> AsyncIterator[PodChange]:
        """As in the port."""
        query = (self._selector, ("resourceVersion", resource_version))
        request = ApiRequest("watch", "pods", path_of("pods"), query)
        async for _, change in self._session.watch(request, self._change):
            yield change or PodChange(resource_version)

    async def annotate_pod(
        self, namespace: str, name: str, uid: PodUid, annotations: Mapping[str, str | None]
    ) -> None:
        """As in the port. A node's own identity may patch pods/status."""
        body = {"metadata": {"uid": uid, "annotations": dict(annotations)}}
        path = path_of("namespaces", namespace, "pods", name, "status")
        await self._session.call(
            ApiRequest("patch", "pods/status", path, (), body, MERGE_PATCH, METADATA_ONLY)
        )

    def _pod(self, body: Raw) -> PodView:
        return decode_pod(read_object(body), self._resource)

    def _change(self, kind: str, body: Raw) -> PodChange:
        """The change that one frame reports."""
        obj = read_object(body)
        change = PodChange(text_in(obj, "metadata", "resourceVersion"), deleted=kind == "DELETED")
        if kind == "BOOKMARK":
            return change
        try:
            return msgspec.structs.replace(change, pod=decode_pod(obj, self._resource))
        except MalformedText as error:  # the watch would break here again and again
            self._session.skip(str(error))
            return msgspec.structs.replace(change, deleted=False)


def read_node(body: Raw) -> NodeView:
    """Read a Node. Raises MalformedText."""
    return decode_node(read_object(body))


def _shown(kind: str, body: Raw) -> NodeView | None:
    """The Node in one frame; None when it was deleted, or in a bookmark."""
    return read_node(body) if kind in {"ADDED", "MODIFIED"} else None


# Posts Events, of which equal ones become a series.

UPDATE_GAP = 60.0
BURST, REFILL = 25, 300.0
"""As client-go's spam filter: for each object, and for each reason of the Node."""
PODS_BURST, PODS_REFILL = 220, 2.0
"""All pods of the node together: a tenant could cause Events without end by new pod names."""
REMEMBERED = 4096

TEXT_LIMIT = 1024
NODE_NAMESPACE = "default"


class EventSeries(msgspec.Struct):
    """Equal Events: how many came before, and the loop time of the last write."""

    event: NodeEvent
    count: int = 0
    sent_at: float | None = None


class EventPoster:
    """Creates Events of the core API about this Node or one of its pods, and updates their series.

    `posted` counts by reason and outcome: `create`, `update`, `count` (its series was written less
    than 60 s ago) and `drop` (the object, or all pods together, used up their rate).
    """

    def __init__(self, session: KubeSession, node: str, clock: Clock) -> None:
        self.posted = Tally(
            "events_total",
            "Events by outcome; only create and update were written to the API server.",
            ("reason", "outcome"),
        )
        self._session = session
        self._node = node
        self._clock = clock
        self._pods = Allowance(PODS_BURST, PODS_REFILL)
        self._series_of = functools.lru_cache(REMEMBERED)(EventSeries)
        self._allowance_of = functools.lru_cache(REMEMBERED)(lambda *_: Allowance(BURST, REFILL))

    async def post(self, event: NodeEvent) -> None:
        """Create or update the Event; only count a too frequent one. Raises ApiError."""
        series = self._series_of(event)
        # Each reason of the Node has its own, so that Events caused by pods hide no bad GPU.
        own = self._allowance_of(event.namespace, event.pod or event.reason)
        allowances = (own, self._pods) if event.pod else (own,)

        if series.sent_at is not None and loop_time() - series.sent_at < UPDATE_GAP:
            outcome = "count"
        elif not all(allowance.allows(loop_time()) for allowance in allowances):
            outcome = "drop"
        else:
            outcome = await self._write(series)
            series.sent_at = loop_time()
            for allowance in allowances:
                allowance.spend(series.sent_at)

        series.count += 1  # not after an error: its repetition is no new occurrence
        self.posted.add(event.reason, outcome)

    async def _write(self, series: EventSeries) -> str:
        """Create the Event, or update it if it is there; return which."""
        body = event_object(series, self._node, self._clock.now())
        space = ("namespaces", series.event.namespace or NODE_NAMESPACE, "events")
        try:
            await self._session.call(ApiRequest("create", "events", path_of(*space), (), body))
        except ApiConflict:  # it was written before, also before a restart
            path = path_of(*space, event_name(series.event, self._node))
            series.count = max(1, series.count)
            change = {"count": series.count + 1, "lastTimestamp": body["lastTimestamp"]}
            await self._session.call(ApiRequest("patch", "events", path, (), change, MERGE_PATCH))
            return "update"
        return "create"


def event_name(event: NodeEvent, node: str) -> str:
    """`<object>.<hash>`: equal Events of an object have the same name, also after a restart."""
    parts = (event.namespace, event.pod, event.pod_uid, event.reason, event.text)
    digest = hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()
    return f"{(event.pod or node)[:200].rstrip('.-')}.{digest[:16]}"


def event_object(series: EventSeries, node: str, now: dt.datetime) -> dict[str, object]:
    """The next Event of the series as a JSON object of the API."""
    event, stamp = series.event, encode_stamp(now)
    space = event.namespace or NODE_NAMESPACE
    # `kubectl describe node` selects by the Node's name as uid, which the kubelet uses (nodeRef in
    # kubernetes pkg/kubelet/kubelet.go).
    regarding = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node}
    if event.pod:
        regarding |= {"kind": "Pod", "namespace": space, "name": event.pod, "uid": event.pod_uid}

    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": event_name(event, node), "namespace": space},
        "involvedObject": regarding,
        "reason": event.reason,
        "message": cap(event.text, TEXT_LIMIT),
        "type": "Warning" if event.warning else "Normal",
        "source": {"component": WRITER, "host": node},
        "reportingComponent": WRITER,
        "reportingInstance": node,
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": series.count + 1,
    }


# Opens a watch again whenever it ends.

DELAYS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
JITTER = 0.5
TOO_SHORT = 1.0
"""Seconds: after a watch that the server ended sooner, the delays grow."""
SPREAD = 4.0
"""Seconds: the longest random delay after what every client of a server meets at once."""


class Reopening:
    """One watch that is opened again and again; `restarts` counts why each was over."""

    def __init__(self, restarts: Tally, random: random.Random) -> None:
        self.restarts = restarts
        self.failures = 0
        """How many watches broke or ended too early since the last healthy one."""
        self._random = random
        self._backoff = Backoff(DELAYS, JITTER, random)

    async def _follow(self) -> None:
        """Follow one watch to its end. Raises ApiError."""

    def _on_error(self, error: ApiError) -> None:
        """Take the error that ended the watch."""

    async def run(self) -> None:
        """Follow for ever."""
        while True:
            began = loop_time()
            try:
                await self._follow()
            except ApiError as error:
                delay = self.delay(error, loop_time() - began)
                self._on_error(error)
            else:
                delay = self.delay(None, loop_time() - began)
            await asyncio.sleep(delay)

    def delay(self, failure: ApiError | None, lasted: float) -> float:
        """Seconds until the next watch after one that lasted so many seconds."""
        # Gone: the server forgot our place.
        reason = "gone" if isinstance(failure, ApiGone) else "error"
        self.restarts.add("ended" if failure is None else reason)
        if lasted >= HEALTHY_AFTER:
            self._backoff.reset()
            self.failures = 0
        if failure is None and lasted >= SHORTEST:
            return 0.0

        self.failures += 1
        # A proxy may end each watch after some seconds: until then it tells what changes.
        grows = self.failures > 1 and (failure is not None or lasted < TOO_SHORT)
        asked = (failure.retry_after if failure else None) or 0.0
        # All clients met the same, so they must not come back in the same moment.
        delay = max(self._backoff.next() if grows else 0.0, asked)
        return delay + self._random.uniform(0.0, SPREAD)


# Follows this Node with one WATCH.

FORMER_LIFE, FORMER_LOCKS = 60.0, 64
"""Seconds for which a removed lock still proves the right of its pod, and how many are kept. A bind
can wait in the scheduler's queue for longer than the grace period of its lock."""


class NodeWatch(Reopening):
    """Sole writer of the view of the Node (None: not seen yet, or deleted).

    `returns` counts the ends of outages. `labels`: those that the Node had last. `lock`: the text
    of its lock, for who need not wake at every other write of the Node.
    """

    def __init__(self, api: NodeApi, node: Cell[NodeView | None], random: random.Random) -> None:
        restarts = Tally(
            "node_watch_restarts_total", "Watches of this Node that ended.", ("reason",)
        )
        super().__init__(restarts, random)
        self.returns = Cell(0)
        self.labels: Cell[Mapping[str, str] | None] = Cell(None)
        self.lock: Cell[str | None] = Cell(None)
        self._api = api
        self._node = node
        self._floor = 0
        """The version of the agent's last write since this watch began. Older frames are late."""
        self._is_failing = False
        """The API server was lost and has not sent the Node since."""

    async def refresh(self) -> NodeView | None:
        """The Node by one GET, which updates the view. Raises ApiError. Callers set deadlines."""
        held = self._node.value
        node = await self._api.get_node()
        if node is not None:
            self.on_answer(node)
        elif self._node.value is held:  # no frame was newer than the answer
            self._set(None)
        return node

    def on_answer(self, node: NodeView) -> None:
        """Update the view from the answer to a request, unless the watch showed a newer Node."""
        held = self._node.value
        version = version_number(node.resource_version)
        if held is None or not 0 < version <= version_number(held.resource_version):
            self._floor = version
            self._set(node)

    def _set(self, node: NodeView | None) -> None:
        """Set the view, with the locks that were removed lately."""
        held = self._node.value
        if held is not None and node is not None:
            now = loop_time()
            former = [(text, until) for text, until in held.former_locks if until > now]
            gone = held.annotations.get(MUTEX_LOCK, "")
            if gone and node.annotations.get(MUTEX_LOCK) != gone:
                former.insert(0, (gone, now + FORMER_LIFE))
            node = msgspec.structs.replace(node, former_locks=tuple(former[:FORMER_LOCKS]))
        elif held is not None:
            log.warning("node.deleted")

        self._node.set(node)
        self.lock.set(node.annotations.get(MUTEX_LOCK) if node else None)
        if node is not None:
            self.labels.set(node.labels)

    @override
    async def _follow(self) -> None:
        # Frames come in order; only the agent's writes overtake.
        self._floor = 0
        async for node in self._api.watch_node():
            if node is None or version_number(node.resource_version) >= self._floor:
                self._set(node)

            if self._is_failing:
                self._is_failing = False
                log.info("node.followed")
                self.returns.set(self.returns.value + 1)

    @override
    def _on_error(self, error: ApiError) -> None:
        if not self._is_failing:
            log.warning("node.lost", err=str(error))
        self._is_failing = True


# Follows the pods of this node with LIST and WATCH; keeps deleted pods for 10 minutes.

PATIENCE = 5
"""Consecutive failed watches before the agent lists all pods again."""
LIST_PATIENCE = 2.0
"""Seconds for a LIST that calls wait for."""
LISTS, LISTS_REFILL, OWNERS_REFILL = 120, 2.0, 0.25
"""Allowance for LISTs that calls cause: 120 at once, then one every 2 s. A tenant can cause them
without end, and each one scans all pods of the cluster. While a lock is held its owner may be
asking: such LISTs have their own allowance, and four a second."""
KEEP = dt.timedelta(minutes=10)
GRAVES = 1024
OUTAGE = dt.timedelta(seconds=30)
"""A shorter one is not told of afterwards: proxies and restarts cause them."""
AWAY = "ApiServerAway"
"""For the journal alone: no Event has this reason."""


class PodWatch(Reopening):
    """Sole writer of the pod table, whose containers are counted by the name `resource`.

    `noted` hears of each outage of the API server when it is over.
    """

    def __init__(
        self,
        api: PodApi,
        table: Cell[PodTable],
        clock: Clock,
        random: random.Random,
        resource: Cell[str],
        noted: Callable[[NodeEvent], None] = lambda _: None,
    ) -> None:
        restarts = Tally(
            "pod_watch_restarts_total", "Watches of this node's pods that ended.", ("reason",)
        )
        super().__init__(restarts, random)
        self._api = api
        self._table = table
        self._clock = clock
        self._resource = resource
        self._noted = noted
        self._version = ""
        """The resource version of the table; empty: a LIST is needed."""
        self._group = asyncio.TaskGroup()
        self._next: asyncio.Task[PodTable | ApiError] | None = None
        """The next LIST for callers, which has not begun."""
        self._lists = Allowance(LISTS, LISTS_REFILL)
        self._owners_lists = Allowance(LISTS, OWNERS_REFILL)
        self._lag = Lag()

    @override
    async def run(self) -> None:
        async with asyncio.TaskGroup() as self._group:
            self._group.create_task(super().run())
            # Count all containers again when the resource name changes, without a request.
            async for _ in self._resource.follow():
                self._publish()

    async def refresh(self, *, is_owners: bool = False) -> PodTable:
        """The table after one LIST that began after this call, or after the first LIST of all.

        Callers share it, and set the deadline. `is_owners`: the owner of the node lock may be
        asking. Raises ApiError, also when the allowance is used up.
        """
        if not self._table.value.synced:
            table = await self._table.until(lambda table: table.synced or table.stale)
            if table.synced:
                return table
        else:
            lists = self._owners_lists if is_owners else self._lists
            if not lists.allows(now := loop_time()):
                raise ApiError("too many requests by pods that the agent does not know")
            lists.spend(now)

        if self._next is None or self._next.done():
            listing = self._list()
            try:
                self._next = self._group.create_task(listing)
            except RuntimeError as error:  # run() ended by a defect and begins again in seconds
                listing.close()
                raise ApiError("the agent does not follow the pods now") from error
        task = self._next
        await asyncio.wait((task,))  # one caller may give up, and others wait
        answer = ApiError("the LIST was given up") if task.cancelled() else task.result()
        if isinstance(answer, ApiError):
            raise answer
        return answer

    async def find_uid(self, namespace: str, name: str) -> PodUid:
        """The UID of the pod that has this name now. The caller sets the deadline.

        NOT_HERE: no pod has the name, or this node may not read it. Raises ApiError: not known.
        """
        try:
            pod = await self._api.get_pod(namespace, name)
        except ApiForbidden:
            pod = None
        if pod is None:
            return NOT_HERE

        held = self._table.value.pods.get(pod.uid)
        if held is not None and _is_newer(pod.resource_version, held.resource_version):
            self._publish({**self._table.value.pods, pod.uid: pod})
        return pod.uid

    @override
    async def _follow(self) -> None:
        if not self._version:
            self._apply_list(await self._api.list_pods())

        async for change in self._api.watch_pods(self._version):
            if self._table.value.stale:
                self._on_return()
            self._apply_change(change)

    def _on_return(self) -> None:
        table, now = self._table.value, self._clock.now()
        log.info("pods.followed", version=self._version)
        if table.lost_at is not None and now - table.lost_at >= OUTAGE:
            span = f"from {table.lost_at:%Y-%m-%d %H:%M:%S} to {now:%Y-%m-%d %H:%M:%S} UTC"
            text = f"the API server could not be followed {span}: {table.lost_reason}"
            self._noted(NodeEvent(AWAY, text, warning=True))
        self._table.set(msgspec.structs.replace(table, stale=False, lost_at=None, lost_reason=""))

    @override
    def _on_error(self, error: ApiError) -> None:
        before, is_gone = self._table.value, isinstance(error, ApiGone)
        table = msgspec.structs.replace(before, stale=True)
        if is_gone:  # no outage: the server answers, but has forgotten what came after the table
            log.info("pods.gone")
        else:
            lost_at = before.lost_at or self._clock.now()
            table = msgspec.structs.replace(table, lost_at=lost_at, lost_reason=str(error))
            if not before.stale:
                log.warning("pods.lost", err=str(error))

        if is_gone or self.failures % PATIENCE == 0:
            self._version = ""
        self._table.set(table)

    def _apply_change(self, change: PodChange) -> None:
        """Apply one frame, unless a LIST was newer."""
        version, pod, pods = change.resource_version, change.pod, dict(self._table.value.pods)
        if not version_number(version) or _is_newer(version, self._version):
            self._version = version
        else:
            pod = None

        if pod is None:  # a bookmark comes each minute: old tombstones go
            self._publish()
            return
        held = pods.pop(pod.uid, None)
        if held is not None and _is_newer(held.resource_version, version):
            return  # a GET was newer; later frames follow

        if not change.deleted:
            pods[pod.uid] = pod
        self._publish(pods, dead=(pod,) if change.deleted else ())

    def _apply_list(self, found: PodList) -> None:
        """Replace the table by a LIST. A pod that it does not have was deleted.

        If a watch or another LIST was newer, the table already has all of it.
        """
        if self._version and not _is_newer(found.resource_version, self._version):
            return

        self._version = found.resource_version
        pods = {pod.uid: pod for pod in found.pods}
        dead = [pod for uid, pod in self._table.value.pods.items() if uid not in pods]
        self._publish(pods, dead=dead)
        log.info("pods.listed", pods=len(pods), gone=len(dead))

    async def _list(self) -> PodTable | ApiError:
        """One LIST, which goes on if its callers give up: the table is newer after it."""
        self._next = None  # who asks from now on needs a later one
        try:
            async with self._lag.within(LIST_PATIENCE):
                self._apply_list(await self._api.list_pods())
        except (ApiError, TimeoutError) as error:
            return error if isinstance(error, ApiError) else ApiError("out of time")
        return self._table.value

    def _publish(
        self, pods: Mapping[PodUid, PodView] | None = None, dead: Iterable[PodView] = ()
    ) -> None:
        """Set the table: `pods` (None: the same as before) and the recently deleted pods."""
        old, now, name = self._table.value, self._clock.now(), self._resource.value
        present = old.pods if pods is None else pods
        # Without the fields that tenants can make long, to bound memory.
        slim = (
            msgspec.structs.replace(
                pod,
                annotations={k: text for k, text in pod.annotations.items() if k == BIND_PHASE},
                groups=None,
                groups_error="",
                message="",
            )
            for pod in dead
        )
        graves = {
            # The clock may have been set back since.
            grave.pod.uid: Tombstone(grave.pod.asking_by(name), min(grave.deleted_at, now))
            for grave in (*old.tombstones, *(Tombstone(pod, now) for pod in slim))
            if grave.pod.uid not in present and now - grave.deleted_at < KEEP
        }
        counted = {uid: pod.asking_by(name) for uid, pod in present.items()}
        latest, synced = tuple(graves.values())[-GRAVES:], old.synced or pods is not None
        table = msgspec.structs.replace(old, pods=counted, tombstones=latest, synced=synced)
        self._table.set(table)


def _is_newer(version: str, than: str) -> bool:
    return version_number(version) > version_number(than)
