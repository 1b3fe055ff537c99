"""A cordoned GPU beside the scheduler model of HAMi 2.10: no new pod goes there."""

import asyncio

import pytest

from agent.cluster import ALLOCATED, REGISTER
from agent.sandbox.lab.cluster import NAMESPACE, NODE, RESOURCE, SandboxCluster, open_cluster
from tests.process.agent_process import PATIENCE, options, run, started

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.looptime(False),
    pytest.mark.timeout(120),
]


def a_pod(name: str) -> dict:
    limits = {"resources": {"limits": {RESOURCE: "1", "nvidia.com/gpumem": "1000"}}}
    spec = {"containers": [{"name": "main", "image": "i", **limits}]}
    return {"metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec}


async def placed(cluster: SandboxCluster, *names: str) -> set[str]:
    """The GPUs of these pods once they run."""
    for name in names:
        cluster.submit(a_pod(name))

    def running() -> bool:
        return all(cluster.pod(name)["status"].get("phase") == "Running" for name in names)

    assert await cluster.until(running, PATIENCE), cluster.log.last(20)
    texts = (cluster.pod(name)["metadata"]["annotations"][ALLOCATED] for name in names)
    return {text.partition(",")[0] for text in texts}


async def cordon(cluster: SandboxCluster, verb: str, gpu: str) -> str:
    flags = ("--node", NODE, "--kubeconfig", str(cluster.places.kubeconfig), "-y")
    ended = await asyncio.to_thread(run, verb, gpu, *flags)
    assert (0, "") == (ended.returncode, ended.stderr)
    return ended.stdout


async def test_no_new_pod_is_placed_on_a_cordoned_gpu_until_it_is_uncordoned():
    async with open_cluster(options(gpus=2)) as opened:
        cluster = await started(opened, 20)
        assert await cluster.until(lambda: REGISTER in cluster.node_annotations(), PATIENCE)
        first, second = (gpu.uuid for gpu in cluster.options.description.gpus)
        both = await placed(cluster, "a", "b")
        allocatable = cluster.allocatable()

        await cordon(cluster, "cordon", "0")
        cordoned = await placed(cluster, "c", "d", "e")
        running = {cluster.pod(name)["status"]["phase"] for name in ("a", "b")}
        offered = cluster.allocatable()

        await cordon(cluster, "uncordon", "0")
        await cordon(cluster, "cordon", second)
        uncordoned = await placed(cluster, "f")
        told = {one["reason"] for one in cluster.store.select("events")}

    assert {"GpuCordoned", "GpuUncordoned"} <= told
    assert {first, second} == both
    assert {second} == cordoned
    assert {first} == uncordoned
    assert {"Running"} == running
    assert allocatable == offered == 20
