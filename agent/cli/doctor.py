"""`hami-agent doctor`: checks this node, beside the agent or before it starts there (`--pre`).

GROUPS, MEANS and ADVICE are the table of checks. A look reads the facts of a group, a rule judges
them, and nothing is changed.
"""

import argparse
import asyncio
import contextlib
import datetime as dt
import os
import stat
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

from agent.allocate.edits import check_library, mounted_library
from agent.app.agent import open_driver
from agent.cli import main as cli
from agent.cli.config import add_settings, flags, looked, sources, started
from agent.cli.connections import ask, connection_of, open_session
from agent.cli.main import Subparsers, Unreachable
from agent.cli.output import FoldedLine, answer, folded, working
from agent.cli.status import status_at
from agent.cli.support import HINT
from agent.cluster import HANDSHAKE, MUTEX_LOCK, REGISTER
from agent.errors import AgentError, MalformedText, SettingsError, WitnessUnsupported, cap
from agent.hami.annotations import ReportProfile, read_register
from agent.hookdirs import HostHookDirs, large_directories
from agent.host.node import foreign_plugins, write_failure
from agent.host.system import Worker
from agent.kit.logs import configure
from agent.kit.timing import SystemClock
from agent.kit.units import counted, span
from agent.kube.client import Connection
from agent.kube.reader import ClusterNode, NodeReader, decode_listed
from agent.model import Scan, Trouble
from agent.node import Right, is_ready, rights
from agent.settings.reading import DEVICE_CONFIG, NODE_CONFIG, NodeValues
from agent.settings.schema import Settings, check_shares
from agent.status import SEVERE, LockStatus, StatusDocument, gpu_grade, open_envelope
from agent.witness import FILE_NAME, PodResourcesWitness, decode_records

Verdict: TypeAlias = Literal["ok", "note", "unknown", "wrong"]
"""The result of a check. A note keeps no agent from serving; unknown: it could not be made."""

GROUPS: Final[Mapping[str, Sequence[str]]] = {
    "config": ("P-SETTINGS", "P-HAMI"),
    "driver": ("P-DRIVER", "P-GPU", "P-CDI"),
    "kubelet": ("P-KUBELET", "P-WITNESS", "P-PLUGIN", "P-OFFER"),
    "agent": ("P-AGENT",),
    "api": ("P-NODE", "P-RIGHTS"),
    "scheduler": ("P-REPORT", "P-LOCK"),
    "library": ("P-LIBRARY", "P-PRELOAD"),
    "paths": ("P-PATHS",),
}
"""The checks of each group, in the order of the output."""

CHECKS: Final = {check: group for group, checks in GROUPS.items() for check in checks}
"""The group of each check."""

EVERY: Final = frozenset(GROUPS)

NO_OFFER: Final = "no new pod gets a GPU of this node; pods that run go on"
SERVED: Final = "new pods with GPUs may be refused on this node; pods that run go on"
OF_ONE_GPU: Final = "no new pod gets it; pods that hold it may fail"

MEANS: Final[Mapping[str, str]] = {
    "P-SETTINGS": "the agent does not start, or shares otherwise than they say",
    "P-HAMI": "GPUs are shared by other settings than those of HAMi's release",
    # An agent that runs goes on offering GPUs that do not answer.
    "P-DRIVER": "no new pod gets a GPU (if the driver hangs: after health.driverHang); "
    "pods that run go on",
    "P-GPU": OF_ONE_GPU,
    "P-CDI": "no new pod gets such a GPU; pods that run go on",
    "P-WITNESS": SERVED,
    "P-PLUGIN": "the kubelet may ask the other one, which knows none of the pods",
    "P-OFFER": "kube-scheduler and HAMi's scheduler count differently: pods stay Pending, or fail",
    "P-NODE": "the scheduler learns nothing new of this node's GPUs",
    "P-RIGHTS": SERVED,
    "P-REPORT": "HAMi's scheduler may place pods by other numbers, or none here",
    "P-LOCK": "HAMi's scheduler binds no other pod with GPUs to this node",
    "P-PRELOAD": "containers have no limits, or who may write the file runs code in each of them",
}
"""What a failure of a check means for pods, where it is not NO_OFFER."""

ADVICE: Final[Mapping[str, str]] = {
    "P-SETTINGS": "correct it; `hami-agent config check --node NAME` prints what that node gets",
    "P-HAMI": "mount the ConfigMaps of HAMi's release",
    "P-DRIVER": "see nvidia-smi and NVRM in the kernel's log; then reload the driver or reboot",
    "P-GPU": "`hami-agent status` names the action and, with `--by pod`, the pods on it; "
    "after a repair: `hami-agent recheck GPU`",
    "P-CDI": "run the command of the line on the host, or correct allocation.cdiSpecDirs",
    "P-KUBELET": "start the kubelet, mount its directory, or set paths.kubeletSocket to its socket",
    "P-WITNESS": "check that the kubelet runs and that paths.podResourcesSocket names its socket",
    "P-PLUGIN": "remove all but one from this node; HAMi's vGPUmonitor goes with HAMi's plugin",
    "P-OFFER": "look again in 15 s, then at `registered`, `stream` and `report` in /readyz?verbose",
    "P-AGENT": "run this again in 10 s: the agent looks that often; then see /readyz?verbose",
    "P-NODE": "set node.name (--node-name, NODE_NAME) to the Node's name in Kubernetes",
    "P-RIGHTS": "grant them to this account: the chart's ClusterRole lists them",
    "P-REPORT": "check that HAMi's scheduler runs and report.profile is of its release; restart it",
    "P-LOCK": "look at that pod's Events; the lock of a pod that is over is freed within 35 s",
    "P-LIBRARY": "put HAMi-core's files there; until then no slice is on offer (HA-5005)",
    "P-PRELOAD": "put HAMi-core's files there, of root and with mode 0644 (HA-5005)",
    "P-PATHS": "make it a directory of root on a writable disk that has room (see dmesg)",
}
"""What to do about it."""

_KUBELET: Final = ("P-KUBELET", "P-DRIVER")
_CLUSTER: Final = ("P-NODE", "P-RIGHTS", "P-SETTINGS")
CAUSES: Final[Mapping[str, Sequence[str]]] = {
    "P-GPU": ("P-DRIVER",),
    "P-WITNESS": ("P-KUBELET",),
    "P-OFFER": ("P-AGENT", "P-PLUGIN", "P-RIGHTS", *_KUBELET),
    "P-REPORT": ("P-AGENT", "P-RIGHTS", *_KUBELET),
    # The agent's own checks, which are the subjects of P-AGENT.
    "state": ("P-PATHS",),
    "server": ("P-KUBELET", "P-PATHS"),
    **dict.fromkeys(("registered", "stream"), _KUBELET),
    **dict.fromkeys(("api", "api_synced", "report"), _CLUSTER),
    "settings": ("P-SETTINGS",),
    **dict.fromkeys(("inventory", "gpus"), ("P-DRIVER",)),
    "offer": ("P-LIBRARY", "P-PRELOAD", "P-PATHS", *_KUBELET),
}
"""The checks from whose failure one follows."""

OF_AGENT: Final = {"driver": "P-DRIVER", "gpus_answering": "P-GPU", "cdi": "P-CDI"}
"""The agent's own checks that are told as another than P-AGENT."""

FAULTS: Final = frozenset({Trouble.LOST, Trouble.FAILED, Trouble.RESET, Trouble.SILENT})
"""Faults of a GPU. The others are what an operator chose, or may have."""

DRIVER_SECONDS: Final = 15.0
"""8 GPUs that initialise one after the other take 12 s."""

LOOK_SECONDS: Final = 1.0
"""Between two scans."""

KUBELET_WITHIN: Final = 15.0
"""Seconds. The kubelet writes a changed status every 10 s (nodeStatusUpdateFrequency)."""

READ_WITHIN: Final = 60.0
"""Seconds. HAMi's schedulers look at a Node every 15 s."""

LOCK_EXPIRES: Final = 300.0
"""Seconds after which HAMi's scheduler takes a lock over, by its default."""

FIRST_PROCESS: Final = Path("/proc/1/cmdline")
"""In the agent's pod: the agent."""

WORDS: Final[Mapping[Verdict, tuple[str, str]]] = {
    "wrong": ("WRONG", "red"),
    **{verdict: (verdict, "yellow") for verdict in ("note", "unknown")},
    "ok": ("ok", "green"),
}
"""The word of a verdict for people, and its colour."""

_INDENT: Final = 20
"""Columns before what a finding means; also the longest id that is shown."""

_LONGEST: Final = 1024
"""Characters of a text; some come from the cluster."""


class Finding(msgspec.Struct, frozen=True, rename={"check": "id"}):
    """One line of the result, as `-o json` has it. `means`: the consequence for pods.

    `concluded` fills in the group, and what MEANS and ADVICE have where nothing else is known.
    """

    check: str
    verdict: Verdict
    subject: str
    said: str
    advice: str = ""
    means: str = ""
    group: str = ""


class Checked(msgspec.Struct, frozen=True):
    """The data of `doctor -o json`. `ok`: nothing is wrong. `complete`: everything was checked."""

    ok: bool
    complete: bool
    findings: tuple[Finding, ...]


class NodeSeen(msgspec.Struct, frozen=True, eq=False):
    """What is at hand of a node.

    - `agent`: its status, or why it does not answer; None: before the first start.
    - `reader`: the account may only read, and is not the agent's.
    """

    settings: Settings
    environ: Mapping[str, str]
    groups: frozenset[str] = EVERY
    agent: StatusDocument | Finding | None = None
    reader: bool = False


Row: TypeAlias = tuple[object, Verdict, *tuple[str, ...]]
"""A row of a rule: if the first is true, this is the finding: verdict, said, advice, means."""


def judged(check: str, subject: object, well: str, *rows: Row) -> Finding:
    """The finding of the first row that holds; without one the check passed: `well`."""
    for holds, verdict, *texts in rows:
        if holds:
            return Finding(check, verdict, str(subject), *texts)

    return Finding(check, "ok", str(subject), well)


# The verb.


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb `doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        description="Checks this node with the settings of `run`, and changes nothing. Each line "
        "says what was checked and what was found, what that means for pods, what to do, and the "
        "entry of the runbook. What follows from another line is left out. With --pre it checks "
        "what the agent needs before it starts; without, also the agent that runs, and what Node, "
        "kubelet and scheduler show of it. -o wide also lists what is well. "
        f"Groups: {', '.join(GROUPS)}. Exits 0 if nothing is wrong, 1 if something is, 5 if "
        "nothing is but something could not be checked, 6 with --strict if there are notes alone.",
        epilog="example: hami-agent doctor --only kubelet,scheduler -o json",
    )

    add = parser.add_argument
    told = "check that node of the cluster, in the pod of its agent (pods/exec)"
    add("--node", metavar="NAME", help=told)
    add("--context", default="", metavar="NAME", help="with --node: context of the kubeconfig")
    told = "check before the first start, or before a switch from another plugin"
    add("--pre", action="store_true", help=told)
    told = "check these groups alone"
    add("--only", type=_groups, default=EVERY, metavar="GROUP[,GROUP]", help=told)
    add("--strict", action="store_true", help="exit 6 if there are notes, and nothing is wrong")
    told = "do not check the rights to write, for an account that may only read"
    add("--read-only", action="store_true", help=told)
    cli.add_output(parser, forms=(cli.TABLE, "wide", "json", "yaml"))
    add_settings(parser)


def _groups(text: str) -> frozenset[str]:
    """Read the value of --only. Raises ArgumentTypeError."""
    words = [word.strip() for word in text.split(",")]
    if unknown := [word for word in words if word not in GROUPS]:
        known = f"the groups are {', '.join(GROUPS)}"
        raise argparse.ArgumentTypeError(f"there is no group {cap(unknown[0], 64)!r}; {known}")

    return frozenset(words)


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print what was found; return the exit code."""
    configure("error", "auto", environ)

    # An option that would be ignored is refused: its user expects it to count.
    stray = [flag for flag in flags(args) if flag != "--kubeconfig"]
    if args.config is not None:
        stray.insert(0, "--config")
    if args.node is None:
        stray = ["--context"] if args.context else []
    if stray:
        said = f"{', '.join(stray)}: has no effect with{'out' * (args.node is None)} --node"
        return cli.fail("doctor", said, cli.Exit.USAGE)

    kind = "Preflight" if args.pre else "Checkup"
    findings = (
        asyncio.run(_findings(args, environ)) if args.node is None else _in_pod(args, environ, kind)
    )
    verdicts = {one.verdict for one in findings}
    found = Checked("wrong" not in verdicts, "unknown" not in verdicts, findings)
    lines = finding_lines(findings, every=args.output == "wide")
    answer(args.output, kind, found, folded(lines, environ))

    if not (found.ok and found.complete):
        return cli.Exit.INCOMPLETE if found.ok else cli.Exit.PROBLEM
    return cli.Exit.WARNED if args.strict and "note" in verdicts else cli.Exit.OK


def _in_pod(args: argparse.Namespace, environ: Mapping[str, str], kind: str) -> tuple[Finding, ...]:
    """What doctor finds in the pod of the node's agent.

    Raises:
        Unreachable: there is no such pod, no right to run programs in it, or no answer of doctor.
    """
    given = {"--pre": args.pre, "--read-only": args.read_only}
    words = ["doctor", "-o", "json", *(flag for flag, is_set in given.items() if is_set)]
    if args.only != EVERY:
        words += ["--only", ",".join(sorted(args.only))]

    kubeconfig = vars(args)["--kubeconfig"]
    way = connection_of(Path(kubeconfig) if kubeconfig else None, args.context, environ)
    with working(f"checking {cap(args.node, 64)}"):
        name = "hami-agent doctor"  # for the API server
        read = ask(way, name, lambda api: NodeReader(api, args.node).by_agent(*words))

    try:
        return open_envelope(read, kind, Checked)[0].findings
    except MalformedText as error:
        raise Unreachable(cap(str(error))) from error


async def _findings(args: argparse.Namespace, environ: Mapping[str, str]) -> tuple[Finding, ...]:
    """What is wrong with the settings; if they can be used, also what the other checks find."""
    origin, read = sources(_as_the_agent(args), environ), None
    if not args.pre:
        # A running agent has the last good settings, if the present ones are refused.
        with contextlib.suppress(SettingsError):
            read = await started(origin)

    read = read or await looked(origin)
    try:
        plan = read.taken()
        settings = plan.settings()
        if args.pre:  # an agent that runs goes on, and says so by Events
            check_shares(plan.resolve(settings.node))
    except SettingsError as error:
        refused = Finding("P-SETTINGS", "wrong", "settings", str(error))
        return tuple(concluded([refused], EVERY))

    found = None if args.pre else _ask_agent(settings.paths.run / "api.sock")
    seen = NodeSeen(settings, environ, args.only, found, args.read_only)
    return await examine(seen, _config_findings(plan, settings, read.refusal, before=args.pre))


def _as_the_agent(args: argparse.Namespace) -> argparse.Namespace:
    """The options, and those that the agent of this container was started with, which yield."""
    line = ""
    with contextlib.suppress(OSError):
        line = FIRST_PROCESS.read_bytes().decode(errors="replace")

    _, is_agent, options = line.partition("/hami-agent\0run\0")
    if not is_agent:
        return args  # on the host, or in a pod of its own

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_settings(parser)
    theirs, _ = parser.parse_known_args(options.split("\0")[:-1])
    given = {key: value for key, value in vars(args).items() if value is not None}
    return argparse.Namespace(**vars(theirs) | given)


def _ask_agent(path: Path) -> StatusDocument | Finding:
    """Ask the running agent by its socket; why it does not answer is part of what is found."""
    try:
        return status_at(path).found
    except Unreachable as error:
        reason = error.__cause__
        said = f"no agent answers: {getattr(reason, 'strerror', None) or reason or error}"
        if isinstance(reason, PermissionError):
            return Finding("P-AGENT", "unknown", str(path), said, "run this as root")
        return Finding("P-AGENT", "wrong", str(path), said, "restart it; is --run-dir the agent's?")


async def examine(seen: NodeSeen, config: Iterable[Finding] = ()) -> tuple[Finding, ...]:
    """All findings of the chosen groups, in their order. Each look has a deadline of its own.

    `config`: those about the settings.
    """
    findings = [*config]
    for needed_by, look in LOOKS:
        if seen.groups & needed_by:
            findings += [one async for one in look(seen)]

    return tuple(concluded(findings, seen.groups))


def concluded(findings: Iterable[Finding], groups: frozenset[str]) -> Iterator[Finding]:
    """The findings of these groups, in the order of the checks, without what follows from others.

    A fault is one line: what follows from it is gone once it is repaired, or has a line then.
    """
    order, every = list(CHECKS), [one for one in findings if CHECKS[one.check] in groups]
    every.sort(key=lambda one: order.index(one.check))
    wrong = {one.check for one in every if one.verdict == "wrong"}
    for one in every:
        check, group = one.check, CHECKS[one.check]
        causes = CAUSES.get(one.subject if check == "P-AGENT" else check, ())
        if one.verdict == "ok":
            yield msgspec.structs.replace(one, group=group)
        elif one.verdict == "unknown" or wrong.isdisjoint(causes):
            advice, means = one.advice or ADVICE[check], one.means or MEANS.get(check, NO_OFFER)
            yield msgspec.structs.replace(one, advice=advice, means=means, group=group)


def finding_lines(findings: Sequence[Finding], *, every: bool) -> Iterator[FoldedLine]:
    """What is not well, or with `every` all, and a line with the numbers.

    Each finding has one line, then what it means and what to do.
    """
    for one in (one for one in findings if every or one.verdict != "ok"):
        # Without what a terminal would obey: some texts come from the cluster.
        check, group = cap(one.check, _INDENT), cap(one.group, _INDENT)
        said = cap(f"{one.subject}: {one.said}", _LONGEST)
        word, colour = WORDS[one.verdict]
        yield FoldedLine(f"{group:<10} {word:<8} {check:<12} {said}", 0, _INDENT + 2, word, colour)
        if one.verdict in {"wrong", "note"}:
            yield FoldedLine(f"means: {cap(one.means, _LONGEST)}", _INDENT, _INDENT + 2)

        if one.verdict != "ok":
            todo = f"{cap(one.advice, _LONGEST)} [RUNBOOK {check}]"
            yield FoldedLine(f"to do: {todo.lstrip()}", _INDENT, _INDENT + 2)

    counts = Counter(one.verdict for one in findings)
    if counts.keys() - {"ok"}:
        yield FoldedLine(HINT)

    total = f"{counts['wrong']} wrong, {counted(counts['note'], 'note')}, {counts['ok']} ok"
    total += f", {counts['unknown']} not checked" if counts["unknown"] else ""
    yield FoldedLine(total if every or not counts["ok"] else f"{total} (-o wide lists all)")


# The settings and HAMi's files.


def _config_findings(
    plan: NodeValues, settings: Settings, refusal: SettingsError | None, *, before: bool
) -> Iterator[Finding]:
    """`refusal`: why the present settings are not taken. `before`: no agent has run here yet."""
    last_good = "the agent shares by the last good settings, and starts with them"
    row: Row = (refusal is not None, "wrong", str(refusal), "", last_good)
    yield judged("P-SETTINGS", "settings", f"accepted, for Node {settings.node}", row)

    values, read = plan.resolve(settings.node), plan.sources
    given = ((DEVICE_CONFIG, read.device_config), (NODE_CONFIG, read.node_config))
    files = [(str(values[key].value), text) for key, text in given if values[key].value]
    there = [path for path, text in files if text is not None]
    said = "read" if there else "not there: the agent's own settings and defaults apply"
    is_unknown = settings.plain is None and not settings.match.requests.known
    if is_unknown:
        said += "; annotations are not checked against what their pods request"

    subject = ", ".join(there or (path for path, _ in files)) or "HAMi's ConfigMaps"
    # Without them the node may share otherwise than before, which a running agent has done.
    yield judged("P-HAMI", subject, said, (is_unknown or (before and not there), "note", said))


# The agent's directories, and HAMi-core.


async def _paths(seen: NodeSeen) -> AsyncIterator[Finding]:
    """The directories that the agent writes to; beside an agent also those that are too large."""
    paths, hook = seen.settings.paths, seen.settings.hook_path
    home = hook / "vgpu"
    inner = [place for place in (home, home / "containers") if os.access(place, os.F_OK)]
    # A pod mounts only the inner directory, and its root is read-only.
    yield judge_path(hook, mode="0755", made=False, at=next(iter(inner), hook))
    for place in (paths.state, paths.run, *inner):
        yield judge_path(place, mode="0755" if place in inner else "0750", made=True)

    # The lines above say what is wrong with the directories.
    with contextlib.suppress(AgentError):
        for size, entries, name in large_directories(hook)[:3] if seen.agent else ():
            said = f"keeps {size / 2**20:,.0f} MiB or more in {counted(entries, 'file')}, or has a "
            said += "directory or what may not be read; HAMi-core needs 2 MiB in a few files"
            todo = "ask the pod's owner why (its UID is in the name), or delete the pod"
            means = "when that file system is full, new pods with GPUs are refused (HA-5003)"
            yield Finding("P-PATHS", "note", f"{home}/containers/{name}", said, todo, means)


def judge_path(
    path: Path, check: str = "P-PATHS", mode: str = "0750", *, made: bool, at: Path | None = None
) -> Finding:
    """Judge a directory of the agent. `made`: the agent creates it if missing.

    `mode`: 0755 where containers look into it. `at`: where the agent writes in place of it.
    """
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        above = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
        failure = write_failure(above)
        why = f" and cannot be created: {os.strerror(failure)}" if made else ""
        row: Row = (failure or not made, "wrong", f"does not exist{why}")
        return judged(check, path, "does not exist: the agent creates it", row)
    except OSError as error:
        return Finding(check, "wrong", str(path), f"cannot be looked at: {error.strerror}")

    is_open, whose = who_writes(found, stat.S_IWOTH)
    failure = write_failure(at or path)
    means = "who may write there can replace the sockets, or the limits of containers"
    return judged(
        check,
        path,
        "can be written, only by its owner or a group",
        (not stat.S_ISDIR(found.st_mode), "wrong", "is no directory"),
        (is_open, "wrong", f"others may write there {whose}", f"chown 0 and chmod {mode}", means),
        (failure, "wrong", f"cannot be written: {os.strerror(failure)} {whose}"),
    )


def who_writes(found: os.stat_result, others: int) -> tuple[bool, str]:
    """Whether others than root and the agent may write, by the bits `others`; owner and mode."""
    is_open = found.st_uid not in {0, os.geteuid()} or found.st_mode & others
    return bool(is_open), f"(uid {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o})"


async def _library(seen: NodeSeen) -> AsyncIterator[Finding]:
    """Whether containers load HAMi-core, by the rule of the running agent; who may change it."""
    settings = seen.settings
    home, check = settings.hook_path / "vgpu", "P-LIBRARY"
    if settings.plain is not None and not settings.plain.memory_limits:
        yield Finding(check, "ok", str(home), "not needed with these settings")
        return

    files: dict[Path, os.stat_result] = {}
    try:
        async with Worker("disk") as worker:
            version = settings.library_version
            hooks = HostHookDirs(settings.hook_path, Path("/dev"), version, worker, worker)
            facts = await hooks.facts()

        if not facts.missing:
            check, places = "P-PRELOAD", (Path(facts.library), home / "ld.so.preload")
            files = {path: path.stat() for path in places}

        check_library(facts)
        yield Finding(check, "ok", str(home), f"containers load {mounted_library(facts)}")
    except (AgentError, OSError) as error:
        said = getattr(error, "sentence", str(error))
        yield Finding(check, "wrong", str(home), said, "", NO_OFFER)

    for path, found in files.items():
        is_open, whose = who_writes(found, stat.S_IWGRP | stat.S_IWOTH)
        yield judged(
            check,
            path,
            "everybody may read it, and only its owner write it",
            (is_open, "wrong", f"others than root may write it {whose}"),
            (not found.st_mode & stat.S_IROTH, "wrong", f"not everybody may read it {whose}"),
        )


# The driver and its GPUs.


async def _driver(seen: NodeSeen) -> AsyncIterator[Finding]:
    """The driver and its GPUs, within 15 s. An agent that answers knows more than one scan."""
    settings, scan = seen.settings, None
    if isinstance(seen.agent, StatusDocument):
        return

    failure, remedy = f"the driver did not answer within {DRIVER_SECONDS:g} s", ""
    try:
        async with asyncio.timeout(DRIVER_SECONDS):
            if settings.simulate is not None:  # without the socket that `run` opens for them
                from agent.sandbox.driver import look_once  # noqa: PLC0415 -- only the driver in use

                scan = await look_once(settings.simulate)
            else:
                async with open_driver(settings) as driver:
                    scan = await driver.scan()
                    # GPUs that initialise take seconds to answer.
                    while any(fault.trouble is Trouble.SILENT for fault in scan.faults):
                        await asyncio.sleep(LOOK_SECONDS)
                        scan = await driver.scan()
    except TimeoutError:
        pass  # what the last scan in time found counts
    except (AgentError, OSError) as error:
        failure, remedy = getattr(error, "said", str(error)), getattr(error, "remedy", "")

    name = settings.simulate or settings.nvml_library or "NVIDIA's library (NVML)"
    for finding in judge_driver(str(name), scan, failure, remedy):
        yield finding


def judge_driver(library: str, scan: Scan | None, failure: str, remedy: str) -> Iterator[Finding]:
    """Judge NVIDIA's library and each GPU. `failure`: why there is no scan; `remedy`: for that."""
    if scan is None:
        yield Finding("P-DRIVER", "wrong", library, failure, remedy)
        return

    models = ", ".join(sorted({gpu.name for gpu in scan.gpus})) or "it describes none"
    said = f"driver {scan.driver_version}, {counted(len(scan.gpus), 'GPU')}: {models}"
    if not scan.gpus:  # then one line tells of all GPUs
        said = "; ".join((said, *(f"{one.sentence}: {one.remedy}" for one in scan.faults)))
        yield Finding("P-DRIVER", "wrong", library, said)
        return

    yield Finding("P-DRIVER", "ok", library, said)
    for gpu in (gpu for gpu in scan.gpus if gpu.mig_enabled):
        said = f"{gpu.title} is in MIG mode"
        yield Finding("P-GPU", "note", library, said, "it will not be shared")

    for fault in scan.faults:
        verdict: Verdict = "wrong" if fault.trouble in FAULTS else "note"
        yield Finding("P-GPU", verdict, library, fault.sentence, fault.remedy)


# The kubelet, and other plugins.


async def _kubelet(seen: NodeSeen) -> AsyncIterator[Finding]:
    """The kubelet's directory and socket, and what it answers by PodResources."""
    paths = seen.settings.paths
    found = judge_path(paths.plugins, "P-KUBELET", made=False)
    if found.verdict == "ok":
        is_missing = not paths.kubelet_socket.is_socket()
        row: Row = (is_missing, "wrong", "no socket of a kubelet is there")
        found = judged("P-KUBELET", paths.kubelet_socket, "the kubelet's socket is there", row)

    yield found

    # A person waits for this, and no pod.
    witness, failure, old = PodResourcesWitness(paths.pod_resources_socket, deadline=2.0), "", ""
    try:
        await witness.get("default", "hami-agent-doctor")
    except WitnessUnsupported:
        old = "it is older than 1.34 and cannot say which pod it is admitting"
    except AgentError as error:
        failure = str(error)
    finally:
        witness.close()

    yield judged(
        "P-WITNESS",
        paths.pod_resources_socket,
        "the kubelet answers",
        (failure, "wrong", failure),
        (old, "note", old, "start GPU pods one at a time (HA-2007)"),
    )

    checkpoint = paths.plugins / FILE_NAME
    try:
        decode_records(checkpoint.read_bytes(), seen.settings.sharing.resource)
    except FileNotFoundError:
        pass  # the kubelet writes it with its first list
    except (OSError, MalformedText) as error:
        said = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        todo = "restart the agent: the kubelet writes it anew; if not, see its rights and dmesg"
        yield Finding("P-WITNESS", "wrong", str(checkpoint), said, todo)


async def _plugins(seen: NodeSeen) -> AsyncIterator[Finding]:
    """The sockets behind which other plugins for these GPUs answer here."""
    paths, takeover = seen.settings.paths, seen.settings.takeover
    theirs = foreign_plugins(paths.plugins)
    said = f"another device plugin runs on this node: {', '.join(theirs)}"
    yield judged(
        "P-PLUGIN",
        paths.plugins,
        "no other plugin for these GPUs answers",
        (theirs and takeover, "note", f"{said}; takeover is set", "remove it after the start"),
        (theirs, "wrong", said),
    )


# The agent that runs here.


async def _agent(seen: NodeSeen) -> AsyncIterator[Finding]:
    """What the agent that runs here says of itself, of its GPUs and of the node lock."""
    status = seen.agent
    if isinstance(status, Finding):
        yield status
    if not isinstance(status, StatusDocument):
        return

    # One line for all GPUs of which the same is said.
    alike: defaultdict[tuple[bool, bool, str], list[str]] = defaultdict(list)
    for gpu in (gpu for gpu in status.gpus if gpu_grade(gpu)):
        said = f"is {gpu.health.replace('watch', 'on watch')}: {gpu.text or gpu.cause}"
        alike[gpu.condition in SEVERE, gpu.serving, said].append(gpu.name)

    for (is_severe, serving, said), names in alike.items():
        subject, each = ("GPUs", "each ") if len(names) > 1 else ("GPU", "it ")
        means = "new pods still get it" if serving else OF_ONE_GPU
        verdict: Verdict = "wrong" if is_severe else "note"
        subject = f"{subject} {', '.join(names)}"
        yield Finding("P-GPU", verdict, subject, f"{each}{said}", means=means)

    checks = status.node.checks
    for one in (one for one in checks if not one.ok and one.name != "gpu_health"):
        check = OF_AGENT.get(one.name, "P-AGENT")
        verdict = "wrong" if one.required or check in {"P-DRIVER", "P-CDI"} else "note"
        means = SERVED if check == "P-AGENT" and not one.required else ""
        yield Finding(check, verdict, one.name, one.text or "fails", means=means)

    if is_ready(checks):
        passed = counted(sum(one.ok for one in checks), "check")
        yield Finding("P-AGENT", "ok", "readiness", f"the agent is ready; {passed} of it passed")

    if status.node.lock:
        yield judge_lock(status.node.name, status.node.lock, SystemClock().now())


def judge_lock(node: str, lock: LockStatus, now: dt.datetime) -> Finding:
    """Judge the node lock, which a pod or somebody unknown holds."""
    seconds = (now - lock.since).total_seconds() if lock.since else 0.0
    said = f"held by {cap(lock.holder, 128) or 'nobody named'} for {span(seconds)}"
    unread = f"cannot be read ({cap(lock.holder, 64)}): no scheduler ever takes it over"
    remove = f"remove it: kubectl annotate node {node} {MUTEX_LOCK}-"
    return judged(
        "P-LOCK",
        f"{MUTEX_LOCK} of Node {node}",
        said,
        (lock.since is None, "wrong", unread, remove),
        (seconds > LOCK_EXPIRES, "wrong", said, f"if its pod does not exist, {remove}"),
    )


# The API server: what HAMi's scheduler reads of the Node, and what the kubelet offers.


async def _cluster(seen: NodeSeen) -> AsyncIterator[Finding]:
    """The rights of this account at the API server, and the Node."""
    settings, now = seen.settings, SystemClock().now()
    if settings.plain is not None:
        return

    connection = Connection(settings.kubeconfig, environment=seen.environ)
    server = f"API server by {connection.source}"
    try:
        async with open_session(connection, "hami-agent") as session:
            reader = NodeReader(session, settings.node)
            yield (found := await _rights(seen, reader, server))
            # What a right is missing for is not asked.
            if found.verdict == "wrong" and "get nodes" in found.said:
                return

            node = await reader.get_sight(settings.sharing.resource)
    except AgentError as error:
        said = f"{error.said}; what it knows of this node is not checked"
        # An agent that runs says itself what it lacks of the API server.
        verdict: Verdict = "wrong" if seen.agent is None else "unknown"
        remedy = error.remedy or "repair the connection or the permissions"
        yield Finding("P-NODE", verdict, server, said, remedy)
        return

    row: Row = (node is None, "wrong", "the API server knows no such Node")
    yield judged("P-NODE", f"Node {settings.node}", "exists", row)
    if node is not None and seen.agent is not None:
        yield judge_offer(node, settings.sharing.resource, now)
        yield judge_report(node, settings.report.profile, now)


async def _rights(seen: NodeSeen, reader: NodeReader, server: str) -> Finding:
    """The rights of this account; that to read a pod is asked by the name of one."""
    wanted = rights(seen.settings.node, node_condition=seen.settings.node_condition)
    unasked = [one for one in wanted if seen.reader and one.verb not in {"get", "list", "watch"}]
    denied = [one for one in wanted if one not in unasked and not await reader.granted(one)]
    if all(one.words != "list pods" for one in denied):
        for pod in (await reader.pods(decode_listed))[:1]:
            right = Right("get", "pods", pod.name, pod.namespace)
            denied += [] if await reader.granted(right) else [right]

    lacks, unknown = (", ".join(one.words for one in each) for each in (denied, unasked))
    partly = f"this account can read what the agent reads; not checked: {unknown}"
    return judged(
        "P-RIGHTS",
        server,
        "all permissions of the agent are granted",
        (lacks, "wrong", f"these are denied: {lacks}"),
        (unknown, "note", partly, "run this check as the agent once it is installed"),
    )


def judge_offer(node: ClusterNode, resource: str, now: dt.datetime) -> Finding:
    """Judge allocatable against the healthy slices of the register annotation."""
    offered, gpus = node.slices, read_register(node.annotations.get(REGISTER))
    healthy = sum(gpu.split_count for gpu in gpus if gpu.healthy)
    said = f"{offered}, and the register annotation has {healthy} healthy slices"
    age = node.age(now)
    verdict: Verdict = "note" if age is not None and age < KUBELET_WITHIN else "wrong"
    return judged(
        "P-OFFER",
        f"allocatable {resource} of Node {node.name}",
        f"{offered} = healthy {healthy} (capacity {node.capacity})",
        (not gpus, "wrong", f"{offered}, and no register annotation that can be read"),
        (offered != healthy, verdict, said),
    )


def judge_report(node: ClusterNode, profile: ReportProfile, now: dt.datetime) -> Finding:
    """Judge by the handshake whether a scheduler has read the agent's report.

    With the profile `json` the agent removes the handshake with each report, and schedulers from
    2.9 on write it again when they read the report. With the others it stamps it every 30 s.
    """
    text, report = node.annotations.get(HANDSHAKE, ""), node.annotations.get(REGISTER)
    gpus, known = read_register(report), node.age(now)
    # Schedulers from 2.10 on remove it when they drop a node whose slices are gone.
    is_offered = report is not None and (not gpus or any(gpu.healthy for gpu in gpus))
    is_unread = profile is ReportProfile.JSON and not text and is_offered
    since = "" if known is None else f" of {span(known)} ago"
    late = f"absent: no scheduler has read the report{since} (2.8 never says so)"
    dropped = f"the scheduler dropped this node's GPUs ({cap(text, 64)})"
    return judged(
        "P-REPORT",
        f"{HANDSHAKE} of Node {node.name}",
        cap(text, 64) or "absent: the report is new, offers no slice, or there is none",
        (text.startswith("Deleted"), "wrong", dropped),
        (is_unread and (known is None or known >= READ_WITHIN), "note", late),
    )


LOOKS: Final[Sequence[tuple[set[str], Callable[[NodeSeen], AsyncIterator[Finding]]]]] = (
    ({"driver"}, _driver),
    ({"kubelet"}, _kubelet),
    ({"kubelet", "api", "scheduler"}, _cluster),
    ({"kubelet"}, _plugins),
    ({"library"}, _library),
    ({"agent", "driver", "scheduler"}, _agent),
    ({"paths"}, _paths),
)
"""The looks, each with the groups that need it. One that lacks what it needs finds nothing."""
