"""An allocator that answers what it is told to, and can be slow or fail."""

import asyncio

from agent.ledger import ContainerEdits, MountEdit, NodeEdit
from agent.model import SliceId


class FakeAllocator:
    """Answers every request with edits that name its ids, sorted."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.failure: Exception | None = None
        self.open = asyncio.Event()
        self.open.set()
        self.preferred: tuple[str, ...] | None = None
        self.preferring = 0

    async def allocate(self, ids: tuple[SliceId, ...]) -> ContainerEdits:
        self.asked.append(ids)
        await self.open.wait()
        if self.failure is not None:
            raise self.failure
        return ContainerEdits(
            envs=(("EMPTY", ""), ("IDS", ",".join(sorted(ids)))),
            mounts=(MountEdit("/usr/local/vgpu", "/usr/local/vgpu/lock", read_only=False),),
            nodes=(NodeEdit("/dev/nvidia0", "/dev/nvidia0", "rwm"),),
            annotations=(("a", "b"),),
            cdi_names=("vendor.com/gpu=0",),
        )

    async def prefer(
        self, available: tuple[SliceId, ...], must_include: tuple[SliceId, ...], size: int
    ) -> tuple[SliceId, ...]:
        self.preferring += 1
        await self.open.wait()
        chosen = self.preferred or sorted(available, reverse=True)[:size]
        return tuple(map(SliceId, chosen))
