"""20 GPU pods, one after another and at once: the right shares for each, by few requests."""

import statistics
from collections import Counter
from pathlib import Path

import pytest

from tests.peers.lab.api import Object, key_of
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.grants import Grant, grants, grants_inside, load_of
from tests.peers.lab.identities import NODE_USER
from tests.peers.lab.requests import asked_since, mark_of_rest, reads, writes
from tests.peers.lab.running import (
    as_seen,
    create,
    phase_of,
    until_settled,
    until_told,
    until_up,
)
from tests.peers.lab.workloads import a_container, a_pod, telling

COUNT = 20
CORES = 30
"""Three pods fill a GPU, and 20 nearly the node: a share given twice shows in the sums."""
WHOLE = (81559, 100, 10)
TWO_WRITES = Counter({"patch pods/status": COUNT, "patch nodes": COUNT})


@pytest.mark.timeout(240)
async def test_20_pods_one_after_another_cost_two_writes_each(cluster, agent, table):
    inside, mark = cluster.root / "row", await mark_of_rest(cluster)
    pods, times = some_pods("row", inside), []
    for pod in pods:
        begun = await create(cluster, [pod])
        times += [at - begun for at in (await until_up(cluster, [pod], 60.0)).values()]
    await until_settled(cluster, pods)

    table.add("20 pods in a row: create → Ready, median", statistics.median(times))
    await check_shares(cluster, pods, inside)
    requests = await asked_since(cluster, mark, NODE_USER, TWO_WRITES.total())
    assert TWO_WRITES == writes(requests)
    assert Counter() == reads(requests)


@pytest.mark.timeout(300)
async def test_20_pods_at_once_all_run_with_their_own_shares(cluster, agent, table):
    inside, mark = cluster.root / "burst", await mark_of_rest(cluster)
    pods = some_pods("burst", inside)
    begun = await create(cluster, pods)
    times = await until_up(cluster, pods, 240.0)
    await until_settled(cluster, pods)

    seconds = max(times.values()) - begun
    print(f"20 pods at once were Ready after {seconds:.1f} s")  # noqa: T201 -- for whoever looks
    table.add("20 pods at once: all Ready (HAMi's plugin: 81 s)", seconds, 40)
    await check_shares(cluster, pods, inside)
    requests = await asked_since(cluster, mark, NODE_USER, TWO_WRITES.total())
    assert TWO_WRITES == writes(requests)
    assert reads(requests).total() <= 2  # for at most 5 % of the pods


def some_pods(prefix: str, inside: Path) -> list[Object]:
    """Pods that tell of their inside; no two ask for the same."""
    return [
        telling(
            a_pod(f"{prefix}-{number}", a_container(memory=memory_of(number), cores=CORES)), inside
        )
        for number in range(COUNT)
    ]


def memory_of(number: int) -> int:
    """What pod `number` asks for, in MiB."""
    return 20000 + 37 * number


async def check_shares(cluster: Cluster, pods: list[Object], inside: Path) -> None:
    """Each has what it asked for, by its annotation and by its inside; no GPU is overfull."""
    for pod in pods:
        await until_told(inside, pod)
    names = [pod["metadata"]["name"] for pod in pods]
    written = {
        name: grants(as_seen(cluster, pod))["main"] for name, pod in zip(names, pods, strict=True)
    }
    found = {name: grants_inside(inside, name) for name in names}

    assert written == found
    assert {name: (memory_of(number), CORES) for number, name in enumerate(names)} == {
        name: asked_of(given) for name, given in found.items()
    }
    overfull = {
        uuid: load
        for uuid, load in load_of(found).items()
        if any(one > most for one, most in zip(load, WHOLE, strict=True))
    }
    assert {} == overfull
    failed = [
        seen.object["status"]
        for pod in pods
        for seen in cluster.pods.history[key_of(pod)]
        if phase_of(seen.object) == "Failed"
    ]
    assert [] == failed


def asked_of(given: tuple[Grant, ...]) -> tuple[int, int]:
    """Memory and cores of the one share that a pod has."""
    (grant,) = given
    return grant.mib, grant.percent
