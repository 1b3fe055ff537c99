"""Each gate of the decision has scenes that close it, and says what is wrong and what to do.

Pods without a lock: which of them come from HAMi's scheduler all the same, and get what.
"""

import itertools

import pytest
from msgspec.structs import replace

from agent.allocate.match import Evidence, MatchSettings, decide
from agent.allocate.room import RequestRules
from agent.cluster import PodTable, PodView, Role
from agent.errors import Refusal, RefusalReason
from agent.model import Condition
from tests.builders import (
    NODE,
    a_container,
    a_gpu,
    a_health,
    a_lock,
    a_pod,
    a_share,
    a_shared_gpu,
    an_inventory,
)
from tests.unit.core.allocation.matching_scene import (
    G1,
    G2,
    SETTINGS,
    STRICT,
    UNIQUE,
    a_scene,
    annotated,
    changed,
    granted,
    holding,
    knowing,
    named_pod,
    row_of,
    said,
    without_witness,
)
from tests.unit.core.allocation.refusals import check_refusal
from tests.unit.rows import rows_of

POD, OTHER = named_pod(1), named_pod(2)
INIT_ONLY = named_pod(1, containers=(a_container(role=Role.INIT),))
UNBOUND = replace(INIT_ONLY, scheduler="default-scheduler")
BIG = a_container(asks={"mem": 3 << 30})
CHECKED = MatchSettings(node=NODE, requests=RequestRules(known=True))


def now(scene: Evidence) -> Evidence:
    """Nothing is left to wait for."""
    return changed(scene, waited=True, node_read=True, listed=True, records_read=True)


def admitting(*pods: PodView, **options: object) -> Evidence:
    """The kubelet admits the pods, of which the first owns the lock."""
    return now(knowing(a_scene(*pods, lock=pods[0], **options), *map(holding, pods)))  # type: ignore[arg-type]


def given(text: str, **changes: object) -> Evidence:
    """The same for a pod with that devices text."""
    return admitting(a_pod(name="train-1", annotations=annotated(text), **changes))


def on_gpu(
    scene: Evidence, *, present: bool = True, obstacle: str = "", **health: object
) -> Evidence:
    """The scene with its first GPU in another health, or not shared."""
    gpu = a_shared_gpu(
        gpu=a_gpu(index=0),
        health=a_health(**health),  # type: ignore[arg-type]
        present=present,
        obstacle=obstacle,
    )
    return changed(scene, inventory=an_inventory(gpus=(gpu,)))


def malformed(words: str) -> Evidence:
    return admitting(named_pod(1, groups=None, groups_error=words))


ONE = f"{G1},NVIDIA,3000,30:"
TWICE = (a_container(name="a"), BIG)
WARM_UP = (a_container(name="warm-up", role=Role.INIT), a_container())
LESS = (a_container(asks={"mem": 2999, "cores": 30}),)
UNPLACED = named_pod(1, annotations={}, groups=((a_share(uuid=G1),),))
REPLAY = changed(admitting(POD, rows=(row_of(POD),)), lock=None)
MORE = changed(given(f"{G1},NVIDIA,3000,0:;", containers=LESS), settings=CHECKED)
FOREIGN = knowing(a_scene(POD, OTHER, lock=OTHER), holding(POD), absent=(OTHER,))
BLIND = changed(a_scene(), table=PodTable(), listed=True, list_failed=True)
DROPPED = a_pod(name="train-1", containers=(BIG,))
ELSEWHERE = a_pod(name="train-1", annotations=annotated(node="node-9"))
TWO_GPUS = changed(given(f"{ONE};", containers=(a_container(count=2),)), count=2)
HERE = given(f"{ONE};")
SCENES = {
    "nobody is admitted": now(knowing(a_scene(POD, lock=POD), absent=(POD,))),
    "nobody asks for as many": changed(admitting(POD), count=7),
    "two are admitted": admitting(POD, OTHER),
    "it was deleted": now(knowing(a_scene(gone=(POD,), lock=POD), holding(POD))),
    "the lock is another's": now(FOREIGN),
    "there is no lock": changed(admitting(POD), lock=None),
    "its author chose the node": admitting(named_pod(1, scheduled=False)),
    "the lock names nobody": changed(admitting(POD), lock=a_lock(name="")),
    "an init container alone asks": changed(admitting(INIT_ONLY), lock=None, settings=STRICT),
    "another scheduler bound it": changed(admitting(UNBOUND), lock=None),
    "its annotation gives it more than it asks for": MORE,
    "it is static": admitting(named_pod(1, static=True)),
    "an old kubelet, and two may ask": now(without_witness(a_scene(POD, OTHER))),
    "an old kubelet, and the lone pod's lock is gone": now(without_witness(REPLAY)),
    "an old kubelet, and an init container alone asks": now(without_witness(a_scene(INIT_ONLY))),
    "the API server is away": BLIND,
    "nothing was written": admitting(a_pod(name="train-1", annotations={})),
    "no GPU was written": given(";"),
    "the request was dropped": admitting(DROPPED),
    "the request was dropped, and the annotation is forged": given(f"{ONE};" * 2, containers=TWICE),
    "the text cannot be read": malformed("group 0: memory 'x' is not a decimal"),
    "it is for another node": admitting(ELSEWHERE),
    "it names no node": admitting(UNPLACED),
    "groups and containers differ": given(f"{ONE};" * 2),
    "GPUs and request differ": TWO_GPUS,
    "there is no group for the container": given(f"{ONE};", containers=WARM_UP),
    "the GPU is not of this node": given("GPU-elsewhere,NVIDIA,1,1:;"),
    "the GPU is shared no longer": on_gpu(HERE, present=False),
    "no runtime finds the GPU": on_gpu(HERE, present=False, obstacle="no CDI name"),
    "the GPU is bad": on_gpu(HERE, condition=Condition.BAD, text="XID 79"),
    "the GPU is lost": on_gpu(HERE, present=False, condition=Condition.LOST, cause="H-LOST"),
    "the GPU of a replay is lost": on_gpu(REPLAY, condition=Condition.LOST),
    "the driver says nothing": on_gpu(HERE, condition=Condition.UNMONITORED, serving=False),
    "memory is short": given(f"{G1},NVIDIA,90000,1:;"),
    "compute is short": given(f"{G1},NVIDIA,1,101:;"),
}
TABLE = dict(rows_of(__file__, "gates.txt"))
DECIDED = frozenset(RefusalReason[row.partition(" | ")[0].strip("-")] for row in TABLE.values())


@pytest.mark.parametrize("name", sorted({*SCENES, *TABLE}))
def test_the_gate_closes_and_says_what_is_wrong_and_what_to_do(name: str) -> None:
    gate, wrong, todo = TABLE[name].split(" | ")
    scene = SCENES[name]
    with pytest.raises(Refusal) as caught:
        decide(scene)
    pod = "" if gate.endswith("-") else "team-a/train-1"
    check_refusal(caught.value, RefusalReason[gate.strip("-")], wrong=wrong, todo=todo, pod=pod)


def test_foreign_words_in_a_sentence_stay_on_one_line_and_short() -> None:
    noise = "\n\t[HA-9999] desc = \x00" * 1000
    other = admitting(a_pod(name="train-1", annotations=annotated(node=noise)))
    for scene in (other, malformed(noise)):
        with pytest.raises(Refusal) as caught:
            decide(scene)
        assert len(caught.value.sentence) < 700
        assert "\n" not in caught.value.sentence


ASKS = {"mem": 3000, "cores": 30}
APP = a_container(name="app", count=0)
INIT = a_container(role=Role.INIT, asks=ASKS)
SIDECAR = a_container(role=Role.SIDECAR, asks=ASKS)


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


@pytest.mark.parametrize(
    ("settings", "question"), [(SETTINGS, "NODE"), (UNIQUE, "NODE"), (STRICT, "LOCK train-1")]
)
def test_the_node_is_read_as_hami_after_2_10_takes_a_lock_for_each(settings, question) -> None:
    scene, lock = settled(lockless(), node_read=False), a_lock(name="train-1")
    assert question == said(scene, settings=settings)
    assert lock.value == granted(changed(scene, lock=lock), settings=settings).lock


BIG_INIT = a_container(name="big", role=Role.INIT, asks={"mem": 3 << 30})
BIG_APP = a_container(name="app", asks={"mem": 3 << 30})
SECOND = a_container(name="second", role=Role.INIT, asks=ASKS)
TWO_ASKED = a_container(role=Role.INIT, count=2, asks=ASKS)
REFUSED = {
    # Its author named the node, the kubelet started it before, it is another scheduler's or none's.
    RefusalReason.NO_LOCK: [
        *(lockless(scheduled=False), lockless(started=True)),
        *(lockless(scheduler="mine"), lockless(scheduler="")),
    ],
    # HAMi drops its request, another container's, or that of its app, and so takes no lock.
    RefusalReason.DROPPED_REQUEST: [
        *(lockless(BIG_INIT), lockless(INIT, BIG_INIT, text=f"{ONE};{ONE};")),
        lockless(containers=(INIT, BIG_APP)),
    ],
    # Its annotation says something else, maybe of one of two GPUs.
    RefusalReason.NOT_AS_REQUESTED: [
        *(
            lockless(text=f"{G1},NVIDIA,{text}:;")
            for text in ("3001,30", "2999,30", "3000,31", "3000,29", "3000,0", "0,30")
        ),
        lockless(TWO_ASKED, text=f"{ONE}{G2},NVIDIA,4000,30:;"),
    ],
    RefusalReason.COUNT_MISMATCH: [lockless(INIT, SECOND)],
}


@pytest.mark.parametrize("gate", REFUSED, ids=lambda gate: gate.name)
def test_what_hamis_scheduler_did_not_do_is_refused(gate: RefusalReason) -> None:
    for pod, lock in itertools.product(REFUSED[gate], (None, a_lock(name="other"))):
        count = pod.gpu_containers[0].count
        assert gate.name == said(settled(pod, lock=lock, waited=True), count)


@pytest.mark.parametrize("asks", [{}, {"mem-percentage": 100}, {"cores": 0}])
@pytest.mark.parametrize("mib", [81559, 40000, 0])
def test_a_part_of_the_gpu_may_be_less_than_now_because_it_registered_less(asks, mib) -> None:
    pod = lockless(a_container(role=Role.INIT, asks=asks), text=f"{G1},NVIDIA,{mib},0:;")
    assert granted(settled(pod))


@pytest.mark.parametrize(("words", "outcome"), rows_of(__file__, "edited.txt"))
def test_an_annotation_that_was_edited_gives_no_more_than_was_asked_for(words, outcome) -> None:
    asked, _, text = words.partition(" | ")
    asks = {name: int(amount) for name, _, amount in (w.partition("=") for w in asked.split())}
    containers = (a_container(asks=asks),)
    pod = a_pod(annotations=annotated(f"{G1},NVIDIA,{text}:;"), containers=containers)
    scene = knowing(a_scene(pod, lock=pod), holding(pod))
    assert granted(scene)  # HAMi's device-config.yaml was not read
    assert outcome == said(scene, settings=CHECKED)
