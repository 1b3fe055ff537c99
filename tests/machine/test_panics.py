"""Of which of the kubelet's panics the agent could have known when it answered."""

import datetime as dt
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from agent.sandbox.kubelet.seen import KubeletEvent
from tests.machine.audit import Audit

NOON = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)


def breaches_after(*events: tuple[str, str]) -> list[str]:
    """What the audit notes when the kubelet does this; each event names a pod."""
    heard: list[Callable[[KubeletEvent], None]] = []
    kubelet: Any = SimpleNamespace(history=SimpleNamespace(listen=heard.append))
    audit = Audit(SimpleNamespace(), kubelet, SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    for kind, pod in events:
        heard[0](KubeletEvent(NOON, 0.0, kind, pod=pod, container="c"))  # type: ignore[arg-type]
    return audit.breaches


PANIC = ("panicked", "")
A_ANSWERED = ("allocated", "a")


@pytest.mark.parametrize(
    "events",
    [
        [("preferring", "a"), ("allocating", "a"), ("preferring", "b"), A_ANSWERED],
        [("preferring", "a"), ("preferring", "b"), ("allocating", "a"), A_ANSWERED],
        [("allocating", "a"), ("allocating", "b"), A_ANSWERED],
        [
            *(("preferring", "a"), ("allocating", "a"), ("preferring", "b"), A_ANSWERED),
            *(("allocating", "b"), ("allocated", "b")),
        ],
    ],
)
def test_a_panic_after_an_answer_beside_another_question_is_the_agents(events):
    assert 1 == len(breaches_after(*events, PANIC))


@pytest.mark.parametrize(
    "events",
    [
        [("preferring", "a"), ("allocating", "a"), A_ANSWERED],
        [("allocating", "a"), A_ANSWERED, ("preferring", "b")],
        [("preferring", "b"), ("preferring", "a"), ("allocating", "a"), A_ANSWERED],
        [("allocating", "a"), ("allocating", "b"), ("allocate_refused", "a"), ("allocated", "b")],
        [("allocating", "a"), ("allocating", "b"), A_ANSWERED, ("started", "")],
    ],
)
def test_of_a_beginning_that_nobody_told_it_or_that_came_later_it_cannot_know(events):
    assert [] == breaches_after(*events, PANIC)
