"""The Allocates under way: where each of them is, and what it says when its time is over."""

import asyncio
import dataclasses
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from agent.core.errors import Gate, Refusal, StateError
from agent.core.ledger import ContainerKey, Row
from agent.core.pods import PodTable, PodUid
from agent.core.slices import SliceId
from agent.core.steps import ALLOCATE_BUDGET, Step, disk_refusal

BOOKING = 0.1
"""Seconds that the kubelet is given after an answer: it writes its checkpoint, and only then looks
at what it had noted of the container."""

BEGUN = 5.0
"""Seconds after which a preference is no beginning any more: its Allocate follows at once."""

OFFERS = 64
"""Offers that are remembered: more than the containers of any pod, for each is used at once."""


@dataclasses.dataclass(eq=False, slots=True)
class Call:
    """One Allocate under way. `overlapped`: another one was under way at the same time.

    `overtaken`: the kubelet began with another container since: it dies of a grant of this one.
    `row` is what is to be answered, once that is known; `is_replay`: it was answered before.
    `over` is set when its answer is on its way.
    """

    overlapped: bool = False
    overtaken: bool = False
    step: Step = Step.MATCH
    row: Row | None = None
    is_replay: bool = False
    over: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)


@dataclasses.dataclass(eq=False, slots=True)
class Begun:
    """A container that the kubelet began with by asking what we prefer; `ids` is what it heard."""

    at: float
    ids: frozenset[SliceId] = frozenset()
    overtaken: bool = False


@dataclasses.dataclass(eq=False, slots=True)
class Calls:
    """The calls in flight, and the rows that are on their way to disk.

    `used_up`: deleted pods that were refused; the kubelet never asks for them again. `offers`:
    containers for which the kubelet was offered ids of the GPUs that they get. `begun`: preferences
    whose Allocate has not come.
    """

    begun: deque[Begun] = dataclasses.field(default_factory=lambda: deque(maxlen=OFFERS))
    active: list[Call] = dataclasses.field(default_factory=list)
    pending: dict[ContainerKey, Row] = dataclasses.field(default_factory=dict)
    used_up: frozenset[PodUid] = frozenset()
    offers: deque[ContainerKey] = dataclasses.field(default_factory=lambda: deque(maxlen=OFFERS))

    @contextmanager
    def entered(self, ids: Collection[SliceId]) -> Iterator[Call]:
        """A call for these ids, from its arrival to its answer."""
        call = Call(overtaken=self._is_overtaken(frozenset(ids)))
        self.active.append(call)
        if len(self.active) > 1:
            for one in self.active:
                one.overlapped = True
        try:
            yield call
        finally:
            self.active.remove(call)
            call.over.set()

    def begin(self) -> Begun:
        """The kubelet begins with a container: it drops what it noted of all others under way.

        Source: kubernetes pkg/kubelet/cm/devicemanager/manager.go, Allocate.
        """
        for call in self.active:
            call.overtaken = True
        for earlier in self.begun:
            earlier.overtaken = True
        begun = Begun(asyncio.get_running_loop().time())
        self.begun.append(begun)
        return begun

    def _is_overtaken(self, ids: frozenset[SliceId]) -> bool:
        """Whether the kubelet began with another container since it began with that of `ids`.

        It takes the ids that it was offered. Without an offer it begins now.
        """
        recent = asyncio.get_running_loop().time() - BEGUN
        for one in reversed(self.begun):
            if one.ids == ids and one.at > recent:
                self.begun.remove(one)
                return one.overtaken
        self.begun.remove(self.begin())
        return False

    async def until_alone(self, call: Call) -> None:
        """Return once nobody else is under way who may be granted, and the kubelet booked them.

        As long as `call` has no answer the kubelet begins with no further container of its pod.
        """
        others = self._others(call)
        while True:
            for one in others:
                await one.over.wait()
            await asyncio.sleep(BOOKING)
            others = self._others(call)
            if not others:
                return

    def _others(self, call: Call) -> list[Call]:
        """The other calls under way that may be granted."""
        return [one for one in self.active if one is not call and not one.is_replay]

    @contextmanager
    def claiming(self, row: Row) -> Iterator[None]:
        """No other call may take this pod while the row is on its way to disk."""
        self.pending[row.key] = row
        try:
            yield
        finally:
            self.pending.pop(row.key, None)

    def claimed(self) -> frozenset[PodUid]:
        """The pods that cannot be asking: those of these rows, and those that asked in vain."""
        return self.used_up | {key.pod_uid for key in self.pending}

    def offer(self, key: ContainerKey) -> None:
        """The kubelet was offered free ids of the GPUs that this container gets."""
        self.offers.append(key)

    def take_offer(self, key: ContainerKey) -> bool:
        """Whether such an offer was made for the container; it counts for one answer."""
        made = key in self.offers
        while key in self.offers:
            self.offers.remove(key)
        return made

    def use_up(self, pod: PodUid, table: PodTable) -> None:
        """This deleted pod was refused; it is remembered as long as its grave is kept."""
        graves = frozenset(stone.pod.uid for stone in table.tombstones)
        self.used_up = (self.used_up | {pod}) & graves


def overlap(row: Row, *, is_replay: bool) -> Refusal:
    """What a call says that must not be granted beside another one."""
    if not is_replay:
        return Refusal(
            Gate.OVERLAP,
            f"While {row.key.container} of pod {row.namespace}/{row.pod} was being answered, the "
            "kubelet began to start another container whose records it had lost, and would die of "
            "this answer; the pod's controller starts it again.",
            transient=True,
        )
    return Refusal(
        Gate.OVERLAP,
        "The kubelet asks for several containers at once after it lost its records; it asks again "
        f"for {row.key.container} of pod {row.namespace}/{row.pod} in a few seconds.",
        transient=True,
    )


def refusal_of(error: TimeoutError | StateError, call: Call) -> Refusal:
    """What the pod's owner reads when a step failed, or was still going on at the end."""
    if call.step is Step.ALONE and call.row is not None:
        return overlap(call.row, is_replay=call.is_replay)
    if call.step is not Step.MATCH or isinstance(error, StateError):
        return disk_refusal(error, call.step)
    return Refusal(
        Gate.OUT_OF_TIME,
        f"The agent did not find out within {ALLOCATE_BUDGET:g} s which pod this is; its "
        "controller starts it again.",
        transient=True,
    )
