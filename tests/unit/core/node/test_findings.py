"""A fault is wrong in one line; what follows from it says where it comes from. Readiness."""

import pytest
from msgspec.structs import replace

from agent.cli.checks import ALL_GROUPS, CAUSES, CHECKS, GROUPS, Finding, concluded
from agent.node import Check, degraded, is_ready

KUBELET = Finding("P-KUBELET", "wrong", "/k", "no socket", "start it")
OFFER = Finding("P-OFFER", "wrong", "n", "0, not 20", "look")
STREAM = Finding("P-AGENT", "wrong", "stream", "the kubelet is away", "look")


def all_of(*findings):
    return [*concluded(findings, ALL_GROUPS)]


@pytest.mark.parametrize("verdict", ["wrong", "note"])
@pytest.mark.parametrize(
    ("cause", "follows"),
    [
        ("P-KUBELET", OFFER),
        ("P-AGENT", OFFER),
        ("P-KUBELET", STREAM),
        ("P-KUBELET", Finding("P-WITNESS", "wrong", "/r", "silent")),
        ("P-DRIVER", Finding("P-ACCESS", "wrong", "/dev/nvidiactl", "is not there")),
        ("P-WRITER", Finding("P-REPORT", "wrong", "n", "another form")),
    ],
)
def test_what_follows_from_a_fault_is_a_note_that_names_it(verdict, cause, follows):
    found = all_of(replace(KUBELET, check=cause), replace(follows, verdict=verdict))

    assert {
        (cause, "wrong", "no socket"),
        (follows.check, "note", f"{follows.said} (follows from {cause})"),
    } == {(one.check, one.verdict, one.said) for one in found}


@pytest.mark.parametrize(
    "consequence", [OFFER, STREAM, Finding("P-LOCK", "wrong", "n", "cannot be read")]
)
@pytest.mark.parametrize(
    "cause",
    [
        Finding("P-KUBELET", "ok", "/k", "there"),
        Finding("P-KUBELET", "note", "/k", "old"),
        Finding("P-KUBELET", "unknown", "/k", "not seen"),
        Finding("P-PATHS", "wrong", "/p", "full"),
        Finding("P-RIGHTS", "wrong", "api", "denied"),
    ],
)
def test_a_fault_without_a_wrong_cause_stays_wrong(cause: Finding, consequence: Finding):
    found = {one.check: (one.verdict, one.said) for one in all_of(cause, consequence)}

    assert ("wrong", consequence.said) == found[consequence.check]


@pytest.mark.parametrize(("subject", "is_seen"), [("cdi", True), ("settings", False)])
def test_what_the_agent_may_not_have_seen_yet_is_named_only_where_nothing_else_is_wrong(
    subject, is_seen
):
    (cause,) = CAUSES[subject]
    found = all_of(replace(STREAM, subject=subject), Finding(cause, "ok", "here", "well"))

    now = f" (now ok: {cause}; the agent looks every 10 s)" if is_seen else ""
    assert f"{STREAM.said}{now}" in {one.said for one in found}


def test_what_is_well_is_no_consequence():
    well = Finding("P-OFFER", "ok", "n", "20")

    assert ["wrong", "ok"] == [one.verdict for one in all_of(KUBELET, well)]


def test_every_check_has_one_group_and_a_consequence_and_causes_that_there_are():
    each = [check for checks in CHECKS.values() for check in checks if checks[check]]

    assert sorted(each) == sorted(GROUPS)
    assert {cause for causes in CAUSES.values() for cause in causes} <= GROUPS.keys()
    assert not [check for check, causes in CAUSES.items() if check in causes]


def test_the_chosen_groups_come_in_the_order_of_the_groups():
    label = Finding("P-LABEL", "ok", "n", "is set")
    chosen = concluded([label, OFFER, KUBELET], frozenset({"kubelet", "scheduler"}))

    assert [("kubelet", "P-KUBELET"), ("kubelet", "P-OFFER"), ("scheduler", "P-LABEL")] == [
        (one.group, one.check) for one in chosen
    ]
    # Where only the consequence was chosen, no other line would be wrong.
    (offer,) = concluded([OFFER, replace(KUBELET, check="P-AGENT")], frozenset({"kubelet"}))
    assert ("wrong", OFFER.said) == (offer.verdict, offer.said)


def test_a_finding_may_have_a_consequence_of_its_own():
    said, by_check, well = (
        all_of(one)[0].means
        for one in (replace(OFFER, means="pods wait"), OFFER, replace(OFFER, verdict="ok"))
    )

    assert ("pods wait", CHECKS["kubelet"]["P-OFFER"], "") == (said, by_check, well)


GOOD = Check("state", ok=True)
BAD = Check("stream", ok=False, text="The kubelet is away.")
WEAK = Check("api", ok=False, text="The watch is down.", required=False)


def test_every_required_check_must_hold_and_the_others_degrade():
    assert is_ready([GOOD, WEAK])
    assert is_ready([])
    assert not is_ready([GOOD, BAD])
    assert (WEAK,) == degraded([GOOD, BAD, WEAK, Check("extra", ok=True, required=False)])
