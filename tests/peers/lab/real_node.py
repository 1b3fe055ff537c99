"""The real kubelet of a cluster as a node under test."""

import contextlib
import itertools
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

from typing_extensions import override

from tests.peers.lab.api import Object
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.identities import NODE
from tests.peers.lab.nodes import NodeUnderTest
from tests.peers.lab.waiting import until
from tests.peers.lab.workloads import NAMESPACE

_numbers = itertools.count()


class RealNode(NodeUnderTest):
    """`cluster` is public for what only the real one can be asked."""

    def __init__(self, cluster: Cluster) -> None:
        kubelet = cluster.kubelet
        super().__init__(kubelet.plugins, kubelet.pod_resources, f"r{next(_numbers)}")
        self.cluster = cluster

    @override
    async def submit(self, pod: Object) -> str:
        created = await self.cluster.api.create(f"/api/v1/namespaces/{NAMESPACE}/pods", pod)
        uid: str = created["metadata"]["uid"]
        return uid

    @override
    async def delete(self, name: str, grace: int = 0) -> None:
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{self.known_as(name)}"
        await self.cluster.api.delete(path, grace=grace)

    @override
    def pod(self, name: str) -> Object | None:
        return self.cluster.pods.objects.get(f"{NAMESPACE}/{self.known_as(name)}")

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
            one["containerID"].rpartition("/")[2]
            for kind in ("containerStatuses", "initContainerStatuses")
            for one in (self.pod(name) or {})["status"].get(kind, ())
            if one["name"] == container
        )
        for pid in _members(container_id):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await until(lambda: not [*_members(container_id)], 5.0, lambda: f"{container} lives")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_ctime_ns


def _members(container_id: str) -> Iterator[int]:
    for directory in Path("/proc").iterdir():
        if directory.name.isdecimal():
            with contextlib.suppress(OSError):
                if container_id in (directory / "cgroup").read_text():
                    yield int(directory.name)
