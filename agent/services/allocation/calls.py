"""The Allocates under way: where each of them is, and what it says when its time is over."""

import dataclasses
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from agent.core.allocation.room import Shortage
from agent.core.allocation.steps import AllocateStep, disk_refusal
from agent.core.cluster.pods import PodTable, PodUid
from agent.core.errors import Refusal, RefusalReason, StateError
from agent.core.inventory.slices import SliceId
from agent.core.state.holdings import KubeletEpoch
from agent.core.state.ledger import ContainerKey, Row
from agent.kit.turns import Turn, Turns

SPENT = 256
"""Locks that are remembered with the pod that was answered under them: more than the scheduler can
take while one that went proves a right."""

OFFERS = 64
"""Offers that are remembered: more than the containers of any pod, for each is used at once."""


@dataclasses.dataclass(eq=False, slots=True)
class AllocateCall:
    """One Allocate under way. `overlapped`: another one was under way at the same time.

    `turn` says whether the kubelet began with another container since. `row` is what is to be
    answered, once that is known; `is_replay`: it was answered before.
    """

    turn: Turn
    overlapped: bool = False
    step: AllocateStep = AllocateStep.MATCH
    row: Row | None = None
    is_replay: bool = False
    oversold: Shortage | None = None


@dataclasses.dataclass(eq=False, slots=True)
class AllocateCalls:
    """The calls in flight, and the rows that are on their way to disk.

    `taken` are rows in somebody's hands: being answered here, or being closed by the reconcile,
    which shares it. `used_up`: pods that the kubelet `used_up_by` was refused at their admission;
    it never asks for them again, and a later one may. `spent`: which pod was answered under which
    of the last locks.
    `offers`: containers for which the kubelet was offered ids of the GPUs that they get. `turns`:
    whom the kubelet began with after whom; it begins with a preference, and drops what it noted of
    all others under way.
    Source: kubernetes pkg/kubelet/cm/devicemanager/manager.go, Allocate.
    """

    turns: Turns
    active: list[AllocateCall] = dataclasses.field(default_factory=list)
    pending: dict[ContainerKey, Row] = dataclasses.field(default_factory=dict)
    taken: set[ContainerKey] = dataclasses.field(default_factory=set)
    used_up: frozenset[PodUid] = frozenset()
    used_up_by: KubeletEpoch | None = None
    spent: dict[str, PodUid] = dataclasses.field(default_factory=dict)
    offers: deque[ContainerKey] = dataclasses.field(default_factory=lambda: deque(maxlen=OFFERS))

    @contextmanager
    def entered(self, ids: Collection[SliceId]) -> Iterator[AllocateCall]:
        """A call for these ids, from its arrival to its answer."""
        with self.turns.asked(ids) as turn:
            call = AllocateCall(turn)
            self.active.append(call)
            if len(self.active) > 1:
                for one in self.active:
                    one.overlapped = True
            try:
                yield call
            finally:
                self.active.remove(call)

    @contextmanager
    def claiming(self, row: Row) -> Iterator[None]:
        """No other call may take this pod while the row is on its way to disk."""
        self.pending[row.key] = row
        self.taken.add(row.key)
        try:
            yield
        finally:
            self.pending.pop(row.key, None)
            self.taken.discard(row.key)

    def claimed(self, epoch: KubeletEpoch) -> frozenset[PodUid]:
        """The pods that cannot be asking: those of these rows, and those that asked in vain."""
        used_up = self.used_up if self.used_up_by == epoch else frozenset[PodUid]()
        return used_up | {key.pod_uid for key in self.taken}

    def spend(self, row: Row) -> None:
        """The lock under which the row was answered proves nothing for another pod."""
        self.spent.pop(row.lock, None)
        self.spent[row.lock] = row.key.pod_uid
        while len(self.spent) > SPENT:
            del self.spent[next(iter(self.spent))]

    def offer(self, key: ContainerKey) -> None:
        """The kubelet was offered free ids of the GPUs that this container gets."""
        self.offers.append(key)

    def take_offer(self, key: ContainerKey) -> bool:
        """Whether such an offer was made for the container; it counts for one answer."""
        made = key in self.offers
        while key in self.offers:
            self.offers.remove(key)
        return made

    def use_up(self, pod: PodUid, table: PodTable, epoch: KubeletEpoch) -> None:
        """This pod was refused; it is remembered as long as it is there, or its grave is kept."""
        graves = frozenset(stone.pod.uid for stone in table.tombstones)
        known = self.used_up if self.used_up_by == epoch else frozenset[PodUid]()
        self.used_up = (known | {pod}) & (table.pods.keys() | graves)
        self.used_up_by = epoch


def overlap(row: Row, *, is_replay: bool) -> Refusal:
    """What a call says that must not be granted beside another one."""
    if not is_replay:
        return Refusal(
            RefusalReason.OVERLAP,
            f"While {row.key.container} of pod {row.namespace}/{row.pod} was being answered, the "
            "kubelet began to start another container whose records it had lost, and would die of "
            "this answer; the pod's controller starts it again.",
            transient=True,
        )
    return Refusal(
        RefusalReason.OVERLAP,
        "The kubelet asks for several containers at once after it lost its records; it asks again "
        f"for {row.key.container} of pod {row.namespace}/{row.pod} in a few seconds.",
        transient=True,
    )


def refusal_of(error: TimeoutError | StateError, call: AllocateCall) -> Refusal:
    """What the pod's owner reads when a step failed, or was still going on at the end."""
    if call.step is AllocateStep.ALONE and call.row is not None:
        return overlap(call.row, is_replay=call.is_replay)
    if call.step is not AllocateStep.MATCH or isinstance(error, StateError):
        return disk_refusal(error, call.step)
    return Refusal(
        RefusalReason.OUT_OF_TIME,
        "The agent did not find out in time which pod this is; its controller starts it again.",
        transient=True,
    )
