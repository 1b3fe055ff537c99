"""The instruments of the tests beside real peers: none takes silence, a gap or a delay for nothing.

Kept are those whose mistake a test beside the peers would not show.
"""

import ast
import asyncio
import json
from pathlib import Path

import pytest

from agent import cluster as annotations
from agent.hami.register import RegisteredGpu, encode_register, encode_register_colon, registered
from agent.model import GpuUuid
from tests.builders import an_inventory
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.api import Sighting, Watched
from tests.peers.lab.control import AuditLog, counted
from tests.peers.lab.identities import NODE
from tests.peers.lab.node_state import Capacity, gpus_of, text_of
from tests.peers.lab.part import Part
from tests.peers.lab.placing import Reading
from tests.peers.lab.releases import BEFORE_2_8, BEFORE_2_10, MODEL, Release, impossible
from tests.peers.lab.space import because
from tests.peers.lab.stream import STARTING, TOLD_LATE, Gap, Rejected
from tests.peers.lab.table import Table

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
    def patch_node(**notes: str | None) -> None:
        reference = {"resource": "nodes", "name": "a"}
        body = {"metadata": {"annotations": notes}}
        ask(path, "patch", objectRef=reference, requestObject=body)

    patch_node(**{annotations.HANDSHAKE: "Reported 2026-11-23 02:00:00"})
    assert [] == AuditLog(path).since(0, "me")
    patch_node(**{annotations.HANDSHAKE: None})
    patch_node(**{annotations.HANDSHAKE: "Reported 1", annotations.REGISTER: "x:"})
    patch_node()
    assert {"patch nodes": 3} == counted(AuditLog(path).since(0, "me"))


@pytest.mark.parametrize(
    ("looks", "gaps"),
    [
        # A gap lasts from the first slice that is missing to the last that comes back.
        ([(0, 80), (1, 80), (2, 0), (3, 0), (4, 70), (5, 80), (6, 80)], [3.0]),
        ([(0, 80), (1, 0), (2, 80), (3, 0), (5, 80)], [1.0, 2.0]),
        ([(0, 80), (1, 0)], []),
    ],
)
def test_gaps_in_what_the_kubelet_offers_are_found_with_their_length(looks, gaps):
    capacity = Capacity()
    for at, count in looks:
        capacity.look(at, count)

    assert gaps == capacity.gaps()


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


def test_both_forms_of_a_report_are_read_as_the_same_gpus():
    gpus = tuple(
        RegisteredGpu(GpuUuid(f"GPU-{n}"), n, 10, 81559, 100, "H100", 1, "hami-core", (), True)
        for n in (1, 2)
    )
    read = gpus_of(encode_register(gpus))

    assert read == gpus_of(encode_register_colon(gpus[::-1]))
    assert read == gpus_of(text_of(read, colon=True)) == gpus_of(text_of(read, colon=False))


# What a scheduler has read, without which a pod is placed by what stood on the Node before.

OLD = Release((2, 7, 1))


class Running(Part):
    """A scheduler that is not there, and said to be."""

    def __init__(self, pid: int) -> None:
        super().__init__("extender", (), Path("/nowhere"))
        self.pid = pid

    @property
    def is_alive(self) -> bool:
        return bool(self.pid)


def show(nodes, handshake, register, at=None, slices="0"):
    notes = {annotations.HANDSHAKE: handshake, annotations.REGISTER: register}
    metadata = {"name": NODE, "annotations": {name: one for name, one in notes.items() if one}}
    seen = asyncio.get_running_loop().time() if at is None else at
    status = {"allocatable": {RESOURCE: slices}}
    nodes.take(Sighting(seen, "MODIFIED", {"metadata": metadata, "status": status}))


async def is_read(reading):
    try:
        async with asyncio.timeout(0.0):
            await reading.until_current()
    except TimeoutError:
        return False
    return True


@pytest.fixture
def nodes():
    return Watched()


async def test_an_old_one_has_read_what_it_answered_to_until_it_drops_it(nodes):
    scheduler = Running(1)
    reading = Reading(OLD, nodes, scheduler)
    for handshake, register, known in (
        ("Reported 1", "one:", False),
        ("Requesting_1", "one:", True),
        ("Requesting_1", "two:", False),
        ("Requesting_2", "two:", True),
    ):
        show(nodes, handshake, register)
        assert known == await is_read(reading)
    reading.forget()
    nodes.forget()
    show(nodes, "Reported 2", "two:")
    assert await is_read(reading), "it stays known when the watch forgets"

    show(nodes, "Deleted_2", "two:")
    show(nodes, "Reported 3", "two:")
    assert not await is_read(reading)
    show(nodes, "Requesting_3", "two:")
    assert await is_read(reading)
    scheduler.pid = 2
    assert not await is_read(reading), "another process has read nothing"
    scheduler.pid = 0
    assert await is_read(reading), "one that is gone is not waited for"


async def test_a_newer_one_that_has_read_other_gpus_is_waited_for(nodes):
    scheduler = Running(1)
    reading = Reading(MODEL, nodes, scheduler)
    one, other = (encode_register(registered(an_inventory(count=count))) for count in (1, 2))
    for handshake, register, known in (
        ("Requesting_1", one, True),
        ("", other, False),
        ("", "", True),
        ("", other, None),
        ("Requesting_2", other, True),
    ):
        show(nodes, handshake, register)
        assert known in (None, await is_read(reading))
    show(nodes, "", one)
    scheduler.pid = 2
    assert await is_read(reading)


@pytest.mark.parametrize(
    ("release", "slices", "since", "known"),
    [
        (MODEL, "80", 20.0, True),
        (MODEL, "80", 10.0, False),
        (MODEL, "0", 20.0, False),
        (Release((2, 9, 0)), "80", 20.0, False),
    ],
)
async def test_a_newer_one_has_read_after_its_look_what_nobody_tells_it_to(
    nodes, release, slices, since, known
):
    one, other = (encode_register(registered(an_inventory(count=count))) for count in (1, 2))
    now = asyncio.get_running_loop().time()
    reading = Reading(release, nodes, Running(1))
    show(nodes, "Requesting_1", one, now - 60.0, slices)
    show(nodes, "Requesting_1", other, now - since, slices)

    assert known == await is_read(reading)


# What a release is said not to show are tests that there are.

PEERS = Path(__file__).parents[1]


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
    def runs(pod) -> bool:
        return pod["status"]["phase"] == "Running"

    watched = Watched()
    for at, phase, kind in (
        (1.0, "Pending", "ADDED"),
        (2.0, "Running", "MODIFIED"),
        (3.0, "Running", "DELETED"),
        (4.0, "Pending", "ADDED"),  # another pod of that name
        (5.0, "Running", "MODIFIED"),
        (6.0, "Running", "MODIFIED"),
    ):
        metadata = {"namespace": "default", "name": "pod"}
        watched.take(Sighting(at, kind, {"metadata": metadata, "status": {"phase": phase}}))

    assert [2.0, 5.0, 5.0, None] == [
        watched.when("default/pod", runs, since=since) for since in (0.0, 3.5, 5.0, 6.5)
    ]
    watched.forget()
    assert None is watched.when("default/pod", runs)
    assert runs(watched.objects["default/pod"])
