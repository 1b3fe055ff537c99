"""The real kubelet of a cluster as a node under test."""

import itertools
from collections.abc import Mapping
from pathlib import Path

from typing_extensions import override

from tests.peers.lab.api import Object
from tests.peers.lab.clockwork import until_kubelet_says
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.faults import end_container
from tests.peers.lab.identities import NODE
from tests.peers.lab.nodes import NodeUnderTest
from tests.peers.lab.pods import PODS, key
from tests.peers.lab.waiting import until

_numbers = itertools.count()


class RealNode(NodeUnderTest):
    """`cluster` is public for what only the real one can be asked."""

    def __init__(self, cluster: Cluster) -> None:
        kubelet = cluster.kubelet
        super().__init__(kubelet.plugins, kubelet.pod_resources, f"r{next(_numbers)}")
        self.cluster = cluster

    @override
    async def submit(self, pod: Object) -> str:
        created = await self.cluster.api.create(PODS, pod)
        uid: str = created["metadata"]["uid"]
        return uid

    @override
    async def delete(self, name: str, grace: int = 0) -> None:
        await self.cluster.api.delete(f"{PODS}/{self.known_as(name)}", grace=grace)

    @override
    def pod(self, name: str) -> Object | None:
        return self.cluster.pods.objects.get(key(self.known_as(name)))

    @override
    def status(self) -> Mapping[str, Mapping[str, str]]:
        status: Mapping[str, Mapping[str, str]] = self.cluster.nodes.objects[NODE]["status"]
        return status

    @override
    async def kill(self) -> None:
        await self.cluster.kubelet.part.kill()

    @override
    async def start(self) -> None:
        socket = self.plugins / "kubelet.sock"
        old = _identity(socket)
        await self.cluster.kubelet.part.start()
        tail = self.cluster.kubelet.part.tail
        await until(lambda: _identity(socket) not in {None, old}, 30.0, tail)
        await self.cluster.kubelet.until_serving()

    @override
    async def end_container(self, name: str, container: str = "main") -> None:
        (container_id,) = (
            one["containerID"]
            for kind in ("containerStatuses", "initContainerStatuses")
            for one in (self.pod(name) or {})["status"].get(kind, ())
            if one["name"] == container
        )
        await end_container(container_id)

    @override
    async def until_leaving(self, name: str) -> None:
        words = ('"SyncLoop DELETE"', f'"{key(self.known_as(name))}"')
        await until_kubelet_says(self.cluster, *words, since=0.0)  # its name is this test's own


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_ctime_ns
