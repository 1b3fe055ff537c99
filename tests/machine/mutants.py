"""Planted bugs. Each is the real agent but for one thing, put in its place for a while.

The machine must find every one of them: a machine that finds none of these proves nothing.
"""

import contextlib
import dataclasses
import datetime as dt
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from agent import reconcile
from agent import settle as core_settlement
from agent import settle as settlement
from agent.allocate import match as matching
from agent.allocate import service
from agent.allocate.match import UNREAD, Ask, Candidate, Evidence, Grant, Question, exactly_one
from agent.allocate.match import decide as decide_truly
from agent.allocate.room import RoomClaim
from agent.allocate.service import Inquiry
from agent.cluster import BIND_TIME, NodeLock, PodView
from agent.errors import Refusal, RefusalReason
from agent.ledger import ContainerKey, Ledger, Row
from agent.reconcile import ReconcileFacts
from agent.settle import Effect, EffectKind, SettlementFacts
from agent.settle import pending_effects as truly_pending
from tests.machine.agent_life import AgentLife


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A bug and the words of the breach that it is found by. `first`: the story to begin with."""

    patch: contextlib.AbstractContextManager[None]
    breach: str
    first: int = 0


@contextlib.contextmanager
def replaced(place: Any, name: str, value: object) -> Iterator[None]:
    """`value` under that name of `place`, then the old one again."""
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)


def witness_ignored() -> Mutant:
    """Whoever fits is taken for the pod that asks: the lock's owner first, nobody is asked."""

    def first_of(found: tuple[Candidate, ...], evidence: Evidence) -> object:
        owner = evidence.lock.owner if evidence.lock else None
        whoever = sorted(found, key=lambda one: one.pod.key != owner)
        return whoever[0] if whoever else exactly_one((), evidence)

    @contextlib.contextmanager
    def patch() -> Iterator[None]:
        unasked = replaced(matching, "to_ask", lambda *_: None)
        with unasked, replaced(matching, "exactly_one", first_of):
            yield

    return Mutant(patch(), "another one's directory")


def uid_ignored() -> Mutant:
    """A row counts for every pod of its name, whichever pod of that name it was answered to."""
    original = matching.decide

    def decide(evidence: Evidence) -> object:
        pods = {pod.key: pod for pod in evidence.table.pods.values()}
        rows = tuple(
            _taken_over(row, pods.get((row.namespace, row.pod))) for row in evidence.ledger.rows
        )
        renamed = msgspec.structs.replace(evidence, ledger=Ledger(rows))
        return original(renamed)

    return Mutant(_decided_by(decide), "another one's directory|a good pod was refused")


def _taken_over(row: Row, pod: PodView | None) -> Row:
    if pod is None or pod.uid == row.key.pod_uid:
        return row
    return msgspec.structs.replace(
        row, key=ContainerKey(pod.uid, row.key.container), confirmed=False
    )


def sums_unchecked() -> Mutant:
    """Whatever the scheduler wrote is granted, however full the GPU is."""

    def shortage(wanted: RoomClaim, live: object, gpus: object) -> None:
        return None

    return Mutant(replaced(matching, "shortage", shortage), "promised beyond")


def answered_before_fsync() -> Mutant:
    """The answer does not wait for the disk."""

    async def commit(self: AgentLife, change: Callable[[Ledger], Ledger]) -> None:
        self.in_background(self.state.commit(change))

    return Mutant(replaced(AgentLife, "commit", commit), "on disk")


def replayed_by_count() -> Mutant:
    """Any row of as many slices is answered again to whoever holds no record."""
    original = matching.decide

    def decide(evidence: Evidence) -> object:
        step = original(evidence)
        if not isinstance(step, Grant) or step.candidate.row is None:
            return step
        row = next(row for row in evidence.ledger.rows if len(row.shares) == evidence.count)
        found = msgspec.structs.replace(step.candidate, row=row)
        return Grant(found, row.group, row.shares)

    return Mutant(_decided_by(decide), "another one's directory")


def order_of_the_spec() -> Mutant:
    """Dead containers are asked for in their order, whatever ran when the kubelet began.

    A pod whose row then names another one's slices is refused where it asks itself.
    """

    def first(pod: PodView, evidence: Evidence) -> tuple[Candidate, ...]:
        return matching.waiting(pod, evidence)[:1]

    return Mutant(
        replaced(matching, "possible", first), "another one's directory|a good pod was refused"
    )


def silence_taken_for_no() -> Mutant:
    """A pod about which PodResources gives no answer is taken for one that the kubelet lacks."""
    original = Inquiry._ask

    async def ask(self: Inquiry, namespace: str, name: str) -> None:
        try:
            await original(self, namespace, name)
        except Refusal:
            self.seen.known[namespace, name] = None

    return Mutant(replaced(Inquiry, "_ask", ask), "another one's directory|a good pod was refused")


def dead_containers_in_the_way() -> Mutant:
    """A new pod is refused as long as dead containers wait that nothing tells apart."""

    def only_one(found: tuple[Candidate, ...], evidence: Evidence) -> object:
        known = matching.admitted(found, evidence)
        if len({each.pod.key for each in known}) > 1 and Ask.PODS in evidence.asked:
            raise Refusal(RefusalReason.MANY_PODS_ADMITTED, "The kubelet admits several pods.")
        return exactly_one(found, evidence)

    return Mutant(replaced(matching, "exactly_one", only_one), "a good pod was refused")


def unread_name_taken_for_the_same() -> Mutant:
    """A pod in view is served under a name that the API server did not answer about."""
    original = matching.decide

    def decide(evidence: Evidence) -> object:
        uids = {
            key: seen.uid
            if uid is UNREAD and (seen := evidence.table.named(*key)) is not None
            else uid
            for key, uid in evidence.pod_uids.items()
        }
        return original(msgspec.structs.replace(evidence, pod_uids=uids))

    return Mutant(_decided_by(decide), "another one's directory|a good pod was refused")


def _decided_by(decide: object) -> contextlib.AbstractContextManager[None]:
    return replaced(service, "decide", decide)


MUTANTS = (
    witness_ignored,
    uid_ignored,
    sums_unchecked,
    answered_before_fsync,
    replayed_by_count,
    order_of_the_spec,
    silence_taken_for_no,
    dead_containers_in_the_way,
    unread_name_taken_for_the_same,
)


# Planted bugs for stories without faults: what the agent once took for true, and did not do.
#
# As in `mutants`: the stories must find every one of them.


def bind_time_compared() -> Mutant:
    """A lock that was stamped after its owner's bind-time is taken for a later pod's."""

    def decide(evidence: Evidence) -> object:
        step = decide_truly(evidence)
        if isinstance(step, Grant) and step.candidate.row is None:
            pod, lock = step.candidate.pod, evidence.lock
            if lock is not None and lock.owner == pod.key and not _took(pod, lock):
                raise Refusal(
                    RefusalReason.NO_RIGHT, "The lock was taken for a later pod of that name."
                )
        return step

    return Mutant(replaced(service, "decide", decide), "a good pod was refused")


def bind_time_compared_in_settlement() -> Mutant:
    """The lock of an owner that is over or gone is released only if it is not the younger one."""

    def pending_effects(scene: SettlementFacts) -> tuple[Effect, ...]:
        return tuple(effect for effect in truly_pending(scene) if not _is_doubted(effect, scene))

    return Mutant(replaced(settlement, "pending_effects", pending_effects), "a lock stood")


def locks_not_left_to_pods_that_come() -> Mutant:
    """A lock whose owner is not here yet is taken at once."""
    return Mutant(
        replaced(core_settlement, "UNCLAIMED", dt.timedelta(0)),
        "a lock was taken from a pod that needs it|a good pod was refused",
    )


def returning_names_not_looked_at() -> Mutant:
    """The pod in view is taken for the one that the API server has by that name."""

    def decide(evidence: Evidence) -> object:
        step = decide_truly(evidence)
        while isinstance(step, Question) and step.ask is Ask.POD:
            (key,) = step.pods
            seen = evidence.table.named(*key)
            uids = {**evidence.pod_uids, key: seen.uid if seen else None}
            evidence = msgspec.structs.replace(evidence, pod_uids=uids)
            step = decide_truly(evidence)
        return step

    return Mutant(replaced(service, "decide", decide), "another one's directory")


def locks_that_went_forgotten() -> Mutant:
    """Only the lock that stands proves a right: the judge excuses nobody for HAMi's own doing."""
    forgotten = replaced(service, "former_locks", lambda *_: ())
    return Mutant(forgotten, "a good pod was refused", first=1213)


def listed_for_good() -> Mutant:
    """A pod that has ended keeps its rows as long as the kubelet lists it."""
    truly_unused = reconcile._unused

    def unused(rows: Iterable[Row], seen: ReconcileFacts) -> Iterator[tuple[Row, float]]:
        names = {(each.namespace, each.pod) for each in seen.holdings}
        for row, grace in truly_unused(rows, seen):
            if (row.namespace, row.pod) not in names:
                yield row, grace

    return Mutant(replaced(reconcile, "_unused", unused), "the row of a pod that is over")


def _is_doubted(effect: Effect, scene: SettlementFacts) -> bool:
    if effect.kind is not EffectKind.RELEASE_LOCK or scene.lock is None:
        return False
    graves = [stone.pod for stone in scene.table.tombstones]
    pods = [*scene.table.pods.values(), *graves]
    return any(pod.key == scene.lock.owner and not _took(pod, scene.lock) for pod in pods)


def _took(pod: PodView, lock: NodeLock) -> bool:
    return int(lock.stamp.timestamp()) <= int(pod.annotations.get(BIND_TIME, "0"))


CALM_MUTANTS = (
    bind_time_compared,
    bind_time_compared_in_settlement,
    locks_not_left_to_pods_that_come,
    returning_names_not_looked_at,
    locks_that_went_forgotten,
    listed_for_good,
)
