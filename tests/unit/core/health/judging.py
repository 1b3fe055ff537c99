"""Reports about one GPU, and its health after them."""

import datetime as dt

from agent.health.judge import judge
from agent.health.xids import HealthSettings
from agent.model import Condition, DriverEvent, EventKind, GpuUuid, Health, Probe, ProbeOutcome
from tests.builders import G1, NOON

SETTINGS = HealthSettings()
OK = Health(Condition.OK, since=NOON)
PASSED = Probe(G1, ProbeOutcome.PASSED)
FAILED = Probe(G1, ProbeOutcome.FAILED, "Unknown Error")
REFUSED = Probe(G1, ProbeOutcome.REFUSED, "GPU requires restart")
LOST = Probe(G1, ProbeOutcome.LOST, "GPU is lost")
SILENT = Probe(G1, ProbeOutcome.SILENT, "2 s")
DEAF = Probe(G1, ProbeOutcome.PASSED, unmonitored="not supported")


def later(seconds: float) -> dt.datetime:
    """A moment of the test."""
    return NOON + dt.timedelta(seconds=seconds)


def xid(number: int, uuid: GpuUuid | None = G1) -> DriverEvent:
    """The driver reports an XID."""
    return DriverEvent(EventKind.XID, uuid, number)


def after(health: Health, *reports: Probe | DriverEvent, at: float = 10.0) -> Health:
    """The health after these reports, all at one moment."""
    for report in reports:
        health = judge(health, report, later(at), SETTINGS)
    return health
