"""What each part takes of pods that are created at once, beside HAMi's own scheduler.

Each run leaves its moments in build/bursts, for tests.bench.burst_picture to draw.
"""

import asyncio
import contextlib
import json
import statistics
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

from tests.peers.lab.agents import Agent
from tests.peers.lab.api import Object
from tests.peers.lab.audit import counted
from tests.peers.lab.burst_times import PodTimes, times_of
from tests.peers.lab.clockwork import wall
from tests.peers.lab.cluster import ACCOUNT, Cluster
from tests.peers.lab.faces import readings
from tests.peers.lab.grants import WHOLE, oversold
from tests.peers.lab.identities import EXTENDER
from tests.peers.lab.pods import (
    PODS,
    delete,
    key,
    name_of,
    run,
    until_deleted,
    until_running,
    until_settled,
    up_at,
)
from tests.peers.lab.requests import mark_of_rest
from tests.peers.lab.waiting import until_answer
from tests.peers.lab.workloads import NAMESPACE, a_container, a_pod

OUTPUT = Path(__file__).parents[2] / "build" / "bursts"
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
    words: str
    flags: tuple[str, ...] = ()
    longest: int | None = None
    labels: dict[str, str] | None = None
    in_turn: bool = False

    def __str__(self) -> str:
        return f"{self.count}-{self.name}"


SETTINGS = (
    BurstCase(20, "defaults", "defaults"),
    BurstCase(20, "backoff", "podMaxBackoffSeconds: 1", (), 1),
    BurstCase(20, "fast", "kube-qps 500", FAST),
    BurstCase(20, "fast-backoff", "kube-qps 500, podMaxBackoffSeconds: 1", FAST, 1),
    BurstCase(20, "fast-group", "kube-qps 500, label pod-group", FAST, None, GROUP),
)
IN_TURN = BurstCase(20, "in-turn", "one after the other, kube-qps 500", FAST, in_turn=True)
CASES = (IN_TURN, *SETTINGS, *(replace(case, count=100) for case in SETTINGS))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES, ids=str)
async def test_where_the_time_of_a_burst_goes(cluster, table, case):
    if cluster.release.is_old or "hami-scheduler" not in cluster.parts["extender"].command[0]:
        pytest.skip("HAMI_PEERS_SCHEDULER names no scheduler of HAMi from 2.8 on")
    async with placed_by(cluster, case):
        split = 10 if case.count <= 80 else 20
        flags = "--split-count", str(split)
        agent = await cluster.start_registered_agent(*flags, user=ACCOUNT, slices=8 * split)
        await until_placing(cluster)
        mark, since, before = await mark_of_rest(cluster), wall(), await received(agent)
        begun = asyncio.get_running_loop().time()
        names = await (create_in_turn if case.in_turn else create_at_once)(cluster, case)
        await until_running(cluster, *names, within=1200.0)
        # No more can be asked: by default HAMi's scheduler places pods again that run already.
        await until_answer(
            lambda: is_complete(times_of(cluster, names, mark, since)), 40.0, lambda: "stamps lack"
        )
        found = times_of(cluster, names, mark, since)
        offset = wall() - asyncio.get_running_loop().time()
        for name, times in found.items():
            times.created = cluster.pods.history[key(name)][0].at + offset
            times.ready = up_at(cluster, name, begun) + offset
        requests = counted(cluster.plane.audit.since(mark, EXTENDER, client=""))
        read = await received(agent) - before
        write(case, begun + offset, found, {"requests": requests, "bytes": read})
        held = [1000 * (times.unlocked - times.locked) for times in found.values()]
        table.add(f"{case}: all Ready", max(t.ready for t in found.values()) - begun - offset)
        bound = LOCK if case.in_turn else None
        table.add(f"{case}: a lock is held, median", statistics.median(held), bound, "ms")
        assert ([], {}) == (agent.events("alloc.refused"), oversold(cluster, (*WHOLE[:2], split)))


async def until_placing(cluster: Cluster) -> None:
    """Return once HAMi's scheduler, which reads the Nodes every 15 s, has placed one pod."""
    await run(cluster, a_pod("first"))
    await until_settled(cluster, "first")
    await delete(cluster, "first", grace=0)
    await until_deleted(cluster, "first")


async def is_complete(found: dict[str, PodTimes]) -> bool:
    return all(one.unlocked and one.settled for one in found.values())


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


async def received(agent: Agent) -> Counter[str]:
    """The bytes that the agent has received from the API server, by resource."""
    name = "hami_agent_api_received_bytes_total"
    found = {what: await readings(agent, resource=what) for what in ("nodes", "pods")}
    return Counter({what: int(one.get(name, 0)) for what, one in found.items()})


def write(
    case: BurstCase, begun: float, found: dict[str, PodTimes], more: dict[str, Counter[str]]
) -> None:
    """Leave the moments, in seconds since the first create, and what was counted, as JSON."""

    def since(moment: object) -> object:
        if isinstance(moment, list):
            return [round(one - begun, 4) for one in moment]
        return round(moment - begun, 4) if isinstance(moment, float) else moment

    pods = {
        name: {what: since(moment) for what, moment in asdict(times).items()}
        for name, times in found.items()
    }
    OUTPUT.mkdir(parents=True, exist_ok=True)
    content = {"title": f"{case.count} pods, {case.words}", "pods": pods, **more}
    (OUTPUT / f"{case}.json").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
