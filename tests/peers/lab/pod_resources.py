"""A client of the kubelet's PodResources socket.

All clients together are answered a burst of 10 questions and 100 a second.
"""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from grpclib.client import Channel
from grpclib.exceptions import GRPCError

from agent.wire.v1 import (
    AllocatableResourcesRequest,
    ContainerDevices,
    GetPodResourcesRequest,
    ListPodResourcesRequest,
    PodResources,
    PodResourcesListerStub,
)

_DEADLINE: Final = 5.0


class PodResourcesClient:
    """Each question has a connection of its own. All raise OSError, GRPCError."""

    def __init__(self, socket: Path) -> None:
        self.socket: Final = socket

    @contextlib.asynccontextmanager
    async def lister(self) -> AsyncIterator[PodResourcesListerStub]:
        """The stub itself, for several questions on one connection."""
        async with Channel(path=str(self.socket)) as channel:
            yield PodResourcesListerStub(channel)

    async def allocatable(self, resource: str) -> list[ContainerDevices]:
        """The entries of a resource's healthy ids."""
        async with self.lister() as lister:
            answer = await lister.get_allocatable_resources(
                AllocatableResourcesRequest(), timeout=_DEADLINE
            )
        return [entry for entry in answer.devices if entry.resource_name == resource]

    async def list(self) -> list[PodResources]:
        """All active pods."""
        async with self.lister() as lister:
            return (await lister.list(ListPodResourcesRequest(), timeout=_DEADLINE)).pod_resources

    async def get(self, namespace: str, name: str) -> PodResources:
        """One pod's answer."""
        async with self.lister() as lister:
            asked = GetPodResourcesRequest(name, namespace)
            return (await lister.get(asked, timeout=_DEADLINE)).pod_resources or PodResources()

    async def find(self, namespace: str, name: str) -> PodResources | None:
        """The same; None: the kubelet does not know the pod."""
        try:
            return await self.get(namespace, name)
        except GRPCError as error:
            if "not found" in (error.message or ""):
                return None
            raise
