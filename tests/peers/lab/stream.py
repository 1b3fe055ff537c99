"""Pods that come and go through the real scheduler while a test does harm to others."""

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.peers.lab.api import Object
from tests.peers.lab.clockwork import wall
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.gpu_pods import (
    Life,
    all_run,
    create,
    key_of_pod,
    lives,
    promised,
    seen_inside,
    until_told,
)
from tests.peers.lab.placement import PODS
from tests.peers.lab.workloads import a_container, a_pod, telling

DECIDED_WITHIN: Final = 90.0
"""Seconds from a pod's creation to its containers running, or its end: the scheduler places one
pod at a time, and tries again after seconds where it could not."""

_SHAPES: Final = ((1,), (1,), (2,), (1, 1))
"""How many GPUs each container of a pod asks for."""
_LASTS: Final = (0.2, 3.0)


@dataclass(frozen=True, slots=True)
class Rejected:
    """A pod that the kubelet did not take. `at` in Unix seconds, when the watch showed it."""

    name: str
    at: float
    message: str


@dataclass(eq=False, slots=True)
class Stream:
    """What became of the pods. `wrong`: sentences about what should not have been seen."""

    cluster: Cluster
    told: Path
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
        await create(self.cluster, telling(a_pod(name, *containers), self.told))
        pod = await self._decided(name)
        if pod["status"]["phase"] == "Failed":
            self.rejected.append(Rejected(name, wall(), pod["status"].get("message", "")))
            await asyncio.sleep(self.chance.uniform(*_LASTS))  # or a gap would fill with them
        else:
            await self._look_inside(name, [one["name"] for one in containers])
        await self._end(name)

    async def _decided(self, name: str) -> Object:
        key, objects = key_of_pod(name), self.cluster.pods.objects
        await self.cluster.pods.until(
            lambda: (
                key in objects
                and (all_run(objects[key]) or objects[key]["status"].get("phase") == "Failed")
            ),
            DECIDED_WITHIN,
            f"{name} neither runs nor fails",
        )
        return objects[key]

    async def _look_inside(self, name: str, containers: list[str]) -> None:
        """Whether it runs with its limits, and goes on so while it lasts."""
        before = lives(self.cluster.pods.objects[key_of_pod(name)])
        await until_told(self.told, name, containers)
        wanted, seen = promised(self.cluster, name), seen_inside(self.told, name, containers)
        if wanted != seen:
            self.wrong.append(f"{name} was promised {wanted} and sees {seen}")
        await asyncio.sleep(self.chance.uniform(*_LASTS))
        after: dict[str, Life] = dict(lives(self.cluster.pods.objects[key_of_pod(name)]))
        if before != after:
            self.wrong.append(f"{name} was {before} and is {after}")
        self.ran.append(name)

    async def _end(self, name: str) -> None:
        key, pods = key_of_pod(name), self.cluster.pods
        uid = pods.objects[key]["metadata"]["uid"]
        await self.cluster.api.delete(f"{PODS}/{name}", grace=0)
        await pods.until(lambda: key not in pods.objects, 30.0, f"{name} stays")
        self.deleted[uid] = wall()
