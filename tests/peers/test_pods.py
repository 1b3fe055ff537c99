"""Pods of every shape, through webhook, scheduler, extender and kubelet, seen from their inside."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from agent.core import annotations
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.api import Object, key_of
from tests.peers.lab.audit import counted
from tests.peers.lab.cluster import ACCOUNT, Cluster
from tests.peers.lab.grants import (
    expected_environment,
    expected_mounts,
    grants,
    seen_environment,
    seen_mounts,
)
from tests.peers.lab.identities import NODE_USER
from tests.peers.lab.placement import gpu_uuids
from tests.peers.lab.requests import asked_since, mark_of_rest, refused
from tests.peers.lab.running import (
    as_seen,
    create,
    phase_of,
    until_settled,
    until_told,
    until_up,
)
from tests.peers.lab.workloads import a_container, a_pod, telling

UNCONTROLLED = a_container(env=[{"name": "CUDA_DISABLE_CONTROL", "value": "true"}])
SIDECAR = a_container("proxy", memory=1500, cores=5, restartPolicy="Always")
PODS = (
    a_pod("whole", a_container(memory=None, cores=None)),  # cores 100 come from the webhook
    a_pod("one", a_container(memory=4096, cores=30)),
    a_pod("pair", a_container(gpus=2, memory=2048, cores=None)),
    a_pod(
        "trio",
        a_container("left", memory=1024, cores=None),
        a_container("plain", gpus=0),
        a_container("right", memory=2048, cores=20),
    ),
    a_pod(
        "prepared",
        a_container(memory=2048, cores=None),
        inits=(a_container("load", memory=1024, cores=None, script="true"),),
    ),
    a_pod("escorted", a_container(memory=2048), inits=(SIDECAR,)),
    a_pod("uncontrolled", UNCONTROLLED),
    a_pod("ending", a_container(script="true"), restartPolicy="Never"),
)
WITHOUT_GPU = a_pod("without", a_container(gpus=0))
INIT_ONLY = a_pod(
    "init-only", a_container(gpus=0), inits=(a_container("load", memory=1024, script="true"),)
)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("user", [NODE_USER, ACCOUNT])
async def test_each_container_finds_inside_what_the_scheduler_wrote_for_it(cluster, user):
    await cluster.start_registered_agent(user=user)
    mark = await mark_of_rest(cluster)
    inside = cluster.root / f"inside-{user.rpartition(':')[2]}"
    pods = [telling(pod, inside) for pod in (*PODS, WITHOUT_GPU)]

    for pod in pods:
        await create(cluster, [pod])
        await until_up(cluster, [pod], 60.0)
        await until_told(inside, pod)
        if pod["metadata"]["name"] != "without":
            await until_settled(cluster, [pod])

    assert _expected(cluster, pods) == _seen(cluster, inside, pods)
    (whole,) = grants(as_seen(cluster, pods[0]))["main"]
    assert (81559, 100) == (whole.mib, whole.percent)
    assert _annotated(cluster, pods) == await _held(cluster)
    requests = await asked_since(cluster, mark, user, 2 * len(PODS))
    assert [] == refused(requests)
    assert Counter({"patch pods/status": len(PODS), "patch nodes": len(PODS)}) == counted(requests)


@pytest.mark.usefixtures("agent")
async def test_a_pod_whose_init_container_alone_has_a_gpu_is_refused_with_the_setting(cluster):
    await create(cluster, [INIT_ONLY])
    pods, key = cluster.pods, key_of(INIT_ONLY)
    await pods.until(lambda: is_refused(pods.objects, key), 30.0, "refused and marked as failed")

    status = as_seen(cluster, INIT_ONLY)["status"]
    assert "UnexpectedAdmissionError" == status["reason"]
    assert "allocation.unlockedPods" in status["message"]


def is_refused(pods: Mapping[str, Object], key: str) -> bool:
    """Whether the kubelet rejected a pod and the agent has marked it for HAMi."""
    if key not in pods:
        return False
    phase = pods[key]["metadata"].get("annotations", {}).get(annotations.BIND_PHASE)
    return "Failed" == phase_of(pods[key]) and annotations.PHASE_FAILED == phase


async def test_a_pod_whose_init_container_alone_has_a_gpu_can_be_served(cluster):
    await cluster.start_registered_agent("--unlocked-pods", "unique")
    inside = cluster.root / "inside-init-only"
    pod = telling(INIT_ONLY, inside)
    await create(cluster, [pod])
    await until_up(cluster, [pod], 60.0)
    await until_told(inside, pod)
    await until_settled(cluster, [pod])

    assert _expected(cluster, [pod]) == _seen(cluster, inside, [pod])


def _expected(cluster: Cluster, pods: list[Object]) -> dict[str, object]:
    gpus = gpu_uuids(cluster)
    found: dict[str, object] = {}
    for pod in pods:
        seen = as_seen(cluster, pod)
        name, uid = seen["metadata"]["name"], seen["metadata"]["uid"]
        for container, given in grants(seen).items():
            controlled = name != "uncontrolled"
            mounts = expected_mounts(uid, container, controlled=controlled) if given else {}
            environment = expected_environment(given, gpus)
            if not controlled:
                environment["CUDA_DISABLE_CONTROL"] = "true"
            found[f"{name}/{container}"] = (environment, mounts)
    return found


def _seen(cluster: Cluster, inside: Path, pods: list[Object]) -> dict[str, object]:
    return {
        f"{name}/{container}": (
            seen_environment(inside, name, container),
            seen_mounts(inside, name, container),
        )
        for pod in pods
        for name in [pod["metadata"]["name"]]
        for container in grants(as_seen(cluster, pod))
    }


def _annotated(cluster: Cluster, pods: list[Object]) -> dict[str, set[str]]:
    """The GPUs of each container that runs and has some."""
    return {
        f"{pod['metadata']['name']}/{container}": {one.uuid for one in given}
        for pod in (as_seen(cluster, pod) for pod in pods)
        for container, given in grants(pod).items()
        if given and container != "load" and pod["status"]["phase"] == "Running"
    }


async def _held(cluster: Cluster) -> dict[str, set[str]]:
    """The GPUs that the kubelet says each container holds."""
    held = await cluster.kubelet.held(RESOURCE)
    return {
        f"{key.partition('/')[2]}/{container}": {one.rpartition("-")[0] for one in ids}
        for (key, container), ids in held.items()
    }
