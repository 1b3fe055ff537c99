"""HAMi's guess for pods without a node lock: `allocation.unlockedPods: legacy`.

HAMi's plugin, where no lock names a pod, takes the first of the node's pods that is bound and waits
by its annotations, and gives its share to whoever asks. Here the kubelet first rules out whom it is
not admitting; only between those that are left is guessed, the pod that was bound first before the
others, for the kubelet takes pods up in about that order.

A guess can be wrong. Then the answer stands under another pod's name than the one that got it. When
that pod asks in its turn, it is given a share that is left, as by HAMi: the two have swapped. As
long as one is left, no share is given twice. None is left when the pod that got the first answer
does not wait by its annotations any more: it runs, has ended or is gone, was settled, or is being
answered at this moment; nor while the kubelet has not shown that it holds slices. Then the pod that
asks is given its own answer again if it is the only one that may be meant (of several, none is
guessed): two pods hold one share and one directory until the first of them ends.
Source: HAMi v2.10 pkg/util/util.go GetPendingPod.
"""

import math
from collections.abc import Iterator

from agent.core.annotations import (
    BIND_PHASE,
    BIND_TIME,
    PHASE_ALLOCATING,
    PHASE_SUCCESS,
    VGPU_NODE,
)
from agent.core.candidates import Candidate
from agent.core.errors import Gate, Refusal
from agent.core.evidence import AwaitLock, Evidence, ListPods, Question
from agent.core.ledger import ContainerKey
from agent.core.match_settings import MatchSettings, UnlockedPods
from agent.core.pods import ContainerView, Phase, PodView, Role


def guess(
    count: int, admitted: tuple[Candidate, ...], evidence: Evidence, settings: MatchSettings
) -> Candidate | Question | None:
    """Whose share is given for `count` slices to whichever of `admitted` is asking.

    None: it is not to be guessed, or nothing is left to be given. What an earlier kubelet was
    answered is never guessed between: a container that runs would lose its directory to another.
    """
    if not _is_open(admitted, evidence, settings):
        return None
    if not evidence.waited:
        return AwaitLock()
    if not evidence.listed:
        return ListPods()
    left = [one for one in admitted if one.row is None and not one.deleted]
    if any(one.row is not None for one in admitted):
        left += _astray(count, evidence, settings)
    found = [one for one in left if is_bound(one.pod, settings) and any(one.pod.groups or ())]
    if found:
        return min(found, key=_turn)
    return admitted[0] if len(admitted) == 1 else None


def _is_open(admitted: tuple[Candidate, ...], evidence: Evidence, settings: MatchSettings) -> bool:
    """Whether there is something to guess: no lock names the pod, and nothing else does."""
    if settings.unlocked_pods is not UnlockedPods.LEGACY or evidence.blind or not admitted:
        return False
    if evidence.lock is not None and evidence.lock.owner is not None:
        return False
    if len(admitted) == 1:
        return not evidence.books.witnessed or _was_answered_here(admitted[0], evidence)
    return all(one.row is None or _was_answered_here(one, evidence) for one in admitted)


def _was_answered_here(one: Candidate, evidence: Evidence) -> bool:
    """Whether an answer for the container was written under this kubelet.

    It asks no more for a container that it was granted. So whoever asked was another one: the
    answer went astray. One case looks the same and is none: a call that overlapped another one was
    refused after its row was written, and this kubelet asks for the same container again. It may
    then be given a share that is left, as after a wrong guess.
    """
    return one.row is not None and one.row.epoch == evidence.books.epoch


def _astray(count: int, evidence: Evidence, settings: MatchSettings) -> Iterator[Candidate]:
    """Containers that got an answer under another pod's name: their own share is left."""
    answered = {row.key for row in evidence.ledger.rows}
    for pod in evidence.table.pods.values():
        waits = pod.annotations.get(BIND_PHASE) == PHASE_ALLOCATING
        if not waits or pod.uid in evidence.claimed:
            continue
        for container in pod.asking(settings.resource):
            is_new = ContainerKey(pod.uid, container.name) not in answered
            if (
                is_new
                and container.count == count
                and _is_booked(pod, container, evidence, settings)
            ):
                yield Candidate(pod, container)
                break


def _is_booked(
    pod: PodView, container: ContainerView, evidence: Evidence, settings: MatchSettings
) -> bool:
    """Whether the kubelet has booked slices for the container, as far as it was asked."""
    recorded = evidence.books.recorded or frozenset()
    holding = evidence.known.get(pod.key)
    named = holding is not None and bool(holding.ids_of(container.name, settings.resource))
    return named or ContainerKey(pod.uid, container.name) in recorded


def is_bound(pod: PodView, settings: MatchSettings) -> bool:
    """Whether HAMi's plugin would take the pod for one that its scheduler bound and that waits."""
    return (
        pod.phase is Phase.PENDING
        and not pod.static
        and BIND_TIME in pod.annotations
        and pod.annotations.get(BIND_PHASE) in {PHASE_ALLOCATING, PHASE_SUCCESS}
        and pod.annotations.get(VGPU_NODE) == settings.node
    )


def no_lock(pod: PodView, settings: MatchSettings) -> Refusal | None:
    """Why a pod without a node lock is not served; None: it is, by the operator's choice."""
    policy = settings.unlocked_pods
    if policy is UnlockedPods.UNIQUE:
        return None
    name = "/".join(pod.key)
    if policy is UnlockedPods.STRICT:
        return Refusal(
            Gate.NO_LOCK, f"Pod {name} holds no node lock of HAMi's scheduler{_why(pod)}"
        )
    if is_bound(pod, settings):
        return None
    return Refusal(
        Gate.NO_LOCK,
        f"Pod {name} holds no node lock of HAMi's scheduler, and its annotations do not say that "
        f"the scheduler bound it to this node ({VGPU_NODE}, {BIND_TIME}, {BIND_PHASE}); create it "
        "again with schedulerName of HAMi's scheduler.",
    )


def _turn(one: Candidate) -> tuple[float, str, str]:
    """Bound first, then HAMi's order of the list: namespace and name."""
    try:
        bound = float(int(one.pod.annotations[BIND_TIME]))
    except (ValueError, OverflowError):
        bound = math.inf
    return bound, one.pod.namespace, one.pod.name


def _why(pod: PodView) -> str:
    """What a pod without a lock is told: HAMi's scheduler takes none for init containers alone."""
    if any(one.role is not Role.INIT for one in pod.gpu_containers):
        return (
            ": it was bound by another scheduler, or the lock was taken away; create it again with "
            "schedulerName of HAMi's scheduler, or have the operator set allocation.unlockedPods."
        )
    return (
        " (it takes none when only an init container requests GPUs); request the GPU in an app "
        "container too, or have the operator set allocation.unlockedPods to unique or legacy."
    )
