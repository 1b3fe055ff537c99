"""The Node as API server and kubelet show it: its notes, its lock, its GPUs and slices."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import aiohttp

from agent import cluster as annotations
from agent.model import GpuUuid
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.api import Object, RefusedError
from tests.peers.lab.control import NODE
from tests.peers.lab.part import until_answer
from tests.peers.lab.running import Running

# The node as a test found it.

NODE_PATH: Final = f"/api/v1/nodes/{NODE}"
_NOTED: Final = "hami.io/"
"""What HAMi's annotations begin with: its scheduler notes more than one vendor."""


def _version(node: Object) -> int:
    return int(node["metadata"]["resourceVersion"])


PATIENCE: Final = 30.0
"""Seconds for what takes two or three on a quiet machine."""

_FIELDS: Final = ("id", "count", "devmem", "devcore", "type", "numa", "health", "index", "mode")
_NUMBERS: Final = ("count", "devmem", "devcore", "numa", "index")


def notes_of(item: Object) -> Mapping[str, str]:
    """The annotations of an object."""
    noted: Mapping[str, str] = item["metadata"].get("annotations") or {}
    return noted


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


# How many slices the kubelet offers, looked at all the time: gaps, and how long they were.

_STEP: Final = 0.05
"""Seconds between two looks; the kubelet answers no more than 100 in a second to all together."""


class WithNode(Running):
    """The Node as API server and kubelet show it."""

    async def remove(self, path: str, grace: int | None = None) -> None:
        """Delete an object that may be gone, and leave a controller's pods to whoever tidies up."""
        try:
            await self.api.delete(path, grace=grace)
        except RefusedError as error:
            if error.code != 404:
                raise

    async def remove_pods(self) -> None:
        """Delete every pod, wait until the kubelet has forgotten all, and free the Node."""
        # The watch may not have shown the newest yet.
        for pod in (await self.api.get("/api/v1/pods"))["items"]:
            namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
            await self.remove(f"/api/v1/namespaces/{namespace}/pods/{name}", grace=0)
        await until_answer(self._has_none, 30.0, lambda: "pods stay")
        await self.pods.until(lambda: not self.pods.objects, 30.0, "the watch shows pods")
        node = await self.api.get(NODE_PATH)
        notes = node["metadata"].get("annotations") or {}
        noted = dict.fromkeys(name for name in notes if name.startswith(_NOTED))
        if noted:
            node = await self.api.patch(NODE_PATH, {"metadata": {"annotations": noted}})
        # Not until nothing is noted: HAMi's scheduler asks for a handshake as soon as it sees none.
        await self.nodes.until(
            lambda: _version(self.nodes.objects[NODE]) >= _version(node),
            30.0,
            "the watch does not show the Node without notes",
        )

    async def _has_none(self) -> bool:
        return not (await self.api.get("/api/v1/pods"))["items"]

    def node_of(self) -> Object:
        """The Node as the watch has it now."""
        return self.nodes.objects[NODE]

    def gpu_uuids(self) -> list[GpuUuid]:
        """The GPUs of the Node by index, as the register annotation names them."""
        return [GpuUuid(gpu["id"]) for gpu in registered(self.node_of())]

    def lock_text(self) -> str | None:
        """The node's lock as the watch has shown it, which lags behind; see `lock_held`."""
        return notes_of(self.node_of()).get(annotations.MUTEX_LOCK)

    async def lock_held(self) -> str | None:
        """The node's lock as the API server has it. Raises RefusedError, aiohttp.ClientError."""
        return notes_of(await self.api.get(NODE_PATH)).get(annotations.MUTEX_LOCK)

    async def until_unlocked(self, within: float = PATIENCE) -> None:
        """Return once the node has no lock. Raises TimeoutError.

        The API server is asked, for the watch may not even have shown the lock yet; while it is
        away nobody knows.
        """

        async def is_free() -> bool:
            try:
                return await self.lock_held() is None
            except (aiohttp.ClientError, OSError, RefusedError):
                return False

        await until_answer(is_free, within, lambda: f"the lock stays: {self.lock_text()}")

    async def until_allocatable(
        self, slices: int = 80, within: float = 20.0, resource: str = RESOURCE
    ) -> None:
        """Return once PodResources tells of so many slices. Raises TimeoutError."""
        found: frozenset[str] | None = None

        async def is_told() -> bool:
            nonlocal found
            found = await self.kubelet.offered(resource)
            return found is not None and slices == len(found)

        def why() -> str:
            told = "no answer" if found is None else f"{len(found)} slices"
            return f"{told} in PodResources, not {slices}"

        await until_answer(is_told, within, why)

    async def until_offered(self, slices: int, within: float = 20.0) -> None:
        """Return once the Node offers so many slices: some time after PodResources does."""

        def offered() -> int:
            status = self.node_of()["status"]
            return int(status.get("allocatable", {}).get(RESOURCE, "0"))

        await self.nodes.until(lambda: slices == offered(), within, f"{slices} slices on the Node")

    @contextlib.asynccontextmanager
    async def watched_capacity(self, whole: int = 80) -> AsyncIterator[list[float]]:
        """Seconds of each time in which the kubelet offered fewer slices, until the block ends.

        The kubelet must live; what it does not answer is no look.
        """
        gaps = list[float]()
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(self._look(whole, gaps))
            try:
                yield gaps
            finally:
                looking.cancel()

    async def _look(self, whole: int, gaps: list[float]) -> None:
        loop = asyncio.get_running_loop()
        began: float | None = None
        while True:
            found = await self.kubelet.offered(RESOURCE)
            if found is not None and len(found) < whole:
                began = loop.time() if began is None else began
            elif found is not None and began is not None:
                gaps.append(loop.time() - began)
                began = None
            await asyncio.sleep(_STEP)
