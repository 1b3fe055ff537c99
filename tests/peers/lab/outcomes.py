"""What became of pods: they run, they were refused, and what their containers saw."""

import asyncio
import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from agent.core import annotations
from agent.core.slices import split_slice_id
from tests.peers.lab.agents import RESOURCE, Agent
from tests.peers.lab.api import Object
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.part import Part
from tests.peers.lab.placement import PODS, lock_text
from tests.peers.lab.tidy import NODE_PATH
from tests.peers.lab.waiting import until, until_answer
from tests.peers.lab.workloads import NAMESPACE, told_environment

PATIENCE: Final = 30.0
"""Seconds for what takes two or three on a quiet machine."""


async def start_named(
    cluster: Cluster, name: str, *flags: str, gpus: str = "h100:8", slices: int = 80
) -> Agent:
    """Start an agent with a log of its own, so that its events are only this agent's.

    Returns when its slices are offered. Raises RefusedError, OSError, TimeoutError.
    """

    async def counts() -> bool:
        return slices == len(await cluster.kubelet.allocatable(RESOURCE))

    made = await cluster.start_agent(*flags, gpus=gpus, name=f"agent-{name}")
    await cluster.nodes.until(lambda: cluster.is_sharing(slices), PATIENCE, "no slices")
    await until_answer(counts, PATIENCE, made.part.tail)  # the Node may tell of an earlier agent
    return made


def key(name: str) -> str:
    """How the watch of the pods names a pod."""
    return f"{NAMESPACE}/{name}"


def status_of(cluster: Cluster, name: str) -> Object:
    """The status of a pod as it is now; empty while the pod is not there."""
    status: Object = cluster.pods.objects.get(key(name), {}).get("status", {})
    return status


def annotations_of(cluster: Cluster, name: str) -> Mapping[str, str]:
    """The annotations of a pod as they are now."""
    noted: Mapping[str, str] = cluster.pods.objects[key(name)]["metadata"].get("annotations", {})
    return noted


def is_running(cluster: Cluster, name: str) -> bool:
    """Whether every app container of the pod runs."""
    containers = status_of(cluster, name).get("containerStatuses") or []
    return bool(containers) and all("running" in one["state"] for one in containers)


async def until_running(cluster: Cluster, *names: str, within: float = PATIENCE) -> None:
    """Return once all these pods run. Raises TimeoutError, with the messages of the others."""
    try:
        await cluster.pods.until(
            lambda: all(is_running(cluster, name) for name in names), within, "pods do not run"
        )
    except TimeoutError as error:
        silent = {
            name: (one.get("phase"), one.get("message"))
            for name in names
            if not is_running(cluster, name)
            for one in [status_of(cluster, name)]
        }
        raise TimeoutError(f"{error}: {silent}") from None


async def until_failed(cluster: Cluster, name: str, within: float = PATIENCE) -> Object:
    """The status of a pod once its phase is Failed. Raises TimeoutError."""
    await cluster.pods.until(
        lambda: status_of(cluster, name).get("phase") == "Failed", within, f"{name} does not fail"
    )
    return status_of(cluster, name)


async def until_unlocked(cluster: Cluster, within: float = PATIENCE) -> float:
    """When, on the loop's clock, the node has no lock. Raises TimeoutError.

    The API server is asked, for the watch may not even have shown the lock yet.
    """

    async def is_free() -> bool:
        noted = (await cluster.api.get(NODE_PATH))["metadata"].get("annotations") or {}
        return annotations.MUTEX_LOCK not in noted

    await until_answer(is_free, within, lambda: f"the lock stays: {lock_text(cluster)}")
    return asyncio.get_running_loop().time()


async def until_taken_up(cluster: Cluster, name: str) -> None:
    """Return once the kubelet has begun with a pod, whose name no test before has used.

    Raises TimeoutError.
    """
    line = re.compile(rf'"SyncLoop ADD".*"{NAMESPACE}/{name}"')
    part = cluster.kubelet.part
    await until(lambda: line.search(part.said()) is not None, PATIENCE, part.tail)


async def until_settled(cluster: Cluster, name: str, phase: str) -> None:
    """Return once the pod's bind-phase is `phase`. Raises TimeoutError."""
    await cluster.pods.until(
        lambda: annotations_of(cluster, name).get(annotations.BIND_PHASE) == phase,
        PATIENCE,
        f"bind-phase of {name} is not {phase}",
    )


async def until_deleted(cluster: Cluster, name: str) -> None:
    """Return once the pod is gone from the API server. Raises TimeoutError."""
    await cluster.pods.until(
        lambda: key(name) not in cluster.pods.objects, PATIENCE, f"{name} is not deleted"
    )


async def delete(cluster: Cluster, name: str, grace: int | None = None) -> None:
    """Ask the API server to delete a pod."""
    await cluster.api.delete(f"{PODS}/{name}", grace=grace)


async def told(
    cluster: Cluster, directory: Path, name: str, container: str = "main"
) -> Mapping[str, str]:
    """The environment of a container of a pod that tells it, once it did."""
    done = directory / f"{name}.{container}.done"
    await until(done.exists, PATIENCE, lambda: f"{name} says nothing: {status_of(cluster, name)}")
    return told_environment(directory, name, container)


def running_containers(cluster: Cluster, name: str) -> Mapping[str, tuple[str, int]]:
    """The runtime id and the restarts of each container of a pod."""
    containers = status_of(cluster, name)["containerStatuses"]
    return {one["name"]: (one["containerID"], one["restartCount"]) for one in containers}


async def gpus_held(cluster: Cluster, name: str) -> Mapping[str, list[str]]:
    """The GPUs of the ids that the kubelet gave each container of a pod, sorted."""
    held = await cluster.kubelet.held(RESOURCE)
    pairs = {
        container: [split_slice_id(text) for text in ids]
        for (pod, container), ids in held.items()
        if pod == key(name)
    }
    return {who: sorted(pair[0] for pair in found if pair) for who, found in pairs.items()}


@contextlib.contextmanager
def frozen(part: Part) -> Iterator[None]:
    """A program stands still while the block runs."""
    part.freeze()
    try:
        yield
    finally:
        part.thaw()
