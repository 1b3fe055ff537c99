"""The ids that the kubelet books are of the GPUs that the scheduler wrote: it is steered there."""

import pytest_asyncio

from tests.peers.lab.faces import readings
from tests.peers.lab.grants import told_environment
from tests.peers.lab.node_state import gpu_uuids, until_unlocked
from tests.peers.lab.nodes import frozen
from tests.peers.lab.placement import place, share, until_taken_up
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


async def test_a_gpu_of_which_few_slices_are_left_is_still_the_one_that_is_booked(cluster):
    agent = await cluster.start_registered_agent("--split-count", "3", slices=24)
    uuid = gpu_uuids(cluster)[4]

    for number in range(3):
        name = f"on-four-{number}"
        await place(cluster, a_pod(name), [[share(cluster, 4)]])
        await until_running(cluster, name)
        await until_unlocked(cluster)
        assert {"main": [uuid]} == await gpus_held(cluster, name)
    assert 0 == (await readings(agent))["hami_agent_allocation_drifted"]


async def test_the_kubelet_is_steered_also_when_it_asks_before_the_agent_has_seen_the_pod(cluster):
    agent = await cluster.start_registered_agent()
    wanted = {f"late-{index}": index for index in (6, 3, 7)}

    for name, index in wanted.items():
        with frozen(agent.part):
            await place(cluster, a_pod(name), [[share(cluster, index)]])
            await until_taken_up(cluster, name)
        await until_running(cluster, name)
        await until_unlocked(cluster)

    held = {name: await gpus_held(cluster, name) for name in wanted}
    uuids = gpu_uuids(cluster)
    assert {name: {"main": [uuids[index]]} for name, index in wanted.items()} == held
