"""`hami-agent doctor`: checks this node, beside the agent or before it starts there (`--pre`).

It looks at what is at hand, runs each check of a table that has what it needs, and changes nothing.
"""

import argparse
import asyncio
import contextlib
import os
import random
import sys
import textwrap
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

import agent
from agent.allocate.edits import looks_up_cdi
from agent.app.adapters import cdi_directories, open_driver
from agent.cli.connections import Unreachable, call
from agent.cli.logs import configure
from agent.cli.main import INCOMPLETE, OK, PROBLEM, TABLE, WARNED, Subparsers, add_output, nearest
from agent.cli.output import UNFOLDED, document, terminal_width
from agent.cli.settings_args import add_settings, looked, sources, started
from agent.cluster import HANDSHAKE, MUTEX_LOCK, REGISTER
from agent.errors import (
    AgentError,
    ApiError,
    ApiNotFound,
    DriverMissing,
    KubeletError,
    SettingsError,
    StateError,
    WitnessUnsupported,
    cap,
)
from agent.hami.register import register_differences, report_of
from agent.hookdirs import HostHookDirs, directory_sizes
from agent.host.node import (
    device_nodes,
    library_file,
    look_at,
    plugin_sockets,
    uncompiled,
    waiting_agents,
)
from agent.host.process import LockFile, SystemClock, Worker
from agent.inventory import InventoryKeeper
from agent.kit.cell import Cell
from agent.kube.api import KubeNode
from agent.kube.client import Connection, KubeSession
from agent.kube.reader import NodeReader, NodeSight
from agent.model import Inventory, Scan, Trouble
from agent.node import preflight, scheduling
from agent.node.devices import judge_access, judge_library_files
from agent.node.findings import (
    ALL_GROUPS,
    CHECKS,
    FROM_API,
    CheckGroup,
    Finding,
    PreflightCheck,
    PreflightVerdict,
    consequence,
    counted,
    group_of,
    in_groups,
    traced,
)
from agent.node.preflight import ClusterAnswer, PluginSocket, Right
from agent.node.scheduling import AgentAnswer, NamedNode
from agent.ports import Clock
from agent.settings.reading import DEVICE_CONFIG, NODE_CONFIG
from agent.settings.schema import Settings, check_shares
from agent.settings.sources import NodeFacts
from agent.settings.values import NodeValues
from agent.witness import PodResourcesWitness

LARGEST: Final = 3
"""How many of the container directories that are too large have a line."""
ANSWER_SECONDS: Final = 5.0
DRIVER_SECONDS: Final = 15.0
"""8 GPUs that initialise one after the other take 12 s."""
LOOK_SECONDS: Final = 1.0
NODE_SECONDS: Final = 5.0
"""A Node that exists comes with the first frame of its watch."""

_GROUPS: Final = ", ".join(CheckGroup)
_INDENT: Final = 20
_LONGEST: Final = 1024
"""Characters of a text; some come from the cluster."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb `doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help="check how this node is set up, and what the scheduler reads of it",
        description="Checks this node with the settings of `run`, and changes nothing. Each line "
        "says what was checked and what was found; if something is wrong, also what it means for "
        "pods, what to do, and the entry of the runbook. With --pre it checks what the agent "
        "needs before it starts; without, also the agent that runs, and what Node, kubelet and "
        f"scheduler show of it. Groups: {_GROUPS}. Exits 0 if nothing is wrong, 1 if something "
        "is, 5 if nothing is but something could not be checked, 6 with --strict if there are "
        "notes alone.",
        epilog="example: hami-agent doctor --only kubelet,scheduler --config "
        "/etc/hami-agent/config.yaml -o json",
    )
    parser.add_argument(
        "--pre",
        action="store_true",
        help="check before the first start, or before a switch from another plugin",
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--only", type=_groups, metavar="GROUP[,GROUP]", help="check these groups alone"
    )
    choice.add_argument(
        "--skip", type=_groups, metavar="GROUP[,GROUP]", help="do not check these groups"
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit 6 if there are notes, and nothing is wrong"
    )
    parser.add_argument(
        "--read-only",
        action="store_true",
        help="do not check the rights to write, for an account that may only read",
    )
    add_output(parser)
    add_settings(parser)


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print what was found; return the exit code."""
    configure("error", "auto", environ)
    groups = args.only or (ALL_GROUPS - args.skip if args.skip else ALL_GROUPS)
    findings = asyncio.run(_findings(args, environ, groups))
    if args.output == TABLE:
        write_lines(findings, terminal_width(environ, UNFOLDED), before=args.pre)
    else:
        kind, data = document_of(findings, before=args.pre)
        sys.stdout.write(document(kind, data, args.output, SystemClock().now()))
    verdicts = {one.verdict for one in findings}
    if PreflightVerdict.WRONG in verdicts:
        return PROBLEM
    if PreflightVerdict.UNKNOWN in verdicts:
        return INCOMPLETE
    return WARNED if args.strict and PreflightVerdict.NOTE in verdicts else OK


def _groups(text: str) -> frozenset[CheckGroup]:
    words = [word.strip() for word in text.split(",")]
    known = {group.value: group for group in CheckGroup}
    for word in words:
        if word not in known:
            hint = nearest(word, known)
            said = f"there is no group {cap(word, 64)!r}{hint or f'; the groups are {_GROUPS}'}"
            raise argparse.ArgumentTypeError(said)
    return frozenset(known[word] for word in words)


async def _findings(
    args: argparse.Namespace, environ: Mapping[str, str], groups: frozenset[CheckGroup]
) -> Sequence[Finding]:
    """What is wrong with the settings; if they can be used, also what the other checks find."""
    origin, read = sources(args, environ), None
    if not args.pre:
        # A running agent has the last good settings, if the present ones are refused.
        with contextlib.suppress(SettingsError):
            read = await started(origin)
    read = read or await looked(origin)
    try:
        plan = read.taken()
        settings = plan.settings(NodeFacts())
    except SettingsError as error:
        return [_refused(error)]
    config = _config_findings(plan, settings, before=args.pre)
    if read.refusal is not None:
        config[0] = _refused(read.refusal)
    files = (plan.sources.own, plan.sources.node_config)
    sight = NodeSeen(
        settings,
        environ,
        SystemClock(),
        groups,
        agent=None if args.pre else _ask_agent(settings.paths.run / "api.sock"),
        config=tuple(config),
        names=plan.names(),
        files=", ".join(file.name for file in files if file is not None) or "settings",
        reader=args.read_only,
    )
    return await examine(sight)


def _refused(error: SettingsError) -> Finding:
    advice = "correct it; `hami-agent config check` prints what each node would get"
    return Finding.wrong(PreflightCheck.SETTINGS, "settings", str(error), advice)


def _config_findings(plan: NodeValues, settings: Settings, *, before: bool) -> list[Finding]:
    values = plan.resolve(NodeFacts(settings.node))
    main = Finding.ok(PreflightCheck.SETTINGS, "settings", f"accepted, for Node {settings.node}")
    try:
        check_shares(values)
    except SettingsError as error:
        main = Finding.wrong(PreflightCheck.SETTINGS, "settings", str(error))
    notes = [
        Finding.note(PreflightCheck.SETTINGS, "settings", text, "it changes nothing here")
        for text in plan.warnings
    ]
    read = plan.sources
    files = {
        str(values[key].value): text is not None
        for key, text in ((DEVICE_CONFIG, read.device_config), (NODE_CONFIG, read.node_config))
        if values[key].value
    }
    entries = plan.node_config.profiles
    names = [name for profile in entries for name in profile.match.nodes]
    if settings.node not in names and len(names) < len(entries):
        names = []  # an entry by labels or for all others may apply
    unchecked = settings.plain is None and not settings.match.requests.known
    hami = preflight.judge_hami_files(
        files, settings.node, names, needed=before, unchecked=unchecked
    )
    return [main, *notes, hami]


def _ask_agent(path: Path) -> AgentAnswer:
    """Ask the running agent by its socket."""
    try:
        status, text = call(path, "GET", "/readyz?verbose", ANSWER_SECONDS)
    except Unreachable as error:
        reason = error.__cause__
        failure = os.strerror(reason.errno) if isinstance(reason, OSError) and reason.errno else ""
        denied = isinstance(reason, PermissionError)
        return AgentAnswer(str(path), failure=failure or str(reason), denied=denied)
    return AgentAnswer(str(path), status, text)


# What is at hand.


class NodeSeen(msgspec.Struct, eq=False):
    """What is at hand of a node, and what was seen there.

    - `agent`: the answer of the agent's readiness page; None: before the first start.
    - `config`: the findings about the settings.
    - `names`: the Nodes that the settings name; `files`: where they do.
    - `reader`: the account may only read, and is not the agent's.
    - `device_files`, `processes`: /dev and /proc.
    - `cluster`: None: no API server is asked in plain mode, nor for other groups.
    - `node`: the Node beside a running agent; None: it was not shown, and `cluster` says why.
    - `excess`: granted rights that the agent does not need; None: not asked.
    - `named`: whether the Nodes that the settings name exist, as far as they were asked for.
    - `scan`: None: the driver was not asked, or gave none.
    """

    settings: Settings
    environ: Mapping[str, str]
    clock: Clock
    groups: frozenset[CheckGroup] = ALL_GROUPS
    agent: AgentAnswer | None = None
    config: tuple[Finding, ...] = ()
    names: tuple[str, ...] = ()
    files: str = "settings"
    reader: bool = False
    device_files: Path = Path("/dev")
    processes: Path = Path("/proc")
    cluster: ClusterAnswer | None = None
    node: NodeSight | None = None
    excess: tuple[Right, ...] | None = None
    named: dict[str, NamedNode] = msgspec.field(default_factory=dict)
    scan: Scan | None = None
    sockets: tuple[PluginSocket, ...] = ()


async def examine(seen: NodeSeen) -> tuple[Finding, ...]:
    """All findings of the chosen groups, in their order. Each look has a deadline of its own."""
    paths, groups = seen.settings.paths, seen.groups
    seen.sockets = plugin_sockets(paths.plugins, paths.kubelet_socket.name)
    if seen.settings.plain is None and groups & {*FROM_API, CheckGroup.CONFIG}:
        await _see_cluster(seen)
    findings = [*seen.config]
    for needed_by, find in CHECKS_OF:
        if groups & needed_by:
            findings += await find(seen)
    if seen.agent is not None:
        findings = [*traced([*findings, *_unseen(seen, findings)])]
    return in_groups(findings, groups)


def _unseen(seen: NodeSeen, findings: Sequence[Finding]) -> Iterator[Finding]:
    """One finding for each group of which checks were not made."""
    if seen.cluster is None:
        return
    # There is nothing to say of the monitor without HAMi's plugin.
    made = {one.point for one in findings} | {PreflightCheck.MONITOR}
    for group in FROM_API:
        missing = [check for check in CHECKS[group] if check not in made]
        if missing:
            said = f"not checked: {', '.join(check.value for check in missing)}"
            advice = "repair what is said of the API server, and run this check again"
            yield Finding.unknown(missing[0], seen.cluster.server, said, advice)


# The checks.


async def _entries(seen: NodeSeen) -> Iterable[Finding]:
    if seen.agent is None:
        return []
    names = dict.fromkeys(seen.names, NamedNode.UNSEEN) | seen.named
    if seen.settings.node in names:
        names[seen.settings.node] = NamedNode.THERE
    return scheduling.judge_entries(seen.settings.node, names, seen.files)


async def _paths(seen: NodeSeen) -> Iterable[Finding]:
    """The directories that the agent writes to."""
    paths, home = seen.settings.paths, seen.settings.hook_path / "vgpu"
    hook, inner = (
        look_at(seen.settings.hook_path),
        [look_at(path) for path in (home, home / "containers")],
    )
    if inner[0].kind:  # a pod mounts only this directory, and its root is read-only
        hook = msgspec.structs.replace(hook, writable=inner[0].writable)
    made = [preflight.judge_path(look_at(path), made=True) for path in (paths.state, paths.run)]
    below = [preflight.judge_path(place, made=True) for place in inner if place.kind]
    wrong = [finding for finding in below if finding.verdict is not PreflightVerdict.OK]
    findings = [*made, preflight.judge_path(hook, made=False), *wrong]
    if seen.agent is not None:
        with contextlib.suppress(OSError):  # the lines above say what is wrong with the directories
            sizes = directory_sizes(seen.settings.hook_path).items()
            large = [(name, one) for name, one in sizes if one.is_beyond or one.closed]
            for name, one in sorted(large, key=lambda each: -each[1].size)[:LARGEST]:
                path = f"{home}/containers/{name}"
                findings.append(preflight.judge_size(path, one.size, one.entries))
    return findings


async def _agent(seen: NodeSeen) -> Iterable[Finding]:
    """The agent that runs, and whether it is alone and was compiled when it was installed."""
    home, modules = str(Path(agent.__file__).parent), list(sys.modules.values())
    compiled = preflight.judge_bytecode(home, uncompiled(modules))
    if seen.agent is None:
        return [compiled]
    run = seen.settings.paths.run
    holder = LockFile(run / "lock").holder().strip()
    waiting = waiting_agents(run, holder, seen.processes)
    alone = scheduling.judge_instances(look_at(run / "lock"), holder, waiting, seen.sockets)
    return [*scheduling.judge_agent(seen.agent), alone, compiled]


async def _library(seen: NodeSeen) -> Iterable[Finding]:
    """Whether HAMi-core's files exist, and whether containers load them."""
    settings = seen.settings
    plain, home = settings.plain, settings.hook_path / "vgpu"
    needed = plain is None or plain.memory_limits
    async with Worker("disk", 1) as worker:
        version = settings.library_version
        hooks = HostHookDirs(settings.hook_path, Path("/dev"), version, worker, worker)
        try:
            facts = await hooks.facts()
        except (StateError, OSError) as error:
            return [preflight.judge_library(str(home), (str(error),), needed=needed)]
    there = preflight.judge_library(str(home), facts.missing, needed=needed)
    if facts.missing or not needed:
        return [there]
    library, preload = library_file(Path(facts.library)), library_file(home / "ld.so.preload")
    return [there, *judge_library_files(library, preload, facts)]


async def _driver(seen: NodeSeen) -> Iterable[Finding]:
    """The driver, within 15 s, and whether CDI and the device files have its GPUs."""
    settings = seen.settings
    seen.scan, failure, remedy = await last_scan(_scans(settings))
    name = settings.driver.simulate or settings.driver.nvml_library or "NVIDIA's library (NVML)"
    findings = list(preflight.judge_driver(name, seen.scan, failure, remedy))
    if looks_up_cdi(settings.edits):
        defined = None
        async with Worker("cdi", 1) as worker:
            cdi = cdi_directories(settings, seen.environ, worker)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    defined = await cdi.names(settings.edits.cdi_spec_dirs)
        sharing, gpus = settings.sharing, seen.scan.gpus if seen.scan else ()
        shared = [gpu.uuid for gpu in gpus if not (sharing.filters(gpu) or gpu.mig_enabled)]
        findings.append(preflight.judge_cdi(shared, settings.edits, defined))
    if seen.agent is not None and settings.driver.simulate is None:
        described = None if seen.scan is None else len(seen.scan.gpus) + len(seen.scan.faults)
        findings += judge_access(device_nodes(seen.device_files), described)
    return findings


async def last_scan(scans: AsyncGenerator[Scan]) -> tuple[Scan | None, str, str | None]:
    """The first scan in which no GPU is waking, else the last in time; the failure; the remedy.

    No failure: the empty string. The remedy is None if the failure names none.
    """
    scan: Scan | None = None
    failure, remedy = "", None
    try:
        async with asyncio.timeout(DRIVER_SECONDS), contextlib.aclosing(scans):
            async for scan in scans:
                if all(fault.trouble is not Trouble.SILENT for fault in scan.faults):
                    break
    except TimeoutError:
        failure = f"the driver did not answer within {DRIVER_SECONDS:g} s"
    except (AgentError, OSError) as error:
        failure, remedy = _failure_of(error)
    return scan, failure, remedy


def _failure_of(error: AgentError | OSError) -> tuple[str, str | None]:
    """The failure and the remedy. Empty remedy: the failure contains it. None: it is not known.

    The text form prints both in one line; scripts read them separately.
    """
    if isinstance(error, DriverMissing | SettingsError):
        return error.said, error.remedy
    return str(error), None


async def _scans(settings: Settings) -> AsyncGenerator[Scan]:
    """Scan again and again: GPUs that initialise take seconds to answer.

    Simulated GPUs are scanned once, without the socket that `run` opens for them. Raises
    DriverMissing, DriverError, SettingsError.
    """
    spec = settings.driver.simulate
    if spec is not None:
        from agent.sandbox.driver import look_once  # noqa: PLC0415 -- only the driver in use

        yield await look_once(spec)
        return
    async with open_driver(settings) as driver:
        while True:
            yield await driver.scan()
            await asyncio.sleep(LOOK_SECONDS)


async def _kubelet(seen: NodeSeen) -> Iterable[Finding]:
    """The kubelet's socket, and what it answers by PodResources."""
    paths = seen.settings.paths
    socket = preflight.judge_kubelet(look_at(paths.plugins), look_at(paths.kubelet_socket))
    path = seen.settings.paths.pod_resources_socket
    witness = PodResourcesWitness(path, deadline=2.0)  # a person waits for this, and no pod
    held: int | None = None
    failure = ""
    asks = True
    try:
        containers = (each for pod in await witness.list() for each in pod.containers)
        held = sum(1 for each in containers if each.ids.get(seen.settings.sharing.resource))
        await witness.get("default", "hami-agent-doctor")
    except WitnessUnsupported:
        asks = False
    except KubeletError as error:
        failure = str(error)
    finally:
        witness.close()
    serving = seen.agent is not None and not seen.agent.failure
    return [socket, preflight.judge_witness(str(path), held, failure, asks=asks, serving=serving)]


async def _plugins(seen: NodeSeen) -> Iterable[Finding]:
    answer, sockets = seen.cluster, seen.sockets
    if seen.agent is not None:
        # The register annotation is the agent's own then, and no sign of HAMi's plugin; a socket
        # that nobody listens on is one of the leftovers.
        answer = answer and msgspec.structs.replace(answer, annotations={})
        sockets = tuple(one for one in sockets if one.alive)
    place, takeover = look_at(seen.settings.paths.plugins), seen.settings.takeover
    return preflight.judge_plugins(place, sockets, answer, takeover=takeover)


async def _cluster(seen: NodeSeen) -> Iterable[Finding]:
    if seen.cluster is None:
        return []
    answer = seen.cluster
    if answer.failure and seen.agent is not None:
        advice = answer.remedy or "repair the connection, and run this check again"
        return [Finding.unknown(PreflightCheck.NODE, answer.server, answer.failure, advice)]
    findings = list(preflight.judge_cluster(seen.settings.node, answer))
    if seen.excess is not None:
        findings.append(preflight.judge_excess(answer.server, seen.excess))
    if seen.node is not None:
        findings.append(preflight.judge_clock(answer.server, seen.node.skew))
    return findings


async def _scheduler(seen: NodeSeen) -> Iterable[Finding]:
    """What HAMi's scheduler reads of the Node, and what the kubelet offers beside it."""
    if seen.cluster is None:
        return []
    settings, name, node = seen.settings, seen.settings.node, seen.node
    annotations = seen.cluster.annotations
    differences: tuple[str, ...] = ()
    if seen.scan is not None and REGISTER in annotations:
        differences = report_differences(settings, seen.scan, annotations)
        if seen.agent is None:
            return [preflight.judge_report(name, differences)]
    if node is None:
        return []
    traces, now, profile = node.traces, seen.clock.now(), settings.report.profile
    report = scheduling.read_report(traces, differences)
    handshake = annotations.get(HANDSHAKE, "")
    stale = [one.path for one in seen.sockets if one.theirs and not one.alive]
    scores = settings.report.topology_score
    return [
        *scheduling.judge_offer(name, node.offer, report, now),
        scheduling.judge_present_report(name, report, profile),
        scheduling.judge_handshake(name, handshake, report, profile, now),
        scheduling.judge_writer(traces, report),
        scheduling.judge_lock(name, annotations.get(MUTEX_LOCK), now),
        *scheduling.judge_leftovers(traces, stale, stamps=profile.stamps, scores=scores),
    ]


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
    return register_differences(report, annotations[REGISTER], faulty)


CHECKS_OF: Final = (
    ({CheckGroup.CONFIG}, _entries),
    # What the driver says is also held against the report that the scheduler reads.
    ({CheckGroup.DRIVER, CheckGroup.SCHEDULER}, _driver),
    ({CheckGroup.KUBELET}, _kubelet),
    ({CheckGroup.KUBELET, CheckGroup.SCHEDULER}, _plugins),
    ({CheckGroup.AGENT}, _agent),
    ({CheckGroup.API, CheckGroup.SCHEDULER}, _cluster),
    ({CheckGroup.KUBELET, CheckGroup.SCHEDULER}, _scheduler),
    ({CheckGroup.LIBRARY}, _library),
    ({CheckGroup.PATHS}, _paths),
)
"""The checks, each with the groups that need it. One that lacks what it needs finds nothing."""


# What the API server says.


async def _see_cluster(seen: NodeSeen) -> None:
    """Ask all questions in one session."""
    settings = seen.settings
    kubeconfig = Path(settings.kubeconfig) if settings.kubeconfig else None
    connection = Connection(kubeconfig=kubeconfig, environment=seen.environ)
    server = f"API server by {connection.source}"
    session = KubeSession(connection, random.SystemRandom())
    try:
        await session.open()
        reader = NodeReader(session, settings.node)
        seen.cluster = answer = await _ask(session, reader, seen, server)
        if seen.agent is None:
            return
        excess = tuple([right for right in preflight.UNNEEDED if await reader.granted(right)])
        unread = any(right.words == "get nodes" for right in answer.denied)
        node = None
        if answer.found is not False and not unread:
            try:
                node = await reader.look(settings.sharing.resource, seen.clock)
            except ApiNotFound:
                answer = msgspec.structs.replace(answer, found=False)
        if node is not None:
            answer = msgspec.structs.replace(
                answer, found=True, labels=node.labels, annotations=node.traces.annotations
            )
            others = [name for name in seen.names if name != settings.node]
            seen.named = {name: await reader.named(name) for name in others[: scheduling.ASKED]}
        seen.cluster, seen.node, seen.excess = answer, node, excess
    except (ApiError, SettingsError) as error:
        failure, remedy = _failure_of(error)
        seen.cluster = ClusterAnswer(server, failure=failure, remedy=remedy)
        seen.named = {}
    finally:
        await session.close()


async def _ask(
    session: KubeSession, reader: NodeReader, seen: NodeSeen, server: str
) -> ClusterAnswer:
    """Ask for the rights of this account, the plugins on this node and the Node.

    Raises ApiError, SettingsError.
    """
    settings = seen.settings
    wanted = preflight.rights(settings.node, node_condition=settings.node_condition)
    unasked = tuple(right for right in wanted if seen.reader and not right.reads)
    asked = [right for right in wanted if right not in unasked]
    denied = tuple([right for right in asked if not await reader.granted(right)])
    if denied:  # the next requests would fail for the same reason
        return ClusterAnswer(server, denied=denied)
    neighbours = await reader.neighbours()
    looks = [preflight.right_to_get(pod) for pod in neighbours.pods[:1]]
    denied = tuple([right for right in looks if not await reader.granted(right)])
    if denied:
        return ClusterAnswer(server, denied=denied)
    plugins = neighbours.plugins
    # The Node as the agent's own watch first shows it.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(NODE_SECONDS):
            async for change in KubeNode(session, settings.node).watch_node():
                if change.node is not None and not change.opened:
                    labels, annotations = change.node.labels, change.node.annotations
                    return ClusterAnswer(
                        server, True, labels, annotations, unasked=unasked, plugins=plugins
                    )
                if not change.opened:
                    break
    return ClusterAnswer(server, found=False, unasked=unasked, plugins=plugins)


# Renders the findings: lines for people, data for programs.


def write_lines(findings: Sequence[Finding], columns: int, *, before: bool) -> None:
    """Print the lines of each finding and one with their numbers, folded at `columns`.

    `before`: of `doctor --pre`, where each finding has one line.
    """
    lines = []
    for one in findings:
        verdict, point = one.verdict, one.point.value
        # Without what a terminal would obey: some texts come from the cluster.
        said, advice = cap(f"{one.subject}: {one.said}", _LONGEST), cap(one.advice, _LONGEST)
        runbook = "" if verdict is PreflightVerdict.OK else f" [RUNBOOK {point}]"
        if before:
            advice = f"; {advice}" if advice else ""
            lines.append(f"{verdict.value:<6} {point:<11} {said}{advice}{runbook}")
            continue
        lines.append(f"{group_of(one.point).value:<10} {verdict.value:<8} {point:<12} {said}")
        if verdict in {PreflightVerdict.WRONG, PreflightVerdict.NOTE}:
            lines.append(f"means: {consequence(one)}")
        if runbook:
            lines.append(f"to do: {f'{advice}{runbook}'.lstrip()}")
    counts = Counter(one.verdict for one in findings)
    notes = counted(counts[PreflightVerdict.NOTE], "note")
    lines.append(
        f"{counts[PreflightVerdict.WRONG]} wrong, {notes}, {counts[PreflightVerdict.OK]} ok"
    )
    if counts[PreflightVerdict.UNKNOWN]:
        lines[-1] += f", {counts[PreflightVerdict.UNKNOWN]} not checked"
    indent = " " * min(_INDENT, columns // 4)
    for line in lines:
        parts = textwrap.wrap(
            line,
            columns,
            initial_indent=indent if line.startswith(("means: ", "to do: ")) else "",
            subsequent_indent=f"{indent}  ",
            break_on_hyphens=False,
        )
        sys.stdout.writelines(f"{part}\n" for part in parts)


def document_of(findings: Sequence[Finding], *, before: bool) -> tuple[str, dict[str, object]]:
    """The kind and the data of the findings for programs."""
    verdicts = {one.verdict for one in findings}
    data: dict[str, object] = {"ok": PreflightVerdict.WRONG not in verdicts}
    if not before:
        data["complete"] = PreflightVerdict.UNKNOWN not in verdicts
    entries = []
    for one in findings:
        entry = {
            "id": one.point.value,
            "verdict": one.verdict.value.lower(),
            "subject": one.subject,
            "said": one.said,
            "advice": one.advice,
        }
        if not before:
            means = "" if one.verdict is PreflightVerdict.OK else consequence(one)
            entry |= {"group": group_of(one.point).value, "means": means}
        entries.append(entry)
    data["findings"] = entries
    return "Preflight" if before else "Checkup", data
