"""Pods that come and go through the real scheduler while a test does harm to others."""

import asyncio
import random
from dataclasses import dataclass, field
from typing import Final

from tests.peers.lab.api import Object
from tests.peers.lab.clockwork import until_taken_up, wall
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.gaps import Rejected
from tests.peers.lab.grants import expected_inside, seen_inside
from tests.peers.lab.pods import (
    as_seen,
    create,
    delete,
    is_up,
    key,
    lives,
    phase_of,
    telling,
    until_deleted,
)
from tests.peers.lab.waiting import until
from tests.peers.lab.workloads import a_container, a_pod

DECIDED_WITHIN: Final = 90.0
"""Seconds from a pod's creation to its containers running, or its end: the scheduler places one
pod at a time, and tries again after seconds where it could not."""

_SHAPES: Final = ((1,), (1,), (2,), (1, 1))
"""How many GPUs each container of a pod asks for."""
_LASTS: Final = (0.2, 3.0)


@dataclass(eq=False, slots=True)
class Stream:
    """What became of the pods. `wrong`: sentences about what should not have been seen."""

    cluster: Cluster
    chance: random.Random
    is_over: bool = False
    ran: list[str] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    deleted: dict[str, float] = field(default_factory=dict)
    """When the pods with these UIDs were gone, in Unix seconds."""
    _count: int = 0

    async def run(self, pairs: int = 2) -> None:
        """Keep so many pods coming and going, until it is over and all are gone.

        Raises:
            TimeoutError: one neither runs nor fails.
        """
        async with asyncio.TaskGroup() as group:
            for _ in range(pairs):
                group.create_task(self._one_after_the_other())

    async def until_one_ran(self) -> None:
        """Return once one more pod has run to its end. Raises TimeoutError."""
        before = len(self.ran)
        await until(lambda: len(self.ran) > before, DECIDED_WITHIN, lambda: f"{self.rejected}")

    async def _one_after_the_other(self) -> None:
        while not self.is_over:
            self._count += 1
            await self._live(f"stream-{self._count}")

    async def _live(self, name: str) -> None:
        shape = self.chance.choice(_SHAPES)
        containers = [
            a_container(f"c{place}", gpus=gpus, memory=1000 + 10 * self._count, cores=3)
            for place, gpus in enumerate(shape)
        ]
        created = wall()
        await create(self.cluster, telling(self.cluster, a_pod(name, *containers)))
        pod = await self._decided(name)
        if phase_of(pod) == "Failed":
            await self._note_rejection(name, created, pod["status"])
        else:
            await self._look_inside(name)
        await self._end(name)

    async def _decided(self, name: str) -> Object:
        objects = self.cluster.pods.objects
        await self.cluster.pods.until(
            lambda: (
                key(name) in objects
                and (is_up(objects[key(name)]) or phase_of(objects[key(name)]) == "Failed")
            ),
            DECIDED_WITHIN,
            f"{name} neither runs nor fails",
        )
        return objects[key(name)]

    async def _note_rejection(self, name: str, created: float, status: Object) -> None:
        at, taken = wall(), await until_taken_up(self.cluster, name, created)
        self.rejected.append(Rejected(name, taken, at, status.get("message", "")))
        await asyncio.sleep(self.chance.uniform(*_LASTS))  # or a gap would fill with them

    async def _look_inside(self, name: str) -> None:
        """Whether it runs with its limits, and goes on so while it lasts."""
        before = lives(as_seen(self.cluster, name))
        wanted, seen = expected_inside(self.cluster, name), await seen_inside(self.cluster, name)
        if wanted != seen:
            self.wrong.append(f"{name} was promised {wanted} and sees {seen}")
        await asyncio.sleep(self.chance.uniform(*_LASTS))
        after = lives(as_seen(self.cluster, name))
        if before != after:
            self.wrong.append(f"{name} was {before} and is {after}")
        self.ran.append(name)

    async def _end(self, name: str) -> None:
        uid = as_seen(self.cluster, name)["metadata"]["uid"]
        await delete(self.cluster, name, grace=0)
        await until_deleted(self.cluster, name)
        self.deleted[uid] = wall()
