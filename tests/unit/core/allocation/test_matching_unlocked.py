"""Pods without a lock: which of them come from HAMi's scheduler all the same, and get what."""

from collections.abc import Mapping

import msgspec
import pytest

from agent.allocate.match import Ask, Evidence, Question
from agent.allocate.room import RequestRules
from agent.cluster import PodView, Role
from agent.errors import RefusalReason
from tests.builders import a_container, a_lock, a_pod
from tests.unit.core.allocation.matching_scene import (
    G1,
    G2,
    SETTINGS,
    STRICT,
    UNIQUE,
    a_scene,
    annotated,
    ask,
    changed,
    granted,
    holding,
    knowing,
    refused_by,
)

ASKS = {"mem": 3000, "cores": 30}
APP = a_container(name="app", count=0)
ONE = f"{G1},NVIDIA,3000,30:"
INIT = a_container(role=Role.INIT, asks=ASKS)
SIDECAR = a_container(role=Role.SIDECAR, asks=ASKS)
CHECKED = msgspec.structs.replace(SETTINGS, requests=RequestRules(known=True))


def lockless(*inits: object, text: str = f"{ONE};", **changes: object) -> PodView:
    """The pod team-a/train-1 with these init containers, and an app that needs no GPU."""
    containers = (*(inits or (INIT,)), APP)
    fields = {"name": "train-1", "annotations": annotated(text), "containers": containers}
    return a_pod(**(fields | changes))  # type: ignore[arg-type]


def settled(pod: PodView, **changes: object) -> Evidence:
    """The kubelet admits the pod, which has no lock; the Node was read."""
    scene = changed(knowing(a_scene(pod), holding(pod)), node_read=True, records_read=True)
    return changed(changed(scene, recorded=frozenset()), **changes)


@pytest.mark.parametrize("inits", [(INIT,), (SIDECAR,), (a_container(name="x", count=0), INIT)])
@pytest.mark.parametrize("lock", [None, a_lock(name="other"), a_lock(name="")])
def test_a_pod_for_which_hami_takes_no_lock_is_served_whoever_holds_one(inits, lock) -> None:
    grant = granted(settled(lockless(*inits), lock=lock))

    assert ("main", "", 0) == (grant.candidate.container.name, grant.lock, grant.group)


def test_the_node_is_read_once_because_hami_after_2_10_takes_a_lock_for_each() -> None:
    pod = lockless()
    scene = settled(pod, node_read=False)
    lock = a_lock(name=pod.name)

    for settings in (SETTINGS, UNIQUE):
        assert ask(scene, settings=settings) == Question(Ask.NODE)  # it waits for no watch
    assert ask(scene, settings=STRICT) == Question(Ask.LOCK, (pod.key,))
    for settings in (SETTINGS, UNIQUE, STRICT):
        assert lock.value == granted(changed(scene, lock=lock), settings=settings).lock


DROPPED = a_container(name="big", role=Role.INIT, asks={"mem": 3 << 30})
REFUSED = {
    "its author named the node": (lockless(scheduled=False), RefusalReason.NO_LOCK),
    "the kubelet started it before": (lockless(started=True), RefusalReason.NO_LOCK),
    "it is for another scheduler": (lockless(scheduler="mine"), RefusalReason.NO_LOCK),
    "it names none": (lockless(scheduler=""), RefusalReason.NO_LOCK),
    "hami drops its request": (
        lockless(a_container(role=Role.INIT, asks={"mem": 3 << 30})),
        RefusalReason.DROPPED_REQUEST,
    ),
    "hami drops the request of another container": (
        lockless(INIT, DROPPED, text=f"{ONE};{ONE};"),
        RefusalReason.DROPPED_REQUEST,
    ),
    "hami drops the request of its app container, and so takes no lock": (
        lockless(containers=(INIT, a_container(name="app", asks={"mem": 3 << 30}))),
        RefusalReason.DROPPED_REQUEST,
    ),
    **{
        f"its annotation says {text}": (
            lockless(text=f"{G1},NVIDIA,{text}:;"),
            RefusalReason.NOT_AS_REQUESTED,
        )
        for text in ("3001,30", "2999,30", "3000,31", "3000,29", "3000,0", "0,30")
    },
    "one of its two GPUs has more": (
        lockless(
            a_container(role=Role.INIT, count=2, asks=ASKS), text=f"{ONE}{G2},NVIDIA,4000,30:;"
        ),
        RefusalReason.NOT_AS_REQUESTED,
    ),
    "there is an annotation for one of two": (
        lockless(INIT, a_container(name="second", role=Role.INIT, asks=ASKS)),
        RefusalReason.COUNT_MISMATCH,
    ),
}


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_what_hamis_scheduler_did_not_do_is_refused(row: tuple[PodView, RefusalReason]) -> None:
    pod, gate = row
    count = pod.gpu_containers[0].count

    for lock in (None, a_lock(name="other")):
        refused_by(settled(pod, lock=lock, waited=True), gate, count)


@pytest.mark.parametrize("asks", [{}, {"mem-percentage": 100}, {"cores": 0}])
@pytest.mark.parametrize("mib", [81559, 40000, 0])
def test_a_part_of_the_gpu_may_be_less_than_now_because_it_registered_less(asks, mib) -> None:
    pod = lockless(a_container(role=Role.INIT, asks=asks), text=f"{G1},NVIDIA,{mib},0:;")

    assert granted(settled(pod))


EDITED: Mapping[str, tuple[dict[str, int], str, bool]] = {
    "as asked": ({"mem": 3000, "cores": 30}, "3000,30", True),
    "less": ({"mem": 3000, "cores": 30}, "1,1", True),
    "more memory": ({"mem": 3000, "cores": 30}, "3001,30", False),
    "0 MiB, which is the whole GPU": ({"mem": 3000, "cores": 30}, "0,30", False),
    "more compute": ({"mem": 3000, "cores": 30}, "3000,31", False),
    "0 %, which is no limit": ({"mem": 3000, "cores": 30}, "3000,0", False),
    "a limit that it does not ask for": ({"mem": 3000, "cores": 0}, "3000,50", True),
    "clamped compute": ({"mem": 3000, "cores": 150}, "3000,100", True),
    "the whole GPU, unnamed": ({"cores": 100}, "81559,100", True),
    "the whole GPU, unnamed, in 0 MiB": ({"cores": 100}, "0,100", True),
    "a third, rounded down": ({"mem-percentage": 33, "cores": 1}, "26914,1", True),
    "a third and 1 MiB": ({"mem-percentage": 33, "cores": 1}, "26915,1", False),
    "memory wins over a percentage": ({"mem": 10, "mem-percentage": 50, "cores": 1}, "11,1", False),
    "an amount of 0 names none": ({"mem": 0, "cores": 1}, "81559,1", True),
}


@pytest.mark.parametrize("row", EDITED.values(), ids=EDITED)
def test_an_annotation_that_was_edited_gives_no_more_than_was_asked_for(row) -> None:
    asks, text, is_served = row
    pod = a_pod(
        name="train-1",
        annotations=annotated(f"{G1},NVIDIA,{text}:;"),
        containers=(a_container(asks=asks),),
    )
    scene = knowing(a_scene(pod, lock=pod), holding(pod))

    assert granted(scene)  # HAMi's device-config.yaml was not read
    if is_served:
        assert granted(scene, settings=CHECKED)
    else:
        refused_by(scene, RefusalReason.NOT_AS_REQUESTED, settings=CHECKED)
