"""What the Node shows of kubelet and scheduler, judged part by part."""

import datetime as dt

import msgspec
import pytest

from agent.cluster import HANDSHAKE, SCORE, NodeLock
from agent.hami.register import ReportProfile
from agent.node.scheduling import (
    HandshakeSeen,
    NodeTraces,
    OfferSeen,
    ReportSeen,
    judge_handshake,
    judge_leftovers,
    judge_lock,
    judge_offer,
    judge_present_report,
    judge_writer,
)
from tests.builders import NODE, NOON

REPORT = ReportSeen(is_there=True, gpus=2, healthy=20)
JSON, COLON = ReportProfile.JSON, ReportProfile.COLON
TRACES = NodeTraces(NODE)


def ago(seconds: float) -> dt.datetime:
    return NOON - dt.timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("allocatable", "verdict", "means"),
    [(20, "ok", ""), (12, "WRONG", "kube-scheduler counts fewer"), (30, "WRONG", "HAMi's sche")],
)
def test_allocatable_is_the_healthy_slices(allocatable, verdict, means):
    found = judge_offer(NODE, OfferSeen("nvidia.com/gpu", allocatable, 40), REPORT, NOON)

    assert found is not None
    assert verdict == found.verdict.value
    assert means in found.means


def test_without_a_report_there_is_nothing_to_compare():
    unread = ReportSeen(is_there=True)

    assert judge_offer(NODE, OfferSeen("nvidia.com/gpu"), unread, NOON) is None


@pytest.mark.parametrize(("age", "verdict"), [(14.0, "note"), (16.0, "WRONG")])
def test_the_kubelet_has_15_seconds_to_follow_a_report(age, verdict):
    report = msgspec.structs.replace(REPORT, written=ago(age))
    found = judge_offer(NODE, OfferSeen("nvidia.com/gpu", 12), report, NOON)

    assert found is not None
    assert verdict == found.verdict.value


@pytest.mark.parametrize(
    ("report", "profile", "verdict", "said"),
    [
        (REPORT, JSON, "ok", "for HAMi's scheduler 2.8 and later"),
        (ReportSeen(), JSON, "WRONG", "does not exist"),
        (ReportSeen(is_there=True), JSON, "WRONG", "cannot be read"),
        (REPORT, COLON, "WRONG", "not have the form for HAMi's scheduler 2.5 to 2.7.1"),
        (msgspec.structs.replace(REPORT, is_json=False), COLON, "ok", "2.5 to 2.7.1"),
        (msgspec.structs.replace(REPORT, differences=("a",)), JSON, "note", "a"),
        (msgspec.structs.replace(REPORT, differences=("a", "b")), JSON, "note", "a, and 1 more"),
    ],
)
def test_the_report_is_there_readable_and_for_this_scheduler(report, profile, verdict, said):
    found = judge_present_report(NODE, report, profile)

    assert verdict == found.verdict.value
    assert said in found.said


OLD = msgspec.structs.replace(REPORT, written=ago(90))
FRESH = msgspec.structs.replace(REPORT, written=ago(5))
ALL_ILL = msgspec.structs.replace(REPORT, healthy=0)


@pytest.mark.parametrize(
    ("seen", "report", "profile", "verdict", "said"),
    [
        (HandshakeSeen("Deleted_x", "Deleted"), REPORT, JSON, "WRONG", "dropped this node's GPUs"),
        (HandshakeSeen("Deleted_x", "Deleted"), REPORT, COLON, "WRONG", "dropped this node's GPUs"),
        (HandshakeSeen("Requesting_x", "Requesting"), REPORT, JSON, "ok", "has read the report"),
        (HandshakeSeen("Reported x", "Reported"), REPORT, JSON, "ok", "do not use it"),
        (HandshakeSeen(), REPORT, JSON, "note", "no scheduler has read the present report"),
        (HandshakeSeen(), OLD, JSON, "note", "which is 90 s old"),
        (HandshakeSeen(), FRESH, JSON, "ok", "the report is new"),
        (HandshakeSeen(), ReportSeen(), JSON, "ok", "or there is none"),
        (HandshakeSeen(), ALL_ILL, JSON, "ok", "offers no slice"),
        (HandshakeSeen(), ReportSeen(is_there=True), JSON, "note", "no scheduler has read"),
        (HandshakeSeen(), REPORT, COLON, "WRONG", "the agent's stamp is absent"),
        (HandshakeSeen("R", "Reported", ago(90)), REPORT, COLON, "note", "report of 90 s ago"),
        (HandshakeSeen("R", "Reported", ago(9)), REPORT, COLON, "ok", "stamps are read"),
        (HandshakeSeen("R", "Reported"), REPORT, COLON, "ok", "stamps are read"),
        (HandshakeSeen("R", "Requesting"), REPORT, COLON, "ok", "stamps are read"),
    ],
)
def test_whether_a_scheduler_has_read_the_report(seen, report, profile, verdict, said):
    found = judge_handshake(NODE, seen, report, profile, NOON)

    assert verdict == found.verdict.value
    assert said in found.said
    assert (verdict != "ok") == bool(found.advice)


@pytest.mark.parametrize(
    ("reported_by", "report", "verdict"),
    [
        ("", msgspec.structs.replace(REPORT, differences=("a",)), "ok"),
        ("other T", REPORT, "ok"),
        ("other T", msgspec.structs.replace(REPORT, differences=("a",)), "note"),
        ("other T", msgspec.structs.replace(REPORT, gpus=0), "note"),
    ],
)
def test_another_writer_is_a_note_unless_the_agent_would_write_the_same(
    reported_by, report, verdict
):
    traces = msgspec.structs.replace(TRACES, reported_by=reported_by)

    assert verdict == judge_writer(traces, report).verdict.value


OWNED = NodeLock("x", NOON, "demo", "late")


@pytest.mark.parametrize(
    ("text", "lock", "verdict", "said"),
    [
        (None, None, "ok", "free"),
        ("\x1b?", None, "WRONG", "cannot be read"),
        ("x", msgspec.structs.replace(OWNED, stamp=ago(59)), "ok", "by pod demo/late for 59 s"),
        ("x", msgspec.structs.replace(OWNED, stamp=ago(61)), "note", "by pod demo/late for 61 s"),
        ("x", msgspec.structs.replace(OWNED, stamp=ago(301)), "WRONG", "for 301 s"),
        ("x", NodeLock("x", ago(301)), "WRONG", "an unnamed pod"),
    ],
)
def test_a_lock_is_judged_by_its_age(text, lock, verdict, said):
    found = judge_lock(NODE, text, lock, NOON)

    assert verdict == found.verdict.value
    assert said in found.said
    assert "\x1b" not in found.said


def left(annotations, *stale: str, stamps: bool = False, scores: bool = False) -> list[str]:
    traces = msgspec.structs.replace(TRACES, annotations=annotations)
    found = judge_leftovers(traces, stale, stamps=stamps, scores=scores)
    return [one.subject for one in found if one.verdict.value == "note"]


def test_what_hamis_plugin_left_is_named_and_what_the_agent_writes_is_not():
    both = {HANDSHAKE: "Reported 2026", SCORE: "[]"}
    names = [f"{HANDSHAKE} of Node {NODE}", f"{SCORE} of Node {NODE}"]

    assert ["/d/nvidia-gpu.sock", *names] == left(both, "/d/nvidia-gpu.sock")
    assert [] == left(both, stamps=True, scores=True)
    assert [] == left({HANDSHAKE: "Requesting_2026"})
    assert [] == left({})
