"""The health of one GPU: its condition, the cause, and what a person should do."""

import datetime as dt
import enum

import msgspec


class Condition(enum.StrEnum):
    """The five conditions of a GPU."""

    OK = "ok"
    WATCH = "watch"
    """Served. Something happened; the GPU is ok again after the quiet period."""
    BAD = "bad"
    LOST = "lost"
    UNMONITORED = "unmonitored"
    """The agent does not receive its events, or it does not answer. The cause says which."""


class Cause(enum.StrEnum):
    """Why a GPU has its condition."""

    NONE = "none"
    XID = "xid"
    ECC = "ecc"
    MEMORY = "memory"
    """Memory rows or pages wait for a reset, or no spare ones are left."""
    ADVICE = "advice"
    """The driver reports a recovery action, such as a reset."""
    REFUSED = "refused"
    """The driver refuses calls for the GPU until the GPU is reset."""
    FABRIC = "fabric"
    """The GPU has not joined the fabric of its NVSwitches."""
    PROBE = "probe"
    LOST = "lost"
    DRIVER = "driver"
    """The GPU does not answer. It is served until health.driverHang has passed."""
    MONITOR = "monitor"
    """The GPU answers, but the agent does not receive its events. It is served."""
    RELEASED = "released"
    """An operator released the GPU for work on it. It is neither served nor probed."""
    OFF = "off"
    """The operator switched the health checks off."""


class Action(enum.StrEnum):
    """What a person should do about a GPU."""

    NONE = "none"
    WAIT = "wait"
    """Nothing: the condition clears by itself."""
    INSPECT = "inspect"
    """Look at the kernel's log."""
    RESET = "reset"
    REBOOT = "reboot"
    REPLACE = "replace"


class Health(msgspec.Struct, frozen=True):
    """The condition of one GPU, since when, and why.

    - `since`: when the condition began, with this cause.
    - `quiet_since`: when the cool-down last began again (a bad report, or the end of the need for a
      reset). None: it began with the condition.
    - `serving`: whether the kubelet list, the register annotation and Allocate offer the GPU.
    - `cause` and `action`: values of Cause and Action. They are text so that an older agent can
      read the checkpoint of a newer one.
    - `text`: a sentence for people. It ends with the id `runbook` in brackets.
    - `needs_reset`: cleared by a boot, by lost-then-present, by refused-then-answered, or when the
      driver reports that no action is needed. With `needs_reboot`, only a boot clears it.
    - `passed_probes`: passed probes since the last bad report.
    - `bouts`: consecutive bouts, each soon after the end of the one before (`recovered_at`).
    - `failures`: times of failed probes of the last 10 minutes while the GPU was neither bad nor
      lost. The last `failed_in_row` of them had no passed probe between them.
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
    quiet_since: dt.datetime | None = None

    @property
    def quiet_from(self) -> dt.datetime:
        """When the cool-down began."""
        return self.quiet_since or self.since

    @property
    def ill(self) -> bool:
        """True while the GPU is bad or lost."""
        return self.condition in {Condition.BAD, Condition.LOST}

    @property
    def silent(self) -> bool:
        """True while the GPU does not answer."""
        return self.condition is Condition.UNMONITORED and self.cause == Cause.DRIVER
