"""The ids that the kubelet books are of the GPUs that the scheduler wrote: it is steered there."""

import re

import pytest_asyncio

from tests.peers.lab.pods import a_container, a_pod

WANTED = {
    "one": [[5]],
    "two-apart": [[0, 3]],
    "three-apart": [[6, 1, 4]],
    "containers": [[7], [2, 5], [7]],
}


@pytest_asyncio.fixture(loop_scope="session", params=["none", "best-effort"])
async def policy(cluster, request):
    """The kubelet's topology manager has this policy; afterwards it is as it was."""
    if request.param == "none":
        yield request.param
        return
    kubelet = cluster.kubelet
    kubelet.configure(cluster.runtime.socket, topologyManagerPolicy=request.param)
    await kubelet.restart()
    yield request.param
    kubelet.configure(cluster.runtime.socket)
    await kubelet.restart()


async def test_the_ids_of_a_pod_are_of_the_gpus_that_the_annotation_names(cluster, policy):
    agent = await cluster.start_registered_agent()

    for name, wanted in WANTED.items():
        groups = [[cluster.share(index) for index in group] for group in wanted]
        containers = [a_container(f"c{n}", gpus=len(one)) for n, one in enumerate(groups)]
        await cluster.place(cluster.telling(a_pod(name, *containers)), groups)
        await cluster.until_running(name)
        await cluster.until_told(name)
        await cluster.until_unlocked()

        written = {f"c{n}": sorted(one.uuid for one in group) for n, group in enumerate(groups)}
        assert written == await cluster.gpus_held(name)
        for container, gpus in written.items():
            environment = cluster.told_environment(name, container)
            assert gpus == sorted(environment["NVIDIA_VISIBLE_DEVICES"].split(","))
    _, metrics = await agent.page("/metrics")
    assert re.search(r"^hami_agent_allocation_drifted 0(\.0)?$", metrics, re.MULTILINE)
    assert not agent.events("alloc.refused")
