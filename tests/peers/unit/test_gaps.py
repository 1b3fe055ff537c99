"""Which rejections a time without an agent explains: the kubelet's own, and only in that time."""

import pytest

from tests.peers.lab.gaps import STARTING, TOLD_LATE, Gap, Rejected
from tests.peers.lab.words import because

GAP = Gap(start=10.0, end=12.0, known=11.0)
EOF = "rpc error: code = Unavailable desc = error reading from server: EOF"
UNHEALTHY = "no healthy devices present; cannot allocate unhealthy devices nvidia.com/gpu"
OWN = (
    because(UNHEALTHY),
    because(EOF),
    because(f"device plugin GetPreferredAllocation rpc failed with err: {EOF}"),
    "Pod was rejected: Node didn't have enough resource: nvidia.com/gpu, requested: 1, capacity: 0",
)
BLIND = because("rpc error: code = Unavailable desc = The pods are not known yet. [HA-2010]")

OUT_OF_TIME = because(
    "rpc error: code = Unavailable desc = No answer was found within 2 s; create the pod again. "
    "[HA-5002]"
)


def a_rejection(message, taken=11.0, at=11.5):
    return Rejected("p", taken, at, message)


@pytest.mark.parametrize("message", [*OWN, BLIND])
def test_what_nobody_answered_is_explained(message):
    assert GAP.explains(a_rejection(message))


@pytest.mark.parametrize(
    "message",
    [
        because("rpc error: code = FailedPrecondition desc = Pod a/b has no lock. [HA-2005]"),
        because("rpc error: code = Unavailable desc = The driver is silent. [HA-4005]"),
        because("requested number of devices unavailable for nvidia.com/gpu. Requested: 1"),
        "Pod was rejected: forbidden sysctl",
        "",
    ],
)
def test_what_an_agent_refused_or_nobody_can_place_is_not_explained(message):
    assert not GAP.explains(a_rejection(message))


@pytest.mark.parametrize(
    ("taken", "at"), [(12.1, 12.2), (8.0, 9.9), (11.0, 12.1 + TOLD_LATE)], ids=str
)
def test_what_came_before_or_after_is_not_explained(taken, at):
    assert not GAP.explains(a_rejection(OWN[0], taken, at))


def test_an_agent_is_blind_only_until_it_knows_the_pods():
    assert GAP.explains(a_rejection(OWN[0], taken=11.5))
    assert not GAP.explains(a_rejection(BLIND, taken=11.5))


def test_an_agent_may_be_out_of_time_right_after_its_start_only():
    assert GAP.explains(a_rejection(OUT_OF_TIME, taken=12.5, at=14.6))
    assert not GAP.explains(a_rejection(OUT_OF_TIME, taken=12.1 + STARTING, at=16.2))
    assert not GAP.explains(a_rejection(OUT_OF_TIME, taken=9.0, at=9.9))
