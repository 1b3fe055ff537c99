"""The ids that the kubelet books are of the GPUs that the scheduler wrote: it is steered there."""

import pytest_asyncio
import yaml

from agent.core.share import Share
from tests.peers.lab.faces import readings
from tests.peers.lab.outcomes import (
    frozen,
    gpus_held,
    start_named,
    told,
    until_running,
    until_taken_up,
    until_unlocked,
)
from tests.peers.lab.placement import gpu_uuids, place
from tests.peers.lab.workloads import a_container, a_pod, telling

WANTED = {
    "one": [[5]],
    "two-apart": [[0, 3]],
    "three-apart": [[6, 1, 4]],
    "containers": [[7], [2, 5], [7]],
}


def one_numa_node(cluster):
    """Eight GPUs on the one NUMA node that this machine has."""
    path = cluster.root / "one-numa-node.yaml"
    gpus = [{"profile": "h100", "index": index, "numa": 0} for index in range(8)]
    path.write_text(yaml.safe_dump({"gpus": gpus}))
    return str(path)


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
    agent = await start_named(cluster, f"steering-{policy}", gpus=one_numa_node(cluster))
    uuids = gpu_uuids(cluster)
    tell = cluster.root / f"tell-{policy}"

    for name, wanted in WANTED.items():
        groups = [[Share(uuids[index], 3000, 10) for index in group] for group in wanted]
        containers = [a_container(f"c{n}", gpus=len(one)) for n, one in enumerate(groups)]
        await place(cluster, telling(a_pod(name, *containers), tell), groups)
        await until_running(cluster, name)
        await until_unlocked(cluster)

        written = {f"c{n}": sorted(one.uuid for one in group) for n, group in enumerate(groups)}
        assert written == await gpus_held(cluster, name)
        for container, gpus in written.items():
            environment = await told(cluster, tell, name, container)
            assert gpus == sorted(environment["NVIDIA_VISIBLE_DEVICES"].split(","))
    assert 0 == (await readings(agent))["hami_agent_allocation_drifted"]
    assert not agent.events("alloc.refused")


async def test_a_gpu_of_which_few_slices_are_left_is_still_the_one_that_is_booked(cluster):
    agent = await start_named(cluster, "few-left", "--split-count", "3", slices=24)
    uuid = gpu_uuids(cluster)[4]

    for number in range(3):
        name = f"on-four-{number}"
        await place(cluster, a_pod(name), [[Share(uuid, 3000, 10)]])
        await until_running(cluster, name)
        await until_unlocked(cluster)
        assert {"main": [uuid]} == await gpus_held(cluster, name)
    assert 0 == (await readings(agent))["hami_agent_allocation_drifted"]


async def test_the_kubelet_is_steered_also_when_it_asks_before_the_agent_has_seen_the_pod(cluster):
    agent = await start_named(cluster, "late-view")
    uuids = gpu_uuids(cluster)
    wanted = {f"late-{index}": uuids[index] for index in (6, 3, 7)}

    for name, uuid in wanted.items():
        with frozen(agent.part):
            await place(cluster, a_pod(name), [[Share(uuid, 3000, 10)]])
            await until_taken_up(cluster, name)
        await until_running(cluster, name)
        await until_unlocked(cluster)

    held = {name: await gpus_held(cluster, name) for name in wanted}
    assert {name: {"main": [uuid]} for name, uuid in wanted.items()} == held
