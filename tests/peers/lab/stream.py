"""Pods that come and go through the real scheduler while a test does harm to others."""

import asyncio
import random
import re
import secrets
from dataclasses import dataclass, field
from typing import Final

from agent.errors import RefusalReason
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.api import Object
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.grants import expected_inside, seen_inside
from tests.peers.lab.placement import until_taken_up, wall
from tests.peers.lab.pods import (
    a_container,
    a_pod,
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
from tests.peers.lab.space import because, until

# Times without an agent, and which rejections of pods belong into them.

TOLD_LATE: Final = 20.0
"""Seconds after which a rejection is in the API for sure: the kubelet tells at once, but where that
went wrong only ten seconds later. What belongs into a gap is judged by when the pod was taken."""

STARTING: Final = 2.0
"""Seconds for which an agent that knows its pods is still busy with its start."""

_UNREACHED: Final = "rpc error: code = (Unavailable|Canceled) desc = .*"
_KUBELETS_OWN: Final = (
    re.escape(because(f"no healthy devices present; cannot allocate unhealthy devices {RESOURCE}")),
    because(f"(device plugin GetPreferredAllocation rpc failed with err: )?{_UNREACHED}"),
    f"Pod was rejected: Node didn't have enough resource: {RESOURCE}, .*",
)
"""What it says where nobody answers it."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """A pod that the kubelet did not take.

    `taken` and `at` in Unix seconds: when the kubelet began with it, and when the watch showed it.
    """

    name: str
    taken: float
    at: float
    message: str


@dataclass(frozen=True, slots=True)
class Gap:
    """A time without the agent, in Unix seconds: until the kubelet had its list again."""

    start: float
    end: float
    known: float
    """Until the new agent knew the pods of the node."""

    def explains(self, one: Rejected) -> bool:
        """Whether the kubelet took up and rejected a pod in it, in words that belong there."""
        if is_blind(one.message):
            end = self.known
        elif is_out_of_time(one.message):
            end = max(self.known, self.end) + STARTING
        elif is_kubelets_own(one.message):
            end = self.end
        else:
            return False
        return one.taken <= end and self.start <= one.at <= end + TOLD_LATE


def is_blind(message: str) -> bool:
    """Whether an agent speaks that does not know the pods of its node yet."""
    return f"[{RefusalReason.PODS_UNKNOWN.value}]" in message


def is_out_of_time(message: str) -> bool:
    """Whether an agent speaks that found no answer in time, as one may that was just started."""
    reasons = RefusalReason.OUT_OF_TIME, RefusalReason.STARVED
    return any(f"[{reason.value}]" in message for reason in reasons)


def is_kubelets_own(message: str) -> bool:
    """Whether the kubelet says that it reached no agent, and no agent speaks through it."""
    return "[HA-" not in message and any(re.fullmatch(one, message) for one in _KUBELETS_OWN)


DECIDED_WITHIN: Final = 90.0
"""Seconds from a pod's creation to its containers running, or its end: the scheduler places one
pod at a time, and tries again after seconds where it could not."""

_SHAPES: Final = ((1,), (1,), (2,), (1, 1))
"""How many GPUs each container of a pod asks for."""
_LASTS: Final = (0.2, 3.0)


def a_chance() -> random.Random:
    """Another one each time; its seed is shown with a failure."""
    seed = secrets.randbelow(2**32)
    print(f"seed {seed}")  # noqa: T201 -- as said
    return random.Random(seed)  # noqa: S311 -- moments, no secrets


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
        """Keep so many pods coming and going, until it is over and all are gone."""
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
