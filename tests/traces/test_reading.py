"""The traces are read as they are meant: who asked, who wrote what, and whose locks these are."""

import datetime as dt

import pytest

from agent.cluster import BIND_TIME
from tests.traces.trace import NAMES, PodEvent, load

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


def _stamp(lock: str) -> int:
    return int(dt.datetime.fromisoformat(lock.partition(",")[0]).timestamp())
