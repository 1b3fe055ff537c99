"""Plain mode on a cluster without HAMi: the kubelet's ids decide, and no API server is asked."""

import pytest_asyncio

from agent.sandbox.hardware_talk import XidRequest
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.cluster import ACCOUNT
from tests.peers.lab.grants import seen_mounts, told_environment
from tests.peers.lab.identities import NODE_USER
from tests.peers.lab.node_state import (
    node_of,
    notes_of,
    remove_pods,
    until_allocatable,
    until_offered,
)
from tests.peers.lab.nodes import end_container
from tests.peers.lab.placement import wall
from tests.peers.lab.plain import (
    plain_pod,
    plain_rows,
    refusal_of,
    row_of,
    start_plain_agent,
    until_agrees,
    without_hami,
)
from tests.peers.lab.pods import (
    as_seen,
    create,
    delete,
    forget_told,
    gpu_of,
    key,
    lives_of,
    phase_of,
    run,
    until_restarted,
    until_running,
    until_told,
)
from tests.peers.lab.space import until
from tests.peers.lab.table import FAR_STARTING

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


async def test_pods_run_on_without_the_agent_and_the_next_one_knows_them(cluster, table):
    agent = await start_plain_agent(cluster, limits=True)
    names = await run(cluster, *(plain_pod(cluster, f"p{n}", 1 + n) for n in range(3)))
    await until_told(cluster, *names)
    before, rows = lives_of(cluster, names), plain_rows(cluster)
    inside = {name: (limits_told(cluster, name), directory_in(cluster, name)) for name in names}

    await agent.part.kill()
    forget_told(cluster, "p0")
    await end_container(before["p0"]["c0"].id)
    await until_told(cluster, "p0")
    await until_restarted(cluster, "p0")
    began = wall()
    await agent.part.start()
    await until_allocatable(cluster)
    what = "plain mode: agent starts after SIGKILL → 80 slices"
    table.hold(what, wall() - began, 1.0, far=FAR_STARTING)
    await run(cluster, plain_pod(cluster, "new"))
    await until_agrees(cluster)

    assert {row.key for row in rows} < {row.key for row in plain_rows(cluster)}
    assert inside == {
        name: (limits_told(cluster, name), directory_in(cluster, name)) for name in names
    }
    after = lives_of(cluster, names)
    assert {**before, "p0": after["p0"]} == after
    assert {where for _, where in inside.values()} < directories(cluster)


async def test_a_restarted_kubelet_asks_for_nobody_again(cluster):
    agent = await start_plain_agent(cluster, limits=True)
    names = await run(cluster, plain_pod(cluster, "p0"), plain_pod(cluster, "p1", 2, 1))
    await until_agrees(cluster)
    before, rows = lives_of(cluster, names), plain_rows(cluster)

    await cluster.kubelet.restart()
    await until_allocatable(cluster)
    await run(cluster, plain_pod(cluster, "new"))
    await until_agrees(cluster)

    assert before == lives_of(cluster, names)
    assert 4 == len(agent.events("alloc.answered"))
    assert {row.key for row in rows} < {row.key for row in plain_rows(cluster)}


async def test_a_container_that_dies_after_a_lost_checkpoint_gets_its_limits_again(cluster, table):
    agent = await start_plain_agent(cluster, limits=True)
    names = await run(cluster, plain_pod(cluster, "dies", 2), plain_pod(cluster, "lives", 1))
    await until_told(cluster, *names)
    await until_agrees(cluster)
    before, limits = lives_of(cluster, names), limits_told(cluster, "dies")
    old = {name: directory_in(cluster, name) for name in names}

    await cluster.kubelet.restart(lose_checkpoint=True)
    await until_allocatable(cluster)
    forget_told(cluster, "dies")
    died = wall()
    await end_container(before["dies"]["c0"].id)
    await until_told(cluster, "dies", within=60.0)
    table.add("plain mode: container dies, its record lost → it runs again", wall() - died)
    await until_restarted(cluster, "dies")
    await run(cluster, plain_pod(cluster, "new", 3))

    held = await cluster.kubelet.held(RESOURCE)
    for name in ("dies", "new"):
        ids = held[key(name), "c0"]
        assert {gpu_of(one) for one in ids} == visible(cluster, name)
    assert limits == limits_told(cluster, "dies")
    fresh = {directory_in(cluster, name) for name in ("dies", "new")}
    assert not fresh & set(old.values())
    assert {old["lives"]} | fresh <= directories(cluster)
    assert before["lives"] == lives_of(cluster, ["lives"])["lives"]
    assert not agent.events("alloc.refused")


async def test_a_lost_gpu_is_withdrawn_and_refused_and_its_pod_runs_on(cluster):
    mark = cluster.plane.audit.mark()
    agent = await start_plain_agent(cluster, gpus="h100:2", slices=20)
    await run(cluster, plain_pod(cluster, "resident"))
    await until_told(cluster, "resident")
    (ill,) = visible(cluster, "resident")
    before = lives_of(cluster, ["resident"])
    ids = await cluster.kubelet.allocatable(RESOURCE)
    free = next(one for one in sorted(ids, reverse=True) if gpu_of(one) == ill)

    await agent.simulate(XidRequest(gpu=ill, xid=79))
    await until_allocatable(cluster, 10)
    await until_offered(cluster, 10)
    names = await run(cluster, plain_pod(cluster, "two", 2), plain_pod(cluster, "three", 3))
    await until_told(cluster, *names)

    assert all(ill not in visible(cluster, name) for name in names)
    assert before == lives_of(cluster, ["resident"])
    said = await refusal_of(cluster, free)
    assert f"({ill}) is lost: " in said
    assert said.endswith("[HA-4002]")
    said = await refusal_of(cluster, "GPU-of-nobody-3")
    assert said.endswith("[HA-4001]")
    assert 3 == len(agent.events("alloc.answered"))
    await agent.part.stop()
    assert [] == asked_since(cluster, mark)


async def test_an_agent_that_lost_its_state_adopts_whoever_holds_slices(cluster):
    agent = await start_plain_agent(cluster, limits=True)
    names = await run(cluster, plain_pod(cluster, "p0", 2), plain_pod(cluster, "p1", 1))
    await until_told(cluster, *names)
    await until_agrees(cluster)
    before, held = lives_of(cluster, names), await cluster.kubelet.held(RESOURCE)
    places = {directory_in(cluster, name) for name in names}

    await agent.part.kill()
    for path in (cluster.space.view / "var/lib/hami-agent").glob("state*"):
        path.unlink()
    await agent.part.start()
    await until_allocatable(cluster)
    await until_agrees(cluster)
    await run(cluster, plain_pod(cluster, "new"))
    await until_agrees(cluster)

    assert {True} == {row_of(cluster, name).adopted for name in names}
    assert held.items() < (await cluster.kubelet.held(RESOURCE)).items()
    assert before == lives_of(cluster, names)
    assert places < directories(cluster)
