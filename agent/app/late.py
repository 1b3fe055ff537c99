"""The half that may load late: it answers once the rest of the agent is there."""

from typing import Protocol

from agent.core.containers.edits import ContainerEdits
from agent.core.inventory.slices import SliceId
from agent.kit.cell import Cell
from agent.kit.lull import Lull


class LoadedAllocator(Protocol):
    """What decides an allocation."""

    async def allocate(self, ids: tuple[SliceId, ...], /) -> ContainerEdits:
        """Give these slices to the container being admitted. Raises AgentError."""
        ...

    async def prefer(
        self,
        available: tuple[SliceId, ...],
        must_include: tuple[SliceId, ...],
        size: int,
        /,
    ) -> tuple[SliceId, ...]:
        """The `size` ids of `available` that suit it best. Raises AgentError."""
        ...


class LateAllocator:
    """A LoadedAllocator that waits for the real one, which `ready` gets; the door's deadline holds.

    `calls` tells whoever would disturb the kubelet whether it is just giving ids out.
    """

    def __init__(self) -> None:
        self.calls = Lull()
        self.ready: Cell[LoadedAllocator | None] = Cell(None)

    def under(self, resource: str) -> "NameDoor":
        """What is asked by one name."""
        return NameDoor(self, resource)

    async def loaded(self) -> LoadedAllocator:
        """The real one, once it is there."""
        while (allocator := self.ready.value) is None:
            await self.ready.until(lambda one: one is not None)
        return allocator


class NameDoor:
    """An Allocator for those who ask by one name of our resource."""

    def __init__(self, late: LateAllocator, resource: str) -> None:
        self._late = late
        self._resource = resource

    async def allocate(self, ids: tuple[SliceId, ...]) -> ContainerEdits:
        """Give these slices to the container being admitted. Raises AgentError."""
        with self._late.calls.busy():
            return await (await self._late.loaded()).allocate(ids)

    async def prefer(
        self, available: tuple[SliceId, ...], must_include: tuple[SliceId, ...], size: int
    ) -> tuple[SliceId, ...]:
        """The `size` ids of `available` that suit it best. Raises AgentError."""
        with self._late.calls.busy():
            allocator = await self._late.loaded()
            return await allocator.prefer(available, must_include, size)
