"""The Allocates under way, what they wait for and what they see."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Protocol

import msgspec

from agent.allocate.room import GpuUse, Shortage
from agent.allocate.steps import DISK_BUDGET, AllocateStep, disk_refusal, starved_refusal
from agent.cluster import NodeView, PodTable, PodUid
from agent.errors import Refusal, RefusalReason, StateError
from agent.kit.cell import Cell
from agent.kit.timing import Budget, Durations, Lag, Starved
from agent.kit.turns import Turn, Turns
from agent.ledger import ContainerKey, KubeletEpoch, Ledger, Row
from agent.model import GpuUuid, Inventory, SliceId
from agent.ports import Clock, Containers, KubeletRecords, Witness

# How long Allocates wait for what is outside the agent, and for what.

BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class Waits:
    """The waits of all Allocates. What is left of an Allocate is the agent's own work."""

    def __init__(self) -> None:
        self.durations = Durations(
            "allocate_wait_seconds",
            "Seconds that an Allocate waited for the kubelet, the runtime, the API server, the "
            "hook path, a container's directory or the state on disk.",
            ("step",),
            BUCKETS,
        )

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Time the block as a wait for that."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            yield
        finally:
            self.durations.observe(loop.time() - began, what)


# The facts that an Allocate reads, the peers it may ask, and the other calls under way.


class AllocationViews(msgspec.Struct, frozen=True):
    """The facts that a decision reads.

    - `registered`: the greatest amounts registered for each GPU in the last 60 s.
    - `outlived`: the locks that still stood when the pod that was answered under them was gone.
    """

    pods: Cell[PodTable]
    node: Cell[NodeView | None]
    inventory: Cell[Inventory]
    ledger: Cell[Ledger]
    outlived: Cell[Mapping[str, PodUid]]
    registered: Callable[[], Mapping[GpuUuid, GpuUse]] = dict


class Refresh(Protocol):
    """LISTs this node's pods. Raises ApiError."""

    def __call__(self, *, is_owners: bool) -> Awaitable[PodTable]: ...  # noqa: D102


class AllocationPeers(msgspec.Struct, frozen=True):
    """The peers that an inquiry asks.

    - `refresh`: makes the one LIST of this node's pods; `is_owners`: the lock's owner may need it.
    - `look_at_pod`: GETs the UID of the pod that has a name now. `look_at_node`: GETs the Node.
    - `epoch`: the present kubelet instance. `streams`: how many list streams it has open.
    - `look`: opens the Node's watch at once if it is down. After an outage the scheduler and the
      kubelet may be back before it.
    - `lag`: extends the deadlines of all calls.
    """

    witness: Witness
    records: KubeletRecords
    containers: Containers
    refresh: Refresh
    look_at_pod: Callable[[str, str], Awaitable[PodUid]]
    look_at_node: Callable[[], Awaitable[None]]
    epoch: Callable[[], KubeletEpoch | None]
    streams: Cell[int]
    clock: Clock
    look: Callable[[], None]
    lag: Lag = msgspec.field(default_factory=Lag)


class Underway(msgspec.Struct, frozen=True):
    """What the calls of this process have under way now.

    `ledger` includes rows that are being written. `claimed` and `spent` are as in Evidence.
    """

    ledger: Ledger
    claimed: frozenset[PodUid]
    spent: Mapping[str, PodUid]


# The Allocates under way: the step of each, and its refusal when it fails or takes too long.

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

    @property
    def may_come_again(self) -> bool:
        """Whether the kubelet may ask again after a refusal. For a new pod it does not."""
        return self.is_replay or self.row is None or self.row.holder is None


class AllocateCalls(msgspec.Struct, eq=False):
    """The calls under way, and the rows that are being written to disk.

    - `taken`: the rows that a call is answering or the reconcile is closing. Both share this set.
    - `used_up`: the pods that were refused at their admission by the kubelet instance `used_up_by`.
      That instance never asks for them again; a later one may.
    - `spent`: for each of the last node locks, the pod that was answered under it.
    - `offers`: the containers for which the kubelet was offered free ids of the right GPUs.
    - `turns`: the order in which the kubelet began containers. `waits`: what calls waited for.
    - `lag`: extends the deadlines of all calls.
    Source: kubernetes pkg/kubelet/cm/devicemanager/manager.go, Allocate.
    """

    turns: Turns
    lag: Lag
    active: list[AllocateCall] = msgspec.field(default_factory=list)
    pending: dict[ContainerKey, Row] = msgspec.field(default_factory=dict)
    taken: set[ContainerKey] = msgspec.field(default_factory=set)
    used_up: frozenset[PodUid] = frozenset()
    used_up_by: KubeletEpoch | None = None
    spent: dict[str, PodUid] = msgspec.field(default_factory=dict)
    offers: deque[ContainerKey] = msgspec.field(default_factory=lambda: deque(maxlen=OFFERS))
    waits: Waits = msgspec.field(default_factory=Waits)

    @contextmanager
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

    @contextmanager
    def claiming(self, row: Row) -> Iterator[None]:
        """Reserve the row's pod while the block runs: no other call can take it."""
        self.pending[row.key] = row
        self.taken.add(row.key)
        try:
            yield
        finally:
            self.pending.pop(row.key, None)
            self.taken.discard(row.key)

    def on_their_way(self, ledger: Ledger) -> Ledger:
        """The ledger with the rows that are being written."""
        for row in self.pending.values():
            ledger = ledger.put(row)
        return ledger

    def claimed(self, epoch: KubeletEpoch) -> frozenset[PodUid]:
        """The pods that cannot be asking: pods of taken rows, and pods refused at admission."""
        used_up = self.used_up if self.used_up_by == epoch else frozenset[PodUid]()
        return used_up | {key.pod_uid for key in self.taken}

    def spend(self, row: Row) -> None:
        """Record that the row's lock was used: it proves no right for another pod."""
        self.spent.pop(row.lock, None)
        self.spent[row.lock] = row.key.pod_uid
        while len(self.spent) > SPENT:
            del self.spent[next(iter(self.spent))]

    def offer(self, key: ContainerKey) -> None:
        """Record that the kubelet was offered free ids of the GPUs that this container gets."""
        self.offers.append(key)

    def take_offer(self, key: ContainerKey) -> bool:
        """Whether an offer was made for the container. Forgets it: it counts for one answer."""
        made = key in self.offers
        while key in self.offers:
            self.offers.remove(key)
        return made

    def use_up(self, pod: PodUid, table: PodTable, epoch: KubeletEpoch) -> None:
        """Record that the pod was refused, for as long as the pod table knows it."""
        graves = frozenset(tombstone.pod.uid for tombstone in table.tombstones)
        known = self.used_up if self.used_up_by == epoch else frozenset[PodUid]()
        self.used_up = (known | {pod}) & (table.pods.keys() | graves)
        self.used_up_by = epoch


def overlap(call: AllocateCall) -> Refusal:
    """The refusal of a call that must not be granted beside another one."""
    row = call.row
    if row is None or row.holder is None:
        text = (
            "The kubelet asks for several containers at once after it lost its checkpoint, and "
            "this answer would crash it. It asks again in a few seconds for a container that ran "
            "before; the controller of a new pod starts it again."
        )
    elif call.is_replay:
        text = (
            "The kubelet asks for several containers at once after it lost its checkpoint. It asks "
            f"again for {row.key.container} of pod {row.namespace}/{row.pod} in a few seconds."
        )
    else:
        text = (
            f"The kubelet lost its checkpoint and began to start another container during the call "
            f"for {row.key.container} of pod {row.namespace}/{row.pod}; this answer would crash "
            "it. The pod's controller starts the pod again."
        )
    return Refusal(RefusalReason.OVERLAP, text, transient=True)


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
