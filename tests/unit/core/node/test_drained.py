"""The scheduler and the resource's name change on a drained node alone."""

import msgspec
import pytest

from agent.core.node.drained import RESOURCE, SCHEDULER, LastingSetting, undrained
from agent.core.state.ledger import Holder, Ledger
from tests.builders import NODE, a_pod_uid, a_row
from tests.unit.core.allocation.plain_scene import a_plain_row, ids

OLD, NEW = "nvidia.com/gpu", "example.com/vgpu"


def rows(*names: str, resource: str = OLD) -> Ledger:
    """A row of hami mode for each pod of namespace `a`."""
    return Ledger(
        tuple(
            msgspec.structs.replace(
                a_row(pod_uid=a_pod_uid(n), namespace="a", pod=name), resource=resource
            )
            for n, name in enumerate(names)
        )
    )


def wanted(scheduler: str = "hami", resource: str = OLD) -> tuple[LastingSetting, ...]:
    return (
        LastingSetting(SCHEDULER, scheduler, "c.yaml:1:12"),
        LastingSetting(RESOURCE, resource, "c.yaml:2:18"),
    )


def said(ledger: Ledger, **settings: str) -> str:
    return str(undrained(wanted(**settings), ledger, NODE) or "")


@pytest.mark.parametrize("settings", [wanted(), wanted("none"), wanted("none", NEW)])
def test_on_a_drained_node_every_setting_can_change(settings):
    assert undrained(settings, Ledger(), NODE) is None


def test_the_settings_that_the_rows_were_answered_under_stay_as_they_are():
    assert "" == said(rows("p"))
    assert "" == said(Ledger((a_plain_row(),)), scheduler="none")


def test_another_name_waits_and_is_told_with_its_place_the_pods_and_what_to_do():
    assert (
        "c.yaml:2:18: sharing.resourceName cannot change from nvidia.com/gpu to example.com/vgpu "
        "while slices are held by 1 pod (a/p); running pods go on; drain the node (kubectl drain "
        "node-1) or delete what holds them, or set it back to nvidia.com/gpu; slices are held for "
        "up to a minute after their pod has gone"
    ) == said(rows("p"), resource=NEW)


def test_another_name_and_another_scheduler_are_told_together():
    told = said(rows("p"), scheduler="none", resource=NEW)

    assert told.startswith(
        "c.yaml:1:12: scheduler cannot change from hami to none and c.yaml:2:18: "
        "sharing.resourceName cannot change from nvidia.com/gpu to example.com/vgpu while slices "
        "are held by 1 pod (a/p); running pods go on; drain the node"
    )
    assert "then restart the agent, or set it back to hami and nvidia.com/gpu" in told


def test_what_holds_one_of_two_settings_is_named_for_that_one():
    adopted = a_plain_row(adopted=True, holder=Holder("a", "adopted", "c"))
    ledger = rows("p", resource="").put(adopted)

    assert "1 pod (a/p);" in said(ledger, scheduler="none", resource=adopted.resource)
    assert "1 pod (a/adopted);" in said(ledger, resource=NEW)


def test_a_few_pods_are_named_and_the_others_counted():
    assert "held by 5 pods (a/p1, a/p2, a/p3 and 2 more);" in said(
        rows("p5", "p4", "p3", "p2", "p1"), resource=NEW
    )


def test_containers_of_one_pod_are_one_pod():
    row = a_row()
    second = msgspec.structs.replace(row, key=msgspec.structs.replace(row.key, container="second"))
    assert "held by 1 pod (" in said(Ledger((row, second)), resource=NEW)


def test_another_scheduler_is_refused_and_needs_a_restart_besides():
    told = said(rows("p"), scheduler="none")

    assert told.startswith("c.yaml:1:12: scheduler cannot change from hami to none while ")
    assert ", then restart the agent, or set it back to hami" in told
    assert "cannot change from none to hami" in said(Ledger((a_plain_row(),)))


def test_slices_of_pods_that_nobody_has_named_are_counted():
    unnamed = a_plain_row(slice_ids=ids(1, 2))
    named = a_plain_row(slice_ids=ids(3), holder=Holder("a", "p", "c"))

    alone = said(Ledger((unnamed,)))
    assert "while 2 slices of pods that the kubelet has not named are held;" in alone
    both = said(Ledger((unnamed, named)))
    assert "held by 1 pod (a/p), and 2 slices of pods that the kubelet has not named;" in both


def test_what_was_only_adopted_fits_every_scheduler_but_not_every_name():
    ledger = Ledger((a_plain_row(adopted=True, holder=Holder("a", "p", "c")),))

    assert "" == said(ledger) == said(ledger, scheduler="none")
    assert "held by 1 pod (a/p)" in said(ledger, resource=NEW)


def test_rows_from_before_names_were_kept_are_of_the_name_that_there_is():
    assert "" == said(rows("p", resource=""), resource=NEW)


def test_rows_by_two_names_hold_up_neither_and_a_third_waits_for_the_newest():
    """Only a file of an earlier agent has such: it would fit no settings at all."""
    both = Ledger((*rows("p").rows, *rows("q", resource=NEW).rows))

    assert "" == said(both) == said(both, resource=NEW)
    other = "example.com/other"
    assert f"cannot change from {NEW} to {other} while" in said(both, resource=other)
