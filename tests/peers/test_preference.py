"""The ids that the kubelet books are of the GPUs that the scheduler wrote: it is steered there."""

import pytest_asyncio

from tests.peers.lab.faces import readings
from tests.peers.lab.grants import told_environment
from tests.peers.lab.node_state import until_unlocked
from tests.peers.lab.placement import place, share
from tests.peers.lab.pods import a_container, a_pod, gpus_held, telling, until_running, until_told

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
        groups = [[share(cluster, index) for index in group] for group in wanted]
        containers = [a_container(f"c{n}", gpus=len(one)) for n, one in enumerate(groups)]
        await place(cluster, telling(cluster, a_pod(name, *containers)), groups)
        await until_running(cluster, name)
        await until_told(cluster, name)
        await until_unlocked(cluster)

        written = {f"c{n}": sorted(one.uuid for one in group) for n, group in enumerate(groups)}
        assert written == await gpus_held(cluster, name)
        for container, gpus in written.items():
            environment = told_environment(cluster, name, container)
            assert gpus == sorted(environment["NVIDIA_VISIBLE_DEVICES"].split(","))
    assert 0 == (await readings(agent))["hami_agent_allocation_drifted"]
    assert not agent.events("alloc.refused")
