"""When the kubelet asks for a pod: at its admission, or later for what has died of it.

It admits one pod after the other, asks for the containers of each in the order of the spec, and
goes no further in a pod that is refused. Later it asks, beside all its other work, for containers
that died and whose records it lost: also for those behind a refused one, and again and again.
"""

import datetime as dt

from agent.core.ages import has_passed
from agent.core.allocation.evidence import Books, Evidence
from agent.core.cluster.pods import ContainerView, PodView
from agent.core.state.holdings import KubeletEpoch

TAKING_UP = dt.timedelta(seconds=30)
"""Seconds after its start within which a kubelet has taken up its pods again."""

STAMP = dt.timedelta(seconds=1)
"""What a status tells of is up to so much younger than it says: its stamps are whole seconds."""


def is_taking_up(epoch: KubeletEpoch, now: dt.datetime) -> bool:
    """Whether the kubelet may still be admitting the pods that were here before it."""
    return not has_passed(TAKING_UP, epoch.since, now)


def is_at_admission(pod: PodView, evidence: Evidence) -> bool:
    """Whether the kubelet can ask for the pod at its admission alone.

    A status is late by some milliseconds. So of a pod that has run, only a kubelet that takes up
    its pods again is believed to be at its admission, and not where something lives or changed.
    """
    books = evidence.books
    if not pod.has_run:
        return True
    is_young = is_taking_up(books.epoch, evidence.now)
    return is_young and not any(
        is_alive(each, books) or _has_changed(each, books.epoch.since) for each in pod.containers
    )


def is_alive(container: ContainerView, books: Books) -> bool:
    """Whether it runs for certain: a status can be late, or from before a reboot."""
    return container.running_id is not None and container.running_id in books.alive


def _has_changed(container: ContainerView, since: dt.datetime) -> bool:
    """Whether the container started or ended since this kubelet is there, as far as is known."""
    if container.has_run and container.running_id is None and container.stopped_at is None:
        return True
    moments = (container.started_at, container.stopped_at)
    return any(at is not None and at + STAMP > since for at in moments)
