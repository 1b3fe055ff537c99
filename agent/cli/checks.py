"""Rules of `doctor`: what a host must have for the agent, and what is seen of the agent there.

Each rule makes findings of facts; agent/cli/doctor.py looks the facts up.
"""

import contextlib
import datetime as dt
import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from agent.allocate.edits import NOT_LOADABLE, misnamed, mounted_library
from agent.cluster import HANDSHAKE, MUTEX_LOCK, REGISTER, SCORE
from agent.errors import MalformedText, cap
from agent.hami.annotations import (
    ReportProfile,
    decode_handshake,
    decode_node_lock,
    is_json_form,
    read_register,
)
from agent.kit.units import counted, span
from agent.ledger import HookFacts
from agent.model import Scan, Trouble
from agent.node import Check, NodeSight, PathFacts, PluginSocket, Right, is_ready

# The lines of `hami-agent doctor`: what was checked, what was found, and what to do about it.

Verdict: TypeAlias = Literal["ok", "note", "unknown", "wrong"]
"""The result of a check. A note keeps no agent from serving; unknown: it could not be made."""

OF_ONE_GPU: Final = "no new pod gets this GPU; pods that hold it may fail"
"""What a fault of one GPU means for pods."""

NO_OFFER: Final = "no new pod gets a GPU of this node; pods that run go on"
LAST_GOOD: Final = "the agent shares by the last good settings, and starts with them"
SERVED: Final = "new pods with GPUs may be refused on this node; pods that run go on"

CHECKS: Final[Mapping[str, Mapping[str, str]]] = {
    "config": {
        "P-SETTINGS": "the agent does not start with these settings, or shares "
        "otherwise than they say",
        "P-HAMI": "GPUs are shared by other settings than those of HAMi's release",
        "P-ENTRIES": "the node that was meant shares its GPUs by other settings",
    },
    "driver": {
        "P-DRIVER": NO_OFFER,
        "P-ACCESS": "CUDA programs in containers, or the agent, cannot reach the GPU",
        "P-CDI": "no new pod gets such a GPU; pods that run go on",
    },
    "kubelet": {
        "P-KUBELET": NO_OFFER,
        "P-WITNESS": SERVED,
        "P-PLUGIN": "the kubelet may ask the other plugin for the GPUs of a pod",
        "P-OFFER": "pods stay Pending, or fail after they are placed here",
    },
    "agent": {
        "P-AGENT": NO_OFFER,
        "P-SECOND": "the kubelet asks the agent that registered last, and the other "
        "one does not know those pods",
    },
    "api": {
        "P-NODE": "the scheduler learns nothing new of this node's GPUs",
        "P-RIGHTS": SERVED,
        "P-EXCESS": "no pod is affected; who takes over the agent gets these rights, too",
    },
    "scheduler": {
        "P-LABEL": "a DaemonSet that selects by this label does not run here",
        "P-REPORT": "HAMi's scheduler places pods by these numbers",
        "P-HANDSHAKE": "HAMi's scheduler may place pods by an older report, or none here",
        "P-WRITER": "HAMi's scheduler places pods by numbers that are not the agent's",
        "P-LOCK": "HAMi's scheduler binds no other pod with GPUs to this node",
        "P-LEFTOVERS": "pods are not affected while the agent serves",
        "P-MONITOR": "pods get their GPUs; what the monitor kept is not kept",
    },
    "library": {
        "P-LIBRARY": NO_OFFER,
        "P-PRELOAD": "limits of memory and compute may not hold in new containers",
    },
    "paths": {"P-PATHS": NO_OFFER},
}
"""The checks by group, in the order of the output, each with what its failure means for pods."""

GROUPS: Final = {check: group for group, checks in CHECKS.items() for check in checks}
ALL_GROUPS: Final = frozenset(CHECKS)
FROM_API: Final = ("kubelet", "api", "scheduler")
"""The groups that ask the API server."""

_CLUSTER: Final = ("P-NODE", "P-RIGHTS", "P-SETTINGS")

CAUSES: Final[Mapping[str, tuple[str, ...]]] = {
    "P-ACCESS": ("P-DRIVER",),
    "P-WITNESS": ("P-KUBELET",),
    "P-OFFER": ("P-REPORT", "P-AGENT", "P-KUBELET", "P-DRIVER", "P-SECOND", "P-PLUGIN"),
    "P-REPORT": ("P-AGENT", "P-RIGHTS", "P-DRIVER", "P-WRITER"),
    "P-HANDSHAKE": ("P-AGENT", "P-RIGHTS", "P-KUBELET", "P-DRIVER"),
    # The agent's own checks, which are the subjects of P-AGENT.
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
"""The checks that explain why one is wrong, if they are wrong themselves."""

_LATE: Final = ("offer", "cdi")
"""The agent's own checks that fail only until it looks again. Others have causes that no check of
doctor sees: `settings` also fails while pods hold slices."""


class Finding(msgspec.Struct, frozen=True, rename={"check": "id"}):
    """One line of the result, as `-o json` has it: what was checked and found, and what to do.

    `means`: the consequence for pods. `concluded` fills in that of the check, and the group.
    """

    check: str
    verdict: Verdict
    subject: str
    said: str
    advice: str = ""
    means: str = ""
    group: str = ""


Row: TypeAlias = tuple[object, Verdict, *tuple[str, ...]]
"""A row of a rule: if the first is true, this is the finding: verdict, said, advice, means."""


def judged(check: str, subject: str, well: str, *rows: Row) -> Finding:
    """The finding of the first row that holds; without one the check passed: `well`."""
    for holds, verdict, *texts in rows:
        if holds:
            return Finding(check, verdict, subject, *texts)

    return Finding(check, "ok", subject, well)


def concluded(findings: Iterable[Finding], groups: frozenset[str]) -> Iterator[Finding]:
    """The findings of these groups, in the order of groups and checks.

    One that follows from a wrong one among them is a note that names it, so that a fault is wrong
    in one line.
    """
    order, every = list(GROUPS), [one for one in findings if GROUPS[one.check] in groups]
    every.sort(key=lambda one: order.index(one.check))
    wrong = {one.check for one in every if one.verdict == "wrong"}
    well = {one.check for one in every} - {one.check for one in every if one.verdict != "ok"}
    for one in every:
        group, verdict, said, means = GROUPS[one.check], one.verdict, one.said, ""
        if verdict != "ok":
            means = one.means or CHECKS[group][one.check]

        likely = CAUSES.get(one.subject if one.check == "P-AGENT" else one.check, ())
        causes = [cause for cause in likely if cause in wrong]
        fixed = [cause for cause in likely if cause in well]
        if verdict in {"wrong", "note"} and causes:
            verdict, said = "note", f"{said} (follows from {', '.join(causes)})"
        elif verdict in {"wrong", "note"} and one.subject in _LATE and fixed:
            # One output must not contradict itself.
            said = f"{said} (now ok: {', '.join(fixed)}; the agent looks every 10 s)"

        yield msgspec.structs.replace(one, verdict=verdict, said=said, means=means, group=group)


# The rights.

UNNEEDED: Final = (
    Right("list", "nodes"),
    Right("delete", "nodes"),
    Right("patch", "pods"),
    Right("create", "pods/exec"),
    Right("create", "pods/binding"),
    Right("list", "secrets"),
    Right("list", "configmaps"),
    Right("impersonate", "users"),
)
"""Rights that neither the agent's ClusterRole nor a node's own identity has."""


def judge_rights(
    server: str, denied: Sequence[Right], unasked: Sequence[Right], excess: Sequence[Right] | None
) -> Iterator[Finding]:
    """Judge the permissions of this account.

    `denied`: those that it lacks. `unasked`: those that the agent's account has and this one need
    not have. `excess`: those that it has and the agent does not need; None: not asked.
    """
    lacks, unknown, more = (
        ", ".join(one.words for one in each) for each in (denied, unasked, excess or ())
    )
    yield judged(
        "P-RIGHTS",
        server,
        "all permissions of the agent are granted",
        (
            denied,
            "wrong",
            f"these are denied: {lacks}",
            "grant them to this account: the chart's ClusterRole lists them",
        ),
        (
            unasked,
            "note",
            f"this account can read what the agent reads; not checked: {unknown}",
            "the agent's account has them: run this check as the agent once it is installed",
        ),
    )

    if excess is not None:
        yield judged(
            "P-EXCESS",
            server,
            "none of the rights that the agent does not need is granted, as far as asked",
            (
                excess,
                "note",
                f"wider than needed: {more}",
                "give it the chart's ClusterRole, or the kubeconfig of this node's own identity",
            ),
        )


# Paths, the driver, other plugins, HAMi's files.


REPAIRS: Final = {
    errno.EROFS: "mount it read-write; if the kernel made the disk read-only (dmesg), repair it",
    errno.ENOSPC: "free some space or inodes there",
}
"""What to do about a directory that cannot be written."""


def judge_path(place: PathFacts, check: str = "P-PATHS", *, made: bool) -> Finding:
    """Judge a directory that the agent writes to. `made`: the agent creates it if missing."""
    is_missing, chown = not place.kind and made, f"chown root and chmod 0755 {place.path}"
    means = "who may write there can replace the sockets, or the limits of containers"
    mode, why = f"mode {place.mode:04o}", os.strerror(place.failure)

    return judged(
        check,
        place.path,
        "can be written, only by its owner or a group",
        (is_missing and not place.failure, "ok", "does not exist: the agent creates it"),
        (
            is_missing,
            "wrong",
            f"does not exist and cannot be created: {why}",
            "create it, or mount it read-write",
        ),
        (
            place.kind != "directory",
            "wrong",
            f"is a {place.kind}" if place.kind else "does not exist",
            "mount or create the directory there",
        ),
        (not place.ours, "wrong", f"belongs to uid {place.owner}", chown, means),
        (bool(place.mode & 0o002), "wrong", f"every user may write there ({mode})", chown, means),
        (
            bool(place.failure),
            "wrong",
            f"cannot be written: {why} (owner {place.owner}, {mode})",
            REPAIRS.get(place.failure, "run as its owner, and mount it read-write"),
        ),
    )


REPAIR: Final = (
    "the driver is there but fails: look with nvidia-smi and for NVRM in the kernel's log (dmesg); "
    "then reload the driver or reboot"
)


def judge_driver(
    library: str, scan: Scan | None, failure: str, remedy: str | None = None, *, hang: float = 0.0
) -> Iterator[Finding]:
    """Judge NVIDIA's library, and name each GPU that will not be shared.

    `failure`: why there is no scan. `remedy`: what to do about it, if known. `hang`: for so many
    seconds an agent that runs goes on offering GPUs that do not answer; 0: none runs.
    """
    until = f"has not answered for {span(hang)} (health.driverHang)"
    means = f"no new pod gets a GPU once it {until}; pods that run go on" if hang else NO_OFFER
    if scan is None:
        advice = REPAIR if remedy is None else remedy
        yield Finding("P-DRIVER", "wrong", library, failure, advice, means)
        return

    silent = [fault for fault in scan.faults if fault.trouble is Trouble.SILENT]
    models = ", ".join(sorted({gpu.name for gpu in scan.gpus}))
    yield judged(
        "P-DRIVER",
        library,
        f"driver {scan.driver_version}, {counted(len(scan.gpus), 'GPU')}: {models}",
        (
            not scan.gpus,
            "wrong",
            f"driver {scan.driver_version} answers but describes no GPU",
            "see the notes on each GPU below" if scan.faults else "look with nvidia-smi -L",
            means if silent else "",
        ),
    )
    for gpu in scan.gpus:
        if gpu.mig_enabled:
            said = f"GPU {gpu.uuid} is in MIG mode"
            yield Finding("P-DRIVER", "note", library, said, "it will not be shared", OF_ONE_GPU)

    for fault in scan.faults:
        advice, means = f"it is not shared; {fault.remedy}", OF_ONE_GPU
        if hang and fault in silent:
            advice, means = fault.remedy, f"no new pod gets this GPU once it {until}"
        yield Finding("P-DRIVER", "note", library, fault.sentence, advice, means)


def judge_plugins(
    directory: PathFacts,
    sockets: Sequence[PluginSocket],
    pods: Sequence[str] = (),
    *,
    reported: bool,
    takeover: bool,
) -> Iterator[Finding]:
    """Judge other plugins for these GPUs that run, and HAMi's vGPUmonitor.

    `pods`: those of other plugins here. `reported`: HAMi's plugin wrote its report on the Node.
    `takeover`: the agent is set to serve beside them.
    """
    running = [(f"pod {pod}", "another device plugin runs on this node") for pod in pods]
    running += [
        (socket.path, "another device plugin answers here")
        for socket in sockets
        if socket.theirs and socket.alive
    ]
    verdict: Verdict = "note" if takeover else "wrong"
    advice = (
        "with takeover the agent takes the resource from it; remove it from this node right after"
        if takeover
        else "remove it from this node first: two plugins for one resource take it from each other"
    )

    for subject, said in running:
        yield Finding("P-PLUGIN", verdict, subject, said, advice)

    if not running and directory.kind == "directory":
        yield Finding("P-PLUGIN", "ok", directory.path, "no other plugin for these GPUs answers")

    if running or reported:
        yield Finding(
            "P-MONITOR",
            "note",
            "HAMi's vGPUmonitor",
            "when HAMi's DaemonSet is switched off (devicePlugin.enabled=false), its vGPUmonitor "
            "goes with it, and the Service on port 31992",
            "the agent serves the same metrics; let Prometheus ask its port, or open 31992 again "
            "(see deploy/README.md)",
        )


def judge_library_files(
    library: PathFacts, preload: PathFacts, facts: HookFacts
) -> Sequence[Finding]:
    """Judge libvgpu.so and ld.so.preload, which exist. `facts`: what check_library() judges."""
    until, mounted = "until then no slice is on offer (HA-5005)", mounted_library(facts)
    found = [
        judged(
            "P-PRELOAD",
            file.path,
            f"{preload.path} names it; only its owner may write both",
            (not file.kind, "unknown", "was removed during this check", "run it again"),
            (
                file.kind != "file",
                "unknown",
                f"is a {file.kind}, and no regular file",
                "run this check as root",
            ),
            (
                not file.ours or bool(file.mode & 0o022),
                "wrong",
                f"others than root may write it (uid {file.owner}, mode {file.mode:04o})",
                f"chown root and chmod go-w {file.path}; then put HAMi-core's file there again",
                "who may write this file can run code in every new container with a GPU",
            ),
            (
                not file.mode & 0o004,
                "wrong",
                f"not everybody may read it (mode {file.mode:04o})",
                "make it 0644",
                "containers of other users have no limits",
            ),
        )
        for file in (library, preload)
    ]

    contents = (
        (library.path, NOT_LOADABLE, f"put HAMi-core's file there; {until}", not facts.loadable),
        (
            preload.path,
            f"names {misnamed(facts)} and not {mounted}",
            f"make {mounted} its only line; {until}",
            bool(misnamed(facts)),
        ),
    )
    found += [
        Finding("P-PRELOAD", "wrong", path, said, advice, NO_OFFER)
        for path, said, advice, is_wrong in contents
        if is_wrong
    ]
    return [one for one in found if one.verdict != "ok"] or found[:1]


# The agent that runs here.


class AgentAnswer(msgspec.Struct, frozen=True):
    """The answer of the agent at the socket `path`.

    - `checks`: its readiness. `failure`: why there is no answer. `denied`: this user may not use
      the socket.
    - `held`: namespace, pod and name of each running container that the scheduler gave GPUs, and
      that has been answered for a minute.
    """

    path: str
    checks: tuple[Check, ...] = ()
    failure: str = ""
    denied: bool = False
    held: tuple[tuple[str, str, str], ...] = ()


_LOG: Final = (SERVED, "see /readyz?verbose in the runbook, and the agent's log")
_OF_GPU: Final = (OF_ONE_GPU, "run `hami-agent status`: it says of each GPU what to do")
_OF_CHECK: Final = {
    "gpu_health": _OF_GPU,
    "cdi": _OF_GPU,
    "settings": (
        LAST_GOOD,
        "correct the file; `hami-agent config check FILE` prints what is wrong in it",
    ),
}
"""What the failure of one of the agent's own checks means for pods, and what to do."""


def judge_agent(answer: AgentAnswer) -> Iterator[Finding]:
    """Judge the agent's readiness: one finding for each of its checks that fails."""
    for check in (one for one in answer.checks if not one.ok):
        means, advice = _OF_CHECK.get(check.name, _LOG)
        verdict: Verdict = "wrong" if check.required else "note"
        means = "" if check.required else means
        yield Finding("P-AGENT", verdict, check.name, check.text or "fails", advice, means)

    if is_ready(answer.checks):
        passed = counted(sum(check.ok for check in answer.checks), "check")
        yield judged(
            "P-AGENT",
            answer.path,
            f"the agent is ready; {passed} of it passed",
            (
                answer.denied,
                "unknown",
                answer.failure,
                "run this check as root, or as the agent's user",
            ),
            (
                answer.failure,
                "wrong",
                f"no agent answers: {answer.failure}",
                (
                    "start it (systemctl start hami-agent, or look at the DaemonSet's pod of this "
                    "node), and give this check the agent's settings (--run-dir)"
                ),
            ),
        )


# What HAMi's scheduler and the kubelet show of this node, as the API server has it.

READ_WITHIN: Final = 60.0
"""Seconds. HAMi's schedulers look at a Node every 15 s; those up to 2.7.1 drop it after 60 s."""

KUBELET_WITHIN: Final = 15.0
"""Seconds. The kubelet writes a changed status every 10 s (nodeStatusUpdateFrequency)."""

LOCK_LONG: Final = 60.0
LOCK_EXPIRES: Final = 300.0
"""Seconds after which HAMi's scheduler takes a lock over, by its default."""


def judge_node(name: str, node: NodeSight | None) -> Iterator[Finding]:
    """Judge whether the Node exists, and its label."""
    yield judged(
        "P-NODE",
        f"Node {name}",
        "exists, already registered"
        if node and REGISTER in node.annotations
        else "exists, not registered yet",
        (
            node is None,
            "wrong",
            "the API server knows no such Node",
            "set node.name (--node-name, NODE_NAME) to the Node's name in Kubernetes",
        ),
    )

    if node is not None:
        yield judged(
            "P-LABEL",
            f"label gpu=on of Node {name}",
            "is set",
            (
                node.labels.get("gpu") != "on",
                "note",
                "is not set",
                "by default, HAMi's DaemonSet and the agent's select nodes by it",
            ),
        )


def judge_offer(node: NodeSight, resource: str, now: dt.datetime) -> Finding:
    """Judge allocatable against the healthy slices of the register annotation."""
    offered, gpus = node.allocatable, read_register(node.annotations.get(REGISTER))
    healthy = sum(gpu.split_count for gpu in gpus if gpu.healthy)
    is_new = (node.age(now) or KUBELET_WITHIN) < KUBELET_WITHIN
    (_, fewer), (_, more) = sorted(((offered, "kube-scheduler"), (healthy, "HAMi's scheduler")))

    return judged(
        "P-OFFER",
        f"allocatable {resource} of Node {node.name}",
        f"{offered} = healthy {healthy} (capacity {node.capacity})",
        (
            not gpus,
            "note",
            f"{offered}; there is no readable register annotation to compare it with",
            "repair what is said of the annotation (P-REPORT) and of the agent (P-AGENT)",
        ),
        (
            offered != healthy,
            "note" if is_new else "wrong",
            f"{offered}, and the register annotation has {healthy} healthy slices",
            (
                "look again in 15 s: the kubelet reports every 10 s. If it stays, look at "
                "`registered`, `stream` and `report` in the agent's /readyz?verbose"
            ),
            f"{fewer} counts fewer slices than {more}: pods stay Pending",
        ),
    )


def judge_report(node: NodeSight, running: ReportProfile | None) -> Finding:
    """Judge the register annotation. `running`: the report profile of the agent; None: none runs.

    Before the first start it is another plugin's, and only its content counts.
    """
    text, first = node.annotations.get(REGISTER), "".join(node.differences[:1])
    releases = "2.8 and later" if running is ReportProfile.JSON else "2.5 to 2.7.1"
    reader = f"HAMi's scheduler {releases}" if running else ""
    more = f", and {len(node.differences) - 1} more" if len(node.differences) > 1 else ""
    look = "look at `report` in the agent's /readyz?verbose; the agent writes it within seconds"

    return judged(
        "P-REPORT",
        f"{REGISTER} of Node {node.name}",
        "says what the agent would write" + (f", for {reader}" if running else ""),
        (
            bool(running) and text is None,
            "wrong",
            "does not exist",
            look,
            "HAMi's scheduler knows no GPU of this node (node unregistered)",
        ),
        (
            bool(running) and not read_register(text),
            "wrong",
            "cannot be read",
            look,
            "HAMi's scheduler keeps what it read before, or knows no GPU of this node",
        ),
        (
            bool(running) and is_json_form(text or "") != (running is ReportProfile.JSON),
            "wrong",
            f"does not have the form for {reader}, which the settings name",
            "set report.profile to the scheduler's release, and restart the agent",
        ),
        (
            bool(node.differences),
            "note",
            f"{first}{more}",
            "give this check the agent's settings; if it has them, restart the agent"
            if running
            else "unless you want this change, give the agent the settings of the plugin before it "
            "(HAMi's ConfigMaps, report.profile)",
        ),
    )


def judge_handshake(node: NodeSight, profile: ReportProfile, now: dt.datetime) -> Finding:
    """Judge by the handshake whether a scheduler has read the present report.

    With the profile `json` the agent removes the handshake with each report, and schedulers from
    2.9 on write it again when they read the report. With the others it stamps it every 30 s.
    """
    text, report = node.annotations.get(HANDSHAKE, ""), node.annotations.get(REGISTER)
    word, stamped, age = text.partition(" ")[0][:32], 0.0, node.age(now)
    stamps = profile is ReportProfile.COLON
    with contextlib.suppress(MalformedText):
        word, stamp = decode_handshake(text)
        # Schedulers write their local time without a zone: only a stamp with one has an age.
        if stamp and stamp.tzinfo:
            stamped = (now - stamp).total_seconds()

    # Schedulers from 2.10 on remove it when they drop a node whose slices are gone.
    gpus = read_register(report)
    offers = report is not None and (not gpus or any(gpu.healthy for gpu in gpus))
    well = {
        "": "absent: the report is new, offers no slice, or there is none",
        "Requesting": "a scheduler has read the report since it was written",
    }.get(word, f"{word}: schedulers from 2.8 on do not use it")

    return judged(
        "P-HANDSHAKE",
        f"{HANDSHAKE} of Node {node.name}",
        f"{word}: the agent's stamps are read" if stamps else well,
        (
            word == "Deleted",
            "wrong",
            f"the scheduler dropped this node's GPUs ({cap(text, 64)})",
            (
                "restart HAMi's scheduler, which then reads the report again; with a scheduler "
                "up to 2.7.1 set report.profile"
            ),
            "HAMi's scheduler places no pod on this node",
        ),
        (
            stamps and not word,
            "wrong",
            "the agent's stamp is absent",
            "look at `report` in the agent's /readyz?verbose",
            "HAMi's scheduler drops this node after 60 s",
        ),
        (
            stamps and word == "Reported" and stamped > READ_WITHIN,
            "note",
            f"no scheduler has read the report of {span(stamped)} ago",
            "check that HAMi's scheduler runs",
        ),
        (
            not stamps and not word and offers and (age is None or age >= READ_WITHIN),
            "note",
            "absent: no scheduler has read the present report"
            + (f", which is {span(age)} old" if age is not None else ""),
            (
                "check that HAMi's scheduler runs; releases from 2.9 on write this within 15 s. "
                "Release 2.8 never does: after a change of memory or names alone, restart it"
            ),
        ),
    )


def judge_writer(node: NodeSight) -> Finding:
    """Judge who wrote the register annotation last. The agent writes no equal one again."""
    writer, _, when = cap(node.reported_by, 128).rpartition(" ")
    is_equal = bool(read_register(node.annotations.get(REGISTER))) and not node.differences
    return judged(
        "P-WRITER",
        f"{REGISTER} of Node {node.name}",
        f"{writer} wrote it at {when}, and the agent would write the same"
        if writer
        else "no writer other than the agent is known",
        (
            bool(writer) and not is_equal,
            "note",
            f"{writer} changed it at {when}, after the agent",
            "find this writer: nearly always it is a second device plugin of this node; stop it",
        ),
    )


def judge_lock(node: NodeSight, now: dt.datetime) -> Finding:
    """Judge the node lock."""
    subject, text = f"{MUTEX_LOCK} of Node {node.name}", node.annotations.get(MUTEX_LOCK)
    if text is None:
        return Finding("P-LOCK", "ok", subject, "free")

    remove = f"kubectl annotate node {node.name} {MUTEX_LOCK}-"
    try:
        lock = decode_node_lock(text)
    except MalformedText:
        return Finding(
            "P-LOCK",
            "wrong",
            subject,
            f"cannot be read ({cap(text, 64)}): no scheduler ever takes it over",
            f"remove it: {remove}",
        )

    seconds = (now - lock.stamp).total_seconds()
    owner = f"pod {cap('/'.join(lock.owner), 128)}" if lock.owner else "an unnamed pod"
    said = f"held by {owner} for {span(seconds)}"
    return judged(
        "P-LOCK",
        subject,
        said,
        (
            seconds > LOCK_LONG,
            "wrong" if seconds > LOCK_EXPIRES else "note",
            said,
            (
                "look at that pod's Events. The agent frees the lock of a pod that failed, ended "
                f"or is gone within 35 s; if there is no such pod and the lock stays: {remove}"
            ),
        ),
    )


def judge_leftovers(
    node: NodeSight | None, sockets: Sequence[PluginSocket], *, stamps: bool, scores: bool
) -> Iterator[Finding]:
    """Judge what HAMi's plugin left: sockets without a process, and annotations of the Node.

    `node`: None before the first start, when its annotations may be of a plugin that serves.
    `stamps`, `scores`: the agent's settings make it write the handshake, the score.
    """
    stale = [socket.path for socket in sockets if socket.theirs and not socket.alive]
    for path in stale:
        yield Finding(
            "P-LEFTOVERS",
            "note",
            path,
            "left by HAMi's or NVIDIA's plugin: no process listens there",
            f"rm {path}, if that plugin does not come back",
        )

    if node is None:
        return

    notes = node.annotations
    is_stamped = notes.get(HANDSHAKE, "").startswith("Reported")
    left = [HANDSHAKE] * (is_stamped and not stamps) + [SCORE] * (SCORE in notes and not scores)
    for key in left:
        yield Finding(
            "P-LEFTOVERS",
            "note",
            f"{key} of Node {node.name}",
            f"left by HAMi's plugin: these settings never write it ({cap(notes[key], 48)})",
            f"kubectl annotate node {node.name} {key}-",
        )

    if not stale and not left:
        yield Finding("P-LEFTOVERS", "ok", f"Node {node.name}", "nothing of HAMi's plugin is left")
