"""Pods and Nodes of the API server as values."""

import datetime as dt
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any, Final

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
from agent.hami.annotations import INT32, LENGTH_LIMIT, Groups, decode_pod_devices, decode_stamp

# Reads JSON of the API server; of a list and of a watch one object at a time.

Raw = bytes | bytearray | msgspec.Raw
"""The JSON of one value."""


MOST_OBJECTS: Final = 150_000
"""In a list: Kubernetes supports so many pods, and fewer of every other kind that is listed."""


class ListMeta(msgspec.Struct, frozen=True):
    """The metadata of a page. `rest`: the token for the next page, empty for none."""

    version: str = msgspec.field(default="", name="resourceVersion")
    rest: str = msgspec.field(default="", name="continue")


class _Page(msgspec.Struct):
    metadata: ListMeta
    items: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MOST_OBJECTS)] | None = None


class _Frame(msgspec.Struct):
    type: str
    object: msgspec.Raw


_OBJECT: Final = msgspec.json.Decoder(dict[str, Any])
_PAGE: Final = msgspec.json.Decoder(_Page)
_FRAME: Final = msgspec.json.Decoder(_Frame)
_BROKEN: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def read_object(body: Raw) -> Mapping[str, Any]:
    """Read a whole object. Raises MalformedText."""
    try:
        return _OBJECT.decode(body)
    except _BROKEN as error:
        raise MalformedText("it is not a JSON object") from error


def read_page(body: Raw) -> tuple[ListMeta, Sequence[msgspec.Raw]]:
    """Read the metadata and the items of a page, which are not decoded. Raises MalformedText."""
    try:
        page = _PAGE.decode(body)
    except _BROKEN as error:
        raise MalformedText("it is not a list of objects") from error
    if not page.metadata.version:
        raise MalformedText("the list has no resourceVersion")
    return page.metadata, page.items or ()


def read_frame(line: Raw) -> tuple[str, msgspec.Raw]:
    """Read type and object of a watch frame; the object is not decoded. Raises MalformedText."""
    try:
        frame = _FRAME.decode(line)
    except _BROKEN as error:
        raise MalformedText("a frame of the watch has no type or no object") from error
    return frame.type, frame.object


def inside(parent: Mapping[str, object], *keys: str) -> Mapping[str, object]:
    """The object below these keys, one below the other; an empty one if there is none."""
    for key in keys:
        value = parent.get(key)
        parent = value if isinstance(value, Mapping) else {}
    return parent


def text_in(parent: Mapping[str, object], *keys: str) -> str:
    """The text below these keys; empty if there is none."""
    value = inside(parent, *keys[:-1]).get(keys[-1])
    return value if isinstance(value, str) else ""


def objects_in(parent: Mapping[str, object], *keys: str) -> tuple[Mapping[str, object], ...]:
    """The objects of the list below these keys; none if there is no list."""
    value = inside(parent, *keys[:-1]).get(keys[-1])
    items = value if isinstance(value, list | tuple) else ()
    return tuple(item for item in items if isinstance(item, Mapping))


def texts_in(parent: Mapping[str, object], *keys: str) -> dict[str, str]:
    """The texts of the object below these keys, by their own keys."""
    pairs = inside(parent, *keys).items()
    return {key: value for key, value in pairs if isinstance(value, str)}


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
    if exponent is None and suffix not in _SUFFIXES:
        return None
    factor = _SUFFIXES[suffix] if exponent is None else Fraction(10) ** int(exponent[1:])
    return Fraction(sign + digits) * factor


# Reads metadata.managedFields: which client last changed which annotation of an object.

WRITER: Final = "hami-agent"
"""The agent's field manager (its User-Agent up to the slash), and the component of its Events."""


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
    groups: Groups | None = None
    groups_error = ""
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
    if not uid or not name:
        known = cap(name or uid) or "without a name"
        raise MalformedText(f"{kind} {known}: metadata.uid and metadata.name must both be texts")
    return uid, name


def _containers(
    spec: Mapping[str, object], status: Mapping[str, object], resource: str
) -> Iterator[ContainerView]:
    """Init containers and sidecars first, then app containers, as the kubelet admits them."""
    for kind in ("initContainers", "containers"):
        # Their statuses: initContainerStatuses, containerStatuses.
        statuses = objects_in(status, f"{kind[:-1]}Statuses")
        known = {text_in(item, "name"): item for item in statuses}

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
    is_running = isinstance(state.get("running"), Mapping)
    container_id = text_in(status, "containerID").rpartition("://")[2]
    starts = [
        decode_moment(text) or EPOCH
        for parent in (state, last)
        for kind in ("running", "terminated")
        if (text := text_in(parent, kind, "startedAt"))
    ]
    terminated = inside(state, "terminated")
    is_over = restarts == "Never" or (restarts == "OnFailure" and terminated.get("exitCode") == 0)
    ended_at = decode_moment(terminated.get("finishedAt")) or EPOCH

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
        running_id=container_id if is_running else None,
        has_run=bool(container_id) or "terminated" in state or "terminated" in last,
        started_at=max(starts, default=None),
        ended_at=ended_at if terminated and is_over else None,
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
