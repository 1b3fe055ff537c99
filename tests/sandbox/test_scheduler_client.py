"""The scheduler model: locks, binds, and histories as HAMi's own scheduler wrote them."""

import asyncio
import datetime as dt
import functools
import statistics
from collections.abc import Awaitable, Callable

import pytest

from agent import cluster as annotations
from agent.sandbox.apiserver_requests import merge_patch
from agent.sandbox.scheduler.cluster import StoreCluster
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.verbs import BindError, HamiVerbs, LockError, NodeLocks, parse_lock
from agent.sandbox.store import Json, ObjectStore
from tests.fakes.chance import Seeded
from tests.fakes.clock import START, ManualClock
from tests.fakes.scheduler_cluster import LOCK, RecordedCluster
from tests.fakes.scheduler_traces import BIND, FILTER, MARK, Play, gaps, orders, recorded, steps
from tests.fakes.scheduler_traces import LOCK as TRACED_LOCK
from tests.fakes.scheduler_vectors import build_pod, load_cases

GPU = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1000"}


# The node lock's rules: whose lock gives way, and what is no lock.

LOCK_POD = build_pod({"containers": []})


def ago(seconds: int) -> str:
    return (START - dt.timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def locked(text: str) -> tuple[ObjectStore, NodeLocks]:
    store = ObjectStore(ManualClock(), Seeded())
    store.create("nodes", {"metadata": {"name": "n1", "annotations": {LOCK: text}}})
    store.create("pods", build_pod({"containers": []}, "alive"))
    return store, NodeLocks(StoreCluster(store), ManualClock(), Seeded())


def lock_of(store: ObjectStore) -> str | None:
    text: str | None = store.get("nodes", "", "n1")["metadata"]["annotations"].get(LOCK)
    return text


@pytest.mark.parametrize(
    "text", [f"{ago(299)},default,dead", f"{ago(301)},default,alive", ago(301), f"{ago(301)},,"]
)
async def test_a_lock_is_taken_over_from_the_dead_and_the_late(text: str) -> None:
    store, locks = locked(text)

    await locks.take("n1", LOCK_POD)

    assert f"{ago(0)},default,p" == lock_of(store)


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

    await locks.release("n1", LOCK_POD)

    assert after == lock_of(store)


PARSED = load_cases("node_lock_parse")


@pytest.mark.parametrize("case_id", sorted(PARSED))
def test_a_lock_is_parsed_as_by_hami(case_id: str) -> None:
    case = PARSED[case_id]
    if "error" in case:
        with pytest.raises(LockError) as refusal:
            parse_lock(case["value"])
        assert case["error"] == str(refusal.value)
        return

    lock = parse_lock(case["value"])

    expected = (case["time_unix"], case["namespace"], case["pod"])
    assert expected == (lock.stamp.timestamp(), lock.namespace, lock.name)


# What others do between two steps of the scheduler; it is as blind to it as HAMi's is.

Others = Callable[["Interrupted"], None]


class Interrupted(RecordedCluster):
    """Others act before each patch of a node."""

    def __init__(self, others: Others | None = None) -> None:
        super().__init__(filled())
        self.others = others

    @property
    def patches(self) -> int:
        return self.calls.count("patch nodes")

    async def before(self, call: str) -> None:
        if call == "patch nodes" and self.others is not None:
            self.others(self)

    def annotate(self, **marks: str) -> None:
        patch = {"metadata": {"annotations": marks}}
        self.store.update("nodes", "", "n1", lambda node: merge_patch(node, patch))

    def lock(self) -> str:
        held: str = self.store.get("nodes", "", "n1")["metadata"]["annotations"].get(LOCK, "")
        return held

    def marks(self, name: str = "p") -> Json:
        return dict(self.store.get("pods", "default", name)["metadata"].get("annotations") or {})


def a_pod(name: str) -> Json:
    return build_pod({"containers": [{"name": "c", "limits": GPU}]}, name)


def filled() -> ObjectStore:
    store = ObjectStore(ManualClock(), Seeded())
    store.create("nodes", {"metadata": {"name": "n1", "annotations": {"beat": "0"}}})
    for name in ("p", "other"):
        store.create("pods", a_pod(name))
    return store


async def bind(cluster: Interrupted, name: str = "p") -> None:
    pod = cluster.store.get("pods", "default", name)
    hami = HamiVerbs(cluster, ManualClock(), Seeded(), SchedulerSettings().quick(), eager=False)
    await hami.see_node("MODIFIED", cluster.store.get("nodes", "", "n1"))
    hami.see_pod("ADDED", pod)
    await hami.bind("default", name, pod["metadata"]["uid"], "n1")


async def test_a_bind_makes_six_requests_in_hamis_order() -> None:
    cluster = Interrupted()

    await bind(cluster)

    expected = [*["get nodes"] * 3, "patch nodes", "patch pods", "bind pods"]
    assert expected == cluster.calls


async def test_a_bind_that_is_repeated_fails_and_gives_the_lock_away() -> None:
    cluster = Interrupted()
    await bind(cluster)
    assert cluster.lock().endswith(",default,p")

    with pytest.raises(BindError, match='already assigned to node "n1"'):
        await bind(cluster)

    assert "" == cluster.lock()
    assert "allocating" == cluster.marks()["hami.io/bind-phase"]


TAKEN = "2026-08-21T06:20:39Z,default,other"


def lock_for_another(cluster: Interrupted) -> None:
    cluster.annotate(**{LOCK: TAKEN})


def bind_elsewhere_and_remove_the_node(cluster: Interrupted) -> None:
    if cluster.patches == 1:
        cluster.store.bind("default", "p", "n2")
    if cluster.patches == 2:
        cluster.store.delete("nodes", "", "n1")


def remove(cluster: Interrupted) -> None:
    if cluster.patches == 1:
        cluster.store.delete("pods", "default", "p", grace=0)


def make_again(cluster: Interrupted) -> None:
    if cluster.patches == 1:
        remove(cluster)
        cluster.store.create("pods", a_pod("p"))


@pytest.mark.parametrize(
    ("meanwhile", "refusal", "lock"),
    [
        (lock_for_another, r"^failed to set node lock .* is locked: node lock cont", TAKEN),
        # The lock cannot be given back, and the first failure is told.
        (bind_elsewhere_and_remove_the_node, 'already assigned to node "n2"', None),
        (make_again, "UID", ""),
        (remove, 'pods "p" not found', ""),
    ],
)
async def test_what_others_do_meanwhile_fails_the_bind_and_its_lock_is_given_back(
    meanwhile: Others, refusal: str, lock: str | None
) -> None:
    cluster = Interrupted(meanwhile)

    with pytest.raises(BindError, match=refusal):
        await bind(cluster)

    assert lock is None or lock == cluster.lock()
    if meanwhile is make_again:
        assert "allocating" == cluster.marks()["hami.io/bind-phase"]


# The model against recorded histories of HAMi's own scheduler: same writes, same order, same gaps.
#
# The recordings are of a real cluster, so their times are those of one run. The model is given the
# same workloads on virtual time, with several seeds, and a kubelet and an agent that answer at
# once.

SLOW, FAST = SchedulerSettings(), SchedulerSettings().quick()
Wanted = list[tuple[str, Json]]
"""Names and specs of pods, in the order of their creation; a name may be there again."""


def wanted(trace: list[Json]) -> Wanted:
    """The pods of a trace."""
    return [
        (row["object"]["metadata"]["name"], row["object"]["spec"])
        for row in trace
        if row["kind"] == "pod" and row["type"] == "ADDED"
    ]


async def in_series(play: Play, pods: Wanted, *, is_kept: bool = False) -> None:
    """Each pod runs, and is deleted unless it is kept, before the next one is created."""
    for name, spec in pods:
        play.submit(name, spec)
        await play.until("Running", name)
        if not is_kept:
            play.delete(name)
            await asyncio.sleep(0.2)


async def at_once(play: Play, pods: Wanted) -> None:
    for name, spec in pods:
        play.submit(name, spec)
        await asyncio.sleep(0.015)
    for name, _ in pods:
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


WORKLOADS: dict[str, tuple[SchedulerSettings, Callable[[Play, Wanted], Awaitable[None]]]] = {
    "serial": (SLOW, in_series),
    "serial-fast": (FAST, in_series),
    "burst": (SLOW, at_once),
    "burst-fast": (FAST, at_once),
    "shapes": (SLOW, functools.partial(in_series, is_kept=True)),
    "same-name": (SLOW, in_series),
    "deleted-early": (SLOW, deleted_early),
}
MOST = {"serial": 1, "burst": 14, "shapes": 1, "same-name": 1, "deleted-early": 2}
"""Seconds between bind-time and the lock's stamp; with the fast client there are none."""
STEADY = {"serial", "shapes", "same-name", "deleted-early"}


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
    return [step.pod for step in steps(rows) if step.what == TRACED_LOCK]


def shares(rows: list[Json]) -> dict[str, str]:
    """What each pod was given at last."""
    given = {}
    for row in rows:
        marks = row["object"]["metadata"].get("annotations") or {} if row["kind"] == "pod" else {}
        if annotations.ALLOCATED in marks:
            given[row["object"]["metadata"]["name"]] = marks[annotations.ALLOCATED]
    return given


@pytest.mark.parametrize("name", WORKLOADS)
async def test_a_workload_is_placed_as_hami_placed_it(name: str) -> None:
    real, (settings, workload) = recorded(name), WORKLOADS[name]
    one = Play(real, settings, 0)
    async with one.running():
        await workload(one, wanted(real))

    # The same writes in the same order, and as many of them.
    placed = {(FILTER, TRACED_LOCK, MARK, BIND)}
    assert orders(steps(real)) == placed == orders(steps(one.rows))
    found, expected = gaps(steps(one.rows)), gaps(steps(real))
    assert len(expected) == len(found)
    # The lock is as much younger than bind-time; in a slow burst by many seconds.
    most = MOST.get(name, 0)
    for seconds in (found, expected):
        assert set(seconds) <= set(range(most + 1))
        assert {0, min(most, 1)} <= {min(second, 1) for second in seconds}
        if name == "burst":
            assert max(seconds) >= 6
            assert sum(second >= 2 for second in seconds) >= 5
    # One pod after the other takes as long; a burst about as long.
    times = bound_within(real), bound_within(one.rows)
    if name in STEADY:
        assert pytest.approx(times[0], rel=0.15) == times[1]
        for before, after in ((TRACED_LOCK, MARK), (MARK, BIND)):
            pause = statistics.median(pauses(real, before, after))
            assert pytest.approx(pause, abs=0.02) == statistics.median(
                pauses(one.rows, before, after)
            )
    assert 0.5 < times[1] / times[0] < 2
    # The lock of a pod that went is taken over; the same pods are given the same GPUs.
    if name in STEADY:
        assert owners(real) == owners(one.rows)
    if name in STEADY - {"deleted-early"}:
        assert shares(real) == shares(one.rows)
