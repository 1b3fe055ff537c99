"""A store, a kubelet and the loop between them, for tests of what the API server sees."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from agent.sandbox.kubelet.podloop import KubeletPodLoop
from agent.sandbox.store import Json, NotFoundError, ObjectStore
from tests.fakes.chance import Seeded
from tests.fakes.clock import LoopClock
from tests.fakes.kubelet_rig import KubeletRig, a_pod_object, a_rig_with_plugin
from tests.fakes.plugin import RESOURCE, ScriptedPlugin

NODE = "node-a"


@dataclass(frozen=True)
class NodeRig:
    """Pods are created bound to the node; `sees` waits for the store to change."""

    rig: KubeletRig
    plugin: ScriptedPlugin
    store: ObjectStore
    loop: KubeletPodLoop

    def create(self, name: str, *, count: int = 1, annotations: Json | None = None, **other) -> str:
        """A bound pod; returns its UID."""
        pod = a_pod_object(name, count=count, nodeName=NODE, **other)
        pod["metadata"] = {"name": name, "namespace": "default", "annotations": annotations or {}}
        return self.store.create("pods", pod)["metadata"]["uid"]

    def pod(self, name: str) -> Json | None:
        try:
            return self.store.get("pods", "default", name)
        except NotFoundError:
            return None

    def phase(self, name: str) -> str | None:
        pod = self.pod(name)
        return None if pod is None else str(pod["status"]["phase"])

    def count(self, kind: str) -> str | None:
        """The Node's `capacity` or `allocatable` of the plugin's resource, as its text."""
        found = self.store.select("nodes")
        return found[0]["status"][kind].get(RESOURCE) if found else None

    async def sees(self, holds: Callable[[], object]) -> None:
        changes = self.store.subscribe("pods", self.store.version)
        nodes = self.store.subscribe("nodes", self.store.version)
        async with asyncio.timeout(600), asyncio.TaskGroup() as group:
            woken = asyncio.Event()

            async def follow(subscription) -> None:
                async for _ in subscription:
                    woken.set()

            tasks = [group.create_task(follow(each)) for each in (changes, nodes)]
            while not holds():
                await woken.wait()
                woken.clear()
            for task in tasks:
                task.cancel()

    async def phases(self, **wanted: str | None) -> None:
        await self.sees(lambda: wanted == {name: self.phase(name) for name in wanted})


@asynccontextmanager
async def a_node_rig(root: Path, *, count: int = 4, eager: bool = False) -> AsyncIterator[NodeRig]:
    """A node whose kubelet and plugin are up and whose loop runs."""
    async with a_rig_with_plugin(root, count=count) as (rig, plugin):
        store = ObjectStore(LoopClock(), Seeded())
        loop = KubeletPodLoop(rig.kubelet, store, NODE, eager=eager)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(loop.run())
            yield NodeRig(rig, plugin, store, loop)
            running.cancel()
