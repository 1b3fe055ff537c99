"""The instruments of the tests beside real peers: none takes silence, a gap or a delay for nothing.

Kept are those whose mistake a test beside the peers would not show.
"""

import ast
import json
from pathlib import Path

import pytest

from agent import cluster as annotations
from tests.peers.lab.api import Sighting, Watched
from tests.peers.lab.control import AuditLog, counted
from tests.peers.lab.node_state import Capacity
from tests.peers.lab.part import because
from tests.peers.lab.placing import BEFORE_2_8, BEFORE_2_10, MODEL, Release, impossible
from tests.peers.lab.table import Table
from tests.peers.test_kills import STARTING, TOLD_LATE, Gap, Rejected

# The audit log tells what was asked since a mark, or that it cannot tell.


@pytest.fixture
def path(tmp_path):
    return tmp_path / "audit.log"


def ask(path, verb: str, *, stage: str = "ResponseComplete", user: str = "me", **more) -> None:
    event = {
        "stage": stage,
        "verb": verb,
        "requestURI": "/api/v1/pods",
        "user": {"username": user},
        "userAgent": "hami-agent/1",
        "objectRef": {"resource": "pods"},
    }
    with path.open("a") as file:
        file.write(json.dumps(event | more) + "\n")


def test_what_was_asked_since_a_mark_is_told(path):
    log = AuditLog(path)
    assert 0 == log.mark()
    ask(path, "list")
    mark = log.mark()
    ask(path, "get")
    ask(path, "get", user="other")
    ask(path, "watch", stage="ResponseStarted")
    ask(path, "watch")  # its end, which is no other one
    with path.open("a") as file:
        file.write('{"stage": "Resp')  # not whole yet
    assert {"get pods": 1, "watch pods": 1} == counted(log.since(mark, "me"))
    assert {"list pods": 1, "get pods": 1, "watch pods": 1} == counted(log.since(0, "me"))

    path.rename(path.with_name("audit-old.log"))
    path.touch()
    with pytest.raises(RuntimeError, match="began a new one"):
        log.since(mark, "me")


def test_a_sign_of_life_is_left_out_and_nothing_else_that_writes_the_handshake(path):
    told = "Reported 2026-11-23 02:00:00"
    for notes in (
        {annotations.HANDSHAKE: told},
        {annotations.HANDSHAKE: None},
        {annotations.HANDSHAKE: told, annotations.REGISTER: "x:"},
        {},
    ):
        body = {"metadata": {"annotations": notes}}
        ask(path, "patch", objectRef={"resource": "nodes"}, requestObject=body)
    assert {"patch nodes": 3} == counted(AuditLog(path).since(0, "me"))


def test_gaps_in_what_the_kubelet_offers_are_found_with_their_length():
    """One lasts from the first slice that is missing to the last that comes back."""
    capacity = Capacity()
    for at, count in enumerate((80, 80, 0, 0, 70, 80, 0, 80, 0)):
        capacity.look(float(at), count)

    assert [3.0, 1.0] == capacity.gaps()


# Which rejections a time without an agent explains: the kubelet's own, and only in that time.

GAP = Gap(start=10.0, end=12.0, known=11.0)
EOF = "rpc error: code = Unavailable desc = error reading from server: EOF"
PREFERENCE = "device plugin GetPreferredAllocation rpc failed with err: "
OWN = because("no healthy devices present; cannot allocate unhealthy devices nvidia.com/gpu")
NO_ROOM = (
    "Pod was rejected: Node didn't have enough resource: nvidia.com/gpu, requested: 1, capacity: 0"
)
BLIND = because("rpc error: code = Unavailable desc = The pods are not known yet. [HA-2010]")
OUT_OF_TIME = because(
    "rpc error: code = Unavailable desc = No answer was found within 2 s; create the pod again. "
    "[HA-5002]"
)
NOT_EXPLAINED = (
    "rpc error: code = FailedPrecondition desc = Pod a/b has no lock. [HA-2005]",
    "rpc error: code = Unavailable desc = The driver is silent. [HA-4005]",
    "requested number of devices unavailable for nvidia.com/gpu. Requested: 1",
    "forbidden sysctl",
    "",
)


@pytest.mark.parametrize(
    ("message", "taken", "at", "explained"),
    [
        (OWN, 11.0, 11.5, True),
        (because(EOF), 11.0, 11.5, True),
        (because(f"{PREFERENCE}{EOF}"), 11.0, 11.5, True),
        (NO_ROOM, 11.0, 11.5, True),
        # It came before or after.
        (OWN, 12.1, 12.2, False),
        (OWN, 8.0, 9.9, False),
        (OWN, 11.0, 12.1 + TOLD_LATE, False),
        # An agent is blind only until it knows the pods.
        (OWN, 11.5, 11.5, True),
        (BLIND, 11.0, 11.5, True),
        (BLIND, 11.5, 11.5, False),
        # It may be out of time right after its start only.
        (OUT_OF_TIME, 12.5, 14.6, True),
        (OUT_OF_TIME, 12.1 + STARTING, 16.2, False),
        (OUT_OF_TIME, 9.0, 9.9, False),
        # An agent refused, or nobody can place it.
        *((because(text), 11.0, 11.5, False) for text in NOT_EXPLAINED),
    ],
)
def test_what_nobody_answered_is_explained_and_nothing_else(message, taken, at, explained):
    assert explained == GAP.explains(Rejected("p", taken, at, message))


# What a release is said not to show are tests that there are.

PEERS = Path(__file__).parents[1]
OLD = Release((2, 7, 1))


def test_nothing_is_impossible_beside_the_model_and_what_is_has_its_test():
    found = {
        f"{path.name}::{node.name}"
        for path in PEERS.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert BEFORE_2_8.keys() | BEFORE_2_10.keys() <= found
    assert [] == [test for test in found if impossible(MODEL, test)]
    assert {*BEFORE_2_8, *BEFORE_2_10} == {test for test in found if impossible(OLD, test)}
    newer = Release((2, 9, 0))
    assert {*BEFORE_2_10} == {test for test in found if impossible(newer, test)}


# What was promised is held.


def test_a_count_is_over_its_bound_by_one_and_a_time_only_by_far():
    table = Table()

    table.hold("pods refused", 0, 0, unit="")
    table.hold("lock free", 24.0, 5.0)
    with pytest.raises(AssertionError, match="pods refused: 1, not 0"):
        table.hold("pods refused", 1, 0, unit="")
    with pytest.raises(AssertionError, match="lock free: 26 s, not 25 s"):
        table.hold("lock free", 26.0, 5.0)
    with pytest.raises(ValueError, match="pods refused: a count with a bound is held"):
        table.add("pods refused", 1, 0, unit="")

    assert ["over", "over"] == [row.cells()[-1] for row in table.rows]


def test_a_watch_tells_when_a_state_was_first_seen_since_a_moment():
    watched = Watched()
    # The fourth is another pod of that name.
    for at, phase in enumerate(("Pending", "Running", "Running", "Pending", "Running", "Running")):
        metadata = {"namespace": "default", "name": "pod"}
        watched.take(Sighting(float(at), "ADDED", {"metadata": metadata, "phase": phase}))

    def when(since: float) -> float | None:
        return watched.when("default/pod", lambda pod: pod["phase"] == "Running", since=since)

    assert [1.0, 4.0, 5.0, None] == [when(since) for since in (0.0, 2.5, 5.0, 5.5)]
    watched.forget()
    assert (None, "Running") == (when(0.0), watched.objects["default/pod"]["phase"])
