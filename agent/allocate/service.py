"""Answers Allocate in both modes: decide, claim the container's row, write it, answer.

Beside HAMi's scheduler an inquiry asks the kubelet and the API server until a decision can be made.
Its answers are kept for one call only.
"""

import abc
import asyncio
import contextlib
import dataclasses
import datetime as dt
import enum
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Final, TypeVar

import msgspec
import structlog
from typing_extensions import override

from agent.allocate.edits import check_library, container_edits, cuda_order, granted_share
from agent.allocate.match import (
    NOT_HERE,
    UNREAD,
    AskKubelet,
    AwaitLock,
    AwaitOthers,
    CheckRunning,
    Evidence,
    Grant,
    KubeletStart,
    KubeletView,
    ListPods,
    LookAtNode,
    LookAtPod,
    MatchSettings,
    Question,
    ReadRecords,
    UnlockedPods,
    decide,
    pair_groups,
    rejected_pod,
)
from agent.allocate.prefer import nearest, steer
from agent.allocate.room import GpuUse, Shortage
from agent.cluster import NodeEvent, NodeLock, NodeView, PodKey, PodTable, PodUid
from agent.errors import (
    AgentError,
    ApiError,
    KubeletError,
    Refusal,
    RefusalReason,
    StateError,
    WitnessThrottled,
    WitnessUnsupported,
)
from agent.hami.pod import former_locks, held_lock
from agent.hookdirs import HostHookDirs
from agent.kit.cell import Cell
from agent.kit.tasks import Allowance, retry
from agent.kit.timing import Budget, Durations, Lag, Starved, Tally
from agent.kit.turns import CallOrder, Turn
from agent.ledger import (
    ContainerEdits,
    ContainerKey,
    Decider,
    EditSettings,
    Holder,
    Holding,
    HookFacts,
    KubeletEpoch,
    Ledger,
    Row,
    container_directory,
)
from agent.model import GpuUuid, Inventory, Share, SliceId
from agent.ports import Clock, Containers, KubeletRecords, Witness
from agent.reconcile import DEADLINE, THROTTLED_PAUSE, Adoption
from agent.settle import REFUSED_EVENT

log = structlog.get_logger(__name__)

T = TypeVar("T")

# How long an Allocate waits for whom, in seconds of running time of our loop.
#
# The kubelet sets no deadline, and a refusal fails the pod. But while it waits it starts, stops and
# probes nothing on the whole node. So each peer has a time of its own for all waits of a call.

DISK_BUDGET = 10.0
"""For the node's disk. When it is silent for longer, the node offers no slice."""

KUBELET_BUDGET = 10.0
"""For all questions to the kubelet. A busy one is slow."""

API_BUDGET = 0.6
"""For all requests to the API server."""

OWNER_BUDGET = 2.0
"""The same for the pod that the node lock names, and while the watch may still show who asks. A
refusal fails a good pod, and the kubelet's own watch can be that much ahead of ours."""

LIST_PAUSE = 0.4
"""For a LIST after the first one."""

GET_PAUSE = 0.15
"""For the GET of a pod. That of the Node has what is left: without it a pod is refused."""

LOCK_PAUSE = 0.25
"""For the Node's watch to catch up with the pods' watch."""

OTHERS_PAUSE = 0.2
"""In which the call of a pod that the kubelet is admitting comes. If it comes, the one that waits
here is another's, and is refused as overtaken."""

UNANSWERED_PAUSES = (0.01, 0.05)
"""Until PodResources is asked again after a failure. A kubelet's restart breaks the connection
once; that must not fail a pod."""

PREFER_BUDGET = 0.2
"""For GetPreferredAllocation. The kubelet calls it just before Allocate."""

WATCH_PAUSE = 0.1
"""Of these, for the agent's watches to show a pod that the kubelet's watch has shown already.
Without this wait a preference would name any GPUs."""

WAIT_BURST = 16
WAIT_REFILL = 5.0
"""Waits of calls that nothing came of, for the node: so many at once, and then one every five
seconds. While a call waits the kubelet admits nobody, and a tenant can make pods without end that
are waited for in vain."""

MAX_QUESTIONS = 256
"""More than the pods of any node. A decision that asks more has a defect and is refused."""


# The steps of an Allocate, and the refusals when one of them fails or takes too long.


class AllocateStep(enum.StrEnum):
    """A step of an Allocate. The value is for the log."""

    HOOK = "look-at-hook-path"
    MATCH = "find-pod"
    CHECK = "check-ids"
    DIRECTORY = "make-directory"
    WRITE = "write-ledger"


_BELOW_THE_HOOK_PATH = {
    AllocateStep.HOOK: "HAMi-core's files on the node cannot be read",
    AllocateStep.DIRECTORY: "The container's directory on the node cannot be created",
}


def starved_refusal() -> Refusal:
    """The refusal when the agent itself had too little CPU to find the answer in time."""
    return Refusal(
        RefusalReason.STARVED,
        "The GPU agent of this node gets too little CPU to answer in time; ask the operator to "
        "raise its CPU request, and the pod's controller starts it again.",
    )


def disk_refusal(error: TimeoutError | StateError, step: AllocateStep) -> Refusal:
    """The refusal when the disk failed in `step`, or did not finish it in time."""
    reason = str(error) if isinstance(error, StateError) else "the disk has not answered in time"
    if step in _BELOW_THE_HOOK_PATH:
        return Refusal(
            RefusalReason.HOST_DIRECTORY,
            f"{_BELOW_THE_HOOK_PATH[step]} ({reason}); ask the operator to check the node's hook "
            "path and its disk.",
        )

    return Refusal(
        RefusalReason.STATE_UNWRITABLE,
        f"The agent cannot write its state ({reason}), so it answers no new container; ask the "
        "operator to check the node's disk.",
    )


def refusal_of(error: TimeoutError | StateError, step: AllocateStep) -> Refusal:
    """The refusal when that step failed or took too long."""
    if isinstance(error, Starved):
        return starved_refusal()
    if step is not AllocateStep.MATCH or isinstance(error, StateError):
        return disk_refusal(error, step)

    return Refusal(
        RefusalReason.OUT_OF_TIME,
        "The kubelet did not say in time which pod this is; its controller starts it again.",
    )


BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)

USED_LOCKS = 256
"""Node locks remembered, each with the pod that was answered under it. The scheduler takes fewer
in the 60 s in which a former lock proves a right."""


class AllocateCall(msgspec.Struct, eq=False):
    """One Allocate under way.

    - `turn`: says whether the kubelet has begun another container since.
    - `disk`: the time that it waits for the disk.
    - `row`: the row to answer; None: not known yet. `is_replay`: it was answered before.
    - `rejected`: the pod for which no further Allocate comes if this one is refused; None: not
      known.
    """

    turn: Turn
    disk: Budget
    step: AllocateStep = AllocateStep.HOOK
    row: Row | None = None
    is_replay: bool = False
    rejected: PodUid | None = None
    oversold: Shortage | None = None


# Answers: the host directory is made and the row is durable before the kubelet gets the answer.

OVERSOLD_EVENT = "GpuOversold"

_OF_NO_POD = frozenset(
    {
        RefusalReason.NO_POD_ADMITTED,
        RefusalReason.STATIC_POD,
        RefusalReason.MANY_PODS_ADMITTED,
    }
)
"""Refusals that no single pod can show: their Event is posted about the Node."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Allocation(abc.ABC):
    """Answers the kubelet. Calls may overlap; each claims its row before it waits for the disk.

    - `epoch`: the present kubelet instance. `edits`: how answers are made.
    - `commit` stores a change of the ledger (raises StateError), `hooks` makes directories.
    - `say` posts an Event about the Node. `noted` hears of each refusal, with its row if known.
    - `lag`: extends the deadlines of all calls.
    - `taken`: the rows that a call is answering or the reconcile is closing. Both share this set.
    - `waits`: how long all calls waited for what is outside the agent; what is left of an Allocate
      is the agent's own work.
    Source: kubernetes pkg/kubelet/cm/devicemanager/manager.go, Allocate.
    """

    inventory: Cell[Inventory]
    ledger: Cell[Ledger]
    edits: Cell[EditSettings]
    epoch: Callable[[], KubeletEpoch | None]
    hooks: HostHookDirs
    clock: Clock
    commit: Callable[[Callable[[Ledger], Ledger]], Awaitable[None]]
    say: Callable[[NodeEvent], None]
    noted: Callable[[Refusal, Row | None], None] = lambda _refusal, _row: None
    lag: Lag = dataclasses.field(default_factory=Lag)

    def __post_init__(self) -> None:
        self.order = CallOrder(self.epoch)
        self.taken: set[ContainerKey] = set()
        self.used_locks: dict[str, PodUid] = {}
        """For each of the last node locks, the pod that was answered under it."""
        self._pending: dict[ContainerKey, Row] = {}
        self.waits = Durations(
            "allocate_wait_seconds",
            "Seconds that an Allocate waited for the kubelet, the runtime, the API server, the "
            "hook path, a container's directory or the state on disk.",
            ("step",),
            BUCKETS,
        )
        self.results = Tally(
            "allocations_total",
            "Answers to Allocate by result and reason.",
            ("result", "reason"),
            expected=[("refused", gate.name.lower()) for gate in RefusalReason],
        )

    @abc.abstractmethod
    async def decide(self, ids: tuple[SliceId, ...], call: AllocateCall) -> None:
        """Set the row of the call, unless another call overtook it. Raises Refusal, StateError."""

    @abc.abstractmethod
    async def prefer(
        self, available: tuple[SliceId, ...], must_include: tuple[SliceId, ...], size: int
    ) -> tuple[SliceId, ...]:
        """The best `size` of the available ids.

        Never refuses: an error would fail the pod's admission and leak ids in the kubelet.
        """

    async def allocate(self, ids: tuple[SliceId, ...]) -> ContainerEdits:
        """The edits for the container that the kubelet is admitting. Raises Refusal.

        `ids`: the kubelet's slice ids, at least one.
        """
        with self.order.asked(ids) as turn:
            call = AllocateCall(turn, Budget(self.lag, DISK_BUDGET))
            try:
                row = await self._serve(ids, call)
            except Refusal as refusal:
                self._refused(refusal, call, len(ids))
                raise
            except (TimeoutError, StateError) as error:
                # The kubelet shows the text in the pod's status (UnexpectedAdmissionError): it must
                # say what to do.
                translated = refusal_of(error, call.step)
                self._refused(translated, call, len(ids))
                raise translated from error

        if call.oversold is not None:
            # It is served all the same. The scheduler has placed the pod, and would place the one
            # that its controller creates instead as well.
            what, total, limit = call.oversold.amounts
            text = (
                f"HAMi's scheduler has given out {total} of {what} of "
                f"{call.oversold.gpu.gpu.title}, which has {limit}: for a pod with sidecars or "
                "init containers it counts less than runs at one time. Delete one of the pods on "
                "this GPU, or let them ask for less."
            )
            self.say(NodeEvent(OVERSOLD_EVENT, text, warning=True))

        result = "replay" if call.is_replay else "ok"
        self.results.add(result, "")
        gpus, count = list(dict.fromkeys(row.gpus)), len(row.slice_ids)
        log.info("alloc.answered", result=result, **_log_fields(row), count=count, gpus=gpus)

        return row.edits

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Time the block as a wait for that."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            yield
        finally:
            self.waits.observe(loop.time() - began, what)

    def instance(self) -> KubeletEpoch:
        """The present kubelet instance, or one that no row names."""
        return self.epoch() or KubeletEpoch()

    async def wait_for_disk(self, call: AllocateCall, what: str, work: Awaitable[T]) -> T:
        """What the work returns, timed as a wait for that. Raises TimeoutError, Starved."""
        async with call.disk.within():
            with self.waiting(what):
                return await work

    def with_pending(self, ledger: Ledger) -> Ledger:
        """The ledger with the rows that are being written."""
        for row in self._pending.values():
            ledger = ledger.put(row)
        return ledger

    def held(self) -> frozenset[SliceId]:
        """The slice ids of all rows, also of those that are being written."""
        rows = self.with_pending(self.ledger.value).rows
        return frozenset(slice_id for row in rows for slice_id in row.slice_ids)

    async def _serve(self, ids: tuple[SliceId, ...], call: AllocateCall) -> Row:
        await self.decide(ids, call)
        # No await from here until the row is claimed: another call would decide on the same pod.
        row = call.row
        if row is None:
            raise await self._overtaken(call)

        # In plain mode the row comes first: only the row says later that the directory can be
        # removed. A row without a directory is closed like any other.
        is_row_first = row.decided_by is Decider.KUBELET
        self._pending[row.key] = row
        self.taken.add(row.key)

        try:
            if not call.turn.is_lost:
                if not is_row_first:
                    await self._make_directory(row, call, wipe=not call.is_replay)

                call.step = AllocateStep.WRITE
                await self.wait_for_disk(call, "disk", self.commit(lambda ledger: ledger.put(row)))
                if row.lock:
                    # The lock stands until it is released. Another pod that asks meanwhile is not
                    # its owner by right.
                    used = {**self.used_locks, row.lock: row.key.pod_uid}
                    self.used_locks = dict(list(used.items())[-USED_LOCKS:])

                if is_row_first and row.directory:
                    await self._make_directory(row, call, wipe=False)
            # Checked last: granting the earlier of two overlapping calls crashes the kubelet.
            if call.turn.is_lost:
                raise await self._overtaken(call)
        finally:
            self._pending.pop(row.key, None)
            self.taken.discard(row.key)

        return row

    async def _make_directory(self, row: Row, call: AllocateCall, *, wipe: bool) -> None:
        call.step = AllocateStep.DIRECTORY
        name = container_directory(row.key.pod_uid, row.key.container)
        await self.wait_for_disk(call, "directory", self.hooks.prepare(name, wipe=wipe))

    async def _overtaken(self, call: AllocateCall) -> Refusal:
        """The refusal of a call that must not be granted beside another one.

        If the kubelet will ask again, this waits until no other call is under way. Until then the
        kubelet begins no other container of the pod.
        """
        row = call.row if call.row and call.row.holder else None
        # For a new pod the kubelet does not ask again: nothing is gained by waiting.
        if call.is_replay or row is None:
            await self.order.until_alone(call.turn)  # each of them has its deadlines

        whose = f" for {row.key.container} of pod {row.namespace}/{row.pod}" if row else ""
        text = (
            "The kubelet lost its checkpoint and asks for several containers at once, so this "
            f"answer would crash it. It asks again{whose} in a few seconds if the container ran "
            "before; the controller of a new pod starts it again."
        )
        return Refusal(RefusalReason.OVERLAP, text)

    def _refused(self, refusal: Refusal, call: AllocateCall, count: int) -> None:
        """Record the refusal of `count` slices once, everywhere."""
        self.results.add("refused", refusal.gate.name.lower())
        log.warning(
            "alloc.refused",
            gate=refusal.gate.value,
            step=call.step.value,
            count=count,
            reason=refusal.sentence,
            **({} if call.row is None else _log_fields(call.row)),
        )
        self.noted(refusal, call.row)
        if refusal.gate in _OF_NO_POD:
            self.say(NodeEvent(REFUSED_EVENT, str(refusal), warning=True))


def _log_fields(row: Row) -> dict[str, str]:
    """The log fields that name a row's container; its drawn UID while no holder is known."""
    if row.holder is None:
        return {"uid": row.key.pod_uid}
    return {"ns": row.namespace, "pod": row.pod, "ctr": row.holder.container}


# Hami mode: the annotation that HAMi's scheduler wrote decides what a container gets.

PROMPT = dt.timedelta(seconds=0.5)
"""A list that the kubelet begins to take this soon after its socket appeared comes before its first
admission, 0.9 to 1.0 s after the socket."""

LOOK_DEADLINE = 0.4
"""Seconds for a look at the cgroups that must be over by then."""


@dataclasses.dataclass(eq=False, kw_only=True)
class HamiAllocation(Allocation):
    """The pod's annotation says what each container gets.

    Only the number of the kubelet's ids counts. The ids themselves may differ after a restart,
    which is never a reason to refuse.

    After a lost kubelet checkpoint PodResources says "known, no slices" of a pod that runs, of one
    whose container died, and of one that is being admitted. What the kubelet asks for depends on
    what it saw when it started. The agent looks when the kubelet begins to take its list (`run`):

    - The kubelet takes the set of running containers from the runtime, 0.35 s before its socket
      appears. The agent reads the cgroups, if the list was taken within 0.5 s after the socket.
    - It admits the pods that were there, one by one, from 0.9 s after its socket on, and asks in
      the order of the spec for each container that has no record and is not in that set, also if
      it has died since. A pod without a cgroup was dead: its first container that has not started
      since is next.
    - It asks for nothing in an admission before it took the list: it starts those pods unasked.
      Only a pod that was made since then counts as new.
    - It asks for any container that dies later, in parallel and in any order; after a refusal for
      the next one, and 8 to 10 s later again. All others are unknown: only a single possible
      container is served. A status proves no death: the former kubelet may have started the
      container again without telling.

    Refused (HA-2002): several possible containers of one count, in one pod or in several. A new pod
    that holds the node lock is served all the same: the kubelet knew it when it began the call, and
    no other is new. Refused (HA-2010) while the API server cannot be asked: a pod that has run, for
    a pod that no view shows may be the one.

    The facts that it reads, and the peers that it asks:

    - `orphaned_locks`: the locks that still stood when the pod that was answered under them was
      gone.
    - `match`: how pods are matched.
    - `registered`: the greatest amounts registered for each GPU in the last 60 s.
    - `refresh`: makes the one LIST of this node's pods; with `is_owners`: the lock's owner may need
      it. Raises ApiError.
    - `look_at_pod`: GETs the UID of the pod that has a name now. `look_at_node`: GETs the Node.
    - `streams`: how many list streams the kubelet has open.
    - `look`: opens the Node's watch at once if it is down. After an outage the scheduler and the
      kubelet may be back before it.
    """

    pods: Cell[PodTable]
    node: Cell[NodeView | None]
    orphaned_locks: Cell[Mapping[str, PodUid]]
    match: Cell[MatchSettings]
    registered: Callable[[], Mapping[GpuUuid, GpuUse]] = dict
    witness: Witness
    records: KubeletRecords
    containers: Containers
    refresh: Callable[..., Awaitable[PodTable]]
    look_at_pod: Callable[[str, str], Awaitable[PodUid]]
    look_at_node: Callable[[], Awaitable[None]]
    streams: Cell[int]
    look: Callable[[], None]

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.allowance = Allowance(WAIT_BURST, WAIT_REFILL)
        self.rejected: dict[PodUid, KubeletEpoch] = {}
        """The pods that were refused at their admission, by the kubelet instance that admitted
        them. That instance never asks for them again; a later one may."""
        self._offer: ContainerKey | None = None
        """The container for which the kubelet was last offered free ids of the right GPUs."""
        self._start = KubeletStart()
        self._started: tuple[KubeletEpoch | None, str] = None, ""
        """The kubelet instance of `_start`, and the resource that it began to take."""

    async def run(self) -> None:
        """See each kubelet begin to take the lists, for ever, and which pods have no cgroup then.

        From then on it asks for the containers of each pod that it admits; before, if it has lost
        its checkpoint, it does not know the resource, and starts them without asking. A new kubelet
        starts no container before its first admission.
        """
        async for streams in self.streams.follow():
            epoch, now = self.epoch(), self.clock.now()
            kubelet = epoch, self.match.value.resource
            # The same kubelet opens its stream again after a break: that is no new start.
            if streams == 0 or epoch is None or kubelet == self._started:
                continue

            is_prompt = dt.timedelta(0) <= now - epoch.since < PROMPT
            self._start = KubeletStart() if is_prompt else KubeletStart(asks_since=now)
            self._started = kubelet
            if is_prompt:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_DEADLINE):
                        self._start = KubeletStart(begun=await self.containers.begun())

    def start(self) -> KubeletStart:
        """What was seen of the present kubelet's start."""
        epoch = self.instance()
        if self._started == (epoch, self.match.value.resource):
            return self._start
        return KubeletStart(asks_since=epoch.since)  # such as one whose socket was only touched

    @override
    async def decide(self, ids: tuple[SliceId, ...], call: AllocateCall) -> None:
        """Set the row of the call, from which its effects follow. Raises Refusal."""
        inquiry = Inquiry(self, len(ids), call)
        try:
            facts = await self.wait_for_disk(call, "hook-path", self.hooks.facts())
            call.step = AllocateStep.MATCH
            grant = await inquiry.grant()
        except (Refusal, StateError, TimeoutError):
            call.rejected = rejected_pod(inquiry.newest())
            raise

        call.is_replay = call.turn.yields = grant.replay is not None
        call.oversold = grant.oversold
        offered, self._offer = self._offer == grant.key, None  # it counts for one answer
        pod, container = grant.candidate.pod, grant.candidate.container

        if grant.replay is not None:
            # It keeps its answer, byte for byte, and gets the ids of this call.
            call.row = msgspec.structs.replace(
                grant.replay,
                slice_ids=tuple(sorted(ids)),
                answered_at=self.clock.now(),
                epoch=self.instance(),
                confirmed=False,
                offered=offered,
            )
            return

        first = self._first(Adoption(pod, container, ids), grant.group, grant.shares, facts)
        call.row = msgspec.structs.replace(first, offered=offered, lock=grant.lock)
        check_library(facts, container)

    @override
    def _refused(self, refusal: Refusal, call: AllocateCall, count: int) -> None:
        """Exclude a pod that is refused at its admission: the kubelet does not ask for it again."""
        super()._refused(refusal, call, count)
        uid, table, epoch = call.rejected, self.pods.value, self.epoch()
        if call.row is not None and not call.is_replay:
            uid = call.row.key.pod_uid

        if uid is None or refusal.gate is RefusalReason.OVERLAP or epoch != call.turn.client:
            return  # after an overlap, and of a new kubelet, it may come again

        known = table.pods.keys() | {tombstone.pod.uid for tombstone in table.tombstones}
        self.rejected[uid] = self.instance()
        self.rejected = {uid: by for uid, by in self.rejected.items() if uid in known}

    @override
    async def prefer(
        self, available: tuple[SliceId, ...], must_include: tuple[SliceId, ...], size: int
    ) -> tuple[SliceId, ...]:
        """`size` of the available ids: on the annotated GPUs if possible, else on near ones."""
        turn, inquiry, grant = self.order.begin(), Inquiry(self, size, None), None
        try:
            # The Allocate that follows is for the same container: of no pod that is not known now.
            async with asyncio.timeout(PREFER_BUDGET):
                turn.all_there = await inquiry.names()
                grant = await inquiry.grant()
        except (AgentError, TimeoutError) as error:
            log.debug("prefer.unsteered", reason=str(error) or "out of time")
        finally:
            turn.there = {key: one is not None for key, one in inquiry.known.items()}

        held = self.held()
        chosen = self._offer = None  # an earlier offer is no longer what the kubelet was told
        if grant is not None:
            wanted = tuple(share.uuid for share in grant.shares)
            chosen = steer(available, must_include, wanted, held)
            self._offer = None if chosen is None else grant.key

        if chosen is None:
            gpus = {shared.uuid: shared.gpu for shared in self.inventory.value.gpus}
            chosen = nearest(available, must_include, size, gpus, held)

        turn.ids = frozenset(chosen)
        return chosen

    def claimed(self) -> frozenset[PodUid]:
        """The pods that cannot be asking: pods of taken rows, and pods refused at admission."""
        # One that has run was not at its admission, though a late view showed it so.
        pods, epoch = self.pods.value.pods, self.instance()
        ran = {uid for uid in self.rejected if (pod := pods.get(uid)) and pod.has_run}
        rejected = {uid for uid, by in self.rejected.items() if by == epoch}
        return frozenset(rejected - ran | {key.pod_uid for key in self.taken})

    async def adopt(self, found: Adoption) -> Row | None:
        """The row of a container that was answered and that the ledger does not know.

        Another agent answered it, or the ledger was lost. The scheduler's annotation says what it
        holds. If the kubelet has no ids for it, the kubelet lost its checkpoint and may ask again.
        None: the annotation cannot be read, or names a GPU that is not on this node.
        """
        try:
            async with asyncio.timeout(DEADLINE):
                facts = await self.hooks.facts()

            paired = pair_groups(found.pod.groups or (), found.pod.asking(found.container.resource))
            if found.container.name in paired:
                row = self._first(found, *paired[found.container.name], facts)
                epoch = row.epoch if found.ids else KubeletEpoch()
                return msgspec.structs.replace(row, confirmed=bool(found.ids), epoch=epoch)
        except (AgentError, TimeoutError) as error:
            why = str(error) or "out of time"
            log.warning("ledger.not_adopted", pod=found.pod.name, err=why)

        return None

    def _first(
        self, found: Adoption, group: int, shares: tuple[Share, ...], facts: HookFacts
    ) -> Row:
        """A new row, with its edits: they are made once. `group`: its place in `…-allocated`."""
        pod, container, named = found.pod, found.container, []
        for share in shares:
            gpu = self.inventory.value.find(share.uuid)
            if gpu is None:  # the inventory changed between the decision and here
                raise Refusal(
                    RefusalReason.UNKNOWN_GPU,
                    f"GPU {share.uuid} was removed during this call; create the pod again.",
                )

            named.append(granted_share(share, gpu))

        granted = cuda_order(named)
        key = ContainerKey(pod.uid, container.name)
        return Row(
            key=key,
            holder=Holder(pod.namespace, pod.name, container.name),
            role=container.role,
            group=group,
            shares=tuple(grant.share for grant in granted),
            slice_ids=tuple(sorted(found.ids)),
            edits=container_edits(
                key,
                granted,
                self.edits.value,
                facts,
                control_disabled=container.control_disabled,
            ),
            answered_at=self.clock.now(),
            epoch=self.instance(),
            resource=container.resource,
            priority=container.priority,
        )


_PEERS: Final = {
    AskKubelet: "kubelet",
    ReadRecords: "kubelet",
    AwaitOthers: "kubelet",
    CheckRunning: "runtime",
}
"""What a question waits for, in the metric; all others wait for the API server."""


class Inquiry:
    """Asks until a decision can be made for one call, with answers that are kept for it alone.

    `count`: how many slices are asked for. Without a `call` it is a preference's, and asks no API
    server. `known`: what the kubelet said of each pod that it was asked about.
    """

    def __init__(self, source: HamiAllocation, count: int, call: AllocateCall | None) -> None:
        self._source = source
        self._call = call
        self._api = Budget(source.lag, OWNER_BUDGET)
        self._kubelet = Budget(source.lag, KUBELET_BUDGET)
        self._disk = call.disk if call else Budget(source.lag, DISK_BUDGET)
        self._watch = Budget(source.lag, WATCH_PAUSE)
        self._is_starved = False
        self.known: dict[PodKey, Holding | None] = {}
        settings = source.match.value
        self._seen = Evidence(
            count=count,
            settings=settings,
            kubelet=KubeletView(KubeletEpoch(), start=source.start()),
            known=self.known,
            # A preference gives nothing away: it needs no right where `unique` asks for none, and
            # no GET of the Node.
            waited=call is None and settings.unlocked_pods is UnlockedPods.UNIQUE,
            node_read=call is None,
        )
        """The answers so far, with the views of the last step: see `newest`."""

    async def grant(self) -> Grant:
        """The decision.

        Raises:
            Refusal: the decision's, or a preference would need the API server, because the watches
                did not catch up.
        """
        for _ in range(MAX_QUESTIONS):
            evidence = self.newest()
            try:
                step = decide(evidence)
            except Refusal as refusal:
                # Which pod asks and by what right was not found out, for want of CPU.
                if self._is_starved and refusal.gate.value.startswith("HA-2"):
                    raise starved_refusal() from refusal
                raise

            if isinstance(step, Grant):
                return step

            if self._call:
                # Only an Allocate may ask the API server. A preference has 0.2 s.
                with self._source.waiting(_PEERS.get(type(step), "api-server")):
                    await self._answer(step)
            elif isinstance(step, AskKubelet | ReadRecords | CheckRunning):
                await self._answer(step)  # not measured: the kubelet waits for Allocates
            elif isinstance(step, LookAtPod):
                pod = evidence.table.named(*step.key)  # a preference binds nobody
                self._learn_uid(step.key, pod.uid if pod else NOT_HERE)
            elif not await self._caught_up(step, evidence):
                break

        raise Refusal(RefusalReason.OUT_OF_TIME, "The agent could not decide; report this.")

    async def names(self) -> frozenset[PodKey] | None:
        """All names that the kubelet knows, if dead containers may be asking; None: not known."""
        if not self._is_restarting(self.newest()):
            return None

        try:
            found = await retry(self._source.witness.list, WitnessThrottled, THROTTLED_PAUSE)
        except KubeletError:
            return None

        self.known.update({(one.namespace, one.pod): one for one in found})
        return frozenset(self.known)

    def _is_restarting(self, evidence: Evidence) -> bool:
        """Whether the kubelet may be restarting containers after it lost its checkpoint.

        It then starts several at once, and crashes when the earlier of two requests is granted.
        """
        rows = evidence.ledger.rows_by(Decider.SCHEDULER)
        return any(row.epoch != evidence.kubelet.epoch for row in rows)

    def newest(self) -> Evidence:
        """The newest views, with the answers to this call."""
        source, node = self._source, self._source.node.value
        epoch, turn = source.instance(), self._call.turn if self._call else None
        beside = tuple(one.all_there for one in turn.beside) if turn else ()
        if turn and turn.overtaken:
            beside = (None,)  # it is not known what was under way when the call began

        self._seen = msgspec.structs.replace(
            self._seen,
            table=source.pods.value,
            ledger=source.with_pending(source.ledger.value),
            lock=held_lock(node),
            released_locks=former_locks(node, asyncio.get_running_loop().time()),
            inventory=source.inventory.value,
            kubelet=msgspec.structs.replace(self._seen.kubelet, epoch=epoch),
            now=source.clock.now(),
            registered=source.registered(),
            claimed=source.claimed(),
            used_locks=source.used_locks,
            orphaned_locks=source.orphaned_locks.value,
            known_before=turn.there if turn else {},
            beside=beside,
        )
        return self._seen

    def _learn(self, **answers: object) -> None:
        self._seen = msgspec.structs.replace(self._seen, **answers)

    def _learn_of_kubelet(self, **answers: object) -> None:
        self._learn(kubelet=msgspec.structs.replace(self._seen.kubelet, **answers))

    def _learn_uid(self, key: PodKey, uid: PodUid | None) -> None:
        self._learn(pod_uids_read={**self._seen.pod_uids_read, key: uid})

    async def _answer(self, question: Question) -> None:
        match question:
            case AskKubelet():
                async with self._kubelet.within():
                    for key in (question.key, *question.others):
                        await self._ask(*key)
                        # The first one that it knows may be enough for a decision.
                        if self.known.get(key) is not None or not self._seen.kubelet.witnessed:
                            break
            case ReadRecords():
                async with self._from_disk("the kubelet's checkpoint"):
                    read = await self._source.records.read(self._seen.settings.resource)

                self._learn_of_kubelet(recorded=None if read is None else frozenset(read))
                self._learn(records_read=True)
            case CheckRunning():
                async with self._from_disk("the containers' cgroups"):
                    alive = await self._source.containers.running(question.ids)

                alive = question.ids if alive is None else alive  # silence proves no death
                self._learn_of_kubelet(alive=self._seen.kubelet.alive | alive)
                self._learn(checked=self._seen.checked | question.ids)
            case ListPods():
                await self._list()
            case LookAtPod():
                uid, lock, name = UNREAD, self._lock(), "/".join(question.key)
                is_owners = lock is not None and lock.owner == question.key
                async with self._asking(
                    "pods.get_failed", GET_PAUSE, is_owners=is_owners, pod=name
                ):
                    uid = await self._source.look_at_pod(*question.key)

                self._learn_uid(question.key, uid)
            case AwaitLock():
                await self._await_lock(question.key)
            case LookAtNode():
                failed = True
                async with self._asking("node.get_failed", API_BUDGET):
                    await self._source.look_at_node()
                    failed = False

                self._learn(node_read=True, node_unread=failed)
            case AwaitOthers():
                # The calls beside this one may be answered meanwhile: one candidate may be left.
                await asyncio.sleep(OTHERS_PAUSE)
                self._learn(alone=True)

    @contextlib.asynccontextmanager
    async def _from_disk(self, what: str) -> AsyncIterator[None]:
        try:
            async with self._disk.within():
                yield
        except Starved:
            raise
        except TimeoutError as error:
            raise Refusal(
                RefusalReason.OUT_OF_TIME,
                f"The node did not let the agent read {what} in time; ask the operator to check "
                "the node and its disk, and the pod's controller starts it again.",
            ) from error

    async def _ask(self, namespace: str, name: str) -> None:
        get = functools.partial(self._source.witness.get, namespace, name)
        for pause in (*UNANSWERED_PAUSES, None):
            try:
                self.known[(namespace, name)] = await retry(get, WitnessThrottled, THROTTLED_PAUSE)
                break
            except WitnessUnsupported:
                # Kubelets before 1.34 have no Get. Of them only the sole candidate is served.
                self._learn_of_kubelet(witnessed=False)
                break
            except KubeletError as error:
                if pause is None:
                    raise Refusal(
                        RefusalReason.WITNESS_SILENT,
                        f"The kubelet does not say which pod it is admitting ({error}); the pod's "
                        "controller starts it again.",
                    ) from error
                await asyncio.sleep(pause)

    @contextlib.asynccontextmanager
    async def _asking(
        self, event: str, most: float, *, is_owners: bool = False, **said: str
    ) -> AsyncIterator[None]:
        """Bound a request to `most` seconds and the rest of API_BUDGET; log a failure as `event`.

        For the owner of the node lock only the rest of OWNER_BUDGET bounds it. The kubelet's
        earlier answers still hold: while it waits for us, it admits no other pod.
        """
        left = self._api.left - OWNER_BUDGET + API_BUDGET
        try:
            async with self._api.within(None if is_owners else min(most, left)):
                yield
        except (ApiError, TimeoutError) as error:
            # The decision goes on without the answer, and refuses where it cannot.
            self._is_starved |= isinstance(error, Starved)
            log.warning(event, err=str(error) or "out of time", **said)

    async def _list(self) -> None:
        """LIST the pods. If that fails, a watch that is late may still show who asks."""
        seen, failed, is_owners = self._source.pods.value, True, self._may_be_the_owners()
        most = LIST_PAUSE if seen.synced else API_BUDGET
        async with self._asking("pods.list_failed", most, is_owners=is_owners):
            await self._source.refresh(is_owners=is_owners)
            failed = False

        if not (failed or seen.synced):
            return  # this may be the first LIST, which began before the call

        if failed and seen.synced and not seen.stale:
            time, known = self._api.within(), seen.pods.keys()
            if await self._shown(
                time, self._source.pods, lambda table: bool(table.pods.keys() - known)
            ):
                return

        self._learn(listed=True, list_failed=failed)

    def _may_be_the_owners(self) -> bool:
        """Whether the owner of the node lock may be asking, as far as views and kubelet tell."""
        lock = self._lock()
        if lock is None or lock.owner is None:
            return lock is not None

        pod = self._source.pods.value.named(*lock.owner)
        is_known = self.known.get(lock.owner, True) is not None
        return is_known and (
            pod is None or any(one.count == self._seen.count for one in pod.gpu_containers)
        )

    async def _await_lock(self, owner: PodKey) -> None:
        def is_there(node: NodeView | None) -> bool:
            lock = held_lock(node)
            return lock is not None and lock.owner == owner

        self._learn(waited=True)
        self._source.look()
        await self._shown(self._source.lag.within(LOCK_PAUSE), self._source.node, is_there)

    async def _caught_up(self, step: Question, seen: Evidence) -> bool:
        """Whether the watch that `step` needs shows a change from `seen` within WATCH_PAUSE."""
        if isinstance(step, AwaitOthers) or self._is_restarting(seen):
            return False  # while a preference waits, a whole other request could pass

        if isinstance(step, ListPods):
            pods = self._source.pods
            return await self._shown(self._watch.within(), pods, lambda now: now != seen.table)

        self._source.look()
        node = self._source.node
        return await self._shown(
            self._watch.within(), node, lambda now: held_lock(now) != seen.lock
        )

    async def _shown(
        self, time: AbstractAsyncContextManager[object], cell: Cell[T], holds: Callable[[T], bool]
    ) -> bool:
        """Whether `holds` becomes true in `time`; False at once after too many waits in vain."""
        loop, allowance = asyncio.get_running_loop(), self._source.allowance
        if not allowance.allows(loop.time()):
            return False

        try:
            async with time:
                await cell.until(holds)
        except TimeoutError:
            allowance.spend(loop.time())
            return False

        return True

    def _lock(self) -> NodeLock | None:
        return held_lock(self._source.node.value)
