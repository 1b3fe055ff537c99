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
    """Its events do not reach us, or it does not answer: see Cause."""


class Cause(enum.StrEnum):
    """Why a GPU is as it is."""

    NONE = "none"
    XID = "xid"
    ECC = "ecc"
    MEMORY = "memory"
    """The driver says that memory rows or pages wait for a reset, or can be replaced no more."""
    ADVICE = "advice"
    """The driver says that the GPU needs something (its recovery action)."""
    REFUSED = "refused"
    """The driver refuses what it is asked about the GPU until that is reset."""
    FABRIC = "fabric"
    """It has not joined the fabric of its NVSwitches."""
    PROBE = "probe"
    LOST = "lost"
    DRIVER = "driver"
    """It does not answer: served until health.driverHang has passed."""
    MONITOR = "monitor"
    """It answers, but the driver's reports of it do not reach us: served."""
    RELEASED = "released"
    """An operator has had it released for work on it: not served, and not asked."""
    OFF = "off"
    """The operator switched the health checks off."""


class Action(enum.StrEnum):
    """What a person should do about it."""

    NONE = "none"
    WAIT = "wait"
    """Nothing: it clears by itself."""
    INSPECT = "inspect"
    """Look at the kernel's log."""
    RESET = "reset"
    REBOOT = "reboot"
    REPLACE = "replace"


@dataclasses.dataclass(frozen=True, slots=True)
class Health:
    """The condition of one GPU, since when, and why.

    `since`: when it became so, or when its rest began anew: with the last bad report, or with the
    news that it needs its reset no more.
    `serving` is what the kubelet list, the annotation and Allocate go by. `cause` is a Cause,
    `action` an Action, as text so that an older agent reads a newer one's memory; `text` is a
    sentence for people, which ends with the id `runbook` in brackets.
    `needs_reset`: only a boot, lost-then-present, refused-then-answered, or the driver's word that
    nothing is needed clears it; with `needs_reboot`, only a boot. `passed_probes` count since the
    last bad report.
    `bouts`: times that it was bad or lost, each soon after the one before was over, which was at
    `recovered_at`. `failures`: when probes failed while it was neither, those of the last minutes;
    `failed_in_row` of them with none that passed since.
    """

    condition: Condition
    since: dt.datetime
    cause: str = Cause.NONE
    text: str = ""
    xid: int | None = None
    needs_reset: bool = False
    serving: bool = True
    passed_probes: int = 0
    action: str = Action.NONE
    runbook: str = ""
    needs_reboot: bool = False
    bouts: int = 0
    recovered_at: dt.datetime | None = None
    failures: tuple[dt.datetime, ...] = ()
    failed_in_row: int = 0

    @property
    def ill(self) -> bool:
        """True while it is bad or lost."""
        return self.condition in {Condition.BAD, Condition.LOST}

    @property
    def silent(self) -> bool:
        """True while it does not answer."""
        return self.condition is Condition.UNMONITORED and self.cause == Cause.DRIVER
