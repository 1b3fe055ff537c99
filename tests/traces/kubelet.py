"""The kubelet of a replay: what its books and its checkpoint say beside the trace's requests.

It books a pod just before it admits it, and drops it when it was rejected, is terminal or deleted;
it hears of that only between two admissions. Its Get has only a name, lists no ordinary init
container, and answers 10 questions at once and 100 a second. An entry of the checkpoint whose pod
is gone stays until the next admission. Ids of an init container that is over go to the next
container of its pod first, and where they are enough, it asks for no preference.
"""

import asyncio
import dataclasses
from collections.abc import Iterable

from agent.cluster import PodUid
from agent.errors import WitnessThrottled, WitnessUnsupported
from agent.ledger import ContainerKey, Holding
from agent.model import SliceId
from tests.traces.trace import RESOURCE, Json, TracedCall

ANSWER = 0.0006
"""Seconds for one Get."""
BURST = 10
RATE = 100.0


@dataclasses.dataclass(slots=True)
class _Booked:
    pod: Json
    ids: dict[str, frozenset[SliceId]] = dataclasses.field(default_factory=dict)

    @property
    def uid(self) -> str:
        uid: str = self.pod["metadata"]["uid"]
        return uid

    @property
    def holding(self) -> Holding:
        metadata, spec = self.pod["metadata"], self.pod["spec"]
        sidecars = [one for one in spec["initContainers"] if one.get("restartPolicy") == "Always"]
        return Holding(
            metadata["namespace"],
            metadata["name"],
            {
                one["name"]: {RESOURCE: self.ids[one["name"]]} if one["name"] in self.ids else {}
                for one in (*sidecars, *spec["containers"])
            },
        )


class TracedKubelet:
    """Witness, RecordsReader and Containers. `can_get`: it is 1.34 or later."""

    def __init__(self, all_ids: Iterable[str], *, can_get: bool = True) -> None:
        self._can_get = can_get
        self._all = tuple(all_ids)
        self._books: dict[tuple[str, str], _Booked] = {}
        self._records: set[ContainerKey] = set()
        self._running: dict[str, set[str]] = {}
        self._is_admitting = False
        self._unheard: list[Json] = []
        self._tokens = float(BURST)
        self._counted = 0.0

    def begin(self, pod: Json) -> None:
        """An Allocate for a container of the pod begins."""
        key = _key(pod)
        if key not in self._books or self._books[key].uid != pod["metadata"]["uid"]:
            self._books[key] = _Booked(pod)
        self._is_admitting = True
        active = {booked.uid for booked in self._books.values()}
        self._records = {one for one in self._records if one.pod_uid in active}

    def reused(self, call: TracedCall) -> tuple[SliceId, ...]:
        """The ids for it of init containers that are over; none where they are too few."""
        booked = self._books[_key(call.pod)]
        spec = call.pod["spec"]
        over = {one["name"] for one in spec["initContainers"] if "restartPolicy" not in one}
        held = [one for name, ids in booked.ids.items() if name in over for one in sorted(ids)]
        return tuple(held[: len(call.ids)]) if len(held) >= len(call.ids) else ()

    def free(self) -> tuple[SliceId, ...]:
        """The ids that no container holds."""
        taken = {
            one for booked in self._books.values() for held in booked.ids.values() for one in held
        }
        return tuple(SliceId(one) for one in self._all if one not in taken)

    def end(self, pod: Json, container: str, ids: tuple[SliceId, ...]) -> None:
        """The Allocate has ended; without a container it was refused."""
        key = _key(pod)
        if container:
            self._books[key].ids[container] = frozenset(ids)
            self._records.add(ContainerKey(PodUid(pod["metadata"]["uid"]), container))
        else:
            del self._books[key]
        self._is_admitting = False
        unheard, self._unheard = self._unheard, []
        for gone in unheard:
            self._drop(gone)

    def see(self, pod: Json, *, deleted: bool) -> None:
        """The API server has another state of the pod."""
        status = pod["status"]
        told = (*status["containerStatuses"], *status["initContainerStatuses"])
        self._running[pod["metadata"]["uid"]] = {
            one["containerID"].rpartition("://")[2]
            for one in told
            if "running" in one["state"] and not deleted
        }
        if deleted or status["phase"] in {"Succeeded", "Failed"}:
            if self._is_admitting:
                self._unheard.append(pod)
            else:
                self._drop(pod)

    async def get(self, namespace: str, pod: str) -> Holding | None:
        await asyncio.sleep(ANSWER)
        if not self._can_get:
            raise WitnessUnsupported("unknown method Get")
        self._spend()
        booked = self._books.get((namespace, pod))
        return None if booked is None else booked.holding

    async def list(self) -> tuple[Holding, ...]:
        await asyncio.sleep(ANSWER)
        self._spend()
        return tuple(booked.holding for booked in self._books.values())

    async def read(self, resource: str) -> dict[ContainerKey, frozenset[SliceId]] | None:
        assert resource == RESOURCE
        return dict.fromkeys(self._records, frozenset[SliceId]())

    async def begun(self) -> None:
        return None

    async def running(self, ids: frozenset[str]) -> frozenset[str]:
        return ids & {one for alive in self._running.values() for one in alive}

    def _drop(self, pod: Json) -> None:
        key = _key(pod)
        if key in self._books and self._books[key].uid == pod["metadata"]["uid"]:
            del self._books[key]

    def _spend(self) -> None:
        now = asyncio.get_running_loop().time()
        self._tokens = min(BURST, self._tokens + (now - self._counted) * RATE)
        self._counted = now
        if self._tokens < 1:
            raise WitnessThrottled("rejected by rate limit")
        self._tokens -= 1


def _key(pod: Json) -> tuple[str, str]:
    return pod["metadata"]["namespace"], pod["metadata"]["name"]
