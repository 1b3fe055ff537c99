"""The ledger beside what the kubelet and the API server say: what differs, and what follows."""

import asyncio
import contextlib
import dataclasses
import datetime as dt
import functools
import math
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NoReturn, TypeVar

import msgspec
import structlog

from agent.cluster import ContainerView, NodeEvent, Phase, PodKey, PodTable, PodUid, PodView, Role
from agent.errors import AgentError, StateError, WitnessThrottled
from agent.hookdirs import HostHookDirs
from agent.kit.cell import Cell, News
from agent.kit.tasks import retry
from agent.kit.timing import IdleWaiter, Tally, loop_time
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
    mismatch,
)
from agent.model import SliceId, split_slice_id
from agent.ports import Clock, RecordsReader, Witness

log = structlog.get_logger(__name__)

T = TypeVar("T")

# How often the ledger is compared with the kubelet, in both modes. All numbers are seconds.

PERIOD = 60.0  # between Lists when nothing happens
QUIET = 0.5  # without an Allocate before a List, which can un-mark ids that one is giving out
QUIET_WITHIN = 10.0  # for which a List waits at most for that, in hami mode
PAUSE = 1.0  # between Lists while the kubelet may be about to book an answer
YOUNG = 4.0  # after an answer, for which that is so; later the next List confirms it
SETTLING = 30.0  # for a new kubelet to learn its pods: it knows none at first
SETTLING_PAUSE = 3.0  # between Lists in this time, until the kubelet has named all holders
RETRY = 15.0  # after a List that failed or left something to do, and while a row's pod has ended
THROTTLED_PAUSE = 0.02  # until PodResources is asked again: it serves 100 calls a second
DEADLINE = 2.0  # for one call to the kubelet, or for one directory

# How long a row stays while no List shows a container with it. The next List closes it.

GRACE = 60.0
"""If its pod is gone or failed, or no container can have its ids. Longer than SETTLING."""

UNREAD_GRACE = 600.0
"""In plain mode, if the kubelet's checkpoint file, which may name its ids, cannot be read."""

LOST_GRACE = 86_400.0
"""The same if the file named the ids under an earlier kubelet. After a lost checkpoint nothing
shows an init container that still runs."""

MISMATCH_EVENT = "SliceMismatch"

# The facts that the ledger is compared with, and the findings, in both modes.

Held = frozenset[SliceId]
Idle = Mapping[tuple[ContainerKey, dt.datetime], float]
"""Since when rows are seen without a container, by the time of their last answer: a row that is
answered again is not idle any more. The times are the loop's, which nobody sets."""


class ReconcileFacts(msgspec.Struct, frozen=True, dict=True):
    """The facts that a reconcile compares with the ledger.

    - `holdings`: the kubelet's answers about all pods. `elapsed`: the loop's time.
    - `recorded`: the ids in the kubelet's checkpoint file by container; None: not read.
    - `directories`: the names of the container directories; empty: not searched.
    - `idle`: as the last reconcile found it, of the same kubelet instance.
    """

    table: PodTable
    holdings: Sequence[Holding]
    epoch: KubeletEpoch
    now: dt.datetime
    elapsed: float = 0.0
    recorded: Mapping[ContainerKey, Held] | None = None
    directories: Collection[str] = ()
    idle: Idle = msgspec.field(default_factory=dict)

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

    @property
    def key(self) -> ContainerKey:
        """The key of the container's row."""
        return ContainerKey(self.pod.uid, self.container.name)


class Findings(msgspec.Struct, frozen=True):
    """What differs between the ledger and the facts.

    `confirmed`: rows as the kubelet confirms them. `over`: rows that no container can use any more.
    `strangers`: rows that only keep ids in use, also for each container to adopt.
    """

    confirmed: tuple[Row, ...] = ()
    over: tuple[Row, ...] = ()
    adopt: tuple[Adoption, ...] = ()
    strangers: tuple[Row, ...] = ()
    idle: Idle = msgspec.field(default_factory=dict)


def _closing(
    unused: Iterable[tuple[Row, float]], seen: ReconcileFacts
) -> tuple[Idle, tuple[Row, ...]]:
    """Which rows are idle, and which are over. `unused`: those, and the seconds that each stays."""
    idle, over = dict[tuple[ContainerKey, dt.datetime], float](), list[Row]()
    for row, grace in unused:
        name = row.key, row.answered_at
        idle[name] = seen.idle.get(name, seen.elapsed)
        if idle[name] + grace <= seen.elapsed:
            over.append(row)
    return idle, tuple(over)


def check_start(ledger: Ledger, ids: Iterable[SliceId]) -> None:
    """Refuse the start of the container that the kubelet holds `ids` for, if its row mismatches.

    Several rows can have the same ids, for example an init container's and that of a deleted pod.
    The last answer counts. A container without a row may start.
    """
    answered, wanted = ledger.rows_by(Decider.SCHEDULER), frozenset(ids)
    rows = [row for row in answered if frozenset(row.slice_ids) == wanted]
    row = max(rows, key=lambda row: row.answered_at, default=None)
    if row is not None and row.mismatched:
        raise mismatch(row)


# Compares plain mode's rows with the kubelet: which container holds a row, and when a row is over.


def judge_by_kubelet(ledger: Ledger, seen: ReconcileFacts, resource: str) -> Findings:
    """Compare the rows with a List.

    In plain mode that is all rows: a state file of an earlier version may have rows of hami mode.
    In hami mode it is the strangers' rows.

    While the kubelet starts it knows no pod; after a lost checkpoint it does not know which ids a
    running container holds. So a row is over only when no container can use it: its holder's pod is
    gone, or it never had a holder and no container has its ids. If the kubelet instance that named
    the holder no longer lists it, it is gone. In all other cases the kubelet's checkpoint file must
    agree: it forgets a pod only when the kubelet knows that the pod ended.
    """
    holders = {
        Holder(holding.namespace, holding.pod, container): ids
        for holding in seen.holdings
        for container in holding.containers
        if (ids := holding.ids_of(container, resource))
    }
    held = Held().union(*holders.values())
    # The id sets in the kubelet's checkpoint file, each with its number of pods; and the recorded
    # ids that no holder explains.
    by_pod = {(key.pod_uid, ids) for key, ids in (seen.recorded or {}).items()}
    recorded = Counter(ids for _, ids in by_pod)
    left = Held().union(*(recorded - Counter(holders.values())))
    with_row = {
        row.holder
        for row in ledger.rows
        if row.holder and holders.get(row.holder) == frozenset(row.slice_ids)
    }
    explained: set[Holder | None] = {row.holder for row in ledger.rows_by(Decider.SCHEDULER)}
    confirmed: list[Row] = []
    unused: list[tuple[Row, float]] = []

    for old in ledger.rows:
        row, holder, ids = old, old.holder, frozenset(old.slice_ids)
        if holder is None:
            holder = _only_holder(ids, holders, with_row, recorded[ids])
        elif holders.get(holder) != ids:
            holder = None

        if holder is not None or (old.holder is None and ids in recorded):
            explained.add(holder)
            row = msgspec.structs.replace(old, holder=holder, confirmed=True, epoch=seen.epoch)
            if row != old:
                confirmed.append(row)

        if row.holder is None:
            is_used = not held.isdisjoint(ids)  # any holder of these ids may use this row
        else:
            # A container that is listed with other ids was answered anew, for a row of hami mode.
            is_listed = row.pod_key in seen.by_pod
            is_used = holder is not None or (is_listed and row.holder not in holders)

        if not is_used:
            unused.append((row, _grace(row, seen, left)))

    # Holders of slices that no row explains.
    unheld = {frozenset(row.slice_ids) for row in ledger.rows if row.holder is None}
    strangers = (
        stranger_row(holder, ids, resource, seen)
        for holder, ids in sorted(holders.items())
        if not (holder in explained or ids in unheld) and any(map(split_slice_id, ids))
    )
    idle, over = _closing(unused, seen)
    return Findings(tuple(confirmed), over, strangers=tuple(strangers), idle=idle)


def _only_holder(
    ids: Held, holders: Mapping[Holder, Held], with_row: Collection[Holder], recorded: int
) -> Holder | None:
    """The holder of a row that has these ids and no holder yet.

    That is the only one with these ids, or the only one of them without a row. Otherwise, or if an
    init container has the same ids on record, the rows cannot be told apart: they keep no holder,
    and stay as long as any container has the ids.
    """
    sharers = [holder for holder, held in holders.items() if held == ids]
    new = [holder for holder in sharers if holder not in with_row]
    # An init container, which no List shows, has these ids too.
    if recorded > len(sharers):
        return None
    if len(sharers) == 1:
        return sharers[0]
    return new[0] if len(new) == 1 else None


def _grace(row: Row, seen: ReconcileFacts, left: Held) -> float:
    """How long the row stays while no container is seen with it; infinite: not known yet."""
    is_new = row.epoch != seen.epoch
    if row.holder is None and row.confirmed and is_new:  # only the file named it: init container
        return LOST_GRACE
    if row.holder is not None and row.confirmed and not is_new:
        return GRACE  # the kubelet instance that named its holder no longer lists it
    if is_new and not seen.holdings:
        return math.inf  # a kubelet that knows no pod has just started
    # The file, which alone names ordinary init containers, may still have the ids.
    if seen.recorded is None:
        return UNREAD_GRACE
    return GRACE if left.isdisjoint(row.slice_ids) else math.inf


def stranger_row(
    holder: Holder, ids: Iterable[SliceId], resource: str, seen: ReconcileFacts
) -> Row:
    """A row that only keeps the ids in use. Equal holders and ids get equal keys."""
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


# Compares hami mode's ledger with the kubelet and the API server.


def judge_by_scheduler(ledger: Ledger, seen: ReconcileFacts, resource: str) -> Findings:
    """Compare all rows with the kubelet's answers, and all answers with the rows.

    A pod that has ended holds nothing: kubelets before 1.34 list it until its object is deleted.
    """
    ended = {pod.key for pod in seen.table.pods.values() if pod.terminal}
    holdings = [each for each in seen.holdings if (each.namespace, each.pod) not in ended]
    seen = msgspec.structs.replace(seen, holdings=holdings)
    rows = ledger.rows_by(Decider.SCHEDULER)
    kept = judge_by_kubelet(Ledger(ledger.rows_by(Decider.KUBELET)), seen, resource)
    adopt = tuple(_adoptions(ledger, seen))
    idle, over = _closing(_unused(rows, seen), seen)
    return Findings(
        confirmed=(*(new for row in rows if (new := _confirm(row, seen)) != row), *kept.confirmed),
        over=(*over, *kept.over),
        adopt=adopt,
        strangers=tuple(_strangers(kept.strangers, adopt, ledger, seen)),
        idle={**idle, **kept.idle},
    )


def _confirm(row: Row, seen: ReconcileFacts) -> Row:
    """The row as the kubelet confirms it; unchanged if it does not.

    An init container is only in the kubelet's checkpoint file, which can be older than the kubelet
    instance. So the kubelet must also know the pod: otherwise the row would count as answered by
    this instance, and its unknown pod as dead.
    """
    pod = seen.table.pods.get(row.key.pod_uid)
    holding = seen.by_pod.get(row.pod_key)
    if pod is None or pod.terminal or holding is None:
        return row
    ids = holding.ids_of(row.key.container, row.resource)
    # PodResources does not list ordinary init containers; the checkpoint does.
    if row.role is Role.INIT:
        ids = frozenset(row.slice_ids if row.key in (seen.recorded or {}) else ())
    # The kubelet is admitting it, or started it without an Allocate, or lost its checkpoint.
    if not ids:
        return row
    slice_ids = tuple(sorted(ids))
    return msgspec.structs.replace(row, confirmed=True, epoch=seen.epoch, slice_ids=slice_ids)


def _unused(rows: Iterable[Row], seen: ReconcileFacts) -> Iterator[tuple[Row, float]]:
    """The rows without a container, as far as all views say, and the seconds that each stays.

    A kubelet that has just started knows no pod, and deleted pods may still run: rows are not idle
    under a new kubelet before it was asked, and GRACE is longer than SETTLING.
    """
    # A view that misses pods would close the rows of pods that run.
    if not seen.table.synced or seen.table.stale:
        return
    for row in rows:
        pod = seen.table.pods.get(row.key.pod_uid)
        if pod is None:
            # What the kubelet has may be the deleted pod, or its successor.
            if row.pod_key not in seen.by_pod or seen.table.named(*row.pod_key) is not None:
                yield row, GRACE
        elif pod.terminal:
            # One that the kubelet rejects at its start is failed while its containers still run.
            yield row, 0.0 if pod.phase is Phase.SUCCEEDED else GRACE


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
            key = ContainerKey(pod.uid, container.name)
            # What was answered stays: an annotation may be another one by now.
            if ledger.find(key) is not None:
                continue
            ids = holding.ids_of(container.name, container.resource) if holding else Held()
            is_new = pod.phase is Phase.PENDING and pod.reusable_name
            if is_new and seen.recorded is not None and key not in seen.recorded:
                # They are another pod's of that name, which may have been created and deleted
                # between two frames of the agent's watch: the kubelet's file lacks this UID.
                ids = Held()
            if ids or f"{pod.uid}_{container.name}" in seen.directories:
                yield Adoption(pod, container, tuple(sorted(ids)))


def _strangers(
    found: Iterable[Row], adopt: Iterable[Adoption], ledger: Ledger, seen: ReconcileFacts
) -> Iterator[Row]:
    """Those of `found` whose pod has no groups, and those to adopt, in case it cannot be done."""
    answered = {row.holder for row in ledger.rows_by(Decider.SCHEDULER)}
    to_adopt = {Holder(*each.pod.key, each.container.name) for each in adopt}
    for row in found if seen.table.synced else ():
        pod = seen.table.named(row.namespace, row.pod)
        is_known = pod is not None and (pod.groups or _may_hold_for_another(pod, ledger, seen))
        if row.holder not in answered and (row.holder in to_adopt or not is_known):
            yield row


def _may_hold_for_another(pod: PodView, ledger: Ledger, seen: ReconcileFacts) -> bool:
    """Whether the kubelet may hold the ids for a deleted pod of the same name.

    Either the table has it, or it was deleted while the agent was down and its row is still there.
    """
    return pod.phase is Phase.PENDING and (
        any(stone.pod.key == pod.key for stone in seen.table.tombstones)
        or any(
            row.pod_key == pod.key and row.key.pod_uid != pod.uid
            for row in ledger.rows_by(Decider.SCHEDULER)
        )
    )


# Compares the ledger with the kubelet after each answer, for each new kubelet and each minute.


async def _within(call: Awaitable[T], event: str) -> T | None:
    """The result of the call; None: it failed or took too long, and the log says so as `event`."""
    try:
        async with asyncio.timeout(DEADLINE):
            return await call
    except (AgentError, TimeoutError) as error:
        log.warning(event, err=str(error) or "out of time")
        return None


@dataclasses.dataclass(eq=False, kw_only=True)
class Reconcile:
    """Keeps the ledger equal to what the kubelet holds.

    It confirms rows, and reports a mismatch if the kubelet booked other GPUs than were offered. It
    adopts containers that the ledger does not know: another plugin answered them, or the state file
    was lost. It closes rows that no container can use any more; the rules for that differ by mode.

    - `taken`: the rows that a call is answering or the reconcile is closing, shared with Allocate:
      a row is never answered and closed at the same time.
    - `calls`: the kubelet's requests under way.
    - `adopt`: makes the row of a container that was answered, or returns None if the answer is
      unreadable. In plain mode it is None: no source has another plugin's answer there.
    """

    pods: Cell[PodTable]
    ledger: Cell[Ledger]
    epoch: Cell[KubeletEpoch | None]
    taken: set[ContainerKey]
    calls: IdleWaiter
    witness: Witness
    records: RecordsReader
    hooks: HostHookDirs
    clock: Clock
    resource: Cell[str]
    adopt: Callable[[Adoption], Awaitable[Row | None]] | None
    commit: Callable[[Callable[[Ledger], Ledger]], Awaitable[None]]
    say: Callable[[NodeEvent], None]

    def __post_init__(self) -> None:
        self._idle: Idle = {}
        self._has_searched = False
        """Whether all containers were adopted that only their directories show."""
        self.mismatches = Tally(
            "allocation_mismatches",
            "Containers for which the kubelet booked other GPUs than were offered and answered.",
        )

    async def run(self) -> NoReturn:
        """Reconcile at the start, after changes, for each new kubelet, and each minute."""
        await self.pods.until(lambda table: table.synced)
        news = News(self.pods, self.ledger, self.epoch)
        known, known_since = None, 0.0

        while True:
            epoch = self.epoch.value
            if epoch is None:
                await news.wait()
                continue

            if epoch != known:
                known, known_since = epoch, loop_time()
                self._idle = {}  # it does not know all its pods yet

            done = await self._list(epoch)
            listed_at = loop_time()

            while self.epoch.value == epoch:
                left = listed_at + self._pause(epoch, known_since, is_done=done) - loop_time()
                if left <= 0:
                    break
                await news.wait(left)

    def _pause(self, epoch: KubeletEpoch, known_since: float, *, is_done: bool) -> float:
        """Seconds from a List to the next one if nothing changes."""
        now, rows = self.clock.now(), self.ledger.value.rows
        # An answer in the future is not young: the clock was set back.
        ages = [
            (now - row.answered_at).total_seconds()
            for row in rows
            if not row.confirmed and row.epoch == epoch
        ]
        if any(0 <= age < YOUNG for age in ages):
            return PAUSE
        is_new = loop_time() - known_since < SETTLING
        if is_new and any(row.epoch != epoch for row in rows):
            return SETTLING_PAUSE
        is_ended = any(not row.is_live(self.pods.value) for row in rows)
        return RETRY if is_ended or not is_done else PERIOD

    async def _list(self, epoch: KubeletEpoch) -> bool:
        """Correct the ledger by a List of the kubelet `epoch`. False: something is left to do."""
        is_plain = self.adopt is None
        # In plain mode a List always waits for the Allocates under way, because it can un-mark ids
        # that decide who has what.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if is_plain else QUIET_WITHIN):
                await self.calls.idle_for(QUIET)

        lists = retry(self.witness.list, WitnessThrottled, THROTTLED_PAUSE)
        holdings = await _within(lists, "reconcile.unanswered")
        if holdings is None or self.epoch.value != epoch:
            return False

        found = None
        if not is_plain and not self._has_searched:
            found = await _within(self.hooks.found(), "hooks.not_searched")

        read = self.records(self.resource.value)
        recorded = await _within(read, "reconcile.records_unread")
        ledger = self.ledger.value
        seen = ReconcileFacts(
            table=self.pods.value,
            holdings=holdings,
            epoch=epoch,
            now=self.clock.now(),
            elapsed=loop_time(),
            recorded=recorded,
            directories=found or (),
            idle=self._idle,
        )
        judge = judge_by_kubelet if is_plain else judge_by_scheduler
        findings = judge(ledger, seen, self.resource.value)
        self._idle = findings.idle

        # A row that a call is answering is left to the next List, and no call takes one of these.
        over = [row for row in findings.over if row.key not in self.taken]
        closing = {row.key for row in over}
        self.taken.update(closing)

        try:
            # The directory goes before the row, so that a crash leaves none without a row.
            gone = {"", *await self._removed(row.directory for row in over if row.directory)}
            over = [row for row in over if row.directory in gone]
            # A call makes the directory before its row.
            wanted = [each for each in findings.adopt if each.key not in self.taken]
            made = [await self.adopt(each) for each in wanted] if self.adopt else []
            adopted = [row for row in made if row is not None]
            # Of an answer that cannot be read a row keeps the ids in use, and a later List tries
            # again.
            holders = {row.holder for row in adopted}
            new = adopted + [row for row in findings.strangers if row.holder not in holders]
            if not await self._write(ledger, findings.confirmed, new, over):
                return False
        finally:
            self.taken.difference_update(closing)

        # An answer that cannot be read is tried again with the next List, and hastens none.
        self._has_searched |= found is not None and len(adopted) == len(findings.adopt)
        return len(over) == len(findings.over)

    async def _removed(self, names: Iterable[str]) -> Sequence[str]:
        """Remove the container directories. Returns those that are gone."""
        gone: list[str] = []
        for name in names:
            try:
                async with asyncio.timeout(DEADLINE):
                    await self.hooks.remove(name)
                gone.append(name)
            except (AgentError, TimeoutError) as error:
                log.warning("hooks.not_removed", directory=name, err=str(error) or "out of time")
                if isinstance(error, TimeoutError):
                    break  # the disk does not answer: the others wait for the next List
        return gone

    async def _write(
        self, base: Ledger, confirmed: Sequence[Row], new: Sequence[Row], over: Sequence[Row]
    ) -> bool:
        """Commit what was found about `base`. False: it could not be written."""
        if not (confirmed or new or over):
            return True

        def change(ledger: Ledger) -> Ledger:
            # Rows that changed since `base` stay as they are.
            same = [row for row in confirmed if ledger.find(row.key) == base.find(row.key)]
            missing = [row for row in new if ledger.find(row.key) is None]
            return ledger.put(*same, *missing).drop(row.key for row in over)

        try:
            await self.commit(change)
        except StateError as error:
            log.warning("reconcile.put_off", err=str(error))
            return False

        for row in confirmed:
            old, is_kept = base.find(row.key), self.ledger.value.find(row.key) == row
            if row.mismatched and is_kept and not (old and old.mismatched and old.confirmed):
                self.mismatches.add()
                where = row.namespace, row.pod, row.pod_uid
                log.warning("ledger.mismatch", ns=row.namespace, pod=row.pod)
                self.say(NodeEvent(MISMATCH_EVENT, str(mismatch(row)), True, *where))

        for row in new:
            container = row.holder and row.holder.container
            event = "ledger.kept_unread" if row.adopted else "ledger.adopted"
            log.info(event, ns=row.namespace, pod=row.pod, ctr=container)

        for row in over:
            log.info("ledger.closed", pod_uid=row.key.pod_uid, ctr=row.key.container)

        return True
