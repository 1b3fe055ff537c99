"""What a GPU says of itself, what the driver advises, and whether its events reach us."""

from typing import Any

import msgspec
import pytest

from agent.health.judge import aged, missing, past, remembered, switched_off
from agent.model import (
    Condition,
    DriverEvent,
    EventKind,
    FabricState,
    GpuSigns,
    Health,
    Probe,
    ProbeOutcome,
    RecoveryAction,
)
from tests.builders import G1, NOON
from tests.unit.core.health.judging import (
    DEAF,
    LOST,
    OK,
    PASSED,
    SETTINGS,
    SILENT,
    after,
    later,
    xid,
)


def saying(recovery: RecoveryAction | None = None, **signs: Any) -> Probe:
    return msgspec.structs.replace(PASSED, signs=GpuSigns(recovery=recovery, **signs))


@pytest.mark.parametrize(
    ("action", "reboot"),
    [
        (RecoveryAction.GPU_RESET, False),
        (RecoveryAction.DRAIN_AND_RESET, False),
        (RecoveryAction.BUS_RESET, False),
        (RecoveryAction.OTHER, False),
        (RecoveryAction.NODE_REBOOT, True),
        (RecoveryAction.SYSTEM_REBOOT, True),
    ],
)
def test_what_the_driver_says_is_needed_is_needed(action, reboot):
    health = after(OK, saying(action))

    assert (Condition.BAD, False, True, reboot) == (
        health.condition,
        health.serving,
        health.needs_reset,
        health.needs_reboot,
    )
    assert ("advice", "reboot" if reboot else "reset") == (health.cause, health.action)


def test_the_driver_may_say_that_nothing_is_needed_any_more():
    bad = after(OK, xid(48), PASSED)
    relieved = after(bad, saying(RecoveryAction.NONE), at=20)

    assert (Condition.BAD, False, 1) == (
        relieved.condition,
        relieved.needs_reset,
        relieved.passed_probes,
    )
    assert relieved.text.endswith("; the driver says that no reset is needed [H-048]")
    assert "reset it" not in relieved.text
    assert "wait" == relieved.action
    assert after(relieved, *[PASSED] * 2, at=619).ill
    assert Condition.OK is after(relieved, *[PASSED] * 2, at=620).condition


def test_the_rest_begins_when_the_driver_says_that_nothing_is_needed_any_more():
    relieved = after(after(OK, xid(48)), saying(RecoveryAction.NONE), at=3600)

    assert (later(10), later(3600)) == (relieved.since, relieved.quiet_since)
    assert 1 == relieved.bouts
    assert after(relieved, *[PASSED] * 3, at=3600 + SETTINGS.quiet - 1).ill
    assert Condition.OK is after(relieved, *[PASSED] * 2, at=3600 + SETTINGS.quiet).condition


def test_a_driver_that_takes_its_advice_back_is_told_so():
    relieved = after(OK, saying(RecoveryAction.GPU_RESET), saying(RecoveryAction.NONE))

    assert (
        "the driver said that it needs a reset (gpu-reset); now it says that none is needed"
        " [H-ADVICE]" == relieved.text
    )
    assert ("wait", False) == (relieved.action, relieved.needs_reset)


def test_a_verdict_that_an_older_agent_remembered_is_relieved_too():
    old = Health(Condition.BAD, NOON, "xid", "XID 48", 48, needs_reset=True, serving=False)
    relieved = after(old, saying(RecoveryAction.NONE))

    assert "XID 48; the driver says that no reset is needed" == relieved.text


@pytest.mark.parametrize(
    ("health", "happened"),
    [
        (after(OK, xid(48)), "XID 48: double-bit ECC error [H-048]"),
        (after(OK, xid(151)), "XID 151: key rotation error [H-151]"),
        (after(OK, DriverEvent(EventKind.ECC_DOUBLE, G1)), "uncorrectable memory error [H-ECC]"),
        (after(OK, LOST, PASSED), "it was lost and is back [H-LOST]"),
        (after(OK, LOST, xid(48), PASSED), "it was lost and is back [H-LOST]"),
        (after(OK, xid(48), saying(RecoveryAction.NONE)), "XID 48: double-bit ECC error [H-048]"),
        (
            after(OK, saying(rows_pending=True)),
            "memory rows or pages wait for a reset to be replaced [H-ROWS]",
        ),
        (
            after(OK, saying(rows_failed=True)),
            "memory rows could not be remapped: no spare rows are left [H-ROWS]",
        ),
    ],
)
def test_what_happened_is_told_without_what_is_to_be_done(health, happened):
    assert happened == past(health)


@pytest.mark.parametrize("words", ["Unknown Error; a; b", "reset; a", "; ", "a [H-LOST]; b"])
def test_the_drivers_own_words_are_told_whole(words):
    lost = after(OK, msgspec.structs.replace(LOST, text=words))
    deaf = after(OK, msgspec.structs.replace(PASSED, unmonitored=words))

    assert lost.text == past(lost)
    assert deaf.text == past(deaf)
    assert f"before the boot: {lost.text}" == remembered(lost, NOON, boot_changed=True).text


def test_a_driver_that_does_not_tell_relieves_nothing_and_none_relieves_of_a_reboot():
    assert after(OK, xid(48), PASSED).needs_reset
    assert after(OK, xid(151), saying(RecoveryAction.NONE)).needs_reboot


def test_rows_that_cannot_be_remapped_make_a_gpu_bad_as_long_as_it_says_so():
    failed = saying(rows_failed=True)
    bad = after(OK, failed, at=0)

    assert ("memory", "replace", "H-ROWS") == (bad.cause, bad.action, bad.runbook)
    assert bad == after(bad, *[failed] * 9, at=86400)
    assert Condition.OK is after(bad, *[PASSED] * 3, at=86400).condition


@pytest.mark.parametrize("signs", [GpuSigns(rows_pending=True), GpuSigns(pages_pending=True)])
def test_rows_that_wait_for_a_reset_are_watched_and_served(signs):
    pending = msgspec.structs.replace(PASSED, signs=signs)
    watched = after(OK, pending, at=0)

    assert (Condition.WATCH, True, "reset") == (watched.condition, watched.serving, watched.action)
    assert watched == after(watched, *[pending] * 9, at=86400)
    assert after(watched, xid(48), pending, at=1).ill


def test_a_gpu_whose_events_do_not_reach_us_is_unmonitored_and_served_as_long_as_it_answers():
    deaf = after(OK, DEAF, at=0)

    assert (Condition.UNMONITORED, "monitor", True, "H-DEAF") == (
        deaf.condition,
        deaf.cause,
        deaf.serving,
        deaf.runbook,
    )
    assert deaf is after(deaf, DEAF, at=3600)
    assert deaf is aged(deaf, later(3600), SETTINGS)
    assert Condition.OK is after(deaf, PASSED).condition
    assert Condition.WATCH is after(OK, xid(94), DEAF, PASSED).condition


def test_a_deaf_gpu_that_also_falls_silent_is_served_only_for_the_limit():
    silent = after(after(OK, DEAF, at=0), SILENT, at=100)

    assert ("driver", later(100)) == (silent.cause, silent.since)
    assert aged(silent, later(159), SETTINGS).serving
    assert not aged(silent, later(160), SETTINGS).serving
    assert "monitor" == after(silent, DEAF, at=170).cause


def test_a_bad_gpu_whose_events_do_not_reach_us_recovers_to_unmonitored():
    bad = after(OK, xid(54), at=0)

    assert after(bad, *[DEAF] * 2, at=600).ill
    assert "monitor" == after(bad, *[DEAF] * 3, at=600).cause


def test_a_gpu_that_keeps_falling_ill_rests_twice_as_long_each_time_up_to_two_hours():
    health, now, rests = OK, 0.0, []
    for _ in range(7):
        health = after(health, xid(54), at=now)
        began = now
        while health.ill:
            now += 10.0
            health = after(health, PASSED, at=now)
        rests.append(now - began)
        now += 60.0

    assert [600.0, 1200.0, 2400.0, 4800.0, 7200.0, 7200.0, 7200.0] == rests


def test_a_gpu_that_was_well_for_two_hours_begins_anew():
    health = after(after(OK, xid(54), at=0), *[PASSED] * 3, at=600)

    assert 2 == after(health, xid(54), at=600 + 7199).bouts
    assert 1 == after(health, xid(54), at=600 + 7200).bouts


def test_what_is_only_watched_or_silent_is_no_bout():
    health = after(OK, xid(94), SILENT, PASSED, *[DEAF] * 2)

    assert 0 == health.bouts
    assert 1 == after(health, xid(54), LOST).bouts


@pytest.mark.parametrize(
    ("health", "wanted"),
    [
        (OK, ()),
        (switched_off(NOON), ()),
        (after(OK, LOST), ("the driver has to reach it again: reset it, or reboot the node",)),
        (after(OK, SILENT), ("it has to answer, and the agent has to receive its events",)),
        (after(OK, xid(151)), ("a reboot of the node",)),
        (
            after(OK, xid(48), at=0),
            (
                "a reset of the GPU, or a reboot of the node",
                "600 s more without a bad report",
                "3 more passed probes",
            ),
        ),
        (after(OK, xid(54), *[PASSED] * 2, at=-590), ("1 more passed probe",)),
        (after(OK, xid(54), *[PASSED] * 3, at=0), ("590 s more without a bad report",)),
    ],
)
def test_what_is_missing_until_a_gpu_is_ok_is_said(health, wanted):
    assert wanted == missing(health, later(10), SETTINGS)


def test_a_failed_probe_says_what_the_gpu_says_of_its_memory():
    failed = msgspec.structs.replace(
        saying(rows_failed=True), outcome=ProbeOutcome.FAILED, text="a row could not be remapped"
    )

    found = after(OK, failed)

    assert (Condition.BAD, "H-ROWS") == (found.condition, found.runbook)
    assert found == after(OK, saying(rows_failed=True))


def test_a_gpu_that_was_lost_and_comes_back_with_failed_rows_says_so():
    failed = msgspec.structs.replace(saying(rows_failed=True), outcome=ProbeOutcome.FAILED)

    for back in (failed, saying(rows_failed=True)):
        found = after(OK, LOST, back)
        assert (Condition.BAD, "memory", "replace") == (found.condition, found.cause, found.action)


def joining(fabric: FabricState | None) -> Probe:
    return msgspec.structs.replace(PASSED, signs=GpuSigns(fabric=fabric))


@pytest.mark.parametrize(
    "state", [FabricState.NOT_STARTED, FabricState.IN_PROGRESS, FabricState.FAILED]
)
def test_a_gpu_without_its_fabric_is_not_served_and_is_well_as_soon_as_it_has_joined(state):
    health = after(OK, joining(state))

    assert ("bad", False, "fabric", "H-FABRIC") == (
        health.condition.value,
        health.serving,
        health.cause,
        health.runbook,
    )
    assert f"({state.value})" in health.text
    assert "nvidia-fabricmanager" in missing(health, NOON, SETTINGS)[0]
    assert health is after(health, joining(state), at=20)  # no news
    assert Condition.OK is after(health, joining(FabricState.COMPLETED), at=30).condition


@pytest.mark.parametrize("state", [FabricState.COMPLETED, None])
def test_a_gpu_with_its_fabric_or_without_nvswitches_is_well(state):
    assert OK is after(OK, joining(state))


def test_what_an_ill_gpu_says_of_its_fabric_shortens_no_rest():
    ill = after(OK, xid(54))

    assert "xid" == after(ill, joining(FabricState.IN_PROGRESS), joining(None)).cause
