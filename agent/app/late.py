"""An allocator that accepts calls before the rest of the agent is loaded."""

from agent.core.allocation.steps import DISK_BUDGET, starved_refusal
from agent.core.containers.edits import ContainerEdits
from agent.core.errors import Refusal, RefusalReason
from agent.core.inventory.slices import SliceId
from agent.kit.cell import Cell
from agent.kit.running_time import Lag, Starved
from agent.kit.ticks import Lull
from agent.plugin.handlers import SliceAllocator


class LateAllocator:
    """Waits for the real allocator, which is put in `ready`.

    `calls`: whether calls of the kubelet are in progress, for services that would disturb them.
    `lag`: extends the deadlines of all Allocates.
    """

    def __init__(self) -> None:
        self.calls = Lull()
        self.lag = Lag()
        self.ready: Cell[SliceAllocator | None] = Cell(None)

    async def allocate(self, ids: tuple[SliceId, ...]) -> ContainerEdits:
        """Allocate these slices to the container being admitted. Raises AgentError."""
        with self.calls.busy():
            try:
                async with self.lag.within(DISK_BUDGET):  # loading reads from the disk
                    allocator = await self._loaded()
            except Starved as error:
                raise starved_refusal() from error
            except TimeoutError as error:
                raise Refusal(
                    RefusalReason.OUT_OF_TIME,
                    "The GPU agent of this node was still starting after "
                    f"{DISK_BUDGET:g} s; create the pod again.",
                    transient=True,
                ) from error
            return await allocator.allocate(ids)

    async def prefer(
        self, available: tuple[SliceId, ...], must_include: tuple[SliceId, ...], size: int
    ) -> tuple[SliceId, ...]:
        """The `size` ids of `available` that fit best. Raises AgentError."""
        with self.calls.busy():
            return await (await self._loaded()).prefer(available, must_include, size)

    async def _loaded(self) -> SliceAllocator:
        while (allocator := self.ready.value) is None:
            await self.ready.until(lambda ready: ready is not None)
        return allocator
