"""What a remembered health is worth after a restart and after a boot."""

import datetime as dt

import msgspec
import pytest

from agent.health.judge import aged, remembered, stepped
from agent.health.xids import HealthSettings, XidClass, read_switches
from agent.model import Condition, Health
from tests.builders import NOON

LATER = NOON + dt.timedelta(hours=1)
RESET = Health(
    Condition.BAD, NOON, "xid", "XID 48", 48, needs_reset=True, serving=False, passed_probes=2
)
ECC = Health(Condition.BAD, NOON, "ecc", "uncorrectable", needs_reset=True, serving=False)
LOST = Health(Condition.LOST, NOON, "lost", "lost", 79, serving=False)
SILENT = Health(Condition.UNMONITORED, NOON, "driver", "silent")
HUNG = msgspec.structs.replace(SILENT, serving=False)


@pytest.mark.parametrize("health", [RESET, ECC, LOST, HUNG])
def test_a_restart_of_the_agent_heals_nothing(health):
    kept = remembered(health, LATER, boot_changed=False)

    assert msgspec.structs.replace(health, passed_probes=0) == kept


def test_a_remembered_moment_in_the_future_becomes_now():
    early = NOON - dt.timedelta(hours=1)

    assert early == remembered(RESET, early, boot_changed=False).since


def test_no_remembered_moment_is_in_the_future():
    early = NOON - dt.timedelta(hours=1)
    kept = remembered(
        msgspec.structs.replace(RESET, recovered_at=NOON, failures=(NOON,), quiet_since=NOON),
        early,
        boot_changed=False,
    )

    assert (early, early, (early,)) == (kept.since, kept.recovered_at, kept.failures)
    assert early == kept.quiet_since


def test_a_step_of_the_clock_moves_all_that_was_remembered_and_no_length():
    known = msgspec.structs.replace(RESET, recovered_at=NOON, failures=(NOON,), quiet_since=NOON)
    kept = stepped(known, NOON, LATER)

    assert (LATER, LATER, LATER, (LATER,)) == (
        kept.since,
        kept.quiet_since,
        kept.recovered_at,
        kept.failures,
    )


def test_the_time_without_an_agent_is_no_silence():
    kept = remembered(SILENT, LATER, boot_changed=False)

    assert LATER == kept.since
    assert aged(kept, LATER, HealthSettings()).serving


def test_a_boot_takes_away_what_a_reset_mends():
    assert Health(Condition.OK, since=LATER) == remembered(RESET, LATER, boot_changed=True)


@pytest.mark.parametrize("health", [ECC, LOST])
def test_a_boot_leaves_a_fault_of_the_hardware_watched(health):
    watched = remembered(health, LATER, boot_changed=True)

    assert (Condition.WATCH, True, False, LATER) == (
        watched.condition,
        watched.serving,
        watched.needs_reset,
        watched.since,
    )
    assert health.text in watched.text


def test_two_boots_say_once_that_it_was_before_them():
    once = remembered(ECC, LATER, boot_changed=True)

    assert once.text.startswith("before the boot: ")
    assert once.text == remembered(once, LATER, boot_changed=True).text


def test_a_boot_gives_a_silent_gpu_a_new_chance():
    assert Condition.OK is remembered(SILENT, LATER, boot_changed=True).condition


@pytest.mark.parametrize(
    "settings",
    [
        HealthSettings(xids={48: XidClass.APPLICATION}),
        HealthSettings(switches=read_switches("48", "")),
    ],
)
def test_what_the_operator_declares_harmless_is_forgotten_and_nothing_else(settings):
    assert Condition.OK is remembered(RESET, LATER, settings, boot_changed=False).condition
    assert Condition.BAD is remembered(ECC, LATER, settings, boot_changed=False).condition


def test_bouts_are_remembered_over_a_restart_and_not_over_a_boot():
    flapping = msgspec.structs.replace(RESET, bouts=3)

    assert 3 == remembered(flapping, LATER, boot_changed=False).bouts
    assert 0 == remembered(flapping, LATER, boot_changed=True).bouts
