"""A disk in memory whose writes can be counted and held up."""

import asyncio

from tests.fakes.disk import MemoryDisk


class GatedDisk(MemoryDisk):
    """Counts writes; none goes on while `gate` is closed, as it is at first where it is `shut`."""

    def __init__(self, *, shut: bool = False) -> None:
        super().__init__()
        self.writes = 0
        self.gate = asyncio.Event()
        if not shut:
            self.gate.set()

    async def replace(self, name: str, data: bytes, *, keep: str | None = None) -> None:
        self.writes += 1
        await self.gate.wait()
        await super().replace(name, data, keep=keep)

    async def content(self, name: str) -> bytes:
        """The content of a file that must be there."""
        found = await self.read(name)
        assert found is not None
        return found
