"""Which pod an Allocate is for: the kubelet is the witness, the lock is the right.

Who may be asking, which container of it is next, and what that gets.
"""

import datetime as dt

import pytest
from msgspec.structs import replace

from agent.allocate.match import UNREAD, Evidence, KubeletStart, rejected_pod
from agent.cluster import Phase, PodTable, PodView, Role
from agent.ledger import ContainerKey, Holding, KubeletEpoch, Ledger, Row
from agent.model import Condition
from tests.builders import (
    NOON,
    a_container,
    a_gpu,
    a_health,
    a_lock,
    a_pod,
    a_row,
    a_share,
    a_shared_gpu,
    an_inventory,
)
from tests.unit.core.allocation.matching_scene import (
    G1,
    G2,
    NOW_KUBELET,
    OLD_KUBELET,
    RAN,
    a_scene,
    annotated,
    changed,
    dead_pod,
    holding,
    knowing,
    named_pod,
    row_of,
    said,
    without_witness,
)

SECOND = dt.timedelta(seconds=1)
POD, OTHER, NAMESAKE = named_pod(1), named_pod(3), named_pod(1, uid=named_pod(9).uid)
STRAY = named_pod(2, annotations={})


def read(scene: Evidence, **changes: object) -> Evidence:
    """The scene after the kubelet's file was read, the pods listed, and other calls waited for."""
    return changed(scene, **{"records_read": True, "listed": True, "alone": True} | changes)


def since(moment: dt.datetime) -> KubeletStart:
    return KubeletStart(NOW_KUBELET, asks_since=moment)


# A pod that was started without being asked for.
STARTED = dead_pod(3, annotations={})
UNASKED = a_scene(STARTED, POD, lock=POD)
NEWER = named_pod(4, created=POD.created + SECOND)
BESIDE = a_scene(STARTED, POD, NEWER, lock=NEWER)
BOTH = knowing(UNASKED, holding(POD), holding(STARTED))
ALL = knowing(BESIDE, *map(holding, (STARTED, POD, NEWER)))
LATE = since(POD.created + SECOND)
UNLOCKED = changed(BOTH, listed=True, lock=None)

# A dead pod beside one that was deleted and may run.
DEAD = named_pod(10, phase=Phase.RUNNING, containers=(RAN,))
GONE = named_pod(1, uid=named_pod(5).uid, containers=(a_container(running_id="r"),))
FOURTH = named_pod(4)


def graves(*pods: PodView, answered: tuple[PodView, ...] = (DEAD, GONE)) -> Evidence:
    rows = tuple(a_row(pod_uid=one.uid, pod=one.name, epoch=OLD_KUBELET) for one in answered)
    scene = read(a_scene(*pods, DEAD, rows=rows, lock=pods[-1], gone=(GONE,)))
    return knowing(scene, *map(holding, (*pods, DEAD)))


def stray(scene: Evidence) -> Evidence:
    return knowing(scene, holding(STRAY), absent=(POD,))


# Dead containers that nothing tells apart.


def dead_beside(dead: int) -> Evidence:
    others = [dead_pod(10 + n) for n in range(dead)]
    rows = tuple(row_of(one, shares=(a_share(uuid=G2),)) for one in others)
    scene = changed(a_scene(POD, *others, rows=rows, lock=POD), records_read=True, listed=True)
    return knowing(scene, holding(POD), *map(holding, others))


def came_between(dead: int) -> Evidence:
    """The kubelet knew the new pod only after this call began."""
    return changed(dead_beside(dead), known_before={POD.key: False})


MANY_DEAD = changed(dead_beside(2), alone=True)
TENTH = named_pod(10).key

# The lock that just went.
HELD = knowing(a_scene(POD, STRAY, lock=POD), holding(POD), absent=(STRAY,))
LOCK = a_lock(name=POD.name)
WENT = changed(HELD, lock=None, former_locks=(LOCK,))
TAKEN = changed(HELD, lock=a_lock(name="next"), former_locks=(a_lock(name="other"), LOCK))
SPENT = a_row(pod_uid=NAMESAKE.uid, pod=POD.name, lock=LOCK.value)

# A name that another pod may have had.
RETURNING = named_pod(1, reusable_name=True)
LISTED = changed(knowing(a_scene(RETURNING, lock=RETURNING), holding(RETURNING)), listed=True)
RENAMED = changed(LISTED, pod_uids={RETURNING.key: NAMESAKE.uid})
PAIR = a_pod(
    name="train-1",
    containers=(a_container(name="a"), a_container(name="b")),
    annotations=annotated(f"{G1},NVIDIA,1000,10:;{G1},NVIDIA,2000,10:;"),
    reusable_name=True,
)
FIRST = a_row(pod_uid=PAIR.uid, pod=PAIR.name, container="a", epoch=NOW_KUBELET)
HALF = changed(
    knowing(a_scene(PAIR, rows=(FIRST,), lock=PAIR), holding(PAIR, a=f"{G1}-0")), records_read=True
)
EARLIER = changed(HALF, ledger=Ledger((replace(FIRST, epoch=OLD_KUBELET),)))
OF_B = replace(FIRST, key=ContainerKey(PAIR.uid, "b"))
TWICE = changed(HALF, ledger=Ledger((FIRST, OF_B)), recorded=frozenset({FIRST.key}))
UNBOOKED = changed(knowing(HALF, holding(PAIR)), recorded=frozenset({FIRST.key}))

# An old kubelet.
WITHOUT_GET, ENDED_BEFORE_DELETION = (
    changed(without_witness(a_scene(POD, gone=(one,), lock=POD)), listed=True)
    for one in (OTHER, named_pod(3, phase=Phase.FAILED))
)

# Several containers.
MIXED = named_pod(
    1,
    containers=(a_container(name="two", count=2), a_container(name="one")),
    groups=((a_share(uuid=G1, memory_mib=1),) * 2, (a_share(uuid=G1, memory_mib=2),)),
)
BEGUN = changed(knowing(a_scene(MIXED, lock=MIXED), holding(MIXED)), node_read=True)
TWO_HELD = knowing(BEGUN, holding(MIXED, two=f"{G1}-0"))
LATER = named_pod(1, containers=(a_container(name="first"), a_container()))
LATER_ROW = row_of(LATER, key=ContainerKey(LATER.uid, "first"))
BOOKED = holding(LATER, main=f"{G1}-0")

# A successor that runs, and its deleted namesake.
LONG_GRAVE = replace(NAMESAKE, containers=(a_container(), a_container(name="b")))


def past(epoch: KubeletEpoch) -> Evidence:
    """The successor was answered by that kubelet, which asks once more."""
    row = row_of(POD, epoch=epoch, confirmed=True)
    return knowing(read(a_scene(POD, rows=(row,), gone=(LONG_GRAVE,))), holding(LONG_GRAVE))


def succeeded(container: object) -> Evidence:
    successor = named_pod(1, containers=(container,))
    return changed(a_scene(successor, gone=(NAMESAKE,)), records_read=True, node_read=True)


# Room.
HOLDER = named_pod(2, phase=Phase.RUNNING)
LARGE = row_of(
    HOLDER, shares=(a_share(uuid=G1, memory_mib=80000),), epoch=NOW_KUBELET, confirmed=True
)
FULL = knowing(a_scene(POD, HOLDER, rows=(LARGE,), lock=POD), holding(POD))
STILL_FULL = knowing(FULL, holding(HOLDER, main=f"{G1}-0"))

# A kubelet that takes up many pods at once.
YOUNG = KubeletEpoch(inode=7, ctime_ns=int(NOON.timestamp()) * 10**9)


def many(number: int, **changes: object) -> tuple[PodView, ...]:
    """So many pods that a kubelet with an empty checkpoint takes up again after a reboot."""
    return tuple(named_pod(n, created=NOON + n * SECOND, **changes) for n in range(1, number + 1))


OWNER, BEFORE = named_pod(50), named_pod(51, name="train-50")
STRAYS = many(30, annotations={})
WAITING = changed(a_scene(OWNER, *STRAYS, lock=OWNER, gone=(BEFORE,)), records_read=True)
UNTOLD, ANSWERED = named_pod(60, containers=(RAN,)), named_pod(61)
TAKING_UP = a_scene(OWNER, *STRAYS, UNTOLD, ANSWERED, rows=(row_of(ANSWERED),), lock=OWNER)
TAKING_UP = changed(knowing(TAKING_UP, holding(OWNER)), records_read=True)
AGAIN = many(30)
AGAIN_ROWS = tuple(map(row_of, AGAIN))
REBOOTED = changed(a_scene(*AGAIN, rows=AGAIN_ROWS), kubelet=KubeletStart(YOUNG, begun=frozenset()))
RECORDED = changed(
    REBOOTED, recorded=frozenset(row.key for row in AGAIN_ROWS[:12]), records_read=True
)
LAST = named_pod(61, created=NOON.replace(hour=13))
FORGED = changed(a_scene(*many(60, static=True), LAST), records_read=True)
ENDED_AFTER, ENDED_BEFORE = (
    named_pod(number, containers=(replace(RAN, ended_at=at),))
    for number, at in ((1, NOON + SECOND), (2, NOON))
)
ENDED = changed(
    a_scene(ENDED_AFTER, ENDED_BEFORE),
    kubelet=KubeletStart(YOUNG),
    records_read=True,
    node_read=True,
)

CLAIMS: dict[str, list[tuple[Evidence, str]]] = {
    "a pod that was started unasked is asked about beside the owner": [
        (knowing(UNASKED, holding(POD)), "KUBELET train-3"),
        (BOTH, "PODS"),
        (read(BOTH), "train-1 main"),
        (UNLOCKED, "LOCK train-1"),
        (changed(UNLOCKED, waited=True), "NODE"),
        (changed(UNLOCKED, waited=True, node_read=True), "MANY_PODS_ADMITTED"),
    ],
    "a new pod that may have been admitted without asking is not the one": [
        (read(BOTH, kubelet=since(POD.created)), "train-1 main"),
        (read(BOTH, kubelet=LATE), "MANY_PODS_ADMITTED"),
        (read(ALL, kubelet=LATE), "train-4 main"),
    ],
    # A dead one without a row was started unasked, or its answer was cut off.
    "beside dead containers a pod is not told from a deleted one of its name that runs": [
        scene
        for answered in ((DEAD, GONE), (GONE,))
        for scene in (
            (graves(POD, answered=answered), "RUNNING r"),
            (changed(graves(POD, answered=answered), checked={"r"}), "train-1 main"),
            (changed(graves(POD, answered=answered), alive={"r"}), "MANY_PODS_ADMITTED"),
            # It makes no other new pod the only one that can be meant.
            (changed(graves(POD, FOURTH, answered=answered), alive={"r"}), "MANY_PODS_ADMITTED"),
        )
    ],
    "a stray pod is refused and not given the owner's share": [
        (stray(a_scene(STRAY, POD, lock=POD)), "LOCK train-2"),
        (changed(stray(a_scene(STRAY, POD, lock=POD)), waited=True), "NODE"),
    ],
    "dead containers that nothing tells apart do not cost a new pod its start": [
        *((dead_beside(dead), "OTHERS") for dead in (1, 2, 9)),
        *((changed(dead_beside(dead), alone=True), "train-1 main") for dead in (1, 2, 9)),
        (changed(dead_beside(2), known_before={POD.key: True}), "train-1 main"),
        # The other call may be the new pod's.
        (changed(MANY_DEAD, beside=(frozenset(), None)), "MANY_PODS_ADMITTED"),
        (changed(MANY_DEAD, beside=(frozenset({POD.key, TENTH}),)), "MANY_PODS_ADMITTED"),
        (changed(MANY_DEAD, beside=(frozenset({TENTH}),)), "train-1 main"),
        # The new pod came between the two calls.
        (came_between(1), "train-10 main again"),
        *((came_between(dead), "MANY_PODS_ADMITTED") for dead in (2, 9)),
    ],
    "an old kubelet asks for a deleted pod for ten seconds or until a refusal": [
        (WITHOUT_GET, "WITNESS_SILENT"),
        (ENDED_BEFORE_DELETION, "train-1 main"),
        (changed(WITHOUT_GET, claimed=frozenset({OTHER.uid})), "train-1 main"),
        (changed(WITHOUT_GET, now=WITHOUT_GET.now + 11 * SECOND), "train-1 main"),
        (changed(WITHOUT_GET, now=WITHOUT_GET.now - SECOND), "train-1 main"),  # a clock set back
    ],
    "a lock that just went proves the right until another pod was answered under it": [
        *((one, "train-1 main") for one in (WENT, TAKEN)),
        (changed(WENT, ledger=Ledger((SPENT,))), "LOCK train-1"),
        (changed(WENT, used_locks={LOCK.value: NAMESAKE.uid}), "LOCK train-1"),  # its row is closed
        (stray(changed(WENT, known={})), "LOCK train-2"),
    ],
    "where the name may be another pod's and the pods cannot be listed nobody is served": [
        (RENAMED, "train-1 main"),  # a LIST is newer than the GET
        (changed(RENAMED, list_failed=True), "PODS_UNKNOWN"),
        (changed(LISTED, pod_uids={RETURNING.key: UNREAD}, list_failed=True), "PODS_UNKNOWN"),
    ],
    "behind the first answer of its admission a pod is not looked at again": [
        (HALF, "train-1 b"),
        (EARLIER, "PODS"),
        (UNBOOKED, "POD train-1"),  # the kubelet has no ids for what was answered
        (TWICE, "POD train-1"),  # it was itself answered before
    ],
    "a kubelet that asked for the successor is past the deleted one": [
        (past(NOW_KUBELET), "NO_POD_ADMITTED"),
        (past(OLD_KUBELET), "POD_DELETED"),
    ],
    # The kubelet admits pods in their order. PodResources would answer for the successor.
    "a deleted pod whose successor has run asks for nothing": [
        (succeeded(replace(a_container(count=0), has_run=True)), "PODS"),
        (succeeded(a_container(count=0)), "KUBELET train-1"),
    ],
    "before a refusal for room the kubelet is asked for the pod in the way": [
        (FULL, "KUBELET train-2"),
        (knowing(FULL, absent=(HOLDER,)), "train-1 main"),
        (STILL_FULL, "PODS"),
        (changed(STILL_FULL, listed=True), "MEMORY_EXCEEDED"),
    ],
    # A pod that never ran is asked for at its admission alone, and that is one at a time.
    "beside many pods that wait only those that started are asked about": [
        (WAITING, "KUBELET train-50"),
        (knowing(WAITING, holding(OWNER)), "train-50 main"),
        (TAKING_UP, "KUBELET train-60"),
        (knowing(TAKING_UP, absent=(UNTOLD,)), "KUBELET train-61"),
        (knowing(TAKING_UP, absent=(UNTOLD, ANSWERED)), "train-50 main"),
    ],
    "of many pods taken up again the first that the kubelet knows is the one": [
        (REBOOTED, "RECORDS"),
        (knowing(RECORDED, holding(AGAIN[14]), absent=AGAIN[12:14]), "train-15 main again"),
    ],
    # Anybody can make pods that pass for static ones; those stay while something holds them.
    "pods that nobody admits keep no one waiting for the questions about them": [
        (FORGED, "KUBELET train-61"),
        (changed(knowing(FORGED, holding(LAST)), waited=True, node_read=True), "NO_LOCK"),
    ],
    "a container that ended for good is asked for by later kubelets alone": [
        (ENDED, "KUBELET train-2")
    ],
    "an answer with ids for a later container is not about a pod that begins": [
        (changed(knowing(a_scene(LATER), BOOKED), listed=True), "NO_POD_ADMITTED"),
        (
            changed(knowing(a_scene(LATER, rows=(LATER_ROW,)), BOOKED), listed=True),
            "train-1 first again",
        ),
    ],
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_who_is_asking_and_what_is_asked_next(claim: str) -> None:
    for scene, expected in CLAIMS[claim]:
        assert expected == said(scene)


def test_once_the_kubelet_was_asked_only_the_first_without_ids_is_next() -> None:
    for scene, count, expected in (
        (BEGUN, 1, "PODS"),
        (BEGUN, 2, "train-1 two"),
        (TWO_HELD, 1, "train-1 one"),
        (TWO_HELD, 2, "PODS"),
    ):
        assert expected == said(scene, count)


# A request that was refused: which pod has used up its turn.

YOUNGER, PRESENT = (named_pod(1, uid=named_pod(n).uid, groups=((),)) for n in (8, 9))
TWO_GONE = knowing(a_scene(PRESENT, gone=(POD, YOUNGER), lock=PRESENT), holding(POD))
MAYBE = knowing(a_scene(POD, gone=(YOUNGER,), rows=(row_of(YOUNGER),), lock=POD), holding(POD))
ELSEWHERE = a_scene(OTHER, gone=(POD,), lock=OTHER)
OF_LATER = a_scene(
    LATER, gone=(YOUNGER,), rows=(replace(LATER_ROW, epoch=NOW_KUBELET),), lock=LATER
)
FIRST_HELD = knowing(OF_LATER, holding(LATER, first=f"{G1}-0"))
OF_ANOTHER = a_scene(POD, gone=(OTHER,), rows=(row_of(OTHER),), lock=POD)


@pytest.mark.parametrize(
    ("scene", "rejected"),
    [
        # The oldest deleted pod of its name.
        (TWO_GONE, POD),
        (changed(TWO_GONE, claimed=frozenset({POD.uid})), YOUNGER),
        (changed(TWO_GONE, claimed=frozenset({POD.uid, YOUNGER.uid})), PRESENT),
        # No successor, where a deleted pod may have sent it.
        (MAYBE, None),
        (changed(MAYBE, now=MAYBE.now + 61 * SECOND), POD),
        (FIRST_HELD, None),
        (changed(FIRST_HELD, claimed=frozenset({YOUNGER.uid})), LATER),
        (knowing(OF_ANOTHER, holding(POD)), POD),
        # Nobody, where it may have been another's, or there was no answer for one.
        (knowing(ELSEWHERE, holding(POD), holding(OTHER)), None),
        (knowing(ELSEWHERE, absent=(POD, OTHER)), None),
        (knowing(ELSEWHERE, holding(OTHER)), None),
        # Under an old kubelet, once.
        (WITHOUT_GET, OTHER),
        (changed(WITHOUT_GET, claimed=frozenset({OTHER.uid})), None),
    ],
)
def test_which_pod_a_refused_request_uses_up(scene: Evidence, rejected: PodView | None) -> None:
    assert (rejected and rejected.uid) == rejected_pod(scene)


def test_nobody_is_called_static_or_deleted_when_the_list_failed() -> None:
    blind = changed(a_scene(), listed=True, list_failed=True, records_read=True)
    for table in (PodTable(), PodTable(synced=True), PodTable(synced=True, stale=True)):
        assert "PODS_UNKNOWN" == said(changed(blind, table=table))
    assert "PODS_UNKNOWN" == said(without_witness(changed(blind, table=PodTable())))
    assert "NO_POD_ADMITTED" == said(changed(a_scene(), listed=True, records_read=True))


@pytest.mark.parametrize(
    ("epoch", "recorded", "waits"),
    [
        (None, None, True),
        (None, False, True),
        (None, True, False),
        (NOW_KUBELET, None, False),
        (OLD_KUBELET, None, True),
        (OLD_KUBELET, True, False),
        (NOW_KUBELET, False, True),
    ],
)
@pytest.mark.parametrize("witnessed", [True, False])
def test_an_init_container_goes_by_the_kubelets_file_and_so_do_all_without_get(
    witnessed, epoch, recorded, waits
) -> None:
    role = Role.INIT if witnessed else Role.APP
    pod = named_pod(1, containers=(a_container(name="first", role=role),))
    key = ContainerKey(pod.uid, "first")
    rows: tuple[Row, ...] = () if epoch is None else (row_of(pod, key=key, epoch=epoch),)
    known = None if recorded is None else frozenset({key} if recorded else ())
    scene = changed(a_scene(pod, rows=rows, lock=pod), records_read=True, listed=True)
    scene = knowing(changed(scene, recorded=known, witnessed=witnessed), holding(pod))

    again = " again" * (epoch is not None)
    assert said(scene) == (f"train-1 first{again}" if waits else "NO_POD_ADMITTED")


WHOLE = a_gpu(index=0)
IN_MIG_MODE = a_gpu(index=0, mig_enabled=True)


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        (a_shared_gpu(gpu=WHOLE, health=a_health(condition=Condition.BAD)), "train-1 main again"),
        (a_shared_gpu(gpu=WHOLE, present=False), "train-1 main again"),
        (a_shared_gpu(gpu=WHOLE, health=a_health(condition=Condition.LOST)), "BAD_GPU"),
        (a_shared_gpu(gpu=WHOLE, present=False, there=False), "BAD_GPU"),
        (a_shared_gpu(gpu=IN_MIG_MODE, present=False), "BAD_GPU"),
    ],
    ids=["bad", "filtered out since", "lost", "vanished", "in MIG mode"],
)
def test_a_replay_passes_every_gate_but_a_gpu_that_is_gone(gpu, expected) -> None:
    pod = named_pod(1, phase=Phase.RUNNING, groups=None)
    scene = knowing(a_scene(pod, rows=(row_of(pod),)), holding(pod))
    scene = changed(scene, inventory=an_inventory(gpus=(gpu,)))
    assert expected == said(changed(scene, listed=True))
    assert "PODS" == said(scene)  # another pod may be asking
    assert "PODS_UNKNOWN" == said(changed(scene, list_failed=True))
    new = knowing(a_scene(POD, rows=(row_of(POD, epoch=NOW_KUBELET),)), holding(POD))
    new = changed(new, inventory=an_inventory(gpus=(gpu,)))
    assert ("PODS" if expected == "BAD_GPU" else expected) == said(new)


# What the kubelet's word is worth: it answers by name.

PROXIED = replace(NAMESAKE, containers=(a_container(name="proxy", count=0), a_container()))


@pytest.mark.parametrize(
    ("pod", "answer"),
    [(PROXIED, holding(POD)), (PROXIED, Holding("team-a", "train-1")), (POD, holding(PROXIED))],
    ids=["one less", "none", "one more"],
)
def test_a_stray_is_not_served_for_the_deleted_namesake_that_the_kubelet_knows(pod, answer) -> None:
    scene = knowing(a_scene(pod, lock=pod), answer)
    assert ["PODS", "NO_POD_ADMITTED"] == [said(scene), said(changed(scene, listed=True))]


SINCE = YOUNG.since
RAN_BEFORE = {"has_run": True, "started_at": SINCE - dt.timedelta(hours=1)}
SINCE_OVER = {"has_run": True, "started_at": SINCE}
STILL_SAID = RAN_BEFORE | {"running_id": "gone"}
IDLE = KubeletStart(YOUNG, begun=frozenset())
"""Nothing of the pod ran when the kubelet started."""
BUSY = KubeletStart(YOUNG, begun=frozenset({POD.uid}))
"""Something of it did."""


@pytest.mark.parametrize(
    ("first", "second", "start", "asked"),
    [
        pytest.param({}, {}, IDLE, "a", id="never started: in order"),
        pytest.param({}, {}, BUSY, "", id="they may have been started"),
        pytest.param({}, {}, KubeletStart(YOUNG), "", id="the agent came late"),
        pytest.param(RAN_BEFORE, RAN_BEFORE, IDLE, "a", id="both dead: in order"),
        pytest.param(STILL_SAID, RAN_BEFORE, IDLE, "a", id="the status is out of date"),
        pytest.param(STILL_SAID, STILL_SAID, IDLE, "a", id="after a reboot, out of date both"),
        pytest.param(RAN_BEFORE, RAN_BEFORE, BUSY, "", id="one may have been started untold"),
        pytest.param(STILL_SAID, RAN_BEFORE, BUSY, "", id="neither is said to run"),
        pytest.param(SINCE_OVER, RAN_BEFORE, IDLE, "", id="it started and ended since"),
        pytest.param(RAN_BEFORE, SINCE_OVER, IDLE, "a", id="before one that started since"),
        pytest.param(SINCE_OVER, SINCE_OVER, IDLE, "", id="both started since"),
    ],
)
@pytest.mark.parametrize("role", [Role.SIDECAR, Role.APP])
def test_of_two_dead_containers_the_kubelet_asks_for_one_or_it_is_not_known(
    role: Role, first: dict, second: dict, start: KubeletStart, asked: str
) -> None:
    containers = (
        replace(a_container(name="a", role=role), **first),
        replace(a_container(name="b"), **second),
    )
    pod = named_pod(1, containers=containers)
    rows = tuple(
        row_of(pod, key=ContainerKey(pod.uid, one.name), role=one.role) for one in containers
    )
    scene = knowing(a_scene(pod, rows=rows), holding(pod))
    scene = changed(scene, kubelet=start, recorded=frozenset(), records_read=True, listed=True)

    expected = f"train-1 {asked} again" if asked else "MANY_PODS_ADMITTED"
    assert expected == said(changed(scene, checked={"gone"}))
