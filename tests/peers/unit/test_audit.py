"""The audit log tells what was asked since a mark, or that it cannot tell."""

import json

import pytest

from agent import cluster as annotations
from tests.peers.lab.audit import AuditLog, counted


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
