"""Decides whether an Allocate can belong to the admission of a pod, or only to a later restart.

The kubelet admits one pod after the other. It sends Allocate for the containers in the order of the
spec, and stops at the first refusal. Later, in parallel to its other work, it sends Allocate for
dead containers whose records it lost, in any order and repeatedly.
"""

import datetime as dt

from agent.core.ages import has_passed
from agent.core.allocation.evidence import Books, Evidence
from agent.core.cluster.pods import ContainerView, PodView
from agent.core.state.holdings import KubeletEpoch

TAKING_UP = dt.timedelta(seconds=30)
"""How long after its start a kubelet may still be admitting the pods that were there before."""

STAMP = dt.timedelta(seconds=1)
"""The resolution of times in a pod's status: an event may be this much later than its time."""


def is_taking_up(epoch: KubeletEpoch, now: dt.datetime) -> bool:
    """Whether the kubelet may still be admitting the pods that were there before it started."""
    return not has_passed(TAKING_UP, epoch.since, now)


def is_at_admission(pod: PodView, evidence: Evidence) -> bool:
    """Whether an Allocate for this pod can only come from its admission.

    A status is some milliseconds late. So for a pod that has run, this holds only if the kubelet
    has just started, no container is alive, and none started or ended since.
    """
    books = evidence.books
    if not pod.has_run:
        return True
    is_young = is_taking_up(books.epoch, evidence.now)
    return is_young and not any(
        is_alive(each, books) or _has_changed(each, books.epoch.since) for each in pod.containers
    )


def is_alive(container: ContainerView, books: Books) -> bool:
    """Whether the container has a live cgroup. Its status can be late or from before a reboot."""
    return container.running_id is not None and container.running_id in books.alive


def _has_changed(container: ContainerView, since: dt.datetime) -> bool:
    """Whether the container started or ended since this kubelet started, as far as is known."""
    if container.has_run and container.running_id is None and container.stopped_at is None:
        return True
    moments = (container.started_at, container.stopped_at)
    return any(at is not None and at + STAMP > since for at in moments)
