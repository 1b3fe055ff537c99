"""A store with one node and the scheduler model beside it, for tests of what becomes of pods."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from typing_extensions import override

from agent.sandbox.apiserver_requests import merge_patch
from agent.sandbox.scheduler.loop import SchedulerModel
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.verbs import StoreCluster
from agent.sandbox.scheduler.webhook import admit_pod
from agent.sandbox.store import Json, ObjectStore
from tests.fakes.chance import Seeded
from tests.fakes.clock import LoopClock
from tests.fakes.explain_rig import LOCK, REGISTER, a_gpu, report_of


def register_of(*uuids: str) -> str:
    return report_of(*(a_gpu(uuid, index) for index, uuid in enumerate(uuids)))


class FakeCluster:
    """One store with one node `n1`, and the scheduler beside it."""

    def __init__(
        self,
        *uuids: str,
        settings: SchedulerSettings | None = None,
        store: ObjectStore | None = None,
    ) -> None:
        self.store = store or ObjectStore(LoopClock(), Seeded())
        self.scheduler = SchedulerModel(self.store, LoopClock(), Seeded(), settings=settings)
        if store is None:
            metadata = {"name": "n1", "annotations": {REGISTER: register_of(*uuids)}}
            status = {"allocatable": {"nvidia.com/gpu": str(10 * len(uuids))}}
            self.store.create("nodes", {"metadata": metadata, "status": status})

    def submit(self, name: str, memory_mib: int = 1000) -> Json:
        limits = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": memory_mib}
        pod: Json = {
            "metadata": {"name": name, "annotations": {}},
            "spec": {"containers": [{"name": "c0", "resources": {"limits": limits}}]},
        }
        return self.store.create("pods", admit_pod(pod, self.scheduler.settings))

    def pod(self, name: str) -> Json:
        return self.store.get("pods", "default", name)

    def node(self) -> dict[str, str]:
        marks: dict[str, str] = self.store.get("nodes", "", "n1")["metadata"]["annotations"]
        return marks

    def unlock(self) -> None:
        patch = {"metadata": {"annotations": {LOCK: None}}}
        self.store.update("nodes", "", "n1", lambda node: merge_patch(node, patch))

    async def until(self, claim: Callable[[], bool], within: float = 120) -> None:
        """Look again after every change of a pod; virtual time, so only a hang can fail."""
        async with asyncio.timeout(within):
            follower = self.store.subscribe("pods", None)
            while not claim():
                await anext(follower)

    def is_bound(self, name: str) -> bool:
        return "nodeName" in self.pod(name)["spec"]

    def condition(self, name: str) -> str:
        conditions = self.pod(name)["status"].get("conditions", [])
        return next((entry.get("message", "") for entry in conditions), "")


class RecordedCluster(StoreCluster):
    """The port over a store; `calls` are the requests that were made."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self.calls: list[str] = []

    async def before(self, call: str) -> None:
        """What happens just before a request."""

    @override
    async def request(self, verb: str, *where: str, body: Json | None = None) -> Json:
        call = f"{verb} {where[0]}"
        self.calls.append(call)
        await self.before(call)
        return await super().request(verb, *where, body=body)


@asynccontextmanager
async def scheduling(cluster: FakeCluster) -> AsyncIterator[FakeCluster]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(cluster.scheduler.run())
        yield cluster
        task.cancel()
