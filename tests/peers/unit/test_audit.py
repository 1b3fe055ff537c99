"""The audit log tells what was asked since a mark, or that it cannot tell."""

import json

import pytest

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
