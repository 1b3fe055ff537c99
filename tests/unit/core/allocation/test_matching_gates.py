"""Each gate of the decision has scenes that close it, and says what is wrong and what to do."""

import dataclasses

import msgspec
import pytest

from agent.allocate.match import Evidence, MatchSettings
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
    SETTINGS,
    STRICT,
    a_scene,
    annotated,
    ask,
    changed,
    holding,
    knowing,
    named_pod,
    row_of,
    with_bad_gpu,
    without_witness,
)
from tests.unit.core.allocation.refusals import check_refusal

POD = named_pod(1)
OTHER = named_pod(2)
INIT_ONLY = named_pod(1, containers=(a_container(role=Role.INIT),))
DROPPED = a_pod(name="train-1", containers=(a_container(asks={"mem": 3 << 30}),))
CHECKED = MatchSettings(node=NODE, requests=RequestRules(known=True))
NAME = "team-a/train-1"
AGAIN = "it again"


@dataclasses.dataclass(frozen=True)
class RefusalCase:
    """A scene, the gate that it closes, and words that its sentence must have."""

    gate: RefusalReason
    scene: Evidence
    wrong: str
    todo: str
    pod: str = NAME
    count: int = 1
    settings: MatchSettings = SETTINGS


def admitting(pod: PodView, **options: object) -> Evidence:
    """The kubelet admits the pod, which owns the lock; nothing is left to wait for."""
    scene = knowing(a_scene(pod, lock=pod, **options), holding(pod))  # type: ignore[arg-type]
    return changed(scene, waited=True, node_read=True, listed=True, records_read=True)


def given(text: str, **changes: object) -> Evidence:
    """The same for a pod with that devices text."""
    return admitting(a_pod(name="train-1", annotations=annotated(text), **changes))  # type: ignore[arg-type]


def unlocked(scene: Evidence) -> Evidence:
    return changed(scene, lock=None)


def on_gpu(scene: Evidence, *, present: bool = True, **health: object) -> Evidence:
    """The scene with its first GPU in another health, or gone."""
    gpu = a_shared_gpu(gpu=a_gpu(index=0), health=a_health(**health), present=present)  # type: ignore[arg-type]
    return changed(scene, inventory=an_inventory(gpus=(gpu,)))


def replaying() -> Evidence:
    row = row_of(POD)
    return unlocked(admitting(POD, rows=(row,)))


def both_admitted() -> Evidence:
    scene = a_scene(POD, OTHER, lock=POD)
    return changed(knowing(scene, holding(POD), holding(OTHER)), listed=True, node_read=True)


ONE = f"{G1},NVIDIA,3000,30:"
TABLE = {
    "nobody is admitted": RefusalCase(
        RefusalReason.NO_POD_ADMITTED,
        changed(knowing(a_scene(POD, lock=POD), absent=(POD,)), listed=True),
        "no pod of this node",
        "A static pod gets no GPUs: make it a DaemonSet",
        pod="",
    ),
    "nobody asks for as many": RefusalCase(
        RefusalReason.NO_POD_ADMITTED,
        admitting(POD),
        "7 slice(s)",
        "Create the pod again",
        pod="",
        count=7,
    ),
    "two are admitted": RefusalCase(
        RefusalReason.MANY_PODS_ADMITTED,
        both_admitted(),
        "any of several pods",
        "If this pod is new, create it again",
    ),
    "it was deleted": RefusalCase(
        RefusalReason.POD_DELETED,
        changed(knowing(a_scene(gone=(POD,), lock=POD), holding(POD)), listed=True),
        "was deleted",
        "create it again",
    ),
    "the lock is another's": RefusalCase(
        RefusalReason.NO_RIGHT,
        changed(
            knowing(a_scene(POD, OTHER, lock=OTHER), holding(POD), absent=(OTHER,)),
            waited=True,
            node_read=True,
        ),
        "places team-a/train-2",
        "create it again with schedulerName",
    ),
    "there is no lock": RefusalCase(
        RefusalReason.NO_LOCK,
        unlocked(admitting(POD)),
        "holds no node lock",
        "allocation.unlockedPods",
    ),
    "its author chose the node, and the name of the lock's owner": RefusalCase(
        RefusalReason.NO_LOCK,
        admitting(named_pod(1, scheduled=False)),
        "was created with its node",
        "create it again without spec.nodeName",
    ),
    "the lock names nobody": RefusalCase(
        RefusalReason.NO_LOCK,
        changed(admitting(POD), lock=a_lock(name="")),
        "holds no node lock",
        "create it again with schedulerName",
    ),
    "it asks in an init container alone": RefusalCase(
        RefusalReason.NO_LOCK,
        unlocked(admitting(INIT_ONLY)),
        "holds no node lock",
        "in an app container too, or ask the operator to choose another allocation.unlockedPods",
        settings=STRICT,
    ),
    "it asks in an init container alone, and another scheduler bound it": RefusalCase(
        RefusalReason.NO_LOCK,
        unlocked(admitting(msgspec.structs.replace(INIT_ONLY, scheduler="default-scheduler"))),
        "another scheduler bound it",
        "create it again with schedulerName hami-scheduler",
    ),
    "its annotation gives it more than it asks for": RefusalCase(
        RefusalReason.NOT_AS_REQUESTED,
        given(f"{G1},NVIDIA,3000,0:;", containers=(a_container(asks={"mem": 2999, "cores": 30}),)),
        "requests 2999 MiB and 30 % of the compute, but annotation "
        "hami.io/vgpu-devices-allocated gives it 3000 MiB and 100 % of GPU-",
        "delete the pod, and its controller makes a new one",
        settings=CHECKED,
    ),
    "it is static": RefusalCase(
        RefusalReason.STATIC_POD,
        admitting(named_pod(1, static=True)),
        "is a static pod",
        "create it through the API server",
    ),
    "an old kubelet, and two may ask": RefusalCase(
        RefusalReason.WITNESS_SILENT,
        unlocked(
            changed(without_witness(a_scene(POD, OTHER)), listed=True, waited=True, node_read=True)
        ),
        "alone can be meant (team-a/train-1, team-a/train-2)",
        "upgrade the kubelet",
        pod="",
    ),
    "an old kubelet, and the lone pod's lock is gone": RefusalCase(
        RefusalReason.WITNESS_SILENT,
        changed(without_witness(replaying()), listed=True, waited=True, node_read=True),
        "only a pod that holds the node lock",
        "upgrade the kubelet",
    ),
    "the API server is away": RefusalCase(
        RefusalReason.PODS_UNKNOWN,
        changed(a_scene(), table=PodTable(), listed=True, list_failed=True),
        "could not ask the API server",
        "controller starts it again",
        pod="",
    ),
    "nothing was written": RefusalCase(
        RefusalReason.NO_ANNOTATION,
        admitting(a_pod(name="train-1", annotations={})),
        "annotation hami.io/vgpu-devices-allocated names no GPU",
        "schedulerName",
    ),
    "no GPU was written": RefusalCase(
        RefusalReason.NO_ANNOTATION,
        given(";"),
        "annotation hami.io/vgpu-devices-allocated names no GPU",
        "schedulerName",
    ),
    "the request was dropped": RefusalCase(
        RefusalReason.DROPPED_REQUEST,
        admitting(DROPPED),
        "cannot count the 3221225472 MiB",
        "without a unit",
    ),
    "the request was dropped, and the annotation is forged": RefusalCase(
        RefusalReason.DROPPED_REQUEST,
        given(f"{ONE};{ONE};", containers=(a_container(name="a"), *DROPPED.containers)),
        "container main of pod",
        "write nvidia.com/gpumem as a number",
    ),
    "the text cannot be read": RefusalCase(
        RefusalReason.MALFORMED_ANNOTATION,
        admitting(named_pod(1, groups=None, groups_error="group 0: memory 'x' is not a decimal")),
        "memory 'x' is not a decimal",
        "create the pod again",
    ),
    "it is for another node": RefusalCase(
        RefusalReason.WRONG_NODE,
        admitting(a_pod(name="train-1", annotations=annotated(node="node-9"))),
        "node-9",
        AGAIN,
    ),
    "it names no node": RefusalCase(
        RefusalReason.WRONG_NODE,
        admitting(named_pod(1, annotations={}, groups=((a_share(uuid=G1),),))),
        "of node none",
        AGAIN,
    ),
    "groups and containers differ": RefusalCase(
        RefusalReason.COUNT_MISMATCH, given(f"{ONE};{ONE};"), "for 2 containers, but 1", AGAIN
    ),
    "GPUs and request differ": RefusalCase(
        RefusalReason.COUNT_MISMATCH,
        given(f"{ONE};", containers=(a_container(count=2),)),
        "main requests 2 GPUs, but the scheduler wrote 1",
        AGAIN,
        count=2,
    ),
    "there is no group for the container": RefusalCase(
        RefusalReason.NO_CONTAINER_LEFT,
        given(f"{ONE};", containers=(a_container(name="warm-up", role=Role.INIT), a_container())),
        "no GPUs for container warm-up",
        AGAIN,
    ),
    "the GPU is not of this node": RefusalCase(
        RefusalReason.UNKNOWN_GPU, given("GPU-elsewhere,NVIDIA,1,1:;"), "GPU-elsewhere", AGAIN
    ),
    "the GPU is shared no longer": RefusalCase(
        RefusalReason.UNKNOWN_GPU, on_gpu(given(f"{ONE};"), present=False), f"GPU {G1}", AGAIN
    ),
    "no runtime finds the GPU": RefusalCase(
        RefusalReason.UNKNOWN_GPU,
        changed(
            given(f"{ONE};"),
            inventory=an_inventory(
                gpus=[a_shared_gpu(present=False, obstacle="no CDI specification defines it")]
            ),
        ),
        "(no CDI specification defines it)",
        AGAIN,
    ),
    "the GPU is bad": RefusalCase(
        RefusalReason.BAD_GPU, with_bad_gpu(given(f"{ONE};")), "is bad: XID 79", "on another GPU"
    ),
    "the GPU is lost": RefusalCase(
        RefusalReason.BAD_GPU,
        on_gpu(given(f"{ONE};"), present=False, condition=Condition.LOST, cause="H-LOST"),
        "is lost: H-LOST",
        "on another GPU",
    ),
    "the GPU of a replay is lost": RefusalCase(
        RefusalReason.BAD_GPU,
        on_gpu(replaying(), condition=Condition.LOST),
        "gone, lost or in MIG mode",
        "delete the pod",
    ),
    "the driver says nothing": RefusalCase(
        RefusalReason.DRIVER_UNRESPONSIVE,
        on_gpu(given(f"{ONE};"), condition=Condition.UNMONITORED, serving=False),
        "driver has not answered",
        "ask the operator",
    ),
    "memory is short": RefusalCase(
        RefusalReason.MEMORY_EXCEEDED,
        given(f"{G1},NVIDIA,90000,1:;"),
        "90000 MiB of memory promised, and it has 81559 MiB",
        "create it again",
    ),
    "compute is short": RefusalCase(
        RefusalReason.CORES_EXCEEDED,
        given(f"{G1},NVIDIA,1,101:;"),
        "101 % of compute promised, and it has 100 %",
        "create it again",
    ),
}
DECIDED = frozenset(row.gate for row in TABLE.values())


@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
def test_the_gate_closes_and_says_what_is_wrong_and_what_to_do(row: RefusalCase) -> None:
    with pytest.raises(Refusal) as caught:
        ask(row.scene, row.count, row.settings)

    check_refusal(caught.value, row.gate, wrong=row.wrong, todo=row.todo, pod=row.pod)


def test_foreign_words_in_a_sentence_stay_on_one_line_and_short() -> None:
    noise = "\n\t[HA-9999] desc = \x00" * 1000
    scenes = (
        admitting(a_pod(name="train-1", annotations=annotated(node=noise))),
        admitting(named_pod(1, groups=None, groups_error=noise)),
    )
    for scene in scenes:
        with pytest.raises(Refusal) as caught:
            ask(scene)
        assert len(caught.value.sentence) < 700
        assert "\n" not in caught.value.sentence
