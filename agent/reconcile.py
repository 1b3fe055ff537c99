"""The ledger beside what the kubelet and the API server say: what differs, and what follows."""

import asyncio
import contextlib
import dataclasses
import datetime as dt
import functools
import math
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NoReturn, TypeVar

import msgspec
import structlog

from agent.cluster import (
    ContainerView,
    NodeEvent,
    Phase,
    PodKey,
    PodTable,
    PodUid,
    PodView,
    Role,
)
from agent.errors import AgentError, Refusal, StateError, WitnessThrottled
from agent.hookdirs import Cleared, DiskRoom, HostHookDirs, kept_event
from agent.kit.cell import Cell, News
from agent.kit.tasks import retry
from agent.kit.timing import IdleWaiter, Tally, until_tick
from agent.ledger import (
    PLAIN,
    ContainerEdits,
    ContainerKey,
    Decider,
    Holder,
    Holding,
    KubeletEpoch,
    Ledger,
    Row,
    container_directory,
    mismatch,
)
from agent.model import SliceId, has_passed, split_slice_id
from agent.ports import Clock, KubeletRecords, Witness

log = structlog.get_logger(__name__)

T = TypeVar("T")


async def _within(seconds: float, call: Awaitable[T], event: str) -> T | None:
    """The result of the call; None: it failed or took longer, and the log says so as `event`."""
    try:
        async with asyncio.timeout(seconds):
            return await call
    except (AgentError, TimeoutError) as error:
        log.warning(event, err=str(error) or "out of time")
        return None


def check_start(ledger: Ledger, ids: Iterable[SliceId]) -> None:
    """Refuse the start of the container that the kubelet holds `ids` for, if its row mismatches.

    Several rows can have the same ids, for example an init container's and that of a deleted pod.
    The last answer counts. A container without a row may start.

    Raises:
        Refusal: the kubelet booked other GPUs than those that were offered and answered.
    """
    wanted = frozenset(ids)
    answered = ledger.rows_by(Decider.SCHEDULER)
    rows = [row for row in answered if frozenset(row.slice_ids) == wanted]
    row = max(rows, key=lambda row: row.answered_at, default=None)
    if row is not None and row.mismatched:
        raise mismatch(row)


# How often the ledger is compared with the kubelet, in both modes. All numbers are seconds.

PERIOD = 60.0
"""Between Lists when nothing happens."""

QUIET = 0.5
"""Without an Allocate before a List. A List can un-mark ids that an Allocate is giving out."""

PAUSE = 1.0
"""Between Gets for an answer that the kubelet has not booked yet."""

SETTLING = 30.0
"""For a new kubelet to learn its pods. It knows none at first."""

SETTLING_PAUSE = 3.0
"""Between Lists in this time, until the kubelet has named the holders of all rows."""

RETRIES = (1.0, 2.0, 5.0, 15.0)
"""Until the next List after the first, second, … failure in a row."""

THROTTLED_PAUSE = 0.02
"""Until PodResources is asked again after it throttled a call: it serves 100 calls a second."""

DEADLINE = 2.0
"""For one call to the kubelet, or for one directory."""

UNCONFIRMED_AFTER = dt.timedelta(seconds=60)
"""After this time a row that the kubelet has not confirmed counts as unconfirmed."""


# The facts that the ledger is compared with, and the findings, in both modes.

EVER = dt.datetime.min.replace(tzinfo=dt.UTC)


class ReconcileFacts(msgspec.Struct, frozen=True, dict=True):
    """The facts that a reconcile compares with the ledger.

    - `holdings`: the kubelet's answers about all pods; to confirm rows, some are enough.
    - `recorded`: the ids in the kubelet's checkpoint file by container; None: not read.
    - `directories`: the names of the container directories; empty: not searched.
    - `since`: when this process began to see all pods.
    - `failed`: since when pods are seen as failed.
    - `idle`: since when rows are seen without a holder.
    """

    table: PodTable
    holdings: Sequence[Holding]
    epoch: KubeletEpoch
    now: dt.datetime
    recorded: Mapping[ContainerKey, frozenset[SliceId]] | None = None
    directories: frozenset[str] = frozenset()
    since: dt.datetime = EVER
    failed: Mapping[PodUid, dt.datetime] = msgspec.field(default_factory=dict)
    idle: Mapping[ContainerKey, dt.datetime] = msgspec.field(default_factory=dict)

    @functools.cached_property
    def by_pod(self) -> Mapping[PodKey, Holding]:
        """The kubelet's answers by the pod's name."""
        return {(each.namespace, each.pod): each for each in self.holdings}


class Adoption(msgspec.Struct, frozen=True):
    """A container that was answered and that the ledger does not know.

    `ids`: the kubelet's; empty: the kubelet lost its checkpoint too.
    """

    pod: PodView
    container: ContainerView
    ids: tuple[SliceId, ...]


def stranger_row(
    holder: Holder, ids: Iterable[SliceId], resource: str, seen: ReconcileFacts
) -> Row:
    """A row that only keeps the ids in use: the container's answer is not known.

    Equal holders and ids get equal keys.
    """
    slice_ids = tuple(sorted(ids))
    name = "/".join((*msgspec.structs.astuple(holder), *slice_ids))
    return Row(
        key=ContainerKey(PodUid(uuid.uuid5(uuid.NAMESPACE_OID, name).hex), PLAIN),
        holder=holder,
        shares=(),
        slice_ids=slice_ids,
        edits=ContainerEdits(),
        answered_at=seen.now,
        epoch=seen.epoch,
        decided_by=Decider.KUBELET,
        confirmed=True,
        adopted=True,
        resource=resource,
    )


class Findings(msgspec.Struct, frozen=True):
    """What differs between the ledger and the facts.

    - `confirmed`: rows that the kubelet confirms, with their new values.
    - `over`: rows that no container can use any more.
    - `adopt`: containers to adopt. `strangers`: rows that only keep ids in use, also for each
      container to adopt.
    - `idle`: for the next reconcile. `due`: when the next row may be over if nothing changes.
    """

    confirmed: tuple[Row, ...] = ()
    over: tuple[Row, ...] = ()
    adopt: tuple[Adoption, ...] = ()
    strangers: tuple[Row, ...] = ()
    idle: Mapping[ContainerKey, dt.datetime] = msgspec.field(default_factory=dict)
    due: dt.datetime | None = None


def gaps(ledger: Ledger, now: dt.datetime) -> tuple[int, int]:
    """How many rows have drift or cannot be compared; how many should be confirmed by now.

    Drift: the agent could not offer the right ids before the answer. The kubelet used the ids of an
    init container again, or another plugin answered.
    """
    late = Counter(
        row.role is Role.INIT
        for row in ledger.rows
        if not row.confirmed and has_passed(UNCONFIRMED_AFTER, row.answered_at, now)
    )
    drifted = sum(
        row.confirmed and row.has_gpu_mismatch and not row.offered
        for row in ledger.rows_by(Decider.SCHEDULER)
    )
    return drifted + late[True], late[False]


# Compares plain mode's rows with the kubelet: which container holds a row, and when a row is over.

GONE_GRACE = dt.timedelta(seconds=10)
"""How long a row stays when the kubelet instance that named its holder no longer lists it."""

UNSEEN_GRACE = dt.timedelta(seconds=60)
"""How long a row without a holder stays if the kubelet's checkpoint file does not name its ids."""

UNREAD_GRACE = dt.timedelta(minutes=10)
"""The same if that file cannot be read."""

LOST_GRACE = dt.timedelta(days=1)
"""The same if the file named the ids under an earlier kubelet. After a lost checkpoint nothing
shows an init container that still runs."""

Held = frozenset[SliceId]


def judge_by_kubelet(ledger: Ledger, seen: ReconcileFacts, resource: str) -> Findings:
    """Compare the rows with a List.

    In plain mode that is all rows: a state file of an earlier version may have rows of hami mode.
    In hami mode it is the strangers' rows.

    Only the kubelet reports pods here. While it starts it knows no pod; after a lost checkpoint it
    does not know which ids a running container holds. So a row is over only when no container can
    use it: its holder's pod is gone, or it never had a holder and no container has its ids. If the
    kubelet instance that named the holder no longer lists it, it is gone. In all other cases the
    kubelet's checkpoint file must agree: it forgets a pod only when the kubelet knows that the pod
    ended.
    """
    holders = {
        Holder(holding.namespace, holding.pod, container.name): ids
        for holding in seen.holdings
        for container in holding.containers
        if (ids := container.ids.get(resource))
    }
    listed = {(holding.namespace, holding.pod) for holding in seen.holdings}
    held = frozenset[SliceId]().union(*holders.values())
    # The id sets in the kubelet's checkpoint file, each with its number of pods; and the recorded
    # ids that no holder explains.
    by_pod = {(key.pod_uid, ids) for key, ids in (seen.recorded or {}).items()}
    recorded = Counter(ids for _, ids in by_pod)
    left = frozenset[SliceId]().union(*(recorded - Counter(holders.values())))
    used = dict(_matched(ledger.rows, holders, recorded))
    owners = {key: holder for holder, keys in used.items() for key in keys}
    rows: list[Row] = []
    idle: dict[ContainerKey, dt.datetime] = {}
    ends: dict[ContainerKey, dt.datetime] = {}

    for old in ledger.rows:
        row, holder, ids = old, owners.get(old.key), frozenset(old.slice_ids)
        if holder is not None or (old.holder is None and ids in recorded):
            row = msgspec.structs.replace(old, holder=holder, confirmed=True, epoch=seen.epoch)

        rows.append(row)
        if row.holder is None:
            is_used = not held.isdisjoint(ids)  # any holder of these ids may use this row
        elif row.holder in used:
            is_used = row.key in used[row.holder]
        else:
            # A container that is listed with other ids was answered anew, for a row of hami mode.
            is_listed = (row.holder.namespace, row.holder.pod) in listed
            is_used = is_listed and row.holder not in holders

        if is_used:
            continue

        # Times before its last answer do not count. After the clock was set back, times can lie in
        # the future: one of these then counts as now, and such an answer counts as old.
        since = seen.idle.get(row.key)
        is_unseen = since is None or since < row.answered_at <= seen.now
        idle[row.key] = seen.now if since is None or is_unseen else min(since, seen.now)
        grace = _grace(row, seen, left)
        if grace is not None:
            ends[row.key] = idle[row.key] + grace

    over = {key for key, end in ends.items() if end <= seen.now}
    # Holders of slices that no row explains.
    unheld = {frozenset(row.slice_ids) for row in ledger.rows if row.holder is None}
    scheduled = {row.holder for row in ledger.rows_by(Decider.SCHEDULER)}
    strangers = (
        stranger_row(holder, ids, resource, seen)
        for holder, ids in sorted(holders.items())
        if not (holder in used or holder in scheduled or ids in unheld)
        and any(map(split_slice_id, ids))
    )

    return Findings(
        confirmed=tuple(new for new, old in zip(rows, ledger.rows, strict=True) if new != old),
        over=tuple(row for row in rows if row.key in over),
        strangers=tuple(strangers),
        idle=idle,
        due=min((end for key, end in ends.items() if key not in over), default=None),
    )


def _matched(
    rows: Sequence[Row], holders: Mapping[Holder, Held], recorded: Mapping[Held, int]
) -> Iterator[tuple[Holder, frozenset[ContainerKey]]]:
    """The rows that each holder may use. A holder that no row explains is left out.

    A holder has its own rows. It also gets all rows with its ids that have no holder, if it is the
    only holder of these ids, or the only one without a row. If there are several such holders, or
    an init container with the same ids on record, their rows cannot be told apart: these rows keep
    no holder, and stay as long as any container has the ids.
    """
    own: dict[Holder, set[ContainerKey]] = {}
    free: dict[Held, set[ContainerKey]] = {}
    for row in rows:
        ids = frozenset(row.slice_ids)
        if row.holder is None:
            free.setdefault(ids, set()).add(row.key)
        elif holders.get(row.holder) == ids:
            own.setdefault(row.holder, set()).add(row.key)

    sharers = Counter(holders.values())
    new = Counter(ids for holder, ids in holders.items() if holder not in own)
    for holder, ids in holders.items():
        keys = own.get(holder, set())
        is_alone = sharers[ids] == 1 or (not keys and new[ids] == 1)
        if is_alone and recorded.get(ids, 0) <= sharers[ids]:
            keys = keys | free.get(ids, set())

        if keys:
            yield holder, frozenset(keys)


def _grace(row: Row, seen: ReconcileFacts, left: Held) -> dt.timedelta | None:
    """How long the row stays while no container is seen with it; None: not known yet.

    `left`: the recorded ids that no holder explains.
    """
    is_new = row.epoch != seen.epoch
    if row.holder is None and row.confirmed and is_new:  # only the file named it: init container
        return LOST_GRACE
    if row.holder is not None and row.confirmed and not is_new:
        return GONE_GRACE
    if is_new and not seen.holdings:
        return None  # a kubelet that knows no pod has just started
    if seen.recorded is None:
        return UNREAD_GRACE

    return UNSEEN_GRACE if left.isdisjoint(row.slice_ids) else None


# Compares hami mode's ledger with the kubelet and the API server, and returns findings.

VANISHED_GRACE = dt.timedelta(seconds=60)
"""How long a row stays after its pod is gone from the watch and the kubelet."""

LEAKED_AFTER = dt.timedelta(minutes=10)
"""How long a leaked container directory stays after its last change."""


def judge_by_scheduler(ledger: Ledger, seen: ReconcileFacts, resource: str) -> Findings:
    """Compare all rows with the kubelet's answers, and all answers with the rows.

    A pod that has ended holds nothing: kubelets before 1.34 list it until its object is deleted.
    """
    ended = {pod.key for pod in seen.table.pods.values() if _has_ended(pod, seen)}
    holdings = [each for each in seen.holdings if (each.namespace, each.pod) not in ended]
    seen = msgspec.structs.replace(seen, holdings=holdings)
    rows = ledger.rows_by(Decider.SCHEDULER)
    updates = [(row, _confirm(row, seen)) for row in rows]
    over = [row for row, update in updates if update is None and _vanished(row, seen)]
    adopt = tuple(_adoptions(ledger, seen))
    kept = judge_by_kubelet(Ledger(ledger.rows_by(Decider.KUBELET)), seen, resource)
    # When the rows of deleted pods may be over. VANISHED_GRACE is not shorter than PERIOD, so a pod
    # cannot be deleted and due between two Lists.
    ends = [kept.due] if kept.due else []
    deleted = (row for row in rows if row.key.pod_uid not in seen.table.pods)
    ends += (_gone_since(row, seen) + VANISHED_GRACE for row in deleted)

    return Findings(
        confirmed=(*(new for old, new in updates if new and new != old), *kept.confirmed),
        over=(*over, *kept.over),
        adopt=adopt,
        strangers=tuple(_strangers(kept.strangers, adopt, ledger, seen)),
        idle=kept.idle,
        due=min((end for end in ends if end > seen.now), default=None),
    )


def _confirm(row: Row, seen: ReconcileFacts) -> Row | None:
    """The row as the kubelet confirms it; None: it does not confirm it.

    An init container is only in the kubelet's checkpoint file, which can be older than the kubelet
    instance. So the kubelet must also know the pod: otherwise the row would count as answered by
    this instance, and its unknown pod as dead.
    """
    pod = seen.table.pods.get(row.key.pod_uid)
    holding = seen.by_pod.get((row.namespace, row.pod))
    if pod is None or pod.terminal or holding is None:
        return None

    ids = frozenset(row.slice_ids)
    if row.role is not Role.INIT:
        ids = holding.ids_of(row.key.container, row.resource)
    elif seen.recorded is None or row.key not in seen.recorded:
        return None

    if not ids:
        return None

    return msgspec.structs.replace(
        row, confirmed=True, epoch=seen.epoch, slice_ids=tuple(sorted(ids))
    )


def leaked(
    ages: Mapping[str, dt.timedelta], ledger: Ledger, seen: ReconcileFacts
) -> tuple[str, ...]:
    """The names of leaked container directories. `ages`: the time since each one's last change.

    Returns none while the view is incomplete, or while the kubelet has a pod that the API server
    does not: any directory could be that pod's. Plain mode's directories are never returned: their
    names have no pod.
    """
    table = seen.table
    if not table.synced or table.stale:
        return ()

    pods = [*table.pods.values(), *(tombstone.pod for tombstone in table.tombstones)]
    names = {pod.key for pod in pods}
    if not seen.by_pod.keys() <= names:
        return ()

    owners = {
        *(pod.uid for pod in pods if not _has_ended(pod, seen)),
        *(row.key.pod_uid for row in ledger.rows),
    }
    return tuple(
        name
        for name, age in sorted(ages.items())
        if age >= LEAKED_AFTER
        and PodUid(name.partition("_")[0]) not in owners
        and "_" in name  # the agent did not make a directory of another form
        and "-" in name.partition("_")[0]  # plain mode's names have no UID of a pod
    )


def _vanished(row: Row, seen: ReconcileFacts) -> bool:
    """Whether the row's pod has been gone for long enough.

    A kubelet that has just started knows no pod, and deleted pods may still run.
    """
    if not seen.table.synced or seen.table.stale:
        return False

    pod = seen.table.pods.get(row.key.pod_uid)
    if pod is not None:
        return _has_ended(pod, seen)
    if not has_passed(dt.timedelta(seconds=SETTLING), seen.epoch.since, seen.now):
        return False

    successor = seen.table.named(row.namespace, row.pod)
    if (row.namespace, row.pod) in seen.by_pod and successor is None:
        return False

    return has_passed(VANISHED_GRACE, _gone_since(row, seen), seen.now)


def _has_ended(pod: PodView, seen: ReconcileFacts) -> bool:
    """Whether the pod is terminal and no container of it runs any more.

    A pod that the kubelet rejects at its start is failed while its containers still run.
    """
    if pod.phase is Phase.FAILED:
        return has_passed(VANISHED_GRACE, seen.failed.get(pod.uid, seen.now), seen.now)
    return pod.phase is Phase.SUCCEEDED


def _gone_since(row: Row, seen: ReconcileFacts) -> dt.datetime:
    """When the pod was deleted. If that was while the agent was down, the agent's start counts."""
    for tombstone in seen.table.tombstones:
        if tombstone.pod.uid == row.key.pod_uid:
            return tombstone.deleted_at
    return max((at for at in (row.answered_at, seen.since) if at <= seen.now), default=EVER)


def _adoptions(ledger: Ledger, seen: ReconcileFacts) -> Iterator[Adoption]:
    """Containers with groups in the annotation that were answered and have no row.

    The kubelet names ids for them. If it lost its checkpoint, their directory shows it: only an
    answer makes one.
    """
    for pod in seen.table.pods.values():
        if pod.terminal or not pod.groups:
            continue

        holding = None if _may_hold_for_another(pod, ledger, seen) else seen.by_pod.get(pod.key)
        for container in pod.gpu_containers:
            resource = container.resource
            ids = holding.ids_of(container.name, resource) if holding else frozenset()
            key = ContainerKey(pod.uid, container.name)
            is_new = pod.phase is Phase.PENDING and pod.reusable_name
            if is_new and seen.recorded is not None and key not in seen.recorded:
                # They are another pod's of that name, which may have been created and deleted
                # between two frames of the agent's watch: the kubelet's file lacks this UID.
                ids = frozenset()

            is_made = bool(seen.directories) and (
                container_directory(pod.uid, container.name) in seen.directories
            )
            if (ids or is_made) and ledger.find(key) is None:
                yield Adoption(pod, container, tuple(sorted(ids)))


def _strangers(
    found: Iterable[Row], adopt: Iterable[Adoption], ledger: Ledger, seen: ReconcileFacts
) -> Iterator[Row]:
    """Those of `found` whose container was not answered, by us or by another plugin.

    That is, whose pod has no groups. A container to adopt is among them, in case its answer cannot
    be read.
    """
    answered = {row.holder for row in ledger.rows_by(Decider.SCHEDULER)}
    to_adopt = {Holder(*each.pod.key, each.container.name) for each in adopt}
    for row in found if seen.table.synced else ():
        pod = seen.table.named(row.namespace, row.pod)
        is_known = pod is not None and (pod.groups or _may_hold_for_another(pod, ledger, seen))
        if row.holder not in answered and (row.holder in to_adopt or not is_known):
            yield row


def _may_hold_for_another(pod: PodView, ledger: Ledger, seen: ReconcileFacts) -> bool:
    """Whether the kubelet may hold the ids for a deleted pod of the same name.

    Either the table has the deleted pod, or it was deleted while the agent was down and its row is
    still there. The time of the deletion does not matter.
    """
    if pod.phase is not Phase.PENDING:
        return False

    return any(tombstone.pod.key == pod.key for tombstone in seen.table.tombstones) or any(
        (row.namespace, row.pod) == pod.key and row.key.pod_uid != pod.uid
        for row in ledger.rows_by(Decider.SCHEDULER)
    )


# Removes container directories that were set aside, in small parts; reports what stays, and room.

CLEARING_PERIOD: Final = 3600.0
"""Seconds between attempts to remove what stays."""

RETRY: Final = 60.0
"""Seconds until the next attempt after the disk failed or did not answer."""

ROOM_PERIOD: Final = 60.0
"""Seconds between two looks at the space that is left."""

CLEARING_PAUSE: Final = 0.05
"""Seconds between two parts. A part takes about as long, so others have the disk half the time."""

CLEARING_DEADLINE: Final = 30.0
"""Seconds for one part. A single file can have terabytes."""


class Clearing:
    """Sole writer of `state` and `room`. `set_aside` changes when there is something to remove.

    Nothing waits for it: new directories are made meanwhile, however much a tenant has left.
    `say` posts one Event about the Node when directories stay, and no other until none stays.
    """

    def __init__(
        self, hooks: HostHookDirs, set_aside: Cell[int], say: Callable[[NodeEvent], None]
    ) -> None:
        self._hooks = hooks
        self._set_aside = set_aside
        self._say = say
        self.state: Cell[Cleared] = Cell(Cleared())
        self.room: Cell[DiskRoom] = Cell(DiskRoom())

    async def run(self) -> NoReturn:
        """Clear at the start, when something was set aside, and each CLEARING_PERIOD."""
        loop = asyncio.get_running_loop()
        news = News(self._set_aside)
        due = loop.time()

        while True:
            # What stays is not tried for each pod that ends: a tenant can make that costly.
            again = loop.time() >= due
            if again:
                due = loop.time() + CLEARING_PERIOD

            part = self._hooks.clear(again=again)
            cleared = await _within(CLEARING_DEADLINE, part, "hooks.not_cleared")
            if cleared is None:
                due = min(due, loop.time() + RETRY)
            else:
                self._note(cleared)
                await asyncio.sleep(CLEARING_PAUSE)

            if cleared is None or not cleared.more:
                await news.wait(max(due - loop.time(), 0.0))

    async def follow_room(self) -> NoReturn:
        """Set `room` each ROOM_PERIOD; not known while the disk fails or does not answer."""
        while True:
            room = await _within(CLEARING_DEADLINE, self._hooks.room(), "hooks.not_measured")
            self.room.set(room or DiskRoom())
            await asyncio.sleep(until_tick(ROOM_PERIOD))

    def _note(self, cleared: Cleared) -> None:
        before = self.state.value
        if cleared.more and cleared.kept <= before.kept:
            return  # during an attempt, what stayed before still counts

        if cleared.kept and not before.kept:
            log.warning("hooks.kept", directories=cleared.kept, err=cleared.why)
            self._say(kept_event(cleared))

        self.state.set(cleared)


# Compares the ledger with the kubelet after each answer, for each new kubelet and each minute.

SETTLE = 0.1
"""Seconds from an answer to the question whether the kubelet has booked it."""

YOUNG = 4.0
"""Seconds after an answer in which a Get asks for it alone. Later the next List confirms it."""

QUIET_WITHIN = 10.0
"""Seconds that a List waits at most for a time without an Allocate."""

SWEEP_PERIOD = 3600.0
"""Seconds between searches for leaked directories: of no row and of no pod of this node."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Reconcile:
    """Keeps the ledger equal to what the kubelet holds.

    It confirms rows, and reports a mismatch if the kubelet booked other GPUs than were offered. It
    adopts containers that the ledger does not know: another plugin answered them, or the state file
    was lost. It closes rows that no container can use any more; the rules for that differ by mode.

    - `epoch`: the present kubelet instance. `resource`: the present name.
    - `taken`: the rows that a call is answering or the reconcile is closing, shared with Allocate:
      a row is never answered and closed at the same time.
    - `rivals`: how many other plugins for the resource are gone; their answers are not known yet.
    - `calls`: the kubelet's requests under way.
    - `adopt`: makes the row of a container that was answered, or returns None if the answer is
      unreadable. In plain mode it is None: no source has another plugin's answer there, and leaked
      directories cannot be recognised by their names.
    - `commit` may raise StateError.
    """

    pods: Cell[PodTable]
    ledger: Cell[Ledger]
    epoch: Cell[KubeletEpoch | None]
    taken: set[ContainerKey]
    rivals: Cell[int]
    calls: IdleWaiter
    witness: Witness
    records: KubeletRecords
    hooks: HostHookDirs
    clock: Clock
    resource: Callable[[], str]
    adopt: Callable[[Adoption], Awaitable[Row | None]] | None
    commit: Callable[[Callable[[Ledger], Ledger]], Awaitable[None]]

    def __post_init__(self) -> None:
        self._silent = False
        self._swept_at = -math.inf
        self._since = EVER
        self._due: dt.datetime | None = None
        self._idle: Mapping[ContainerKey, dt.datetime] = {}
        self._closing: set[ContainerKey] = set()
        self._failed: Mapping[PodUid, dt.datetime] = {}
        self._asked: dict[ContainerKey, float] = {}
        self._names: frozenset[str] | None = frozenset() if self.adopt is None else None
        """The directories that a start finds; None: not searched yet."""
        self.unconfirmed: Cell[int] = Cell(0)
        self.drifted: Cell[int] = Cell(0)
        self.mismatches = Tally(
            "allocation_mismatches",
            "Containers for which the kubelet booked other GPUs than were offered and answered.",
        )

    async def run(self) -> NoReturn:
        """Reconcile for ever.

        - With a List: at the start, for each new kubelet, each minute, when a row's grace ends,
          when another plugin is gone, and after an answer without a known pod.
        - With a Get of the pod: after each other answer.
        """
        loop = asyncio.get_running_loop()
        await self.pods.until(lambda table: table.synced)
        self._since = self.clock.now()
        news = News(self.ledger, self.epoch, self.rivals)
        known: KubeletEpoch | None = None
        known_since, failures = 0.0, 0

        while True:
            epoch, rivals = self.epoch.value, self.rivals.value
            if epoch is None:
                await news.wait()
                continue

            if epoch != known:
                known, known_since = epoch, loop.time()
                self._idle = {}  # a new kubelet does not know all its pods yet

            failures = 0 if await self._list(epoch) else failures + 1
            if 0 < failures <= len(RETRIES):
                period = RETRIES[failures - 1]
            else:
                is_new = loop.time() - known_since < SETTLING
                is_behind = any(row.epoch != epoch for row in self.ledger.value.rows)
                period = SETTLING_PAUSE if is_new and is_behind else PERIOD

            due = loop.time() + period
            while self.epoch.value == epoch and self.rivals.value == rivals:
                left = due - loop.time()
                if self._due is not None:
                    left = min(left, (self._due - self.clock.now()).total_seconds())

                fresh = self._fresh(epoch)
                if left <= 0 or any(row.holder is None for row in fresh):
                    break  # only a List can name the pod

                if fresh:
                    await self._get(fresh)

                await news.wait(min(left, PAUSE) if self._asked else left)

    def _fresh(self, epoch: KubeletEpoch) -> list[Row]:
        """Unconfirmed rows of this kubelet that it was not asked about in the last PAUSE."""
        elapsed, now = asyncio.get_running_loop().time(), self.clock.now()
        self._asked = {key: at for key, at in self._asked.items() if elapsed - at < PAUSE}
        fresh: list[Row] = []
        for row in self.ledger.value.rows:
            if row.confirmed or row.epoch != epoch or row.key in self._asked:
                continue

            pod = self.pods.value.pods.get(row.pod_uid)
            is_there = row.holder is None or (pod is not None and not pod.terminal)
            if is_there and 0 <= (now - row.answered_at).total_seconds() < YOUNG:
                fresh.append(row)

        return fresh

    async def _get(self, rows: Sequence[Row]) -> None:
        await asyncio.sleep(SETTLE)
        epoch = self.epoch.value
        elapsed = asyncio.get_running_loop().time()
        self._asked.update((row.key, elapsed) for row in rows)
        holdings: list[Holding] = []

        for namespace, pod in dict.fromkeys((row.namespace, row.pod) for row in rows):
            try:
                async with asyncio.timeout(DEADLINE):
                    get = functools.partial(self.witness.get, namespace, pod)
                    holding = await retry(get, WitnessThrottled, THROTTLED_PAUSE)
            except (AgentError, TimeoutError) as error:
                log.debug("reconcile.unanswered", pod=pod, err=str(error))
                break
            if holding is not None:
                holdings.append(holding)

        # They only confirm rows: of the pods that were asked about, some are being answered, and
        # the kubelet may be about to ask for their other containers.
        is_init = any(row.role is Role.INIT for row in rows)
        recorded = await self._recorded() if is_init else None
        seen = ReconcileFacts(
            self.pods.value, holdings, epoch or KubeletEpoch(), self.clock.now(), recorded
        )
        ledger = self.ledger.value
        pairs = [(row, _confirm(row, seen)) for row in ledger.rows_by(Decider.SCHEDULER)]
        await self._write(ledger, [new for old, new in pairs if new and new != old], (), ())

    async def _list(self, epoch: KubeletEpoch) -> bool:
        """Reconcile with a List of the kubelet `epoch`. False: it should be tried again soon."""
        # In plain mode a List always waits for the Allocates under way, because it can un-mark ids
        # that decide who has what.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if self.adopt is None else QUIET_WITHIN):
                await self.calls.idle_for(QUIET)

        elapsed, self._due = asyncio.get_running_loop().time(), None
        rows = self.ledger.value.rows
        self._asked.update((row.key, elapsed) for row in rows if row.holder is None)

        try:
            async with asyncio.timeout(DEADLINE):
                holdings = await retry(self.witness.list, WitnessThrottled, THROTTLED_PAUSE)
        except (AgentError, TimeoutError) as error:
            if not self._silent:
                log.info("reconcile.unanswered", err=str(error) or "out of time")
            self._silent = True  # said once until it answers: it is tried again within seconds
            return False

        self._silent = False
        if self.epoch.value != epoch:
            return False

        if self._names is None:
            found = await _within(DEADLINE, self.hooks.found(), "hooks.not_searched")
            self._names = None if found is None else frozenset(found)

        done = await self._apply(holdings, epoch)
        if done and self._names is not None:
            self._names = frozenset()

        return done

    async def _recorded(self) -> Mapping[ContainerKey, frozenset[SliceId]] | None:
        """The ids in the kubelet's checkpoint file; None: it cannot be read."""
        read = self.records.read(self.resource())
        return await _within(DEADLINE, read, "reconcile.records_unread")

    async def _apply(self, holdings: Sequence[Holding], epoch: KubeletEpoch) -> bool:
        """Compare the ledger with a List and correct it. False: something is left to do."""
        recorded = await self._recorded()
        ledger, table, now = self.ledger.value, self.pods.value, self.clock.now()
        failed = (pod.uid for pod in table.pods.values() if pod.phase is Phase.FAILED)
        self._failed = {uid: min(self._failed.get(uid, now), now) for uid in failed}
        seen = ReconcileFacts(
            table=table,
            holdings=holdings,
            epoch=epoch,
            now=now,
            recorded=recorded,
            directories=self._names or frozenset(),
            since=self._since,
            failed=self._failed,
            idle=self._idle,
        )
        judge = judge_by_kubelet if self.adopt is None else judge_by_scheduler
        findings = judge(ledger, seen, self.resource())
        self._idle, self._due = findings.idle, findings.due

        # A commit that was given up may have dropped its rows later. One whose row is there may
        # still do so: no call answers that row, also if it is no longer over.
        self._free(self._closing - {row.key for row in ledger.rows})
        # A row that a call is answering is left to the next List.
        self._closing |= {row.key for row in findings.over} - self.taken
        self.taken.update(self._closing)
        mine = [row for row in findings.over if row.key in self._closing]
        over = await self._removed(mine)

        found = [await self.adopt(each) for each in findings.adopt] if self.adopt else []
        adopted = [row for row in found if row is not None]
        # Of an answer that cannot be read a row keeps the ids in use, and a later look tries again.
        holders = {row.holder for row in adopted}
        new = adopted + [row for row in findings.strangers if row.holder not in holders]

        written = await self._write(ledger, findings.confirmed, new, over)
        drifted, unconfirmed = gaps(self.ledger.value, now)
        self.drifted.set(drifted)
        self.unconfirmed.set(unconfirmed)

        if written and self.adopt is not None:
            await self._sweep(seen)

        return written and len(adopted) == len(found) and len(over) == len(findings.over)

    def _free(self, keys: set[ContainerKey]) -> None:
        self.taken.difference_update(keys)
        self._closing = self._closing - keys

    async def _removed(self, rows: Sequence[Row]) -> list[Row]:
        """Remove the rows' directories. Returns the rows whose directory is gone.

        The directory goes before the row, so that a crash leaves no directory without a row.
        """
        over: list[Row] = []
        with contextlib.suppress(TimeoutError):  # the others wait for the next look
            for row in rows:
                name = ""
                # A row may come from a state file that was changed by hand.
                with contextlib.suppress(Refusal):
                    if row.has_directory:
                        name = container_directory(row.key.pod_uid, row.key.container)

                if not name or await self._remove(name):
                    over.append(row)

        return over

    async def _write(
        self, base: Ledger, confirmed: Sequence[Row], new: Sequence[Row], over: Sequence[Row]
    ) -> bool:
        """Commit what was found about `base`. False: it could not be written."""
        if not (confirmed or new or over or self._closing):
            return True

        def change(ledger: Ledger) -> Ledger:
            # Rows that changed since `base` stay as they are.
            for row in confirmed:
                present = ledger.find(row.key)
                if present is not None and present == base.find(row.key):
                    ledger = ledger.put(row)

            for row in new:
                if ledger.find(row.key) is None:
                    ledger = ledger.put(row)

            return ledger.drop(row.key for row in over)

        try:
            await self.commit(change)
        except StateError as error:
            log.warning("reconcile.put_off", err=str(error))
            return False

        self._free(self._closing)  # no earlier commit is under way any more
        for row in confirmed:  # settlement posts the Event of a mismatch
            old, now = base.find(row.key), self.ledger.value.find(row.key)
            was_known = old is not None and old.mismatched and old.confirmed
            if row.mismatched and not was_known and now is not None and now.mismatched:
                self.mismatches.add()
                log.warning(
                    "ledger.mismatch", ns=now.namespace, pod=now.pod, err=str(mismatch(now))
                )

        for row in new:
            event = "ledger.kept_unread" if row.adopted else "ledger.adopted"
            tell = log.warning if row.adopted else log.info
            container = row.holder and row.holder.container
            tell(event, ns=row.namespace, pod=row.pod, ctr=container)

        for row in over:
            log.info("ledger.closed", pod_uid=row.key.pod_uid, ctr=row.key.container)

        return True

    async def _sweep(self, seen: ReconcileFacts) -> None:
        """Remove leaked directories if the last successful search is SWEEP_PERIOD ago."""
        elapsed = asyncio.get_running_loop().time()
        if elapsed - self._swept_at < SWEEP_PERIOD:
            return

        found = await _within(DEADLINE, self.hooks.found(), "hooks.not_searched")
        if found is None:
            return

        self._swept_at, now = elapsed, self.clock.now()
        ages = {name: now - changed for name, changed in found.items()}
        with contextlib.suppress(TimeoutError):
            for name in leaked(ages, self.ledger.value, seen):
                log.info("hooks.leaked", directory=name)
                await self._remove(name)

    async def _remove(self, name: str) -> bool:
        """Remove the container directory. False: this one cannot be removed.

        Raises TimeoutError: the disk does not answer, so it is useless to try another directory.
        """
        try:
            async with asyncio.timeout(DEADLINE):
                await self.hooks.remove(name)
        except AgentError as error:
            log.warning("hooks.not_removed", directory=name, err=str(error))
            return False
        except TimeoutError:
            log.warning("hooks.not_removed", directory=name, err="out of time")
            raise

        return True
