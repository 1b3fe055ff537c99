"""Reads JSON of the API server, and keeps only the fields that the agent uses.

A pod may have 1.5 MiB of annotations, arguments and variables that the agent does not need. Only
the fields that `agent.kube.objects` and `agent.kube.reader` read are decoded, one object at a
time.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, TypedDict

import msgspec

from agent.errors import MalformedText

Raw = bytes | bytearray | msgspec.Raw
"""The JSON of one value."""


class _Metadata(TypedDict, total=False):
    uid: Any
    name: Any
    generateName: Any
    namespace: Any
    resourceVersion: Any
    creationTimestamp: Any
    deletionTimestamp: Any
    annotations: Any


class _Variable(TypedDict, total=False):
    name: Any
    value: Any
    valueFrom: Any


class _ContainerFields(TypedDict, total=False):
    name: Any
    resources: Any
    restartPolicy: Any
    restartPolicyRules: Any
    env: list[_Variable] | None


class _SpecFields(TypedDict, total=False):
    nodeName: Any
    schedulerName: Any
    runtimeClassName: Any
    restartPolicy: Any
    initContainers: list[_ContainerFields] | None
    containers: list[_ContainerFields] | None


class _ContainerStatus(TypedDict, total=False):
    name: Any
    containerID: Any
    restartCount: Any
    state: Any
    lastState: Any


class _Condition(TypedDict, total=False):
    type: Any
    status: Any


class _Status(TypedDict, total=False):
    phase: Any
    startTime: Any
    reason: Any
    message: Any
    conditions: list[_Condition] | None
    initContainerStatuses: list[_ContainerStatus] | None
    containerStatuses: list[_ContainerStatus] | None


class _PodFields(TypedDict, total=False):
    metadata: _Metadata | None
    spec: _SpecFields | None
    status: _Status | None


MOST_OBJECTS: Final = 150_000
"""In a list: Kubernetes supports so many pods, and fewer of every other kind that is listed."""

MOST_VALUES: Final = 500_000
"""Values in an answer: so many take up to 50 MB when they are read, and 8 MiB of `{}` take 250."""

_ListMeta = TypedDict("_ListMeta", {"resourceVersion": str, "continue": str}, total=False)


class _List(msgspec.Struct):
    metadata: _ListMeta
    items: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MOST_OBJECTS)] | None = None


class _ListOfOne(msgspec.Struct):
    metadata: _ListMeta
    items: tuple[msgspec.Raw]


class _Frame(msgspec.Struct):
    type: str
    object: msgspec.Raw


_POD: Final = msgspec.json.Decoder(_PodFields)
_OBJECT: Final = msgspec.json.Decoder(dict[str, Any])
_LIST: Final = msgspec.json.Decoder(_List)
_ONE: Final = msgspec.json.Decoder(_ListOfOne)
_FRAME: Final = msgspec.json.Decoder(_Frame)
_ITEMS: Final = b'"items":['
_BROKEN: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class ListPage(msgspec.Struct, frozen=True):
    """A page of a list. `rest`: the token for the next page, empty for none."""

    version: str
    rest: str
    items: tuple[msgspec.Raw, ...]


def has_many_values(body: bytes | bytearray) -> bool:
    """True for more than MOST_VALUES of what stands before values, also where texts have it."""
    return sum(map(body.count, (b"{", b"[", b","))) > MOST_VALUES


def read_object(body: Raw) -> Mapping[str, Any]:
    """Read a whole object. Raises MalformedText."""
    if not isinstance(body, msgspec.Raw) and has_many_values(body):
        raise MalformedText(f"it has more than {MOST_VALUES:,} values, as no object of Kubernetes")
    try:
        return _OBJECT.decode(body)
    except _BROKEN as error:
        raise MalformedText("it is not a JSON object") from error


def read_pod(body: Raw) -> Mapping[str, Any]:
    """Read the fields that decode_pod() uses; the whole object if a field has another shape.

    Raises MalformedText: it is not an object.
    """
    try:
        fields: Mapping[str, Any] = _POD.decode(body)
    except _BROKEN:
        return read_object(body)
    return fields


def read_page(body: Raw, *, one: bool = False) -> ListPage:
    """Read a page of a list without decoding its items. Raises MalformedText.

    `one`: it has exactly one item; it is read no further than to the second.
    """
    try:
        page = (_ONE if one else _LIST).decode(body)
    except _BROKEN as error:
        raise MalformedText("it is not a list of objects") from error
    version = page.metadata.get("resourceVersion", "")
    if not version:
        raise MalformedText("the list has no resourceVersion")
    return ListPage(version, page.metadata.get("continue", ""), tuple(page.items or ()))


def read_page_head(beginning: Raw) -> ListPage:
    """Read the metadata of a truncated list; the API server writes them before the items.

    Raises:
        MalformedText: the beginning does not contain the metadata.
    """
    head, items, _ = bytes(beginning).partition(_ITEMS)
    if not items:
        raise MalformedText("the list does not begin with its metadata")
    return read_page(head + _ITEMS + b"]}")


def read_frame(line: Raw) -> tuple[str, msgspec.Raw]:
    """Read the type and the object of a watch frame. Raises MalformedText."""
    try:
        frame = _FRAME.decode(line)
    except _BROKEN as error:
        read_object(line)  # raises another error if the line is no object
        raise MalformedText("a frame of the watch has no type or no object") from error
    if not bytes(frame.object).startswith(b"{"):
        raise MalformedText("a frame of the watch has no type or no object")
    return frame.type, frame.object


NOTHING: Final[Mapping[str, object]] = MappingProxyType({})


def inside(parent: Mapping[str, object], key: str) -> Mapping[str, object]:
    """The object below `key`; an empty one if there is none."""
    value = parent.get(key)
    return value if isinstance(value, Mapping) else NOTHING


def objects_in(parent: Mapping[str, object], key: str) -> tuple[Mapping[str, object], ...]:
    """The objects of the list below `key`; none if there is no list."""
    value = parent.get(key)
    items = value if isinstance(value, list | tuple) else ()
    return tuple(item for item in items if isinstance(item, Mapping))
