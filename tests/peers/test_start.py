"""A node where the agent starts: what the kubelet counts, what the scheduler is told, and how."""

from collections import Counter

import msgspec
import pytest

from agent import cluster as annotations
from agent.hami.register import RegisteredGpu, decode_register, decode_register_colon
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.ages import age_of
from tests.peers.lab.audit import counted
from tests.peers.lab.cluster import ACCOUNT
from tests.peers.lab.identities import NODE_USER
from tests.peers.lab.node_state import node_of, notes_of, until_allocatable, until_offered
from tests.peers.lab.requests import ALLOWED, asked_since, refused
from tests.peers.lab.table import FAR_STARTING

H100 = RegisteredGpu(
    split_count=10,
    registered_mib=81559,
    core_percent=100,
    type_name="NVIDIA H100 80GB HBM3",
    mode="hami-core",
    healthy=True,
)
OLD_H100 = msgspec.structs.replace(H100, type_name=f"NVIDIA-{H100.type_name}")
"""Before 2.8 every name has this before it."""


@pytest.mark.parametrize("user", [NODE_USER, ACCOUNT])
async def test_80_slices_are_allocatable_and_the_node_is_annotated(cluster, table, user):
    await until_offered(cluster, 0)
    mark = cluster.plane.audit.mark()
    agent = await cluster.start_agent(user=user)

    await until_allocatable(cluster, 80)
    age = age_of(agent.part.pid)
    table.hold("agent started → 80 slices in PodResources", age, 1.0, far=FAR_STARTING)
    await until_offered(cluster, 80)
    table.add("agent started → 80 slices on the Node (tick 1 s)", age_of(agent.part.pid))
    await cluster.nodes.until(
        lambda: annotations.REGISTER in notes_of(node_of(cluster)), 20.0, "annotation"
    )

    text = notes_of(node_of(cluster))[annotations.REGISTER]
    is_old = cluster.release.is_old
    gpus = decode_register_colon(text) if is_old else decode_register(text)
    slices = {f"{gpu.uuid}-{number}" for gpu in gpus for number in range(10)}
    assert slices == await cluster.kubelet.allocatable(RESOURCE)
    told = OLD_H100 if is_old else H100
    assert [a_registered_gpu(told, gpu, index) for index, gpu in enumerate(gpus)] == list(gpus)
    assert annotations.MUTEX_LOCK not in notes_of(node_of(cluster))
    requests = await asked_since(cluster, mark, user, Counter({"patch nodes": 1}))
    assert [] == refused(requests)
    assert counted(requests).keys() <= ALLOWED


def a_registered_gpu(told: RegisteredGpu, gpu: RegisteredGpu, index: int) -> RegisteredGpu:
    """A GPU as it should be told, but for its UUID, which the slices have too."""
    return msgspec.structs.replace(told, uuid=gpu.uuid, index=index, numa=index // 4)
