"""Required checks make the agent ready; the others can only degrade it."""

from agent.node.findings import Check, degraded, is_ready

GOOD = Check("state", ok=True)
BAD = Check("stream", ok=False, text="The kubelet is away.")
WEAK = Check("api", ok=False, text="The watch is down.", required=False)


def test_every_required_check_must_hold():
    assert is_ready([GOOD, WEAK])
    assert not is_ready([GOOD, BAD])
    assert is_ready([])


def test_degraded_is_what_fails_and_is_not_required():
    assert (WEAK,) == degraded([GOOD, BAD, WEAK, Check("extra", ok=True, required=False)])
