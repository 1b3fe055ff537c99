"""Rules of `doctor`: the agent that runs, and what API server, kubelet and scheduler show."""

import datetime as dt
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from agent.cluster import HANDSHAKE, MUTEX_LOCK, REGISTER, SCORE
from agent.errors import MalformedText, cap
from agent.hami.pod import decode_node_lock, decode_stamp
from agent.hami.register import ReportProfile, decode_handshake, is_json_form, read_register
from agent.kit.units import counted, span
from agent.node.findings import OF_ONE_GPU, SERVED, Check, Finding, Verdict, When, is_ready, judged
from agent.node.preflight import PluginSocket, Right

R = TypeVar("R")

SKEW_LIMIT: Final = 2.0
"""Seconds."""

READ_WITHIN: Final = 60.0
"""Seconds. HAMi's schedulers look at a Node every 15 s; those up to 2.7.1 drop it after 60 s."""

KUBELET_WITHIN: Final = 15.0
"""Seconds. The kubelet writes a changed status every 10 s (nodeStatusUpdateFrequency)."""

LOCK_LONG: Final = 60.0
LOCK_EXPIRES: Final = 300.0
"""Seconds after which HAMi's scheduler takes a lock over, by its default."""


class NodeSight(msgspec.Struct, frozen=True):
    """The Node, as one GET shows it."""

    name: str
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)

    allocatable: int = 0
    capacity: int = 0
    """The amounts of the agent's resource in its status."""

    written: frozenset[str] = frozenset()
    """The annotations that an agent changed last."""

    last_written: str = ""
    """When an agent last wrote one of them, in UTC."""

    reported_by: str = ""
    """The writer other than an agent that last changed the register annotation, and when.

    Source: `other_writer` of agent/kube/objects.py.
    """

    skew: float | None = None
    """See `skew_of`; None: the answer had no time."""


# The API server: whether it can be asked, this account's rights, its clock, the Node.


def skew_of(server: dt.datetime, before: dt.datetime, after: dt.datetime) -> float:
    """By how many seconds the API server's clock is certainly ahead of this node's; < 0: behind.

    `server`: the time in an answer, cut to a second; `before` and `after`: this node's clock around
    the request. 0: they may be equal.
    """
    least = (server - after).total_seconds()
    most = (server - before).total_seconds() + 1.0  # the resolution of an HTTP header's time
    return max(least, 0.0) + min(most, 0.0)


def judge_node(name: str, node: NodeSight | None) -> Iterator[Finding]:
    """Judge whether the Node exists, and its label."""
    if node is None:
        advice = "set node.name (--node-name, NODE_NAME) to the Node's name in Kubernetes"
        said = "the API server knows no such Node"
        yield Finding("P-NODE", "wrong", f"Node {name}", said, advice)
        return

    has_report = REGISTER in node.annotations
    said = "exists, already registered" if has_report else "exists, not registered yet"
    yield Finding("P-NODE", "ok", f"Node {name}", said)

    subject = f"label gpu=on of Node {name}"
    if node.labels.get("gpu") == "on":
        yield Finding("P-LABEL", "ok", subject, "is set")
    else:
        advice = "by default, HAMi's DaemonSet and the agent's select nodes by it"
        yield Finding("P-LABEL", "note", subject, "is not set", advice)


def judge_rights(server: str, denied: Sequence[Right], unasked: Sequence[Right]) -> Finding:
    """Judge the agent's permissions.

    `denied`: those that this account lacks. `unasked`: those that the agent's account has and this
    account need not have.
    """
    if denied:
        said = f"these are denied: {_words(denied)}"
        advice = "grant them to this account: the chart's ClusterRole lists them"
        return Finding("P-RIGHTS", "wrong", server, said, advice)

    if unasked:
        said = f"this account can read what the agent reads; not checked: {_words(unasked)}"
        advice = "the agent's account has them: run this check as the agent once it is installed"
        return Finding("P-RIGHTS", "note", server, said, advice)

    return Finding("P-RIGHTS", "ok", server, "all permissions of the agent are granted")


def judge_excess(server: str, excess: Sequence[Right]) -> Finding:
    """Judge the permissions that are granted, and not needed by the agent."""
    if not excess:
        said = "none of the rights that the agent does not need is granted, as far as asked"
        return Finding("P-EXCESS", "ok", server, said)

    said = f"wider than needed: {_words(excess)}"
    advice = "give it the chart's ClusterRole, or the kubeconfig of this node's own identity"
    return Finding("P-EXCESS", "note", server, said, advice)


def judge_clock(server: str, skew: float | None) -> Finding:
    """Judge the clocks of the API server and of this node. `skew`: see `skew_of`."""
    if skew is None:
        advice = "compare `date -u` on both machines"
        return Finding("P-CLOCK", "unknown", server, "its answers have no time (Date)", advice)

    if abs(skew) > SKEW_LIMIT:
        said = f"its clock is {span(abs(skew))} {'ahead of' if skew > 0 else 'behind'} this node's"
        advice = "synchronise both clocks (timedatectl, chronyc tracking)"
        return Finding("P-CLOCK", "note", server, said, advice)

    said = f"its clock and this node's differ by at most {SKEW_LIMIT:g} s"
    return Finding("P-CLOCK", "ok", server, said)


def _words(rights: Sequence[Right]) -> str:
    return ", ".join(right.words for right in rights)


class AgentAnswer(msgspec.Struct, frozen=True):
    """The checks of the agent that answers at the socket `path`."""

    path: str
    checks: tuple[Check, ...] = ()

    failure: str = ""
    """Why there is no answer; empty: there is one."""

    denied: bool = False
    """This user may not use the socket."""


def judge_agent(answer: AgentAnswer) -> Iterator[Finding]:
    """Judge the agent's readiness: one finding for each of its checks that fails."""
    if answer.denied:
        advice = "run this check as root, or as the agent's user"
        yield Finding("P-AGENT", "unknown", answer.path, answer.failure, advice)
        return

    if answer.failure:
        advice = (
            "start it (systemctl start hami-agent, or look at the DaemonSet's pod of this node), "
            "and give this check the agent's settings (--run-dir)"
        )
        yield Finding(
            "P-AGENT", "wrong", answer.path, f"no agent answers: {answer.failure}", advice
        )
        return

    for check in answer.checks:
        if check.ok:
            continue

        means = "" if check.required else SERVED
        advice = "see /readyz?verbose in the runbook, Start here, and the agent's log"

        if check.name in {"gpu_health", "cdi"}:
            advice = "run `hami-agent status`: it says of each GPU what to do"
            means = "" if check.required else OF_ONE_GPU

        verdict: Verdict = "wrong" if check.required else "note"
        yield Finding("P-AGENT", verdict, check.name, check.text or "fails", advice, means)

    if is_ready(answer.checks):
        passed = counted(sum(check.ok for check in answer.checks), "check")
        yield Finding("P-AGENT", "ok", answer.path, f"the agent is ready; {passed} of it passed")


# What HAMi's scheduler and the kubelet show of this node, as the API server has it.


class ReportSeen(msgspec.Struct, frozen=True):
    """The Node's register annotation."""

    is_there: bool = False

    gpus: int = 0
    """How many GPUs it names; 0: it cannot be read."""

    healthy: int = 0
    """The number of slices of its healthy GPUs."""

    is_json: bool = True
    """It has the form for schedulers from 2.8 on."""

    differences: tuple[str, ...] = ()
    """How it differs from what these settings would write, without health."""

    written: dt.datetime | None = None
    """When an agent last wrote an annotation of the Node; None: not known."""


def _decoded(decode: Callable[[str], R], text: str | None) -> R | None:
    """What the text says; None if there is none, or it cannot be read."""
    try:
        return None if text is None else decode(text)
    except MalformedText:
        return None


def read_report(node: NodeSight, differences: tuple[str, ...]) -> ReportSeen:
    """Read the Node's register annotation. `differences`: see ReportSeen."""
    text = node.annotations.get(REGISTER)
    if text is None:
        return ReportSeen()

    gpus = read_register(text)
    written = _decoded(decode_stamp, node.last_written) if REGISTER in node.written else None

    return ReportSeen(
        is_there=True,
        gpus=len(gpus),
        healthy=sum(gpu.split_count for gpu in gpus if gpu.healthy),
        is_json=is_json_form(text),
        differences=differences,
        written=written,
    )


def judge_offer(node: NodeSight, resource: str, report: ReportSeen, now: dt.datetime) -> Finding:
    """Judge allocatable against the healthy slices of the register annotation."""
    offered = node.allocatable
    is_new = report.written is not None and (now - report.written).total_seconds() < KUBELET_WITHIN
    counts = (offered, "kube-scheduler"), (report.healthy, "HAMi's scheduler")
    (_, fewer), (_, more) = sorted(counts)

    return judged(
        "P-OFFER",
        f"allocatable {resource} of Node {node.name}",
        f"{offered} = healthy {report.healthy} (capacity {node.capacity})",
        When(
            not report.gpus,
            "note",
            f"{offered}; there is no readable register annotation to compare it with",
            "repair what is said of the annotation (P-REPORT) and of the agent (P-AGENT)",
        ),
        When(
            offered != report.healthy,
            "note" if is_new else "wrong",
            f"{offered}, and the register annotation has {report.healthy} healthy slices",
            "look again in 15 s: the kubelet reports every 10 s. If it stays, look at "
            "`registered`, `stream` and `report` in the agent's /readyz?verbose",
            f"{fewer} counts fewer slices than {more}: pods stay Pending",
        ),
    )


def judge_report(node: str, report: ReportSeen, running: ReportProfile | None) -> Finding:
    """Judge the register annotation. `running`: the report profile of the agent; None: none runs.

    Before the first start it is another plugin's, and only its content counts.
    """
    releases = "2.8 and later" if running is ReportProfile.JSON else "2.5 to 2.7.1"
    reader = f"HAMi's scheduler {releases}" if running else ""
    more = f", and {len(report.differences) - 1} more" if len(report.differences) > 1 else ""
    look = "look at `report` in the agent's /readyz?verbose; the agent writes it within seconds"

    return judged(
        "P-REPORT",
        f"{REGISTER} of Node {node}",
        "says what the agent would write" + (f", for {reader}" if running else ""),
        When(
            bool(running) and not report.is_there,
            "wrong",
            "does not exist",
            look,
            "HAMi's scheduler knows no GPU of this node (node unregistered)",
        ),
        When(
            bool(running) and not report.gpus,
            "wrong",
            "cannot be read",
            look,
            "HAMi's scheduler keeps what it read before, or knows no GPU of this node",
        ),
        When(
            bool(running) and report.is_json != (running is ReportProfile.JSON),
            "wrong",
            f"does not have the form for {reader}, which the settings name",
            "set report.profile to the scheduler's release, and restart the agent",
        ),
        When(
            bool(report.differences),
            "note",
            f"{''.join(report.differences[:1])}{more}",
            "give this check the agent's settings; if it has them, restart the agent"
            if running
            else "unless you want this change, give the agent the settings of the plugin before it "
            "(HAMi's ConfigMaps, report.profile)",
        ),
    )


def judge_handshake(
    node: NodeSight, report: ReportSeen, profile: ReportProfile, now: dt.datetime
) -> Finding:
    """Judge by the handshake whether a scheduler has read the present report.

    With the profile `json` the agent removes the handshake with each report, and schedulers from
    2.9 on write it again when they read the report. With the others it stamps it every 30 s.
    """
    text = node.annotations.get(HANDSHAKE, "")
    handshake = _decoded(decode_handshake, text)
    word = handshake.word.value if handshake else text.partition(" ")[0][:32]

    # Schedulers write their local time without a zone: only a stamp with one has an age.
    stamp = handshake.stamp if handshake and handshake.stamp and handshake.stamp.tzinfo else now
    stamped, age = (now - stamp).total_seconds(), (now - (report.written or now)).total_seconds()

    # Schedulers from 2.10 on remove it when they drop a node whose slices are gone.
    offers = report.is_there and (report.healthy > 0 or not report.gpus)
    is_new = report.written is not None and age < READ_WITHIN
    well = {
        "": "absent: the report is new, offers no slice, or there is none",
        "Requesting": "a scheduler has read the report since it was written",
    }.get(word, f"{word}: schedulers from 2.8 on do not use it")

    return judged(
        "P-HANDSHAKE",
        f"{HANDSHAKE} of Node {node.name}",
        f"{word}: the agent's stamps are read" if profile.stamps else well,
        When(
            word == "Deleted",
            "wrong",
            f"the scheduler dropped this node's GPUs ({cap(text, 64)})",
            "restart HAMi's scheduler, which then reads the report again; with a scheduler up to "
            "2.7.1 set report.profile",
            "HAMi's scheduler places no pod on this node",
        ),
        When(
            profile.stamps and not word,
            "wrong",
            "the agent's stamp is absent",
            "look at `report` in the agent's /readyz?verbose",
            "HAMi's scheduler drops this node after 60 s",
        ),
        When(
            profile.stamps and word == "Reported" and stamped > READ_WITHIN,
            "note",
            f"no scheduler has read the report of {span(stamped)} ago",
            "check that HAMi's scheduler runs",
        ),
        When(
            not profile.stamps and not word and offers and not is_new,
            "note",
            "absent: no scheduler has read the present report"
            + (f", which is {span(age)} old" if report.written else ""),
            "check that HAMi's scheduler runs; releases from 2.9 on write this within 15 s. "
            "Release 2.8 never does: after a change of memory or names alone, restart it",
        ),
    )


def judge_writer(node: NodeSight, report: ReportSeen) -> Finding:
    """Judge who wrote the register annotation last. The agent writes no equal one again."""
    subject = f"{REGISTER} of Node {node.name}"
    writer, _, when = cap(node.reported_by, 128).rpartition(" ")
    if not writer:
        return Finding("P-WRITER", "ok", subject, "no writer other than the agent is known")

    if report.gpus > 0 and not report.differences:
        said = f"{writer} wrote it at {when}, and the agent would write the same"
        return Finding("P-WRITER", "ok", subject, said)

    said = f"{writer} changed it at {when}, after the agent"
    advice = "find this writer: nearly always it is a second device plugin of this node; stop it"
    return Finding("P-WRITER", "note", subject, said, advice)


def judge_lock(node: NodeSight, now: dt.datetime) -> Finding:
    """Judge the node lock."""
    subject, text = f"{MUTEX_LOCK} of Node {node.name}", node.annotations.get(MUTEX_LOCK)
    if text is None:
        return Finding("P-LOCK", "ok", subject, "free")

    lock = _decoded(decode_node_lock, text)
    remove = f"kubectl annotate node {node.name} {MUTEX_LOCK}-"

    if lock is None:
        said = f"cannot be read ({cap(text, 64)}): no scheduler ever takes it over"
        return Finding("P-LOCK", "wrong", subject, said, f"remove it: {remove}")

    seconds = (now - lock.stamp).total_seconds()
    owner = f"pod {cap('/'.join(lock.owner), 128)}" if lock.owner else "an unnamed pod"
    said = f"held by {owner} for {span(seconds)}"

    if seconds <= LOCK_LONG:
        return Finding("P-LOCK", "ok", subject, said)

    advice = (
        "look at that pod's Events. The agent frees the lock of a pod that failed, ended or is "
        f"gone within 35 s; if there is no such pod and the lock stays: {remove}"
    )
    verdict: Verdict = "wrong" if seconds > LOCK_EXPIRES else "note"
    return Finding("P-LOCK", verdict, subject, said, advice)


def judge_leftovers(
    node: NodeSight | None, sockets: Sequence[PluginSocket], *, stamps: bool, scores: bool
) -> Iterator[Finding]:
    """Judge what HAMi's plugin left: sockets without a process, and annotations of the Node.

    `node`: None before the first start, when its annotations may be of a plugin that serves.
    `stamps`, `scores`: the agent's settings make it write the handshake, the score.
    """
    stale = [socket.path for socket in sockets if socket.theirs and not socket.alive]
    for path in stale:
        said = "left by HAMi's or NVIDIA's plugin: no process listens there"
        advice = f"rm {path}, if that plugin does not come back"
        yield Finding("P-LEFTOVERS", "note", path, said, advice)

    if node is None:
        return

    notes = node.annotations
    left = [HANDSHAKE] if not stamps and notes.get(HANDSHAKE, "").startswith("Reported") else []
    left += [SCORE] if not scores and SCORE in notes else []

    for key in left:
        said = f"left by HAMi's plugin: these settings never write it ({cap(notes[key], 48)})"
        advice = f"kubectl annotate node {node.name} {key}-"
        yield Finding("P-LEFTOVERS", "note", f"{key} of Node {node.name}", said, advice)

    if not stale and not left:
        yield Finding("P-LEFTOVERS", "ok", f"Node {node.name}", "nothing of HAMi's plugin is left")
