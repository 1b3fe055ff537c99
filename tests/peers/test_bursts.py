"""GPU pods, one after another and 20 at once: the right shares for each, by few requests."""

import pytest

from tests.peers.lab.api import Object
from tests.peers.lab.cluster import ACCOUNT, Cluster
from tests.peers.lab.grants import expected_inside, grants, oversold, seen_inside
from tests.peers.lab.identities import NODE_USER
from tests.peers.lab.pods import (
    PODS,
    as_seen,
    create,
    key,
    name_of,
    phase_of,
    telling,
    until_running,
    until_settled,
    until_told,
    up_at,
)
from tests.peers.lab.requests import asked_since, mark_of_rest, of_pods, reads, refused, writes
from tests.peers.lab.workloads import a_container, a_pod

COUNT = 20
CORES = 30
"""Three pods fill a GPU, and 20 nearly the node: a share given twice shows in the sums."""


@pytest.mark.parametrize("looks", [2, 0], ids=["names of their own", "generated names"])
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
            cluster,
            a_pod(f"{prefix}-{number}", a_container(memory=memory_of(number), cores=CORES)),
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
