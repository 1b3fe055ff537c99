"""Pods that controllers make: a StatefulSet and a Job, and what each of their pods was given."""

from collections.abc import Iterator
from typing import Final

from tests.peers.lab.api import Object
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.grants import grants
from tests.peers.lab.node_state import notes_of
from tests.peers.lab.pods import phase_of, told_directory
from tests.peers.lab.waiting import until, until_answer
from tests.peers.lab.workloads import NAMESPACE, a_container, a_pod

SETS: Final = f"/apis/apps/v1/namespaces/{NAMESPACE}/statefulsets"
JOBS: Final = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
_UID: Final = {"name": "TOLD_BY", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}
_LIMIT: Final = "CUDA_DEVICE_MEMORY_LIMIT_0"
_VISIBLE: Final = "NVIDIA_VISIBLE_DEVICES"


def template(cluster: Cluster, name: str, *, memory: int, script: str, restarts: str) -> Object:
    """The template of pods that tell what they find inside by their UID, for names return."""
    tell = "env >/tell/$TOLD_BY.new && mv /tell/$TOLD_BY.new /tell/$TOLD_BY.env"
    told = {"name": "tell", "mountPath": "/tell"}
    main = a_container(memory=memory, script=f"{tell}; {script}", env=[_UID], volumeMounts=[told])
    where = {"path": str(told_directory(cluster)), "type": "DirectoryOrCreate"}
    volume = {"name": "tell", "hostPath": where}
    pod = a_pod(name, main, volumes=[volume], restartPolicy=restarts)
    return {"metadata": {"labels": {"app": name}}, "spec": pod["spec"]}


def a_set(cluster: Cluster, name: str, replicas: int) -> Object:
    """A StatefulSet whose pods have more memory with each revision."""
    made = template(cluster, name, memory=3000, script="sleep 3600", restarts="Always")
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "replicas": replicas,
            "serviceName": name,
            "selector": {"matchLabels": {"app": name}},
            "template": made,
        },
    }


def a_job(cluster: Cluster, name: str, completions: int, parallelism: int) -> Object:
    """A Job of short pods; none may fail."""
    made = template(cluster, name, memory=2000, script="sleep 1", restarts="Never")
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "completions": completions,
            "parallelism": parallelism,
            "backoffLimit": 0,
            "template": made,
        },
    }


async def restart(cluster: Cluster, name: str, revision: int) -> None:
    """Have a StatefulSet replace its pods by others of the same names with another share."""
    path = f"{SETS}/{name}"
    body = (await cluster.api.get(path))["spec"]["template"]["spec"]
    body["containers"][0]["resources"]["limits"]["nvidia.com/gpumem"] = str(3000 + 100 * revision)
    await cluster.api.patch(path, {"spec": {"template": {"spec": body}}})


async def until_rolled_out(cluster: Cluster, name: str, within: float) -> None:
    """Return once all pods of a StatefulSet are of the last revision and ready."""

    async def is_done() -> bool:
        held = await cluster.api.get(f"{SETS}/{name}")
        wanted, status = held["spec"]["replicas"], held["status"]
        is_seen = status.get("observedGeneration") == held["metadata"]["generation"]
        counts = [status.get(one) for one in ("updatedReplicas", "readyReplicas", "replicas")]
        return is_seen and counts == [wanted] * 3

    await until_answer(is_done, within, lambda: f"{name} is not rolled out: {failed(cluster)}")


async def until_complete(cluster: Cluster, name: str, within: float) -> None:
    """Return once a Job has all its completions."""

    async def is_done() -> bool:
        held = await cluster.api.get(f"{JOBS}/{name}")
        return bool(held["status"].get("succeeded") == held["spec"]["completions"])

    await until_answer(is_done, within, lambda: f"{name} is not complete: {failed(cluster)}")


def seen_pods(cluster: Cluster) -> Iterator[Object]:
    """Each pod that was there, by its UID, as it was seen last before it was deleted."""
    last: dict[str, Object] = {}
    for sightings in cluster.pods.history.values():
        for one in sightings:
            last[one.object["metadata"]["uid"]] = one.object
    yield from last.values()


def failed(cluster: Cluster) -> list[str]:
    """What pods failed of."""
    return [
        f"{pod['metadata']['name']}: {pod['status'].get('message', '')}"
        for pod in seen_pods(cluster)
        if phase_of(pod) == "Failed"
    ]


def wrong_inside(cluster: Cluster, app: str) -> list[str]:
    """Pods whose container found something else than the scheduler had written for it."""
    wrong = []
    for pod in seen_pods(cluster):
        metadata = pod["metadata"]
        if (metadata.get("labels") or {}).get("app") != app or not notes_of(pod):
            continue
        told = told_directory(cluster) / f"{metadata['uid']}.env"
        if not told.exists():
            continue
        inside = dict(line.split("=", 1) for line in told.read_text().splitlines() if "=" in line)
        (given,) = grants(pod)["main"]
        if (f"{given.mib}m", given.uuid) != (inside.get(_LIMIT), inside.get(_VISIBLE)):
            wrong.append(f"{metadata['name']} {given}: {inside}")
    return wrong


async def until_told_count(cluster: Cluster, count: int) -> None:
    """Return once so many pods of templates have told, which is after they are ready."""
    await until(
        lambda: told_count(cluster) >= count, 40.0, lambda: f"{told_count(cluster)} have told"
    )


def told_count(cluster: Cluster) -> int:
    """How many pods of templates have told."""
    return len([*told_directory(cluster).glob("*-*-*-*-*.env")])
