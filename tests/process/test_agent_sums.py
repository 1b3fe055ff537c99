"""What a whole agent promises of each GPU: its limit, the true sum, nothing that has ended."""

import asyncio
import json

import pytest

from agent.sandbox.hardware import PROFILES, described
from agent.sandbox.lab.cluster import NAMESPACE, LabOptions, SandboxCluster, open_cluster
from agent.sandbox.lab.web import fetch, scrape
from agent.sandbox.scenario.facts import answers, is_running, parsed
from agent.sandbox.scenario.workloads import USE_UUID, Wish, Workload
from agent.sandbox.scheduler.requests import COUNT, MEMORY
from tests.cuda_order import limits_in_force
from tests.process.agent_process import ENVIRON, PATIENCE, offers, options, started

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(120)]

MIB = 2**20
SPEED = {PROFILES[key].name: rank for rank, key in enumerate(("t4", "a100", "h100"))}


@pytest.mark.parametrize(
    ("first", "added"),
    [("t4:2", ("h100",)), ("h100:1", ("t4", "t4")), ("t4:1", ("h100", "t4", "a100"))],
)
async def test_each_gpu_of_a_container_with_several_models_has_its_own_limit(first, added):
    async with open_cluster(LabOptions(described(first), ENVIRON)) as cluster:
        count = int(first[-1]) + len(added)
        await started(cluster, slices=10 * int(first[-1]))
        for model in added:
            cluster.hardware.add(model)
        assert await offers(cluster, 10 * count)
        gpus = {str(state.gpu.uuid): state.gpu for state in cluster.hardware.states}
        pod = Workload("mix", "", (Wish("main", count),)).pod()
        pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpumem-percentage"] = "40"
        cluster.submit(pod)
        assert await cluster.until(lambda: is_running(cluster, "mix"), PATIENCE)

        (answer,) = answers(cluster).values()
        notes = cluster.pod("mix")["metadata"]["annotations"]
        devices = notes["hami.io/vgpu-devices-allocated"].replace(";", "").split(":")
        wrote = {one.split(",")[0]: int(one.split(",")[2]) for one in devices if one}
        buses = {uuid: gpu.pci for uuid, gpu in gpus.items()}
        assert len(set(wrote.values())) > 1
        assert wrote == limits_in_force(
            parsed(answer).envs, buses, lambda uuid: SPEED[gpus[uuid].name]
        )


def holding(cluster: SandboxCluster, name: str, *parts: tuple[str, int]) -> None:
    """Create a pod on the first GPU: containers, sidecars and init containers with MiB each."""
    uuid = str(cluster.hardware.states[0].gpu.uuid)
    pod = Workload(name, "", ()).pod()
    pod["metadata"]["annotations"] = {USE_UUID: uuid}
    for place, (kind, mib) in enumerate(parts):
        limits = {COUNT: "1", MEMORY: str(mib)}
        made = {"name": f"{kind}{place}", "image": "x", "resources": {"limits": limits}}
        made |= {"restartPolicy": "Always"} if kind == "sidecar" else {}
        pod["spec"].setdefault("containers" if kind == "app" else "initContainers", []).append(made)
    cluster.submit(pod)


async def promised(cluster: SandboxCluster) -> tuple[int, int, int, list[str]]:
    """MiB of the first GPU: by its gauge, by its containers, by the status; who holds it now."""
    found = await scrape(cluster.web_address or "")
    page = json.loads((await fetch(cluster.web_address or "", "/api/v1/status")).text)["data"]

    def of(name: str) -> int:
        return round(
            sum(v for n, labels, v in found if (n, labels.get("gpu")) == (name, "0")) / MIB
        )

    return (
        of("hami_agent_memory_promised_bytes"),
        of("hami_agent_container_memory_promised_bytes"),
        page["gpus"][0]["promisedMib"],
        [one["pod"] for one in page["allocations"] if not one["ended"]],
    )


async def sums_to(cluster: SandboxCluster, mib: int, *pods: str) -> bool:
    """Whether all faces come to say so: they are made anew every half second."""
    for _ in range(int(PATIENCE / 0.5)):
        if await promised(cluster) == (mib, mib, mib, sorted(pods)):
            return True
        await asyncio.sleep(0.5)
    return False


def node_events(cluster: SandboxCluster) -> set[str]:
    events = cluster.store.select("events")
    return {one["reason"] for one in events if one["involvedObject"]["kind"] == "Node"}


async def test_sidecars_that_oversell_a_gpu_are_in_every_sum_and_told():
    async with open_cluster(options(gpus=1)) as cluster:
        await started(cluster, slices=10)
        holding(cluster, "one", ("sidecar", 30000), ("app", 20000))
        assert await cluster.until(lambda: is_running(cluster, "one"), PATIENCE)
        assert await sums_to(cluster, 50000, "one", "one")
        assert "GpuOversold" not in node_events(cluster)
        holding(cluster, "two", ("init", 40000), ("sidecar", 30000), ("app", 20000))
        assert await cluster.until(lambda: is_running(cluster, "two"), PATIENCE)

        assert await sums_to(cluster, 100000, "one", "one", "two", "two")
        assert await cluster.until(lambda: "GpuOversold" in node_events(cluster), PATIENCE)


@pytest.mark.parametrize("grace", [None, 0])
async def test_a_deleted_pod_is_in_no_sum_as_soon_as_the_next_one_of_its_name_is_let_in(grace):
    async with open_cluster(options(gpus=1)) as cluster:
        await started(cluster, slices=10)
        holding(cluster, "web-0", ("app", 70000))
        assert await cluster.until(lambda: is_running(cluster, "web-0"), PATIENCE)
        assert await sums_to(cluster, 70000, "web-0")
        first = cluster.pod("web-0")["metadata"]["uid"]
        cluster.store.delete("pods", NAMESPACE, "web-0", grace=grace)
        assert await cluster.until(
            lambda: not any(p["metadata"]["uid"] == first for p in cluster.store.select("pods")),
            PATIENCE,
        )
        assert await sums_to(cluster, 0)
        holding(cluster, "web-0", ("app", 60000))
        assert await cluster.until(lambda: is_running(cluster, "web-0"), PATIENCE)

        assert await sums_to(cluster, 60000, "web-0")
