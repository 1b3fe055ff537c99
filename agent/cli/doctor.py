"""`hami-agent doctor`: checks this node, beside the agent or before it starts there (`--pre`).

It looks at what is at hand, runs each check of a table that has what it needs, and changes nothing.
"""

import argparse
import asyncio
import contextlib
import datetime as dt
import difflib
import errno
import os
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from agent.allocate.edits import looks_up_cdi, undefined
from agent.app.agent import cdi_directories, open_driver
from agent.cli.checks import (
    ALL_GROUPS,
    CHECKS,
    FROM_API,
    LAST_GOOD,
    REPAIR,
    UNNEEDED,
    AgentAnswer,
    Finding,
    Row,
    Verdict,
    concluded,
    judge_agent,
    judge_driver,
    judge_handshake,
    judge_leftovers,
    judge_library_files,
    judge_lock,
    judge_node,
    judge_offer,
    judge_path,
    judge_plugins,
    judge_report,
    judge_rights,
    judge_writer,
    judged,
)
from agent.cli.config import add_settings, flags, looked, sources, started
from agent.cli.connections import ask, connection_of, open_session
from agent.cli.main import (
    INCOMPLETE,
    OK,
    PROBLEM,
    TABLE,
    USAGE,
    WARNED,
    Subparsers,
    Unreachable,
    add_output,
    fail,
)
from agent.cli.output import UNFOLDED, FoldedLine, answer, folded, painter, terminal_width, working
from agent.cli.status import status_at
from agent.cli.support import HINT
from agent.cluster import REGISTER
from agent.errors import (
    AgentError,
    ApiError,
    DriverMissing,
    KubeletError,
    MalformedText,
    SettingsError,
    StateError,
    WitnessUnsupported,
    cap,
)
from agent.hami.annotations import ReportProfile, register_differences, report_of
from agent.hookdirs import HostHookDirs, large_directories
from agent.host.node import look_at, plugin_sockets
from agent.host.system import LockFile, Worker
from agent.inventory import InventoryKeeper
from agent.kit.cell import Cell
from agent.kit.logs import configure
from agent.kit.timing import SystemClock
from agent.kit.units import counted, some
from agent.kube.client import Connection
from agent.kube.reader import NodeReader, decode_listed
from agent.ledger import HookFacts
from agent.model import Inventory, Scan, Trouble
from agent.node import NodeSight, PluginSocket, Right, rights
from agent.settings.reading import DEVICE_CONFIG, NODE_CONFIG, NodeValues
from agent.settings.schema import Settings, check_shares
from agent.status import open_envelope
from agent.witness import PodResourcesWitness

LARGEST: Final = 3
"""How many of the container directories that are too large have a line."""

RECORDED_WITHIN: Final = dt.timedelta(seconds=60)
"""The kubelet records an answer within that time."""

LIKENESS: Final = 0.8
"""From this ratio on, a name may be a misspelt name of this Node."""

DRIVER_SECONDS: Final = 15.0
"""8 GPUs that initialise one after the other take 12 s."""

LOOK_SECONDS: Final = 1.0
"""Between two scans, and for a look at the CDI specifications."""

CONTROL: Final = ("nvidiactl", "nvidia-uvm")
"""The device files that every CUDA program opens."""

REFUSED: Final = {
    errno.ENOENT: (
        "does not exist",
        "load the module on the host (nvidia-modprobe -u -c 0), or pass the file in",
    ),
    # open(2): EACCES is the file's mode, EPERM a device cgroup that has no rule for it.
    errno.EACCES: ("may not be opened by this user", "run this check as root"),
    errno.EPERM: (
        "may not be opened: the device cgroup forbids it",
        "restart this container: its device rules are older than the driver's files (DeviceAllow)",
    ),
}
"""What is said of a device file that cannot be opened, and what to do."""

CORRECT: Final = "correct it; `hami-agent config check` prints what each node would get"

OURS: Final = re.compile(r".*/hami-(.+)-[0-9a-f]{8}\.sock")
"""The path of an agent's socket. Source: agent/kubelet/door.py, socket_name."""

PROGRAM: Final = "hami-agent doctor"
"""The name under which the API server sees the requests of `--node`."""

FIRST_PROCESS: Final = Path("/proc/1/cmdline")
"""In the agent's pod: the agent."""

WORDS: Final[Mapping[Verdict, tuple[str, str]]] = {
    "wrong": ("WRONG", "red"),
    "note": ("note", "yellow"),
    "unknown": ("unknown", "yellow"),
    "ok": ("ok", "green"),
}
"""The word of a verdict for people, and its colour."""

_GROUPS: Final = ", ".join(CHECKS)
_INDENT: Final = 20
"""Columns before what a finding means; also the longest id that is shown."""

_LONGEST: Final = 1024
"""Characters of a text; some come from the cluster."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb `doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        description="Checks this node with the settings of `run`, and changes nothing. Each line "
        "says what was checked and what was found, what that means for pods, what to do, and the "
        "entry of the runbook. What is well is only counted; -o wide lists it. With --pre it "
        "checks what the agent needs before it starts; without, also the agent that runs, and "
        f"what Node, kubelet and scheduler show of it. Groups: {_GROUPS}. Exits 0 if nothing is "
        "wrong, 1 if something is, 5 if nothing is but something could not be checked, 6 with "
        "--strict if there are notes alone.",
        epilog="example: hami-agent doctor --only kubelet,scheduler -o json",
    )

    add, choice = parser.add_argument, parser.add_mutually_exclusive_group()
    add(
        "--node",
        metavar="NAME",
        help="check that node of the cluster, in the pod of its agent (pods/exec)",
    )
    add("--context", default="", metavar="NAME", help="with --node: context of the kubeconfig")
    add(
        "--pre",
        action="store_true",
        help="check before the first start, or before a switch from another plugin",
    )
    for flag, text in (
        ("--only", "check these groups alone"),
        ("--skip", "do not check these groups"),
    ):
        choice.add_argument(flag, type=_groups, metavar="GROUP[,GROUP]", help=text)

    add("--strict", action="store_true", help="exit 6 if there are notes, and nothing is wrong")
    add(
        "--read-only",
        action="store_true",
        help="do not check the rights to write, for an account that may only read",
    )
    add_output(parser, forms=(TABLE, "wide", "json", "yaml"))
    add_settings(parser)


def _groups(text: str) -> frozenset[str]:
    """Read the value of --only and --skip. Raises ArgumentTypeError."""
    words = [word.strip() for word in text.split(",")]
    if unknown := [word for word in words if word not in CHECKS]:
        text = f"there is no group {cap(unknown[0], 64)!r}; the groups are {_GROUPS}"
        raise argparse.ArgumentTypeError(text)

    return frozenset(words)


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print what was found; return the exit code."""
    configure("error", "auto", environ)

    # An option that would be ignored is refused: its user expects it to count.
    if args.node is None and args.context:
        return fail("doctor", "--context: only --node reads a cluster; give --node NAME", USAGE)

    given = [flag for flag in flags(args) if flag != "--kubeconfig"]
    given += ["--config"] * (args.config is not None)
    if args.node is not None and given:
        return fail(
            "doctor", f"{', '.join(given)}: the agent of {args.node} has settings of its own", USAGE
        )

    kind = "Preflight" if args.pre else "Checkup"
    findings = (
        asyncio.run(_findings(args, environ)) if args.node is None else _in_pod(args, environ, kind)
    )
    verdicts = {one.verdict for one in findings}
    found = Checked("wrong" not in verdicts, "unknown" not in verdicts, findings)
    lines = finding_lines(findings, every=args.output == "wide")
    answer(
        args.output, kind, found, folded(lines, terminal_width(environ, UNFOLDED), painter(environ))
    )

    if not (found.ok and found.complete):
        return INCOMPLETE if found.ok else PROBLEM
    return WARNED if args.strict and "note" in verdicts else OK


class Checked(msgspec.Struct, frozen=True):
    """The data of `doctor -o json`. `ok`: nothing is wrong. `complete`: everything was checked."""

    ok: bool
    complete: bool
    findings: tuple[Finding, ...]


def _in_pod(args: argparse.Namespace, environ: Mapping[str, str], kind: str) -> tuple[Finding, ...]:
    """What doctor finds in the pod of the node's agent.

    Raises:
        Unreachable: there is no such pod, no right to run programs in it, or no answer of doctor.
    """
    words = ["doctor", "-o", "json", *["--pre"] * args.pre, *["--read-only"] * args.read_only]
    for name in ("only", "skip"):
        words += [f"--{name}", ",".join(sorted(chosen))] if (chosen := vars(args)[name]) else []

    kubeconfig = vars(args)["--kubeconfig"]
    way = connection_of(Path(kubeconfig) if kubeconfig else None, args.context, environ)
    with working(f"checking {cap(args.node, 64)}"):
        answer = ask(way, PROGRAM, lambda api: NodeReader(api, args.node).by_agent(*words))

    try:
        return open_envelope(answer, kind, Checked)[0].findings
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
    except SettingsError as error:
        refused = Finding("P-SETTINGS", "wrong", "settings", str(error), CORRECT)
        return tuple(concluded([refused], ALL_GROUPS))

    seen = NodeSeen(
        settings,
        environ,
        args.only or ALL_GROUPS - (args.skip or frozenset()),
        None if args.pre else _ask_agent(settings.paths.run / "api.sock"),
        reader=args.read_only,
    )
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


def _config_findings(
    plan: NodeValues, settings: Settings, refusal: SettingsError | None, *, before: bool
) -> Iterator[Finding]:
    """The settings, HAMi's files, and the names of Nodes.

    `refusal`: why the present settings are not taken. `before`: no agent has run here yet.
    """
    node, values, read = settings.node, plan.resolve(settings.node), plan.sources
    problem = ""
    try:
        check_shares(values)
    except SettingsError as error:
        problem = str(error)

    yield judged(
        "P-SETTINGS",
        "settings",
        f"accepted, for Node {node}",
        (refusal is not None, "wrong", str(refusal), CORRECT, LAST_GOOD),
        (problem, "wrong", problem),
    )
    for text in plan.warnings:
        yield Finding("P-SETTINGS", "note", "settings", text, "it changes nothing here")

    given = ((DEVICE_CONFIG, read.device_config), (NODE_CONFIG, read.node_config))
    files = [(str(values[key].value), text) for key, text in given if values[key].value]
    there = [path for path, text in files if text is not None]
    said = "read" if there else "not there: the agent's own settings and defaults apply"
    entries = [profile for profile in plan.profiles if profile.tier]
    named = [name for profile in entries for name in profile.nodes]
    if node in named:
        said += f"; {node} is named"
    elif named and len(named) >= len(entries):  # else one by labels or for all others may apply
        said += f"; {node} is not among the nodes named"

    # Without them the node may share otherwise than before, which a running agent has done.
    advice = "to keep the settings of HAMi's release" if before and not there else ""
    if settings.plain is None and not settings.match.requests.known:
        said += "; annotations are not checked against what their pods request"
        advice = advice or "to check them as HAMi after 2.10 does"

    subject = ", ".join(there or (path for path, _ in files)) or "HAMi's ConfigMaps"
    note: Row = (advice, "note", said, f"{advice}, mount its ConfigMaps")
    yield judged("P-HAMI", subject, said, note)
    if before:
        return

    where = ", ".join(file.name for file in (read.own, read.node_config) if file) or "settings"
    names = list(dict.fromkeys(named))
    alike = [cap(name, 64) for name in names if node not in names and is_alike(name, node)]
    yield judged(
        "P-ENTRIES",
        where,
        f"{counted(len(names), 'Node')} named" if names else "no entry names a Node",
        (
            alike,
            "note",
            f"an entry for {some(alike)} does not match this Node; did you mean {node}?",
            "write the Node's name as `kubectl get nodes` shows it, or remove the entry",
        ),
    )


def is_alike(name: str, node: str) -> bool:
    """True if `name` may be meant for the Node `node`: another case, domain or spelling."""
    one, other = name.lower(), node.lower()
    # Nodes of one pool differ by their number alone.
    is_next = one.rstrip(string.digits) == other.rstrip(string.digits)
    ratio = 0.0 if is_next else difflib.SequenceMatcher(None, one, other).ratio()
    return ratio >= LIKENESS or one.partition(".")[0] == other.partition(".")[0]


def _ask_agent(path: Path) -> AgentAnswer:
    """Ask the running agent by its socket; why it does not answer is part of what is found."""
    try:
        found, answered = status_at(path).found, SystemClock().now() - RECORDED_WITHIN
    except Unreachable as error:
        reason = error.__cause__
        failure = os.strerror(reason.errno) if isinstance(reason, OSError) and reason.errno else ""
        return AgentAnswer(
            str(path),
            failure=failure or str(reason or error),
            denied=isinstance(reason, PermissionError),
        )

    held = tuple(
        (one.namespace, one.pod, one.container)
        for one in found.allocations or ()
        if one.pod and not one.ended and one.decided_by == "scheduler"
        if one.since and one.since < answered
    )
    return AgentAnswer(str(path), found.node.checks, held=held)


class NodeSeen(msgspec.Struct, eq=False):
    """What is at hand of a node, and what the looks have seen there.

    - `agent`: the answer of the agent; None: before the first start.
    - `reader`: the account may only read, and is not the agent's.

    Written by the looks:

    - `server`: the API server; empty: it is not asked in plain mode, nor for other groups.
    - `node`: None: there is none, or it was not read.
    - `plugins`: pods of other device plugins for NVIDIA GPUs.
    - `scan`: None: the driver was not asked, or gave none.
    - `sockets`: all sockets in the kubelet's directory but its own.
    """

    settings: Settings
    environ: Mapping[str, str]
    groups: frozenset[str] = ALL_GROUPS
    agent: AgentAnswer | None = None
    reader: bool = False
    device_files: Path = Path("/dev")
    server: str = ""
    node: NodeSight | None = None
    plugins: tuple[str, ...] = ()
    scan: Scan | None = None
    sockets: tuple[PluginSocket, ...] = ()


async def examine(seen: NodeSeen, config: Iterable[Finding] = ()) -> tuple[Finding, ...]:
    """All findings of the chosen groups, in their order. Each look has a deadline of its own.

    `config`: those about the settings.
    """
    paths, findings = seen.settings.paths, [*config]
    seen.sockets = plugin_sockets(paths.plugins, paths.kubelet_socket.name)
    for needed_by, find in LOOKS:
        if seen.groups & needed_by:
            await find(seen, findings)

    # One finding for each group of which checks were not made. There is nothing to say of the
    # monitor without HAMi's plugin.
    made = {one.check for one in findings} | {"P-MONITOR"}
    for group in FROM_API if seen.server and seen.agent is not None else ():
        if missing := [check for check in CHECKS[group] if check not in made]:
            advice = "repair what is said of the API server, and run this check again"
            said = f"not checked: {', '.join(missing)}"
            findings.append(Finding(missing[0], "unknown", seen.server, said, advice))

    return tuple(concluded(findings, seen.groups))


# The looks of the table.


async def _paths(seen: NodeSeen, found: list[Finding]) -> None:
    """The directories that the agent writes to; beside an agent also those that are too large."""
    paths, home = seen.settings.paths, seen.settings.hook_path / "vgpu"
    hook, inner = look_at(seen.settings.hook_path), look_at(home)
    if inner.kind:  # a pod mounts only this directory, and its root is read-only
        hook = msgspec.structs.replace(hook, failure=inner.failure)

    below = (place for place in (inner, look_at(home / "containers")) if place.kind)
    inside = (judge_path(place, made=True) for place in below)
    found += [judge_path(look_at(path), made=True) for path in (paths.state, paths.run)]
    found += [judge_path(hook, made=False), *(one for one in inside if one.verdict != "ok")]
    if seen.agent is None:
        return

    # The lines above say what is wrong with the directories.
    with contextlib.suppress(StateError):
        for size, entries, name in large_directories(seen.settings.hook_path)[:LARGEST]:
            found.append(
                Finding(
                    "P-PATHS",
                    "note",
                    f"{home}/containers/{name}",
                    f"keeps {size / 2**20:,.0f} MiB or more in {counted(entries, 'file')}, or "
                    "has a directory or what may not be read; HAMi-core needs 2 MiB in a few files",
                    "ask the pod's owner why (its UID is in the name), or delete the pod",
                    "when that file system is full, new pods with GPUs are refused (HA-5003)",
                )
            )


async def _agent(seen: NodeSeen, found: list[Finding]) -> None:
    """The agent that runs here, and whether it is the only one."""
    if seen.agent is None:
        return

    lock = seen.settings.paths.run / "lock"
    serving = [one.path for one in seen.sockets if one.alive and OURS.fullmatch(one.path)]
    holder = LockFile(lock).holder().strip()  # also when it has ended
    held = f"last taken by {holder}" if holder else "names no holder"
    second: Row = (
        len(serving) > 1,
        "wrong",
        f"{counted(len(serving), 'agent')} serve the kubelet of this node",
        "stop all but one: the systemd service and the DaemonSet exclude each other",
    )
    well = f"{held}; {counted(len(serving), 'live socket')} of agents at the kubelet"
    subject = ", ".join(serving) if len(serving) > 1 else str(lock)
    found += [*judge_agent(seen.agent), judged("P-SECOND", subject, well, second)]


async def _library(seen: NodeSeen, found: list[Finding]) -> None:
    """Whether HAMi-core's files exist, and whether containers load them."""
    settings, facts = seen.settings, HookFacts("")
    is_needed = settings.plain is None or settings.plain.memory_limits
    home, version = settings.hook_path / "vgpu", settings.library_version
    async with Worker("disk") as worker:
        try:
            hooks = HostHookDirs(settings.hook_path, Path("/dev"), version, worker, worker)
            facts = await hooks.facts()
            missing = ", ".join(facts.missing)
        except (StateError, OSError) as error:
            missing = getattr(error, "strerror", None) or str(error)

    said, advice = f"not there: {missing}", "put HAMi-core's files there; until then no slice is on"
    found.append(
        judged(
            "P-LIBRARY",
            str(home),
            "libvgpu.so and ld.so.preload are there",
            (missing and is_needed, "wrong", said, f"{advice} offer (HA-5005)"),
            (missing, "ok", f"{said}; not needed with these settings"),
            (not is_needed, "ok", "not needed with these settings"),
        )
    )
    if is_needed and not missing:
        found += judge_library_files(
            look_at(Path(facts.library)), look_at(home / "ld.so.preload"), facts
        )


async def _driver(seen: NodeSeen, found: list[Finding]) -> None:
    """The driver, within 15 s, and whether CDI and the device files have its GPUs."""
    settings, agent = seen.settings, seen.agent
    failure, remedy = f"the driver did not answer within {DRIVER_SECONDS:g} s", None
    try:
        async with asyncio.timeout(DRIVER_SECONDS):
            await _scan(seen)
    except TimeoutError:
        pass  # what the last scan in time found counts
    except (AgentError, OSError) as error:
        failure, remedy = _failure_of(error)

    name = settings.simulate or settings.nvml_library or "NVIDIA's library (NVML)"
    # An agent that runs goes on offering what is silent; without a library it offers nothing.
    is_offered = agent is not None and not agent.failure and remedy is None
    hang = settings.health.driver_hang if is_offered else 0.0
    found += judge_driver(name, seen.scan, failure, remedy, hang=hang)
    if looks_up_cdi(settings.edits):
        found.append(await _cdi(seen))

    if agent is not None and settings.simulate is None:
        described = None if seen.scan is None else len(seen.scan.gpus) + len(seen.scan.faults)
        found += _access(seen.device_files, described)


async def _cdi(seen: NodeSeen) -> Finding:
    """Whether a container runtime finds the GPUs by the CDI names of the answers."""
    sharing, edits, defined = seen.settings.sharing, seen.settings.edits, None
    async with Worker("cdi") as worker:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                cdi = cdi_directories(seen.settings, seen.environ, worker)
                defined = await cdi.names(edits.cdi_spec_dirs)

    gpus = seen.scan.gpus if seen.scan else ()
    shared = [gpu.uuid for gpu in gpus if not (sharing.filters(gpu) or gpu.mig_enabled)]
    fault = None if defined is None else undefined(shared, edits, defined)
    return judged(
        "P-CDI",
        ", ".join(edits.cdi_spec_dirs),
        f"defines {counted(len(shared), 'GPU')}",
        (
            defined is None,
            "unknown",
            "cannot be read, or is not mounted here, so GPUs are on offer whatever it defines",
            "mount the host's directories read-only at the same paths, or run this as root",
        ),
        (fault, "wrong", *(fault or ("", ""))),
    )


def _access(directory: Path, gpus: int | None) -> Iterator[Finding]:
    """Whether the device files of the driver can be opened. `gpus`: None: not known.

    Those of GPUs are only counted: opening them would wake the GPUs.
    """
    faults = []
    for path in [directory / name for name in CONTROL]:
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
        except OSError as error:
            other = f"cannot be opened ({error.strerror})", REPAIR
            verdict: Verdict = "unknown" if error.errno == errno.EACCES else "wrong"
            words = REFUSED.get(error.errno or 0, other)
            faults.append(Finding("P-ACCESS", verdict, str(path), *words))

    # Others, such as nvidia-modeset, are of no GPU.
    seen = len(list(directory.glob("nvidia[0-9]*")))
    yield from faults
    if gpus is not None and seen < gpus:
        said = f"{counted(gpus, 'GPU')} in the driver, {counted(seen, 'device file')} here"
        advice = (
            "pass all GPUs to this container (NVIDIA_VISIBLE_DEVICES=all), or create the missing "
            "ones on the host: nvidia-modprobe -c N"
        )
        yield Finding("P-ACCESS", "note", "/dev/nvidiaN", said, advice)
    elif not faults:
        subject = ", ".join(str(directory / name) for name in CONTROL)
        yield Finding("P-ACCESS", "ok", subject, f"can be opened; {counted(seen, 'file')} of GPUs")


async def _scan(seen: NodeSeen) -> None:
    """Scan until no GPU is waking: those that initialise take seconds to answer.

    Simulated GPUs are scanned once, without the socket that `run` opens for them. Raises
    DriverMissing, DriverError, SettingsError.
    """
    spec = seen.settings.simulate
    if spec is not None:
        from agent.sandbox.driver import look_once  # noqa: PLC0415 -- only the driver in use

        seen.scan = await look_once(spec)
        return

    async with open_driver(seen.settings) as driver:
        while True:
            seen.scan = await driver.scan()
            if all(fault.trouble is not Trouble.SILENT for fault in seen.scan.faults):
                return

            await asyncio.sleep(LOOK_SECONDS)


def _failure_of(error: AgentError | OSError) -> tuple[str, str | None]:
    """The failure and the remedy. Empty remedy: the failure contains it. None: it is not known.

    The text form prints both in one line; scripts read them separately.
    """
    if isinstance(error, DriverMissing | SettingsError):
        return error.said, error.remedy

    return getattr(error, "strerror", None) or str(error), None


async def _kubelet(seen: NodeSeen, found: list[Finding]) -> None:
    """The kubelet's directory and socket, and what it answers by PodResources."""
    paths, agent = seen.settings.paths, seen.agent
    directory = judge_path(look_at(paths.plugins), "P-KUBELET", made=False)
    socket = judged(
        "P-KUBELET",
        str(paths.kubelet_socket),
        "the kubelet's socket is there",
        (
            look_at(paths.kubelet_socket).kind != "socket",
            "wrong",
            "no socket of a kubelet is there",
            "start the kubelet, or set paths.kubeletSocket to its socket",
        ),
    )
    found.append(socket if directory.verdict == "ok" else directory)

    # A person waits for this, and no pod.
    witness = PodResourcesWitness(paths.pod_resources_socket, deadline=2.0)
    booked: dict[tuple[str, str, str], bool] | None = None
    failure, asks = "", True
    try:
        booked = {
            (pod.namespace, pod.pod, name): bool(ids.get(seen.settings.sharing.resource))
            for pod in await witness.list()
            for name, ids in pod.containers.items()
        }
        await witness.get("default", "hami-agent-doctor")
    except WitnessUnsupported:
        asks = False
    except KubeletError as error:
        failure = str(error)
    finally:
        witness.close()

    books = booked or {}
    held = sum(books.values())
    hold = "holds slices" if held == 1 else "hold slices"
    known = f"the kubelet answers, and {counted(held, 'container')} {hold}"
    if held and (agent is None or agent.failure):
        known += "; the agent takes them over with the ids that they have"

    # The kubelet never lists ordinary init containers.
    lost = [key for key in (agent.held if agent else ()) if books.get(key) is False]
    pods = {f"{cap(space, 64)}/{cap(pod, 256)}" for space, pod, _ in lost}
    found.append(
        judged(
            "P-WITNESS",
            str(paths.pod_resources_socket),
            known,
            (
                booked is None,
                "wrong",
                failure,
                "check that the kubelet runs and that paths.podResourcesSocket names its socket",
            ),
            (
                lost,
                "note",
                (
                    f"{known}; it has no record of {counted(len(lost), 'container')} that the "
                    f"agent answered, as after a lost checkpoint: {some(pods)}"
                ),
                (
                    "delete these pods one after the other when they may stop: those that their "
                    "controllers create instead are recorded"
                ),
                (
                    "they run on; when their containers die together, they and a few new pods may "
                    "be refused (HA-2002)"
                ),
            ),
            (
                not asks,
                "note",
                f"{known}; it cannot say which pod it is admitting",
                "this kubelet is older than 1.34: start GPU pods one at a time (HA-2007)",
            ),
        )
    )


async def _plugins(seen: NodeSeen, found: list[Finding]) -> None:
    """Other plugins that run here, and what HAMi's left."""
    settings, running = seen.settings, seen.agent is not None
    found += (
        *judge_plugins(
            look_at(settings.paths.plugins),
            seen.sockets,
            seen.plugins,
            # The register annotation is the agent's own while it runs, and no sign of HAMi's.
            reported=not running and seen.node is not None and REGISTER in seen.node.annotations,
            takeover=settings.takeover,
        ),
        *judge_leftovers(
            seen.node if running else None,
            seen.sockets,
            stamps=settings.report.profile is ReportProfile.COLON,
            scores=settings.report.topology_score,
        ),
    )


async def _cluster(seen: NodeSeen, found: list[Finding]) -> None:
    """The API server; what HAMi's scheduler reads of the Node, and what the kubelet offers."""
    settings, profile = seen.settings, seen.settings.report.profile
    if settings.plain is not None:
        return

    connection = Connection(
        Path(settings.kubeconfig) if settings.kubeconfig else None, environment=seen.environ
    )
    seen.server, answered = f"API server by {connection.source}", list[Finding]()
    try:
        async with open_session(connection, "hami-agent") as session:
            await _ask_cluster(seen, NodeReader(session, settings.node), answered)
    except (ApiError, SettingsError) as error:
        said, remedy = _failure_of(error)
        seen.node, seen.plugins = None, ()
        # An agent that runs says itself what it lacks of the API server.
        verdict: Verdict = "wrong" if seen.agent is None else "unknown"
        remedy = remedy or "repair the connection or the permissions, and run this again"
        answered = [Finding("P-NODE", verdict, seen.server, said, remedy)]

    found += answered
    if (node := seen.node) is None:
        return

    is_there = REGISTER in node.annotations
    if is_there and seen.scan is not None:
        differences = report_differences(settings, seen.scan, node.annotations)
        node = msgspec.structs.replace(node, differences=differences)

    if seen.agent is not None:
        now = SystemClock().now()
        found += [
            judge_offer(node, settings.sharing.resource, now),
            judge_report(node, profile),
            judge_handshake(node, profile, now),
            judge_writer(node),
            judge_lock(node, now),
        ]
    elif is_there and seen.scan is not None:
        found.append(judge_report(node, None))


async def _ask_cluster(seen: NodeSeen, reader: NodeReader, found: list[Finding]) -> None:
    """The rights of this account, the plugins here, the Node.

    What a right is missing for is not asked. Raises ApiError.
    """
    settings, running = seen.settings, seen.agent is not None
    wanted = rights(settings.node, node_condition=settings.node_condition)
    unasked = [one for one in wanted if seen.reader and one.verb not in {"get", "list", "watch"}]
    denied = [one for one in wanted if one not in unasked and not await reader.granted(one)]
    words = {right.words for right in denied}
    if "list pods" not in words:
        neighbours = await reader.pods(decode_listed)
        others = (pod for pod in neighbours if pod.is_other_plugin)
        seen.plugins = tuple(f"{pod.namespace}/{pod.name}" for pod in others)
        for pod in neighbours[:1]:
            right = Right("get", "pods", pod.name, pod.namespace)
            denied += [] if await reader.granted(right) else [right]

    if "get nodes" not in words:
        seen.node = await reader.get_sight(settings.sharing.resource)
        found += judge_node(settings.node, seen.node)

    excess = [one for one in UNNEEDED if running and await reader.granted(one)]
    found += judge_rights(seen.server, denied, unasked, excess if running else None)


def report_differences(
    settings: Settings, scan: Scan, annotations: Mapping[str, str]
) -> tuple[str, ...]:
    """Where the Node's register annotation differs from what the agent would write.

    A GPU that the driver does not describe now is left out: an agent that runs goes on naming it.
    """
    inventory = Cell(Inventory())
    InventoryKeeper(inventory, Cell(settings.sharing), SystemClock()).found(scan)
    report = report_of(inventory.value, annotations, settings.report)
    if report is None:
        return ()

    faulty = frozenset(fault.gpu for fault in scan.faults)
    return register_differences(report, faulty)


LOOKS: Final = (
    # What the driver says is also held against the report that the scheduler reads.
    ({"driver", "scheduler"}, _driver),
    ({"kubelet"}, _kubelet),
    # Pods of other plugins are read with the Node.
    ({*FROM_API}, _cluster),
    ({"kubelet", "scheduler"}, _plugins),
    ({"library"}, _library),
    ({"agent"}, _agent),
    ({"paths"}, _paths),
)
"""The looks, each with the groups that need it. One that lacks what it needs finds nothing."""


def finding_lines(findings: Sequence[Finding], *, every: bool) -> Iterator[FoldedLine]:
    """What is not well, or with `every` all, and a line with the numbers.

    Each finding has one line, then what it means and what to do.
    """
    for one in (one for one in findings if every or one.verdict != "ok"):
        # Without what a terminal would obey: some texts come from the cluster.
        check, group = cap(one.check, _INDENT), cap(one.group, _INDENT)
        said, advice = cap(f"{one.subject}: {one.said}", _LONGEST), cap(one.advice, _LONGEST)
        word, colour = WORDS[one.verdict]
        yield FoldedLine(f"{group:<10} {word:<8} {check:<12} {said}", 0, _INDENT + 2, word, colour)
        if one.verdict in {"wrong", "note"}:
            yield FoldedLine(f"means: {cap(one.means, _LONGEST)}", _INDENT, _INDENT + 2)

        if one.verdict != "ok":
            todo = f"{advice} [RUNBOOK {check}]"
            yield FoldedLine(f"to do: {todo.lstrip()}", _INDENT, _INDENT + 2)

    counts = Counter(one.verdict for one in findings)
    if counts.keys() - {"ok"}:
        yield FoldedLine(HINT)

    total = f"{counts['wrong']} wrong, {counted(counts['note'], 'note')}, {counts['ok']} ok"
    total += f", {counts['unknown']} not checked" if counts["unknown"] else ""
    yield FoldedLine(total if every or not counts["ok"] else f"{total} (-o wide lists all)")
