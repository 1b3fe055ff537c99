"""The instruments of the tests beside real peers: none takes silence, a gap or a delay for nothing.

Kept are those whose mistake a test beside the peers would not show.
"""

import json

import pytest

from agent import cluster as annotations
from tests.peers.lab.control import AuditLog, counted
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


# What was promised is held.


def test_a_count_is_over_its_bound_by_one_and_a_time_only_by_far():
    table = Table()

    table.hold("pods refused", 0, 0, unit="")
    table.hold("lock free", 24.0, 5.0)
    with pytest.raises(AssertionError, match="pods refused: 1, not 0"):
        table.hold("pods refused", 1, 0, unit="")
    with pytest.raises(AssertionError, match="lock free: 26, not 25 s"):
        table.hold("lock free", 26.0, 5.0)

    assert 2 == table.text().count("| over |")
