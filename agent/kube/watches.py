"""Follows the Node and its pods."""

import asyncio
import datetime as dt
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import NoReturn

import msgspec
import structlog

from agent.cluster import (
    BIND_PHASE,
    MUTEX_LOCK,
    NOT_HERE,
    NodeView,
    PodChange,
    PodList,
    PodTable,
    PodUid,
    PodView,
    Tombstone,
    version_number,
)
from agent.errors import ApiError, ApiForbidden, ApiGone
from agent.kit.cell import Cell
from agent.kit.tasks import HEALTHY_AFTER, Allowance, Backoff
from agent.kit.timing import Lag, Tally, loop_time
from agent.kube.client import SHORTEST
from agent.ports import Clock, NodeApi, PodApi

log = structlog.get_logger(__name__)

DELAYS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
JITTER = 0.5
SPREAD = 4.0
"""Seconds: the longest random delay after what every client of a server meets at the same moment.
That is a break, an early end or a lost place."""


class Reopening:
    """Opens one watch again and again; `restarts` (one label) counts why each was over."""

    def __init__(self, restarts: Tally, random: random.Random) -> None:
        self.failures = 0
        """How many watches broke or ended too early since the last healthy one."""
        self._restarts = restarts
        self._random = random
        self._backoff = Backoff(DELAYS, JITTER, random)

    async def run(
        self, follow: Callable[[], Awaitable[None]], on_error: Callable[[ApiError], None]
    ) -> NoReturn:
        """Run `follow`, which is one watch, for ever; `on_error` takes each of its errors."""
        while True:
            began = loop_time()
            try:
                await follow()
            except ApiError as error:
                delay = self.delay(error, loop_time() - began)
                on_error(error)
            else:
                delay = self.delay(None, loop_time() - began)
            await asyncio.sleep(delay)

    def delay(self, failure: ApiError | None, lasted: float) -> float:
        """Seconds until the next watch after one that lasted so many seconds."""
        # Gone: the server forgot our place.
        reason = "gone" if isinstance(failure, ApiGone) else "error"
        self._restarts.add("ended" if failure is None else reason)
        if lasted >= HEALTHY_AFTER:
            self._backoff.reset()
            self.failures = 0
        if failure is None and lasted >= SHORTEST:
            return 0.0

        self.failures += 1
        asked = (failure.retry_after if failure else None) or 0.0
        delay = max(self._backoff.next() if self.failures > 1 else 0.0, asked)
        # All clients met the same, so they must not come back in the same moment.
        return delay + self._random.uniform(0.0, SPREAD)


# Follows this Node with one WATCH, which is opened again whenever it ends.

FORMER_LIFE = 60.0
"""Seconds for which a removed lock still proves the right of the pod that it named. A bind can wait
in the scheduler's queue for longer than the grace period of its lock."""

FORMER_LOCKS = 64
"""The most former locks that are kept: the scheduler takes fewer than two a second."""


class NodeWatch:
    """Sole writer of the view of the Node (None: not seen yet, or deleted).

    `restarts` counts the watches that ended, by reason. `returns` counts how often the view became
    current again after the API server was lost.
    """

    def __init__(self, api: NodeApi, node: Cell[NodeView | None], random: random.Random) -> None:
        self.restarts = Tally(
            "node_watch_restarts_total", "Watches of this Node that ended.", ("reason",)
        )
        self.returns = Cell(0)
        self._api = api
        self._node = node
        self._watch = Reopening(self.restarts, random)
        self._floor = 0
        """The version of the agent's last write since this watch began. Older frames are late."""
        self._is_failing = False
        """The API server was lost and has not sent the Node since."""

    async def run(self) -> NoReturn:
        """Keep the view up to date for ever."""
        await self._watch.run(self._follow, self._on_error)

    async def refresh(self) -> NodeView | None:
        """The Node by one GET, which updates the view. The caller sets the deadline.

        Raises ApiError.
        """
        held = self._node.value
        node = await self._api.get_node()
        if node is not None:
            self.on_answer(node)
        elif self._node.value is held:  # no frame was newer than the answer
            self._set(None)
        return node

    def on_answer(self, node: NodeView) -> None:
        """Update the view from the answer to a request, unless the watch showed a newer Node."""
        held = self._node.value
        version = version_number(node.resource_version)
        if held is None or not 0 < version <= version_number(held.resource_version):
            self._floor = version
            self._set(node)

    def _set(self, node: NodeView | None) -> None:
        """Set the view, with the locks that were removed lately."""
        held = self._node.value
        if held is not None and node is not None:
            now = loop_time()
            former = [(text, until) for text, until in held.former_locks if until > now]
            gone = held.annotations.get(MUTEX_LOCK, "")
            if gone and node.annotations.get(MUTEX_LOCK) != gone:
                former.insert(0, (gone, now + FORMER_LIFE))
            node = msgspec.structs.replace(node, former_locks=tuple(former[:FORMER_LOCKS]))
        elif held is not None:
            log.warning("node.deleted")

        self._node.set(node)

    async def _follow(self) -> None:
        """Follow one watch to its end. Frames come in order; only the agent's writes overtake."""
        self._floor = 0
        async for node in self._api.watch_node():
            if node is None or version_number(node.resource_version) >= self._floor:
                self._set(node)

            if self._is_failing:
                self._is_failing = False
                log.info("node.followed")
                self.returns.set(self.returns.value + 1)

    def _on_error(self, error: ApiError) -> None:
        if not self._is_failing:
            log.warning("node.lost", err=str(error))
        self._is_failing = True


# Follows the pods of this node with LIST and WATCH; keeps deleted pods for 10 minutes.

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
KEEP = dt.timedelta(minutes=10)
GRAVES = 1024


class PodWatch:
    """Sole writer of the pod table. `restarts` counts the watches that ended, by reason.

    `resource`: the resource name by which containers are counted.
    """

    def __init__(
        self,
        api: PodApi,
        table: Cell[PodTable],
        clock: Clock,
        random: random.Random,
        resource: Cell[str],
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
        self._group = asyncio.TaskGroup()
        self._next: asyncio.Task[PodTable | ApiError] | None = None
        """The next LIST for callers, which has not begun."""
        self._lists = Allowance(LISTS, LISTS_REFILL)
        self._owners_lists = Allowance(LISTS, OWNERS_REFILL)
        self._lag = Lag()

    async def run(self) -> None:
        """Keep the table up to date for ever."""
        async with asyncio.TaskGroup() as self._group:
            self._group.create_task(self._watch.run(self._follow, self._on_error))
            # Count all containers again when the resource name changes, without a request.
            async for _ in self._resource.follow():
                self._publish()

    async def refresh(self, *, is_owners: bool = False) -> PodTable:
        """The table after one LIST that began after this call, or after the first LIST of all.

        Concurrent callers share the LIST. The caller sets the deadline. `is_owners`: the owner of
        the node lock may be asking. Raises ApiError, also when the allowance is used up.
        """
        if not self._table.value.synced:
            table = await self._table.until(lambda table: table.synced or table.stale)
            if table.synced:
                return table
        else:
            lists = self._owners_lists if is_owners else self._lists
            if not lists.allows(now := loop_time()):
                raise ApiError("too many requests by pods that the agent does not know")
            lists.spend(now)

        if self._next is None or self._next.done():
            listing = self._list()
            try:
                self._next = self._group.create_task(listing)
            except RuntimeError as error:  # run() ended by a defect and begins again in seconds
                listing.close()
                raise ApiError("the agent does not follow the pods now") from error
        task = self._next
        await asyncio.wait((task,))  # one caller may give up, and others wait
        answer = ApiError("the LIST was given up") if task.cancelled() else task.result()
        if isinstance(answer, ApiError):
            raise answer
        return answer

    async def find_uid(self, namespace: str, name: str) -> PodUid:
        """The UID of the pod that has this name now. The caller sets the deadline.

        NOT_HERE: no pod has the name, or this node may not read it. Raises ApiError: not known.
        """
        try:
            pod = await self._api.get_pod(namespace, name)
        except ApiForbidden:
            pod = None
        if pod is None:
            return NOT_HERE

        held = self._table.value.pods.get(pod.uid)
        if held is not None and _is_newer(pod.resource_version, held.resource_version):
            self._publish({**self._table.value.pods, pod.uid: pod})
        return pod.uid

    async def _follow(self) -> None:
        """Follow one watch to its end; begin with a LIST if there is none to begin from."""
        if not self._version:
            self._apply_list(await self._api.list_pods())

        async for change in self._api.watch_pods(self._version):
            table = self._table.value
            if table.stale:
                log.info("pods.followed", version=self._version)
                self._table.set(
                    msgspec.structs.replace(table, stale=False, lost_at=None, lost_reason="")
                )
            self._apply_change(change)

    def _on_error(self, error: ApiError) -> None:
        before, is_gone = self._table.value, isinstance(error, ApiGone)
        table = msgspec.structs.replace(before, stale=True)
        if is_gone:  # no outage: the server answers, but has forgotten what came after the table
            log.info("pods.gone")
        else:
            table = msgspec.structs.replace(
                table, lost_at=before.lost_at or self._clock.now(), lost_reason=str(error)
            )
            if not before.stale:
                log.warning("pods.lost", err=str(error))

        if is_gone or self._watch.failures % PATIENCE == 0:
            self._version = ""
        self._table.set(table)

    def _apply_change(self, change: PodChange) -> None:
        """Apply one frame, unless a LIST was newer."""
        version, pod, pods = change.resource_version, change.pod, dict(self._table.value.pods)
        if not version_number(version) or _is_newer(version, self._version):
            self._version = version
        else:
            pod = None

        if pod is None:  # a bookmark comes each minute: old tombstones go
            self._publish()
            return
        held = pods.pop(pod.uid, None)
        if held is not None and _is_newer(held.resource_version, version):
            return  # a GET was newer; later frames follow

        if change.deleted:
            self._publish(pods, dead=(pod,))
        else:
            self._publish({**pods, pod.uid: pod})

    def _apply_list(self, found: PodList) -> None:
        """Replace the table by a LIST. A pod that it does not have was deleted.

        If a watch or another LIST was newer, the table already has all of it.
        """
        if self._version and not _is_newer(found.resource_version, self._version):
            return

        self._version = found.resource_version
        pods = {pod.uid: pod for pod in found.pods}
        dead = [pod for uid, pod in self._table.value.pods.items() if uid not in pods]
        self._publish(pods, dead=dead)
        log.info("pods.listed", pods=len(pods), gone=len(dead))

    async def _list(self) -> PodTable | ApiError:
        """One LIST, which goes on if its callers give up: the table is newer after it."""
        self._next = None  # who asks from now on needs a later one
        try:
            async with self._lag.within(LIST_PATIENCE):
                self._apply_list(await self._api.list_pods())
        except (ApiError, TimeoutError) as error:
            return error if isinstance(error, ApiError) else ApiError("out of time")
        return self._table.value

    def _publish(
        self, pods: Mapping[PodUid, PodView] | None = None, dead: Iterable[PodView] = ()
    ) -> None:
        """Set the table: `pods` (None: the same as before) and the recently deleted pods."""
        old, now, name = self._table.value, self._clock.now(), self._resource.value
        present = old.pods if pods is None else pods

        # Without the fields that tenants can make long, to bound memory.
        slim = (
            msgspec.structs.replace(
                pod,
                annotations={k: text for k, text in pod.annotations.items() if k == BIND_PHASE},
                groups=None,
                groups_error="",
                message="",
            )
            for pod in dead
        )
        graves = {
            # The clock may have been set back since.
            grave.pod.uid: Tombstone(grave.pod.asking_by(name), min(grave.deleted_at, now))
            for grave in (*old.tombstones, *(Tombstone(pod, now) for pod in slim))
            if grave.pod.uid not in present and now - grave.deleted_at < KEEP
        }
        self._table.set(
            msgspec.structs.replace(
                old,
                pods={uid: pod.asking_by(name) for uid, pod in present.items()},
                tombstones=tuple(graves.values())[-GRAVES:],
                synced=old.synced or pods is not None,
            )
        )


def _is_newer(version: str, than: str) -> bool:
    return version_number(version) > version_number(than)
