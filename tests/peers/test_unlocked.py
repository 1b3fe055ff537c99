"""Beside a real kubelet: pods without a lock, and a node without HAMi-core."""

from agent import cluster as annotations
from tests.peers.lab.faults import frozen
from tests.peers.lab.grants import told_environment
from tests.peers.lab.identities import NODE
from tests.peers.lab.node_state import until_allocatable, until_unlocked
from tests.peers.lab.placement import MIB, annotate, bind, create_by_hand, place, share
from tests.peers.lab.pods import (
    telling,
    until_bind_phase,
    until_failed,
    until_running,
    until_told,
)
from tests.peers.lab.workloads import a_container, a_pod, stray


async def test_pods_without_a_lock_at_once_get_their_own_shares_with_unique(cluster):
    """Two bound back to back: the witness leaves one at a time, so none is guessed."""
    await cluster.start_registered_agent("--unlocked-pods", "unique")
    shares = {name: share(cluster, index) for name, index in (("one", 3), ("two", 4))}
    for name, mine in shares.items():
        first = a_container("prepare", script="true")
        pod = a_pod(name, a_container(gpus=0), inits=(first,))
        await create_by_hand(cluster, telling(cluster, pod))
        await annotate(cluster, name, [[mine], []])
    for name in shares:
        await bind(cluster, name)

    for name, mine in shares.items():
        await until_running(cluster, name)
        await until_told(cluster, name)
        seen = told_environment(cluster, name, "prepare")
        assert mine.uuid == seen["NVIDIA_VISIBLE_DEVICES"]
        assert f"{MIB}m" == seen["CUDA_DEVICE_MEMORY_LIMIT_0"]
        await until_bind_phase(cluster, name, annotations.PHASE_SUCCESS)


async def test_a_pod_without_a_lock_that_hamis_scheduler_did_not_bind_is_refused(cluster, agent):
    """One names its node itself, another one is bound by somebody else; both are annotated."""
    inits, mine = (a_container("prepare", script="true"),), share(cluster, 3)
    pods = [a_pod(name, a_container(gpus=0), inits=inits) for name in ("strayed", "by-others")]
    with frozen(cluster.kubelet.part):
        await create_by_hand(
            cluster, stray(pods[0]) | {"spec": pods[0]["spec"] | {"nodeName": NODE}}
        )
        await create_by_hand(cluster, pods[1])
        for pod in pods:
            await annotate(cluster, pod["metadata"]["name"], [[mine], []])
        await bind(cluster, "by-others")

    for name, why in (("strayed", "without nodeName"), ("by-others", "another scheduler bound it")):
        message = (await until_failed(cluster, name))["message"]
        assert why in message
        assert "[HA-2005]" in message
    assert 2 == len(agent.events("alloc.refused"))


async def test_without_hami_core_nothing_is_offered_and_nothing_takes_its_place(cluster, agent):
    """A pod that is bound here all the same is rejected, by the agent or by the kubelet itself."""
    library = cluster.hook / "libvgpu.so"
    content = library.read_bytes()
    library.unlink()
    try:
        await until_allocatable(cluster, 0)
        await place(cluster, a_pod("early"), [[share(cluster, 0)]])
        await until_failed(cluster, "early")
        assert not library.exists()
    finally:
        library.write_bytes(content)
    await until_allocatable(cluster, 80)
    await until_unlocked(cluster)

    await place(cluster, a_pod("later"), [[share(cluster, 0)]])

    await until_running(cluster, "later")
    assert agent.events("alloc.answered")
