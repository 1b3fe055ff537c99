"""Other limits for a running container, as an operator gives them: with a real agent."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agent.codec.checkpoint import decode_state
from agent.core.cluster.annotations import ALLOCATED, REGISTER
from agent.core.containers.container_edits import container_directory
from agent.core.inventory.slices import MIB
from agent.core.state.ledger import Row
from agent.host.clock import SystemClock
from agent.sandbox.hami_core import HAMI_2_9_0, HamiCoreRegion
from agent.sandbox.lab.cluster import NAMESPACE, RESOURCE, SandboxCluster, open_cluster
from tests.hami_regions import read_bytes
from tests.process.agent_process import PATIENCE, comes, options, run, started

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(90)]

POD = f"{NAMESPACE}/train"


async def verb(cluster: SandboxCluster, *words: str) -> tuple[int, str, str]:
    socket = str(cluster.places.run / "api.sock")
    done = await asyncio.to_thread(run, *words, "--socket", socket)
    return done.returncode, done.stdout, done.stderr


def submit(cluster: SandboxCluster, name: str, mib: int, cores: int) -> None:
    limits = {RESOURCE: "1", "nvidia.com/gpumem": str(mib), "nvidia.com/gpucores": str(cores)}
    containers = [{"name": "main", "resources": {"limits": limits}}]
    metadata = {"name": name, "namespace": NAMESPACE}
    cluster.submit({"metadata": metadata, "spec": {"containers": containers}})


def region(cluster: SandboxCluster) -> Path:
    """The file in which HAMi-core keeps what the container of pod `train` uses."""
    name = container_directory(cluster.pod("train")["metadata"]["uid"], "main")
    return cluster.places.hook / "vgpu" / "containers" / name / "train.cache"


def a_process(cluster: SandboxCluster, used: int = 0) -> None:
    """A first process of the container begins as it was answered, and uses so many MiB."""
    row = row_of(cluster)
    library = HamiCoreRegion(region(cluster), HAMI_2_9_0)
    process = library.start(7, dict(row.edits.envs), SystemClock().now())
    library.name_gpus(row.gpus)
    process.allocate(0, used * MIB)


def limits(cluster: SandboxCluster) -> tuple[int, int]:
    """MiB and percent of the region's first GPU."""
    found = read_bytes(region(cluster).read_bytes()).region
    assert found is not None
    return found.gpus[0].memory_limit // MIB, found.gpus[0].core_limit


def annotated(cluster: SandboxCluster) -> list[str]:
    """MiB and percent in the annotation by which the scheduler counts."""
    text = cluster.pod("train")["metadata"]["annotations"][ALLOCATED]
    return text.removesuffix(":;").split(",")[2:]


async def shown(cluster: SandboxCluster) -> dict[str, Any]:
    code, text, _ = await verb(cluster, "status", "-o", "json")
    assert 0 == code
    (found,) = json.loads(text)["data"]["allocations"]
    return found


async def a_running_container(cluster: SandboxCluster, slices: int = 20) -> None:
    await answering(cluster, slices)
    assert await cluster.until(lambda: REGISTER in cluster.node_annotations(), PATIENCE)
    submit(cluster, "train", 8000, 30)
    await cluster.kubelet.until_running(await uid_of(cluster, "train"), "main")
    a_process(cluster)


async def answering(cluster: SandboxCluster, slices: int = 20) -> None:
    """A new agent offers its slices and has opened its socket and its port."""
    await started(cluster, slices=slices)
    pid = cluster.agent.pid
    assert await cluster.until(lambda: len(cluster.log.of("web.listening", pid)) == 2, PATIENCE)


async def uid_of(cluster: SandboxCluster, name: str) -> str:
    def placed() -> bool:
        return bool(cluster.pod(name)["spec"].get("nodeName"))

    assert await cluster.until(placed, PATIENCE)
    uid: str = cluster.pod(name)["metadata"]["uid"]
    return uid


async def test_a_running_container_is_raised_lowered_held_and_given_back_its_limits():
    async with open_cluster(options(gpus=2)) as cluster:
        await a_running_container(cluster)

        code, text, _ = await verb(cluster, "limit", POD, "--memory", "12Gi", "--cores", "50")
        assert (0, True) == (code, "memory 12288 MiB (was 8000 MiB)" in text)
        assert (12288, 50) == limits(cluster)
        assert await cluster.until(lambda: ["12288", "50"] == annotated(cluster), PATIENCE)
        assert await tells(cluster, 12288, 50, True)

        await cluster.kill_agent()
        region(cluster).unlink()
        a_process(cluster)
        assert (8000, 30) == limits(cluster)
        await answering(cluster)
        assert await comes(lambda: (12288, 50) == limits(cluster))
        assert await tells(cluster, 12288, 50, True)

        code, _, _ = await verb(cluster, "limit", "train", "--memory", "4Gi")
        assert (0, (4096, 50)) == (code, limits(cluster))

        code, text, _ = await verb(cluster, "limit", POD, "--reset", "-o", "json")
        assert (0, True) == (code, json.loads(text)["data"]["reset"])
        assert (8000, 30) == limits(cluster)
        assert await cluster.until(lambda: ["8000", "30"] == annotated(cluster), PATIENCE)
        assert await tells(cluster, 8000, 30, False)


async def tells(cluster: SandboxCluster, *expected: int) -> bool:
    """Whether the status tells MiB, percent and live limits, once its last document is too old."""
    async with asyncio.timeout(PATIENCE):
        while True:
            one = await shown(cluster)
            (share,) = one["shares"]
            if expected == (share["memoryMib"], share["cores"], one["liveLimits"]):
                return True


async def test_beyond_what_is_free_or_of_an_unknown_pod_it_is_refused():
    async with open_cluster(options(gpus=2)) as cluster:
        await a_running_container(cluster)

        code, _, text = await verb(cluster, "limit", POD, "--memory", "90Gi")
        assert (1, True) == (code, "MiB are free: choose less, or end another pod." in text)
        a_process(cluster, used=5000)
        code, _, text = await verb(cluster, "limit", POD, "--memory", "4Gi")
        assert (1, True) == (code, "The container uses 5000 MiB of GPU " in text)
        code, _, text = await verb(cluster, "limit", "trains", "--reset")
        assert (4, True) == (code, "did you mean train?" in text)
        region(cluster).unlink()
        code, _, text = await verb(cluster, "limit", POD, "--cores", "5")
        assert (1, True) == (code, "has used its GPU through HAMi-core" in text)
        assert await tells(cluster, 8000, 30, False)


async def test_room_that_a_container_was_given_later_is_not_given_twice():
    async with open_cluster(options(gpus=1)) as cluster:
        await a_running_container(cluster, slices=10)
        assert 0 == (await verb(cluster, "limit", POD, "--memory", "78Gi"))[0]

        submit(cluster, "late", 8000, 10)

        def refused() -> bool:
            return "HA-4003" in cluster.pod("late").get("status", {}).get("message", "")

        assert await cluster.until(refused, PATIENCE)


async def test_in_plain_mode_a_limit_is_lowered_and_given_back_and_never_above_the_slices():
    async with open_cluster(options("--scheduler", "none", gpus=2)) as cluster:
        cluster.places.config.write_text("plain: {memoryLimits: true}\n")
        await answering(cluster)
        uid = "6f1c1f0e-8f5a-4a52-9d2e-6b8b8a1d0001"
        containers = [{"name": "main", "resources": {"limits": {RESOURCE: "1"}}}]
        metadata = {"uid": uid, "namespace": NAMESPACE, "name": "train"}
        await cluster.kubelet.admit({"metadata": metadata, "spec": {"containers": containers}})
        await cluster.kubelet.until_running(uid, "main")
        assert await comes(lambda: row_of(cluster).holder is not None)
        row = row_of(cluster)
        name = container_directory(row.key.pod_uid, row.key.container)
        path = cluster.places.hook / "vgpu" / "containers" / name / "train.cache"
        HamiCoreRegion(path, HAMI_2_9_0).create(dict(row.edits.envs))

        code, text, _ = await verb(cluster, "limit", POD, "--memory", "2Gi")
        assert (0, True) == (code, "memory 2048 MiB (was 8155 MiB)" in text)
        assert "scheduler" not in text
        code, _, text = await verb(cluster, "limit", POD, "--memory", "9Gi")
        assert (1, True) == (code, "choose at most 8155 MiB" in text)
        code, text, _ = await verb(cluster, "limit", POD, "--reset")
        assert (0, True) == (code, "memory 8155 MiB (was 2048 MiB)" in text)


def row_of(cluster: SandboxCluster) -> Row:
    """The only row of the ledger on disk."""
    (row,) = decode_state((cluster.places.state / "state.json").read_bytes()).ledger.rows
    return row
