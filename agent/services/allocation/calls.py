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
from agent.core.state.ledger import ContainerKey, Ledger, Row
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
    step: AllocateStep = AllocateStep.HOOK
    row: Row | None = None
    is_replay: bool = False
    oversold: Shortage | None = None

    @property
    def is_lost(self) -> bool:
        """Whether it must not be granted: the kubelet has gone on, or it is not alone."""
        return self.turn.overtaken or (self.turn.yields and self.overlapped)

    @property
    def may_come_again(self) -> bool:
        """Whether the kubelet asks again if it is refused: not for a pod at its admission."""
        return self.is_replay or self.row is None or self.row.holder is None


@dataclasses.dataclass(eq=False, slots=True)
class AllocateCalls:
    """The calls in flight, and the rows that are on their way to disk.

    `taken` are rows in somebody's hands: being answered here, or being closed by the reconcile,
    which shares it. `used_up`: pods that the kubelet `used_up_by` was refused at their admission;
    it never asks for them again, and a later one may. `spent`: which pod was answered under which
    of the last locks. `offers`: containers for which the kubelet was offered ids of the GPUs that
    they get. `turns`: whom the kubelet began with after whom; it begins with a preference, and
    drops what it noted of all others under way.
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

    def on_their_way(self, ledger: Ledger) -> Ledger:
        """The ledger with the rows that are being written."""
        for row in self.pending.values():
            ledger = ledger.put(row)
        return ledger

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


def overlap(call: AllocateCall) -> Refusal:
    """What a call says that must not be granted beside another one."""
    row = call.row
    if row is None or row.holder is None:
        text = (
            "The kubelet asks for several containers at once after it lost its records, and would "
            "die of this answer; it asks again for a container that ran in a few seconds, and a "
            "new pod is started again by its controller."
        )
    elif call.is_replay:
        text = (
            "The kubelet asks for several containers at once after it lost its records; it asks "
            f"again for {row.key.container} of pod {row.namespace}/{row.pod} in a few seconds."
        )
    else:
        text = (
            f"While {row.key.container} of pod {row.namespace}/{row.pod} was being answered, the "
            "kubelet began to start another container whose records it had lost, and would die of "
            "this answer; the pod's controller starts it again."
        )
    return Refusal(RefusalReason.OVERLAP, text, transient=True)


def refusal_of(error: TimeoutError | StateError, call: AllocateCall) -> Refusal:
    """What the pod's owner reads when a step failed, or was still going on at the end."""
    if call.step is AllocateStep.ALONE:
        return overlap(call)
    if call.step is not AllocateStep.MATCH or isinstance(error, StateError):
        return disk_refusal(error, call.step)
    return Refusal(
        RefusalReason.OUT_OF_TIME,
        "The agent did not find out in time which pod this is; its controller starts it again.",
        transient=True,
    )
