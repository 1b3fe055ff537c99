"""A fault is one line: what follows from it is left out. Readiness."""

import pytest
from msgspec.structs import replace

from agent.cli.doctor import ADVICE, CAUSES, CHECKS, GROUPS, MEANS, Finding, concluded
from agent.node import Check, is_ready

KUBELET = Finding("P-KUBELET", "wrong", "/k", "no socket", "start it")
OFFER = Finding("P-OFFER", "wrong", "n", "0, not 20", "look")
STREAM = Finding("P-AGENT", "wrong", "stream", "the kubelet is away", "look")


def all_of(*findings):
    return [*concluded(findings, frozenset(GROUPS))]


@pytest.mark.parametrize("verdict", ["wrong", "note"])
@pytest.mark.parametrize(
    ("cause", "follows"),
    [
        ("P-KUBELET", OFFER),
        ("P-AGENT", OFFER),
        ("P-KUBELET", STREAM),
        ("P-KUBELET", Finding("P-WITNESS", "wrong", "/r", "silent")),
        ("P-DRIVER", Finding("P-GPU", "wrong", "GPU 1", "is silent")),
        ("P-RIGHTS", Finding("P-REPORT", "wrong", "n", "dropped")),
    ],
)
def test_what_follows_from_a_fault_is_left_out(verdict, cause, follows):
    found = all_of(replace(KUBELET, check=cause), replace(follows, verdict=verdict))

    assert [(cause, "wrong")] == [(one.check, one.verdict) for one in found]


def test_what_is_well_or_not_known_is_no_consequence():
    others = [Finding("P-OFFER", "ok", "n", "20"), Finding("P-WITNESS", "unknown", "n", "denied")]

    assert ["wrong", "unknown", "ok"] == [one.verdict for one in all_of(KUBELET, *others)]


def test_every_check_has_a_remedy_and_causes_that_there_are():
    assert [*CHECKS] == [*ADVICE]
    assert MEANS.keys() < CHECKS.keys()
    assert {cause for causes in CAUSES.values() for cause in causes} <= CHECKS.keys()
    assert not [check for check, causes in CAUSES.items() if check in causes]


def test_the_chosen_groups_come_in_the_order_of_the_checks():
    lock = Finding("P-LOCK", "ok", "n", "free")
    chosen = concluded([lock, OFFER, KUBELET], frozenset({"kubelet", "scheduler"}))

    assert [("kubelet", "P-KUBELET"), ("scheduler", "P-LOCK")] == [
        (one.group, one.check) for one in chosen
    ]
    # Where only the consequence was chosen, no other line would be wrong.
    (offer,) = concluded([OFFER, replace(KUBELET, check="P-AGENT")], frozenset({"kubelet"}))
    assert ("wrong", OFFER.said) == (offer.verdict, offer.said)


GOOD = Check("state", ok=True)
BAD = Check("stream", ok=False, text="The kubelet is away.")
WEAK = Check("api", ok=False, text="The watch is down.", required=False)


def test_every_required_check_must_hold():
    assert is_ready([GOOD, WEAK])
    assert is_ready([])
    assert not is_ready([GOOD, BAD])
