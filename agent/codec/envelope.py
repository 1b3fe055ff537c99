"""The form of every file in the state directory: JSON with a checksum of its data's exact bytes.

    {"kind":"hami-agent-state","version":1,"checksum":"<sha256>","data":{…}}

A file of the next version is read too: unknown keys are ignored, missing ones get their defaults.
"""

import hashlib
from typing import TypeVar

import msgspec

from agent.core.errors import StateCorrupt, cap


class _Envelope(msgspec.Struct, frozen=True):
    """The envelope. `data` keeps its exact bytes for the checksum."""

    kind: str
    version: int
    checksum: str
    data: msgspec.Raw


_Shape = TypeVar("_Shape")


def seal(kind: str, version: int, data: bytes) -> bytes:
    """Put `data`, which is JSON, into the envelope."""
    checksum = hashlib.sha256(data).hexdigest()
    head = f'{{"kind":"{kind}","version":{version},"checksum":"{checksum}","data":'
    return b"".join((head.encode(), data, b"}\n"))


def unseal(content: bytes, kind: str, version: int, shape: type[_Shape]) -> _Shape:
    """Decode the data of a file of that kind; `version` is the one that this agent writes.

    Raises StateCorrupt, which says what is wrong.
    """
    file = _decode(content, _Envelope)
    if file.kind != kind:
        raise StateCorrupt(f"it is not a file of kind {kind}: its kind is {cap(file.kind, 40)}")
    if file.version not in (version, version + 1):
        raise StateCorrupt(
            f"it has version {file.version}; this agent reads versions {version} and {version + 1}"
        )
    raw = bytes(file.data)
    if hashlib.sha256(raw).hexdigest() != file.checksum:
        raise StateCorrupt("its checksum does not match its data")
    return _decode(raw, shape)


def _decode(content: bytes, shape: type[_Shape]) -> _Shape:
    try:
        return msgspec.json.decode(content, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StateCorrupt(f"it cannot be read: {cap(str(error), 120)}") from error
