"""What people are told when GPUs change, and what is not worth an Event."""

import msgspec
import pytest

from agent.cluster import Phase, PodTable
from agent.health.judge import switched_off
from agent.health.news import believed, gpu_events, holders, named, turning
from agent.ledger import Holder, Ledger
from agent.model import NO_INDEX, Condition, Inventory
from tests.builders import (
    NOON,
    a_gpu,
    a_health,
    a_pod,
    a_pod_uid,
    a_row,
    a_share,
    a_shared_gpu,
    a_uuid,
    an_inventory,
)
from tests.unit.core.allocation.plain_scene import a_plain_row, ids

OK = a_health()
WATCH = a_health(condition=Condition.WATCH, cause="xid", text="XID 94: contained [H-094]")
BAD = a_health(condition=Condition.BAD, cause="xid", text="XID 48: ECC [H-048]")
LOST = a_health(condition=Condition.LOST, cause="lost", text="lost [H-LOST]")
DEAF = a_health(condition=Condition.UNMONITORED, cause="monitor", text="no events [H-DEAF]")
SILENT = a_health(condition=Condition.UNMONITORED, cause="driver", text="does not answer")
REFUSED = msgspec.structs.replace(SILENT, serving=False)
OFF = switched_off(NOON)
NOBODY = Ledger()
GPU_0 = f"GPU 0 ({a_uuid(0)})"


def holding(*healths, absent=(), mig=(), filtered=()) -> Inventory:
    """GPUs 0, 1, … of these healths."""
    return an_inventory(
        gpus=[
            a_shared_gpu(
                gpu=a_gpu(index=n, mig_enabled=n in mig),
                health=health,
                present=n not in (*absent, *mig, *filtered),
                there=n not in absent,
            )
            for n, health in enumerate(healths)
        ]
    )


def told(old: Inventory, new: Inventory, ledger: Ledger = NOBODY) -> list[tuple[str, str, bool]]:
    return [(event.reason, event.text, event.warning) for event in gpu_events(old, new, ledger)]


@pytest.mark.parametrize(
    ("before", "now", "reason"),
    [
        (OK, BAD, "GpuUnhealthy"),
        (WATCH, LOST, "GpuUnhealthy"),
        (SILENT, REFUSED, "GpuUnhealthy"),
        (DEAF, BAD, "GpuUnhealthy"),
        (OK, DEAF, "GpuUnmonitored"),
        (BAD, DEAF, "GpuUnmonitored"),
        (OK, OFF, "GpuUnmonitored"),
        (WATCH, SILENT, "GpuDriverUnresponsive"),
        (DEAF, SILENT, "GpuDriverUnresponsive"),
    ],
)
def test_what_gets_worse_is_a_warning_with_its_reason(before, now, reason):
    ((said, text, warning),) = told(holding(before), holding(now))

    assert (reason, True) == (said, warning)
    assert text.startswith(f"{GPU_0}: ")
    assert now.text in text


@pytest.mark.parametrize("before", [BAD, LOST, SILENT, REFUSED, DEAF])
def test_what_is_well_again_is_said_without_a_warning(before):
    ((reason, _, warning),) = told(holding(before), holding(OK))

    assert ("GpuRecovered", False) == (reason, warning)


def test_what_is_well_again_is_told_what_it_had_and_not_what_to_do():
    bad = a_health(condition=Condition.BAD, cause="xid", text="XID 48: ECC; reset the GPU [H-048]")
    bad = msgspec.structs.replace(bad, runbook="H-048")
    ((_, text, _),) = told(holding(bad), holding(OK))

    assert f"{GPU_0}: healthy again, after: XID 48: ECC [H-048]" == text


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (OK, OK),
        (OK, WATCH),
        (WATCH, OK),
        (BAD, LOST),
        (LOST, BAD),
        (OFF, OK),
        (SILENT, msgspec.structs.replace(SILENT, text="other words")),
        (BAD, msgspec.structs.replace(BAD, passed_probes=2)),
    ],
)
def test_what_changes_nothing_for_people_is_no_event(before, now):
    assert [] == told(holding(before), holding(now))


def test_equal_words_of_several_gpus_are_one_event():
    old, new = holding(OK, OK, OK), holding(SILENT, OK, SILENT)

    assert [("GpuDriverUnresponsive", "GPUs 0, 2: does not answer", True)] == told(old, new)


def test_gpus_that_come_and_go_are_one_event_and_a_lost_one_is_not_gone():
    old = holding(OK, OK)
    new = msgspec.structs.replace(old, gpus=(*old.gpus[1:], a_shared_gpu(gpu=a_gpu(index=7))))
    lost = holding(LOST, OK, absent=(0,))

    assert [
        (
            "GpuInventoryChanged",
            f"no longer shared: {GPU_0}; shared now: GPU 7 ({a_uuid(7)})",
            False,
        )
    ] == told(old, new)
    assert ["GpuUnhealthy"] == [reason for reason, _, _ in told(old, lost)]
    assert [("GpuInventoryChanged", f"no longer shared: {GPU_0}", False)] == told(
        old, holding(OK, OK, absent=(0,))
    )


@pytest.mark.parametrize("health", [BAD, LOST, REFUSED])
def test_a_gpu_that_comes_and_is_not_served_is_not_said_to_be_shared(health):
    (event,) = told(holding(OK), holding(OK, health))

    assert "GpuUnhealthy" == event[0]


def test_a_gpu_that_another_event_tells_of_is_not_said_to_be_gone():
    assert () == gpu_events(holding(OK), holding(), NOBODY, {a_uuid(0)})


@pytest.mark.parametrize(
    ("said", "new"),
    [
        (holding(SILENT), holding(OK)),
        (holding(REFUSED), holding(WATCH)),
        (holding(REFUSED), holding(DEAF)),
        (holding(DEAF), holding(OK)),
        (holding(DEAF), holding()),
        (holding(OK), holding(OK, absent=(0,))),
        (holding(BAD), holding(BAD, absent=(0,))),
        (holding(LOST, absent=(0,)), holding(BAD)),
        (holding(BAD), holding()),
    ],
)
def test_what_may_turn_again_in_a_moment_is_doubted_until_it_is_believed(said, new):
    assert {a_uuid(0)} == turning(said, new)
    assert said.gpus == believed(said, new, {a_uuid(0)}).gpus
    assert new == believed(said, new, ())


@pytest.mark.parametrize(
    ("said", "new"),
    [
        (holding(OK), holding(SILENT)),
        (holding(SILENT), holding(BAD)),
        (holding(DEAF), holding(SILENT)),
        (holding(BAD), holding(OK)),
        (holding(BAD), holding(BAD)),
        (holding(OFF), holding(OK)),
        (holding(OFF), holding(OFF, absent=(0,))),
        (holding(OK), holding()),
        (holding(), holding(BAD)),
    ],
)
def test_what_gets_worse_or_has_rested_is_believed_at_once(said, new):
    assert frozenset() == turning(said, new)


def test_gpus_of_unknown_index_are_named_by_their_uuid():
    lonely = a_shared_gpu(gpu=a_gpu(index=NO_INDEX, uuid=a_uuid(7)))
    other = a_shared_gpu(gpu=a_gpu(index=3))

    assert f"GPU of unknown index ({a_uuid(7)})" == named([lonely])
    assert f"GPUs {a_uuid(7)}, 3" == named([lonely, other])


def test_each_pod_that_holds_a_fallen_gpu_is_told_once_and_no_other():
    share, other = a_share(uuid=a_uuid(0)), a_share(uuid=a_uuid(1))
    rows = (
        a_row(pod_uid=a_pod_uid(1), pod="one", container="a", shares=(other, share)),
        a_row(pod_uid=a_pod_uid(1), pod="one", container="b", shares=(share,)),
        a_row(pod_uid=a_pod_uid(2), pod="two", shares=(other,)),
    )
    events = gpu_events(holding(OK, OK), holding(BAD, OK), Ledger(rows))

    assert [("GpuUnhealthy", ""), ("GpuDegradedForPod", "one")] == [
        (event.reason, event.pod) for event in events
    ]
    assert (a_pod_uid(1), "team-a", True) == (
        events[1].pod_uid,
        events[1].namespace,
        events[1].warning,
    )
    assert "XID 48" in events[1].text


def test_the_pods_of_a_gpu_that_is_gone_are_told():
    row = a_row(shares=(a_share(uuid=a_uuid(0)),))
    gone = gpu_events(holding(OK), holding(OK, absent=(0,)), Ledger((row,)))
    ill = gpu_events(holding(BAD), holding(BAD, absent=(0,)), Ledger((row,)))

    assert "not on the node any more" in gone[-1].text
    assert "GpuDegradedForPod" not in {event.reason for event in ill}


def test_the_pods_of_a_gpu_that_was_switched_to_mig_mode_are_told():
    row = a_row(shares=(a_share(uuid=a_uuid(0)),))
    events = gpu_events(holding(OK, OK), holding(OK, OK, mig=(0,)), Ledger((row,)))

    assert ["GpuInventoryChanged", "GpuDegradedForPod"] == [event.reason for event in events]
    assert "switched to MIG mode" in events[1].text
    assert row.key.pod_uid == events[1].pod_uid


def test_a_gpu_that_is_filtered_out_serves_the_pods_that_have_it():
    row = a_row(shares=(a_share(uuid=a_uuid(0)),))
    events = gpu_events(holding(OK), holding(OK, filtered=(0,)), Ledger((row,)))

    assert ["GpuInventoryChanged"] == [event.reason for event in events]


def test_a_pod_of_plain_mode_is_named_on_the_node_once_its_name_is_known():
    rows = (
        a_plain_row(holder=Holder("team-a", "train-0", "one"), slice_ids=ids(0)),
        a_plain_row(holder=Holder("team-a", "train-0", "two"), slice_ids=ids(1)),
        a_plain_row(holder=Holder("team-a", "train-1", "one"), slice_ids=ids(0, gpu=1)),
        a_plain_row(slice_ids=ids(2)),
    )
    events = gpu_events(holding(OK, OK), holding(BAD, OK), Ledger(rows))

    (event,) = [one for one in events if one.reason == "GpuDegradedForPod"]
    assert ("", "", "") == (event.namespace, event.pod, event.pod_uid)
    assert f"{GPU_0}, which pod team-a/train-0 holds: XID 48" in event.text


def test_a_pod_that_is_over_holds_no_gpu_although_its_row_stays_for_a_minute():
    share = a_share(uuid=a_uuid(0))
    rows = [a_row(pod_uid=a_pod_uid(n), pod=f"p{n}", shares=(share,)) for n in range(3)]
    here = (a_pod(uid=a_pod_uid(0), name="p0"), a_pod(uid=a_pod_uid(1), phase=Phase.SUCCEEDED))
    table = PodTable({pod.uid: pod for pod in here}, synced=True)
    ledger = Ledger((*rows, a_plain_row(holder=Holder("team-a", "p9", "one"))))

    assert ("team-a/p0", "team-a/p9") == holders(ledger, [a_uuid(0)], table)
    assert () == holders(ledger, [a_uuid(1)], table)


@pytest.mark.parametrize("table", [PodTable(), PodTable(synced=True, stale=True)])
def test_while_nobody_knows_the_pods_each_row_counts_as_held(table):
    row = a_row(pod="p0", shares=(a_share(uuid=a_uuid(0)),))

    assert ("team-a/p0",) == holders(Ledger((row,)), [a_uuid(0)], table)
