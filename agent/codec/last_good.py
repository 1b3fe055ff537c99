"""The last good settings on disk: the files' raw bytes, in the state directory's envelope."""

import msgspec

from agent.codec.envelope import seal, unseal
from agent.core.state.last_good import LastGood

KIND = "hami-agent-settings"
VERSION = 1


def encode_last_good(copy: LastGood) -> bytes:
    """The file's bytes; the files' are base64 in its JSON."""
    return seal(KIND, VERSION, msgspec.json.encode(copy))


def decode_last_good(content: bytes) -> LastGood:
    """What the file holds. Raises StateCorrupt, which says what is wrong with it."""
    return unseal(content, KIND, VERSION, LastGood)
