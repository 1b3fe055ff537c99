"""Who wrote what of an object: the API server keeps it in metadata.managedFields."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Final

from agent.codec.parts import inside, objects_in

WRITER: Final = "hami-agent"
"""The agent's name there: its User-Agent up to the slash."""


@dataclasses.dataclass(frozen=True, slots=True)
class ManagedFields:
    """What one writer was the last to change; `time` is that of its last change, as RFC 3339."""

    writer: str
    time: str
    fields: Mapping[str, object]

    @property
    def annotations(self) -> frozenset[str]:
        """The annotations among it."""
        found = inside(inside(self.fields, "f:metadata"), "f:annotations")
        return frozenset(key.removeprefix("f:") for key in found)


def entries(metadata: Mapping[str, object]) -> tuple[ManagedFields, ...]:
    """All writers. What has another shape counts as nothing."""
    return tuple(
        ManagedFields(str(one.get("manager")), str(one.get("time", "")), inside(one, "fieldsV1"))
        for one in objects_in(metadata, "managedFields")
    )


def other_writer(managed: Iterable[ManagedFields], key: str) -> str:
    """Who but an agent was the last to change this annotation, and when, as `writer time`.

    Empty: it was an agent, or it is not known.
    """
    owners = [one for one in managed if key in one.annotations]
    if not owners or any(one.writer == WRITER for one in owners):
        return ""
    last = max(owners, key=lambda one: one.time)
    return f"{last.writer} {last.time}"
