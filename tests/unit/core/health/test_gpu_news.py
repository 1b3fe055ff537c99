"""What people are told when GPUs change, and the Node condition GpuDegraded."""

import datetime as dt
import re

import pytest

from agent.cluster import PodTable
from agent.health.judge import switched_off
from agent.ledger import Ledger
from agent.model import NO_INDEX, Condition, Health, Inventory
from agent.report import gpu_degraded, gpu_events, pods_holding
from tests.builders import NOON, a_gpu, a_health, a_row, a_share, a_shared_gpu, a_uuid, an_inventory
from tests.unit.rows import rows_of

LATER = NOON + dt.timedelta(hours=1)
NOBODY = Ledger()
DRAINED = "XID 48: ECC; reset it or reboot the node [H-048]"
STATES = {
    "ok": a_health(),
    "watch": a_health(condition=Condition.WATCH, cause="xid", text="XID 94: contained [H-094]"),
    "doubt": a_health(condition=Condition.WATCH, cause="probe", text="a probe failed [H-PROBE]"),
    "bad": a_health(condition=Condition.BAD, cause="xid", text="XID 48: ECC [H-048]"),
    "reset": Health(Condition.BAD, NOON, "xid", DRAINED, serving=False, runbook="H-048"),
    "late": a_health(condition=Condition.BAD, since=LATER, text="ECC"),
    "lost": a_health(condition=Condition.LOST, cause="lost", text="lost [H-LOST]"),
    "gone": Health(Condition.LOST, NOON, "lost", "gone", action="reboot", serving=False),
    "back": Health(Condition.BAD, NOON, "lost", "is back", action="wait", serving=False),
    "deaf": a_health(condition=Condition.UNMONITORED, cause="monitor", text="no events [H-DEAF]"),
    "silent": a_health(condition=Condition.UNMONITORED, cause="driver", text="does not answer"),
    "hung": a_health(
        condition=Condition.UNMONITORED, cause="driver", text="does not answer", serving=False
    ),
    "released": a_health(
        condition=Condition.UNMONITORED, cause="released", text="released", serving=False
    ),
    "off": switched_off(NOON),
    "none": None,
}


def holding(words: str) -> Inventory:
    """GPUs 0, 1, … in these states. `-`: it is gone, `%`: in MIG mode, `/`: filtered out."""
    return an_inventory(
        gpus=[
            a_shared_gpu(
                gpu=a_gpu(index=n, mig_enabled=word.endswith("%")),
                health=health,
                present=not word.endswith(("-", "%", "/")),
                there=not word.endswith("-"),
                wanted=not word.endswith("/"),
            )
            for n, word in enumerate(words.split())
            if (health := STATES[word.rstrip("-%/!")]) is not None
        ]
    )


def told(change: str) -> str:
    """The Events about a change; `!`: a warning."""
    old, new = map(holding, change.split(" > "))
    events = [
        f"{event.reason}{'!' * event.warning} {event.text}"
        for event in gpu_events(old, new, NOBODY)
    ]
    return re.sub(r" \(GPU-[-0-9a-f]*\)", "", " & ".join(events)) or "nothing"


UNKNOWN = a_gpu(uuid=a_uuid(9), index=NO_INDEX, name="")
ODD = {
    "none-": a_shared_gpu(gpu=UNKNOWN, present=False, there=False),
    "none!": a_shared_gpu(gpu=UNKNOWN, present=False, obstacle="no answer"),
}


def told_pods(change: str) -> str:
    """The Events about a change on the pod of the first GPU."""
    row = a_row(shares=(a_share(uuid=a_uuid(0)),))
    old, new = map(holding, change.split(" > "))
    first, *told = gpu_events(old, new, Ledger((row,)))
    assert "GpuInventoryChanged" == first.reason
    assert {row.key.pod_uid} >= {one.pod_uid for one in told}
    return " & ".join(f"{one.reason} {one.text}" for one in told) or "nothing"


def condition(gpus: str) -> str:
    """The Node condition GpuDegraded: since noon, or since now."""
    odd = (ODD[word] for word in gpus.split() if word in ODD)
    found = gpu_degraded(an_inventory(gpus=[*holding(gpus).gpus, *odd]), LATER)
    text, uuids = re.subn(r" \(GPU-[-0-9a-f]*\)|(?<=GPU )GPU-\S+", "", found.message)
    assert uuids == (text.count("GPU ") if found.status else 0)
    return f"{found.status} {'noon' if found.since == NOON else 'now'} {text}"


@pytest.mark.parametrize(("words", "expected"), rows_of(__file__, "news.txt"))
def test_a_change_of_the_gpus_is_told_like_this(words, expected):
    kind, _, rest = words.partition(": ")
    if kind == "pods":
        assert expected in told_pods(rest)
    elif kind == "condition":
        assert expected == condition(rest)
    else:
        assert expected == told(words)


def test_while_the_pods_are_not_known_each_row_holds_its_gpu():
    row = a_row()
    held = [
        pods_holding(Ledger((row,)), row.gpus, PodTable(synced=True, stale=stale))
        for stale in (False, True)
    ]
    assert [(), ("team-a/train-0",)] == held
