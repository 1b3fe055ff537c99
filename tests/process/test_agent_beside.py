"""`run --observe`: beside the node's agent, without a trace at the kubelet or the API server."""

import asyncio
import contextlib
import socket
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent.cluster import REGISTER
from agent.kubelet.register import SETTLE
from agent.ledger import Ledger
from agent.sandbox.kubelet.pods import KubeletAdmission
from agent.sandbox.lab.child import AgentChild, start_child
from agent.sandbox.lab.cluster import RESOURCE, SandboxCluster, fetch, open_cluster
from agent.sandbox.store import Json
from agent.state import decode_state
from agent.wire.v1beta1 import ContainerAllocateResponse
from tests.process.agent_process import PATIENCE, comes, copied_settings, offers, options, started

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(60)]


async def observer(cluster: SandboxCluster, *arguments: str) -> AgentChild:
    """One more agent of the same settings that observes, once it has said so on its pages."""
    command = (*cluster.command(), "--observe", *arguments)
    child = await start_child(command, cluster.environment(), cluster.log)
    cluster.children.append(child)
    cluster.tasks.create_task(child.read())
    assert await cluster.until(lambda: cluster.web_address is not None, PATIENCE), cluster.log.last(
        20
    )
    return child


def writes(cluster: SandboxCluster) -> int:
    return cluster.api.journal.writes(cluster.user)


def would_write(cluster: SandboxCluster, child: AgentChild) -> list[Any]:
    return [line.fields["annotations"] for line in cluster.log.of("observe.would_write", child.pid)]


def files(root: Path) -> dict[str, bytes]:
    """Every regular file below, by its path."""
    return {str(path): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def is_copied(cluster: SandboxCluster) -> bool:
    """The copy of the settings has the Node's labels, which are its last change at a start."""
    copy = copied_settings(cluster)
    return copy is not None and bool(copy.labels)


async def test_alone_on_a_node_it_registers_nothing_and_writes_nothing():
    async with open_cluster(options()) as cluster:
        library = files(cluster.places.hook)
        child = await observer(cluster)

        assert await cluster.until(lambda: bool(would_write(cluster, child)), PATIENCE)
        (change,) = would_write(cluster, child)
        assert [REGISTER] == list(change)
        assert 8 == change[REGISTER].count('"id"')
        page = await fetch(cluster.web_address or "", "/readyz")
        assert 200 == page.status
        assert f"[!]observed degraded: would write {REGISTER}" in page.text
        metrics = (await fetch(cluster.web_address or "", "/metrics")).text
        assert "hami_agent_build_info{" in metrics
        assert "hami_build_info" not in metrics, "the series of HAMi's monitor are its own"
        assert 0 == await child.stop()

        assert 0 == writes(cluster)
        assert {"watch"} == {verb for _, verb, _ in cluster.api.journal.counts}
        assert REGISTER not in cluster.node_annotations()
        assert [] == cluster.kubelet.history.of("registered")
        assert ["kubelet.sock"] == [path.name for path in cluster.places.plugins.glob("*.sock")]
        assert {} == files(cluster.places.state)
        assert library == files(cluster.places.hook)


async def test_beside_the_nodes_agent_it_changes_nothing_and_finds_nothing_to_write():
    async with open_cluster(options()) as opened:
        cluster = await started(opened)
        first = cluster.agent
        assert await cluster.until(lambda: writes(cluster) == 1, PATIENCE)
        assert await comes(lambda: is_copied(cluster))
        state = files(cluster.places.state)

        child = await observer(cluster)
        page = ""
        async with asyncio.timeout(PATIENCE):
            while "[+]report ok" not in page:
                page = (await fetch(cluster.web_address or "", "/readyz?verbose")).text

        assert "[+]observed ok" in page
        assert [] == would_write(cluster, child)
        assert 0 == await child.stop()
        assert 1 == writes(cluster)
        assert state == files(cluster.places.state)
        assert 1 == len(cluster.kubelet.history.of("registered"))
        assert first.code is None
        assert await offers(cluster, 80)


async def test_a_failing_gpu_is_shown_and_no_event_posted():
    async with open_cluster(options()) as opened:
        cluster = opened
        child = await observer(cluster)
        assert await cluster.until(lambda: bool(would_write(cluster, child)), PATIENCE)

        cluster.hardware.xid("0", 79)

        assert await cluster.until(lambda: len(would_write(cluster, child)) == 2, PATIENCE)
        assert 7 == would_write(cluster, child)[1][REGISTER].count('"health":true')
        assert 0 == writes(cluster)


async def test_in_plain_mode_it_serves_no_socket_and_needs_no_api_server():
    async with open_cluster(options("--scheduler", "none")) as cluster:
        child = await observer(cluster)

        assert await cluster.until(
            lambda: bool(cluster.log.of("list.changed", child.pid)), PATIENCE
        )
        assert 200 == (await fetch(cluster.web_address or "", "/readyz")).status
        assert {} == dict(cluster.api.journal.counts)
        assert [] == cluster.kubelet.history.of("registered")
        assert ["kubelet.sock"] == [path.name for path in cluster.places.plugins.glob("*.sock")]


# Plain mode as a real process beside the kubelet model, with no API server to be found.


@contextlib.asynccontextmanager
async def a_node() -> AsyncIterator[SandboxCluster]:
    """A node whose agent is in plain mode and could not find an API server if it wanted to."""
    async with open_cluster(options("--scheduler", "none", gpus=2)) as cluster:
        cluster.places.kubeconfig.unlink()
        cluster.places.config.write_text("plain: {memoryLimits: true}\n")
        yield await started(cluster, slices=20)


def a_pod(name: str, *counts: int) -> Json:
    containers = [
        {"name": f"c{number}", "resources": {"limits": {RESOURCE: str(count)}}}
        for number, count in enumerate(counts or (1,))
    ]
    metadata = {"uid": str(uuid.uuid5(uuid.NAMESPACE_DNS, name)), "namespace": "a", "name": name}
    return {"metadata": metadata, "spec": {"containers": containers}}


def uid_of(name: str) -> str:
    uid: str = a_pod(name)["metadata"]["uid"]
    return uid


async def admit(cluster: SandboxCluster, name: str, *counts: int) -> KubeletAdmission:
    return await cluster.kubelet.admit(a_pod(name, *counts))


async def runs(cluster: SandboxCluster, name: str, *counts: int) -> ContainerAllocateResponse:
    """The answer of the pod's first container, once it runs."""
    admission = await admit(cluster, name, *counts)
    assert admission.admitted, admission.message
    await cluster.kubelet.until_running(uid_of(name), "c0")
    return admission.containers["c0"]


def directory(answer: ContainerAllocateResponse) -> Path:
    """The directory of its own that an answer mounts."""
    (found,) = {Path(one.host_path) for one in answer.mounts if "/containers/" in one.host_path}
    return found


def ledger(cluster: SandboxCluster) -> Ledger:
    file = cluster.places.state / "state.json"
    return decode_state(file.read_bytes()).ledger if file.exists() else Ledger()


def holders(cluster: SandboxCluster) -> set[str]:
    """The pods that the ledger knows as holders."""
    return {row.holder.pod for row in ledger(cluster).rows if row.holder is not None}


async def test_pods_get_their_slices_and_it_is_ready_without_any_api_server():
    async with a_node() as cluster:
        first, second = await runs(cluster, "one", 1), await runs(cluster, "two", 2)
        assert await cluster.until(lambda: cluster.web_address is not None, PATIENCE)
        page = await fetch(cluster.web_address or "", "/readyz?verbose")
        metrics = await fetch(cluster.web_address or "", "/metrics")

        assert 200 == page.status, page.text
        assert "api_synced" not in page.text
        assert 'hami_agent_allocations_total{reason="",result="ok"} 2.0' in metrics.text

        assert "8155m" == first.envs["CUDA_DEVICE_MEMORY_LIMIT_0"]
        assert directory(first).is_dir()
        assert directory(first) != directory(second)
        assert 2 == len(second.envs["NVIDIA_VISIBLE_DEVICES"].split(","))
        assert await comes(lambda: {"one", "two"} == holders(cluster))
        assert {} == dict(cluster.api.journal.counts)


@pytest.mark.timeout(120)
async def test_a_row_and_its_directory_go_when_the_pod_ends():
    async with a_node() as cluster:
        ended = directory(await runs(cluster, "one", 1))
        stays = directory(await runs(cluster, "two", 1))
        assert await comes(lambda: {"one", "two"} == holders(cluster))

        await cluster.kubelet.pod_gone(uid_of("one"))
        await runs(cluster, "three", 1)  # a burst, after which the kubelet is asked

        assert await comes(lambda: {"two", "three"} == holders(cluster), 60)
        assert not ended.exists()
        assert stays.is_dir()
        assert await comes(lambda: [] == list(ended.parent.glob(".removed-*")))


# Another device plugin of the node serves the same resource.


@contextlib.contextmanager
def a_socket(path, *, listens):
    """HAMi's plugin there, or what a killed one leaves behind."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        if listens:
            server.listen()
        yield


async def test_beside_hamis_plugin_it_says_so_and_serves_nothing():
    async with open_cluster(options()) as cluster:
        with a_socket(cluster.places.plugins / "nvidia-gpu.sock", listens=True):
            await cluster.start_agent()
            async with asyncio.timeout(PATIENCE):
                assert 78 == await cluster.agent.wait()

        (line,) = cluster.log.of("agent.failed")
        assert "nvidia.com/gpu at " in str(line.fields["err"])
        assert "takeover: true" in str(line.fields["err"])
        assert [] == cluster.kubelet.history.of("registered")
        assert ["PluginConflict"] == [event["reason"] for event in cluster.store.select("events")]


@pytest.mark.parametrize(
    ("listens", "flags"), [(False, ()), (True, ("--takeover",))], ids=["dead", "told to"]
)
async def test_it_serves_over_a_dead_socket_and_when_it_is_told_to(listens, flags):
    async with open_cluster(options(*flags)) as cluster:
        with a_socket(cluster.places.plugins / "nvidia-gpu.sock", listens=listens):
            await started(cluster)
            assert await offers(cluster, 80)


async def test_the_gpu_operators_plugin_is_no_rival_for_a_resource_of_another_domain():
    async with open_cluster(options("--resource-name=hami.io/gpu")) as cluster:
        theirs = cluster.places.plugins / "nvidia-gpu.sock"
        with a_socket(theirs, listens=True):
            await cluster.start_agent()
            assert await comes(lambda: bool(cluster.kubelet.history.of("registered")))
            assert await comes(lambda: bool(cluster.log.of("registration.serving")))
        theirs.unlink()
        renewed = await comes(lambda: bool(cluster.log.of("registration.rival_gone")), 3 * SETTLE)

        assert not renewed
        assert 1 == len(cluster.kubelet.history.of("registered"))
        assert [] == cluster.store.select("events")
