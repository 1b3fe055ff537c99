"""JSON of the API server, read field by field: what nobody here uses is passed over, never kept.

A pod may have a megabyte and a half in annotations, arguments and variables that mean nothing to
the agent. Only what `agent.codec.objects` looks at is decoded; one object at a time.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, TypedDict

import msgspec

from agent.core.errors import MalformedText

Raw = bytes | bytearray | msgspec.Raw
"""JSON that stands for one value."""


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


class _ContainerFields(TypedDict, total=False):
    name: Any
    resources: Any
    restartPolicy: Any
    restartPolicyRules: Any
    env: list[_Variable] | None


class _SpecFields(TypedDict, total=False):
    nodeName: Any
    restartPolicy: Any
    initContainers: list[_ContainerFields] | None
    containers: list[_ContainerFields] | None


class _ContainerStatus(TypedDict, total=False):
    name: Any
    containerID: Any
    restartCount: Any
    state: Any
    lastState: Any


class _Status(TypedDict, total=False):
    phase: Any
    reason: Any
    message: Any
    initContainerStatuses: list[_ContainerStatus] | None
    containerStatuses: list[_ContainerStatus] | None


class _PodFields(TypedDict, total=False):
    metadata: _Metadata | None
    spec: _SpecFields | None
    status: _Status | None


_ListMeta = TypedDict("_ListMeta", {"resourceVersion": str, "continue": str}, total=False)


class _List(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


class _Frame(msgspec.Struct):
    type: str
    object: msgspec.Raw


_POD: Final = msgspec.json.Decoder(_PodFields)
_OBJECT: Final = msgspec.json.Decoder(dict[str, Any])
_LIST: Final = msgspec.json.Decoder(_List)
_FRAME: Final = msgspec.json.Decoder(_Frame)
_ITEMS: Final = b'"items":['
_BROKEN: Final = (msgspec.DecodeError, UnicodeDecodeError)


@dataclasses.dataclass(frozen=True, slots=True)
class ListPage:
    """A list, or a part of one. `rest`: the token that asks for the next part, empty for none."""

    version: str
    rest: str
    items: tuple[msgspec.Raw, ...]


def read_object(body: Raw) -> Mapping[str, Any]:
    """The whole object. Raises MalformedText."""
    try:
        return _OBJECT.decode(body)
    except _BROKEN as error:
        raise MalformedText("it is no JSON object") from error


def read_pod(body: Raw) -> Mapping[str, Any]:
    """What `decode_pod` looks at; the whole object where a part has a shape that no pod has.

    Raises:
        MalformedText: it is no object.
    """
    try:
        found: Mapping[str, Any] = _POD.decode(body)
    except _BROKEN:
        return read_object(body)
    return found


def read_page(body: Raw) -> ListPage:
    """The list, its items unread. Raises MalformedText."""
    try:
        found = _LIST.decode(body)
    except _BROKEN as error:
        raise MalformedText("it is no list of objects") from error
    version = found.metadata.get("resourceVersion", "")
    if not version:
        raise MalformedText("the list has no resourceVersion")
    return ListPage(version, found.metadata.get("continue", ""), tuple(found.items or ()))


def read_page_head(beginning: Raw) -> ListPage:
    """The list whose items were cut off, without them: the API server writes its metadata first.

    Raises:
        MalformedText: that much does not hold the metadata.
    """
    head, found, _ = bytes(beginning).partition(_ITEMS)
    if not found:
        raise MalformedText("the list does not begin with its metadata")
    return read_page(head + _ITEMS + b"]}")


def read_frame(line: Raw) -> tuple[str, msgspec.Raw]:
    """Type and object of a frame of a watch. Raises MalformedText."""
    try:
        found = _FRAME.decode(line)
    except _BROKEN as error:
        read_object(line)  # says so where it is none
        raise MalformedText("a frame of the watch has no type or no object") from error
    if not bytes(found.object).startswith(b"{"):
        raise MalformedText("a frame of the watch has no type or no object")
    return found.type, found.object
