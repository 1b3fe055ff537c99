"""What holds for every history of reports."""

import datetime as dt

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.health.judge import MOST_LATELY, SAME_HICCUP, judge, quiet_time
from agent.health.xids import XIDS, HealthSettings, XidClass, xid_class
from agent.model import (
    Condition,
    DriverEvent,
    EventKind,
    GpuSigns,
    Health,
    Probe,
    ProbeOutcome,
    RecoveryAction,
)
from tests.builders import G1, NOON

SETTINGS = HealthSettings()
ANSWERS = {ProbeOutcome.PASSED, ProbeOutcome.FAILED}

xids = st.builds(
    DriverEvent,
    st.just(EventKind.XID),
    st.sampled_from([G1, None]),
    st.sampled_from([*XIDS, 1, 200]),
)
others = st.builds(DriverEvent, st.sampled_from([k for k in EventKind if k != "xid"]), st.just(G1))
signs = st.builds(
    GpuSigns,
    rows_pending=st.sampled_from((None, False, True)),
    rows_failed=st.sampled_from((None, False, False, True)),
    recovery=st.sampled_from((None, None, *RecoveryAction)),
)
probes = st.builds(
    Probe,
    st.just(G1),
    st.sampled_from(ProbeOutcome),
    st.text(max_size=400),
    signs,
    st.sampled_from(("", "", "not supported")),
)
steps = st.lists(st.tuples(st.floats(0, 900), st.one_of(xids, others, probes)), max_size=30)


@settings(max_examples=50)
@given(steps)
def test_what_holds_after_every_report(moves):
    before, now = Health(Condition.OK, since=NOON), NOON
    failed: list[dt.datetime] = []
    for wait, report in moves:
        now += dt.timedelta(seconds=wait)
        health = judge(before, report, now, SETTINGS)
        is_probe = isinstance(report, Probe)
        # A bad or lost GPU is never served, an ok or watched one always.
        if health.condition is not Condition.UNMONITORED:
            assert health.serving == (health.condition in {Condition.OK, Condition.WATCH})
        # Only an absence, an answer or the driver takes the need for a reset away, and then the
        # cool-down begins; only a boot takes the need for a reboot away.
        if before.needs_reset and not health.needs_reset:
            assert is_probe
            says_none = report.signs.recovery is RecoveryAction.NONE
            answers = before.cause == "refused" and report.outcome in ANSWERS
            assert answers or says_none or Condition.LOST in {before.condition, health.condition}
            assert now == health.quiet_from or health.condition is not Condition.BAD
        assert health.needs_reboot or not before.needs_reboot
        # A cool-down has its length.
        assert SETTINGS.quiet <= quiet_time(health, SETTINGS) <= SETTINGS.longest_quiet
        if before.ill and not health.ill:
            assert is_probe
            rest = (health.since - before.quiet_from).total_seconds()
            assert rest >= quiet_time(before, SETTINGS)
        # A condition begins with the report that changed what is said; no time goes backwards.
        said = [(one.condition, one.cause, one.text) for one in (before, health)]
        assert health.since == before.since or said[0] != said[1]
        assert before.since <= health.since <= health.quiet_from
        # An XID of the GPU itself is never followed by ok.
        if not is_probe and report.kind is EventKind.XID:
            is_harmless = xid_class(report.xid or 0) is XidClass.APPLICATION
            assert is_harmless or Condition.OK is not health.condition
        # Texts stay short, and a healthy GPU has no cause.
        assert len(health.text) < 400
        if health.condition is Condition.OK:
            assert ("none", None, False) == (health.cause, health.xid, health.needs_reset)
        # No GPU is bad by one hiccup of its probes.
        if is_probe and report.outcome is ProbeOutcome.FAILED:
            failed.append(now)
        if health.cause == "probe" and health.ill and not before.ill:
            assert (failed[-1] - failed[0]).total_seconds() >= SAME_HICCUP
        assert len(health.failures) < MOST_LATELY
        before = health
