"""Planted bugs for stories without faults: what the agent once took for true, and did not do.

As in `mutants`: the stories must find every one of them.
"""

import datetime as dt

import msgspec

from agent import settle as core_settlement
from agent import settle as settlement
from agent.allocate import inquiry
from agent.allocate.candidates import Evidence, Grant, LookAtPod, MatchSettings
from agent.allocate.match import decide as decide_truly
from agent.cluster import BIND_TIME, NodeLock, PodView
from agent.errors import Refusal, RefusalReason
from agent.reconcile import rules as reconcile
from agent.reconcile.rules import ReconcileFacts
from agent.settle import Effect, EffectKind, SettlementFacts
from agent.settle import owed as owed_truly
from tests.machine.mutants import Mutant, replaced


def bind_time_compared() -> Mutant:
    """A lock that was stamped after its owner's bind-time is taken for a later pod's."""

    def decide(count: int, evidence: Evidence, settings: MatchSettings) -> object:
        step = decide_truly(count, evidence, settings)
        if isinstance(step, Grant) and step.replay is None:
            pod, lock = step.candidate.pod, evidence.lock
            if lock is not None and lock.owner == pod.key and not _took(pod, lock):
                raise Refusal(
                    RefusalReason.NO_RIGHT, "The lock was taken for a later pod of that name."
                )
        return step

    return Mutant(replaced(inquiry, "decide", decide), "a good pod was refused")


def bind_time_compared_in_settlement() -> Mutant:
    """The lock of an owner that is over or gone is released only if it is not the younger one."""

    def owed(scene: SettlementFacts) -> tuple[Effect, ...]:
        return tuple(effect for effect in owed_truly(scene) if not _is_doubted(effect, scene))

    return Mutant(replaced(settlement, "owed", owed), "a lock stood")


def locks_not_left_to_pods_that_come() -> Mutant:
    """A lock whose owner is not here yet is taken at once."""
    return Mutant(
        replaced(core_settlement, "UNCLAIMED", dt.timedelta(0)),
        "a lock was taken from a pod that needs it|a good pod was refused",
    )


def returning_names_not_looked_at() -> Mutant:
    """The pod in view is taken for the one that the API server has by that name."""

    def decide(count: int, evidence: Evidence, settings: MatchSettings) -> object:
        step = decide_truly(count, evidence, settings)
        while isinstance(step, LookAtPod):
            key = step.namespace, step.name
            seen = evidence.table.named(*key)
            pod_uids_read = {**evidence.pod_uids_read, key: seen.uid if seen else None}
            evidence = msgspec.structs.replace(evidence, pod_uids_read=pod_uids_read)
            step = decide_truly(count, evidence, settings)
        return step

    return Mutant(replaced(inquiry, "decide", decide), "another one's directory")


def locks_that_went_forgotten() -> Mutant:
    """Only the lock that stands proves a right: the judge excuses nobody for HAMi's own doing."""
    return Mutant(replaced(inquiry, "former_locks", lambda *_: ()), "a good pod was refused")


def listed_for_good() -> Mutant:
    """A pod that has ended keeps its rows as long as the kubelet lists it."""
    has_ended = reconcile._has_ended

    def listed(pod: PodView, seen: ReconcileFacts) -> bool:
        names = {(each.namespace, each.pod) for each in seen.holdings}
        return pod.key not in names and has_ended(pod, seen)

    return Mutant(replaced(reconcile, "_has_ended", listed), "the row of a pod that is over")


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
