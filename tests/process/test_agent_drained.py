"""With pods that hold slices, the resource keeps its name and the node its scheduler."""

import contextlib
import dataclasses
from collections.abc import AsyncIterator

import pytest

from agent.cluster import (
    ALLOCATED,
    BIND_PHASE,
    BIND_TIME,
    MUTEX_LOCK,
    PHASE_ALLOCATING,
    TO_ALLOCATE,
    VGPU_NODE,
)
from agent.hami.pod import encode_node_lock
from agent.host.process import SystemClock
from agent.sandbox.api_errors import Json
from agent.sandbox.lab.cluster import NAMESPACE, NODE, SandboxCluster, open_cluster
from agent.sandbox.lab.web import fetch
from agent.sandbox.patching import merge_patch
from agent.sandbox.scenario.facts import is_locked, ledger_on_disk
from agent.settings.reading import COPY
from tests.process.agent_process import PATIENCE, comes, options, started

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(90)]

OLD, NEW = "nvidia.com/gpu", "example.com/vgpu"


def named(resource: str, scheduler: str = "hami") -> str:
    return f"scheduler: {scheduler}\nsharing:\n  resourceName: {resource}\n  splitCount: 4\n"


@contextlib.asynccontextmanager
async def a_node() -> AsyncIterator[SandboxCluster]:
    """One GPU of four slices, by the old name, and a pod that has one of them."""
    async with open_cluster(options(gpus=1)) as opened:
        opened.places.config.write_text(named(OLD))
        cluster = await started(opened, slices=4)
        await runs(cluster, "resident", OLD)
        assert await comes((cluster.places.state / COPY).exists)
        yield cluster


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
        "spec": {"containers": [container]},
    }
    uid: str = cluster.store.create("pods", pod)["metadata"]["uid"]
    cluster.store.bind(NAMESPACE, name, NODE)
    return uid


def is_running(cluster: SandboxCluster, uid: str) -> bool:
    node = cluster.kubelet.pod(uid)
    return node is not None and "main" in node.running


async def runs(cluster: SandboxCluster, name: str, resource: str) -> str:
    uid = await place(cluster, name, resource)
    assert await cluster.until(lambda: is_running(cluster, uid), PATIENCE), message(cluster, name)
    return uid


async def succeeds(cluster: SandboxCluster, name: str) -> None:
    """The pod has done its work; a kubelet that starts is looked at, and the row is closed."""
    await cluster.kubelet.pod_gone(cluster.pod(name)["metadata"]["uid"])
    done = {"status": {"phase": "Succeeded"}}
    cluster.store.update("pods", NAMESPACE, name, lambda held: merge_patch(held, done))
    await cluster.kubelet.restart()


def rows(cluster: SandboxCluster) -> dict[str, str]:
    """By what name each pod was answered."""
    return {row.pod: row.resource for row in ledger_on_disk(cluster).rows}


async def refusal(cluster: SandboxCluster) -> str:
    """The Event that says why the settings are refused."""

    def told() -> list[str]:
        found = cluster.store.select("events")
        return [one["message"] for one in found if one["reason"] == "ConfigRejected"]

    assert await cluster.until(lambda: bool(told()), PATIENCE), cluster.log.last(20)
    (text,) = told()
    return text


def message(cluster: SandboxCluster, name: str) -> str:
    text: str = cluster.pod(name).get("status", {}).get("message", "")
    return text


async def test_another_name_is_refused_while_a_pod_holds_slices_and_comes_with_its_end():
    async with a_node() as cluster:
        cluster.places.config.write_text(named(NEW))
        cluster.reload_agent()

        said = await refusal(cluster)
        assert f"sharing.resourceName cannot change from {OLD} to {NEW}" in said
        assert f"held by {NAMESPACE}/resident;" in said
        assert f"{cluster.places.config}:3:17: " in said
        assert (4, 0) == (cluster.kubelet.allocatable(OLD), cluster.kubelet.capacity(NEW))
        await runs(cluster, "second", OLD)

        for name in ("second", "resident"):
            await succeeds(cluster, name)

        assert await shows(cluster, (NEW, 4), (OLD, 0)), cluster.log.last(20)
        await runs(cluster, "young", NEW)
        assert {"young": NEW} == rows(cluster)
        assert cluster.agent.code is None
        assert [] == cluster.log.of("config.needs_restart")


async def test_a_start_with_another_name_uses_the_last_good_settings_until_the_last_row():
    async with a_node() as cluster:
        await cluster.stop_agent()
        cluster.places.config.write_text(named(NEW))

        await started(cluster, slices=4)

        assert f"cannot change from {OLD} to {NEW}" in await refusal(cluster)
        assert await cluster.until(lambda: cluster.web_address is not None, PATIENCE)
        page = await fetch(cluster.web_address or "", "/readyz?verbose")
        assert f"[!]settings degraded: {cluster.places.config}:3:17: sharing.res" in page.text
        await runs(cluster, "second", OLD)
        assert {"resident": OLD, "second": OLD} == rows(cluster)
        for name in ("second", "resident"):
            await succeeds(cluster, name)
        assert await shows(cluster, (NEW, 4), (OLD, 0)), cluster.log.last(20)


@pytest.mark.parametrize("by_flag", [True, False])
async def test_a_start_that_the_rows_refuse_and_no_copy_can_replace_ends_with_78(*, by_flag: bool):
    async with a_node() as cluster:
        await cluster.stop_agent()
        if by_flag:
            arguments = (*cluster.options.arguments, "--scheduler", "none")
            cluster.places.config.write_text(named(OLD).partition("\n")[2])
            cluster.options = dataclasses.replace(cluster.options, arguments=arguments)
        else:
            cluster.places.config.write_text(named(NEW))
            (cluster.places.state / COPY).unlink()

        await cluster.start_agent()

        assert await cluster.until(lambda: cluster.agent.code is not None, PATIENCE)
        assert 78 == cluster.agent.code
        (line,) = cluster.log.of("agent.failed", cluster.agent.pid)
        assert "cannot change from" in str(line.fields["err"])
        assert str(line.fields["err"]).endswith(
            "set it back, then drain the node while the agent runs"
        )
        assert {"resident": OLD} == rows(cluster)
