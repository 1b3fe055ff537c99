"""Reads metadata.managedFields: which client last changed which field of an object."""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from agent.codec.narrow import inside, objects_in

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
