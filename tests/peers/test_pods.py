"""Pods of every shape, through webhook, scheduler, extender and kubelet, seen from their inside."""

from collections import Counter

import pytest

from tests.peers.lab.control import counted
from tests.peers.lab.grants import WHOLE, grants
from tests.peers.lab.part import until
from tests.peers.lab.pods import a_container, a_pod, name_of, phase_of
from tests.peers.lab.running import ACCOUNT, refused

AT_REST = ("report.written", "pods.listed")
"""What an agent has done with the start that asks the API server."""
UNCONTROLLED = a_container(env=[{"name": "CUDA_DISABLE_CONTROL", "value": "true"}])
SIDECAR = a_container("proxy", memory=1500, cores=5, restartPolicy="Always")
POD_KINDS = (
    # The webhook gives it cores 100 and its scheduler: before 2.8 it leaves alone what names one.
    a_pod("whole", a_container(memory=None, cores=None), schedulerName="default-scheduler"),
    a_pod("one", a_container(memory=4096, cores=30)),
    a_pod("pair", a_container(gpus=2, memory=2048, cores=None)),
    a_pod(
        "trio",
        a_container("left", memory=1024, cores=None),
        a_container("plain", gpus=0),
        a_container("right", memory=2048, cores=20),
    ),
    a_pod("uncontrolled", UNCONTROLLED),
    a_pod("ending", a_container(script="true"), restartPolicy="Never"),
)
WITH_INITS = (
    a_pod(
        "prepared",
        a_container(memory=2048, cores=None),
        inits=(a_container("load", memory=1024, cores=None, script="true"),),
    ),
    a_pod("escorted", a_container(memory=2048), inits=(SIDECAR,)),
)
WITHOUT_GPU = a_pod("without", a_container(gpus=0))
LOAD = a_container("load", memory=1024, script="true")
INIT_ONLY = a_pod("init-only", a_container(gpus=0), inits=(LOAD,))
LOCKLESS = (
    INIT_ONLY,
    a_pod(
        "two-inits",
        a_container(gpus=0),
        inits=(LOAD, a_container("again", gpus=2, memory=None, script="true")),
    ),
    a_pod("sidecar-only", a_container(gpus=0), inits=(SIDECAR,)),
)
"""HAMi up to and including 2.10 takes no lock for them."""


@pytest.mark.timeout(240)
async def test_each_container_finds_inside_what_the_scheduler_wrote_for_it(cluster):
    agent = await cluster.start_registered_agent(user=ACCOUNT)
    # A watch shows a write before the audit log does; what the writer has an answer to is in both.
    await until(lambda: all(map(agent.events_since_start, AT_REST)), 30.0, agent.part.tail)
    mark = cluster.plane.audit.mark()
    served = POD_KINDS + (WITH_INITS if cluster.release.serves_inits else ())
    pods = [cluster.telling(pod) for pod in (*served, WITHOUT_GPU)]
    names = [*map(name_of, pods)]

    for pod, name in zip(pods, names, strict=True):
        await cluster.run(pod, within=60.0)
        assert cluster.expected_inside(name) == await cluster.seen_inside(name)
        if name != "without":
            await cluster.until_settled(name)

    (whole,) = grants(cluster.as_seen("whole"))["main"]
    assert WHOLE[:2] == (whole.memory_mib, whole.core_percent)
    for name in names:
        pod = cluster.as_seen(name)
        if phase_of(pod) == "Running":
            given = {who: sorted(one.uuid for one in shares) for who, shares in grants(pod).items()}
            asked = {who: gpus for who, gpus in given.items() if gpus and who != "load"}
            assert asked == await cluster.gpus_held(name)
    # Two writes, and a look before the answer. Behind its init container "prepared" is looked at
    # again: PodResources lists none.
    wanted = Counter(dict.fromkeys(("get pods", "patch pods/status", "patch nodes"), len(served)))
    wanted["get pods"] += int(cluster.release.serves_inits)
    log = cluster.plane.audit
    await until(
        lambda: counted(log.since(mark, ACCOUNT)) >= wanted, 10.0, lambda: f"{wanted} is not there"
    )
    assert wanted == counted(log.since(mark, ACCOUNT))
    assert [] == refused(log.since(mark, ACCOUNT))


@pytest.mark.from_release((2, 8, 0), "it writes no GPUs of init containers")
async def test_a_pod_whose_init_container_alone_has_a_gpu_can_be_served(cluster, agent):
    for pod in LOCKLESS:
        name = name_of(pod)
        await cluster.run(cluster.telling(pod), within=60.0)
        await cluster.until_settled(name)
        assert cluster.expected_inside(name) == await cluster.seen_inside(name)
    assert [] == agent.events("alloc.refused")


pytestmark = pytest.mark.timeout(420)


async def test_pods_with_an_init_container_without_gpus_are_served_as_the_scheduler_places_them(
    cluster, agent
):
    """HAMi 2.10 counts such pods as nothing once the init container is done."""
    init = a_container("prepare", gpus=0, script="true")
    for number in range(10):
        name, main = f"prepared-{number}", a_container(memory=40000, cores=0)
        await cluster.run(cluster.telling(a_pod(name, main, inits=(init,))))
        assert cluster.expected_inside(name) == await cluster.seen_inside(name)
    assert [] == agent.events("alloc.refused")


# The node lock beside a real kubelet: who is served, who is refused, and when it comes free.


async def test_the_lock_of_a_pod_that_the_kubelet_rejected_unasked_is_released(cluster, agent):
    forbidden = {"sysctls": [{"name": "kernel.msgmax", "value": "65536"}]}
    rejected = a_pod("rejected", securityContext=forbidden)

    await cluster.place(rejected, [[cluster.share(0)]])

    status = await cluster.until_failed("rejected")
    assert "SysctlForbidden" == status["reason"]
    assert not agent.events("alloc.answered") + agent.events("alloc.refused")
    await cluster.until_unlocked()
