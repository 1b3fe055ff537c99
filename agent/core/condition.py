"""How a GPU is: the conclusion that doors show and answers obey."""

import dataclasses
import datetime as dt
import enum


class Condition(enum.StrEnum):
    """The five conditions of a GPU."""

    OK = "ok"
    WATCH = "watch"
    """Served; something happened that clears after a quiet time."""
    BAD = "bad"
    LOST = "lost"
    UNMONITORED = "unmonitored"
    """Its events or probes do not answer; served until health.driverHang has passed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Health:
    """The condition of one GPU, since when, and why.

    `serving` is what the kubelet list, the annotation and Allocate go by. `cause` is a short word
    (xid, ecc, probe, lost, driver, none); `text` a sentence for people.
    `needs_reset`: only a new boot id or lost-then-present clears it.
    """

    condition: Condition
    since: dt.datetime
    cause: str = "none"
    text: str = ""
    xid: int | None = None
    needs_reset: bool = False
    serving: bool = True
    passed_probes: int = 0
