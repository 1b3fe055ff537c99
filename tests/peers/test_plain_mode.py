"""Plain mode on a cluster without HAMi: the kubelet's ids decide, and no API server is asked."""

import pytest_asyncio

from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.cluster import ACCOUNT
from tests.peers.lab.grants import seen_mounts, told_environment
from tests.peers.lab.identities import NODE_USER
from tests.peers.lab.node_state import node_of, notes_of, remove_pods
from tests.peers.lab.placement import wall
from tests.peers.lab.plain import plain_pod, start_plain_agent, until_agrees, without_hami
from tests.peers.lab.pods import (
    as_seen,
    create,
    delete,
    gpu_of,
    key,
    phase_of,
    run,
    until_running,
    until_told,
)
from tests.peers.lab.space import until

H100_MIB = 81559
LIMIT = "CUDA_DEVICE_MEMORY_LIMIT_0"
CLOSED_WITHIN = 15.0


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def bare(cluster_of_session):
    """The cluster without webhook and extender."""
    async with without_hami(cluster_of_session):
        yield cluster_of_session


@pytest_asyncio.fixture(loop_scope="session", autouse=True)
async def alone(bare, cluster):
    """HAMi's scheduler does not even run, and what it wrote on the Node is gone."""
    await cluster.parts["extender"].kill()
    await remove_pods(cluster)


def hami_names(*objects):
    """What HAMi or the agent would have noted on them."""
    return [name for one in objects for name in notes_of(one) if "hami" in name]


def visible(cluster, pod, container="c0"):
    told = told_environment(cluster, pod, container).get("NVIDIA_VISIBLE_DEVICES", "")
    return set(told.split(",")) - {""}


def limits_told(cluster, pod, container="c0"):
    """The variables of HAMi-core, less what differs from answer to answer."""
    told = told_environment(cluster, pod, container)
    return {name: value for name, value in told.items() if name.startswith("CUDA_DEVICE_MEMORY_L")}


def directory_in(cluster, pod, container="c0"):
    """The name of the directory of its own that a container found."""
    source = seen_mounts(cluster, pod, container)["/usr/local/vgpu"].source
    return source.rpartition("/")[2]


def directories(cluster):
    """Those that there are on the node."""
    return {path.name for path in (cluster.hook / "containers").iterdir()}


async def test_pods_of_every_shape_get_the_gpus_of_the_ids_that_the_kubelet_gave(cluster):
    mark = cluster.plane.audit.mark()
    agent = await start_plain_agent(cluster)
    pods = (
        plain_pod(cluster, "one"),
        plain_pod(cluster, "wide", 12),
        plain_pod(cluster, "parts", 2, 0, 1),
        plain_pod(cluster, "prepared", 1, inits=(3,)),
    )
    names = await run(cluster, *pods)
    await until_told(cluster, *names)
    await until_agrees(cluster)

    held = await cluster.kubelet.held(RESOURCE)
    assert {("one", 1), ("wide", 12), ("parts", 2), ("parts", 1), ("prepared", 1)} == {
        (pod.rpartition("/")[2], len(ids)) for (pod, _), ids in held.items()
    }
    for (pod, container), ids in held.items():
        name = pod.rpartition("/")[2]
        assert {gpu_of(one) for one in ids} == visible(cluster, name, container)
        assert {} == limits_told(cluster, name, container)
        assert {} == seen_mounts(cluster, name, container)
    assert set() == visible(cluster, "parts", "c1")
    assert 1 <= len(visible(cluster, "prepared", "i0")) <= 3
    assert [] == hami_names(node_of(cluster), *(as_seen(cluster, name) for name in names))
    await agent.part.stop()
    assert [] == asked_since(cluster, mark)


def asked_since(cluster, mark):
    """What an agent has asked the API server for since then, under either name."""
    audit = cluster.plane.audit
    return [one for user in (NODE_USER, ACCOUNT) for one in audit.since(mark, user)]


async def test_equal_limits_keep_pods_on_one_gpu_apart_until_it_is_full(cluster, table):
    await start_plain_agent(cluster, "--split-count", "4", gpus="h100:1", slices=4, limits=True)
    await run(cluster, plain_pod(cluster, "one", 1), plain_pod(cluster, "both", 1, 2))
    await until_told(cluster, "one", "both")
    await until_agrees(cluster)

    assert (
        visible(cluster, "one") == visible(cluster, "both", "c0") == visible(cluster, "both", "c1")
    )
    slice_mib = H100_MIB // 4
    assert {LIMIT: f"{slice_mib}m"} == limits_told(cluster, "one")
    assert {LIMIT: f"{slice_mib}m"} == limits_told(cluster, "both", "c0")
    assert {LIMIT: f"{2 * slice_mib}m"} == limits_told(cluster, "both", "c1")
    places = {directory_in(cluster, "one"): "one"}
    places |= {directory_in(cluster, "both", one): one for one in ("c0", "c1")}
    assert 3 == len(places)
    assert places.keys() == directories(cluster)

    await create(cluster, plain_pod(cluster, "waits", 1))
    await cluster.pods.until(lambda: is_turned_away(cluster, "waits"), 20.0, "it is not Pending")
    ended, began = directory_in(cluster, "one"), wall()
    await delete(cluster, "one", grace=0)
    await until_running(cluster, "waits", within=60.0)
    table.add("plain mode: a pod ends → one that waited for its slice runs", wall() - began)
    await until(lambda: ended not in directories(cluster), 60.0, lambda: f"{directories(cluster)}")
    table.hold("plain mode: a pod ends → row closed, directory gone", wall() - began, CLOSED_WITHIN)
    await until_agrees(cluster)
    assert places.keys() - {ended} < directories(cluster)
    assert {LIMIT: f"{slice_mib}m"} == limits_told(cluster, "waits")


def is_turned_away(cluster, name):
    """Whether the scheduler has found no room for a pod."""
    pod = cluster.pods.objects.get(key(name), {"status": {}})
    conditions = pod["status"].get("conditions") or []
    return "Pending" == phase_of(pod) and any(
        one["type"] == "PodScheduled" and one["reason"] == "Unschedulable" for one in conditions
    )
