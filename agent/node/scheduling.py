"""What the scheduler reads of a Node, and what runs there."""

import datetime as dt
import difflib
import enum
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from agent.cluster import HANDSHAKE, MUTEX_LOCK, REGISTER, SCORE
from agent.errors import MalformedText, cap
from agent.hami.pod import decode_node_lock, decode_stamp
from agent.hami.register import ReportProfile, decode_handshake, is_json_form, read_register
from agent.node.findings import OF_ONE_GPU, Finding, PreflightCheck, PreflightVerdict, counted
from agent.node.preflight import PathFacts, PluginSocket

# Judges the names of Nodes in settings: whether such a Node exists.

R = TypeVar("R")

LIKENESS: Final = 0.8
"""From this ratio on, a name may be a misspelt name of this Node."""
ASKED: Final = 32
"""The most names for which the API server is asked."""


class NamedNode(enum.Enum):
    """Whether a Node of a name in the settings exists."""

    THERE = "there"
    MISSING = "missing"
    UNSEEN = "unseen"
    """This account may not look, or was not asked."""


def judge_entries(node: str, names: Mapping[str, NamedNode], where: str) -> Iterator[Finding]:
    """Judge the names in nodeconfig and in profiles. `where`: the files, for messages."""
    check = PreflightCheck.ENTRIES
    lost = False
    for name, state in names.items():
        alike = node not in names and is_alike(name, node)
        if state is NamedNode.THERE or (state is NamedNode.UNSEEN and not alike):
            continue
        lost = True
        meant = f"; did you mean {node}?" if alike else ""
        said = f"an entry for {cap(name, 64)} matches no Node{meant}"
        if state is NamedNode.UNSEEN:
            said = f"an entry for {cap(name, 64)} does not match this Node{meant}"
        advice = "write the Node's name as `kubectl get nodes` shows it, or remove the entry"
        yield Finding.note(check, where, said, advice)
    if not lost:
        unseen = sum(state is NamedNode.UNSEEN for one, state in names.items() if one != node)
        rest = f"whether {unseen} of them exist was not asked" if unseen else "each exists"
        said = f"{counted(len(names), 'Node')} named; {rest}" if names else "no entry names a Node"
        yield Finding.ok(check, where, said)


def is_alike(name: str, node: str) -> bool:
    """True if `name` may be meant for the Node `node`: another case, domain or spelling."""
    one, other = name.lower(), node.lower()
    if one.partition(".")[0] == other.partition(".")[0]:
        return True
    # Nodes of one pool differ by their number alone.
    if one.rstrip("0123456789") == other.rstrip("0123456789"):
        return False
    return difflib.SequenceMatcher(None, one, other).ratio() >= LIKENESS


# Judges the agent that runs on this node, by its own readiness page, and whether it is alone.

_LINE: Final = re.compile(r"\[([-+!])\](\S+) (?:ok|(?:failed|degraded): (.*))")
_OURS: Final = re.compile(r".*/hami-(.+)-[0-9a-f]{8}\.sock")
"""The path of an agent's socket. Source: agent/kubelet/door.py, socket_name."""
_CLUSTER: Final = (PreflightCheck.NODE, PreflightCheck.RIGHTS, PreflightCheck.SETTINGS)
_CORE: Final = (PreflightCheck.LIBRARY, PreflightCheck.PRELOAD)
_CAUSES: Final[Mapping[str, tuple[PreflightCheck, ...]]] = {
    "state": (PreflightCheck.PATHS,),
    "server": (PreflightCheck.KUBELET, PreflightCheck.PATHS),
    "registered": (PreflightCheck.KUBELET, PreflightCheck.DRIVER),
    "stream": (PreflightCheck.KUBELET,),
    "api": _CLUSTER,
    "api_synced": _CLUSTER,
    "report": (*_CLUSTER, PreflightCheck.WRITER),
    "settings": (PreflightCheck.SETTINGS,),
    "inventory": (PreflightCheck.DRIVER,),
    "driver": (PreflightCheck.DRIVER,),
    "gpus": (PreflightCheck.DRIVER,),
    "gpus_answering": (PreflightCheck.DRIVER,),
    "cdi": (PreflightCheck.CDI,),
    "offer": (*_CORE, PreflightCheck.PATHS, PreflightCheck.KUBELET),
}
"""The checks of the doctor that explain a failed check of the agent's readiness, by its name."""
_OF_GPUS: Final = "run `hami-agent status`: it says of each GPU what to do"
_READ: Final = "see /readyz?verbose in the runbook, Start here, and the agent's log"


class AgentAnswer(msgspec.Struct, frozen=True):
    """The answer of `/readyz?verbose` by the agent's socket at `path`.

    `failure`: why there is none; `denied`: this user may not use the socket.
    """

    path: str
    status: int = 0
    text: str = ""
    failure: str = ""
    denied: bool = False


def judge_agent(answer: AgentAnswer) -> Iterator[Finding]:
    """Judge the agent's readiness: one finding for each of its checks that fails."""
    check = PreflightCheck.AGENT
    if answer.denied:
        advice = "run this check as root, or as the agent's user"
        yield Finding.unknown(check, answer.path, answer.failure, advice)
        return
    if answer.failure:
        advice = (
            "start it (systemctl start hami-agent, or look at the DaemonSet's pod of this node), "
            "and give this check the agent's settings (--run-dir)"
        )
        yield Finding.wrong(check, answer.path, f"no agent answers: {answer.failure}", advice)
        return
    lines = [match for match in map(_LINE.fullmatch, answer.text.splitlines()) if match]
    if not lines or answer.status not in {200, 503}:
        said = f"answers {answer.status}, but not as an agent"
        yield Finding.wrong(check, answer.path, said, "give --run-dir of the agent")
        return
    failed = [match for match in lines if match[1] != "+"]
    for sign, name, text in (match.groups() for match in failed):
        is_of_gpus = name in {"gpu_health", "cdi"}
        advice, said = _OF_GPUS if is_of_gpus else _READ, text or "fails"
        finding = Finding.wrong(check, name, said, advice)
        if sign != "-":
            means = OF_ONE_GPU if is_of_gpus else ""
            finding = Finding.note(check, name, said, advice, means)
        yield finding.because_of(*_CAUSES.get(name, ()))
    if not any(match[1] == "-" for match in failed):
        said = f"the agent is ready; {counted(len(lines) - len(failed), 'check')} of it passed"
        yield Finding.ok(check, answer.path, said)


def judge_instances(
    lock: PathFacts, holder: str, waiting: Sequence[int], sockets: Sequence[PluginSocket]
) -> Finding:
    """Judge whether one agent serves here.

    `lock`: the lock file in the run directory; `holder`: what it says of its holder. `waiting`: the
    other processes of agents on this host. `sockets`: all in the kubelet's directory.
    """
    check = PreflightCheck.SECOND
    serving = [one.path for one in sockets if one.alive and _OURS.fullmatch(one.path)]
    if len(serving) > 1:
        return Finding.wrong(
            check,
            ", ".join(serving),
            f"{counted(len(serving), 'agent')} serve the kubelet of this node",
            "stop all but one: the systemd service and the DaemonSet exclude each other",
        )
    if waiting:
        pids = ", ".join(map(str, waiting))
        return Finding.note(
            check,
            lock.path,
            f"more agents run on this host (pid {pids}) than the one that holds the lock",
            "nothing during an update: the next agent waits there. Otherwise stop it, because it "
            "takes over as soon as the other one ends",
            "pods are not affected: only the agent that holds the lock serves",
        )
    # The text stays in the file when its holder has ended.
    said = f"last taken by {holder}" if holder else "names no holder"
    said = f"{said}; {counted(len(serving), 'live socket')} of agents at the kubelet"
    return Finding(check, PreflightVerdict.OK, lock.path, said)


# Judges what HAMi's scheduler and the kubelet show of this node, as the API server has it.

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
      when (`kube.objects.other_writer`).
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


class OfferSeen(msgspec.Struct, frozen=True):
    """The amounts of the agent's resource in the Node's status."""

    resource: str
    allocatable: int = 0
    capacity: int = 0


def _decoded(decode: Callable[[str], R], text: str | None) -> R | None:
    """What the text says; None if there is none, or it cannot be read."""
    try:
        return None if text is None else decode(text)
    except MalformedText:
        return None


def read_report(node: NodeTraces, differences: tuple[str, ...]) -> ReportSeen:
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
        differences=differences if gpus else (),
        written=written,
    )


def judge_offer(
    node: str, offer: OfferSeen, report: ReportSeen, now: dt.datetime
) -> Iterator[Finding]:
    """Judge allocatable against the healthy slices of the register annotation, if it has any."""
    check = PreflightCheck.OFFER
    if not report.gpus:
        return
    subject = f"allocatable {offer.resource} of Node {node}"
    if offer.allocatable == report.healthy:
        said = f"{offer.allocatable} = healthy {report.healthy} (capacity {offer.capacity})"
        yield Finding.ok(check, subject, said)
        return
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
    yield finding.because_of(
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
        said, means = "does not exist", "HAMi's scheduler knows no GPU of this node"
        means = f"{means} (node unregistered)"
    elif not report.gpus:
        said = "cannot be read"
        means = "HAMi's scheduler keeps what it read before, or knows no GPU of this node"
    elif report.is_json != (profile is ReportProfile.JSON):
        said, means = f"does not have the form for {reader}, which the settings name", ""
        advice = "set report.profile to the scheduler's release, and restart the agent"
    elif report.differences:
        more = len(report.differences) - 1
        said = report.differences[0] + (f", and {more} more" if more else "")
        advice = "give this check the agent's settings; if it has them, restart the agent"
        return Finding.note(check, subject, said, advice)
    else:
        return Finding.ok(check, subject, f"says what the agent would write, for {reader}")
    return Finding.wrong(check, subject, said, advice, means).because_of(
        PreflightCheck.AGENT, PreflightCheck.RIGHTS, PreflightCheck.DRIVER, PreflightCheck.WRITER
    )


def judge_handshake(
    node: str, text: str, report: ReportSeen, profile: ReportProfile, now: dt.datetime
) -> Finding:
    """Judge by the handshake whether a scheduler has read the present report.

    With the profile `json` the agent removes the handshake with each report, and schedulers from
    2.9 on write it again when they read the report. With the others it stamps it every 30 s.
    """
    check, subject = PreflightCheck.HANDSHAKE, f"{HANDSHAKE} of Node {node}"
    said = _decoded(decode_handshake, text)
    word = said.word.value if said else text.partition(" ")[0][:32]
    if word == "Deleted":
        return Finding.wrong(
            check,
            subject,
            f"the scheduler dropped this node's GPUs ({cap(text, 64)})",
            "restart HAMi's scheduler, which then reads the report again; with a scheduler up to "
            "2.7.1 set report.profile",
            "HAMi's scheduler places no pod on this node",
        )
    if profile.stamps:
        return _judge_stamp(subject, word, said.stamp if said else None, now)
    if word == "Requesting":
        return Finding.ok(check, subject, "a scheduler has read the report since it was written")
    if word:
        return Finding.ok(check, subject, f"{word}: schedulers from 2.8 on do not use it")
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


def _judge_stamp(subject: str, word: str, stamp: dt.datetime | None, now: dt.datetime) -> Finding:
    check = PreflightCheck.HANDSHAKE
    if not word:
        advice = "look at `report` in the agent's /readyz?verbose"
        means = "HAMi's scheduler drops this node after 60 s"
        finding = Finding.wrong(check, subject, "the agent's stamp is absent", advice, means)
        return finding.because_of(PreflightCheck.AGENT, PreflightCheck.RIGHTS)
    # Schedulers write their local time without a zone: only a stamp with one has an age.
    age = (now - stamp).total_seconds() if stamp and stamp.tzinfo else 0.0
    if word == "Reported" and age > READ_WITHIN:
        said = f"no scheduler has read the report of {age:.0f} s ago"
        return Finding.note(check, subject, said, "check that HAMi's scheduler runs")
    return Finding.ok(check, subject, f"{word}: the agent's stamps are read")


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


def judge_lock(node: str, text: str | None, now: dt.datetime) -> Finding:
    """Judge the node lock. `text`: the annotation, None if it is absent."""
    check, subject = PreflightCheck.LOCK, f"{MUTEX_LOCK} of Node {node}"
    if text is None:
        return Finding.ok(check, subject, "free")
    lock = _decoded(decode_node_lock, text)
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
