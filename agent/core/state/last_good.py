"""The settings that were last taken over: their sources as they were, to start with once more."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class SourceFile:
    """A file's bytes, and what messages call it."""

    name: str
    content: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class LastGood:
    """The files as they were read when everything fitted; one that was not there is None.

    `labels` are the ones that the Node `node` was seen with last, None before it was seen.
    `written_by` is the agent's version.
    """

    written_by: str
    node: str
    labels: Mapping[str, str] | None = None
    device_config: SourceFile | None = None
    own: SourceFile | None = None
    node_config: SourceFile | None = None
