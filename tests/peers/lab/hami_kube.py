"""What a stand-in for HAMi's plugin reads and writes at the API server; see lab/hami_plugin.py.

Source: HAMi v2.10 pkg/util/util.go (GetPendingPod), pkg/device/devices.go, pkg/util/nodelock.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Final

from tests.peers.lab.api import Api, Object, RefusedError

HANDSHAKE: Final = "hami.io/node-handshake"
REGISTER: Final = "hami.io/node-nvidia-register"
LOCK: Final = "hami.io/mutex.lock"
TO_ALLOCATE: Final = "hami.io/vgpu-devices-to-allocate"
BIND_TIME: Final = "hami.io/bind-time"
BIND_PHASE: Final = "hami.io/bind-phase"
VGPU_NODE: Final = "hami.io/vgpu-node"
_OPEN: Final = frozenset({"allocating", "success"})
"""Bind phases of a pod of which a container may still be asked for."""
_TRIES: Final = 5
_PAUSE: Final = 0.1
_CONFLICT: Final = 409

Group = list[list[str]]
"""A container's devices, each with its fields as text: UUID, type, MiB, percent of the cores."""


def decoded(text: str) -> list[Group]:
    """The groups of a pod's annotation, empty ones too."""
    return [
        [device.split(",") for device in group.split(":") if "," in device]
        for group in text.split(";")
    ]


def encoded(groups: Sequence[Group]) -> str:
    """The text for groups: one `;` longer than what they were read from."""
    return "".join("".join(f"{','.join(device)}:" for device in group) + ";" for group in groups)


class Kube:
    """What the plugin asks the API server and tells it."""

    def __init__(self, api: Api, node: str, manager: str) -> None:
        self._api = api
        self._manager = manager
        self._path = f"/api/v1/nodes/{node}"
        self._node = node

    async def pending(self) -> Object:
        """The pod that an Allocate is for: the lock's owner, else the first that is allocating.

        Raises:
            LookupError: there is none.
            RefusedError: the lock's owner cannot be read.
        """
        _, _, owner = (await self._lock()).partition(",")
        if owner:
            namespace, _, name = owner.partition(",")
            return await self._api.get(f"/api/v1/namespaces/{namespace}/pods/{name}")
        listed = await self._api.get("/api/v1/pods", fieldSelector=f"spec.nodeName={self._node}")
        for pod in listed["items"]:
            notes = notes_of(pod)
            is_bound = BIND_TIME in notes and notes.get(VGPU_NODE) == self._node
            phase = notes.get(BIND_PHASE)
            if pod["status"].get("phase") == "Pending" and is_bound and phase in _OPEN:
                return pod
        raise LookupError(f"no binding pod found on node {self._node}")

    async def annotate(self, pod: Object, notes: Mapping[str, str]) -> Object:
        """Patch annotations of a pod; the pod as it is then."""
        path = f"{_path(pod)}?fieldManager={self._manager}"
        return await self._api.patch(path, {"metadata": {"annotations": notes}})

    async def release(self, pod: Object) -> None:
        """Take the node's lock away if it is this pod's. Raises RefusedError."""
        owner = f",{pod['metadata']['namespace']},{pod['metadata']['name']}"
        for tries in range(1, _TRIES + 1):
            node = await self._api.get(self._path)
            if not notes_of(node).get(LOCK, "").endswith(owner):
                return
            version = node["metadata"]["resourceVersion"]
            body = {"metadata": {"annotations": {LOCK: None}, "resourceVersion": version}}
            try:
                await self._api.patch(f"{self._path}?fieldManager={self._manager}", body)
            except RefusedError as error:
                if error.code != _CONFLICT or tries == _TRIES:
                    raise
            await asyncio.sleep(_PAUSE * 2**tries)

    async def settle(self, pod: Object) -> None:
        """When nothing of the pod is left to allocate: success, and the lock goes."""
        fresh = await self._api.get(_path(pod))
        if "NVIDIA" not in notes_of(fresh).get(TO_ALLOCATE, ""):
            await self.annotate(pod, {BIND_PHASE: "success"})
            await self.release(pod)

    async def fail(self, pod: Object) -> None:
        """The pod has failed, and the lock goes."""
        await self.annotate(pod, {BIND_PHASE: "failed"})
        await self.release(pod)

    async def register(self, text: str, *, signed: bool) -> None:
        """Patch the register annotation; `signed`: with a sign of life."""
        notes = {REGISTER: text}
        if signed:
            notes[HANDSHAKE] = f"Reported {time.strftime('%Y-%m-%d %H:%M:%S')}"
        body = {"metadata": {"annotations": notes}}
        await self._api.patch(f"{self._path}?fieldManager={self._manager}", body)

    async def _lock(self) -> str:
        return notes_of(await self._api.get(self._path)).get(LOCK, "")


def notes_of(item: Object) -> Mapping[str, str]:
    """The annotations of an object."""
    notes: Mapping[str, str] = item["metadata"].get("annotations") or {}
    return notes


def _path(pod: Object) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
