"""Follows the pods of this node with LIST and WATCH; keeps deleted pods for 10 minutes."""

import asyncio
import datetime as dt
import random
from collections.abc import Iterable, Mapping
from typing import NoReturn

import msgspec
import structlog

from agent.core.allocation.evidence import NOT_HERE
from agent.core.cluster.annotations import BIND_PHASE
from agent.core.cluster.changes import PodChange, PodList, version_number
from agent.core.cluster.pods import PodTable, PodUid, PodView, Tombstone
from agent.core.errors import ApiError, ApiForbidden, ApiGone
from agent.core.ports import Clock, PodApi
from agent.kit.backoff import Allowance, Throttle
from agent.kit.cell import Cell
from agent.kit.reopening import Reopening
from agent.kit.running_time import Lag
from agent.kit.tally import Tally

log = structlog.get_logger(__name__)

PATIENCE = 5
"""Consecutive failed watches before the agent lists all pods again."""
LIST_PATIENCE = 2.0
"""Seconds for a LIST that calls wait for. No call waits longer."""
LISTS = 120
LISTS_REFILL = 2.0
OWNERS_REFILL = 0.25
"""Allowance for LISTs that calls cause: 120 at once, more than a kubelet runs pods, then one every
2 s. A tenant can cause them without end, and each one scans all pods of the cluster. While a lock
is held its owner may be asking: such LISTs have the same of their own, and four a second, for the
scheduler gives no more locks."""
WARN_PERIOD = 60.0
KEEP = dt.timedelta(minutes=10)
GRAVES = 1024


class PodWatch:
    """Sole writer of the pod table. `restarts` counts the watches that ended, by reason.

    `resource`: the resource name by which containers are counted; None: the API port has counted
    them.
    """

    def __init__(
        self,
        api: PodApi,
        table: Cell[PodTable],
        clock: Clock,
        random: random.Random,
        resource: Cell[str] | None = None,
    ) -> None:
        self.restarts = Tally(
            "pod_watch_restarts_total", "Watches of this node's pods that ended.", ("reason",)
        )
        self._api = api
        self._table = table
        self._clock = clock
        self._resource = resource
        self._watch = Reopening(self.restarts, random)
        self._version = ""
        """The resource version of the table; empty: a LIST is needed."""
        self._asked = asyncio.Event()
        self._answers: list[asyncio.Future[PodTable]] = []
        self._lists = Allowance(LISTS, LISTS_REFILL)
        self._owners_lists = Allowance(LISTS, OWNERS_REFILL)
        self._warnings = Throttle(WARN_PERIOD)
        self._lag = Lag()

    async def run(self) -> None:
        """Keep the table up to date for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep())
            group.create_task(self._answer())
            group.create_task(self._bury())
            if self._resource is not None:
                group.create_task(self._recount(self._resource))

    async def refresh(self, *, is_owners: bool = False) -> PodTable:
        """The table after one LIST that began after this call, or after the first LIST of all.

        Concurrent callers share the LIST. The caller sets the deadline. `is_owners`: the owner of
        the node lock may be asking. Raises ApiError, also when the allowance is used up.
        """
        if self._table.value.synced:
            self._spend_list(self._owners_lists if is_owners else self._lists)
        answer: asyncio.Future[PodTable] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        self._asked.set()
        return await answer

    async def look(self, namespace: str, name: str) -> PodUid:
        """The UID of the pod that has this name now. The caller sets the deadline.

        NOT_HERE: no pod has the name, or this node may not read it. Raises ApiError: not known.
        """
        try:
            pod = await self._api.get_pod(namespace, name)
        except ApiForbidden:
            return NOT_HERE
        if pod is None:
            return NOT_HERE
        held = self._table.value.pods.get(pod.uid)
        if held is not None and _is_newer(pod.resource_version, held.resource_version):
            self._publish({**self._table.value.pods, pod.uid: self._counted(pod)})
        return pod.uid

    async def _keep(self) -> NoReturn:
        while True:
            self._watch.opening()
            try:
                if not self._version:
                    self._take(await self._api.list_pods())
                await self._follow()
            except ApiGone:
                delay = self._start_over()
            except ApiError as error:
                delay = self._give_up(error)
            else:
                delay = self._watch.ended()
            await asyncio.sleep(delay)

    async def _follow(self) -> None:
        """Follow one watch to its end."""
        async for change in self._api.watch_pods(self._version):
            if self._table.value.stale:
                log.info("pods.followed", version=self._version)
                self._mark(stale=False)
            self._apply(change)

    def _start_over(self) -> float:
        """Prepare a new LIST after a 410. Returns the seconds until then."""
        self._mark(stale=True)
        self._version = ""
        delay = self._watch.gone()
        log.info("pods.gone", again_in=round(delay, 3))
        return delay

    def _give_up(self, error: ApiError) -> float:
        """Note a failed LIST or watch. Returns the seconds until the next try."""
        delay = self._watch.broke(at_least=error.retry_after or 0.0)
        if self._watch.failures == 1:
            log.warning("pods.lost", err=str(error))
        if self._watch.failures % PATIENCE == 0:
            self._version = ""
        self._mark(stale=True)
        return delay

    def _mark(self, *, stale: bool) -> None:
        self._table.set(msgspec.structs.replace(self._table.value, stale=stale))

    def _apply(self, change: PodChange) -> None:
        """Apply one frame, unless a LIST was newer."""
        version = version_number(change.resource_version)
        if version and version <= version_number(self._version):
            return
        self._version = change.resource_version
        if change.pod is None:
            return
        pods = dict(self._table.value.pods)
        held = pods.pop(change.pod.uid, None)
        if held is not None and _is_newer(held.resource_version, change.resource_version):
            return  # a GET was newer; later frames follow
        if change.deleted:
            self._publish(pods, dead=(self._counted(change.pod),))
        else:
            pods[change.pod.uid] = self._counted(change.pod)
            self._publish(pods)

    def _take(self, found: PodList) -> None:
        """Replace the table by a LIST. A pod that it does not have was deleted.

        If a watch or another LIST was newer, the table already has all of it.
        """
        if self._version and version_number(found.resource_version) <= version_number(
            self._version
        ):
            return
        self._version = found.resource_version
        pods = {pod.uid: self._counted(pod) for pod in found.pods}
        before = self._table.value
        dead = tuple(pod for uid, pod in before.pods.items() if uid not in pods)
        self._publish(pods, dead=dead)
        if not before.synced:
            answers, self._answers = self._answers, []
            for answer in answers:
                _succeed(answer, self._table.value)
        log.info("pods.listed", pods=len(pods), gone=len(dead))

    async def _answer(self) -> NoReturn:
        """LIST for the waiting callers. A LIST that hangs delays no later call."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._asked.wait()
                await self._table.until(lambda table: table.synced or table.stale)
                self._asked.clear()
                answers, self._answers = self._answers, []
                group.create_task(self._list([one for one in answers if not one.done()]))

    async def _list(self, waiting: list[asyncio.Future[PodTable]]) -> None:
        """One LIST for these callers."""
        if not waiting:
            return
        try:
            async with self._lag.within(LIST_PATIENCE):
                found = await self._api.list_pods()
        except (ApiError, TimeoutError) as error:
            for answer in waiting:
                _fail(answer, error)
            return
        self._take(found)
        for answer in waiting:
            _succeed(answer, self._table.value)

    def _spend_list(self, lists: Allowance) -> None:
        """Spend the allowance for one LIST. Raises ApiError: none is left."""
        now = asyncio.get_running_loop().time()
        if lists.allows(now):
            lists.spend(now)
            return
        left_out = self._warnings.admit()
        if left_out is not None:
            log.warning("pods.list_left_out", most=LISTS, refill=LISTS_REFILL, others=left_out)
        raise ApiError("too many requests by pods that the agent does not know")

    async def _bury(self) -> NoReturn:
        """Forget deleted pods after KEEP."""
        while True:
            table = await self._table.until(lambda table: bool(table.tombstones))
            oldest = min(grave.deleted_at for grave in table.tombstones)
            left = (oldest + KEEP - self._clock.now()).total_seconds()
            await asyncio.sleep(min(max(left, 1.0), KEEP.total_seconds()))
            self._publish()

    async def _recount(self, resource: Cell[str]) -> None:
        """Count all containers again when the resource name changes, without a request."""
        async for _ in resource.follow():
            table = self._table.value
            pods = {uid: self._counted(pod) for uid, pod in table.pods.items()}
            graves = tuple(
                msgspec.structs.replace(grave, pod=self._counted(grave.pod))
                for grave in table.tombstones
            )
            self._table.set(msgspec.structs.replace(table, pods=pods, tombstones=graves))

    def _counted(self, pod: PodView) -> PodView:
        return pod if self._resource is None else pod.asking_by(self._resource.value)

    def _publish(
        self, pods: Mapping[PodUid, PodView] | None = None, dead: Iterable[PodView] = ()
    ) -> None:
        """Set the table: `pods` (None: the same as before) and the recently deleted pods."""
        old, now = self._table.value, self._clock.now()
        present = old.pods if pods is None else pods
        graves = {
            grave.pod.uid: grave
            if grave.deleted_at <= now
            else msgspec.structs.replace(grave, deleted_at=now)
            for grave in (*old.tombstones, *(Tombstone(_slim(pod), now) for pod in dead))
            if grave.pod.uid not in present and now - grave.deleted_at < KEEP
        }
        self._table.set(
            PodTable(
                pods=present,
                tombstones=tuple(graves.values())[-GRAVES:],
                synced=old.synced or pods is not None,
                stale=old.stale,
            )
        )


def _slim(pod: PodView) -> PodView:
    """A deleted pod without the fields that tenants can make long, to bound memory."""
    kept = {key: text for key, text in pod.annotations.items() if key == BIND_PHASE}
    return msgspec.structs.replace(pod, annotations=kept, groups=None, groups_error="", message="")


def _is_newer(version: str, than: str) -> bool:
    return version_number(version) > version_number(than)


def _succeed(answer: asyncio.Future[PodTable], table: PodTable) -> None:
    if not answer.done():
        answer.set_result(table)


def _fail(answer: asyncio.Future[PodTable], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error if isinstance(error, ApiError) else ApiError("out of time"))
