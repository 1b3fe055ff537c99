"""GPU pods, one after another and 20 at once: the right shares for each, by few requests."""

import asyncio
import contextlib
import json
import statistics
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice

import pytest

from agent.cluster import MUTEX_LOCK
from tests.peers.lab.api import Object
from tests.peers.lab.cluster import ACCOUNT, Cluster
from tests.peers.lab.grants import (
    WHOLE,
    Outcome,
    expected_inside,
    grants,
    lost,
    oversold,
    seen_inside,
)
from tests.peers.lab.identities import NODE, NODE_USER
from tests.peers.lab.node_state import lock_text, notes_of
from tests.peers.lab.nodes import frozen
from tests.peers.lab.placement import agent_stamps, annotate, bind, create_by_hand, lock, share
from tests.peers.lab.pods import (
    NAMESPACE,
    PODS,
    a_container,
    a_pod,
    as_seen,
    create,
    delete,
    key,
    name_of,
    phase_of,
    run,
    telling,
    until_deleted,
    until_running,
    until_settled,
    until_told,
    up_at,
)
from tests.peers.lab.requests import asked_since, mark_of_rest, of_pods, reads, refused, writes
from tests.peers.lab.stream import a_chance

COUNT = 20
CORES = 30
"""Three pods fill a GPU, and 20 nearly the node: a share given twice shows in the sums."""


@pytest.mark.parametrize("looks", [1, 0], ids=["names of their own", "generated names"])
async def test_pods_one_after_another_cost_two_writes_each_and_looks_where_a_name_can_return(
    cluster, agent, looks
):
    mark = await mark_of_rest(cluster)
    pods, names = some_pods(cluster, "row")[:5], []
    await cluster.reading.until_current()
    for pod in pods:
        made = await cluster.api.create(PODS, pod if looks else generated(pod))
        names.append(name_of(made))
        await until_running(cluster, names[-1], within=60.0)

    await until_settled(cluster, *names)
    wanted = of_pods(len(pods), looks=looks)
    requests = await asked_since(cluster, mark, NODE_USER, wanted)
    assert of_pods(len(pods), looks=0) == writes(requests)
    more = reads(requests) - wanted
    assert more.total() <= 1  # a watch may lag behind a pod


def generated(pod: Object) -> Object:
    """The same pod, whose name the API server completes."""
    metadata = {key: value for key, value in pod["metadata"].items() if key != "name"}
    return {**pod, "metadata": {**metadata, "generateName": f"{name_of(pod)}-"}}


@pytest.mark.timeout(300)
async def test_20_pods_at_once_all_run_with_their_own_shares(cluster, table):
    agent = await cluster.start_registered_agent(user=ACCOUNT)
    mark = await mark_of_rest(cluster)
    pods = some_pods(cluster, "burst")
    names = [*map(name_of, pods)]
    begun = await create(cluster, *pods)
    await until_running(cluster, *names, within=240.0)
    await until_settled(cluster, *names)

    seconds = max(up_at(cluster, name, begun) for name in names) - begun
    print(f"20 pods at once were Ready after {seconds:.1f} s")  # noqa: T201 -- for whoever looks
    table.hold("20 pods at once: all Ready (HAMi's plugin: 81 s)", seconds, 40.0)
    await check_shares(cluster, pods)
    assert [] == agent.events("alloc.refused")
    requests = await asked_since(cluster, mark, ACCOUNT, of_pods(COUNT))
    assert [] == refused(requests)
    assert of_pods(COUNT, looks=0) == writes(requests)
    more = reads(requests) - of_pods(COUNT)
    assert more.total() <= 2  # for at most 5 % of the pods


def some_pods(cluster: Cluster, prefix: str) -> list[Object]:
    """Pods that tell of their inside; no two ask for the same."""
    return [
        telling(
            cluster, a_pod(f"{prefix}-{number}", a_container(memory=memory_of(number), cores=CORES))
        )
        for number in range(COUNT)
    ]


def memory_of(number: int) -> int:
    """What pod `number` asks for, in MiB."""
    return 20000 + 37 * number


async def check_shares(cluster: Cluster, pods: list[Object]) -> None:
    """Each has what it asked for, by its annotation and by its inside; no GPU is overfull."""
    names = [name_of(pod) for pod in pods]
    await until_told(cluster, *names)
    wanted = {name: expected_inside(cluster, name) for name in names}
    assert wanted == {name: await seen_inside(cluster, name) for name in names}
    asked = {name: [(memory_of(number), CORES)] for number, name in enumerate(names)}
    written = {name: grants(as_seen(cluster, name))["main"] for name in names}
    assert asked == {
        name: [(one.mib, one.percent) for one in given] for name, given in written.items()
    }
    assert {} == oversold(cluster)
    failed = [
        seen.object["status"]
        for name in names
        for seen in cluster.pods.history[key(name)]
        if phase_of(seen.object) == "Failed"
    ]
    assert [] == failed


# How long pods hold the lock that are created at once, beside HAMi's own scheduler.

FAST = ("--kube-qps=500", "--kube-burst=1000")
GROUP = {"scheduling.x-k8s.io/pod-group": "burst"}
"""With this label HAMi's scheduler waits for the lock inside of a bind (`IsPodGroupMember`)."""
LOCK = 60.0
"""Milliseconds for which a lock is held in the median, while no other pod asks for it."""


@dataclass(frozen=True, slots=True)
class BurstCase:
    """What differs from the defaults: flags of HAMi's scheduler, the longest back-off, labels.

    `in_turn`: each pod is created when the one before it runs; no two ask for the lock at once.
    """

    count: int
    name: str
    flags: tuple[str, ...] = ()
    longest: int | None = None
    labels: dict[str, str] | None = None
    in_turn: bool = False

    def __str__(self) -> str:
        return f"{self.count}-{self.name}"


SETTINGS = (
    BurstCase(20, "defaults"),
    BurstCase(20, "backoff", (), 1),
    BurstCase(20, "fast", FAST),
    BurstCase(20, "fast-backoff", FAST, 1),
    BurstCase(20, "fast-group", FAST, None, GROUP),
)
IN_TURN = BurstCase(20, "in-turn", FAST, in_turn=True)
CASES = (IN_TURN, *SETTINGS, *(replace(case, count=100) for case in SETTINGS))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES, ids=str)
async def test_pods_at_once_hold_the_lock_for_a_moment(cluster, table, case):
    if cluster.release.is_old or "hami-scheduler" not in cluster.parts["extender"].command[0]:
        pytest.skip("HAMI_PEERS_SCHEDULER names no scheduler of HAMi from 2.8 on")
    async with placed_by(cluster, case):
        split = 10 if case.count <= 80 else 20
        flags = "--split-count", str(split)
        agent = await cluster.start_registered_agent(*flags, user=ACCOUNT, slices=8 * split)
        await until_placing(cluster)
        begun = asyncio.get_running_loop().time()
        names = await (create_in_turn if case.in_turn else create_at_once)(cluster, case)
        await until_running(cluster, *names, within=1200.0)
        # No more can be asked: by default HAMi's scheduler places pods again that run already.
        await cluster.nodes.until(
            lambda: {*names} <= dict(locks_held(cluster, begun)).keys(), 40.0, "a lock stays"
        )
        table.add(f"{case}: all Ready", max(up_at(cluster, name, begun) for name in names) - begun)
        held = [one for owner, one in locks_held(cluster, begun) if owner in names]
        bound = LOCK if case.in_turn else None
        table.add(f"{case}: a lock is held, median", statistics.median(held), bound, "ms")
        assert ([], {}) == (agent.events("alloc.refused"), oversold(cluster, (*WHOLE[:2], split)))


def locks_held(cluster: Cluster, since: float) -> Iterator[tuple[str, float]]:
    """The owners of the locks that were seen since then, and the milliseconds until each went."""
    owner, taken = "", 0.0
    for seen in cluster.nodes.history[NODE]:
        now = notes_of(seen.object).get(MUTEX_LOCK, "").rpartition(",")[2]
        if now != owner:
            if owner and taken >= since:
                yield owner, (seen.at - taken) * 1000
            owner, taken = now, seen.at


async def until_placing(cluster: Cluster) -> None:
    """Return once HAMi's scheduler, which reads the Nodes every 15 s, has placed one pod."""
    await run(cluster, a_pod("first"))
    await until_settled(cluster, "first")
    await delete(cluster, "first", grace=0)
    await until_deleted(cluster, "first")


async def create_at_once(cluster: Cluster, case: BurstCase) -> list[str]:
    """Their names, which are generated, as of a Job or a Deployment."""
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(cluster.api.create(PODS, a_burst_pod(number, case)))
            for number in range(case.count)
        ]
    return [name_of(task.result()) for task in tasks]


async def create_in_turn(cluster: Cluster, case: BurstCase) -> list[str]:
    names = []
    for number in range(case.count):
        names.append(name_of(await cluster.api.create(PODS, a_burst_pod(number, case))))
        await until_running(cluster, names[-1])
    return names


def a_burst_pod(number: int, case: BurstCase) -> Object:
    pod = a_pod("burst", a_container(memory=2000 + 37 * number, cores=5))
    metadata = {"generateName": "burst-", "namespace": NAMESPACE, "labels": case.labels or {}}
    return {**pod, "metadata": metadata}


@contextlib.asynccontextmanager
async def placed_by(cluster: Cluster, case: BurstCase) -> AsyncIterator[None]:
    """Both schedulers with the settings of a case; as they were afterwards."""
    ours, theirs = cluster.parts["extender"], cluster.parts["kube-scheduler"]
    command, file = ours.command, cluster.plane.root / "scheduler.json"
    before = file.read_text()
    longest = {} if case.longest is None else {"podMaxBackoffSeconds": case.longest}
    try:
        await theirs.stop()
        await ours.stop()
        ours.command = (*command, *case.flags)
        file.write_text(json.dumps(json.loads(before) | longest))
        await ours.start()
        await theirs.start()
        yield
    finally:
        ours.command = command
        file.write_text(before)
        await theirs.stop()
        await ours.stop()
        await cluster.revive()


# Two pods of the same count back to back: each finds inside what was written for it alone.

PODS_IN_A_ROW = [
    pytest.param(12, marks=pytest.mark.timeout(300)),
    pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(1800)]),
]
STRANGERS = "strangers"
PREFIXES = "prefixes"
SUCCESSOR = "successor"
"""One of the two has the name of a pod that ran until now, as in a StatefulSet."""

RELEASED = "released"
IN_ALLOCATE = "in Allocate"
QUEUED = "queued"
"""When the second pod gets the lock: when the first's is free again, about when the kubelet asks
for the first, or while the kubelet has both before it."""


def small(number):
    """The share of one of two; no two tries have the same."""
    return 1000 + number, 7


def large(number):
    """The share of the other."""
    return 20000 + number, 30


def names_of(shape, number):
    if shape == STRANGERS:
        return f"blue-{number}", f"red-{number}"
    if shape == PREFIXES:
        return f"web-{number}", f"web-{number}1"
    return "set-0", f"beside-{number}"


def a_telling_pod(cluster, name, amounts):
    mib, percent = amounts
    return telling(cluster, a_pod(name, a_container(memory=mib, cores=percent)))


async def end(cluster, *names):
    """Have pods deleted at once, if they are there."""
    present = [name for name in names if key(name) in cluster.pods.objects]
    for name in present:
        await delete(cluster, name, grace=0)
    for name in present:
        await until_deleted(cluster, name)


async def create_in_a_row(cluster, *pods):
    await cluster.reading.until_current()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(cluster.api.create(PODS, pod)) for pod in pods]
    return [task.result() for task in tasks]


@pytest.mark.parametrize("tries", PODS_IN_A_ROW)
async def test_two_pods_bound_back_to_back_never_swap_their_limits(cluster, agent, table, tries):
    outcome, before, pairs = Outcome(), [], []
    for number, shape in enumerate(islice(cycle((STRANGERS, PREFIXES, SUCCESSOR)), tries)):
        asked = dict(zip(names_of(shape, number), (small(number), large(number)), strict=True))
        pods = [a_telling_pod(cluster, name, amounts) for name, amounts in asked.items()]
        await end(cluster, *before, *asked)
        await outcome.look(cluster, asked, *await create_in_a_row(cluster, *pods))
        assert ([], {}) == (outcome.wrong, oversold(cluster))
        before = [name for name in asked if name != "set-0"]
        pairs += [tuple(asked)] if shape != SUCCESSOR else []

    what = f"{tries} pairs placed by the scheduler, back to back"
    note_between(table, f"{what}: between the answers to two, median", agent, pairs)
    print(outcome.told)  # noqa: T201 -- shown with a failure
    table.hold(f"{what}: refused", len(outcome.refused), 0, unit="")
    assert 2 * tries == outcome.served
    assert [] == lost(cluster)


def note_between(table, what, agent, pairs):
    """The seconds between the answers to two pods, median of the pairs that were both served."""
    at = {one["pod"]: stamp for one, stamp in agent_stamps(agent, "alloc.answered")}
    found = [abs(at[one] - at[two]) for one, two in pairs if {one, two} <= at.keys()]
    if found:
        table.add(what, statistics.median(found))


async def put_lock(cluster, name):
    """Take the lock for a pod; returns when our own watch has shown it, too."""
    await lock(cluster, name)
    await cluster.nodes.until(
        lambda: (lock_text(cluster) or "").endswith(f",{name}"), 20.0, f"{name} has no lock"
    )


async def until_free(cluster):
    """Return as soon as the watch shows the node without a lock."""
    await cluster.nodes.until(lambda: lock_text(cluster) is None, 20.0, "the lock stays")


async def bind_both(cluster, way, chance, first, second):
    """Lock and bind two pods that have their annotations, without waiting for the first."""
    if way == QUEUED:
        with frozen(cluster.kubelet.part):
            await put_lock(cluster, first)
            await bind(cluster, first)
            await bind(cluster, second)
        await until_free(cluster)
        await lock(cluster, second)
        return
    await put_lock(cluster, first)
    if way == RELEASED:
        await bind(cluster, first)
        await until_free(cluster)
        await hand_over(cluster, second)
        return
    async with asyncio.TaskGroup() as group:
        group.create_task(bind(cluster, first))
        group.create_task(hand_over(cluster, second, chance.uniform(0.0, 0.03)))


async def hand_over(cluster, name, delay=0.0):
    """Give the lock to a pod, whoever has it, and bind it."""
    await asyncio.sleep(delay)
    await lock(cluster, name)
    await bind(cluster, name)


@pytest.mark.parametrize("tries", PODS_IN_A_ROW)
async def test_two_pods_bound_by_hand_within_milliseconds_never_swap_their_limits(
    cluster, agent, table, tries
):
    outcomes = {way: Outcome() for way in (RELEASED, IN_ALLOCATE, QUEUED)}
    chance, pairs = a_chance(), {way: [] for way in outcomes}
    for number, way in enumerate(islice(cycle(outcomes), tries)):
        shares = (share(cluster, 1, *small(number)), share(cluster, 6, *large(number)))
        names = names_of((STRANGERS, PREFIXES)[number // 3 % 2], number)
        once = await by_hand(cluster, way, chance, dict(zip(names, shares, strict=True)))
        assert ([], {}) == (once.wrong, oversold(cluster))
        await end(cluster, *names)
        outcomes[way].take(once)
        pairs[way].append(names)

    for way, outcome in outcomes.items():
        what = f"{tries} pairs bound by hand, second lock {way}"
        table.add(f"{what}: refused", len(outcome.refused), unit="")
        note_between(table, f"{what}: between two answers, median", agent, pairs[way])
    for way, outcome in outcomes.items():
        robbed = robbed_by(way, pairs[way])
        assert outcome.refused.keys() == outcome.rightly(robbed), outcome.told
    assert [] == lost(cluster)


async def by_hand(cluster, way, chance, shares):
    """What became of two pods with those shares, bound that way."""
    asked, made, outcome = {}, [], Outcome()
    for name, one in shares.items():
        asked[name] = one.memory_mib, one.core_percent
        made.append(await create_by_hand(cluster, a_telling_pod(cluster, name, asked[name])))
        await annotate(cluster, name, [[one]])
    await bind_both(cluster, way, chance, *shares)
    await outcome.look(cluster, asked, *made)
    return outcome


def robbed_by(way, pairs):
    """Those of the pairs who may have lost their lock to the other."""
    if way == IN_ALLOCATE:
        return [first for first, _ in pairs]
    return [name for pair in pairs for name in pair] if way == QUEUED else []
