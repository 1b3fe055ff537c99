"""An allocator that accepts calls before the rest of the agent is loaded."""

from agent.core.containers.edits import ContainerEdits
from agent.core.inventory.slices import SliceId
from agent.kit.cell import Cell
from agent.kit.lull import Lull
from agent.plugin.handlers import SliceAllocator


class LateAllocator:
    """Waits for the real allocator, which is put in `ready`. The caller sets the deadline.

    `calls`: whether calls of the kubelet are in progress, for services that would disturb them.
    """

    def __init__(self) -> None:
        self.calls = Lull()
        self.ready: Cell[SliceAllocator | None] = Cell(None)

    async def loaded(self) -> SliceAllocator:
        """The real allocator, once it is loaded."""
        with self.calls.busy():
            while (allocator := self.ready.value) is None:
                await self.ready.until(lambda ready: ready is not None)
            return allocator

    async def allocate(self, ids: tuple[SliceId, ...]) -> ContainerEdits:
        """Allocate these slices to the container being admitted. Raises AgentError."""
        with self.calls.busy():
            return await (await self.loaded()).allocate(ids)

    async def prefer(
        self, available: tuple[SliceId, ...], must_include: tuple[SliceId, ...], size: int
    ) -> tuple[SliceId, ...]:
        """The `size` ids of `available` that fit best. Raises AgentError."""
        with self.calls.busy():
            return await (await self.loaded()).prefer(available, must_include, size)
