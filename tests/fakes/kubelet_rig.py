"""A kubelet model in a directory of its own, pods for it, and a client of its PodResources."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from grpclib.client import Channel

from agent.sandbox.kubelet.model import KubeletModel
from agent.sandbox.kubelet.pods import KubeletAdmission, KubeletEvent
from agent.sandbox.store import Json
from agent.wire.v1 import PodResourcesListerStub
from tests.fakes.chance import Seeded
from tests.fakes.clock import LoopClock
from tests.fakes.plugin import RESOURCE, ScriptedPlugin

_LIMIT = 600.0
T = TypeVar("T")


def a_container_object(
    name: str = "main", *, count: int = 1, resource: str = RESOURCE, sidecar: bool = False
) -> Json:
    """One container; a count of 0 asks for nothing."""
    limits = {resource: str(count)} if count else {}
    plain: Json = {"name": name, "resources": {"limits": limits | {"cpu": "100m"}}}
    return plain | ({"restartPolicy": "Always"} if sidecar else {})


def a_pod_object(
    uid: str = "u1",
    *,
    count: int = 1,
    containers: list[Json] | None = None,
    inits: list[Json] | None = None,
    created: str = "2026-08-21T06:20:39Z",
    **spec: object,
) -> Json:
    """A Pod as the API server stores it; its name is its UID."""
    apps = [a_container_object(count=count)] if containers is None else containers
    return {
        "metadata": {"name": uid, "namespace": "default", "uid": uid, "creationTimestamp": created},
        "spec": {"initContainers": inits or [], "containers": apps} | spec,
    }


@dataclass(frozen=True)
class KubeletRig:
    """A started kubelet. Every wait has a deadline of 10 minutes of loop time."""

    kubelet: KubeletModel
    plugins: Path
    pod_resources: Path

    async def soon(self, wait: Awaitable[T]) -> T:
        async with asyncio.timeout(_LIMIT):
            return await wait

    async def until_listed(self, count: int, resource: str = RESOURCE) -> None:
        await self.soon(self.kubelet.until_allocatable(resource, count))

    async def until_seen(self, kind: str, times: int = 1) -> KubeletEvent:
        await self.soon(self.kubelet.history.until(lambda: len(self.seen(kind)) >= times))
        return self.seen(kind)[-1]

    def seen(self, kind: str) -> list[KubeletEvent]:
        return [event for event in self.kubelet.history if event.kind == kind]

    async def admit(self, pod: Json) -> KubeletAdmission:
        return await self.soon(self.kubelet.admit(pod))

    async def come_back(self, plugin: ScriptedPlugin) -> None:
        """Serve and register anew, as a good plugin does after the kubelet's start."""
        await plugin.serve()
        await plugin.register()
        await self.until_listed(len(plugin.devices), plugin.resource)

    def ids(self, resource: str = RESOURCE) -> Mapping[tuple[str, str], frozenset[str]]:
        return self.kubelet.held(resource)

    @asynccontextmanager
    async def witness(self) -> AsyncIterator[PodResourcesListerStub]:
        async with Channel(path=str(self.pod_resources / "kubelet.sock")) as channel:
            yield PodResourcesListerStub(channel)


@asynccontextmanager
async def a_rig(root: Path, *, seed: int = 0) -> AsyncIterator[KubeletRig]:
    """A kubelet that has just been started, below `root`."""
    plugins, pod_resources = root / "dp", root / "pr"
    kubelet = KubeletModel(plugins, pod_resources, LoopClock(), Seeded(seed))
    await kubelet.start()
    try:
        yield KubeletRig(kubelet, plugins, pod_resources)
    finally:
        await kubelet.stop()


@asynccontextmanager
async def a_rig_with_plugin(
    root: Path, *, count: int = 4, seed: int = 0
) -> AsyncIterator[tuple[KubeletRig, ScriptedPlugin]]:
    """A kubelet and a registered plugin with `count` healthy ids."""
    async with a_rig(root, seed=seed) as rig, ScriptedPlugin(rig.plugins, count=count) as plugin:
        await plugin.register()
        await rig.until_listed(count)
        yield rig, plugin
