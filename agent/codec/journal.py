"""The journal on disk, in the state directory's envelope."""

import msgspec

from agent.codec.envelope import seal, unseal
from agent.core.state.journal import JournalRecord

KIND = "hami-agent-journal"
VERSION = 1


def encode_journal(record: JournalRecord) -> bytes:
    """Encode the record."""
    return seal(KIND, VERSION, msgspec.json.encode(record))


def decode_journal(content: bytes) -> JournalRecord:
    """Decode the record. Raises StateCorrupt, which says what is wrong."""
    return unseal(content, KIND, VERSION, JournalRecord)
