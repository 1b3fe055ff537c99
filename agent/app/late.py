"""The half that may load late: it answers once the rest of the agent is there."""

from agent.core.containers.edits import ContainerEdits
from agent.core.inventory.slices import SliceId
from agent.kit.cell import Cell
from agent.kit.lull import Lull
from agent.plugin.handlers import SliceAllocator


class LateAllocator:
    """An allocator that waits for the real one, which `ready` gets; the door's deadline holds.

    `calls` tells whoever would disturb the kubelet whether it is just giving ids out.
    """

    def __init__(self) -> None:
        self.calls = Lull()
        self.ready: Cell[SliceAllocator | None] = Cell(None)

    async def loaded(self) -> SliceAllocator:
        """The real one, once it is there."""
        while (allocator := self.ready.value) is None:
            await self.ready.until(lambda one: one is not None)
        return allocator

    async def allocate(self, ids: tuple[SliceId, ...]) -> ContainerEdits:
        """Give these slices to the container being admitted. Raises AgentError."""
        with self.calls.busy():
            return await (await self.loaded()).allocate(ids)

    async def prefer(
        self, available: tuple[SliceId, ...], must_include: tuple[SliceId, ...], size: int
    ) -> tuple[SliceId, ...]:
        """The `size` ids of `available` that suit it best. Raises AgentError."""
        with self.calls.busy():
            return await (await self.loaded()).prefer(available, must_include, size)
