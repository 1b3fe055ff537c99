"""The kubelet model as a node under test, with a store in the API server's place."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from typing_extensions import override

from agent.sandbox.api_errors import NotFoundError
from agent.sandbox.kubelet.model import KubeletModel, Timings
from agent.sandbox.kubelet.podloop import KubeletPodLoop
from agent.sandbox.store import ObjectStore
from tests.fakes.chance import Seeded
from tests.fakes.clock import LoopClock
from tests.peers.lab.api import Object
from tests.peers.lab.identities import NODE
from tests.peers.lab.nodes import NodeUnderTest
from tests.peers.lab.workloads import NAMESPACE

_TICK = 0.25
_QUICK = Timings(
    socket=0.05,
    first_admission=(0.35, 0.4),
    container_restart=(0.2, 0.3),
    container_retry=(1.0, 1.2),
    housekeeping=0.0,
)
"""Tests wait in real time; the real one's figures are the model's own and tested with them."""


class ModelNode(NodeUnderTest):
    """`model` and `store` are public for what only a model can be asked."""

    def __init__(self, root: Path) -> None:
        plugins, pod_resources = root / "dp", root / "pr"
        super().__init__(plugins, pod_resources / "kubelet.sock", "model")
        self.model = KubeletModel(plugins, pod_resources, LoopClock(), Seeded(), timings=_QUICK)
        self.store = ObjectStore(LoopClock(), Seeded())

    @override
    async def submit(self, pod: Object) -> str:
        uid: str = self.store.create("pods", pod)["metadata"]["uid"]
        return uid

    @override
    async def delete(self, name: str, grace: int = 0) -> None:
        self.store.delete("pods", NAMESPACE, self.known_as(name), grace=grace)

    @override
    def pod(self, name: str) -> Object | None:
        try:
            return self.store.get("pods", NAMESPACE, self.known_as(name))
        except NotFoundError:
            return None

    @override
    def status(self) -> Mapping[str, Mapping[str, str]]:
        status: Mapping[str, Mapping[str, str]] = self.store.get("nodes", "", NODE)["status"]
        return status

    @override
    async def kill(self) -> None:
        await self.model.kill()

    @override
    async def start(self) -> None:
        await self.model.start()

    @override
    async def end_container(self, name: str, container: str = "main") -> None:
        pod = self.pod(name) or {}
        await self.model.container_died(pod["metadata"]["uid"], container)

    @override
    async def until_leaving(self, name: str) -> None:
        uid = (self.pod(name) or {})["metadata"]["uid"]
        history = self.model.history
        await self.until(
            lambda: any(seen.pod == uid for seen in history.of("leaving")), f"{name} stays"
        )


@contextlib.asynccontextmanager
async def open_model_node(root: Path) -> AsyncIterator[ModelNode]:
    """A started model whose Node is in its store."""
    node = ModelNode(root)
    await node.start()
    try:
        loop = KubeletPodLoop(node.model, node.store, NODE, status_period=_TICK)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(loop.run())
            await node.until(lambda: node.store.select("nodes"), "no Node")
            yield node
            running.cancel()
    finally:
        await node.kill()
