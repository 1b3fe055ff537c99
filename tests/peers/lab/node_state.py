"""The Node as API server and kubelet show it: its notes, its lock, its GPUs and slices."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import aiohttp

from agent import cluster as annotations
from agent.model import GpuUuid
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.api import Object, RefusedError
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.identities import NODE
from tests.peers.lab.tidy import NODE_PATH
from tests.peers.lab.waiting import until_answer

PATIENCE: Final = 30.0
"""Seconds for what takes two or three on a quiet machine."""

_FIELDS: Final = ("id", "count", "devmem", "devcore", "type", "numa", "health", "index", "mode")
_NUMBERS: Final = ("count", "devmem", "devcore", "numa", "index")


def node_of(cluster: Cluster) -> Object:
    """The Node as the watch has it now."""
    return cluster.nodes.objects[NODE]


def notes_of(item: Object) -> Mapping[str, str]:
    """The annotations of an object."""
    noted: Mapping[str, str] = item["metadata"].get("annotations") or {}
    return noted


def gpu_uuids(cluster: Cluster) -> list[GpuUuid]:
    """The GPUs of the Node by index, as the register annotation names them."""
    return [GpuUuid(gpu["id"]) for gpu in registered(node_of(cluster))]


def registered_health(node: Object) -> dict[GpuUuid, bool]:
    """By GPU, what the register annotation says; empty where there is none."""
    return {GpuUuid(gpu["id"]): bool(gpu.get("health")) for gpu in registered(node)}


def registered(node: Object) -> list[dict[str, Any]]:
    """The register annotation, read by nothing of ours; in JSON what is zero is absent."""
    return gpus_of(notes_of(node).get(annotations.REGISTER, "[]"))


def gpus_of(text: str) -> list[dict[str, Any]]:
    """The GPUs of the annotation's text by index, in both of its forms under the names of JSON."""
    gpus = json.loads(text) if text.startswith("[") else [*map(_record, text.split(":")[:-1])]
    return sorted(gpus, key=lambda gpu: gpu.get("index", 0))


def _record(text: str) -> dict[str, Any]:
    """One GPU as schedulers before 2.8 read it. Source: HAMi v2.7.1 pkg/device/devices.go."""
    fields = dict(zip(_FIELDS, text.split(","), strict=True))
    numbers = {name: int(fields[name]) for name in _NUMBERS}
    return {**fields, **numbers, "health": fields["health"] == "true"}


def text_of(gpus: Sequence[Mapping[str, Any]], *, colon: bool) -> str:
    """The annotation of those GPUs in one of its forms."""
    if not colon:
        return json.dumps(gpus)
    ill = ({**gpu, "health": str(gpu["health"]).lower()} for gpu in gpus)
    return "".join(",".join(str(gpu[name]) for name in _FIELDS) + ":" for gpu in ill)


def lock_text(cluster: Cluster) -> str | None:
    """The node's lock as the watch has shown it, which lags behind; see `lock_held`."""
    return notes_of(node_of(cluster)).get(annotations.MUTEX_LOCK)


async def lock_held(cluster: Cluster) -> str | None:
    """The node's lock as the API server has it. Raises RefusedError, aiohttp.ClientError."""
    return notes_of(await cluster.api.get(NODE_PATH)).get(annotations.MUTEX_LOCK)


async def until_unlocked(cluster: Cluster, within: float = PATIENCE) -> None:
    """Return once the node has no lock. Raises TimeoutError.

    The API server is asked, for the watch may not even have shown the lock yet; while it is away
    nobody knows.
    """

    async def is_free() -> bool:
        try:
            return await lock_held(cluster) is None
        except (aiohttp.ClientError, OSError, RefusedError):
            return False

    await until_answer(is_free, within, lambda: f"the lock stays: {lock_text(cluster)}")


async def until_allocatable(
    cluster: Cluster, slices: int = 80, within: float = 20.0, resource: str = RESOURCE
) -> None:
    """Return once PodResources, which may be away, tells of so many slices. Raises TimeoutError."""
    found: frozenset[str] | None = None

    async def is_told() -> bool:
        nonlocal found
        found = await cluster.kubelet.offered(resource)
        return found is not None and slices == len(found)

    def why() -> str:
        told = "no answer" if found is None else f"{len(found)} slices"
        return f"{told} in PodResources, not {slices}"

    await until_answer(is_told, within, why)


async def until_offered(cluster: Cluster, slices: int, within: float = 20.0) -> None:
    """Return once the Node offers so many slices, which it does some time after PodResources.

    Raises:
        TimeoutError: it does not.
    """

    def offered() -> int:
        status = node_of(cluster)["status"]
        return int(status.get("allocatable", {}).get(RESOURCE, "0"))

    await cluster.nodes.until(lambda: slices == offered(), within, f"{slices} slices on the Node")
