"""The audit log tells what was asked since a mark, or that it cannot tell."""

import ast
import asyncio
import fcntl
import json
import socket
from pathlib import Path

import pytest

from agent import cluster as annotations
from agent.hami.register import RegisteredGpu, encode_register, encode_register_colon, registered
from agent.model import GpuUuid
from tests.builders import an_inventory
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.api import Sighting, Watched
from tests.peers.lab.cluster import open_root, remove_leftovers
from tests.peers.lab.control import AuditLog, counted
from tests.peers.lab.identities import NODE, Ports, free_ports, usable
from tests.peers.lab.node_state import Capacity, gpus_of, text_of
from tests.peers.lab.part import Part
from tests.peers.lab.placing import Reading
from tests.peers.lab.releases import (
    BEFORE_2_8,
    BEFORE_2_10,
    MODEL,
    Release,
    chosen,
    impossible,
    release_of,
)
from tests.peers.lab.space import because
from tests.peers.lab.stream import STARTING, TOLD_LATE, Gap, Rejected
from tests.peers.lab.table import Table


@pytest.fixture
def path(tmp_path):
    return tmp_path / "audit.log"


def ask(path, verb: str, *, stage: str = "ResponseComplete", user: str = "me") -> None:
    event = {
        "stage": stage,
        "verb": verb,
        "requestURI": "/api/v1/pods",
        "user": {"username": user},
        "userAgent": "hami-agent/1",
        "objectRef": {"resource": "pods"},
    }
    with path.open("a") as file:
        file.write(json.dumps(event) + "\n")


def test_what_was_asked_since_a_mark_is_told(path):
    log = AuditLog(path)
    assert 0 == log.mark()
    ask(path, "list")
    mark = log.mark()
    ask(path, "get")
    ask(path, "get", user="other")
    assert {"get pods": 1} == counted(log.since(mark, "me"))
    assert {"list pods": 1, "get pods": 1} == counted(log.since(0, "me"))


def test_a_watch_counts_once(path):
    ask(path, "watch", stage="ResponseStarted")
    ask(path, "watch")
    assert {"watch pods": 1} == counted(AuditLog(path).since(0, "me"))


def patch_node(path, **notes: str | None) -> None:
    event = {
        "stage": "ResponseComplete",
        "verb": "patch",
        "requestURI": "/api/v1/nodes/a",
        "user": {"username": "me"},
        "userAgent": "hami-agent/1",
        "objectRef": {"resource": "nodes", "name": "a"},
        "requestObject": {"metadata": {"annotations": notes}},
    }
    with path.open("a") as file:
        file.write(json.dumps(event) + "\n")


def test_a_sign_of_life_is_left_out_and_nothing_else_that_writes_the_handshake(path):
    patch_node(path, **{annotations.HANDSHAKE: "Reported 2026-11-23 02:00:00"})
    assert [] == AuditLog(path).since(0, "me")
    patch_node(path, **{annotations.HANDSHAKE: None})
    patch_node(path, **{annotations.HANDSHAKE: "Reported 1", annotations.REGISTER: "x:"})
    patch_node(path)
    assert {"patch nodes": 3} == counted(AuditLog(path).since(0, "me"))


def test_a_line_that_is_not_whole_yet_is_left_for_later(path):
    ask(path, "get")
    with path.open("a") as file:
        file.write('{"stage": "Resp')
    assert {"get pods": 1} == counted(AuditLog(path).since(0, "me"))


def test_a_log_that_was_begun_anew_is_not_taken_for_silence(path):
    log = AuditLog(path)
    ask(path, "get")
    mark = log.mark()
    path.rename(path.with_name("audit-old.log"))
    path.touch()
    with pytest.raises(RuntimeError, match="began a new one"):
        log.since(mark, "me")


# Gaps in what the kubelet offers are found, and their length.


def seen(*looks: tuple[float, int]) -> Capacity:
    capacity = Capacity()
    for at, count in looks:
        capacity.look(at, count)
    return capacity


def test_a_gap_lasts_from_the_first_slice_that_is_missing_to_the_last_that_comes_back():
    assert [3.0] == seen((0, 80), (1, 80), (2, 0), (3, 0), (4, 70), (5, 80), (6, 80)).gaps()


def test_two_gaps_are_two():
    assert [1.0, 2.0] == seen((0, 80), (1, 0), (2, 80), (3, 0), (5, 80)).gaps()


def test_one_that_has_not_ended_has_no_length():
    assert [] == seen((0, 80), (1, 0)).gaps()


# Which rejections a time without an agent explains: the kubelet's own, and only in that time.

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


# The register annotation in both of its forms is read as the same GPUs.

GPUS = tuple(
    RegisteredGpu(GpuUuid(f"GPU-{index}"), index, 10, 81559, 100, "H100", 1, "hami-core", (), True)
    for index in (1, 2)
)


def test_both_forms_say_the_same():
    assert gpus_of(encode_register(GPUS)) == gpus_of(encode_register_colon(GPUS[::-1]))


def test_what_is_read_is_written_again():
    for text in (encode_register_colon(GPUS), encode_register(GPUS)):
        is_colon = text.endswith(":")
        assert gpus_of(text) == gpus_of(text_of(gpus_of(text), colon=is_colon))
    assert encode_register_colon(GPUS) == text_of(gpus_of(encode_register_colon(GPUS)), colon=True)


# Ports for servers: nobody listens on them, no client gets them, and none is given twice.


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_no_port_is_given_twice():
    ports = [*free_ports(3), *free_ports(2), *free_ports(3)]
    assert len(ports) == len(set(ports))


@pytest.mark.skipif(not Path("/proc/sys/net").is_dir(), reason="asks the kernel of Linux")
def test_the_kernel_gives_none_of_them_to_a_client():
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if len(usable(low)) < low:
        assert [] == [port for port in free_ports(20) if low <= port <= high]


def test_a_port_on_which_somebody_listens_is_not_given(listener):
    with pytest.raises(RuntimeError, match="others listen"):
        Ports(range(listener, listener + 1)).take(1)


def test_two_processes_begin_at_different_places_and_go_round():
    among = range(15000, 15003)
    assert [15001, 15002, 15000] == Ports(among, 1).take(3)
    assert [15002] == Ports(among, 5).take(1)


def test_where_clients_get_nearly_all_ports_any_will_do():
    assert range(15000, 32768) == usable(32768)
    assert range(15000, 65536) == usable(1024)


# What an old scheduler has read is what stood there when it set its own handshake.

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


async def test_it_has_read_what_it_answered_to(nodes):
    reading = Reading(OLD, nodes, Running(1))
    show(nodes, "Reported 1", "one:")
    assert not await is_read(reading)
    show(nodes, "Requesting_1", "one:")
    assert await is_read(reading)
    show(nodes, "Requesting_1", "two:")
    assert not await is_read(reading)
    show(nodes, "Requesting_2", "two:")
    assert await is_read(reading)


async def test_what_it_has_read_stays_known_when_the_watch_forgets(nodes):
    reading = Reading(OLD, nodes, Running(1))
    show(nodes, "Requesting_1", "one:")
    reading.forget()
    nodes.forget()
    show(nodes, "Reported 2", "one:")
    assert await is_read(reading)


async def test_it_has_dropped_what_it_says_is_deleted(nodes):
    reading = Reading(OLD, nodes, Running(1))
    show(nodes, "Requesting_1", "one:")
    show(nodes, "Deleted_2", "one:")
    show(nodes, "Reported 3", "one:")
    assert not await is_read(reading)


async def test_another_process_has_read_nothing_and_one_that_is_gone_is_not_waited_for(nodes):
    scheduler = Running(1)
    reading = Reading(OLD, nodes, scheduler)
    show(nodes, "Requesting_1", "one:")
    assert await is_read(reading)
    scheduler.pid = 2
    assert not await is_read(reading)
    scheduler.pid = 0
    assert await is_read(reading)


async def test_nobody_waits_for_a_newer_one_or_where_nothing_is_told(nodes):
    show(nodes, "Reported 1", "")
    assert await is_read(Reading(OLD, nodes, Running(1)))
    show(nodes, "Reported 1", "one:")
    assert await is_read(Reading(MODEL, nodes, Running(1)))


async def test_a_newer_one_that_has_read_other_gpus_is_waited_for(nodes):
    scheduler = Running(1)
    reading = Reading(MODEL, nodes, scheduler)
    one, other = (encode_register(registered(an_inventory(count=count))) for count in (1, 2))
    show(nodes, "Requesting_1", one)
    assert await is_read(reading)
    show(nodes, "", other)
    assert not await is_read(reading)
    show(nodes, "", "")
    assert await is_read(reading)
    show(nodes, "", other)
    show(nodes, "Requesting_2", other)
    assert await is_read(reading)
    show(nodes, "", one)
    scheduler.pid = 2
    assert await is_read(reading)


async def test_a_newer_one_has_read_after_its_look_what_nobody_tells_it_to(nodes):
    one, other = (encode_register(registered(an_inventory(count=count))) for count in (1, 2))
    now = asyncio.get_running_loop().time()
    for release, slices, since, known in (
        (MODEL, "80", 20.0, True),
        (MODEL, "80", 10.0, False),
        (MODEL, "0", 20.0, False),
        (Release((2, 9, 0)), "80", 20.0, False),
    ):
        nodes.forget()
        reading = Reading(release, nodes, Running(1))
        show(nodes, "Requesting_1", one, now - 60.0, slices)
        show(nodes, "Requesting_1", other, now - since, slices)
        assert known == await is_read(reading)


# Of which release a scheduler is; what it is said not to show are tests that there are.

PEERS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "said",
    ["v2.7.1\n", "2.7.1\n", "version:          v2.7.1\nrevision:         unknown\n"],
)
def test_what_a_scheduler_says_of_itself_is_believed(said):
    assert OLD == chosen(said, None)
    assert OLD == chosen(said, "v2.7.1")


@pytest.mark.parametrize("said", ["\n", "", "version:          v0.0.0-master\n", "v0.0.0\n"])
def test_one_that_does_not_know_its_release_is_what_the_user_says(said):
    assert OLD == chosen(said, "2.7.1")
    with pytest.raises(ValueError, match="HAMI_PEERS_SCHEDULER_RELEASE"):
        chosen(said, None)


@pytest.mark.parametrize(
    ("said", "named", "words"),
    [
        ("v2.7.1\n", "2.10.0", "says that it is 2.7.1, and you say 2.10.0"),
        ("\n", "old", "write it as 2.7.1"),
        ("v2.7.1\n", "2.7", "write it as 2.7.1"),
        ("\n", "2.4.1", "the oldest that is tried is 2.5.0"),
    ],
)
def test_what_cannot_be_is_an_error_in_a_sentence(said, named, words):
    with pytest.raises(ValueError, match=words):
        chosen(said, named)


def test_the_scheduler_itself_is_asked(tmp_path):
    scheduler = tmp_path / "scheduler"
    scheduler.write_text('#!/bin/sh\n[ "$1" = version ] && echo v2.9.0\n')
    scheduler.chmod(0o755)
    assert Release((2, 9, 0)) == release_of(scheduler, None)


@pytest.mark.parametrize(
    ("number", "is_old", "serves_inits"),
    [
        ((2, 5, 0), True, False),
        ((2, 7, 1), True, False),
        ((2, 8, 0), False, False),
        ((2, 9, 0), False, True),
        ((2, 10, 0), False, True),
    ],
)
def test_what_changed_with_a_release(number, is_old, serves_inits):
    release = Release(number)
    assert (is_old, serves_inits) == (release.is_old, release.serves_inits)
    assert is_old == bool(release.flags)


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


# A cluster's directory is removed with it; what a killed run left behind, by the next one.


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HAMI_PEERS_ROOT", str(tmp_path))
    return tmp_path


@pytest.fixture
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In the place of a hierarchy of cgroups."""
    return tmp_path_factory.mktemp("tree")


def a_leftover(where: Path, name: str = "hp-left") -> Path:
    """What a run leaves that was killed."""
    root = where / name
    (root / "logs").mkdir(parents=True)
    (root / "held").touch()
    return root


def test_it_lies_where_it_is_told_to_and_is_removed(where):
    with open_root() as root:
        assert where == root.parent
        assert (root / "logs").is_dir()
    assert [] == list(where.iterdir())


def test_one_that_is_held_is_left_alone(where, tree):
    with open_root() as root:
        remove_leftovers(where, [tree])
        assert (root / "logs").is_dir()


def test_opening_one_removes_what_nobody_holds(where):
    left = a_leftover(where)
    with open_root():
        assert not left.exists()


def test_its_cgroups_are_removed_with_it(where, tree):
    left = a_leftover(where)
    (tree / left.name / "kubepods" / "pod").mkdir(parents=True)
    (tree / "another").mkdir()

    remove_leftovers(where, [tree])

    assert not left.exists()
    assert [tree / "another"] == list(tree.iterdir())


def test_one_whose_cgroups_are_in_use_stays_for_the_next_time(where, tree):
    left = a_leftover(where)
    busy = tree / left.name / "pod" / "process"
    busy.parent.mkdir(parents=True)
    busy.touch()  # such a directory cannot be removed, like a cgroup with processes

    remove_leftovers(where, [tree])
    assert (left / "logs").is_dir()

    busy.unlink()
    remove_leftovers(where, [tree])
    assert not left.exists()


def test_one_of_which_a_lock_is_taken_just_now_is_left_alone(where, tree):
    left = a_leftover(where)
    with (left / "held").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        remove_leftovers(where, [tree])
    assert left.exists()


def test_other_directories_are_left_alone(where, tree):
    other, early = a_leftover(where, "other"), where / "hp-early"
    early.mkdir()
    remove_leftovers(where, [tree])
    assert other.exists()
    assert early.exists()


# What was measured is written for people, and the same for programs.


def test_a_program_reads_every_figure_with_its_bound_and_unit(tmp_path: Path):
    table = Table()
    table.add("start → ready", 1.5, 2.0)
    table.add("pods", 3, unit="pods")

    table.write(tmp_path / "build" / "peers.md")

    assert [
        {"what": "start → ready", "measured": 1.5, "bound": 2.0, "unit": "s"},
        {"what": "pods", "measured": 3, "bound": None, "unit": "pods"},
    ] == json.loads((tmp_path / "build" / "peers.json").read_text())
    assert "start → ready" in (tmp_path / "build" / "peers.md").read_text()


def test_of_what_several_workers_measured_the_worse_is_told():
    table, other = Table(), Table()
    table.add("start → ready", 1.5, 2.0)
    other.add("start → ready", 1.7, 2.0)
    other.add("pods", 3, unit="pods")

    table.take(other.told())

    assert [("start → ready", 1.7), ("pods", 3)] == [(row.what, row.measured) for row in table.rows]


def test_a_count_is_over_its_bound_by_one_and_a_time_only_by_far():
    table = Table()

    table.hold("pods refused", 0, 0, unit="")
    table.hold("lock free", 24.0, 5.0)
    with pytest.raises(AssertionError, match="pods refused: 1, not 0"):
        table.hold("pods refused", 1, 0, unit="")
    with pytest.raises(AssertionError, match="lock free: 26 s, not 25 s"):
        table.hold("lock free", 26.0, 5.0)

    assert ["over", "over"] == [row.cells()[-1] for row in table.rows]


def test_a_count_with_a_bound_cannot_be_told_without_being_held():
    with pytest.raises(ValueError, match="pods refused: a count with a bound is held"):
        Table().add("pods refused", 1, 0, unit="")


# What a watch has told: since when an object is in a state, and what was before a test.


def seen_by_watch(at: float, phase: str, kind: str = "MODIFIED") -> Sighting:
    metadata = {"namespace": "default", "name": "pod"}
    return Sighting(at, kind, {"metadata": metadata, "status": {"phase": phase}})


def runs(pod) -> bool:
    return pod["status"]["phase"] == "Running"


@pytest.fixture
def watched() -> Watched:
    """Two pods of one name, one after the other."""
    watched = Watched()
    for sighting in (
        seen_by_watch(1.0, "Pending", "ADDED"),
        seen_by_watch(2.0, "Running"),
        seen_by_watch(3.0, "Running", "DELETED"),
        seen_by_watch(4.0, "Pending", "ADDED"),
        seen_by_watch(5.0, "Running"),
        seen_by_watch(6.0, "Running"),
    ):
        watched.take(sighting)
    return watched


def test_the_first_sighting_counts(watched):
    assert 2.0 == watched.when("default/pod", runs)


def test_the_first_sighting_since_a_moment_counts(watched):
    assert 5.0 == watched.when("default/pod", runs, since=3.5)
    assert 5.0 == watched.when("default/pod", runs, since=5.0)
    assert None is watched.when("default/pod", runs, since=6.5)


def test_what_was_forgotten_was_never_seen_and_still_is(watched):
    watched.forget()
    assert None is watched.when("default/pod", runs)
    assert runs(watched.objects["default/pod"])
