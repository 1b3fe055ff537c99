"""A fault is wrong in one line; what follows from it says where it comes from. Readiness."""

import pytest
from msgspec.structs import replace

from agent.node.findings import (
    CHECKS,
    GROUPS,
    Check,
    Finding,
    degraded,
    in_groups,
    is_ready,
    traced,
)
from agent.node.scheduling import CAUSES

KUBELET = Finding("P-KUBELET", "WRONG", "/k", "no socket", "start it")
OFFER = Finding("P-OFFER", "WRONG", "n", "0, not 20", "look", causes=("P-KUBELET", "P-AGENT"))


@pytest.mark.parametrize("verdict", ["WRONG", "note"])
def test_what_follows_from_a_fault_is_a_note_that_names_it(verdict):
    _, found = traced([KUBELET, replace(OFFER, verdict=verdict)])

    assert ("note", "0, not 20 (follows from P-KUBELET)") == (found.verdict, found.said)


@pytest.mark.parametrize(
    "cause",
    [
        Finding("P-KUBELET", "ok", "/k", "there"),
        Finding("P-KUBELET", "note", "/k", "old"),
        Finding("P-KUBELET", "unknown", "/k", "not seen"),
        Finding("P-PATHS", "WRONG", "/p", "full"),
    ],
)
def test_a_fault_without_a_wrong_cause_stays_wrong(cause: Finding):
    assert [cause, OFFER] == [*traced([cause, OFFER])]


def test_no_check_is_its_own_cause():
    twice = replace(KUBELET, causes=("P-KUBELET",))

    assert [twice, twice] == [*traced([twice, twice])]


def test_what_is_well_is_no_consequence():
    well = Finding("P-OFFER", "ok", "n", "20", causes=("P-KUBELET",))

    assert ["WRONG", "ok"] == [one.verdict for one in traced([KUBELET, well])]


def test_every_check_has_one_group_and_a_consequence():
    each = [check for checks in CHECKS.values() for check in checks if checks[check]]

    assert sorted(each) == sorted(GROUPS)


def test_the_chosen_groups_come_in_the_order_of_the_groups():
    label = Finding("P-LABEL", "ok", "n", "is set")
    chosen = in_groups([label, OFFER, KUBELET], frozenset({"kubelet", "scheduler"}))

    assert (KUBELET, OFFER, label) == chosen
    assert () == in_groups([label], frozenset({"paths"}))


def test_a_finding_may_have_a_consequence_of_its_own():
    assert "pods wait" == replace(OFFER, means="pods wait").consequence
    assert CHECKS["kubelet"]["P-OFFER"] == OFFER.consequence
    assert "" == replace(OFFER, verdict="ok").consequence


GOOD = Check("state", ok=True)
BAD = Check("stream", ok=False, text="The kubelet is away.")
WEAK = Check("api", ok=False, text="The watch is down.", required=False)


def test_every_required_check_must_hold_and_the_others_degrade():
    assert is_ready([GOOD, WEAK])
    assert is_ready([])
    assert not is_ready([GOOD, BAD])
    assert (WEAK,) == degraded([GOOD, BAD, WEAK, Check("extra", ok=True, required=False)])


def test_the_agents_checks_follow_from_checks_that_there_are():
    assert {cause for causes in CAUSES.values() for cause in causes} <= GROUPS.keys()
