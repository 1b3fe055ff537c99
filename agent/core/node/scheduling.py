"""Judges what HAMi's scheduler and the kubelet show of this node, as the API server has it."""

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from agent.core.cluster.annotations import HANDSHAKE, MUTEX_LOCK, REGISTER, SCORE
from agent.core.cluster.pods import NodeLock
from agent.core.errors import cap
from agent.core.node.findings import Finding, PreflightCheck
from agent.core.report_settings import ReportProfile

READ_WITHIN: Final = 60.0
"""Seconds. HAMi's schedulers look at a Node every 15 s; those up to 2.7.1 drop it after 60 s."""
KUBELET_WITHIN: Final = 15.0
"""Seconds. The kubelet writes a changed status every 10 s (nodeStatusUpdateFrequency)."""
LOCK_LONG: Final = 60.0
LOCK_EXPIRES: Final = 300.0
"""Seconds after which HAMi's scheduler takes a lock over, by its default."""
_READERS: Final[Mapping[ReportProfile, str]] = {
    ReportProfile.JSON: "2.8 and later",
    ReportProfile.COLON: "2.5 to 2.7.1",
}


class NodeTraces(msgspec.Struct, frozen=True):
    """The annotations of a Node, and who wrote them.

    - `written`: those that an agent changed last.
    - `last_written`: when an agent last wrote one of them, in UTC.
    - `reported_by`: the writer other than an agent that last changed the register annotation, and
      when (`codec.managed.other_writer`).
    """

    name: str
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    written: frozenset[str] = frozenset()
    last_written: str = ""
    reported_by: str = ""


class ReportSeen(msgspec.Struct, frozen=True):
    """The Node's register annotation.

    - `is_there`: it exists. `gpus`: how many GPUs it names; 0: it cannot be read.
    - `healthy`: the number of slices of its healthy GPUs.
    - `is_json`: it has the form for schedulers from 2.8 on.
    - `differences`: how it differs from what these settings would write, without health.
    - `written`: when an agent last wrote an annotation of the Node; None: not known.
    """

    is_there: bool = False
    gpus: int = 0
    healthy: int = 0
    is_json: bool = True
    differences: tuple[str, ...] = ()
    written: dt.datetime | None = None


class HandshakeSeen(msgspec.Struct, frozen=True):
    """The Node's handshake. `word`: its first word, empty if it is absent.

    `stamp`: its time, None if it has none or names no zone: schedulers write their local time.
    """

    text: str = ""
    word: str = ""
    stamp: dt.datetime | None = None


class OfferSeen(msgspec.Struct, frozen=True):
    """The amounts of the agent's resource in the Node's status."""

    resource: str
    allocatable: int = 0
    capacity: int = 0


def judge_offer(
    node: str, offer: OfferSeen, report: ReportSeen, now: dt.datetime
) -> Finding | None:
    """Judge allocatable against the healthy slices of the register annotation; None: no report."""
    check = PreflightCheck.OFFER
    if not report.gpus:
        return None
    subject = f"allocatable {offer.resource} of Node {node}"
    if offer.allocatable == report.healthy:
        said = f"{offer.allocatable} = healthy {report.healthy} (capacity {offer.capacity})"
        return Finding.ok(check, subject, said)
    less = offer.allocatable < report.healthy
    is_new = report.written is not None and (now - report.written).total_seconds() < KUBELET_WITHIN
    judged = Finding.note if is_new else Finding.wrong
    finding = judged(
        check,
        subject,
        f"{offer.allocatable}, and the register annotation has {report.healthy} healthy slices",
        "look again in 15 s: the kubelet reports every 10 s. If it stays, look at `registered`, "
        "`stream` and `report` in the agent's /readyz?verbose",
        "kube-scheduler counts fewer slices than HAMi's scheduler: pods stay Pending"
        if less
        else "HAMi's scheduler counts fewer slices than the kubelet offers: pods stay Pending",
    )
    return finding.because_of(
        PreflightCheck.AGENT,
        PreflightCheck.KUBELET,
        PreflightCheck.DRIVER,
        PreflightCheck.SECOND,
        PreflightCheck.PLUGIN,
    )


def judge_present_report(node: str, report: ReportSeen, profile: ReportProfile) -> Finding:
    """Judge the register annotation beside an agent with the report profile `profile`."""
    check, subject = PreflightCheck.REPORT, f"{REGISTER} of Node {node}"
    reader = f"HAMi's scheduler {_READERS[profile]}"
    advice = "look at `report` in the agent's /readyz?verbose; the agent writes it within seconds"
    if not report.is_there:
        means = "HAMi's scheduler knows no GPU of this node (node unregistered)"
        return _explained(Finding.wrong(check, subject, "does not exist", advice, means))
    if not report.gpus:
        means = "HAMi's scheduler keeps what it read before, or knows no GPU of this node"
        return _explained(Finding.wrong(check, subject, "cannot be read", advice, means))
    if report.is_json != (profile is ReportProfile.JSON):
        said = f"does not have the form for {reader}, which the settings name"
        advice = "set report.profile to the scheduler's release, and restart the agent"
        return _explained(Finding.wrong(check, subject, said, advice))
    if report.differences:
        more = len(report.differences) - 1
        said = report.differences[0] + (f", and {more} more" if more else "")
        advice = "give this check the agent's settings; if it has them, restart the agent"
        return Finding.note(check, subject, said, advice)
    return Finding.ok(check, subject, f"says what the agent would write, for {reader}")


def _explained(finding: Finding) -> Finding:
    return finding.because_of(
        PreflightCheck.AGENT, PreflightCheck.RIGHTS, PreflightCheck.DRIVER, PreflightCheck.WRITER
    )


def judge_handshake(
    node: str,
    seen: HandshakeSeen,
    report: ReportSeen,
    profile: ReportProfile,
    now: dt.datetime,
) -> Finding:
    """Judge whether a scheduler has read the present report.

    With the profile `json` the agent removes the handshake with each report, and schedulers from
    2.9 on write it again when they read the report. With the others it stamps it every 30 s.
    """
    check, subject = PreflightCheck.HANDSHAKE, f"{HANDSHAKE} of Node {node}"
    if seen.word == "Deleted":
        return Finding.wrong(
            check,
            subject,
            f"the scheduler dropped this node's GPUs ({cap(seen.text, 64)})",
            "restart HAMi's scheduler, which then reads the report again; with a scheduler up to "
            "2.7.1 set report.profile",
            "HAMi's scheduler places no pod on this node",
        )
    if profile.stamps:
        return _judge_stamp(subject, seen, now)
    if seen.word == "Requesting":
        return Finding.ok(check, subject, "a scheduler has read the report since it was written")
    if seen.word:
        return Finding.ok(check, subject, f"{seen.word}: schedulers from 2.8 on do not use it")
    age = None if report.written is None else (now - report.written).total_seconds()
    if not report.is_there or (age is not None and age < READ_WITHIN):
        return Finding.ok(check, subject, "absent: the report is new, or there is none")
    # Schedulers from 2.10 on remove it when they drop a node whose slices are gone.
    if report.gpus and not report.healthy:
        return Finding.ok(check, subject, "absent: the report offers no slice to a scheduler")
    finding = Finding.note(
        check,
        subject,
        "absent: no scheduler has read the present report"
        + ("" if age is None else f", which is {age:.0f} s old"),
        "check that HAMi's scheduler runs; releases from 2.9 on write this within 15 s. Release "
        "2.8 never does: after a change of memory or names alone, restart it",
    )
    return finding.because_of(PreflightCheck.AGENT, PreflightCheck.KUBELET, PreflightCheck.DRIVER)


def _judge_stamp(subject: str, seen: HandshakeSeen, now: dt.datetime) -> Finding:
    check = PreflightCheck.HANDSHAKE
    if not seen.word:
        advice = "look at `report` in the agent's /readyz?verbose"
        means = "HAMi's scheduler drops this node after 60 s"
        finding = Finding.wrong(check, subject, "the agent's stamp is absent", advice, means)
        return finding.because_of(PreflightCheck.AGENT, PreflightCheck.RIGHTS)
    age = 0.0 if seen.stamp is None else (now - seen.stamp).total_seconds()
    if seen.word == "Reported" and age > READ_WITHIN:
        said = f"no scheduler has read the report of {age:.0f} s ago"
        return Finding.note(check, subject, said, "check that HAMi's scheduler runs")
    return Finding.ok(check, subject, f"{seen.word}: the agent's stamps are read")


def judge_writer(node: NodeTraces, report: ReportSeen) -> Finding:
    """Judge who wrote the register annotation last. The agent writes no equal one again."""
    check, subject = PreflightCheck.WRITER, f"{REGISTER} of Node {node.name}"
    if not node.reported_by:
        return Finding.ok(check, subject, "no writer other than the agent is known")
    writer, _, when = cap(node.reported_by, 128).rpartition(" ")
    if report.gpus and not report.differences:
        said = f"{writer} wrote it at {when}, and the agent would write the same"
        return Finding.ok(check, subject, said)
    return Finding.note(
        check,
        subject,
        f"{writer} changed it at {when}, after the agent",
        "find this writer: nearly always it is a second device plugin of this node; stop it",
    )


def judge_lock(node: str, text: str | None, lock: NodeLock | None, now: dt.datetime) -> Finding:
    """Judge the node lock. `text`: the annotation; `lock`: what it says, None if unreadable."""
    check, subject = PreflightCheck.LOCK, f"{MUTEX_LOCK} of Node {node}"
    if text is None:
        return Finding.ok(check, subject, "free")
    remove = f"kubectl annotate node {node} {MUTEX_LOCK}-"
    if lock is None:
        said = f"cannot be read ({cap(text, 64)}): no scheduler ever takes it over"
        return Finding.wrong(check, subject, said, f"remove it: {remove}")
    age = (now - lock.stamp).total_seconds()
    owner = "an unnamed pod" if lock.owner is None else f"pod {cap('/'.join(lock.owner), 128)}"
    said = f"held by {owner} for {age:.0f} s"
    if age <= LOCK_LONG:
        return Finding.ok(check, subject, said)
    advice = (
        "look at that pod's Events. The agent frees the lock of a pod that failed, ended or is "
        f"gone within 35 s; if there is no such pod and the lock stays: {remove}"
    )
    finding = Finding.wrong if age > LOCK_EXPIRES else Finding.note
    return finding(check, subject, said, advice).because_of(PreflightCheck.RIGHTS)


def judge_leftovers(
    node: NodeTraces, stale: Sequence[str], *, stamps: bool, scores: bool
) -> Iterator[Finding]:
    """Judge what HAMi's plugin left: sockets without a process (`stale`), and annotations.

    `stamps`, `scores`: the agent's settings make it write the handshake, the score.
    """
    check = PreflightCheck.LEFTOVERS
    found = False
    for path in stale:
        found = True
        said = "left by HAMi's or NVIDIA's plugin: no process listens there"
        advice = f"rm {path}, if that plugin does not come back"
        yield Finding.note(check, path, said, advice)
    ours = {HANDSHAKE: stamps, SCORE: scores}
    for key, is_ours in ours.items():
        text = node.annotations.get(key)
        if text is None or is_ours or (key == HANDSHAKE and not text.startswith("Reported")):
            continue
        found = True
        said = f"left by HAMi's plugin: these settings never write it ({cap(text, 48)})"
        advice = f"kubectl annotate node {node.name} {key}-"
        yield Finding.note(check, f"{key} of Node {node.name}", said, advice)
    if not found:
        yield Finding.ok(check, f"Node {node.name}", "nothing of HAMi's plugin is left")
