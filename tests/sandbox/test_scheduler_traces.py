"""The model against recorded histories of HAMi's own scheduler: same writes, same order, same gaps.

The recordings are of a real cluster, so their times are those of one run. The model is given the
same workloads on virtual time, with several seeds, and a kubelet and an agent that answer at once.
"""

import asyncio
import statistics

import pytest

from agent import cluster as annotations
from agent.sandbox.api_errors import Json
from agent.sandbox.scheduler.model import SchedulerSettings
from tests.fakes.scheduler_traces import (
    BIND,
    FILTER,
    LOCK,
    MARK,
    Play,
    gaps,
    orders,
    recorded,
    steps,
)

SLOW, FAST = SchedulerSettings(), SchedulerSettings().quick()
SEEDS = pytest.mark.parametrize("seed", range(5))
PLACED = {(FILTER, LOCK, MARK, BIND)}


Wanted = list[tuple[str, Json]]
"""Names and specs of pods, in the order of their creation; a name may be there again."""


def wanted(trace: list[Json]) -> Wanted:
    """The pods of a trace."""
    return [
        (row["object"]["metadata"]["name"], row["object"]["spec"])
        for row in trace
        if row["kind"] == "pod" and row["type"] == "ADDED"
    ]


async def in_series(play: Play, pods: Wanted) -> None:
    """Each pod runs and is deleted before the next one is created."""
    for name, spec in pods:
        play.submit(name, spec)
        await play.until("Running", name)
        play.delete(name)
        await asyncio.sleep(0.2)


async def at_once(play: Play, pods: Wanted) -> None:
    for name, spec in pods:
        play.submit(name, spec)
        await asyncio.sleep(0.015)
    for name, _ in pods:
        await play.until("Running", name)


async def kept(play: Play, pods: Wanted) -> None:
    """One after the other; all stay."""
    for name, spec in pods:
        play.submit(name, spec)
        await play.until("Running", name)


async def deleted_early(play: Play, pods: Wanted) -> None:
    """Every other one is deleted as soon as it is bound."""
    for number, (name, spec) in enumerate(pods):
        play.submit(name, spec)
        if number % 2:
            await play.until("Running", name)
        else:
            await play.until("bound", name)
            play.delete(name)
        await asyncio.sleep(0.06)


WORKLOADS = {
    "serial": (SLOW, in_series),
    "serial-fast": (FAST, in_series),
    "burst": (SLOW, at_once),
    "burst-fast": (FAST, at_once),
    "shapes": (SLOW, kept),
    "same-name": (SLOW, in_series),
    "deleted-early": (SLOW, deleted_early),
}
MOST = {"serial": 1, "burst": 14, "shapes": 1, "same-name": 1, "deleted-early": 2}
"""Seconds between bind-time and the lock's stamp; with the fast client there are none."""


PLAYED: dict[tuple[str, int], list[Json]] = {}


async def played(name: str, seed: int) -> list[Json]:
    """The rows of the same workload, done by the model once for all tests: it repeats itself."""
    if (name, seed) not in PLAYED:
        PLAYED[name, seed] = await play(name, seed)
    return PLAYED[name, seed]


async def play(name: str, seed: int) -> list[Json]:
    trace, (settings, workload) = recorded(name), WORKLOADS[name]
    await asyncio.sleep(1000 - asyncio.get_running_loop().time() % 1000)  # the same phase each time
    one = Play(trace, settings, seed)
    async with one.running():
        await workload(one, wanted(trace))
    return one.rows


def pauses(rows: list[Json], before: str, after: str) -> list[float]:
    """Seconds between two steps of the same pod, for each pod that was bound."""
    began: dict[str, float] = {}
    found = []
    for step in steps(rows):
        if step.what == before:
            began[step.pod] = step.t
        elif step.what == after and step.pod in began:
            found.append(step.t - began.pop(step.pod))
    return found


def bound_within(rows: list[Json]) -> float:
    """Seconds from the first pod's creation to the last binding."""
    first = next(row["t"] for row in rows if row["kind"] == "pod")
    return max(step.t for step in steps(rows) if step.what == BIND) - first


def owners(rows: list[Json]) -> list[str]:
    """Who locked the node, in order."""
    return [step.pod for step in steps(rows) if step.what == LOCK]


def shares(rows: list[Json]) -> dict[str, str]:
    """What each pod was given at last."""
    given = {}
    for row in rows:
        marks = row["object"]["metadata"].get("annotations") or {} if row["kind"] == "pod" else {}
        if annotations.ALLOCATED in marks:
            given[row["object"]["metadata"]["name"]] = marks[annotations.ALLOCATED]
    return given


@SEEDS
@pytest.mark.parametrize("name", WORKLOADS)
async def test_the_writes_for_a_pod_come_in_hamis_order(name: str, seed: int) -> None:
    assert orders(steps(recorded(name))) == PLACED == orders(steps(await played(name, seed)))


@SEEDS
@pytest.mark.parametrize("name", MOST)
async def test_a_lock_is_as_much_younger_than_bind_time_as_hamis(name: str, seed: int) -> None:
    found = gaps(steps(await played(name, seed)))

    for seconds in (found, gaps(steps(recorded(name)))):
        assert set(seconds) <= set(range(MOST[name] + 1))
        assert {0, 1} <= {min(second, 1) for second in seconds}
    assert len(found) == len(gaps(steps(recorded(name))))


@SEEDS
async def test_in_a_burst_the_gaps_grow_to_many_seconds(seed: int) -> None:
    for rows in (recorded("burst"), await played("burst", seed)):
        found = sorted(gaps(steps(rows)))
        assert 12 == len(found)
        assert found[-1] >= 6
        assert sum(second >= 2 for second in found) >= 5


@SEEDS
@pytest.mark.parametrize("name", ["serial-fast", "burst-fast"])
async def test_with_a_fast_client_there_is_no_gap(name: str, seed: int) -> None:
    found = gaps(steps(await played(name, seed)))

    assert {0} == set(found) == set(gaps(steps(recorded(name))))
    assert len(found) == len(gaps(steps(recorded(name))))


@SEEDS
@pytest.mark.parametrize("name", ["serial", "shapes", "same-name", "deleted-early"])
async def test_one_pod_after_the_other_takes_as_long_as_with_hami(name: str, seed: int) -> None:
    real, rows = recorded(name), await played(name, seed)

    for before, after in ((LOCK, MARK), (MARK, BIND)):
        expected = statistics.median(pauses(real, before, after))
        assert pytest.approx(expected, abs=0.02) == statistics.median(pauses(rows, before, after))
    assert pytest.approx(bound_within(real), rel=0.15) == bound_within(rows)


@SEEDS
@pytest.mark.parametrize("name", ["burst", "burst-fast"])
async def test_a_burst_is_placed_about_as_fast_as_by_hami(name: str, seed: int) -> None:
    ratio = bound_within(await played(name, seed)) / bound_within(recorded(name))

    assert 0.5 < ratio < 2


@SEEDS
async def test_the_lock_of_a_pod_that_went_is_taken_over(seed: int) -> None:
    found = owners(await played("deleted-early", seed))

    assert [f"d{number}" for number in range(6)] == found == owners(recorded("deleted-early"))


@pytest.mark.parametrize("name", ["serial", "shapes", "same-name"])
async def test_the_same_pods_are_given_the_same_gpus(name: str) -> None:
    assert shares(recorded(name)) == shares(await played(name, 0))


async def test_a_history_repeats_itself() -> None:
    async def told(seed: int) -> list[tuple[float, str, str]]:
        return [(round(s.t, 3), s.what, s.pod) for s in steps(await play("burst", seed))]

    assert await told(1) == await told(1) != await told(2)
