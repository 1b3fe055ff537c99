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
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import Any, Final, TypeVar

import msgspec
import structlog
from prometheus_client import Histogram
from typing_extensions import override

from agent.allocate.edits import check_library, container_edits, cuda_order
from agent.allocate.match import (
    Ask,
    Evidence,
    Grant,
    KubeletStart,
    MatchSettings,
    Question,
    decide,
    pair_groups,
    rejected_pod,
)
from agent.allocate.prefer import nearest, steer
from agent.allocate.room import GpuUse, Shortage
from agent.cluster import NodeEvent, NodeView, PodKey, PodTable, PodUid
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
from agent.hami.annotations import former_locks, held_lock
from agent.hookdirs import HostHookDirs
from agent.kit.cell import Cell
from agent.kit.tasks import Allowance, retry
from agent.kit.timing import Budget, CallOrder, Lag, Starved, Tally, Turn, loop_time
from agent.ledger import (
    ContainerEdits,
    ContainerKey,
    Decider,
    EditSettings,
    GrantedShare,
    Holder,
    HookFacts,
    KubeletEpoch,
    Ledger,
    Row,
    container_directory,
)
from agent.model import Gpu, GpuUuid, Inventory, Share, SliceId
from agent.ports import Clock, Containers, RecordsReader, Witness
from agent.reconcile import DEADLINE, THROTTLED_PAUSE, Adoption
from agent.settle import REFUSED_EVENT

log = structlog.get_logger(__name__)

T = TypeVar("T")

# How long an Allocate waits for whom, in seconds of running time of our loop.
#
# The kubelet sets no deadline, and a refusal fails the pod. But while it waits it starts, stops and
# probes nothing on the whole node. So each peer has a time of its own for all waits of a call.

DISK_BUDGET = 10.0  # When the disk is silent for longer, the node offers no slice.
KUBELET_BUDGET = 10.0  # A busy kubelet is slow.
API_BUDGET = 0.6  # For all requests to the API server.
OWNER_BUDGET = 2.0
"""The same for the pod that the node lock names, and while the watch may still show who asks. A
refusal fails a good pod, and the kubelet's own watch can be that much ahead of ours."""

LIST_PAUSE = 0.4  # For a LIST after the first one.
GET_PAUSE = 0.15  # For a pod's GET. The Node's has what is left: without it a pod is refused.
LOCK_PAUSE = 0.25  # For the Node's watch to catch up with the pods' watch.
OTHERS_PAUSE = 0.2
"""In which the call of a pod that the kubelet is admitting comes. If it comes, the one that waits
here is another's, and is refused as overtaken."""

UNANSWERED_PAUSES = (0.01, 0.05)
"""Until PodResources is asked again: a kubelet's restart breaks the connection once."""

PREFER_BUDGET = 0.2  # For GetPreferredAllocation, which comes just before Allocate.
WATCH_PAUSE = 0.1
"""Of these, for the agent's watches to show a pod that the kubelet's watch has shown already.
Without this wait a preference would name any GPUs."""

WAIT_BURST, WAIT_REFILL = 16, 5.0
"""Waits of calls that nothing came of, for the node: so many at once, and then one every five
seconds. A tenant can make pods without end that are waited for in vain."""

MAX_QUESTIONS = 256
"""More than the pods of any node. A decision that asks more has a defect and is refused."""


# The steps of an Allocate, and the refusals when one of them fails or takes too long.


class AllocateStep(enum.StrEnum):
    """A step of an Allocate. The value is for the log and the metric."""

    HOOK = "hook-path"
    MATCH = "find-pod"
    CHECK = "check-ids"
    DIRECTORY = "directory"
    WRITE = "disk"


_CANNOT = {
    AllocateStep.HOOK: "HAMi-core's files on the node cannot be read",
    AllocateStep.DIRECTORY: "The container's directory on the node cannot be created",
}


def refusal_of(error: TimeoutError | StateError, step: AllocateStep) -> Refusal:
    """The refusal when that step failed or took too long."""
    if isinstance(error, Starved):
        gate, what = RefusalReason.STARVED, "The GPU agent gets too little CPU to answer in time"
        return Refusal(gate, f"{what}; an operator has to raise its CPU request.")
    to_do = "an operator has to check the node's disk and hook path."
    if step is AllocateStep.MATCH and isinstance(error, TimeoutError):
        what = "The kubelet or the node's disk did not say in time which pod this is"
        return Refusal(RefusalReason.OUT_OF_TIME, f"{what}; an operator has to check both.")
    reason = str(error) if isinstance(error, StateError) else "the disk has not answered in time"
    if step in _CANNOT:
        return Refusal(RefusalReason.HOST_DIRECTORY, f"{_CANNOT[step]} ({reason}); {to_do}")
    what = f"The agent cannot write its state ({reason}), so it answers no new container"
    return Refusal(RefusalReason.STATE_UNWRITABLE, f"{what}; {to_do}")


BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)

USED_LOCKS = 256
"""Node locks remembered. The scheduler takes fewer in the 60 s in which a former one counts."""


class AllocateCall(msgspec.Struct, eq=False):
    """One Allocate under way.

    - `turn`: says whether the kubelet has begun another container since.
    - `row`: the row to answer; None: not known yet. `is_replay`: it was answered before.
    - `rejected`: see rejected_pod. `oversold`: see Grant.
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
    {RefusalReason.NO_POD_ADMITTED, RefusalReason.STATIC_POD, RefusalReason.MANY_PODS_ADMITTED}
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
        self.waits = Histogram(
            "allocate_wait_seconds",
            "Seconds that an Allocate waited for the kubelet, the runtime, the API server, the "
            "hook path, a container's directory or the state on disk.",
            ("step",),
            namespace="hami_agent",
            buckets=BUCKETS,
            registry=None,
        )
        self.results = Tally(
            "allocations_total",
            "Answers to Allocate by result and reason.",
            ("result", "reason"),
            expected=[("refused", gate.name.lower()) for gate in RefusalReason],
        )

    @abc.abstractmethod
    async def decide(self, ids: tuple[SliceId, ...], call: AllocateCall) -> Row:
        """The row to answer. Raises Refusal, StateError, TimeoutError."""

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
                f"{call.oversold.gpu.gpu.title}, which has {limit}: it counts less than runs at a "
                "time in pods with sidecars or init containers. Delete a pod on this GPU."
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
        began = loop_time()
        try:
            yield
        finally:
            self.waits.labels(what).observe(loop_time() - began)

    def gpus(self) -> dict[GpuUuid, Gpu]:
        """The GPUs of the inventory."""
        return {shared.uuid: shared.gpu for shared in self.inventory.value.gpus}

    def instance(self) -> KubeletEpoch:
        """The present kubelet instance, or one that no row names."""
        return self.epoch() or KubeletEpoch()

    async def on_disk(self, call: AllocateCall, step: AllocateStep, work: Awaitable[T]) -> T:
        """What the step returns, timed as a wait. Raises TimeoutError, Starved."""
        call.step = step
        async with call.disk.within():
            with self.waiting(step):
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
        # No await from the decision until the row is claimed: another call would decide on the
        # same pod.
        row = call.row = await self.decide(ids, call)
        self._pending[row.key] = row
        self.taken.add(row.key)
        # In plain mode the row comes first: only the row says later that the directory can be
        # removed. A row without a directory is closed like any other.
        is_row_first = row.decided_by is Decider.KUBELET

        try:
            if not call.turn.is_lost:
                if not is_row_first:
                    await self._make_directory(row, call, wipe=not call.is_replay)

                write = self.commit(lambda ledger: ledger.put(row))
                await self.on_disk(call, AllocateStep.WRITE, write)
                if row.lock:
                    # The lock stands until it is released. Another pod that asks meanwhile is not
                    # its owner by right.
                    used = {**self.used_locks, row.lock: row.key.pod_uid}
                    self.used_locks = dict(list(used.items())[-USED_LOCKS:])

                if is_row_first and row.directory:
                    await self._make_directory(row, call, wipe=False)
            # Checked last: granting the earlier of two overlapping calls crashes the kubelet.
            if call.turn.is_lost:
                raise await self._overtaken(row, call)
        finally:
            self._pending.pop(row.key, None)
            self.taken.discard(row.key)

        return row

    async def _make_directory(self, row: Row, call: AllocateCall, *, wipe: bool) -> None:
        name = container_directory(row.key.pod_uid, row.key.container)
        await self.on_disk(call, AllocateStep.DIRECTORY, self.hooks.prepare(name, wipe=wipe))

    async def _overtaken(self, row: Row, call: AllocateCall) -> Refusal:
        """The refusal of a call that must not be granted beside another one.

        If the kubelet will ask again, which it does not for a new pod, this waits until no other
        call is under way. Until then the kubelet begins no other container of the pod.
        """
        if call.is_replay or row.holder is None:
            await self.order.until_alone(call.turn)  # each of them has its deadlines
        text = (
            "The kubelet lost its checkpoint and asks for several containers at once, so this "
            "answer would crash it. It asks again in a few seconds if the container ran before; "
            "the controller of a new pod starts it again."
        )
        return Refusal(RefusalReason.OVERLAP, text)

    def _refused(self, refusal: Refusal, call: AllocateCall, count: int) -> None:
        """Record the refusal of `count` slices once, everywhere."""
        gate, whose = refusal.gate, {} if call.row is None else _log_fields(call.row)
        self.results.add("refused", gate.name.lower())
        what = {"gate": gate.value, "step": call.step.value, "reason": refusal.sentence}
        log.warning("alloc.refused", **what, count=count, **whose)
        self.noted(refusal, call.row)
        if refusal.gate in _OF_NO_POD:
            self.say(NodeEvent(REFUSED_EVENT, str(refusal), warning=True))


def _log_fields(row: Row) -> dict[str, str]:
    """The log fields that name a row's container; a drawn UID while no holder is known."""
    return {"ns": row.namespace, "pod": row.pod or row.key.pod_uid, "ctr": row.key.container}


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
    what it saw when it started, so the agent looks when it begins to take its list (`run`):

    - The kubelet takes the set of running containers from the runtime, 0.35 s before its socket
      appears. The agent reads the cgroups, if the list was taken within 0.5 s after the socket.
    - From 0.9 s after its socket it admits the pods that were there, one by one, and asks in the
      order of the spec for each container that has no record and is not in that set. A pod without
      a cgroup was dead: its first container that has not started since is next.
    - It asks for nothing in an admission before it took the list: it starts those pods unasked.
    - It asks for any container that dies later, in parallel and in any order, and after a refusal
      8 to 10 s later again. All others are unknown: only a single possible container is served.

    - `match`: how pods are matched. `registered`: see Evidence.
    - `refresh`: makes the one LIST of this node's pods; with `is_owners`: the lock's owner may need
      it. Raises ApiError.
    - `look_at_pod`: GETs the UID of the pod that has a name now. `look_at_node`: GETs the Node.
    - `streams`: how many list streams the kubelet has open.
    """

    pods: Cell[PodTable]
    node: Cell[NodeView | None]
    match: Cell[MatchSettings]
    registered: Callable[[], Mapping[GpuUuid, GpuUse]] = dict
    witness: Witness
    records: RecordsReader
    containers: Containers
    refresh: Callable[..., Awaitable[PodTable]]
    look_at_pod: Callable[[str, str], Awaitable[PodUid]]
    look_at_node: Callable[[], Awaitable[NodeView | None]]
    streams: Cell[int]

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.allowance = Allowance(WAIT_BURST, WAIT_REFILL)
        self.rejected: dict[PodUid, KubeletEpoch] = {}
        """The pods that were refused at their admission, by the kubelet instance that admitted
        them. That instance never asks for them again; a later one may."""
        self._offer: ContainerKey | None = None
        """The container for which the kubelet was last offered free ids of the right GPUs."""
        self._starts: dict[tuple[KubeletEpoch, str], KubeletStart] = {}
        """Of the present kubelet instance and the resource that it began to take; one at most."""

    async def run(self) -> None:
        """See each kubelet begin to take the lists, for ever, and which pods have no cgroup then.

        Before, a kubelet that lost its checkpoint does not know the resource and asks for nothing.
        """
        async for streams in self.streams.follow():
            epoch, now = self.epoch(), self.clock.now()
            # The same kubelet opens its stream again after a break: that is no new start.
            if not streams or epoch is None or (epoch, self.match.value.resource) in self._starts:
                continue
            is_prompt = dt.timedelta(0) <= now - epoch.since < PROMPT
            start = KubeletStart(epoch) if is_prompt else KubeletStart(epoch, asks_since=now)
            key = epoch, self.match.value.resource
            self._starts = {key: start}
            if is_prompt:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_DEADLINE):
                        begun = await self.containers.begun()
                        self._starts = {key: KubeletStart(epoch, begun=begun)}

    def start(self) -> KubeletStart:
        """What was seen of the present kubelet's start."""
        epoch = self.instance()
        found = self._starts.get((epoch, self.match.value.resource))
        # Without one: such as a kubelet whose socket was only touched.
        return found or KubeletStart(epoch, asks_since=epoch.since)

    @override
    async def decide(self, ids: tuple[SliceId, ...], call: AllocateCall) -> Row:
        """The row of the container, from which its effects follow."""
        inquiry = Inquiry(self, len(ids), call)
        try:
            facts = await self.on_disk(call, AllocateStep.HOOK, self.hooks.facts())
            call.step = AllocateStep.MATCH
            grant = await inquiry.grant()
        except (Refusal, StateError, TimeoutError):
            call.rejected = rejected_pod(inquiry.newest())
            raise

        found, call.oversold = grant.candidate, grant.oversold
        call.is_replay = call.turn.yields = found.row is not None
        offered, self._offer = self._offer == found.key, None  # it counts for one answer
        first = Adoption(found.pod, found.container, ids)
        row = found.row or self._first(first, grant.group, grant.shares, facts)
        # A replay keeps its answer, byte for byte, and gets the ids of this call.
        call.row = msgspec.structs.replace(
            row,
            slice_ids=tuple(sorted(ids)),
            answered_at=self.clock.now(),
            epoch=self.instance(),
            confirmed=False,
            offered=offered,
            lock=row.lock or grant.lock,
        )
        if not call.is_replay:
            # A deleted pod of the name may be asking: see rejected_pod, which takes too long here.
            is_sole = all(one.pod.key != found.pod.key for one in self.pods.value.tombstones)
            call.rejected = found.pod.uid if is_sole else None
            check_library(facts, found.container)
        return call.row

    @override
    def _refused(self, refusal: Refusal, call: AllocateCall, count: int) -> None:
        """Exclude a pod that is refused at its admission: the kubelet does not ask for it again."""
        super()._refused(refusal, call, count)
        is_over = refusal.gate is not RefusalReason.OVERLAP and self.epoch() == call.turn.client
        # After an overlap, and of a new kubelet, it may come again.
        if call.rejected is not None and is_over:
            table = self.pods.value
            known = table.pods.keys() | {tombstone.pod.uid for tombstone in table.tombstones}
            rejected = {**self.rejected, call.rejected: self.instance()}
            self.rejected = {uid: by for uid, by in rejected.items() if uid in known}

    @override
    async def prefer(
        self, available: tuple[SliceId, ...], must_include: tuple[SliceId, ...], size: int
    ) -> tuple[SliceId, ...]:
        """`size` of the available ids: on the annotated GPUs if possible, else on near ones."""
        turn, inquiry, grant = self.order.begin(), Inquiry(self, size, None), None
        # The Allocate that follows is for the same container: of no pod that is not known now.
        with suppress(AgentError, TimeoutError):
            async with asyncio.timeout(PREFER_BUDGET):
                turn.all_there = await inquiry.names()
                grant = await inquiry.grant()

        turn.there = {key: one is not None for key, one in inquiry.seen.known.items()}
        held = self.held()
        chosen = self._offer = None  # an earlier offer is no longer what the kubelet was told
        if grant is not None:
            wanted = tuple(share.uuid for share in grant.shares)
            chosen = steer(available, must_include, wanted, held)
            self._offer = None if chosen is None else grant.candidate.key

        if chosen is None:
            chosen = nearest(available, must_include, size, self.gpus(), held)

        turn.ids = frozenset(chosen)
        return chosen

    def claimed(self) -> frozenset[PodUid]:
        """The pods that cannot be asking: pods of taken rows, and pods refused at admission."""
        # One that has run was not at its admission, though a late view showed it so.
        pods, epoch = self.pods.value.pods, self.instance()
        ran = {uid for uid in self.rejected if (pod := pods.get(uid)) and pod.has_run}
        rejected = {uid for uid, by in self.rejected.items() if by == epoch} - ran
        return frozenset(rejected | {key.pod_uid for key in self.taken})

    async def adopt(self, found: Adoption) -> Row | None:
        """The row of a container that was answered and that the ledger does not know.

        The scheduler's annotation says what it holds. Without ids the kubelet lost its checkpoint
        and may ask again. None: the annotation cannot be read, or its GPU is not on this node.
        """
        try:
            async with asyncio.timeout(DEADLINE):
                facts = await self.hooks.facts()
            paired = pair_groups(found.pod.groups or (), found.pod.asking(found.container.resource))
            if found.container.name in paired:
                row = self._first(found, *paired[found.container.name], facts)
                epoch = self.instance() if found.ids else KubeletEpoch()
                return msgspec.structs.replace(row, confirmed=bool(found.ids), epoch=epoch)
        except (AgentError, TimeoutError) as error:
            why = str(error) or "out of time"
            log.warning("ledger.not_adopted", pod=found.pod.name, err=why)
        return None

    def _first(
        self, found: Adoption, group: int, shares: tuple[Share, ...], facts: HookFacts
    ) -> Row:
        """A new row, with its edits: they are made once. `group`: its place in `…-allocated`."""
        pod, container = found.pod, found.container
        gpus = [self.inventory.value.find(share.uuid) for share in shares]
        granted = cuda_order(
            GrantedShare(share, gpu) for share, gpu in zip(shares, gpus, strict=True) if gpu
        )
        if len(granted) < len(shares):  # an annotation from before: the GPU was removed since
            text = (
                f"A GPU of container {container.name} of pod {pod.title} is gone; create it again."
            )
            raise Refusal(RefusalReason.UNKNOWN_GPU, text)

        key = ContainerKey(pod.uid, container.name)
        disabled = container.control_disabled
        return Row(
            key=key,
            holder=Holder(pod.namespace, pod.name, container.name),
            role=container.role,
            group=group,
            shares=tuple(grant.share for grant in granted),
            slice_ids=tuple(sorted(found.ids)),
            edits=container_edits(key, granted, self.edits.value, facts, control_disabled=disabled),
            answered_at=self.clock.now(),
            epoch=self.instance(),
            resource=container.resource,
            priority=container.priority,
        )


_KUBELET = dict.fromkeys((Ask.KUBELET, Ask.RECORDS, Ask.OTHERS), "kubelet")
_PEERS: Final = {**_KUBELET, Ask.RUNNING: "runtime"}
"""What a question waits for, in the metric; all others wait for the API server."""


class Inquiry:
    """Asks until a decision can be made for one call, with answers that are kept for it alone.

    Without a `call` it is a preference's: it asks no API server and needs no right, because a
    preference gives nothing away. `seen`: the answers so far, with the views of the last step.
    """

    def __init__(self, source: HamiAllocation, count: int, call: AllocateCall | None) -> None:
        self._source = source
        self._call = call
        self._api = Budget(source.lag, OWNER_BUDGET)
        self._kubelet = Budget(source.lag, KUBELET_BUDGET)
        self._disk = call.disk if call else Budget(source.lag, DISK_BUDGET)
        self._watch = Budget(source.lag, WATCH_PAUSE)
        self._is_starved = False
        unasked = () if call else (Ask.PODS, Ask.LOCK, Ask.NODE, Ask.OTHERS)
        asked = dict.fromkeys(unasked, True)
        self.seen = Evidence(count, source.match.value, source.start(), asked=asked)

    async def grant(self) -> Grant:
        """The decision. Raises Refusal, Starved, TimeoutError, StateError."""
        for _ in range(MAX_QUESTIONS):
            try:
                step = decide(self.newest())
            except Refusal as refusal:
                # Which pod asks and by what right was not found out, for want of CPU.
                is_of_pod = refusal.gate.value.startswith("HA-2")
                if self._is_starved and is_of_pod:
                    raise refusal_of(Starved(), AllocateStep.MATCH) from refusal
                if self._call or not is_of_pod or not await self._caught_up(refusal):
                    raise
                continue

            if isinstance(step, Grant):
                return step

            # A preference is not measured: the kubelet waits for Allocates.
            peer = _PEERS.get(step.ask, "api-server")
            with self._source.waiting(peer) if self._call else nullcontext():
                await self._answer(step)

        raise Refusal(RefusalReason.OUT_OF_TIME, "The agent could not decide; report this.")

    async def names(self) -> frozenset[PodKey] | None:
        """All names that the kubelet knows, if dead containers may be asking; None: not known."""
        if self._is_restarting():
            with suppress(KubeletError):
                found = await retry(self._source.witness.list, WitnessThrottled, THROTTLED_PAUSE)
                self.seen.known.update({(one.namespace, one.pod): one for one in found})
                return frozenset(self.seen.known)
        return None

    def _is_restarting(self) -> bool:
        """Whether the kubelet may be restarting containers after it lost its checkpoint.

        It then starts several at once, and crashes when the earlier of two requests is granted.
        """
        rows, epoch = self._source.ledger.value.rows_by(Decider.SCHEDULER), self._source.instance()
        return any(row.epoch != epoch for row in rows)

    def newest(self) -> Evidence:
        """The newest views, with the answers to this call."""
        source, node = self._source, self._source.node.value
        turn = self._call.turn if self._call else None
        beside = tuple(one.all_there for one in turn.beside) if turn else ()
        if turn and turn.overtaken:
            beside = (None,)  # it is not known what was under way when the call began

        self.seen = msgspec.structs.replace(
            self.seen,
            kubelet=source.start(),
            table=source.pods.value,
            ledger=source.with_pending(source.ledger.value),
            lock=held_lock(node),
            former_locks=former_locks(node, loop_time()),
            inventory=source.inventory.value,
            now=source.clock.now(),
            registered=source.registered(),
            claimed=source.claimed(),
            used_locks=source.used_locks,
            known_before=turn.there if turn else {},
            beside=beside,
        )
        return self.seen

    async def _answer(self, question: Question) -> None:
        """Add the answer to what is seen."""
        source, seen, is_answered = self._source, self.seen, True
        match question.ask:
            case Ask.KUBELET:
                async with self._kubelet.within():
                    for key in question.pods:
                        await self._ask(*key)
                        # The first one that it knows may be enough for a decision.
                        if seen.known.get(key) is not None or not seen.witnessed:
                            break
            case Ask.RECORDS:
                async with self._disk.within():
                    read = await source.records(seen.settings.resource)

                seen.recorded = None if read is None else read.keys()
            case Ask.RUNNING:
                async with self._disk.within():
                    alive = await source.containers.running(question.ids)

                # Silence proves no death.
                seen.alive |= {one: alive is None or one in alive for one in question.ids}
            case Ask.POD:
                (key,) = question.pods
                get = source.look_at_pod(*key)
                uid = await self._asked_api(
                    "pods.get_failed", get, GET_PAUSE, is_owners=seen.owner == key
                )
                seen.pod_uids[key] = uid
            case Ask.NODE:
                node = await self._asked_api("node.get_failed", source.look_at_node(), API_BUDGET)
                is_answered = node is not None
            case Ask.LOCK:
                time = source.lag.within(LOCK_PAUSE)
                await self._shown(time, source.node, lambda node: _owner(node) in question.pods)
            case Ask.OTHERS:
                # The calls beside this one may be answered meanwhile: one candidate may be left.
                await asyncio.sleep(OTHERS_PAUSE)
            case Ask.PODS:
                await self._list()
                return

        seen.asked[question.ask] = is_answered

    async def _ask(self, namespace: str, name: str) -> None:
        get = functools.partial(self._source.witness.get, namespace, name)
        for pause in (*UNANSWERED_PAUSES, None):
            try:
                found = await retry(get, WitnessThrottled, THROTTLED_PAUSE)
                self.seen.known[namespace, name] = found
                break
            except WitnessUnsupported:
                # Kubelets before 1.34 have no Get. Of them only the sole candidate is served.
                self.seen.witnessed = False
                break
            except KubeletError as error:
                if pause is None:
                    what = f"The kubelet does not say which pod it admits ({error})"
                    text = f"{what}; its controller starts it again."
                    raise Refusal(RefusalReason.WITNESS_SILENT, text) from error
                await asyncio.sleep(pause)

    async def _asked_api(
        self, event: str, answer: Awaitable[T], most: float, *, is_owners: bool = False
    ) -> T | None:
        """The answer of the API server; None: it failed, which is logged as `event`.

        It has `most` seconds and the rest of API_BUDGET; for the owner of the node lock, the rest
        of OWNER_BUDGET. The kubelet's earlier answers still hold: it admits no other pod meanwhile.
        """
        left = self._api.left - OWNER_BUDGET + API_BUDGET
        try:
            async with self._api.within(None if is_owners else min(most, left)):
                return await answer
        except (ApiError, TimeoutError) as error:
            # The decision goes on without the answer, and refuses where it cannot.
            self._is_starved |= isinstance(error, Starved)
            log.warning(event, err=str(error) or "out of time")
            return None

    async def _list(self) -> None:
        """LIST the pods. If that fails, a watch that is late may still show who asks."""
        source, seen, table = self._source, self.seen, self.seen.table
        # Whether the owner of the node lock may be asking, as far as views and kubelet tell.
        is_owners = seen.lock is not None
        if seen.owner is not None:
            pod = table.named(*seen.owner)
            has_count = pod is None or any(one.count == seen.count for one in pod.gpu_containers)
            is_owners = has_count and seen.known.get(seen.owner, True) is not None

        listing = source.refresh(is_owners=is_owners)
        most = LIST_PAUSE if table.synced else API_BUDGET
        found = await self._asked_api("pods.list_failed", listing, most, is_owners=is_owners)
        # The first LIST may have begun before the call.
        is_enough = table.synced or found is None
        if found is None and table.synced and not table.stale:
            time, known = self._api.within(), table.pods.keys()
            is_enough = not await self._shown(
                time, source.pods, lambda table: bool(table.pods.keys() - known)
            )
        if is_enough:
            seen.asked[Ask.PODS] = found is not None

    async def _caught_up(self, refusal: Refusal) -> bool:
        """Whether a watch changes within WATCH_PAUSE, so that a preference may have a pod then."""
        if self._is_restarting():
            return False  # while a preference waits, a whole other request could pass
        is_lock_late = refusal.gate in (RefusalReason.NO_LOCK, RefusalReason.NO_RIGHT)
        cell: Cell[Any] = self._source.node if is_lock_late else self._source.pods
        version = cell.version
        return await self._shown(self._watch.within(), cell, lambda _: cell.version != version)

    async def _shown(
        self, time: AbstractAsyncContextManager[object], cell: Cell[T], holds: Callable[[T], bool]
    ) -> bool:
        """Whether `holds` becomes true in `time`; False at once after too many waits in vain."""
        allowance = self._source.allowance
        if not allowance.allows(loop_time()):
            return False
        try:
            async with time:
                await cell.until(holds)
        except TimeoutError:
            allowance.spend(loop_time())
            return False
        return True


def _owner(node: NodeView | None) -> PodKey | None:
    lock = held_lock(node)
    return lock.owner if lock else None
