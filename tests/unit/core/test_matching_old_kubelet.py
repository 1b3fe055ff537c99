"""Kubelets before 1.34, which cannot be asked whom they admit."""

import datetime as dt

from agent.core.allocation.evidence import (
    AwaitLock,
    ListPods,
    LookAtNode,
    ReadRecords,
)
from agent.core.allocation.exactly_one import in_vain
from agent.core.errors import RefusalReason
from tests.builders import NOON, a_container, a_lock, a_row
from tests.unit.core.matching_scene import (
    NOW_KUBELET,
    SETTINGS,
    UNIQUE,
    a_scene,
    ask,
    changed,
    granted,
    named_pod,
    refused_by,
    without_witness,
)

POD = named_pod(1)


def test_an_old_kubelet_serves_only_a_lock_owner_without_company() -> None:
    alone = without_witness(a_scene(POD, lock=POD))
    accompanied = without_witness(a_scene(POD, named_pod(3), lock=POD))

    assert granted(alone).candidate.pod == POD
    assert ask(accompanied) == ListPods()
    assert ask(changed(accompanied, listed=True)) == AwaitLock()
    assert ask(changed(accompanied, listed=True, waited=True)) == LookAtNode()
    known = changed(accompanied, listed=True, waited=True, node_read=True)
    for settings in (SETTINGS, UNIQUE):
        refused_by(known, RefusalReason.WITNESS_SILENT, settings=settings)


def test_an_old_kubelets_lone_candidate_waits_for_its_lock_before_it_is_refused() -> None:
    scene = changed(without_witness(a_scene(POD)), listed=True)

    assert ask(scene) == AwaitLock(*POD.key)
    assert ask(changed(scene, waited=True)) == LookAtNode()
    refused_by(changed(scene, waited=True, node_read=True), RefusalReason.NO_LOCK)
    refused_by(
        changed(scene, waited=True, node_read=True, lock=a_lock(name="other")),
        RefusalReason.NO_RIGHT,
    )


def test_an_old_kubelet_asks_for_a_deleted_pod_for_ten_seconds_and_not_again_after_a_refusal() -> (
    None
):
    other = named_pod(3)
    asked = changed(
        without_witness(a_scene(POD, gone=(other,), lock=POD)),
        listed=True,
        waited=True,
        node_read=True,
    )

    refused_by(asked, RefusalReason.WITNESS_SILENT)
    assert other.uid == in_vain(1, asked, SETTINGS)
    assert granted(changed(asked, claimed=frozenset({other.uid}))).candidate.pod == POD
    late = changed(asked, now=NOON + dt.timedelta(seconds=11))
    assert granted(late).candidate.pod == POD


def test_an_old_kubelets_file_is_read_before_its_pod_is_served() -> None:
    row = a_row(pod_uid=POD.uid, pod=POD.name, container="c1", epoch=NOW_KUBELET)
    pod = named_pod(
        1,
        containers=(a_container(name="c1"), a_container(name="c2")),
        groups=POD.groups * 2 if POD.groups else None,
    )
    scene = a_scene(pod, rows=(row,), lock=pod)
    assert ask(without_witness(scene, read=False)) == ReadRecords()

    served = granted(without_witness(scene, recorded=frozenset({row.key})))

    assert served.candidate.container.name == "c2"


def test_an_old_kubelets_pod_that_nobody_has_seen_is_listed_for_once() -> None:
    scene = without_witness(a_scene(lock=POD))

    assert ask(scene) == ListPods()
    refused_by(changed(scene, listed=True), RefusalReason.NO_POD_ADMITTED)
