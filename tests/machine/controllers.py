"""The owners of pods in stories without faults: they look at the cluster and do what is missing."""

import asyncio
import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Protocol

from agent.sandbox.api_errors import Json, NotFoundError
from tests.machine.api import Store
from tests.machine.pods import Shape
from tests.machine.stories import Deployment, Job, StatefulSet

OWNER = "owner"
"""The annotation that names a pod's controller."""

_REVISION = "revision"
_REACTION = (0.005, 0.1)
_GRACE = 30
_TTL = 5.0
_BACKOFF_LIMIT = 6
_GIVEN_UP = 60
"""Rejected pods after which the owner of a deployment sees that it never starts."""


class Create(Protocol):
    """Make a pod of that name, or with a name made of it."""

    def __call__(
        self, name: str, shape: Shape, notes: Mapping[str, str], *, generated: bool = False
    ) -> None: ...


class Controllers:
    """All of them; each is asked after every change, a moment later."""

    def __init__(self, store: Store, chance: random.Random, create: Create) -> None:
        self._store = store
        self._chance = chance
        self._create = create
        self._all: list[_Controller] = []

    def begin(self, wanted: Job | StatefulSet | Deployment) -> None:
        """There is one more."""
        made: _Controller
        match wanted:
            case Job():
                made = _Jobs(wanted, self._store, self._create)
            case StatefulSet():
                made = _StatefulSets(wanted, self._store, self._create)
            case Deployment():
                made = _Deployments(wanted, self._store, self._create)
        self._all.append(made)
        self._store.stir()

    def roll(self) -> None:
        """Their owners want other pods."""
        for one in self._all:
            one.revision += 1
        self._store.stir()

    async def run(self) -> None:
        """Look and act, for ever."""
        while True:
            await self._store.until_news(_TTL)
            await asyncio.sleep(self._chance.uniform(*_REACTION))
            pods = self._store.select("pods")
            for one in self._all:
                one.look([pod for pod in pods if owner_of(pod) == one.name])


class _Controller:
    def __init__(self, name: str, store: Store, create: Create) -> None:
        self.name = name
        self.revision = 0
        self._store = store
        self._make = create

    def look(self, pods: Sequence[Json]) -> None:
        raise NotImplementedError

    def _create(self, name: str, shape: Shape, *, generated: bool) -> None:
        notes = {OWNER: self.name, _REVISION: str(self.revision)}
        self._make(name, shape, notes, generated=generated)

    def _delete(self, pod: Json, grace: int = _GRACE) -> None:
        metadata = pod["metadata"]
        try:
            self._store.delete("pods", metadata["namespace"], metadata["name"], grace=grace)
        except NotFoundError:
            return


class _Jobs(_Controller):
    def __init__(self, job: Job, store: Store, create: Create) -> None:
        super().__init__(job.name, store, create)
        self._job = job
        self._done: set[str] = set()
        self._over_at: float | None = None

    def look(self, pods: Sequence[Json]) -> None:
        self._done |= {uid(pod) for pod in pods if phase(pod) == "Succeeded"}
        active = [pod for pod in pods if not is_over(pod) and not is_leaving(pod)]
        if sum(phase(pod) == "Failed" for pod in pods) > _BACKOFF_LIMIT:
            return
        left = self._job.completions - len(self._done) - len(active)
        for _ in range(min(left, self._job.parallelism - len(active))):
            self._create(f"{self.name}-", self._job.shape, generated=True)
        if left > 0 or active:
            return
        now = asyncio.get_running_loop().time()
        self._over_at = now if self._over_at is None else self._over_at
        if now - self._over_at >= _TTL:
            for pod in pods:
                self._delete(pod)


class _StatefulSets(_Controller):
    def __init__(self, wanted: StatefulSet, store: Store, create: Create) -> None:
        super().__init__(wanted.name, store, create)
        self._wanted = wanted
        self._turns = [itertools.cycle(wanted.shapes) for _ in range(wanted.replicas)]

    def look(self, pods: Sequence[Json]) -> None:
        by_name = {pod["metadata"]["name"]: pod for pod in pods}
        for place, turn in enumerate(self._turns):
            pod = by_name.get(f"{self.name}-{place}")
            if pod is None:
                self._create(f"{self.name}-{place}", next(turn), generated=False)
            if not self._wanted.is_parallel and (pod is None or not is_ready(pod)):
                return
        old = [pod for pod in pods if _revision_of(pod) != self.revision]
        if old and all(map(is_ready, pods)):
            self._delete(max(old, key=lambda pod: str(pod["metadata"]["name"])))


class _Deployments(_Controller):
    def __init__(self, wanted: Deployment, store: Store, create: Create) -> None:
        super().__init__(wanted.name, store, create)
        self._wanted = wanted

    def look(self, pods: Sequence[Json]) -> None:
        if sum(map(is_over, pods)) >= _GIVEN_UP:
            return
        wanted = self._wanted.replicas
        alive = [pod for pod in pods if not is_leaving(pod) and not is_over(pod)]
        new = [pod for pod in alive if _revision_of(pod) == self.revision]
        old = [pod for pod in alive if _revision_of(pod) != self.revision]
        shape = self._wanted.shapes[self.revision % len(self._wanted.shapes)]
        for _ in range(min(wanted - len(new), wanted + 1 - len(alive))):
            self._create(f"{self.name}-", shape, generated=True)
        if old and sum(map(is_ready, alive)) >= wanted:
            self._delete(old[0])


def owner_of(pod: Json) -> str:
    """The name of its controller."""
    return str((pod["metadata"].get("annotations") or {}).get(OWNER, ""))


def uid(pod: Json) -> str:
    """Its UID."""
    return str(pod["metadata"]["uid"])


def phase(pod: Json) -> str:
    """Its phase."""
    return str(pod["status"].get("phase", ""))


def is_over(pod: Json) -> bool:
    """Whether it has ended."""
    return phase(pod) in ("Succeeded", "Failed")


def is_leaving(pod: Json) -> bool:
    """Whether it is being deleted."""
    return "deletionTimestamp" in pod["metadata"]


def is_ready(pod: Json) -> bool:
    """Whether all of it runs."""
    conditions = pod["status"].get("conditions") or ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _revision_of(pod: Json) -> int:
    return int(pod["metadata"]["annotations"][_REVISION])
