"""The resource gets another name: its containers live on by the former one, new pods by the new."""

import asyncio

import pytest

from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.clockwork import wall
from tests.peers.lab.config_files import RenamedFiles, open_files
from tests.peers.lab.faults import end_container
from tests.peers.lab.grants import environment_bytes, seen_mounts
from tests.peers.lab.node_state import until_allocatable
from tests.peers.lab.placement import place, share
from tests.peers.lab.pods import (
    a_telling_pod,
    delete,
    forget_told,
    key,
    lives_of,
    until_deleted,
    until_failed,
    until_restarted,
    until_running,
    until_settled,
    until_told,
)
from tests.peers.lab.settings import BOUND
from tests.peers.lab.table import FAR

FORMER, PRESENT = RESOURCE, "example.com/vgpu"

CLOSED = 90.0
"""Seconds in which the row of a deleted pod is closed: it outlives it by a minute."""


def asking_for(pod, resource):
    """The same pod, whose containers ask for one slice by that name."""

    def named(container):
        limits = {resource: "1"}
        return {**container, "resources": {"limits": limits}}

    spec = pod["spec"]
    return {**pod, "spec": {**spec, "containers": [named(one) for one in spec["containers"]]}}


async def with_a_resident(cluster):
    """An agent under the former name with a pod; the way to rename, and the pod's slices."""
    files = open_files(cluster, RenamedFiles)
    path = files.write("config.yaml", f"sharing: {{resourceName: {FORMER}}}\n")
    agent = await cluster.start_registered_agent("--config", str(path))
    await place(cluster, a_telling_pod(cluster, "resident"), [[share(cluster, 0)]])
    await until_told(cluster, "resident")
    await until_running(cluster, "resident")
    await until_settled(cluster, "resident")
    ids = (await cluster.kubelet.held(FORMER))[key("resident"), "main"]

    async def rename():
        files.write("config.yaml", f"sharing: {{resourceName: {PRESENT}}}\n")
        await until_allocatable(cluster, 80 - len(ids), FAR * BOUND, PRESENT)

    return agent, rename, ids


async def test_a_container_starts_again_by_the_former_name_of_the_resource(cluster, table):
    agent, rename, ids = await with_a_resident(cluster)
    before = lives_of(cluster, ("resident",))
    inside = environment_bytes(cluster, "resident"), seen_mounts(cluster, "resident")
    began = asyncio.get_running_loop().time()
    await rename()
    table.hold("renamed → slices by the new name", asyncio.get_running_loop().time() - began, BOUND)
    await until_allocatable(cluster, len(ids))
    assert ids == await cluster.kubelet.allocatable(FORMER)
    assert before == lives_of(cluster, ("resident",))

    await cluster.kubelet.restart(lose_checkpoint=True)
    await until_allocatable(cluster, len(ids))
    forget_told(cluster, "resident")
    died = wall()
    await end_container(before["resident"]["main"].id)
    await until_told(cluster, "resident")
    table.add("container dies under a former name → it runs again", wall() - died)
    await until_restarted(cluster, "resident")

    assert inside == (environment_bytes(cluster, "resident"), seen_mounts(cluster, "resident"))
    assert [] == agent.events("alloc.refused")


@pytest.mark.timeout(240)
async def test_new_pods_have_the_new_name_and_the_former_goes_with_its_last_container(cluster):
    agent, rename, ids = await with_a_resident(cluster)
    await rename()
    young = asking_for(a_telling_pod(cluster, "young"), PRESENT)
    await place(cluster, young, [[share(cluster, 1)]])
    await until_settled(cluster, "young")
    await until_allocatable(cluster, len(ids))

    await place(cluster, a_telling_pod(cluster, "late"), [[share(cluster, 2)]])
    await until_failed(cluster, "late")
    await delete(cluster, "resident", grace=0)
    await until_deleted(cluster, "resident")
    await until_allocatable(cluster, 0, CLOSED)

    await until_running(cluster, "young")
    assert [] == agent.events("alloc.refused")
