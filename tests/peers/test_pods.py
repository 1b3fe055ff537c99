"""Pods of every shape, through webhook, scheduler, extender and kubelet, seen from their inside."""

from collections import Counter

import pytest

from agent import cluster as annotations
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.audit import counted
from tests.peers.lab.cluster import ACCOUNT, Cluster
from tests.peers.lab.faults import frozen
from tests.peers.lab.grants import WHOLE, expected_inside, grants, seen_inside
from tests.peers.lab.node_state import until_unlocked
from tests.peers.lab.placement import annotate, place, share
from tests.peers.lab.pods import (
    as_seen,
    create,
    gpu_of,
    name_of,
    phase_of,
    run,
    telling,
    until_bind_phase,
    until_failed,
    until_settled,
)
from tests.peers.lab.requests import asked_since, mark_of_rest, of_pods, refused
from tests.peers.lab.workloads import a_container, a_pod

UNCONTROLLED = a_container(env=[{"name": "CUDA_DISABLE_CONTROL", "value": "true"}])
SIDECAR = a_container("proxy", memory=1500, cores=5, restartPolicy="Always")
PODS = (
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
    await cluster.start_registered_agent(user=ACCOUNT)
    mark = await mark_of_rest(cluster)
    served = PODS + (WITH_INITS if cluster.release.serves_inits else ())
    pods = [telling(cluster, pod) for pod in (*served, WITHOUT_GPU)]
    names = [*map(name_of, pods)]

    for pod, name in zip(pods, names, strict=True):
        await run(cluster, pod, within=60.0)
        assert expected_inside(cluster, name) == await seen_inside(cluster, name)
        if name != "without":
            await until_settled(cluster, name)

    (whole,) = grants(as_seen(cluster, "whole"))["main"]
    assert WHOLE[:2] == (whole.mib, whole.percent)
    assert _annotated(cluster, names) == await _held(cluster)
    # Behind its init container "prepared" is looked at again: PodResources lists none.
    wanted = of_pods(len(served)) + Counter({"get pods": int(cluster.release.serves_inits)})
    requests = await asked_since(cluster, mark, ACCOUNT, wanted)
    assert [] == refused(requests)
    assert wanted == counted(requests)


async def test_a_pod_whose_init_container_alone_has_a_gpu_is_refused_with_the_setting(cluster):
    await cluster.start_registered_agent("--unlocked-pods", "strict")
    await create(cluster, INIT_ONLY)
    status = await until_failed(cluster, "init-only")
    await until_bind_phase(cluster, "init-only", annotations.PHASE_FAILED)

    assert "UnexpectedAdmissionError" == status["reason"]
    assert "set allocation.unlockedPods to scheduled" in status["message"]


@pytest.mark.parametrize("policy", ["scheduled", "unique"])
async def test_a_pod_whose_init_container_alone_has_a_gpu_can_be_served(cluster, policy):
    flags = ("--unlocked-pods", policy) if policy == "unique" else ()
    agent = await cluster.start_registered_agent(*flags)
    for pod in LOCKLESS:
        name = name_of(pod)
        await run(cluster, telling(cluster, pod), within=60.0)
        await until_settled(cluster, name)
        assert expected_inside(cluster, name) == await seen_inside(cluster, name)
    assert [] == agent.events("alloc.refused")


async def test_no_more_is_given_than_was_requested_whatever_the_annotation_says(cluster, agent):
    """Its tenant edits it between the bind and the kubelet's request."""
    for name, amounts in (("more", (3001, 10)), ("all", (0, 10)), ("free", (3000, 0))):
        with frozen(cluster.kubelet.part):
            await place(cluster, a_pod(name), [[share(cluster, 0)]])
            await annotate(cluster, name, [[share(cluster, 0, *amounts)]])
        status = await until_failed(cluster, name)
        assert "requests 3000 MiB and 10 % of the compute" in status["message"]
        assert "[HA-3007]" in status["message"]
        await until_unlocked(cluster)
    assert 3 == len(agent.events("alloc.refused"))


def _annotated(cluster: Cluster, names: list[str]) -> dict[str, set[str]]:
    """The GPUs of each container that runs and has some."""
    return {
        f"{name}/{container}": {one.uuid for one in given}
        for name in names
        for container, given in grants(as_seen(cluster, name)).items()
        if given and container != "load" and phase_of(as_seen(cluster, name)) == "Running"
    }


async def _held(cluster: Cluster) -> dict[str, set[str]]:
    """The GPUs that the kubelet says each container holds."""
    held = await cluster.kubelet.held(RESOURCE)
    return {
        f"{key.partition('/')[2]}/{container}": {gpu_of(one) for one in ids}
        for (key, container), ids in held.items()
    }
