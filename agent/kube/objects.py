"""Pods and Nodes of the API server as values."""

import datetime as dt
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Final

import msgspec

from agent.allocate.edits import CORE_POLICY_ENV
from agent.allocate.room import NOT_WHOLE
from agent.cluster import (
    ALLOCATED,
    BIND_PHASE,
    BIND_TIME,
    DEFAULT_PRIORITY,
    MIRROR,
    TO_ALLOCATE,
    VGPU_NODE,
    ContainerView,
    NodeView,
    Phase,
    PodUid,
    PodView,
    Role,
)
from agent.errors import MalformedText, cap
from agent.hami.gojson import INT32
from agent.hami.pod import (
    LENGTH_LIMIT,
    TYPE_WORD,
    Groups,
    decode_pod_devices,
    decode_stamp,
    validate,
)
from agent.kube.narrow import inside, objects_in

# Decodes Kubernetes quantities (`2`, `1k`, `1.5Gi`) to whole numbers.
#
# Source: k8s.io/apimachinery pkg/api/resource, ParseQuantity and Quantity.Value.

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
    """Decode a quantity, rounded up as Kubernetes does; None when it is not a quantity."""
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
    if exponent is None and suffix not in _SUFFIXES:
        return None
    factor = _SUFFIXES[suffix] if exponent is None else Fraction(10) ** int(exponent[1:])
    return Fraction(sign + digits) * factor


# Reads metadata.managedFields: which client last changed which field of an object.

WRITER: Final = "hami-agent"
"""The agent's field manager: its User-Agent up to the slash."""


class ManagedFields(msgspec.Struct, frozen=True):
    """The fields that one writer changed last; `time` (RFC 3339) is that of its last change."""

    writer: str
    time: str
    fields: Mapping[str, object]

    @property
    def annotations(self) -> frozenset[str]:
        """The keys of the annotations among the fields."""
        keys = inside(inside(self.fields, "f:metadata"), "f:annotations")
        return frozenset(key.removeprefix("f:") for key in keys)


def entries(metadata: Mapping[str, object]) -> tuple[ManagedFields, ...]:
    """Read the entries of all writers; malformed parts count as absent."""
    return tuple(
        ManagedFields(str(item.get("manager")), str(item.get("time", "")), inside(item, "fieldsV1"))
        for item in objects_in(metadata, "managedFields")
    )


def other_writer(managed: Iterable[ManagedFields], key: str) -> str:
    """The writer other than an agent that last changed this annotation, as `writer time`.

    Empty: an agent did, or the writer is unknown.
    """
    owners = [entry for entry in managed if key in entry.annotations]
    if not owners or any(entry.writer == WRITER for entry in owners):
        return ""
    last = max(owners, key=lambda entry: entry.time)
    return f"{last.writer} {last.time}"


# Decodes Pods and Nodes of the API server to views, with only the fields that decide something.
#
# An object without uid or name is refused. Other fields that are missing or of another type count
# as absent: the API server checked them, and one malformed pod must not hide the others.

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

    The requests of other extended resources are kept: `resource` may get another name.

    Raises:
        MalformedText: metadata.uid or metadata.name is missing or not a text.
    """
    metadata, spec, status = (inside(obj, key) for key in ("metadata", "spec", "status"))
    annotations = _texts(metadata, "annotations")
    uid, name = _identity(metadata, "pod")
    groups, groups_error = _groups(annotations.get(ALLOCATED))
    return PodView(
        uid=PodUid(uid),
        namespace=_text(metadata, "namespace"),
        name=name,
        node=_text(spec, "nodeName"),
        phase=_phase(_text(status, "phase")),
        created=_stamp(_text(metadata, "creationTimestamp")),
        containers=tuple(_containers(spec, status, resource)),
        annotations=dict(_kept(annotations)),
        static=MIRROR in annotations,
        scheduled=any(
            _text(each, "type") == "PodScheduled" for each in objects_in(status, "conditions")
        ),
        started=bool(_text(status, "startTime")),
        scheduler=_text(spec, "schedulerName"),
        runtime_class=_text(spec, "runtimeClassName"),
        reusable_name=not _text(metadata, "generateName"),
        reason=_text(status, "reason"),
        message=_text(status, "message")[:TEXT_KEPT],
        resource_version=_text(metadata, "resourceVersion"),
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
        resource_version=_text(metadata, "resourceVersion"),
        annotations=_texts(metadata, "annotations"),
        labels=_texts(metadata, "labels"),
    )


def _identity(metadata: Mapping[str, object], kind: str) -> tuple[str, str]:
    uid, name = _text(metadata, "uid"), _text(metadata, "name")
    if not uid or not name:
        known = cap(name or uid) or "without a name"
        raise MalformedText(f"{kind} {known}: metadata.uid and metadata.name must both be texts")
    return uid, name


def _groups(text: str | None) -> tuple[Groups | None, str]:
    """The shares that the scheduler gave the pod, or why they cannot be read."""
    if text is None:
        return None, ""
    try:
        return validate(decode_pod_devices(text, type_word=TYPE_WORD)), ""
    except MalformedText as error:
        return None, str(error)


def _kept(annotations: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The annotations that are used later; too long devices texts are omitted."""
    for key in WORDS_KEPT:
        if key in annotations:
            yield key, annotations[key][:TEXT_KEPT]
    waiting = annotations.get(TO_ALLOCATE)
    if waiting is not None and len(waiting) <= LENGTH_LIMIT:
        yield TO_ALLOCATE, waiting


def _containers(
    spec: Mapping[str, object], status: Mapping[str, object], resource: str
) -> Iterator[ContainerView]:
    """Init containers and sidecars first, then app containers, as the kubelet admits them."""
    statuses = _statuses(status, "initContainerStatuses")
    for item in objects_in(spec, "initContainers"):
        is_sidecar = item.get("restartPolicy") == "Always"
        own = statuses.get(_text(item, "name"), {})
        container = _container(item, Role.SIDECAR if is_sidecar else Role.INIT, own, resource)
        ended = None if is_sidecar else _ended_at(own, "OnFailure")
        yield msgspec.structs.replace(container, ended_at=ended)
    statuses = _statuses(status, "containerStatuses")
    restarts = _text(spec, "restartPolicy")
    for item in objects_in(spec, "containers"):
        own = statuses.get(_text(item, "name"), {})
        container = _container(item, Role.APP, own, resource)
        # A container's own policy wins, and its rules may start it again after any exit.
        policy = "Always" if item.get("restartPolicyRules") else _text(item, "restartPolicy")
        yield msgspec.structs.replace(container, ended_at=_ended_at(own, policy or restarts))


def _container(
    item: Mapping[str, object],
    role: Role,
    status: Mapping[str, object],
    resource: str,
) -> ContainerView:
    state, last = inside(status, "state"), inside(status, "lastState")
    is_running = isinstance(state.get("running"), Mapping)
    container_id = _text(status, "containerID").rpartition("://")[2]
    return ContainerView(
        name=_text(item, "name"),
        role=role,
        count=max(0, decode_quantity(_requested(item, resource)) or 0),
        control_disabled=any(
            _text(env, "name") == CONTROL_ENV and _text(env, "value") in GO_TRUE
            for env in objects_in(item, "env")
        ),
        running_id=container_id if is_running else None,
        has_run=bool(container_id) or "terminated" in state or "terminated" in last,
        started_at=_started_at(state, last),
        succeeded=any(inside(s, "terminated").get("exitCode") == 0 for s in (state, last)),
        priority=_priority(item),
        core_policy=_literal(item, CORE_POLICY_ENV),
        resource=resource,
        others=tuple(_others(item, resource)),
    )


def _priority(item: Mapping[str, object]) -> int:
    """CUDA_TASK_PRIORITY as HAMi-core reads it with atoi."""
    number = _ATOI.match(_literal(item, PRIORITY_ENV, str(DEFAULT_PRIORITY)))
    return max(INT32[0], min(int(number[1]), INT32[1])) if number else 0


def _literal(item: Mapping[str, object], name: str, absent: str = "") -> str:
    """The last entry of a variable counts; `absent`: none, or its value is taken from elsewhere."""
    given = [env for env in objects_in(item, "env") if _text(env, "name") == name]
    if not given or "valueFrom" in given[-1] or "$(" in _text(given[-1], "value"):
        return absent
    return _text(given[-1], "value")


def _started_at(state: Mapping[str, object], before: Mapping[str, object]) -> dt.datetime | None:
    """The last start in two states of a container."""
    texts = (
        _text(inside(parent, kind), "startedAt")
        for parent in (state, before)
        for kind in ("running", "terminated")
    )
    return max((_stamp(text) for text in texts if text), default=None)


def _ended_at(status: Mapping[str, object], restarts: str) -> dt.datetime | None:
    """When the container ended; None if it runs or the restart policy may start it again."""
    terminated = inside(inside(status, "state"), "terminated")
    is_over = restarts == "Never" or (restarts == "OnFailure" and terminated.get("exitCode") == 0)
    return _stamp(_text(terminated, "finishedAt")) if terminated and is_over else None


def _others(item: Mapping[str, object], resource: str) -> Iterator[tuple[str, int]]:
    """The container's requests of other extended resources, by name."""
    resources = inside(item, "resources")
    names = {*inside(resources, "limits"), *inside(resources, "requests")}
    for name in sorted(names - {resource}):
        text = _requested(item, name) if "/" in name else ""
        if text:
            amount = decode_whole(text)
            yield name, NOT_WHOLE if amount is None else amount


def _requested(item: Mapping[str, object], resource: str) -> str:
    """The quantity in limits, else in requests, as text; empty when there is none."""
    resources = inside(item, "resources")
    for part in ("limits", "requests"):
        value = inside(resources, part).get(resource)
        if isinstance(value, str):
            return value
        if type(value) is int and abs(value) < 2**63:
            return str(value)
    return ""


def _statuses(status: Mapping[str, object], key: str) -> Mapping[str, Mapping[str, object]]:
    return {_text(item, "name"): item for item in objects_in(status, key)}


def _phase(text: str) -> Phase:
    """The phase; Pending for a pod without one, Unknown for an unknown one."""
    if not text:
        return Phase.PENDING
    return next((phase for phase in Phase if phase == text), Phase.UNKNOWN)


def _stamp(text: str) -> dt.datetime:
    try:
        return decode_stamp(text)
    except MalformedText:
        return EPOCH


def _text(parent: Mapping[str, object], key: str) -> str:
    value = parent.get(key)
    return value if isinstance(value, str) else ""


def _texts(parent: Mapping[str, object], key: str) -> Mapping[str, str]:
    pairs = inside(parent, key).items()
    return {name: value for name, value in pairs if isinstance(value, str)}
