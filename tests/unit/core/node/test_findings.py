"""A fault is wrong in one line; what follows from it says where it comes from. Readiness."""

import pytest

from agent.node.findings import (
    CHECKS,
    Check,
    CheckGroup,
    Finding,
    PreflightCheck,
    PreflightVerdict,
    consequence,
    counted,
    degraded,
    group_of,
    in_groups,
    is_ready,
    traced,
)

KUBELET = Finding.wrong(PreflightCheck.KUBELET, "/k", "no socket", "start it")
OFFER = Finding.wrong(PreflightCheck.OFFER, "n", "0, not 20", "look").because_of(
    PreflightCheck.KUBELET, PreflightCheck.AGENT
)


def verdicts(findings) -> list[str]:
    return [one.verdict.value for one in findings]


@pytest.mark.parametrize("make", [Finding.wrong, Finding.note])
def test_what_follows_from_a_fault_is_a_note_that_names_it(make):
    offer = make(PreflightCheck.OFFER, "n", "0, not 20", "look")
    _, found = traced([KUBELET, offer.because_of(PreflightCheck.KUBELET, PreflightCheck.AGENT)])

    assert (PreflightVerdict.NOTE, "0, not 20 (follows from P-KUBELET)") == (
        found.verdict,
        found.said,
    )


@pytest.mark.parametrize(
    "cause",
    [
        Finding.ok(PreflightCheck.KUBELET, "/k", "there"),
        Finding.note(PreflightCheck.KUBELET, "/k", "old"),
        Finding.unknown(PreflightCheck.KUBELET, "/k", "not seen"),
        Finding.wrong(PreflightCheck.PATHS, "/p", "full"),
    ],
)
def test_a_fault_without_a_wrong_cause_stays_wrong(cause: Finding):
    assert (cause, OFFER) == traced([cause, OFFER])


def test_no_check_is_its_own_cause():
    twice = KUBELET.because_of(PreflightCheck.KUBELET)

    assert (twice, twice) == traced([twice, twice])


def test_what_is_well_is_no_consequence():
    well = Finding.ok(PreflightCheck.OFFER, "n", "20").because_of(PreflightCheck.KUBELET)

    assert ["WRONG", "ok"] == verdicts(traced([KUBELET, well]))


@pytest.mark.parametrize("check", PreflightCheck)
def test_every_check_has_one_group_and_a_consequence(check: PreflightCheck):
    assert [group_of(check)] == [group for group, checks in CHECKS.items() if checks.get(check)]


def test_the_chosen_groups_come_in_the_order_of_the_groups():
    label = Finding.ok(PreflightCheck.LABEL, "n", "is set")
    chosen = in_groups(
        [label, OFFER, KUBELET], frozenset({CheckGroup.KUBELET, CheckGroup.SCHEDULER})
    )

    assert (KUBELET, OFFER, label) == chosen
    assert () == in_groups([label], frozenset({CheckGroup.PATHS}))


def test_a_finding_may_have_a_consequence_of_its_own():
    own = Finding.wrong(PreflightCheck.OFFER, "n", "0", "look", "pods wait")

    assert "pods wait" == consequence(own)
    assert CHECKS[CheckGroup.KUBELET][PreflightCheck.OFFER] == consequence(OFFER)


def test_one_thing_is_told_in_the_singular():
    assert ("1 GPU", "2 GPUs") == (counted(1, "GPU"), counted(2, "GPU"))


GOOD = Check("state", ok=True)
BAD = Check("stream", ok=False, text="The kubelet is away.")
WEAK = Check("api", ok=False, text="The watch is down.", required=False)


def test_every_required_check_must_hold_and_the_others_degrade():
    assert is_ready([GOOD, WEAK])
    assert is_ready([])
    assert not is_ready([GOOD, BAD])
    assert (WEAK,) == degraded([GOOD, BAD, WEAK, Check("extra", ok=True, required=False)])
