"""What happened on this node, for people: changes and refusals."""

import datetime as dt

import msgspec


class JournalEntry(msgspec.Struct, frozen=True):
    """One change or refusal. `reason`: the reason of the Event, or the id of the refusal.

    `namespace`, `pod` and `container` are empty if it is not about one, or if it is not known.
    """

    at: dt.datetime
    reason: str
    text: str
    warning: bool = True
    namespace: str = ""
    pod: str = ""
    container: str = ""


class JournalRecord(msgspec.Struct, frozen=True):
    """Changes and refusals, each the oldest first. `since`: what was before is not known."""

    since: dt.datetime
    changes: tuple[JournalEntry, ...] = ()
    refusals: tuple[JournalEntry, ...] = ()
