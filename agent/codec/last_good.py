"""The last good settings on disk: the files' raw bytes, in the state directory's envelope."""

import msgspec

from agent.codec.envelope import seal, unseal
from agent.core.last_good import LastGood, SourceFile

KIND = "hami-agent-settings"
VERSION = 1


class _Data(msgspec.Struct, frozen=True):
    """The payload, as it is read; bytes are base64 in JSON."""

    written_by: str
    node: str
    labels: dict[str, str] | None = None
    device_config: SourceFile | None = None
    own: SourceFile | None = None
    node_config: SourceFile | None = None


def encode_last_good(copy: LastGood) -> bytes:
    """The file's bytes."""
    return seal(KIND, VERSION, msgspec.json.encode(copy))


def decode_last_good(content: bytes) -> LastGood:
    """What the file holds. Raises StateCorrupt, which says what is wrong with it."""
    data = unseal(content, KIND, VERSION, _Data)
    return LastGood(
        written_by=data.written_by,
        node=data.node,
        labels=data.labels,
        device_config=data.device_config,
        own=data.own,
        node_config=data.node_config,
    )
