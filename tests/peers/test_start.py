"""A node where the agent starts: what the kubelet counts, what the scheduler is told, and how."""

import dataclasses

import pytest

from agent.codec.register import RegisteredGpu, decode_register
from agent.core import annotations
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.ages import age_of
from tests.peers.lab.audit import counted
from tests.peers.lab.cluster import ACCOUNT, Cluster
from tests.peers.lab.identities import NODE, NODE_USER
from tests.peers.lab.requests import ALLOWED, asked_since, refused
from tests.peers.lab.waiting import until_answer

H100 = RegisteredGpu(
    split_count=10,
    registered_mib=81559,
    core_percent=100,
    type_name="NVIDIA H100 80GB HBM3",
    mode="hami-core",
    healthy=True,
)


@pytest.mark.parametrize("user", [NODE_USER, ACCOUNT])
async def test_80_slices_are_allocatable_and_the_node_is_annotated(cluster, table, user):
    await until_counted(cluster, 0)
    mark = cluster.plane.audit.mark()
    agent = await cluster.start_agent(user=user)

    await until_allocatable(cluster, 80)
    table.add("agent started → 80 slices in PodResources", age_of(agent.part.pid), 1)
    await until_counted(cluster, 80)
    table.add("agent started → 80 slices on the Node (tick 1 s)", age_of(agent.part.pid))
    await cluster.nodes.until(lambda: annotations.REGISTER in noted(cluster), 20.0, "annotation")

    gpus = decode_register(noted(cluster)[annotations.REGISTER])
    slices = {f"{gpu.uuid}-{number}" for gpu in gpus for number in range(10)}
    assert slices == await cluster.kubelet.allocatable(RESOURCE)
    assert [a_registered_gpu(gpu, index) for index, gpu in enumerate(gpus)] == list(gpus)
    assert annotations.MUTEX_LOCK not in noted(cluster)
    requests = await asked_since(cluster, mark, user, 1)
    assert [] == refused(requests)
    assert counted(requests).keys() <= ALLOWED


def a_registered_gpu(gpu: RegisteredGpu, index: int) -> RegisteredGpu:
    """A GPU as it should be told, but for its UUID, which the slices have too."""
    return dataclasses.replace(H100, uuid=gpu.uuid, index=index, numa=index // 4)


def noted(cluster: Cluster) -> dict[str, str]:
    """The Node's annotations."""
    marks: dict[str, str] = cluster.nodes.objects[NODE]["metadata"].get("annotations") or {}
    return marks


async def until_allocatable(cluster: Cluster, slices: int) -> None:
    """Return once PodResources tells of so many slices."""

    async def is_told() -> bool:
        return slices == len(await cluster.kubelet.allocatable(RESOURCE))

    await until_answer(is_told, 10.0, lambda: f"not {slices} slices in PodResources")


async def until_counted(cluster: Cluster, slices: int) -> None:
    """Return once the Node offers so many slices, which it may do some time after PodResources."""

    def offered() -> int:
        status = cluster.nodes.objects[NODE]["status"]
        return int(status.get("allocatable", {}).get(RESOURCE, "0"))

    await cluster.nodes.until(lambda: slices == offered(), 20.0, f"{slices} slices on the Node")
