"""Pods that come and go through the real scheduler while a test does harm to others."""

import asyncio
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from agent import cluster as annotations
from agent.errors import RefusalReason
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.api import Object
from tests.peers.lab.cluster import Cluster
from tests.peers.lab.grants import expected_inside, seen_inside
from tests.peers.lab.identities import EXTENDER
from tests.peers.lab.part import Part
from tests.peers.lab.placement import agent_stamps, klog_stamp, unix, until_taken_up, wall
from tests.peers.lab.pods import (
    NAMESPACE,
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


# Where the time of pods goes that were created at once, by the stamps of all who served them.
#
# All clocks are one machine's. Needs HAMi's own scheduler: its log tells of the attempts.

_ATTEMPTS: Final = {
    "filtered": '"Starting schedule filter process"',
    "told_to_bind": '"Attempting to bind pod to node"',
    "denied": '"Failed to lock node"',
}
"""The words of HAMi's scheduler for the moments of an attempt."""
TAKEN_UP: Final = '"SyncLoop ADD"'
_POD: Final = re.compile(rf'"(?:{NAMESPACE}/)?([a-z0-9-]+)"')


@dataclass(slots=True)
class PodTimes:
    """One pod's way, in Unix seconds."""

    created: float = 0.0
    filtered: list[float] = field(default_factory=list)
    """When HAMi's scheduler was asked for a node; once for each attempt."""
    told_to_bind: list[float] = field(default_factory=list)
    """When it was told to bind; once for each attempt."""
    denied: list[float] = field(default_factory=list)
    """When it found that another pod has the lock: the attempt is over."""
    locked: float = 0.0
    bound: float = 0.0
    taken_up: float = 0.0
    """When the kubelet began with the pod."""
    answered: float = 0.0
    """When the agent answered Allocate."""
    settled: float = 0.0
    """When the API server had the agent's patch of the pod."""
    unlocked: float = 0.0
    ready: float = 0.0


def times_of(cluster: Cluster, names: list[str], mark: int, since: float) -> dict[str, PodTimes]:
    """By name, the ways of pods that were created after a mark of the audit log and a moment.

    What the watch knows is left at 0: when each was created and ready.
    """
    found = {name: PodTimes() for name in names}
    for event in cluster.plane.audit.events(mark):
        _note_request(found, event)
    for what, words in _ATTEMPTS.items():
        for pod, stamp in _told(cluster.parts["extender"], words, since):
            getattr(found.get(pod, PodTimes()), what).append(stamp)
    for pod, stamp in _told(cluster.kubelet.part, TAKEN_UP, since):
        found.get(pod, PodTimes()).taken_up = stamp
    for line, stamp in agent_stamps(cluster.agent, "alloc.answered"):
        found.get(line["pod"], PodTimes()).answered = stamp
    return found


def _told(part: Part, words: str, since: float) -> Iterator[tuple[str, float]]:
    """The pods that a program's log names after those words, with the stamps of klog."""
    for line in part.said().splitlines():
        _, _, rest = line.partition(words)
        # The kubelet's `pods=[...]` as well as `pod=...`.
        pod = _POD.search(rest.partition(" pod")[2])
        if pod and (stamp := klog_stamp(line) or 0.0) >= since:
            yield pod[1], stamp


def _note_request(found: Mapping[str, PodTimes], event: Mapping[str, Any]) -> None:
    """Note what one answered request did to a pod, or to the lock for it."""
    about = event.get("objectRef") or {}
    if (event.get("responseStatus") or {}).get("code", 0) >= 300:
        return
    what = f"{event['verb']} {about.get('resource')}/{about.get('subresource', '')}"
    stamp = unix(event["stageTimestamp"])
    is_agents = event.get("userAgent", "").startswith("hami-agent/")
    if what == "patch nodes/":
        _note_lock(found, event.get("requestObject"), stamp, is_agents=is_agents)
    elif pod := found.get(about.get("name", "")):
        if what == "create pods/binding" and event["user"]["username"] == EXTENDER:
            pod.bound = stamp
        elif what == "patch pods/status" and is_agents:
            pod.settled = pod.settled or stamp


def _note_lock(
    found: Mapping[str, PodTimes], body: object, stamp: float, *, is_agents: bool
) -> None:
    if isinstance(body, list) and is_agents:
        if pod := found.get(_owner(body[0].get("value"))):
            pod.unlocked = pod.unlocked or stamp
    elif isinstance(body, dict) and not is_agents:
        noted = body["metadata"].get("annotations") or {}
        pod = found.get(_owner(noted.get(annotations.MUTEX_LOCK)))
        if pod and not pod.bound:  # a bind that was given up goes on, and takes the lock again
            pod.locked = stamp


def _owner(lock: str | None) -> str:
    return (lock or "").rpartition(",")[2]
