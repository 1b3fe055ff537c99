"""The handshake annotation: a word and the time when it was written.

Source: HAMi v2.10 pkg/scheduler/scheduler.go, register. The times of v2.4 have dots in the date. A
scheduler writes its local time without its zone.
"""

import datetime as dt
import enum
import re

import msgspec

from agent.core.errors import MalformedText, cap


class HandshakeWord(enum.Enum):
    """The word of a handshake; it tells who wrote it and why."""

    REPORTED = "Reported"
    """Written by the node's agent: the register annotation is new."""
    REQUESTING = "Requesting"
    """Written by the scheduler: it read the register annotation and waits for the agent."""
    DELETED = "Deleted"
    """Written by the scheduler: the agent did not answer; the node's GPUs are dropped."""


class Handshake(msgspec.Struct, frozen=True):
    """A decoded handshake. `stamp` is naive if the text names no zone, None if it has no time."""

    word: HandshakeWord
    stamp: dt.datetime | None


_STAMP = re.compile(
    r"[ _](?P<year>[0-9]{4})[-.](?P<month>[0-9]{2})[-.](?P<day>[0-9]{2})"
    r" (?P<time>[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,9})?)"
    r"(?: (?P<offset>[+-][0-9]{4}) \S{1,16})?(?: m=[+-][0-9.]{1,32})?"
)


def decode_handshake(text: str) -> Handshake:
    """Decode the word at the beginning of the text, and the time after it.

    Schedulers act on the word even without a valid time, so such a text is not malformed.

    Raises:
        MalformedText: the text begins with none of the words.
    """
    for word in HandshakeWord:
        if text.startswith(word.value):
            return Handshake(word, _stamp(text.removeprefix(word.value)))
    raise MalformedText(
        f"handshake {cap(text)!r} begins with none of "
        f"{', '.join(word.value for word in HandshakeWord)}"
    )


def encode_reported(now: dt.datetime) -> str:
    """Encode the agent's stamp, for schedulers up to and including 2.7.1; `now` is aware.

    They act on the word; the time has Go's form, as HAMi's plugin wrote it.
    """
    return f"{HandshakeWord.REPORTED.value} {now.astimezone(dt.UTC):%Y-%m-%d %H:%M:%S.%f} +0000 UTC"


def _stamp(rest: str) -> dt.datetime | None:
    match = _STAMP.fullmatch(rest)
    if match is None:
        return None
    date = f"{match['year']}-{match['month']}-{match['day']}"
    try:
        return dt.datetime.fromisoformat(f"{date}T{match['time']}{match['offset'] or ''}")
    except ValueError:
        return None
