"""The resource gets another name: it waits while a pod holds slices, and comes once it is gone."""

import pytest

from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.config_files import RenamedFiles, open_files
from tests.peers.lab.node_state import until_allocatable
from tests.peers.lab.placement import place, share
from tests.peers.lab.pods import (
    a_telling_pod,
    delete,
    until_deleted,
    until_running,
    until_settled,
)
from tests.peers.lab.settings import BOUND
from tests.peers.lab.table import FAR
from tests.peers.lab.waiting import until

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


async def runs(cluster, pod, gpu):
    """The pod is placed on that GPU and runs."""
    await place(cluster, pod, [[share(cluster, gpu)]])
    await until_running(cluster, pod["metadata"]["name"])
    await until_settled(cluster, pod["metadata"]["name"])


@pytest.mark.timeout(240)
async def test_another_name_waits_for_the_last_pod_and_then_comes_by_itself(cluster):
    files = open_files(cluster, RenamedFiles)
    path = files.write("config.yaml", f"sharing: {{resourceName: {FORMER}}}\n")
    agent = await cluster.start_registered_agent("--config", str(path))
    await runs(cluster, a_telling_pod(cluster, "resident"), 0)

    files.write("config.yaml", f"sharing: {{resourceName: {PRESENT}}}\n")
    await until(
        lambda: bool(agent.events("config.rejected")), FAR * BOUND, lambda: "nothing is refused"
    )
    (refused,) = agent.events("config.rejected")
    assert f"cannot change from {FORMER} to {PRESENT} while" in refused["err"]
    assert "slices are held by " in refused["err"]
    assert "/resident;" in refused["err"]
    await runs(cluster, a_telling_pod(cluster, "late"), 1)
    assert 80 == len(await cluster.kubelet.allocatable(FORMER))
    assert not await cluster.kubelet.allocatable(PRESENT)

    for name in ("late", "resident"):
        await delete(cluster, name, grace=0)
        await until_deleted(cluster, name)
    await until_allocatable(cluster, 80, CLOSED, PRESENT)
    await until_allocatable(cluster, 0)
    await runs(cluster, asking_for(a_telling_pod(cluster, "young"), PRESENT), 2)
    assert [] == agent.events("alloc.refused")
