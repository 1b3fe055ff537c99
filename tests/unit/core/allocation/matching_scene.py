"""Scenes for tests of matching: evidence with short names for what differs."""

from msgspec.structs import replace

from agent.allocate.match import (
    Ask,
    Evidence,
    Grant,
    KubeletStart,
    MatchSettings,
    Question,
    UnlockedPods,
    decide,
)
from agent.cluster import Phase, PodTable, PodView, Tombstone
from agent.errors import Refusal
from agent.ledger import ContainerKey, Holding, KubeletEpoch, Ledger, Row
from agent.model import SliceId
from tests.builders import (
    NODE,
    NOON,
    a_container,
    a_gpu,
    a_lock,
    a_pod,
    a_pod_uid,
    a_row,
    a_share,
    an_inventory,
)

G1 = a_gpu(index=0).uuid
G2 = a_gpu(index=1).uuid
RESOURCE = "nvidia.com/gpu"
NOW_KUBELET = KubeletEpoch(inode=7, ctime_ns=2)
OLD_KUBELET = KubeletEpoch(inode=7, ctime_ns=1)
SETTINGS = MatchSettings(node=NODE)
STRICT = MatchSettings(node=NODE, unlocked_pods=UnlockedPods.STRICT)
UNIQUE = MatchSettings(node=NODE, unlocked_pods=UnlockedPods.UNIQUE)


def annotated(text: str = f"{G1},NVIDIA,3000,30:;", node: str = NODE) -> dict[str, str]:
    """What HAMi's scheduler writes on a pod."""
    return {
        "hami.io/vgpu-node": node,
        "hami.io/vgpu-devices-allocated": text,
        "hami.io/vgpu-devices-to-allocate": text,
        "hami.io/bind-phase": "allocating",
        "hami.io/bind-time": str(int(NOON.timestamp())),
    }


def named_pod(number: int, **changes: object) -> PodView:
    """The pod team-a/train-N, annotated for one share of the first GPU."""
    base = a_pod(uid=a_pod_uid(number), name=f"train-{number}", annotations=annotated())
    return replace(base, **changes)


RAN = replace(a_container(), has_run=True)
"""A container that is dead, and that the kubelet may start again."""


def dead_pod(number: int, **changes: object) -> PodView:
    """Such a pod that was started, and whose container is dead."""
    return named_pod(number, phase=Phase.RUNNING, containers=(RAN,), **changes)


def row_of(pod: PodView, **changes: object) -> Row:
    """What the pod was answered under an earlier kubelet: a share of the first GPU."""
    row = a_row(pod_uid=pod.uid, pod=pod.name, epoch=OLD_KUBELET, shares=(a_share(uuid=G1),))
    return replace(row, **changes)


def holding(pod: PodView, **ids: str) -> Holding:
    """What the kubelet knows of a pod: `container=id` for each container that holds one."""
    held = {name: frozenset({SliceId(text)}) for name, text in ids.items()}
    return Holding(
        pod.namespace,
        pod.name,
        {
            one.name: {RESOURCE: held[one.name]} if one.name in held else {}
            for one in pod.containers
        },
    )


def a_scene(
    *pods: PodView,
    rows: tuple[Row, ...] = (),
    lock: PodView | None = None,
    gone: tuple[PodView, ...] = (),
) -> Evidence:
    """Pods and rows; `lock` is held by that pod; `gone` pods were deleted."""
    return Evidence(
        count=1,
        settings=SETTINGS,
        table=PodTable(
            pods={pod.uid: pod for pod in pods},
            tombstones=tuple(Tombstone(pod, NOON) for pod in gone),
            synced=True,
        ),
        ledger=Ledger(rows=rows),
        lock=a_lock(namespace=lock.namespace, name=lock.name) if lock else None,
        inventory=an_inventory(count=2),
        kubelet=KubeletStart(NOW_KUBELET),
        now=NOON,
        known={},
    )


def knowing(scene: Evidence, *holdings: Holding, absent: tuple[PodView, ...] = ()) -> Evidence:
    """The scene after the kubelet was asked for these pods."""
    known = dict(scene.known)
    known.update({(one.namespace, one.pod): one for one in holdings})
    known.update({pod.key: None for pod in absent})
    return replace(scene, known=known)


QUESTIONS = {
    "listed": Ask.PODS,
    "node_read": Ask.NODE,
    "waited": Ask.LOCK,
    "alone": Ask.OTHERS,
    "records_read": Ask.RECORDS,
}
UNANSWERED = {"list_failed": Ask.PODS, "node_unread": Ask.NODE}


def changed(scene: Evidence, **changes: object) -> Evidence:
    """The scene with other fields, and with questions that were asked or failed, by short names.

    `checked`: runtime ids that were asked about; none of them runs, unless `alive` has it.
    """
    asked = dict(scene.asked)
    for name, question in QUESTIONS.items():
        if changes.pop(name, question in asked):
            asked.setdefault(question, True)
        else:
            asked.pop(question, None)
    for name, question in UNANSWERED.items():
        if name in changes:
            asked |= {question: not changes.pop(name)}
    alive = {**scene.alive, **dict.fromkeys(changes.pop("checked", ()), False)}  # type: ignore[call-overload]
    alive |= dict.fromkeys(changes.pop("alive", ()), True)  # type: ignore[call-overload]
    return replace(scene, asked=asked, alive=alive, **changes)


def without_witness(
    scene: Evidence, *, recorded: frozenset[ContainerKey] | None = None, read: bool = True
) -> Evidence:
    """The scene under a kubelet without Get, whose file says what it has."""
    return changed(scene, recorded=recorded, witnessed=False, records_read=read)


def said(scene: Evidence, count: int = 1, settings: MatchSettings = SETTINGS) -> str:
    """The decision: `pod container`, `again` for a replay; a question and its first pod; a gate."""
    try:
        step = decide(changed(scene, count=count, settings=settings))
    except Refusal as error:
        return error.gate.name
    if isinstance(step, Question):
        return " ".join((step.ask.name, *(name for _, name in step.pods[:1]), *sorted(step.ids)))
    one = step.candidate
    return f"{one.pod.name} {one.container.name}" + " again" * (one.row is not None)


def granted(scene: Evidence, count: int = 1, settings: MatchSettings = SETTINGS) -> Grant:
    """A decision that must be a grant."""
    step = decide(changed(scene, count=count, settings=settings))
    assert isinstance(step, Grant)
    return step
