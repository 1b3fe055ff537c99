"""Planted bugs. Each is the real agent but for one thing, put in its place for a while.

The histories must find every one of them: what finds none of these proves nothing.
"""

import asyncio
import contextlib
import datetime as dt
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from agent import reconcile, settle
from agent.allocate import match, service
from agent.allocate.match import UNREAD, Ask, Candidate, Evidence, Grant, Question
from agent.allocate.service import Inquiry
from agent.cluster import BIND_TIME, NodeLock, PodView
from agent.errors import DriverError, Refusal, RefusalReason
from agent.health import judge, watch
from agent.health.watch import HealthWatch
from agent.ledger import ContainerKey, Ledger, Row
from agent.model import Action, Cause, Condition, GpuSigns, Health
from agent.reconcile import ReconcileFacts
from agent.settle import Effect, EffectKind, SettlementFacts
from tests.machine.agent_life import AgentLife


class Mutant(NamedTuple):
    """A bug, and the words of the breach that it is found by."""

    place: Any
    name: str
    bug: object
    breach: str

    def planted(self) -> contextlib.AbstractContextManager[None]:
        """The bug is there for as long as the block runs."""
        return replaced(self.place, self.name, self.bug)


@contextlib.contextmanager
def replaced(place: Any, name: str, value: object) -> Iterator[None]:
    """`value` under that name of `place`, then the old one again."""
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)


# Of answers, in histories where anything may fail.

decide, exactly_one, ask = match.decide, match.exactly_one, Inquiry._ask


def witness_ignored(evidence: Evidence) -> object:
    """Whoever fits is taken for the pod that asks: the lock's owner first, nobody is asked."""

    def first_of(found: tuple[Candidate, ...], evidence: Evidence) -> object:
        owner = evidence.lock.owner if evidence.lock else None
        whoever = sorted(found, key=lambda one: one.pod.key != owner)
        return whoever[0] if whoever else exactly_one((), evidence)

    unasked = replaced(match, "to_ask", lambda *_: None)
    with unasked, replaced(match, "exactly_one", first_of):
        return decide(evidence)


def uid_ignored(evidence: Evidence) -> object:
    """A row counts for every pod of its name, whichever pod of that name it was answered to."""
    pods = {pod.key: pod for pod in evidence.table.pods.values()}

    def taken_over(row: Row) -> Row:
        pod = pods.get((row.namespace, row.pod))
        if pod is None or pod.uid == row.key.pod_uid:
            return row
        key = ContainerKey(pod.uid, row.key.container)
        return msgspec.structs.replace(row, key=key, confirmed=False)

    rows = tuple(map(taken_over, evidence.ledger.rows))
    return decide(msgspec.structs.replace(evidence, ledger=Ledger(rows)))


async def answered_before_fsync(self: AgentLife, change: Callable[[Ledger], Ledger]) -> None:
    """The answer does not wait for the disk."""
    self.in_background(self.state.commit(change))


def replayed_by_count(evidence: Evidence) -> object:
    """Any row of as many slices is answered again to whoever holds no record."""
    step = decide(evidence)
    if not isinstance(step, Grant) or step.candidate.row is None:
        return step
    row = next(row for row in evidence.ledger.rows if len(row.shares) == evidence.count)
    return Grant(msgspec.structs.replace(step.candidate, row=row), row.group, row.shares)


def order_of_the_spec(pod: PodView, evidence: Evidence) -> tuple[Candidate, ...]:
    """Dead containers are asked for in their order, whatever ran when the kubelet began.

    A pod whose row then names another one's slices is refused where it asks itself.
    """
    return match.waiting(pod, evidence)[:1]


async def silence_taken_for_no(self: Inquiry, namespace: str, name: str) -> None:
    """A pod about which PodResources gives no answer is taken for one that the kubelet lacks."""
    try:
        await ask(self, namespace, name)
    except Refusal:
        self.seen.known[namespace, name] = None


def dead_containers_in_the_way(found: tuple[Candidate, ...], evidence: Evidence) -> object:
    """A new pod is refused as long as dead containers wait that nothing tells apart."""
    known = match.admitted(found, evidence)
    if len({each.pod.key for each in known}) > 1 and Ask.PODS in evidence.asked:
        raise Refusal(RefusalReason.MANY_PODS_ADMITTED, "The kubelet admits several pods.")
    return exactly_one(found, evidence)


def unread_name_taken_for_the_same(evidence: Evidence) -> object:
    """A pod in view is served under a name that the API server did not answer about."""
    uids = {
        key: seen.uid if uid is UNREAD and (seen := evidence.table.named(*key)) else uid
        for key, uid in evidence.pod_uids.items()
    }
    return decide(msgspec.structs.replace(evidence, pod_uids=uids))


def returning_names_not_looked_at(evidence: Evidence) -> object:
    """The pod in view is taken for the one that the API server has by that name."""
    step = decide(evidence)
    while isinstance(step, Question) and step.ask is Ask.POD:
        (key,) = step.pods
        seen = evidence.table.named(*key)
        uids = {**evidence.pod_uids, key: seen.uid if seen else None}
        evidence = msgspec.structs.replace(evidence, pod_uids=uids)
        step = decide(evidence)
    return step


OTHERS = "another one's directory"
OTHERS_OR_REFUSED = f"{OTHERS}|a good pod was refused"
REFUSED = "a good pod was refused"

MUTANTS = {
    "witness ignored": Mutant(service, "decide", witness_ignored, OTHERS),
    "uid ignored": Mutant(service, "decide", uid_ignored, OTHERS_OR_REFUSED),
    "sums unchecked": Mutant(match, "shortage", lambda *_: None, "promised beyond"),
    "answered before fsync": Mutant(AgentLife, "commit", answered_before_fsync, "on disk"),
    "replayed by count": Mutant(service, "decide", replayed_by_count, OTHERS),
    "order of the spec": Mutant(match, "possible", order_of_the_spec, OTHERS_OR_REFUSED),
    "silence is no": Mutant(Inquiry, "_ask", silence_taken_for_no, OTHERS_OR_REFUSED),
    "dead in the way": Mutant(match, "exactly_one", dead_containers_in_the_way, REFUSED),
    "returning names": Mutant(service, "decide", returning_names_not_looked_at, OTHERS),
    "unread name": Mutant(service, "decide", unread_name_taken_for_the_same, OTHERS_OR_REFUSED),
}


# In stories where nothing fails: what the agent once took for true, and did not do.

unused, pending_effects = reconcile._unused, settle.pending_effects


def bind_time_compared(evidence: Evidence) -> object:
    """A lock that was stamped after its owner's bind-time is taken for a later pod's."""
    step = decide(evidence)
    if isinstance(step, Grant) and step.candidate.row is None:
        pod, lock = step.candidate.pod, evidence.lock
        if lock is not None and lock.owner == pod.key and not _took(pod, lock):
            raise Refusal(RefusalReason.NO_RIGHT, "The lock was taken for a later pod.")
    return step


def bind_time_compared_in_settlement(scene: SettlementFacts) -> tuple[Effect, ...]:
    """The lock of an owner that is over or gone is released only if it is not the younger one."""
    lock = scene.lock
    pods = [*scene.table.pods.values(), *(stone.pod for stone in scene.table.tombstones)]
    is_doubted = lock and any(pod.key == lock.owner and not _took(pod, lock) for pod in pods)
    return tuple(
        effect
        for effect in pending_effects(scene)
        if effect.kind is not EffectKind.RELEASE_LOCK or not is_doubted
    )


def _took(pod: PodView, lock: NodeLock) -> bool:
    return int(lock.stamp.timestamp()) <= int(pod.annotations.get(BIND_TIME, "0"))


def listed_for_good(rows: Iterable[Row], seen: ReconcileFacts) -> Iterator[tuple[Row, float]]:
    """A pod that has ended keeps its rows as long as the kubelet lists it."""
    names = {(each.namespace, each.pod) for each in seen.holdings}
    for row, grace in unused(rows, seen):
        if (row.namespace, row.pod) not in names:
            yield row, grace


TAKEN = f"a lock was taken from a pod that needs it|{REFUSED}"
ROW_LEFT = "the row of a pod that is over"

CALM_MUTANTS = {
    "bind-time compared": Mutant(service, "decide", bind_time_compared, REFUSED),
    "bind-time compared in settlement": Mutant(
        settle, "pending_effects", bind_time_compared_in_settlement, "a lock stood"
    ),
    "locks not left to pods that come": Mutant(settle, "UNCLAIMED", dt.timedelta(0), TAKEN),
    "listed for good": Mutant(reconcile, "_unused", listed_for_good, ROW_LEFT),
}


# Of how GPUs are judged.

verdict, relieved, worse = judge.verdict, judge.relieved, judge.worse


def forgetful(one: Health, now: dt.datetime, *_: object, boot_changed: bool) -> Health:
    """A restarted agent remembers nothing."""
    del boot_changed
    return Health(Condition.OK, since=now)


def easy(*args: Any, needs: Action = Action.NONE, **more: Any) -> Health:
    """Nothing needs a reset."""
    del needs
    return verdict(*args, **more)


def restless(one: Health, signs: GpuSigns, now: dt.datetime) -> Health:
    """The time before a reset is known counts as a rest after it."""
    return msgspec.structs.replace(relieved(one, signs, now), quiet_since=one.quiet_since)


def trusting(one: Health, newest: Health) -> Health:
    """Whatever a GPU reports takes the place of the driver's refusal."""
    return newest if one.cause == Cause.REFUSED else worse(one, newest)


def sweeping(one: Health, doubt: Health) -> Health:
    """A memory error that names no GPU takes all of them out."""
    if judge.UNNAMED not in doubt.text:
        return worse(one, doubt)
    bad = Condition.BAD
    return verdict(bad, doubt.since, Cause.ECC, "H-ECC", doubt.text) if one.serving else one


async def talkative(self: HealthWatch) -> None:
    """Each GPU of a mishap is a list of its own."""
    while True:
        await self._reported.wait()
        self._reported.clear()
        reports, self._waiting = tuple(self._waiting), {}
        for report in reports:
            self._publish(self._judged((report,)))
            await asyncio.sleep(0.001)


GPU_MUTANTS = {
    "each GPU is a list": Mutant(HealthWatch, "_judge_reports", talkative, "I4"),
    "what the driver raises ends all": Mutant(watch, "GpuError", DriverError, "I8"),
    "nothing is remembered": Mutant(judge, "remembered", forgetful, "I9"),
    "one passed probe and all is well": Mutant(judge, "quiet_time", lambda *_: 0.0, "I9"),
    "nothing needs a reset": Mutant(judge, "verdict", easy, "I9"),
    "one failed probe and it is bad": Mutant(judge, "is_failing", lambda *_: True, "I9"),
    "failed probes are doubts for ever": Mutant(judge, "is_failing", lambda *_: False, "I9"),
    "nobody looks who is missing": Mutant(HealthWatch, "scanned", lambda *_: None, "I9"),
    "all for one": Mutant(judge, "worse", sweeping, "I9"),
    "no rest after a reset": Mutant(judge, "relieved", restless, "I9"),
    "a report undoes a refusal": Mutant(judge, "worse", trusting, "I9"),
}
