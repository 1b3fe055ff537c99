"""The node lock's rules: whose lock gives way, and what is no lock."""

import datetime as dt
import re

import pytest

from agent.sandbox.scheduler.cluster import StoreCluster
from agent.sandbox.scheduler.verbs import (
    ContentionError,
    LockError,
    NodeLocks,
    go_duration,
    parse_lock,
)
from agent.sandbox.store import ObjectStore
from tests.fakes.chance import Seeded
from tests.fakes.clock import START, ManualClock
from tests.fakes.scheduler_cluster import LOCK
from tests.fakes.scheduler_vectors import build_pod, load_cases

POD = build_pod({"containers": []})
LAYOUT = "2006-01-02T15:04:05Z07:00"


def ago(seconds: int) -> str:
    return (START - dt.timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def locked(text: str) -> tuple[ObjectStore, NodeLocks]:
    store = ObjectStore(ManualClock(), Seeded())
    store.create("nodes", {"metadata": {"name": "n1", "annotations": {LOCK: text}}})
    store.create("pods", build_pod({"containers": []}, "alive"))
    return store, NodeLocks(StoreCluster(store), ManualClock(), Seeded(), 300.0)


def lock_of(store: ObjectStore) -> str | None:
    text: str | None = store.get("nodes", "", "n1")["metadata"]["annotations"].get(LOCK)
    return text


@pytest.mark.parametrize(
    "text", [f"{ago(299)},default,dead", f"{ago(301)},default,alive", ago(301), f"{ago(301)},,"]
)
async def test_a_lock_is_taken_over_from_the_dead_and_the_late(text: str) -> None:
    store, locks = locked(text)

    await locks.take("n1", POD)

    assert f"{ago(0)},default,p" == lock_of(store)


async def test_a_lock_of_the_same_name_is_kept_as_it_is() -> None:
    text = f"{ago(299)},default,p"
    store, locks = locked(text)

    await locks.take("n1", POD)

    assert text == lock_of(store)


@pytest.mark.parametrize("text", [f"{ago(299)},default,alive", ago(299), f"{ago(299)},,"])
async def test_a_young_lock_of_the_living_or_of_nobody_is_respected(text: str) -> None:
    store, locks = locked(text)

    with pytest.raises(ContentionError, match="has been locked within 5m0s"):
        await locks.take("n1", POD)

    assert text == lock_of(store)


@pytest.mark.parametrize(
    ("text", "after"),
    [
        (ago(1), None),
        ("no time", None),
        ("", None),
        (f"{ago(1)},default,p", None),
        ("no time,default,p", None),
        (f"{ago(1)},default,alive", f"{ago(1)},default,alive"),
        (f"{ago(1)},,", f"{ago(1)},,"),
    ],
)
async def test_a_release_removes_its_own_lock_and_those_without_parts(
    text: str, after: str | None
) -> None:
    store, locks = locked(text)

    await locks.release("n1", POD)

    assert after == lock_of(store)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "2026-08-21T06:20:39Z,default",
            "malformed lock annotation: expected 3 parts, got 2 from 2026-08-21T06:20:39Z,default",
        ),
        ("x,a,b,c", "malformed lock annotation: expected 3 parts, got 4 from x,a,b,c"),
        ("x,a,b", f'parsing time "x" as "{LAYOUT}": cannot parse "x" as "2006"'),
        ("", f'parsing time "" as "{LAYOUT}": cannot parse "" as "2006"'),
    ],
)
async def test_parts_are_counted_before_the_time_is_read(text: str, told: str) -> None:
    store, locks = locked(text)

    with pytest.raises(LockError) as refusal:
        await locks.take("n1", POD)

    assert told == str(refusal.value)
    assert text == lock_of(store)


PARSED = load_cases("node_lock_parse")


@pytest.mark.parametrize("case_id", sorted(PARSED))
def test_a_lock_is_parsed_as_by_hami(case_id: str) -> None:
    case = PARSED[case_id]
    if "error" in case:
        with pytest.raises(LockError) as refusal:
            parse_lock(case["value"])
        assert case["error"] == str(refusal.value)
        return

    stamp, namespace, name = parse_lock(case["value"])

    expected = (case["time_unix"], case["namespace"], case["pod"])
    assert expected == (stamp.timestamp(), namespace, name)


@pytest.mark.parametrize(
    "text",
    [
        "2026",
        "2026-8-21",
        "2026-13-21T06:20:39Z",
        "2026-08-21 06:20:39Z",
        "2026-08-21T24:20:39Z",
        "2026-08-21T06:20:39",
        "2026-02-30T06:20:39Z",
        "2026-08-21T06:20:39Zx",
        "2026-08-21T06:20:39+25:00",
    ],
)
def test_a_time_that_go_refuses_is_no_lock(text: str) -> None:
    with pytest.raises(LockError, match=f'^parsing time "{re.escape(text)}"'):
        parse_lock(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-08-21T06:20:39Z", "2026-08-21T06:20:39+00:00"),
        ("2026-08-21T08:20:39+02:00", "2026-08-21T06:20:39+00:00"),
        ("2026-08-21T04:20:39-02:00", "2026-08-21T06:20:39+00:00"),
        ("2026-08-21T06:20:39.1234567Z", "2026-08-21T06:20:39.123456+00:00"),
    ],
)
def test_times_are_read(text: str, expected: str) -> None:
    assert expected == parse_lock(text)[0].astimezone(dt.UTC).isoformat()


@pytest.mark.parametrize(("seconds", "text"), [(28, "28s"), (300, "5m0s"), (3661, "1h1m1s")])
def test_durations_are_written_as_by_go(seconds: int, text: str) -> None:
    assert text == go_duration(seconds)
