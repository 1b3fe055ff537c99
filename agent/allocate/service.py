"""Answers Allocate in both modes: claim the container's row, write it, answer."""

import asyncio
import contextlib
import enum
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator
from typing import Final, Protocol

import msgspec
import structlog

from agent.allocate.room import Shortage
from agent.cluster import NodeEvent, PodTable, PodUid
from agent.errors import Refusal, RefusalReason, StateError
from agent.kit.timing import Budget, Durations, Lag, Starved, Tally
from agent.kit.turns import Turn, Turns
from agent.ledger import (
    ContainerEdits,
    ContainerKey,
    Decider,
    KubeletEpoch,
    Ledger,
    Row,
    container_directory,
)
from agent.model import SliceId
from agent.ports import HookDirs
from agent.settle import REFUSED_EVENT

log = structlog.get_logger(__name__)

# The steps of an Allocate, and the refusals when the node's disk fails in one of them.

DISK_BUDGET = 10.0
"""Seconds that one Allocate waits for the node's disk: the kubelet sets no deadline, and a refusal
fails the pod. When the disk is silent for longer, the node offers no slice."""


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
        transient=True,
    )


def disk_refusal(error: TimeoutError | StateError, step: AllocateStep) -> Refusal:
    """The refusal when the disk failed in `step`, or did not finish it in time."""
    is_told = isinstance(error, StateError)
    reason = str(error) if is_told else "the disk has not answered in time"
    if step in _BELOW_THE_HOOK_PATH:
        return Refusal(
            RefusalReason.HOST_DIRECTORY,
            f"{_BELOW_THE_HOOK_PATH[step]} ({reason}); ask the operator to check the node's hook "
            "path and its disk.",
            transient=True,
        )
    return Refusal(
        RefusalReason.STATE_UNWRITABLE,
        f"The agent cannot write its state ({reason}), so it answers no new container; ask the "
        "operator to check the node's disk.",
        transient=True,
    )


# The Allocates under way: the step of each, and its refusal when it fails or takes too long.

BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)

SPENT = 256
"""Node locks remembered, each with the pod that was answered under it. The scheduler takes fewer
in the 60 s in which a former lock proves a right."""

OFFERS = 64
"""Offers remembered: more than the containers of any pod. The kubelet uses each at once."""


class AllocateCall(msgspec.Struct, eq=False):
    """One Allocate under way. `overlapped`: another one was under way at the same time.

    - `turn`: says whether the kubelet has begun another container since.
    - `disk`: the time that it waits for the disk.
    - `row`: the row to answer; None: not known yet. `is_replay`: it was answered before.
    """

    turn: Turn
    disk: Budget
    overlapped: bool = False
    step: AllocateStep = AllocateStep.HOOK
    row: Row | None = None
    is_replay: bool = False
    oversold: Shortage | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the call must not be granted: another one overtook it, or may have."""
        return self.turn.overtaken or (self.turn.yields and self.overlapped)


class AllocateCalls(msgspec.Struct, eq=False):
    """The calls under way, and the rows that are being written to disk.

    - `taken`: the rows that a call is answering or the reconcile is closing. Both share this set.
    - `rejected`: the pods that were refused when the kubelet instance `rejected_by` admitted them.
      That instance never asks for them again; a later one may.
    - `used_locks`: for each of the last node locks, the pod that was answered under it.
    - `offers`: the containers for which the kubelet was offered free ids of the right GPUs.
    - `turns`: the order in which the kubelet began containers. `waits`: how long all calls waited
      for what is outside the agent; what is left of an Allocate is the agent's own work.
    - `lag`: extends the deadlines of all calls.
    Source: kubernetes pkg/kubelet/cm/devicemanager/manager.go, Allocate.
    """

    turns: Turns
    lag: Lag
    active: list[AllocateCall] = msgspec.field(default_factory=list)
    pending: dict[ContainerKey, Row] = msgspec.field(default_factory=dict)
    taken: set[ContainerKey] = msgspec.field(default_factory=set)
    rejected: frozenset[PodUid] = frozenset()
    rejected_by: KubeletEpoch | None = None
    used_locks: dict[str, PodUid] = msgspec.field(default_factory=dict)
    offers: deque[ContainerKey] = msgspec.field(default_factory=lambda: deque(maxlen=OFFERS))
    waits: Durations = msgspec.field(
        default_factory=lambda: Durations(
            "allocate_wait_seconds",
            "Seconds that an Allocate waited for the kubelet, the runtime, the API server, the "
            "hook path, a container's directory or the state on disk.",
            ("step",),
            BUCKETS,
        )
    )

    @contextlib.contextmanager
    def entered(self, ids: Collection[SliceId]) -> Iterator[AllocateCall]:
        """A call for these ids, under way while the block runs."""
        with self.turns.asked(ids) as turn:
            call = AllocateCall(turn, Budget(self.lag, DISK_BUDGET))
            self.active.append(call)
            if len(self.active) > 1:
                for other in self.active:
                    other.overlapped = True
            try:
                yield call
            finally:
                self.active.remove(call)

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Time the block as a wait for that."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            yield
        finally:
            self.waits.observe(loop.time() - began, what)

    @contextlib.contextmanager
    def claiming(self, row: Row) -> Iterator[None]:
        """Reserve the row's pod while the block runs: no other call can take it."""
        self.pending[row.key] = row
        self.taken.add(row.key)
        try:
            yield
        finally:
            self.pending.pop(row.key, None)
            self.taken.discard(row.key)

    def with_pending(self, ledger: Ledger) -> Ledger:
        """The ledger with the rows that are being written."""
        for row in self.pending.values():
            ledger = ledger.put(row)
        return ledger

    def claimed(self, epoch: KubeletEpoch, table: PodTable) -> frozenset[PodUid]:
        """The pods that cannot be asking: pods of taken rows, and pods refused at admission."""
        rejected = self.rejected if self.rejected_by == epoch else frozenset[PodUid]()
        # One that has run was not at its admission, though a late view showed it so.
        ran = {uid for uid in rejected if (pod := table.pods.get(uid)) and pod.has_run}
        return rejected - ran | {key.pod_uid for key in self.taken}

    def mark_lock_used(self, row: Row) -> None:
        """Record that the row's lock was used: it proves no right for another pod."""
        self.used_locks.pop(row.lock, None)
        self.used_locks[row.lock] = row.key.pod_uid
        while len(self.used_locks) > SPENT:
            del self.used_locks[next(iter(self.used_locks))]

    def take_offer(self, key: ContainerKey) -> bool:
        """Whether an offer was made for the container. Forgets it: it counts for one answer."""
        made = key in self.offers
        while key in self.offers:
            self.offers.remove(key)
        return made

    def mark_rejected(self, pod: PodUid, table: PodTable, epoch: KubeletEpoch) -> None:
        """Record that the pod was refused, for as long as the pod table knows it."""
        graves = frozenset(tombstone.pod.uid for tombstone in table.tombstones)
        known = self.rejected if self.rejected_by == epoch else frozenset[PodUid]()
        self.rejected = (known | {pod}) & (table.pods.keys() | graves)
        self.rejected_by = epoch


def refusal_of(error: TimeoutError | StateError, call: AllocateCall) -> Refusal:
    """The refusal when the call's step failed or took too long."""
    if isinstance(error, Starved):
        return starved_refusal()
    if call.step is not AllocateStep.MATCH or isinstance(error, StateError):
        return disk_refusal(error, call.step)
    return Refusal(
        RefusalReason.OUT_OF_TIME,
        "The kubelet did not say in time which pod this is; its controller starts it again.",
        transient=True,
    )


# Answers Allocate in both modes: decide, claim the row, commit it, answer.
#
# The host directory is made and the row is durable before the kubelet gets the answer.

OVERSOLD_EVENT = "GpuOversold"

_OF_NO_POD = frozenset(
    {
        RefusalReason.NO_POD_ADMITTED,
        RefusalReason.STATIC_POD,
        RefusalReason.MANY_PODS_ADMITTED,
    }
)
"""Refusals that no single pod can show: their Event is posted about the Node."""


class ShareSource(Protocol):
    """Decides what a container gets. `calls`: the Allocates under way."""

    calls: AllocateCalls

    async def decide(self, ids: tuple[SliceId, ...], call: AllocateCall, /) -> None:
        """Set the row of the call, unless another call overtook it. Raises Refusal, StateError."""
        ...

    def refused(self, refusal: Refusal, call: AllocateCall, /) -> None:
        """Record that the call was refused."""
        ...

    async def prefer(
        self, available: tuple[SliceId, ...], must_include: tuple[SliceId, ...], size: int, /
    ) -> tuple[SliceId, ...]:
        """The best `size` of the available ids."""
        ...


class Allocation:
    """Answers the kubelet. Calls may overlap; each claims its row before it waits for the disk.

    - `commit` stores a change of the ledger (raises StateError), `hooks` makes directories.
    - `say` posts an Event about the Node. `noted` hears of each refusal, with its row if known.
    - `prefer` never refuses: an error would fail the pod's admission and leak ids in the kubelet.
    """

    def __init__(
        self,
        source: ShareSource,
        commit: Callable[[Callable[[Ledger], Ledger]], Awaitable[None]],
        hooks: HookDirs,
        say: Callable[[NodeEvent], None],
        noted: Callable[[Refusal, Row | None], None] = lambda _refusal, _row: None,
    ) -> None:
        self._source = source
        self._calls = source.calls
        self._commit = commit
        self._hooks = hooks
        self._say = say
        self._noted = noted
        self.prefer = source.prefer
        self.waits = source.calls.waits
        self.results = Tally(
            "allocations_total",
            "Answers to Allocate by result and reason.",
            ("result", "reason"),
            expected=[("refused", gate.name.lower()) for gate in RefusalReason],
        )

    async def allocate(self, ids: tuple[SliceId, ...]) -> ContainerEdits:
        """The edits for the container that the kubelet is admitting. Raises Refusal.

        `ids`: the kubelet's slice ids, at least one.
        """
        with self._calls.entered(ids) as call:
            try:
                row = await self._serve(ids, call)
            except Refusal as refusal:
                self._refused(refusal, call, len(ids))
                raise
            except (TimeoutError, StateError) as error:
                translated = refusal_of(error, call)
                self._refused(translated, call, len(ids))
                raise translated from error
        if call.oversold is not None:
            what, total, limit = call.oversold.amounts
            text = (
                f"HAMi's scheduler has given out {total} of {what} of "
                f"{call.oversold.gpu.gpu.title}, which has {limit}: for a pod with sidecars or "
                "init containers it counts less than runs at one time. Delete one of the pods on "
                "this GPU, or let them ask for less."
            )
            self._say(NodeEvent(OVERSOLD_EVENT, text, warning=True))
        result = "replay" if call.is_replay else "ok"
        self.results.add(result, "")
        gpus, count = list(dict.fromkeys(row.gpus)), len(row.slice_ids)
        log.info("alloc.answered", result=result, **_log_fields(row), count=count, gpus=gpus)
        return row.edits

    async def _serve(self, ids: tuple[SliceId, ...], call: AllocateCall) -> Row:
        await self._source.decide(ids, call)
        # No await from here until the row is claimed: another call would decide on the same pod.
        row = call.row
        if row is None:
            raise await self._overtaken(call)
        # In plain mode the row comes first: only the row says later that the directory can be
        # removed. A row without a directory is closed like any other.
        is_row_first = row.decided_by is Decider.KUBELET
        with self._calls.claiming(row):
            if not call.is_lost:
                if not is_row_first:
                    await self._make_directory(row, call, wipe=not call.is_replay)
                call.step = AllocateStep.WRITE
                async with call.disk.within():
                    with self._calls.waiting("disk"):
                        await self._commit(lambda ledger: ledger.put(row))
                if row.lock:
                    self._calls.mark_lock_used(row)
                if is_row_first and row.has_directory:
                    await self._make_directory(row, call, wipe=False)
            # Checked last: granting the earlier of two overlapping calls crashes the kubelet.
            if call.is_lost:
                raise await self._overtaken(call)
        return row

    async def _make_directory(self, row: Row, call: AllocateCall, *, wipe: bool) -> None:
        call.step = AllocateStep.DIRECTORY
        name = container_directory(row.key.pod_uid, row.key.container)
        async with call.disk.within():
            with self._calls.waiting("directory"):
                await self._hooks.prepare(name, wipe=wipe)

    async def _overtaken(self, call: AllocateCall) -> Refusal:
        """The refusal of a call that must not be granted beside another one.

        If the kubelet will ask again, this waits until no other call is under way. Until then the
        kubelet begins no other container of the pod.
        """
        row = call.row
        # For a new pod the kubelet does not ask again: nothing is gained by waiting.
        if call.is_replay or row is None or row.holder is None:
            await self._calls.turns.until_alone(call.turn)  # each of them has its deadlines
        if row is None or row.holder is None:
            text = (
                "The kubelet asks for several containers at once after it lost its checkpoint, and "
                "this answer would crash it. It asks again in a few seconds for a container that "
                "ran before; the controller of a new pod starts it again."
            )
        elif call.is_replay:
            text = (
                "The kubelet asks for several containers at once after it lost its checkpoint. It "
                f"asks again for {row.key.container} of pod {row.namespace}/{row.pod} in a few "
                "seconds."
            )
        else:
            text = (
                "The kubelet lost its checkpoint and began to start another container during the "
                f"call for {row.key.container} of pod {row.namespace}/{row.pod}; this answer would "
                "crash it. The pod's controller starts the pod again."
            )
        return Refusal(RefusalReason.OVERLAP, text, transient=True)

    def _refused(self, refusal: Refusal, call: AllocateCall, count: int) -> None:
        """Record the refusal of `count` slices once, everywhere."""
        self._source.refused(refusal, call)
        self.results.add("refused", refusal.gate.name.lower())
        log.warning(
            "alloc.refused",
            gate=refusal.gate.value,
            step=call.step.value,
            count=count,
            reason=refusal.sentence,
            **({} if call.row is None else _log_fields(call.row)),
        )
        self._noted(refusal, call.row)
        if refusal.gate in _OF_NO_POD:
            self._say(NodeEvent(REFUSED_EVENT, str(refusal), warning=True))


def _log_fields(row: Row) -> dict[str, str]:
    """The log fields that name a row's container; its drawn UID while no holder is known."""
    if row.holder is None:
        return {"uid": row.key.pod_uid}
    return {"ns": row.namespace, "pod": row.pod, "ctr": row.holder.container}
