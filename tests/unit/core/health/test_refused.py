"""A GPU for which the driver answers only after a reset, on drivers that advise nothing, too."""

import functools

import msgspec
import pytest

from agent.health.judge import missing, remembered
from agent.model import (
    Condition,
    DriverEvent,
    EventKind,
    GpuSigns,
    Probe,
    ProbeOutcome,
    RecoveryAction,
)
from tests.builders import G1, NOON, a_health
from tests.unit.core.health import judging
from tests.unit.core.health.judging import (
    DEAF,
    FAILED,
    LOST,
    OK,
    PASSED,
    REFUSED,
    SETTINGS,
    SILENT,
    later,
    xid,
)

QUIET = SETTINGS.quiet
PASSES = [PASSED] * 3
after = functools.partial(judging.after, at=0.0)


def advised(action: RecoveryAction) -> Probe:
    return msgspec.structs.replace(PASSED, signs=GpuSigns(recovery=action))


@pytest.mark.parametrize("before", [(), (xid(94),), (SILENT,), (DEAF,), (FAILED,), (LOST,)])
def test_the_first_refusal_is_enough_whatever_was_before(before):
    health = after(OK, *before, REFUSED)

    assert (Condition.BAD, False, "refused", True, False) == (
        health.condition,
        health.serving,
        health.cause,
        health.needs_reset,
        health.needs_reboot,
    )
    expected = "H-094" if before == (xid(94),) else "H-RESET"
    assert ("reset", expected) == (health.action, health.runbook)
    assert "a reset of the GPU, or a reboot of the node" in missing(health, NOON, SETTINGS)


def test_it_says_what_is_the_matter_and_what_to_do():
    words = "the driver refuses calls for it until it is reset"

    assert f"{words}; reset it or reboot the node [H-RESET]" == after(OK, REFUSED).text
    assert f"{words} (after XID 79); reset it or reboot the node [H-079]" == (
        after(OK, xid(79), REFUSED).text
    )


def test_it_stays_out_for_as_long_as_it_refuses():
    health = after(OK, *[REFUSED] * 9)

    for day in range(1, 9):
        health = after(health, REFUSED, FAILED, SILENT, at=86400.0 * day)

    assert ("refused", True, False) == (health.cause, health.needs_reset, health.serving)


def test_a_gpu_that_is_refused_again_and_again_is_refused_since_the_first_time():
    health = after(OK, REFUSED)

    assert health is after(health, REFUSED, at=3600)


@pytest.mark.parametrize("before", [(), (xid(48),), (xid(79), LOST), (xid(48), xid(79))])
def test_an_answer_after_the_refusal_is_the_proof_of_a_reset_and_it_rests(before):
    health = after(OK, *before, REFUSED)
    answers = after(health, PASSED, at=60)

    assert (Condition.BAD, False, False, 1) == (
        answers.condition,
        answers.serving,
        answers.needs_reset,
        answers.passed_probes,
    )
    assert answers.text.startswith("it was reset: the driver answers for it again; ")
    runbook = "H-RESET" if health.xid is None else f"H-{health.xid:03d}"
    assert answers.text.endswith(f"; it is served again after the cool-down [{runbook}]")
    assert ("wait", health.since, later(60)) == (
        answers.action,
        answers.since,
        answers.quiet_since,
    )
    assert after(answers, *PASSES, at=60 + QUIET - 1).ill
    assert after(answers, PASSED, at=60 + QUIET).ill
    assert Condition.OK is after(answers, *PASSES[1:], at=60 + QUIET).condition


def test_the_rest_begins_with_the_answer_however_long_it_was_not_asked():
    asked = after(after(OK, REFUSED), SILENT, at=20)
    restarted = remembered(asked, later(9 * QUIET), boot_changed=False)

    for health in (asked, restarted):
        assert after(health, *PASSES, at=9 * QUIET).ill
        answers = after(health, PASSED, at=9 * QUIET)
        assert after(answers, *PASSES, at=10 * QUIET - 1).ill
        assert not after(answers, *PASSES, at=10 * QUIET).ill


def test_what_never_refused_waits_for_another_proof():
    assert after(OK, xid(48), FAILED, *PASSES, at=9 * QUIET).needs_reset


def test_an_error_between_the_reset_and_the_answer_needs_another_reset():
    health = after(OK, REFUSED, xid(48))

    assert (Condition.BAD, "xid", True) == (health.condition, health.cause, health.needs_reset)
    assert after(health, *PASSES, at=9 * QUIET).needs_reset
    assert after(OK, REFUSED, DriverEvent(EventKind.ECC_DOUBLE, G1), PASSED).needs_reset


def test_an_error_while_it_refuses_is_an_echo_that_the_next_probe_tells():
    health = after(OK, REFUSED, xid(48), REFUSED, *PASSES, at=0)

    assert ("refused", False, 48) == (health.cause, health.needs_reset, health.xid)


@pytest.mark.parametrize("number", [31, 94, 54])
def test_an_error_that_needs_no_reset_takes_no_proof_away(number):
    refused = after(OK, REFUSED, xid(number))

    assert (Condition.BAD, False, "refused", True) == (
        refused.condition,
        refused.serving,
        refused.cause,
        refused.needs_reset,
    )
    assert not after(refused, PASSED).needs_reset


@pytest.mark.parametrize("outcome", [ProbeOutcome.PASSED, ProbeOutcome.FAILED])
def test_a_reset_gpu_whose_rows_failed_says_that_and_not_that_it_is_refused(outcome):
    rows = Probe(G1, outcome, "a row could not be remapped", GpuSigns(rows_failed=True))
    health = after(OK, REFUSED, rows)

    assert ("memory", False, "replace", "H-ROWS") == (
        health.cause,
        health.needs_reset,
        health.action,
        health.runbook,
    )


@pytest.mark.parametrize("outcome", [ProbeOutcome.PASSED, ProbeOutcome.FAILED])
def test_a_reset_gpu_that_needs_another_reset_says_that_and_not_that_it_is_refused(outcome):
    signs = GpuSigns(rows_failed=True, recovery=RecoveryAction.GPU_RESET)
    health = after(OK, REFUSED, Probe(G1, outcome, "a row could not be remapped", signs))

    assert ("advice", True, "H-ADVICE") == (health.cause, health.needs_reset, health.runbook)
    assert health.cause == after(OK, REFUSED, advised(RecoveryAction.GPU_RESET)).cause
    assert not after(health, advised(RecoveryAction.NONE)).needs_reset


def test_one_that_was_lost_and_refuses_is_there_and_still_needs_its_reboot():
    health = after(OK, xid(151), LOST, REFUSED)

    assert (Condition.BAD, True, 0) == (health.condition, health.needs_reboot, health.passed_probes)
    assert "it was lost and is back; it needs a reboot of the node [H-151]" == health.text
    assert after(health, REFUSED, *PASSES, at=9 * QUIET).needs_reboot


def test_a_reset_stands_for_no_reboot():
    health = after(OK, xid(151), REFUSED, PASSED)

    assert (True, True) == (health.needs_reset, health.needs_reboot)
    assert after(OK, REFUSED, xid(151), PASSED).needs_reboot
    assert after(OK, xid(151), LOST, REFUSED, PASSED).needs_reboot


@pytest.mark.parametrize("action", [RecoveryAction.GPU_RESET, RecoveryAction.NODE_REBOOT])
def test_a_driver_that_still_advises_a_reset_is_believed(action):
    health = after(OK, REFUSED, *[advised(action)] * 3, at=9 * QUIET)

    assert (False, True) == (health.serving, health.needs_reset)


def test_a_driver_that_advises_nothing_any_more_is_believed_too():
    advice = after(OK, REFUSED, advised(RecoveryAction.NONE))

    assert ("refused", False) == (advice.cause, advice.needs_reset)


def test_it_is_one_bout_and_refusing_anew_begins_the_rest_anew():
    health = after(OK, REFUSED, PASSED, REFUSED)
    assert (1, True) == (health.bouts, health.needs_reset)

    again = after(after(OK, REFUSED, PASSED), REFUSED, PASSED, at=300)
    assert after(again, *PASSES, at=300 + QUIET - 1).ill
    assert not after(again, *PASSES, at=300 + QUIET).ill


def test_the_proof_counts_over_a_restart_of_the_agent_and_a_boot_resets_it():
    health = after(OK, REFUSED)
    restarted = remembered(health, NOON, boot_changed=False)
    booted = remembered(health, NOON, boot_changed=True)

    assert not after(restarted, PASSED).needs_reset
    assert (Condition.WATCH, True) == (booted.condition, booted.serving)


def test_what_was_before_a_boot_is_told_without_what_was_to_be_done_then():
    words = "before the boot: the driver refuses calls for it until it is reset [H-RESET]"
    booted = remembered(after(OK, REFUSED), NOON, boot_changed=True)
    twice = remembered(booted, NOON, boot_changed=True)
    reset = remembered(after(OK, REFUSED, PASSED), NOON, boot_changed=True)

    assert [words, words] == [booted.text, twice.text]
    assert reset.text.endswith("the driver answers for it again [H-RESET]")


def test_what_an_older_agent_remembered_of_a_refusal_is_refused_anew():
    old = a_health(condition=Condition.BAD, cause="probe", serving=False)

    assert "refused" == after(old, REFUSED).cause
