"""Recognises by its form alone which of HAMi's annotations a value belongs to.

A text may have a form and still be malformed: the decoder of that form then says where.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Final

from agent.codec.gojson import fold
from agent.codec.handshake import HandshakeWord
from agent.core.cluster.annotations import PHASE_ALLOCATING, PHASE_FAILED, PHASE_SUCCESS

PHASES: Final = (PHASE_ALLOCATING, PHASE_SUCCESS, PHASE_FAILED)
MIG_KEY: Final = "containerindex"
"""A key of `hami.io/vgpu-mig-allocations`, which is JSON."""

_KEYED: Final = re.compile(r"[\"']?hami\.io/[A-Za-z0-9._-]+[\"']?\s*[:=]\s*(.*?),?", re.DOTALL)
_LOCK: Final = re.compile("[0-9]{4}-[0-9]{2}-[0-9]{2}T")
_SECONDS: Final = re.compile("[0-9]{10,11}")
"""Unix seconds from 2001 on."""
_UUID: Final = re.compile(r"\s*(GPU|MIG)-[^,:;\s]+\s*")


def bare(text: str) -> str:
    """Strip the key and the quotes from a value that was copied from kubectl's output.

    No value of HAMi's begins with a quote or a key.
    """
    match = _KEYED.fullmatch(text.strip())
    value = (match[1] if match else text).strip()
    if len(value) > 1 and value[0] == value[-1] == "'":
        return value[1:-1].strip()
    if len(value) > 1 and value[0] == value[-1] == '"':
        try:
            unquoted = json.loads(value)
        except ValueError:
            return value[1:-1].strip()
        return str(unquoted).strip()
    return value


def kind_of(text: str) -> str | None:
    """The kind of a value by its form, well-formed or not; None: it has no form of HAMi's."""
    return next((kind for kind, has_form in _FORMS.items() if has_form(text)), None)


def keys_of_first(text: str) -> frozenset[str]:
    """The keys of the first object of a JSON array, in lower case; none for any other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return frozenset()
    first = value[0] if isinstance(value, list) and value else None
    return frozenset(map(fold, first)) if isinstance(first, dict) else frozenset()


def _is_register(text: str) -> bool:
    """A JSON array, or a first record with more than four fields and a number as its second."""
    if text.startswith("[") or text == "null":
        return True
    fields = text.lstrip(":").split(":")[0].split(",")
    return ";" not in text and len(fields) > 4 and not fields[1].isalpha()


def _is_cordon(text: str) -> bool:
    uuids = [part for part in text.split(",") if part.strip()]
    return bool(uuids) and all(map(_UUID.fullmatch, uuids))


def _is_devices(text: str) -> bool:
    """A share of four fields, a shorter one before `;`, or only separators (consumed groups)."""
    pieces = [piece for piece in re.split("[:;]", text) if piece]
    fields = max((piece.count(",") for piece in pieces), default=0) + 1
    return fields >= 4 or (";" in text and (fields > 1 or not pieces))


_FORMS: Mapping[str, Callable[[str], bool]] = {
    "nodeconfig": lambda text: text.startswith("{") and '"nodeconfig"' in text.lower(),
    "handshake": lambda text: text.startswith(tuple(word.value for word in HandshakeWord)),
    "lock": lambda text: _LOCK.match(text) is not None,
    "time": lambda text: _SECONDS.fullmatch(text) is not None,
    "phase": lambda text: text in PHASES,
    "score": lambda text: text.startswith("[") and "score" in keys_of_first(text),
    "cordon": _is_cordon,
    "register": _is_register,
    "devices": _is_devices,
}
