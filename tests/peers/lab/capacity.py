"""How many slices the kubelet offers, looked at all the time: gaps, and how long they were."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final

from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.cluster import Cluster

_STEP: Final = 0.05
"""Seconds between two looks; the kubelet answers no more than 100 in a second to all together."""


@dataclass(eq=False, slots=True)
class Capacity:
    """What was seen: a moment of the loop's clock and a count, for each change."""

    seen: list[tuple[float, int]] = field(default_factory=list)

    def look(self, at: float, count: int) -> None:
        """One look."""
        if not self.seen or self.seen[-1][1] != count:
            self.seen.append((at, count))

    def gaps(self, whole: int = 80) -> list[float]:
        """Seconds of each time in which there were fewer, but for one that has not ended."""
        found: list[float] = []
        began: float | None = None
        for at, count in self.seen:
            if count < whole:
                began = at if began is None else began
            elif began is not None:
                found.append(at - began)
                began = None
        return found


@contextlib.asynccontextmanager
async def capacity_of(cluster: Cluster) -> AsyncIterator[Capacity]:
    """Looks until the block ends. The kubelet must live; what it does not answer is no look."""
    capacity = Capacity()
    async with asyncio.TaskGroup() as group:
        looking = group.create_task(_look(cluster, capacity))
        try:
            yield capacity
        finally:
            looking.cancel()


async def _look(cluster: Cluster, capacity: Capacity) -> None:
    loop = asyncio.get_running_loop()
    while True:
        found = await cluster.kubelet.offered(RESOURCE)
        if found is not None:
            capacity.look(loop.time(), len(found))
        await asyncio.sleep(_STEP)
