"""Rules of `doctor`: the agent that runs, and what API server, kubelet and scheduler show."""

import datetime as dt
import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

import msgspec

from agent.cluster import HANDSHAKE, MUTEX_LOCK, REGISTER, SCORE
from agent.errors import MalformedText, cap
from agent.hami.pod import decode_node_lock, decode_stamp
from agent.hami.register import ReportProfile, decode_handshake, is_json_form, read_register
from agent.node.findings import OF_ONE_GPU, CheckId, Finding, Verdict, counted
from agent.node.preflight import PathFacts, PluginSocket, Right

R = TypeVar("R")

HAMI_LABEL: Final = ("gpu", "on")
"""The label by which HAMi's and the agent's DaemonSet select nodes."""
ASKED: Final = 32
"""The most names of Nodes for which the API server is asked."""
LIKENESS: Final = 0.8
"""From this ratio on, a name may be a misspelt name of this Node."""
SKEW_LIMIT: Final = 2.0
"""Seconds."""
_RESOLUTION: Final = dt.timedelta(seconds=1)
"""Of the time in an HTTP header."""
READ_WITHIN: Final = 60.0
"""Seconds. HAMi's schedulers look at a Node every 15 s; those up to 2.7.1 drop it after 60 s."""
KUBELET_WITHIN: Final = 15.0
"""Seconds. The kubelet writes a changed status every 10 s (nodeStatusUpdateFrequency)."""
LOCK_LONG: Final = 60.0
LOCK_EXPIRES: Final = 300.0
"""Seconds after which HAMi's scheduler takes a lock over, by its default."""


class NodeSight(msgspec.Struct, frozen=True):
    """The Node, as one GET shows it.

    - `allocatable`, `capacity`: the amounts of the agent's resource in its status.
    - `written`: the annotations that an agent changed last.
    - `last_written`: when an agent last wrote one of them, in UTC.
    - `reported_by`: the writer other than an agent that last changed the register annotation, and
      when (`kube.objects.other_writer`).
    - `skew`: see `skew_of`; None: the answer had no time.
    """

    name: str
    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    annotations: Mapping[str, str] = msgspec.field(default_factory=dict)
    allocatable: int = 0
    capacity: int = 0
    written: frozenset[str] = frozenset()
    last_written: str = ""
    reported_by: str = ""
    skew: float | None = None


class ClusterAnswer(msgspec.Struct, frozen=True):
    """The API server's answers about this node.

    - `exists`: whether the Node does; None: not asked, because permissions are missing.
    - `denied`: permissions of the agent that this account lacks. `unasked`: those that the agent's
      account has and this account need not have. `excess`: granted, and not needed by the agent.
    - `plugins`: pods of other device plugins for NVIDIA GPUs on this node.
    - `failure`: why there are no further answers. `remedy`: what to do about it, if known.
    """

    server: str
    exists: bool | None = None
    node: NodeSight | None = None
    denied: tuple[Right, ...] = ()
    unasked: tuple[Right, ...] = ()
    excess: tuple[Right, ...] = ()
    plugins: tuple[str, ...] = ()
    failure: str = ""
    remedy: str | None = None


# The API server: whether it can be asked, this account's rights, its clock, the Node.


def skew_of(server: dt.datetime, before: dt.datetime, after: dt.datetime) -> float:
    """By how many seconds the API server's clock is certainly ahead of this node's; < 0: behind.

    `server`: the time in an answer, cut to a second; `before` and `after`: this node's clock around
    the request. 0: they may be equal.
    """
    least = (server - after).total_seconds()
    most = (server + _RESOLUTION - before).total_seconds()
    return max(least, 0.0) + min(most, 0.0)


def judge_cluster(node: str, answer: ClusterAnswer, *, running: bool) -> Iterator[Finding]:
    """Judge the Node, its label, the rights and the clock. `running`: an agent does."""
    server = answer.server
    if answer.failure:
        advice = answer.remedy or "repair the connection or the permissions, and run this again"
        # An agent that runs says itself what it lacks of the API server.
        yield Finding("P-NODE", "unknown" if running else "WRONG", server, answer.failure, advice)
        return
    sight = answer.node
    if sight is not None:
        registered = "already registered" if REGISTER in sight.annotations else "not registered yet"
        yield Finding("P-NODE", "ok", f"Node {node}", f"exists, {registered}")
        key, value = HAMI_LABEL
        subject = f"label {key}={value} of Node {node}"
        if sight.labels.get(key) == value:
            yield Finding("P-LABEL", "ok", subject, "is set")
        else:
            advice = "by default, HAMi's DaemonSet and the agent's select nodes by it"
            yield Finding("P-LABEL", "note", subject, "is not set", advice)
    elif answer.exists is False:
        said = "the API server knows no such Node"
        advice = "set node.name (--node-name, NODE_NAME) to the Node's name in Kubernetes"
        yield Finding("P-NODE", "WRONG", f"Node {node}", said, advice)
    if answer.denied:
        said = f"these are denied: {', '.join(right.words for right in answer.denied)}"
        advice = "grant them to this account: the chart's ClusterRole lists them"
        yield Finding("P-RIGHTS", "WRONG", server, said, advice)
    elif answer.unasked:
        unasked = ", ".join(right.words for right in answer.unasked)
        said = f"this account can read what the agent reads; these were not checked: {unasked}"
        advice = "the agent's account has them: run this check again as the agent once it is "
        yield Finding("P-RIGHTS", "note", server, said, f"{advice}installed")
    else:
        yield Finding("P-RIGHTS", "ok", server, "all permissions of the agent are granted")
    if running:
        yield judge_excess(server, answer.excess)
        if sight is not None:
            yield judge_clock(server, sight.skew)


def judge_excess(server: str, granted: Sequence[Right]) -> Finding:
    """Judge the rights of `UNNEEDED` that are granted."""
    if not granted:
        said = "none of the rights that the agent does not need is granted, as far as asked"
        return Finding("P-EXCESS", "ok", server, said)
    said = f"wider than needed: {', '.join(right.words for right in granted)}"
    advice = "give the agent the chart's ClusterRole, or the kubeconfig of this node's own identity"
    return Finding("P-EXCESS", "note", server, said, advice)


def judge_clock(server: str, skew: float | None) -> Finding:
    """Judge the difference of the clocks; None: the answers had no time."""
    if skew is None:
        said, advice = "its answers have no time (Date)", "compare `date -u` on both machines"
        return Finding("P-CLOCK", "unknown", server, said, advice)
    if abs(skew) <= SKEW_LIMIT:
        said = f"its clock and this node's differ by at most {SKEW_LIMIT:g} s"
        return Finding("P-CLOCK", "ok", server, said)
    said = f"its clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this node's"
    advice = "synchronise both clocks (timedatectl, chronyc tracking)"
    return Finding("P-CLOCK", "note", server, said, advice)


def judge_entries(node: str, names: Mapping[str, bool | None], where: str) -> Iterator[Finding]:
    """Judge the names of Nodes in nodeconfig and in profiles. `where`: the files, for messages.

    The value of a name: whether such a Node exists; None: this account may not look.
    """
    lost = False
    for name, exists in names.items():
        alike = node not in names and is_alike(name, node)
        if exists or (exists is None and not alike):
            continue
        lost = True
        said = f"an entry for {cap(name, 64)} matches no Node"
        if exists is None:
            said = f"an entry for {cap(name, 64)} does not match this Node"
        said += f"; did you mean {node}?" if alike else ""
        advice = "write the Node's name as `kubectl get nodes` shows it, or remove the entry"
        yield Finding("P-ENTRIES", "note", where, said, advice)
    if not lost:
        unseen = sum(exists is None for name, exists in names.items() if name != node)
        rest = f"whether {unseen} of them exist was not asked" if unseen else "each exists"
        said = f"{counted(len(names), 'Node')} named; {rest}" if names else "no entry names a Node"
        yield Finding("P-ENTRIES", "ok", where, said)


def is_alike(name: str, node: str) -> bool:
    """True if `name` may be meant for the Node `node`: another case, domain or spelling."""
    one, other = name.lower(), node.lower()
    if one.partition(".")[0] == other.partition(".")[0]:
        return True
    # Nodes of one pool differ by their number alone.
    if one.rstrip("0123456789") == other.rstrip("0123456789"):
        return False
    return difflib.SequenceMatcher(None, one, other).ratio() >= LIKENESS


# The agent that runs on this node, by its own readiness page, and whether it is alone.

_LINE: Final = re.compile(r"\[([-+!])\](\S+) (?:ok|(?:failed|degraded): (.*))")
_OURS: Final = re.compile(r".*/hami-(.+)-[0-9a-f]{8}\.sock")
"""The path of an agent's socket. Source: agent/kubelet/door.py, socket_name."""
_CLUSTER: Final = ("P-NODE", "P-RIGHTS", "P-SETTINGS")
_CAUSES: Final[Mapping[str, tuple[CheckId, ...]]] = {
    "state": ("P-PATHS",),
    "server": ("P-KUBELET", "P-PATHS"),
    "registered": ("P-KUBELET", "P-DRIVER"),
    "stream": ("P-KUBELET",),
    "api": _CLUSTER,
    "api_synced": _CLUSTER,
    "report": (*_CLUSTER, "P-WRITER"),
    "settings": ("P-SETTINGS",),
    "inventory": ("P-DRIVER",),
    "driver": ("P-DRIVER",),
    "gpus": ("P-DRIVER",),
    "gpus_answering": ("P-DRIVER",),
    "cdi": ("P-CDI",),
    "offer": ("P-LIBRARY", "P-PRELOAD", "P-PATHS", "P-KUBELET"),
}
"""The checks of the doctor that explain a failed check of the agent's readiness, by its name."""
_LOOKS_AGAIN: Final = "the agent looks every 10 s: run this check again in 10 s"


class AgentAnswer(msgspec.Struct, frozen=True):
    """The answer of `/readyz?verbose` by the agent's socket at `path`.

    `failure`: why there is none; `denied`: this user may not use the socket.
    """

    path: str
    status: int = 0
    text: str = ""
    failure: str = ""
    denied: bool = False


def judge_agent(answer: AgentAnswer, repaired: Mapping[str, str]) -> Iterator[Finding]:
    """Judge the agent's readiness: one finding for each of its checks that fails.

    `repaired`: words of the agent about the host that no longer hold, each with what was seen now:
    the agent looks every 10 s, and one output must not contradict itself.
    """
    if answer.denied:
        advice = "run this check as root, or as the agent's user"
        yield Finding("P-AGENT", "unknown", answer.path, answer.failure, advice)
        return
    if answer.failure:
        advice = (
            "start it (systemctl start hami-agent, or look at the DaemonSet's pod of this node), "
            "and give this check the agent's settings (--run-dir)"
        )
        said = f"no agent answers: {answer.failure}"
        yield Finding("P-AGENT", "WRONG", answer.path, said, advice)
        return
    lines = [match for match in map(_LINE.fullmatch, answer.text.splitlines()) if match]
    if not lines or answer.status not in {200, 503}:
        said = f"answers {answer.status}, but not as an agent"
        yield Finding("P-AGENT", "WRONG", answer.path, said, "give --run-dir of the agent")
        return
    failed = [match for match in lines if match[1] != "+"]
    for sign, name, text in (match.groups() for match in failed):
        advice = "see /readyz?verbose in the runbook, Start here, and the agent's log"
        said, means = text or "fails", ""
        verdict: Verdict = "WRONG" if sign == "-" else "note"
        if name in {"gpu_health", "cdi"}:
            advice = "run `hami-agent status`: it says of each GPU what to do"
            means = OF_ONE_GPU if verdict == "note" else ""
        if seen := next((seen for words, seen in repaired.items() if words in said), ""):
            said, advice = f"the agent has not seen yet that {seen}", _LOOKS_AGAIN
        yield Finding("P-AGENT", verdict, name, said, advice, means, _CAUSES.get(name, ()))
    if not any(match[1] == "-" for match in failed):
        said = f"the agent is ready; {counted(len(lines) - len(failed), 'check')} of it passed"
        yield Finding("P-AGENT", "ok", answer.path, said)


def judge_instances(
    lock: PathFacts, holder: str, waiting: Sequence[int], sockets: Sequence[PluginSocket]
) -> Finding:
    """Judge whether one agent serves here.

    `lock`: the lock file in the run directory; `holder`: what it says of its holder. `waiting`: the
    other processes of agents on this host. `sockets`: all in the kubelet's directory.
    """
    serving = [one.path for one in sockets if one.alive and _OURS.fullmatch(one.path)]
    if len(serving) > 1:
        said = f"{counted(len(serving), 'agent')} serve the kubelet of this node"
        advice = "stop all but one: the systemd service and the DaemonSet exclude each other"
        return Finding("P-SECOND", "WRONG", ", ".join(serving), said, advice)
    if waiting:
        pids = ", ".join(map(str, waiting))
        return Finding(
            "P-SECOND",
            "note",
            lock.path,
            f"more agents run on this host (pid {pids}) than the one that holds the lock",
            "nothing during an update: the next agent waits there. Otherwise stop it, because it "
            "takes over as soon as the other one ends",
            "pods are not affected: only the agent that holds the lock serves",
        )
    # The text stays in the file when its holder has ended.
    said = f"last taken by {holder}" if holder else "names no holder"
    said = f"{said}; {counted(len(serving), 'live socket')} of agents at the kubelet"
    return Finding("P-SECOND", "ok", lock.path, said)


# What HAMi's scheduler and the kubelet show of this node, as the API server has it.

_READERS: Final[Mapping[ReportProfile, str]] = {
    ReportProfile.JSON: "2.8 and later",
    ReportProfile.COLON: "2.5 to 2.7.1",
}


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
    subject, offered = f"allocatable {resource} of Node {node.name}", node.allocatable
    if not report.gpus:
        said = f"{offered}; there is no readable register annotation to compare it with"
        advice = "repair what is said of the annotation (P-REPORT) and of the agent (P-AGENT)"
        return Finding("P-OFFER", "note", subject, said, advice, causes=("P-REPORT", "P-AGENT"))
    if offered == report.healthy:
        said = f"{offered} = healthy {report.healthy} (capacity {node.capacity})"
        return Finding("P-OFFER", "ok", subject, said)
    is_new = report.written is not None and (now - report.written).total_seconds() < KUBELET_WITHIN
    fewer = "kube-scheduler counts fewer slices than HAMi's scheduler: pods stay Pending"
    if offered > report.healthy:
        fewer = "HAMi's scheduler counts fewer slices than the kubelet offers: pods stay Pending"
    return Finding(
        "P-OFFER",
        "note" if is_new else "WRONG",
        subject,
        f"{offered}, and the register annotation has {report.healthy} healthy slices",
        "look again in 15 s: the kubelet reports every 10 s. If it stays, look at `registered`, "
        "`stream` and `report` in the agent's /readyz?verbose",
        fewer,
        ("P-AGENT", "P-KUBELET", "P-DRIVER", "P-SECOND", "P-PLUGIN"),
    )


def judge_report(node: str, report: ReportSeen, running: ReportProfile | None) -> Finding:
    """Judge the register annotation. `running`: the report profile of the agent; None: none runs.

    Before the first start it is another plugin's, and only its content counts.
    """
    subject, means = f"{REGISTER} of Node {node}", ""
    reader = f"HAMi's scheduler {_READERS[running]}" if running else ""
    advice = "look at `report` in the agent's /readyz?verbose; the agent writes it within seconds"
    if running and not report.is_there:
        said = "does not exist"
        means = "HAMi's scheduler knows no GPU of this node (node unregistered)"
    elif running and not report.gpus:
        said = "cannot be read"
        means = "HAMi's scheduler keeps what it read before, or knows no GPU of this node"
    elif running and report.is_json != (running is ReportProfile.JSON):
        said = f"does not have the form for {reader}, which the settings name"
        advice = "set report.profile to the scheduler's release, and restart the agent"
    elif report.differences:
        more = len(report.differences) - 1
        said = report.differences[0] + (f", and {more} more" if more else "")
        advice = "give this check the agent's settings; if it has them, restart the agent"
        if not running:
            advice = "unless you want this change, give the agent the settings of the plugin before"
            advice += " it (HAMi's ConfigMaps, report.profile)"
        return Finding("P-REPORT", "note", subject, said, advice)
    else:
        said = "says what the agent would write" + (f", for {reader}" if running else "")
        return Finding("P-REPORT", "ok", subject, said)
    causes: tuple[CheckId, ...] = ("P-AGENT", "P-RIGHTS", "P-DRIVER", "P-WRITER")
    return Finding("P-REPORT", "WRONG", subject, said, advice, means, causes)


def judge_handshake(
    node: NodeSight, report: ReportSeen, profile: ReportProfile, now: dt.datetime
) -> Finding:
    """Judge by the handshake whether a scheduler has read the present report.

    With the profile `json` the agent removes the handshake with each report, and schedulers from
    2.9 on write it again when they read the report. With the others it stamps it every 30 s.
    """
    text, subject = node.annotations.get(HANDSHAKE, ""), f"{HANDSHAKE} of Node {node.name}"
    handshake = _decoded(decode_handshake, text)
    word = handshake.word.value if handshake else text.partition(" ")[0][:32]
    advice, means = "check that HAMi's scheduler runs", ""
    verdict: Verdict = "ok"
    causes: tuple[CheckId, ...] = ()
    if word == "Deleted":
        verdict, said = "WRONG", f"the scheduler dropped this node's GPUs ({cap(text, 64)})"
        advice = "restart HAMi's scheduler, which then reads the report again; with a scheduler "
        advice += "up to 2.7.1 set report.profile"
        means = "HAMi's scheduler places no pod on this node"
    elif profile.stamps and not word:
        verdict, said = "WRONG", "the agent's stamp is absent"
        advice = "look at `report` in the agent's /readyz?verbose"
        means, causes = "HAMi's scheduler drops this node after 60 s", ("P-AGENT", "P-RIGHTS")
    elif profile.stamps:
        # Schedulers write their local time without a zone: only a stamp with one has an age.
        stamp = handshake.stamp if handshake else None
        age = (now - stamp).total_seconds() if stamp and stamp.tzinfo else 0.0
        said = f"{word}: the agent's stamps are read"
        if word == "Reported" and age > READ_WITHIN:
            verdict, said = "note", f"no scheduler has read the report of {age:.0f} s ago"
    elif word == "Requesting":
        said = "a scheduler has read the report since it was written"
    elif word:
        said = f"{word}: schedulers from 2.8 on do not use it"
    elif not report.is_there or (
        report.written is not None and (now - report.written).total_seconds() < READ_WITHIN
    ):
        said = "absent: the report is new, or there is none"
    elif report.gpus and not report.healthy:
        # Schedulers from 2.10 on remove it when they drop a node whose slices are gone.
        said = "absent: the report offers no slice to a scheduler"
    else:
        verdict, said = "note", "absent: no scheduler has read the present report"
        if report.written is not None:
            said += f", which is {(now - report.written).total_seconds():.0f} s old"
        advice += (
            "; releases from 2.9 on write this within 15 s. Release 2.8 never does: after a change "
            "of memory or names alone, restart it"
        )
        causes = ("P-AGENT", "P-KUBELET", "P-DRIVER")
    advice = "" if verdict == "ok" else advice
    return Finding("P-HANDSHAKE", verdict, subject, said, advice, means, causes)


def judge_writer(node: NodeSight, report: ReportSeen) -> Finding:
    """Judge who wrote the register annotation last. The agent writes no equal one again."""
    subject = f"{REGISTER} of Node {node.name}"
    if not node.reported_by:
        return Finding("P-WRITER", "ok", subject, "no writer other than the agent is known")
    writer, _, when = cap(node.reported_by, 128).rpartition(" ")
    if report.gpus and not report.differences:
        said = f"{writer} wrote it at {when}, and the agent would write the same"
        return Finding("P-WRITER", "ok", subject, said)
    said = f"{writer} changed it at {when}, after the agent"
    advice = "find this writer: nearly always it is a second device plugin of this node; stop it"
    return Finding("P-WRITER", "note", subject, said, advice)


def judge_lock(node: NodeSight, now: dt.datetime) -> Finding:
    """Judge the node lock."""
    text, subject = node.annotations.get(MUTEX_LOCK), f"{MUTEX_LOCK} of Node {node.name}"
    if text is None:
        return Finding("P-LOCK", "ok", subject, "free")
    lock = _decoded(decode_node_lock, text)
    remove = f"kubectl annotate node {node.name} {MUTEX_LOCK}-"
    if lock is None:
        said = f"cannot be read ({cap(text, 64)}): no scheduler ever takes it over"
        return Finding("P-LOCK", "WRONG", subject, said, f"remove it: {remove}")
    age = (now - lock.stamp).total_seconds()
    owner = "an unnamed pod" if lock.owner is None else f"pod {cap('/'.join(lock.owner), 128)}"
    said = f"held by {owner} for {age:.0f} s"
    if age <= LOCK_LONG:
        return Finding("P-LOCK", "ok", subject, said)
    advice = (
        "look at that pod's Events. The agent frees the lock of a pod that failed, ended or is "
        f"gone within 35 s; if there is no such pod and the lock stays: {remove}"
    )
    verdict: Verdict = "WRONG" if age > LOCK_EXPIRES else "note"
    return Finding("P-LOCK", verdict, subject, said, advice, causes=("P-RIGHTS",))


def judge_leftovers(
    node: NodeSight, stale: Sequence[str], *, stamps: bool, scores: bool
) -> Iterator[Finding]:
    """Judge what HAMi's plugin left: sockets without a process (`stale`), and annotations.

    `stamps`, `scores`: the agent's settings make it write the handshake, the score.
    """
    found = False
    for path in stale:
        found = True
        said = "left by HAMi's or NVIDIA's plugin: no process listens there"
        advice = f"rm {path}, if that plugin does not come back"
        yield Finding("P-LEFTOVERS", "note", path, said, advice)
    for key, is_ours in {HANDSHAKE: stamps, SCORE: scores}.items():
        text = node.annotations.get(key)
        if text is None or is_ours or (key == HANDSHAKE and not text.startswith("Reported")):
            continue
        found = True
        said = f"left by HAMi's plugin: these settings never write it ({cap(text, 48)})"
        advice = f"kubectl annotate node {node.name} {key}-"
        yield Finding("P-LEFTOVERS", "note", f"{key} of Node {node.name}", said, advice)
    if not found:
        yield Finding("P-LEFTOVERS", "ok", f"Node {node.name}", "nothing of HAMi's plugin is left")
