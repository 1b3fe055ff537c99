"""The resource gets another name under running pods: they keep the old one until they are gone."""

import contextlib
from collections.abc import AsyncIterator

import pytest

from agent.codec.nodelock import encode_node_lock
from agent.core.cluster.annotations import (
    ALLOCATED,
    BIND_PHASE,
    BIND_TIME,
    MUTEX_LOCK,
    PHASE_ALLOCATING,
    TO_ALLOCATE,
    VGPU_NODE,
)
from agent.host.clock import SystemClock
from agent.sandbox.api_errors import Json
from agent.sandbox.kubelet import checkpoint
from agent.sandbox.lab.cluster import NAMESPACE, NODE, SandboxCluster, open_cluster
from agent.sandbox.patching import merge_patch
from agent.sandbox.scenario.facts import is_locked, ledger_on_disk
from tests.process.agent_process import PATIENCE, options, started

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(120)]

OLD, NEW = "nvidia.com/gpu", "example.com/vgpu"


def named(resource: str) -> str:
    return f"sharing:\n  resourceName: {resource}\n  splitCount: 4\n"


@contextlib.asynccontextmanager
async def a_node() -> AsyncIterator[SandboxCluster]:
    """One GPU of four slices, by the old name."""
    async with open_cluster(options(gpus=1)) as opened:
        opened.places.config.write_text(named(OLD))
        yield await started(opened, slices=4)


async def rename(cluster: SandboxCluster) -> None:
    cluster.places.config.write_text(named(NEW))
    cluster.reload_agent()
    assert await shows(cluster, (NEW, 3), (OLD, 1)), cluster.log.last(20)


async def shows(cluster: SandboxCluster, *wanted: tuple[str, int]) -> bool:
    """Whether the kubelet comes to offer so many slices of each name."""

    def shown() -> bool:
        return all(cluster.kubelet.allocatable(name) == count for name, count in wanted)

    return await cluster.until(shown, PATIENCE)


async def place(cluster: SandboxCluster, name: str, resource: str) -> str:
    """The UID of a pod that the scheduler has just bound; it asks by that name."""
    pid = cluster.agent.pid
    assert await cluster.until(lambda: bool(cluster.log.of("pods.listed", pid)), PATIENCE)
    assert await cluster.until(lambda: not is_locked(cluster), PATIENCE)
    now = SystemClock().now()
    lock = {"metadata": {"annotations": {MUTEX_LOCK: encode_node_lock(now, NAMESPACE, name)}}}
    cluster.store.update("nodes", "", NODE, lambda held: merge_patch(held, lock))
    share = f"{cluster.hardware.find('0').gpu.uuid},NVIDIA,3000,30:;"
    notes = {
        VGPU_NODE: NODE,
        ALLOCATED: share,
        TO_ALLOCATE: share,
        BIND_PHASE: PHASE_ALLOCATING,
        BIND_TIME: str(int(now.timestamp())),
    }
    container = {"name": "main", "image": "i", "resources": {"limits": {resource: "1"}}}
    pod: Json = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "annotations": notes},
        "spec": {"containers": [container], "nodeName": NODE},
    }
    uid: str = cluster.store.create("pods", pod)["metadata"]["uid"]
    return uid


def is_running(cluster: SandboxCluster, uid: str) -> bool:
    node = cluster.kubelet.pod(uid)
    return node is not None and "main" in node.running


async def runs(cluster: SandboxCluster, name: str, resource: str) -> str:
    uid = await place(cluster, name, resource)
    assert await cluster.until(lambda: is_running(cluster, uid), PATIENCE), message(cluster, name)
    return uid


async def restarts(cluster: SandboxCluster, uid: str) -> bool:
    """Whether the container of a running pod dies and starts again."""
    pod = cluster.kubelet.pod(uid)
    assert pod is not None
    before = pod.starts["main"]
    await cluster.end_container(uid, "main")
    return await cluster.until(lambda: pod.starts["main"] > before, 2 * PATIENCE)


async def knows(cluster: SandboxCluster, uid: str, times: int) -> bool:
    """Whether so many kubelets have come to know the pod: each learns of its pods as it starts."""

    def seen() -> int:
        return sum(event.pod == uid for event in cluster.kubelet.history.of("admitted"))

    return await cluster.until(lambda: seen() >= times, PATIENCE)


def answer(cluster: SandboxCluster, uid: str, resource: str) -> bytes:
    """What the kubelet has on record for the pod's container."""
    entries = checkpoint.load(cluster.places.plugins).entries
    (found,) = [one for one in entries if (one.pod_uid, one.resource) == (uid, resource)]
    return found.response


async def asks_again(cluster: SandboxCluster, uid: str) -> bool:
    """Whether the container starts again with an answer on record.

    A kubelet that is not done with its pods yet starts what ran before it without asking.
    """
    for _ in range(10):
        assert await restarts(cluster, uid), cluster.log.last(20)
        entries = checkpoint.load(cluster.places.plugins).entries
        if any(one.pod_uid == uid for one in entries):
            return True
    return False


def rows(cluster: SandboxCluster) -> dict[str, str]:
    """By what name each pod was answered."""
    return {row.pod: row.resource for row in ledger_on_disk(cluster).rows}


async def test_a_reload_renames_the_resource_and_running_pods_keep_the_former_name():
    async with a_node() as cluster:
        uid = await runs(cluster, "old", OLD)
        given = answer(cluster, uid, OLD)
        registered = len(cluster.kubelet.history.of("registered"))
        lists = len(cluster.kubelet.history.of("listed"))

        await rename(cluster)

        assert registered + 1 == len(cluster.kubelet.history.of("registered"))
        assert lists + 2 == len(cluster.kubelet.history.of("listed"))
        assert cluster.agent.code is None
        assert [] == cluster.log.of("config.needs_restart")
        assert await restarts(cluster, uid)
        await runs(cluster, "young", NEW)
        assert {"old": OLD, "young": NEW} == rows(cluster)
        held = [*cluster.kubelet.held(OLD).values(), *cluster.kubelet.held(NEW).values()]
        assert 2 == len(frozenset().union(*held))
        assert given == answer(cluster, uid, OLD)


async def test_after_a_lost_checkpoint_the_former_name_gives_the_same_answer_to_the_byte():
    async with a_node() as cluster:
        uid = await runs(cluster, "old", OLD)
        given = answer(cluster, uid, OLD)
        await rename(cluster)

        await cluster.kubelet.restart()
        assert await shows(cluster, (NEW, 3), (OLD, 1)), cluster.log.last(20)
        assert await knows(cluster, uid, 2)
        assert await restarts(cluster, uid)
        assert given == answer(cluster, uid, OLD)
        await cluster.kubelet.restart(lose_checkpoint=True)
        assert await shows(cluster, (NEW, 3), (OLD, 1)), cluster.log.last(20)
        assert await knows(cluster, uid, 3)
        assert await asks_again(cluster, uid)

        assert given == answer(cluster, uid, OLD)
        await runs(cluster, "young", NEW)


async def test_an_agent_that_was_killed_meanwhile_serves_both_names():
    async with a_node() as cluster:
        uid = await runs(cluster, "old", OLD)
        given = answer(cluster, uid, OLD)
        await cluster.kill_agent()
        cluster.places.config.write_text(named(NEW))
        await cluster.kubelet.kill()
        checkpoint_file = cluster.places.plugins / checkpoint.FILE_NAME
        checkpoint_file.unlink()
        await cluster.kubelet.start()

        await cluster.start_agent()

        assert await shows(cluster, (NEW, 3), (OLD, 1)), cluster.log.last(20)
        assert await knows(cluster, uid, 2)
        assert await asks_again(cluster, uid)
        assert given == answer(cluster, uid, OLD)
        await cluster.kill_agent()
        assert await shows(cluster, (NEW, 0), (OLD, 0))
        await cluster.start_agent()
        assert await shows(cluster, (NEW, 3), (OLD, 1)), cluster.log.last(20)
        await runs(cluster, "young", NEW)
        assert {"old": OLD, "young": NEW} == rows(cluster)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_the_former_name_goes_with_its_last_row_and_takes_no_new_pod_before():
    async with a_node() as cluster:
        uid = await runs(cluster, "old", OLD)
        await rename(cluster)
        cluster.store.delete("pods", NAMESPACE, "old", grace=1)
        assert await cluster.until(lambda: cluster.kubelet.pod(uid) is None, PATIENCE)

        late = await place(cluster, "late", OLD)

        assert await cluster.until(lambda: "HA-2011" in message(cluster, "late"), PATIENCE)
        assert f"this node now shares its GPUs as {NEW}" in message(cluster, "late")
        cluster.store.delete("pods", NAMESPACE, "late", uid=late, grace=0)
        assert await shows(cluster, (NEW, 3), (OLD, 1))
        assert await cluster.until(lambda: cluster.kubelet.allocatable(OLD) == 0, 120)
        assert await shows(cluster, (NEW, 4), (OLD, 0))
        assert {} == rows(cluster)
        ended = "resource.served_no_more"
        assert await cluster.until(lambda: bool(cluster.log.of(ended)), PATIENCE)
        assert [OLD] == [line.fields["resource"] for line in cluster.log.of(ended)]


def message(cluster: SandboxCluster, name: str) -> str:
    text: str = cluster.pod(name).get("status", {}).get("message", "")
    return text
