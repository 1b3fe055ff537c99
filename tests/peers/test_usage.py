"""What containers use, with no container of HAMi beside the agent: its series."""

from collections import Counter
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from agent.ledger import container_directory
from agent.model import MIB
from agent.sandbox.hami_core import HAMI_2_9_0, HamiCoreRegion
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.faces import page
from tests.peers.lab.grants import expected_environment, grants
from tests.peers.lab.node_state import gpu_uuids
from tests.peers.lab.placement import now
from tests.peers.lab.pods import as_seen, key, run, until_settled
from tests.peers.lab.waiting import until, until_answer
from tests.peers.lab.workloads import a_container, a_pod

GPU = "device_index device_uuid device_type zone"
CONTAINER = "namespace pod container vdevice_index device_uuid zone"
OLD_GPU = "nodeid deviceidx deviceuuid devicetype zone"
OLD_CONTAINER = "podnamespace podname ctrname vdeviceid deviceuuid zone"
PARTS = f"{OLD_CONTAINER} context module data offset"
BUILD = "build_date compiler go_version platform revision version"
SERIES = {
    "hami_host_gpu_memory_used_bytes": f"node {GPU}",
    "hami_host_gpu_utilization_ratio": f"node {GPU}",
    "hami_host_gpu_memory_controller_utilization_ratio": f"node {GPU}",
    "hami_host_gpu_temperature_celsius": f"node {GPU}",
    "hami_host_gpu_power_usage_watts": f"node {GPU}",
    "hami_host_gpu_ecc_errors_total": f"error_type node {GPU}",
    "hami_vgpu_memory_used_bytes": CONTAINER,
    "hami_vgpu_memory_limit_bytes": CONTAINER,
    "hami_container_device_memory_bytes": CONTAINER,
    "hami_container_device_utilization_ratio": CONTAINER,
    "hami_container_last_kernel_elapsed_seconds": CONTAINER,
    "hami_vgpu_memory_context_bytes": CONTAINER,
    "hami_vgpu_memory_module_bytes": CONTAINER,
    "hami_vgpu_memory_buffer_bytes": CONTAINER,
    "hami_build_info": BUILD,
    "HostGPUMemoryUsage": OLD_GPU,
    "HostCoreUtilization": OLD_GPU,
    "vGPU_device_memory_usage_in_bytes": OLD_CONTAINER,
    "vGPU_device_memory_limit_in_bytes": OLD_CONTAINER,
    "Device_memory_desc_of_container": PARTS,
    "Device_utilization_desc_of_container": OLD_CONTAINER,
    "Device_last_kernel_of_container": OLD_CONTAINER,
}
"""All that HAMi's monitor has of a node without MIG. Source: HAMi v2.10 cmd/vGPUmonitor/metrics.go
and pkg/metrics/metrics.go, with --legacy-metrics. Since 2.11 the memory controller's names its
node, and temperature, power and errors of memory are told."""
HOW_MANY = {CONTAINER: 3, OLD_CONTAINER: 3, PARTS: 3, BUILD: 1, f"error_type node {GPU}": 16}
"""Three GPUs of containers, one build, eight GPUs, two types of errors of each."""
OURS = ("hami_agent_", "process_", "python_")

PLACE = "/usr/local/vgpu/made"
USES = (
    f"until mv {PLACE} $CUDA_DEVICE_MEMORY_SHARED_CACHE 2>/dev/null; do sleep 0.1; done;"
    " exec sleep 3600"
)
"""A process of the container puts its region where its variable says."""


def a_using_pod(name, *, gpus=1, memory=3000):
    return a_pod(name, a_container(gpus=gpus, memory=memory, script=USES))


async def use_gpus(cluster: Cluster, name: str, used: int) -> Path:
    """The container's first process uses so many MiB of each GPU, with HAMi-core; its region."""
    pod, gpus = as_seen(cluster, name), gpu_uuids(cluster)
    given = grants(pod)["main"]
    directory = container_directory(pod["metadata"]["uid"], "main")
    made = cluster.hook / "containers" / directory / "made"
    region = HamiCoreRegion(made.with_name("next"), HAMI_2_9_0)
    process = region.start(1, expected_environment(given, gpus), now())
    uuids = [one.uuid for one in given]
    region.name_gpus([uuid for uuid in gpus if uuid in uuids])
    for gpu in range(len(given)):
        process.allocate(gpu, used * MIB)
        process.watch(gpu, 20)
    process.launch(now())
    region.path.rename(made)
    await until(lambda: any(made.parent.glob("*.cache")), 10.0, lambda: f"{name} moves nothing")
    (path,) = made.parent.glob("*.cache")
    return path


async def told(agent):
    """How many there are of each foreign series, with its labels; MiB in use by pod and GPU."""
    _, text = await page(agent, "/metrics")
    families = text_string_to_metric_families(text)
    samples = [one for family in families for one in family.samples]
    theirs = [one for one in samples if not one.name.startswith(OURS)]
    series = Counter((one.name, frozenset(one.labels)) for one in theirs)
    used = [
        (one.labels["pod"], one.labels["device_uuid"], one.value / MIB)
        for one in theirs
        if one.name == "hami_vgpu_memory_used_bytes"
    ]
    return series, sorted(used)


async def test_the_agent_alone_tells_all_that_hamis_monitor_told_of_node_and_containers(cluster):
    path = cluster.root / "both-names.yaml"
    path.write_text("metrics: {hami: both}\n")
    agent = await cluster.start_registered_agent("--config", str(path))
    pods = a_using_pod("one"), a_using_pod("pair", gpus=2, memory=2000)
    names = await run(cluster, *pods)
    await until_settled(cluster, *names)
    for name, used in zip(names, (500, 700), strict=True):
        await use_gpus(cluster, name, used)

    async def is_complete() -> bool:
        return 3 == len((await told(agent))[1])

    await until_answer(is_complete, 20.0, agent.part.tail)
    series, used = await told(agent)

    expected = {
        (name, frozenset(one.split())): HOW_MANY.get(one, 8) for name, one in SERIES.items()
    }
    assert expected == series
    given = {name: grants(as_seen(cluster, name))["main"] for name in names}
    mib = {"one": 500, "pair": 700}
    assert sorted((name, gpu.uuid, mib[name]) for name in names for gpu in given[name]) == used
    assert {key(name) for name in names} == set(cluster.pods.objects)
