"""One resource by two names: who asks by one is never taken for one who asks by the other."""

import dataclasses
import datetime as dt

import pytest

from agent.core.allocation.evidence import AskKubelet
from agent.core.allocation.plain import may_restart
from agent.core.allocation.settings import MatchSettings
from agent.core.cluster.pods import Phase, PodTable
from agent.core.errors import Refusal, RefusalReason
from agent.core.reconcile.plain import PlainSeen, observe
from agent.core.reconcile.reconcile import ReconcileFacts, compare
from agent.core.state.holdings import ContainerHolding, Holding
from agent.core.state.ledger import Ledger
from agent.core.state.plain_row import Holder, Stranger
from tests.builders import G1, NODE, NOON, a_container, a_gpu, a_row
from tests.unit.core.matching_scene import (
    NOW_KUBELET,
    OLD_KUBELET,
    a_scene,
    ask,
    changed,
    granted,
    holding,
    knowing,
    named_pod,
)
from tests.unit.core.plain_scene import EPOCH, HOLDER, NEXT, a_plain_row, holds, ids

OLD, NEW = "nvidia.com/gpu", "example.com/vgpu"
POD = named_pod(1)
YOUNG = named_pod(2, containers=(a_container(resource=NEW),))
ROW = a_row(pod_uid=POD.uid, pod=POD.name, epoch=OLD_KUBELET, shares=POD.groups[0])
BY_NEW = MatchSettings(NODE, resource=NEW)
BY_OLD = MatchSettings(NODE, resource=OLD, renamed=NEW)


def both(*held: Holding, rows=(ROW,)):
    """A pod that was answered by the former name, and one that is new and has the lock."""
    scene = knowing(a_scene(POD, YOUNG, rows=rows, lock=YOUNG), *held)
    return changed(scene, listed=True, waited=True, node_read=True, records_read=True)


def test_only_pods_that_ask_by_the_name_are_candidates():
    scene = both()

    assert ask(scene, settings=BY_OLD) == AskKubelet(*POD.key)
    assert ask(scene, settings=BY_NEW) == AskKubelet(*YOUNG.key)


def test_each_name_serves_its_own_although_both_pods_are_being_admitted():
    scene = both(holding(POD), holding(YOUNG))

    assert YOUNG.uid == granted(scene, settings=BY_NEW).candidate.pod.uid
    again = granted(scene, settings=BY_OLD)
    assert ROW == again.replay


def test_by_a_former_name_nobody_is_served_for_the_first_time_not_even_the_lock_owner():
    scene = changed(both(holding(POD), rows=()), lock=a_scene(lock=POD).lock)

    with pytest.raises(Refusal, match=RefusalReason.RESOURCE_RENAMED.value):
        ask(scene, settings=BY_OLD)


def test_what_is_held_by_a_former_name_counts_for_the_room_of_the_present_one():
    full = dataclasses.replace(ROW.shares[0], memory_mib=81559 - 2999)
    row = dataclasses.replace(ROW, shares=(full,), epoch=NOW_KUBELET, confirmed=True)
    held = holding(POD, main=f"{G1}-0")

    with pytest.raises(Refusal, match=RefusalReason.MEMORY_EXCEEDED.value):
        ask(both(held, holding(YOUNG), rows=(row,)), settings=BY_NEW)


def test_a_pod_is_counted_by_the_first_name_that_it_asks_by():
    (one,) = YOUNG.containers

    assert one is one.asking_by((NEW, OLD))
    assert YOUNG is YOUNG.asking_by((NEW, OLD))
    unasked = one.asking_by((OLD,))
    assert (0, OLD, ((NEW, 1),)) == (unasked.count, unasked.resource, unasked.others)
    assert one == unasked.asking_by((OLD, NEW))
    assert () == YOUNG.asking_by((OLD,)).gpu_containers


def test_rows_are_confirmed_by_the_ids_of_their_own_name():
    rows = (ROW, dataclasses.replace(ROW, key=dataclasses.replace(ROW.key, container="b")))
    rows = (rows[0], dataclasses.replace(rows[1], resource=NEW))
    table = PodTable({POD.uid: dataclasses.replace(POD, phase=Phase.RUNNING)}, synced=True)
    old, new = frozenset(rows[0].slice_ids), frozenset(ids(3))
    held = Holding(
        *POD.key, (ContainerHolding("main", {OLD: old}), ContainerHolding("b", {NEW: new}))
    )
    swapped = Holding(
        *POD.key, (ContainerHolding("main", {NEW: new}), ContainerHolding("b", {OLD: old}))
    )

    def confirmed(holding: Holding) -> list[str]:
        seen = ReconcileFacts(table, [holding], NOW_KUBELET, NOON, complete=True)
        return [row.key.container for row in compare(Ledger(rows), seen, (NEW, OLD)).confirmed]

    assert ["main", "b"] == confirmed(held)
    assert [] == confirmed(swapped)


def test_a_stranger_is_kept_by_the_name_that_it_holds_ids_by():
    held = Holding("a", "p", (ContainerHolding("c", {OLD: frozenset(ids(1))}),))
    seen = ReconcileFacts(PodTable(synced=True), [held], NOW_KUBELET, NOON, complete=True)

    assert (Stranger(Holder("a", "p", "c"), ids(1), OLD),) == compare(
        Ledger(), seen, (NEW, OLD)
    ).strangers
    assert () == compare(Ledger(), seen, (NEW,)).strangers


def test_in_plain_mode_a_holder_lives_by_its_row_whatever_the_name():
    row = a_plain_row(holder=HOLDER, resource=OLD)
    other = Holder("b", "young", "main")
    held = [holds(HOLDER, *ids(0), resource=OLD), holds(other, *ids(1), resource=NEW)]
    seen = PlainSeen(held, (), EPOCH, NOON + dt.timedelta(hours=1))

    found = observe(Ledger(plain=(row,)), seen, (NEW, OLD), alone=True)

    assert () == found.closed
    assert (Stranger(other, ids(1), NEW),) == found.strangers


def test_in_plain_mode_only_a_kubelet_that_lost_its_records_asks_again_by_a_former_name():
    rows = [a_plain_row(holder=HOLDER), a_plain_row(slice_ids=ids(1), epoch=NEXT)]

    assert may_restart(ids(0), rows, NEXT)
    assert not may_restart(ids(0), rows, EPOCH)
    assert not may_restart(ids(1), rows, NEXT)
    assert not may_restart(ids(0, 9), rows, NEXT)


def test_the_ledger_tells_what_is_held_by_each_name():
    rows = (ROW, dataclasses.replace(a_row(pod_uid="x"), resource=NEW, slice_ids=()))
    plain = (a_plain_row(slice_ids=ids(4), resource=NEW),)
    ledger = Ledger(rows, plain=plain)

    assert {OLD: ledger.under(OLD).held_ids(), NEW: {a_gpu(index=0).uuid: ids(4)}} == dict(
        ledger.held_by_name()
    )
    assert {OLD} == {row.resource for row in ledger.under(OLD).rows}
