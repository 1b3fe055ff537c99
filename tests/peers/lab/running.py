"""Pods on their way: created, running, told what they found, settled in the API."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

from agent.core import annotations
from tests.peers.lab.api import Object, key_of
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.placement import PODS, lock_text
from tests.peers.lab.waiting import until


class FailedPodError(AssertionError):
    """A pod ended as Failed."""


def phase_of(pod: Object) -> str:
    """The pod's phase."""
    return str(pod.get("status", {}).get("phase", ""))


def is_up(pod: Object) -> bool:
    """Whether a pod is Ready, or has done its work."""
    conditions = pod.get("status", {}).get("conditions") or ()
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    return ready or phase_of(pod) == "Succeeded"


def is_settled(pod: Object) -> bool:
    """Whether HAMi's annotations say that every container was served."""
    notes = pod["metadata"].get("annotations", {})
    left = notes.get(annotations.TO_ALLOCATE, "")
    done = notes.get(annotations.BIND_PHASE) == annotations.PHASE_SUCCESS
    return done and not left.strip(";")


async def create(cluster: Cluster, pods: Iterable[Object]) -> float:
    """Create pods at once; when that began, by the loop's clock. Raises RefusedError in a group."""
    begun = asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as group:
        for pod in pods:
            group.create_task(cluster.api.create(PODS, pod))
    return begun


async def until_up(cluster: Cluster, pods: Iterable[Object], within: float) -> dict[str, float]:
    """When each pod was first seen Ready or Succeeded, by its name.

    Raises:
        FailedPodError: one failed.
        TimeoutError: not all are; the text tells how they are.
    """
    keys = [key_of(pod) for pod in pods]

    def all_up() -> bool:
        present = [cluster.pods.objects[key] for key in keys if key in cluster.pods.objects]
        for pod in present:
            if phase_of(pod) == "Failed":
                raise FailedPodError(f"{key_of(pod)}: {pod['status']}")
        return len(present) == len(keys) and all(map(is_up, present))

    try:
        await cluster.pods.until(all_up, within, "pods are up")
    except TimeoutError as error:
        raise TimeoutError(f"{error}: {_told(cluster, keys)}") from None
    times = {key.partition("/")[2]: cluster.pods.when(key, is_up) for key in keys}
    return {name: at for name, at in times.items() if at is not None}


def _told(cluster: Cluster, keys: Iterable[str]) -> str:
    waiting = (cluster.pods.objects.get(key) for key in keys)
    return "; ".join(
        f"{key_of(pod)} {phase_of(pod)} {pod['metadata'].get('annotations')} {pod['status']}"
        for pod in waiting
        if pod is not None and not is_up(pod)
    )


async def until_settled(cluster: Cluster, pods: Iterable[Object], within: float = 10.0) -> None:
    """Return once all are settled and the node's lock is free. Raises TimeoutError."""
    keys = [key_of(pod) for pod in pods]
    await cluster.pods.until(
        lambda: all(is_settled(cluster.pods.objects[key]) for key in keys),
        within,
        "bind-phase success and nothing left to allocate",
    )
    await cluster.nodes.until(lambda: lock_text(cluster) is None, within, "the lock is free")


async def until_told(directory: Path, pod: Object, within: float = 10.0) -> None:
    """Return once every container of a `telling` pod has told its inside. Raises TimeoutError."""
    spec, name = pod["spec"], pod["metadata"]["name"]
    containers = (*spec.get("initContainers", ()), *spec["containers"])
    marks = [directory / f"{name}.{one['name']}.done" for one in containers]

    def all_told() -> bool:
        return all(mark.exists() for mark in marks)

    await until(all_told, within, lambda: f"{name} does not tell: {sorted(directory.iterdir())}")


def as_seen(cluster: Cluster, pod: Object) -> Object:
    """A pod as the API server has it now."""
    return cluster.pods.objects[key_of(pod)]
