"""Whoever of the node starts again, running containers notice nothing and new ones get theirs."""

import socket
from collections import Counter

from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.agreement import lost
from tests.peers.lab.clockwork import (
    REGISTERED,
    until_kubelet_says,
    wall,
)
from tests.peers.lab.faces import answers
from tests.peers.lab.faults import end_container, processes, until_at_rest
from tests.peers.lab.grants import (
    environment_bytes,
    expected_inside,
    seen_inside,
    seen_mounts,
)
from tests.peers.lab.node_state import until_allocatable
from tests.peers.lab.pods import (
    a_telling_pod,
    forget_told,
    lives_of,
    run,
    until_restarted,
    until_told,
)
from tests.peers.lab.waiting import until


async def until_socket(cluster, before):
    """When the kubelet made its socket anew, in Unix seconds."""
    path = cluster.kubelet.plugins / "kubelet.sock"
    born = before

    def is_new():
        nonlocal born
        try:
            born = path.stat().st_ctime_ns  # the removal of the old one changes it too
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        return born != before

    await until(is_new, 20.0, cluster.kubelet.part.tail)
    return born / 1e9


async def test_a_new_kubelet_finds_the_agent_at_once_and_asks_for_nobody_again(
    cluster, agent, table
):
    residents = await run(
        cluster,
        *(a_telling_pod(cluster, f"resident-{number}") for number in range(2)),
        a_telling_pod(cluster, "resident-2", gpus=2),
    )
    before, asked = lives_of(cluster, residents), answers(agent)

    for turn in range(3):
        old = (cluster.kubelet.plugins / "kubelet.sock").stat().st_ctime_ns
        await cluster.kubelet.part.kill()
        await cluster.kubelet.part.start()
        born = await until_socket(cluster, old)
        registered = await until_kubelet_says(cluster, REGISTERED, since=born)
        await until_allocatable(cluster)
        back = wall()
        table.hold("new kubelet.sock → Register call", registered - born, 0.3)
        table.hold("new kubelet.sock → 80 slices allocatable", back - born, 1.0)
        await run(cluster, a_telling_pod(cluster, f"new-{turn}", gpus=1 + turn % 2))
        assert expected_inside(cluster, f"new-{turn}") == await seen_inside(cluster, f"new-{turn}")

    assert before == lives_of(cluster, residents)
    assert asked + once("new-0", "new-1", "new-2") == answers(agent)


def once(*names):
    """The answers to those pods: one each."""
    return Counter((name, "main") for name in names)


async def test_containerd_may_start_again_under_running_gpu_pods(cluster, agent):
    residents = await run(
        cluster, *(a_telling_pod(cluster, f"resident-{number}") for number in range(3))
    )
    await until_told(cluster, *residents)
    before, asked = lives_of(cluster, residents), answers(agent)
    await until_at_rest(before.values())
    alive = {name: processes_of(life) for name, life in before.items()}

    await cluster.runtime.restart()
    await run(cluster, a_telling_pod(cluster, "new", gpus=2))

    assert expected_inside(cluster, "new") == await seen_inside(cluster, "new")
    assert before == lives_of(cluster, residents)
    assert alive == {name: processes_of(life) for name, life in before.items()}
    assert asked + once("new") == answers(agent)
    assert 80 == len(await cluster.kubelet.allocatable(RESOURCE))


def processes_of(life):
    """The processes of a pod's containers."""
    return {name: processes(one.id) for name, one in life.items()}


async def test_a_container_whose_record_the_kubelet_lost_starts_as_it_was(cluster, agent, table):
    names = await run(
        cluster,
        a_telling_pod(cluster, "dies", gpus=2, memory=7000),
        *(a_telling_pod(cluster, f"lives-{number}") for number in range(3)),
    )
    before = lives_of(cluster, names)
    assert expected_inside(cluster, "dies") == await seen_inside(cluster, "dies")
    inside = environment_bytes(cluster, "dies"), seen_mounts(cluster, "dies")

    await cluster.kubelet.restart(lose_checkpoint=True)
    await until_allocatable(cluster)
    forget_told(cluster, "dies")
    died = wall()
    await end_container(before["dies"]["main"].id)
    await run(cluster, a_telling_pod(cluster, "new", memory=500))
    await until_told(cluster, "dies")
    table.add("container dies, its record lost → it runs again", wall() - died)
    await until_restarted(cluster, "dies")

    assert inside == (environment_bytes(cluster, "dies"), seen_mounts(cluster, "dies"))
    for name in ("dies", "new"):
        assert expected_inside(cluster, name) == await seen_inside(cluster, name)
    after = lives_of(cluster, names)
    assert without(before, "dies") == without(after, "dies")
    assert ["replay"] == [
        one["result"] for one in agent.events("alloc.answered") if one["pod"] == "dies"
    ][1:]
    assert [] == lost(cluster)


def without(mapping, key):
    """The mapping less one key."""
    return {one: value for one, value in mapping.items() if one != key}
