"""What holds for every history of reports."""

import datetime as dt

from hypothesis import given
from hypothesis import strategies as st

from agent.health.judge import MOST_LATELY, SAME_HICCUP, judge, quiet_time
from agent.health.xids import XIDS, XidClass, xid_class
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
from tests.unit.core.health.judging import OK, SETTINGS

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


def history(moves) -> list[tuple[Health, object, Health]]:
    """Before, report and after of each step."""
    health, now, seen = OK, NOON, []
    for wait, report in moves:
        now += dt.timedelta(seconds=wait)
        fresh = judge(health, report, now, SETTINGS)
        seen.append((health, report, fresh))
        health = fresh
    return seen


@given(steps)
def test_a_bad_or_lost_gpu_is_never_served_and_an_ok_or_watched_one_always(moves):
    for _, _, health in history(moves):
        if health.condition is not Condition.UNMONITORED:
            assert health.serving == (health.condition in {Condition.OK, Condition.WATCH})


@given(steps)
def test_only_an_absence_an_answer_or_the_driver_takes_the_need_for_a_reset_away(moves):
    for before, report, health in history(moves):
        if before.needs_reset and not health.needs_reset:
            assert isinstance(report, Probe)
            says_none = report.signs.recovery is RecoveryAction.NONE
            answers = before.cause == "refused" and report.outcome in ANSWERS
            was_away = Condition.LOST in {before.condition, health.condition}
            assert was_away or answers or says_none


@given(steps)
def test_a_gpu_that_needs_its_reset_no_more_begins_its_rest(moves):
    now = NOON
    for (wait, _), (before, _, health) in zip(moves, history(moves), strict=True):
        now += dt.timedelta(seconds=wait)
        if before.needs_reset and not health.needs_reset and health.condition is Condition.BAD:
            assert now == health.quiet_from


@given(steps)
def test_nothing_but_a_boot_takes_the_need_for_a_reboot_away(moves):
    for before, _, health in history(moves):
        assert health.needs_reboot or not before.needs_reboot


@given(steps)
def test_a_quiet_time_is_between_the_first_and_the_longest_one(moves):
    for before, report, health in history(moves):
        assert SETTINGS.quiet <= quiet_time(health, SETTINGS) <= SETTINGS.longest_quiet
        if before.ill and not health.ill:
            assert isinstance(report, Probe)
            rest = (health.since - before.quiet_from).total_seconds()
            assert rest >= quiet_time(before, SETTINGS)


@given(steps)
def test_a_gpu_has_its_condition_since_the_report_that_changed_what_is_said_of_it(moves):
    for before, _, health in history(moves):
        said = [(one.condition, one.cause, one.text) for one in (before, health)]
        assert health.since == before.since or said[0] != said[1]
        assert health.since <= health.quiet_from


@given(steps)
def test_an_xid_that_is_the_gpus_own_is_never_followed_by_ok(moves):
    for _, report, health in history(moves):
        if not isinstance(report, DriverEvent) or report.kind is not EventKind.XID:
            continue
        if xid_class(report.xid or 0) is not XidClass.APPLICATION:
            assert Condition.OK is not health.condition


@given(steps)
def test_a_healthy_gpu_has_no_cause_and_texts_stay_short(moves):
    for _, _, health in history(moves):
        assert len(health.text) < 400
        if health.condition is Condition.OK:
            assert ("none", None, False) == (health.cause, health.xid, health.needs_reset)


@given(steps)
def test_no_gpu_is_bad_by_one_hiccup_of_its_probes(moves):
    failed: list[dt.datetime] = []
    now = NOON
    for (wait, _), (before, report, health) in zip(moves, history(moves), strict=True):
        now += dt.timedelta(seconds=wait)
        if isinstance(report, Probe) and report.outcome is ProbeOutcome.FAILED:
            failed.append(now)
        if health.cause == "probe" and health.ill and not before.ill:
            assert (failed[-1] - failed[0]).total_seconds() >= SAME_HICCUP
        assert len(health.failures) < MOST_LATELY


@given(steps)
def test_moments_never_go_backwards(moves):
    for before, _, health in history(moves):
        assert before.since <= health.since
