"""The settings files that were last accepted. A later start falls back to them."""

from collections.abc import Mapping

import msgspec


class SourceFile(msgspec.Struct, frozen=True):
    """A file's bytes, and its name in messages."""

    name: str
    content: bytes


class LastGood(msgspec.Struct, frozen=True):
    """The files as they were last accepted; None: the file did not exist.

    `labels`: the last known labels of the Node `node`; None: it was never seen. `written_by`: the
    agent's version.
    """

    written_by: str
    node: str
    labels: Mapping[str, str] | None = None
    device_config: SourceFile | None = None
    own: SourceFile | None = None
    node_config: SourceFile | None = None
