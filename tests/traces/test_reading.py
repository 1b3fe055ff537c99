"""The traces are read as they are meant: who asked, who wrote what, and whose locks these are."""

import datetime as dt

import pytest

from agent.cluster import BIND_PHASE, BIND_TIME, MUTEX_LOCK, PHASE_SUCCESS
from tests.traces.trace import NAMES, CallEnd, PodEvent, Trace, TracedNodeEvent, load

GAPS = {
    "burst": [0, 0, 0, 0, 3, 3, 5, 6, 8, 9, 9, 11],
    "burst-fast": [0] * 12,
    "deleted-early": [0, 1, 1, 1, 1, 2],
    "same-name": [0, 0, 1, 1, 1, 1],
    "serial": [0, 0, 0, 0, 1, 1, 1, 1],
    "serial-fast": [0] * 8,
    "shapes": [0, 0, 0, 1],
}
"""Seconds from each pod's bind-time to the stamp of its lock, as the recorder counted them."""

CALLS = {
    "burst": 12,
    "burst-fast": 12,
    "deleted-early": 6,
    "same-name": 6,
    "serial": 8,
    "serial-fast": 8,
    "shapes": 8,
}


def test_all_traces_are_there():
    assert tuple(sorted(GAPS)) == NAMES
    assert {name: len(load(name).calls) for name in NAMES} == CALLS


@pytest.mark.parametrize("name", NAMES)
def test_every_lock_is_of_the_pod_that_was_bound_under_it(name: str):
    trace = load(name)
    bound = {
        event.pod["metadata"]["uid"]: int(event.notes[BIND_TIME] or "")
        for event in trace.events
        if isinstance(event, PodEvent) and BIND_TIME in event.notes
    }
    gaps = [_stamp(lock) - bound[uid] for lock, uid in trace.owners.items()]

    assert sorted(gaps) == GAPS[name]


@pytest.mark.parametrize("name", NAMES)
def test_what_the_recorded_agent_wrote_is_left_to_ours(name: str):
    trace = load(name)
    answered = {call.uid for call in trace.calls if call.container}
    removed = [event for event in _of_locks(trace) if event.notes[MUTEX_LOCK] is None]

    assert not any(
        event.notes.get(BIND_PHASE) == PHASE_SUCCESS
        for event in trace.events
        if isinstance(event, PodEvent)
    )
    assert trace.settled.keys() <= answered
    assert len(removed) == sum(not call.container for call in trace.calls)


def test_of_a_pod_that_is_gone_the_scheduler_takes_the_lock():
    texts = [event.notes[MUTEX_LOCK] for event in _of_locks(load("deleted-early"))]

    owners = [text and text.rpartition(",")[2] for text in texts]
    assert ["d0", "d1", "d2", None, "d3", "d4", None, "d5"] == owners


def test_a_history_can_end_with_a_refusal():
    cut = load("deleted-early").until_refused(1)

    assert isinstance(cut.events[-1], CallEnd)
    assert [call.pod["metadata"]["name"] for call in cut.calls] == ["d0", "d1", "d2", "d3", "d4"]


def _of_locks(trace: Trace) -> list[TracedNodeEvent]:
    return [
        event
        for event in trace.events
        if isinstance(event, TracedNodeEvent) and MUTEX_LOCK in event.notes
    ]


def _stamp(lock: str) -> int:
    return int(dt.datetime.fromisoformat(lock.partition(",")[0]).timestamp())
