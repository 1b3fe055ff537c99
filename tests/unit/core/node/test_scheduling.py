"""What the Node shows of kubelet and scheduler, judged part by part."""

import datetime as dt

import msgspec
import pytest

from agent.cluster import HANDSHAKE, SCORE
from agent.hami.pod import encode_node_lock
from agent.hami.register import ReportProfile, encode_reported
from agent.node.findings import Finding
from agent.node.scheduling import (
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


def offered(allocatable: int, report: ReportSeen) -> list[Finding]:
    return list(judge_offer(NODE, OfferSeen("nvidia.com/gpu", allocatable, 40), report, NOON))


@pytest.mark.parametrize(
    ("allocatable", "verdict", "means"),
    [(20, "ok", ""), (12, "WRONG", "kube-scheduler counts fewer"), (30, "WRONG", "HAMi's sche")],
)
def test_allocatable_is_the_healthy_slices(allocatable, verdict, means):
    (found,) = offered(allocatable, REPORT)

    assert verdict == found.verdict.value
    assert means in found.means


def test_without_a_report_there_is_nothing_to_compare():
    assert [] == offered(0, ReportSeen(is_there=True))


@pytest.mark.parametrize(("age", "verdict"), [(14.0, "note"), (16.0, "WRONG")])
def test_the_kubelet_has_15_seconds_to_follow_a_report(age, verdict):
    (found,) = offered(12, msgspec.structs.replace(REPORT, written=ago(age)))

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
    ("text", "report", "profile", "verdict", "said"),
    [
        ("Deleted_x", REPORT, JSON, "WRONG", "dropped this node's GPUs"),
        ("Deleted_x", REPORT, COLON, "WRONG", "dropped this node's GPUs"),
        ("Requesting_2026.11.20 10:00:00", REPORT, JSON, "ok", "has read the report"),
        ("Reported x", REPORT, JSON, "ok", "Reported: schedulers from 2.8 on do not use it"),
        ("Else x", REPORT, JSON, "ok", "Else: schedulers from 2.8 on do not use it"),
        ("", REPORT, JSON, "note", "no scheduler has read the present report"),
        ("", OLD, JSON, "note", "which is 90 s old"),
        ("", FRESH, JSON, "ok", "the report is new"),
        ("", ReportSeen(), JSON, "ok", "or there is none"),
        ("", ALL_ILL, JSON, "ok", "offers no slice"),
        ("", ReportSeen(is_there=True), JSON, "note", "no scheduler has read"),
        ("", REPORT, COLON, "WRONG", "the agent's stamp is absent"),
        (encode_reported(ago(90)), REPORT, COLON, "note", "report of 90 s ago"),
        (encode_reported(ago(9)), REPORT, COLON, "ok", "stamps are read"),
        ("Reported 2001-01-01 10:00:00", REPORT, COLON, "ok", "stamps are read"),
        ("Requesting_2001.01.01 10:00:00", REPORT, COLON, "ok", "stamps are read"),
    ],
)
def test_whether_a_scheduler_has_read_the_report(text, report, profile, verdict, said):
    found = judge_handshake(NODE, text, report, profile, NOON)

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


def a_lock(seconds: float) -> str:
    return encode_node_lock(ago(seconds), "demo", "late")


@pytest.mark.parametrize(
    ("text", "verdict", "said"),
    [
        (None, "ok", "free"),
        ("\x1b?", "WRONG", "cannot be read"),
        (a_lock(59), "ok", "by pod demo/late for 59 s"),
        (a_lock(61), "note", "by pod demo/late for 61 s"),
        (a_lock(301), "WRONG", "for 301 s"),
        (a_lock(301).partition(",")[0], "WRONG", "an unnamed pod"),
    ],
)
def test_a_lock_is_judged_by_its_age(text, verdict, said):
    found = judge_lock(NODE, text, NOON)

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
