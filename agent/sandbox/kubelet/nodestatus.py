"""Registers the Node object and reports its capacity and allocatable, as the kubelet does."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from agent.sandbox.api_errors import Json, NotFoundError
from agent.sandbox.kubelet.books import NodeResources
from agent.sandbox.kubelet.model import KubeletModel
from agent.sandbox.kubelet.seen import KubeletEvent
from agent.sandbox.store import ObjectStore

_PLAIN: Final = {"cpu": "64", "memory": "1056Gi", "pods": "110"}
_CHANGES: Final = frozenset({"listed", "disconnected", "removed", "started"})


class NodeReporter:
    """Writes the Node's status every `period` seconds while the kubelet is up; `eager`: at once.

    As with the real kubelet, a removed resource stays in the Node as 0.
    """

    def __init__(
        self,
        model: KubeletModel,
        store: ObjectStore,
        node_name: str,
        period: float,
        *,
        eager: bool,
    ) -> None:
        self._model = model
        self._store = store
        self._name = node_name
        self._period = period
        self._eager = eager
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Register the Node at each start of the kubelet, then report for ever."""
        self._model.history.listen(self._hear)
        if self._model.is_up:
            self._register()
        while True:
            self._wake.clear()
            if self._model.is_up:
                self._report(self._model.tick())
            with suppress(TimeoutError):
                async with asyncio.timeout(self._period):
                    await self._wake.wait()

    def _hear(self, event: KubeletEvent) -> None:
        if event.kind == "started":
            self._register()
        if event.kind == "started" or (self._eager and event.kind in _CHANGES):
            self._wake.set()

    def _register(self) -> None:
        try:
            self._store.get("nodes", "", self._name)
        except NotFoundError:
            labels = {"kubernetes.io/hostname": self._name, "kubernetes.io/os": "linux"}
            ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
            self._store.create(
                "nodes",
                {
                    "metadata": {"name": self._name, "labels": labels},
                    "spec": {},
                    "status": {
                        "capacity": dict(_PLAIN),
                        "allocatable": dict(_PLAIN),
                        "conditions": [ready],
                    },
                },
            )

    def _report(self, resources: NodeResources) -> None:
        gone = dict.fromkeys(resources.removed, 0)
        counted, offered = _texts(gone | dict(resources.capacity)), _texts(resources.allocatable)

        def change(node: Json) -> Json:
            status = node.setdefault("status", {})
            capacity = status["capacity"] = {**(status.get("capacity") or {}), **counted}
            # If an earlier kubelet knew a resource and this one does not, all of it is allocatable.
            whole = {name: text for name, text in capacity.items() if "/" in name}
            status["allocatable"] = {**(status.get("allocatable") or {}), **whole, **offered}
            return node

        try:
            node = self._store.update("nodes", "", self._name, change)
        except NotFoundError:
            return  # a deleted Node comes back with the kubelet's next start
        self._model.node.labels = dict(node["metadata"].get("labels") or {})
        allocatable = node["status"]["allocatable"]
        self._model.node.published = {
            name: int(text) for name, text in allocatable.items() if "/" in name
        }


def _texts(counts: Mapping[str, int]) -> dict[str, str]:
    return {name: str(count) for name, count in counts.items()}
