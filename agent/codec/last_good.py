"""The last good copy of the settings: the files' raw bytes, in the state directory's envelope."""

import msgspec

from agent.codec.envelope import seal, unseal
from agent.core.state.last_good import LastGood

KIND = "hami-agent-settings"
VERSION = 1


def encode_last_good(copy: LastGood) -> bytes:
    """Encode the copy; the files' bytes are base64."""
    return seal(KIND, VERSION, msgspec.json.encode(copy))


def decode_last_good(content: bytes) -> LastGood:
    """Decode the copy. Raises StateCorrupt, which says what is wrong."""
    return unseal(content, KIND, VERSION, LastGood)
