"""Pods, Nodes and Events of the API server: as values, and the requests of the agent about them."""

import contextlib
import datetime as dt
import functools
import hashlib
import math
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from fractions import Fraction

import msgspec

from agent.cluster import (
    ALLOCATED,
    BIND_PHASE,
    BIND_TIME,
    CORE_POLICY_ENV,
    DEFAULT_PRIORITY,
    MIRROR,
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
    PodUid,
    PodView,
    Role,
)
from agent.errors import ApiConflict, ApiNotFound, MalformedText, cap
from agent.hami.annotations import (
    INT32,
    LENGTH_LIMIT,
    decode_pod_devices,
    decode_stamp,
    encode_stamp,
)
from agent.kit.tasks import Allowance
from agent.kit.timing import Tally, loop_time
from agent.kube.client import (
    MERGE_PATCH,
    OPENED,
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
from agent.ports import Clock

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
    """Decode a quantity, rounded up as Kubernetes does; None when it is not a quantity.

    Source: k8s.io/apimachinery pkg/api/resource, ParseQuantity and Quantity.Value.
    """
    exact = _exact(text)
    return None if exact is None else math.ceil(exact)


def decode_whole(text: str) -> int | None:
    """Decode a whole quantity; None when it is not a quantity, or a fraction.

    An API server rewrites quantities: 3000 becomes `3k`.
    """
    exact = _exact(text)
    return int(exact) if exact is not None and exact.denominator == 1 else None


def _exact(text: str) -> Fraction | None:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    sign, digits, exponent, suffix = match.groups()
    factor = Fraction(10) ** int(exponent[1:]) if exponent else _SUFFIXES.get(suffix)
    return None if factor is None else Fraction(sign + digits) * factor


# Reads metadata.managedFields: which client last changed which annotation of an object.


def annotation_writes(metadata: Mapping[str, object]) -> tuple[tuple[str, str, str], ...]:
    """Read who changed which annotation: key, writer, and when the writer last changed something.

    The time is a text (RFC 3339). Malformed parts count as absent.
    """
    return tuple(
        (key.removeprefix("f:"), str(item.get("manager")), str(item.get("time", "")))
        for item in objects_in(metadata, "managedFields")
        for key in inside(item, "fieldsV1", "f:metadata", "f:annotations")
    )


def other_writer(writes: Iterable[tuple[str, str, str]], key: str) -> str:
    """The writer other than an agent that last changed this annotation, as `writer time`.

    Empty: an agent did, or the writer is unknown.
    """
    owners = [(time, writer) for written, writer, time in writes if written == key]
    if not owners or WRITER in (writer for _, writer in owners):
        return ""
    time, writer = max(owners)
    return f"{writer} {time}"


# Decodes Pods and Nodes of the API server to views, with only the fields that decide something.

WORDS_KEPT = (BIND_PHASE, BIND_TIME, VGPU_NODE)
TEXT_KEPT = 1024
"""Characters kept of a text, which is short if HAMi or the kubelet wrote it.

Tenants can write annotations, and the views of 1,000 pods are in memory. A truncated text equals no
node's name, phase or time that HAMi writes.
"""

CONTROL_ENV = "CUDA_DISABLE_CONTROL"
GO_TRUE = frozenset({"1", "t", "T", "TRUE", "true", "True"})
"""The texts that Go's strconv.ParseBool reads as true."""

PRIORITY_ENV = "CUDA_TASK_PRIORITY"
_ATOI = re.compile(r"\s*([+-]?[0-9]{1,19})", re.ASCII)

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def decode_pod(obj: Mapping[str, object], resource: str) -> PodView:
    """Decode a pod, with each container's request of `resource`.

    The requests of other extended resources are kept: `resource` may get another name. A field that
    is missing or of another type counts as absent: the API server checked it, and one malformed pod
    must not hide the others.

    Raises:
        MalformedText: metadata.uid or metadata.name is missing or not a text.
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
        scheduled=any(
            text_in(each, "type") == "PodScheduled" for each in objects_in(status, "conditions")
        ),
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
    """Decode a Node with all its annotations and labels.

    Raises:
        MalformedText: metadata.uid or metadata.name is missing or not a text.
    """
    metadata = inside(obj, "metadata")
    uid, name = _identity(metadata, "node")
    return NodeView(
        name=name,
        uid=uid,
        resource_version=text_in(metadata, "resourceVersion"),
        annotations=texts_in(metadata, "annotations"),
        labels=texts_in(metadata, "labels"),
    )


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
    container_id = text_in(status, "containerID").rpartition("://")[2]
    starts = [
        decode_moment(text) or EPOCH
        for parent in (state, last)
        for kind in ("running", "terminated")
        if (text := text_in(parent, kind, "startedAt"))
    ]
    terminated = inside(state, "terminated")
    is_over = restarts == "Never" or (restarts == "OnFailure" and terminated.get("exitCode") == 0)

    # As HAMi-core reads it, with atoi.
    number = _ATOI.match(_literal(item, PRIORITY_ENV, str(DEFAULT_PRIORITY)))

    amounts = {**inside(item, "resources", "requests"), **inside(item, "resources", "limits")}
    count = decode_quantity(str(amounts.pop(resource, 0))) or 0
    others = ((name, decode_whole(str(amounts[name]))) for name in sorted(amounts) if "/" in name)

    return ContainerView(
        name=text_in(item, "name"),
        role=role,
        count=max(0, count),
        control_disabled=any(
            text_in(env, "name") == CONTROL_ENV and text_in(env, "value") in GO_TRUE
            for env in objects_in(item, "env")
        ),
        running_id=container_id if isinstance(state.get("running"), Mapping) else None,
        has_run=bool(container_id) or "terminated" in state or "terminated" in last,
        started_at=max(starts, default=None),
        ended_at=(decode_moment(terminated.get("finishedAt")) or EPOCH)
        if terminated and is_over
        else None,
        succeeded=any(inside(each, "terminated").get("exitCode") == 0 for each in (state, last)),
        priority=max(INT32[0], min(int(number[1]), INT32[1])) if number else 0,
        core_policy=_literal(item, CORE_POLICY_ENV),
        resource=resource,
        # An extended resource has a domain.
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
    """This Node, its condition and its pods at the API server (ports NodeApi and PodApi).

    `resource` is the extended resource whose requests the views of pods count.
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
        """Send one GET; without a version the server answers from its storage, not from a cache."""
        with contextlib.suppress(ApiNotFound):
            return await self._session.fetch(
                ApiRequest("get", "nodes", self._path, accept=METADATA_ONLY), read_node
            )
        return None

    async def annotate_node(
        self, annotations: Mapping[str, str | None], version: str = ""
    ) -> NodeView:
        """Send one merge patch of these annotations.

        With a resourceVersion, ApiConflict is raised if the Node has another one.
        """
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
        """Create or replace the condition of its type."""
        since = encode_stamp(condition.since)
        await self.patch_condition(
            {
                "type": condition.kind,
                "status": str(condition.status),
                "reason": condition.reason,
                "message": condition.message,
                "lastHeartbeatTime": since,
                "lastTransitionTime": since,
            }
        )

    async def patch_condition(self, entry: Mapping[str, str]) -> None:
        """Send one strategic merge patch of one condition; `$patch: delete` removes it."""
        body, form = {"status": {"conditions": [entry]}}, "application/strategic-merge-patch+json"
        await self._session.call(
            ApiRequest("patch", "nodes/status", f"{self._path}/status", (), body, form)
        )

    async def list_pods(self) -> PodList:
        """Send one LIST, answered from the server's storage, in as many pages as needed."""
        request = ApiRequest("list", "pods", path_of("pods"), (self._selector,))
        version, pods = await fetch_list(self._session, request, self._pod)
        return PodList(tuple(pods), version)

    async def get_pod(self, namespace: str, name: str) -> PodView | None:
        """Send one GET; without a version the server answers from its storage, not from a cache."""
        with contextlib.suppress(ApiNotFound):
            path = path_of("namespaces", namespace, "pods", name)
            pod = await self._session.fetch(ApiRequest("get", "pods", path), self._pod)
            return pod if pod.node == self._node else None
        return None

    async def watch_pods(self, resource_version: str) -> AsyncIterator[PodChange]:
        """Send one WATCH with bookmarks; a first change of the requested version: it is open."""
        query = (self._selector, ("resourceVersion", resource_version))
        request = ApiRequest("watch", "pods", path_of("pods"), query)
        async for _, change in self._session.watch(request, self._change):
            yield change or PodChange(resource_version)

    async def annotate_pod(
        self, namespace: str, name: str, uid: PodUid, annotations: Mapping[str, str | None]
    ) -> None:
        """Send one merge patch to pods/status, which a node's own identity may patch."""
        body = {"metadata": {"uid": uid, "annotations": dict(annotations)}}
        path = path_of("namespaces", namespace, "pods", name, "status")
        await self._session.call(
            ApiRequest("patch", "pods/status", path, (), body, MERGE_PATCH, METADATA_ONLY)
        )

    def _pod(self, body: Raw) -> PodView:
        """Read a pod. Raises MalformedText."""
        return decode_pod(read_object(body), self._resource)

    def _change(self, kind: str, body: Raw) -> PodChange:
        """The change that one frame reports. Raises MalformedText."""
        if kind == "BOOKMARK":
            return PodChange(text_in(read_object(body), "metadata", "resourceVersion"))
        pod = self._pod(body)
        return PodChange(pod.resource_version, pod, deleted=kind == "DELETED")


def read_node(body: Raw) -> NodeView:
    """Read a Node. Raises MalformedText."""
    return decode_node(read_object(body))


def _shown(kind: str, body: Raw) -> NodeView | None:
    """The Node in one frame; None when it was deleted, or in a bookmark. Raises MalformedText."""
    return read_node(body) if kind in {"ADDED", "MODIFIED"} else None


# Posts Events, of which equal ones become a series.

UPDATE_GAP = 60.0
BURST = 25
REFILL = 300.0
"""As client-go's spam filter: 25 Events for one object at once, then one every 300 s.
The Node has these for each reason."""
PODS_BURST = 220
PODS_REFILL = 2.0
"""All pods of the node together: twice as many as a kubelet runs, then one every 2 s. Without this
limit a tenant could cause Events without end by new pod names."""
REMEMBERED = 4096

TEXT_LIMIT = 1024
NODE_NAMESPACE = "default"


class EventSeries(msgspec.Struct):
    """Equal Events about one object: how many came before, and the loop time of the last write."""

    event: NodeEvent
    count: int = 0
    sent_at: float | None = None


class EventPoster:
    """Creates Events of the core API about this Node or one of its pods, and updates their series.

    It sends one object for each series, at a limited rate. `posted` counts by reason and outcome:
    `create`, `update`, `count` (its series was written less than 60 s ago) and `drop` (the object,
    or all pods together, used up their rate).
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
        self._allowance_of = functools.lru_cache(REMEMBERED)(_allowance_of)

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


def _allowance_of(_namespace: str, _name: str) -> Allowance:
    return Allowance(BURST, REFILL)


def event_name(event: NodeEvent, node: str) -> str:
    """`<object>.<hash>`: equal Events of an object have the same name, also after a restart."""
    parts = (event.namespace, event.pod, event.pod_uid, event.reason, event.text)
    digest = hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()
    return f"{(event.pod or node)[:200].rstrip('.-')}.{digest[:16]}"


def event_object(series: EventSeries, node: str, now: dt.datetime) -> dict[str, object]:
    """The next Event of the series as a JSON object of the API.

    Like the kubelet, it uses the Node's name as uid of the Node: `kubectl describe node` selects by
    it (kubernetes pkg/kubelet/kubelet.go, nodeRef).
    """
    event, stamp = series.event, encode_stamp(now)
    regarding = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": node}
    if event.pod:
        pod = {"kind": "Pod", "namespace": event.namespace, "name": event.pod, "uid": event.pod_uid}
        regarding |= pod

    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": event_name(event, node),
            "namespace": event.namespace or NODE_NAMESPACE,
        },
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
