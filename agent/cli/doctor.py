"""`hami-agent doctor`: checks this node, beside the agent or before it starts there (`--pre`).

It looks at what is at hand, runs each check of a table that has what it needs, and changes nothing.
"""

import argparse
import asyncio
import contextlib
import os
import sys
import textwrap
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

import agent
from agent.allocate.edits import looks_up_cdi, misnamed
from agent.app.adapters import cdi_directories, open_driver
from agent.cli.connections import call, open_session
from agent.cli.logs import configure
from agent.cli.main import (
    INCOMPLETE,
    OK,
    PROBLEM,
    TABLE,
    WARNED,
    Subparsers,
    Unreachable,
    add_output,
    nearest,
)
from agent.cli.output import UNFOLDED, Paint, answer, painter, terminal_width
from agent.cli.runbook import HINT
from agent.cli.settings_args import add_settings, looked, sources, started
from agent.cluster import REGISTER
from agent.errors import (
    AgentError,
    ApiError,
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
    unkept,
    waiting_agents,
)
from agent.host.process import LockFile, SystemClock, Worker
from agent.inventory import InventoryKeeper
from agent.kit.cell import Cell
from agent.kube.client import Connection
from agent.kube.reader import NodeReader
from agent.model import Inventory, Scan, Trouble
from agent.node import preflight, scheduling
from agent.node.findings import ALL_GROUPS, CHECKS, FROM_API, Finding, counted, in_groups, traced
from agent.node.preflight import PluginSocket, Right
from agent.node.scheduling import AgentAnswer, ClusterAnswer, NodeSight
from agent.ports import Clock
from agent.settings.reading import DEVICE_CONFIG, NODE_CONFIG
from agent.settings.schema import Settings, check_shares
from agent.settings.sources import NodeFacts
from agent.settings.values import NodeValues
from agent.witness import PodResourcesWitness

LARGEST: Final = 3
"""How many of the container directories that are too large have a line."""
UNKEPT: Final = "so no limit would be enforced"
UNDEFINED: Final = "no single CDI specification"
"""Words of the agent about HAMi-core's files (`check_library`), about CDI (`undefined`)."""
ANSWER_SECONDS: Final = 5.0
DRIVER_SECONDS: Final = 15.0
"""8 GPUs that initialise one after the other take 12 s."""
LOOK_SECONDS: Final = 1.0

COLOURS: Final = {"WRONG": "red", "note": "yellow", "unknown": "yellow", "ok": "green"}
_GROUPS: Final = ", ".join(CHECKS)
_INDENT: Final = 20
_LONGEST: Final = 1024
"""Characters of a text; some come from the cluster."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb `doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help="check how this node is set up, and what the scheduler reads of it",
        description="Checks this node with the settings of `run`, and changes nothing. Each line "
        "says what was checked and what was found, what that means for pods, what to do, and the "
        "entry of the runbook. What is well is only counted; -o wide lists it. With --pre it "
        "checks what the agent needs before it starts; without, also the agent that runs, and "
        f"what Node, kubelet and scheduler show of it. Groups: {_GROUPS}. Exits 0 if nothing is "
        "wrong, 1 if something is, 5 if nothing is but something could not be checked, 6 with "
        "--strict if there are notes alone.",
        epilog="example: hami-agent doctor --only kubelet,scheduler -o json",
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
    add_output(parser, forms=(TABLE, "wide", "json", "yaml"))
    add_settings(parser)


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print what was found; return the exit code."""
    configure("error", "auto", environ)
    groups = args.only or (ALL_GROUPS - args.skip if args.skip else ALL_GROUPS)
    findings = asyncio.run(_findings(args, environ, groups))
    columns, every = terminal_width(environ, UNFOLDED), args.output == "wide"
    lines = finding_lines(findings, columns, painter(environ), every=every)
    answer(args.output, "Preflight" if args.pre else "Checkup", document_of(findings), lines)
    verdicts = {one.verdict for one in findings}
    if "WRONG" in verdicts:
        return PROBLEM
    if "unknown" in verdicts:
        return INCOMPLETE
    return WARNED if args.strict and "note" in verdicts else OK


def _groups(text: str) -> frozenset[str]:
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in CHECKS:
            hint = nearest(word, CHECKS)
            said = f"there is no group {cap(word, 64)!r}{hint or f'; the groups are {_GROUPS}'}"
            raise argparse.ArgumentTypeError(said)
    return frozenset(words)


async def _findings(
    args: argparse.Namespace, environ: Mapping[str, str], groups: frozenset[str]
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
        names=dict.fromkeys(plan.names()),
        files=", ".join(file.name for file in files if file is not None) or "settings",
        reader=args.read_only,
    )
    return await examine(sight)


def _refused(error: SettingsError) -> Finding:
    advice = "correct it; `hami-agent config check` prints what each node would get"
    return Finding("P-SETTINGS", "WRONG", "settings", str(error), advice)


def _config_findings(plan: NodeValues, settings: Settings, *, before: bool) -> list[Finding]:
    values = plan.resolve(NodeFacts(settings.node))
    main = Finding("P-SETTINGS", "ok", "settings", f"accepted, for Node {settings.node}")
    try:
        check_shares(values)
    except SettingsError as error:
        main = Finding("P-SETTINGS", "WRONG", "settings", str(error))
    notes = [
        Finding("P-SETTINGS", "note", "settings", text, "it changes nothing here")
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
    - `names`: the Nodes that the settings name, each with whether it exists, if it was asked;
      `files`: where they do.
    - `reader`: the account may only read, and is not the agent's.
    - `device_files`, `processes`: /dev and /proc.
    - `cluster`: None: no API server is asked in plain mode, nor for other groups.
    - `scan`: None: the driver was not asked, or gave none.
    - `repaired`: see `judge_agent`.
    """

    settings: Settings
    environ: Mapping[str, str]
    clock: Clock
    groups: frozenset[str] = ALL_GROUPS
    agent: AgentAnswer | None = None
    config: tuple[Finding, ...] = ()
    names: dict[str, bool | None] = msgspec.field(default_factory=dict)
    files: str = "settings"
    reader: bool = False
    device_files: Path = Path("/dev")
    processes: Path = Path("/proc")
    cluster: ClusterAnswer | None = None
    scan: Scan | None = None
    sockets: tuple[PluginSocket, ...] = ()
    repaired: dict[str, str] = msgspec.field(default_factory=dict)


async def examine(seen: NodeSeen) -> tuple[Finding, ...]:
    """All findings of the chosen groups, in their order. Each look has a deadline of its own."""
    paths, groups = seen.settings.paths, seen.groups
    seen.sockets = plugin_sockets(paths.plugins, paths.kubelet_socket.name)
    if seen.settings.plain is None and groups & {*FROM_API, "config"}:
        seen.cluster = await _ask_cluster(seen)
    findings = [*seen.config]
    for needed_by, find in LOOKS:
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
    made = {one.check for one in findings} | {"P-MONITOR"}
    for group in FROM_API:
        missing = [check for check in CHECKS[group] if check not in made]
        if missing:
            said = f"not checked: {', '.join(missing)}"
            advice = "repair what is said of the API server, and run this check again"
            yield Finding(missing[0], "unknown", seen.cluster.server, said, advice)


async def _ask_cluster(seen: NodeSeen) -> ClusterAnswer:
    """Ask all questions in one session: the rights of this account, the plugins here, the Node.

    What a right is missing for is not asked.
    """
    settings, node = seen.settings, seen.settings.node
    kubeconfig = Path(settings.kubeconfig) if settings.kubeconfig else None
    connection = Connection(kubeconfig=kubeconfig, environment=seen.environ)
    server = f"API server by {connection.source}"
    plugins: tuple[str, ...] = ()
    sight: NodeSight | None = None
    try:
        async with open_session(connection, "hami-agent") as session:
            reader = NodeReader(session, node)
            wanted = preflight.rights(node, node_condition=settings.node_condition)
            unasked = tuple(right for right in wanted if seen.reader and not right.reads)
            asked = [right for right in wanted if right not in unasked]
            denied = [right for right in asked if not await reader.granted(right)]
            words = {right.words for right in denied}
            if "list pods" not in words:
                neighbours = await reader.listed()
                others = (pod for pod in neighbours if pod.is_other_plugin)
                plugins = tuple(f"{pod.namespace}/{pod.name}" for pod in others)
                keys = [(pod.namespace, pod.name) for pod in neighbours[:1]]
                pods = map(preflight.right_to_get, keys)
                denied += [right for right in pods if not await reader.granted(right)]
            if "get nodes" not in words:
                sight = await reader.look(settings.sharing.resource, seen.clock)
            excess: list[Right] = []
            if seen.agent is not None:
                excess = [right for right in preflight.UNNEEDED if await reader.granted(right)]
                for name in [name for name in seen.names if name != node][: scheduling.ASKED]:
                    seen.names[name] = await reader.named(name)
    except (ApiError, SettingsError) as error:
        failure, remedy = _failure_of(error)
        return ClusterAnswer(server, failure=failure, remedy=remedy)
    return ClusterAnswer(server, sight, tuple(denied), unasked, tuple(excess), plugins=plugins)


# The looks of the table.


async def _entries(seen: NodeSeen) -> Iterable[Finding]:
    if seen.agent is None:
        return []
    node = seen.settings.node
    names = {name: True if name == node else exists for name, exists in seen.names.items()}
    return scheduling.judge_entries(node, names, seen.files)


async def _paths(seen: NodeSeen) -> Iterable[Finding]:
    """The directories that the agent writes to."""
    paths, home = seen.settings.paths, seen.settings.hook_path / "vgpu"
    hook, inner = look_at(seen.settings.hook_path), look_at(home)
    if inner.kind:  # a pod mounts only this directory, and its root is read-only
        hook = msgspec.structs.replace(hook, writable=inner.writable)
    made = [preflight.judge_path(look_at(path), made=True) for path in (paths.state, paths.run)]
    below = [
        preflight.judge_path(place, made=True)
        for place in (inner, look_at(home / "containers"))
        if place.kind
    ]
    wrong = [finding for finding in below if finding.verdict != "ok"]
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
    run = seen.settings.paths.run
    holder = LockFile(run / "lock").holder().strip()
    missing = uncompiled(list(sys.modules.values()))
    pid = holder.removeprefix("pid ")
    lost = unkept(missing, seen.processes / pid) if seen.agent and pid.isdigit() else None
    home = str(Path(agent.__file__).parent)
    compiled = preflight.judge_bytecode(home, len(missing), lost)
    if seen.agent is None:
        return [compiled]
    waiting = waiting_agents(run, holder, seen.processes)
    alone = scheduling.judge_instances(look_at(run / "lock"), holder, waiting, seen.sockets)
    return [*scheduling.judge_agent(seen.agent, seen.repaired), alone, compiled]


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
    if facts.loadable and facts.preload is not None and not misnamed(facts):
        seen.repaired[UNKEPT] = "HAMi-core's files are there and containers load them"
    return [there, *preflight.judge_library_files(library, preload, facts)]


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
        found = preflight.judge_cdi(shared, settings.edits, defined)
        findings.append(found)
        if found.verdict == "ok":
            seen.repaired[UNDEFINED] = "the CDI specifications define its GPUs"
    if seen.agent is not None and settings.driver.simulate is None:
        described = None if seen.scan is None else len(seen.scan.gpus) + len(seen.scan.faults)
        findings += preflight.judge_access(device_nodes(seen.device_files), described)
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
    # A person waits for this, and no pod.
    witness = PodResourcesWitness(paths.pod_resources_socket, deadline=2.0)
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
    path = str(paths.pod_resources_socket)
    return [socket, preflight.judge_witness(path, held, failure, asks=asks, serving=serving)]


async def _plugins(seen: NodeSeen) -> Iterable[Finding]:
    answer, sockets, reported = seen.cluster, seen.sockets, False
    if seen.agent is not None:
        # The register annotation is the agent's own then, and no sign of HAMi's plugin; a socket
        # that nobody listens on is one of the leftovers.
        sockets = tuple(one for one in sockets if one.alive)
    elif answer is not None and answer.node is not None:
        reported = REGISTER in answer.node.annotations
    return preflight.judge_plugins(
        look_at(seen.settings.paths.plugins),
        sockets,
        answer.plugins if answer is not None else (),
        reported=reported,
        takeover=seen.settings.takeover,
    )


async def _cluster(seen: NodeSeen) -> Iterable[Finding]:
    """The API server; what HAMi's scheduler reads of the Node, and what the kubelet offers."""
    settings = seen.settings
    if seen.cluster is None:
        return []
    running, node = seen.agent is not None, seen.cluster.node
    found = list(scheduling.judge_cluster(settings.node, seen.cluster, running=running))
    if node is None:
        return found
    differences: tuple[str, ...] = ()
    if seen.scan is not None and REGISTER in node.annotations:
        differences = report_differences(settings, seen.scan, node.annotations)
    report, profile = scheduling.read_report(node, differences), settings.report.profile
    if not running:
        compared = [scheduling.judge_report(node.name, report, None)]
        return found + compared if report.is_there and seen.scan is not None else found
    now = seen.clock.now()
    stale = [one.path for one in seen.sockets if one.theirs and not one.alive]
    scores = settings.report.topology_score
    return [
        *found,
        scheduling.judge_offer(node, settings.sharing.resource, report, now),
        scheduling.judge_report(node.name, report, profile),
        scheduling.judge_handshake(node, report, profile, now),
        scheduling.judge_writer(node, report),
        scheduling.judge_lock(node, now),
        *scheduling.judge_leftovers(node, stale, stamps=profile.stamps, scores=scores),
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


LOOKS: Final = (
    ({"config"}, _entries),
    # What the driver says is also held against the report that the scheduler reads.
    ({"driver", "scheduler"}, _driver),
    ({"kubelet"}, _kubelet),
    ({"kubelet", "scheduler"}, _plugins),
    # What the agent says of HAMi-core's files is held against those that are there now.
    ({"library", "agent"}, _library),
    ({"agent"}, _agent),
    ({"kubelet", "api", "scheduler"}, _cluster),
    ({"paths"}, _paths),
)
"""The looks, each with the groups that need it. One that lacks what it needs finds nothing."""


# Renders the findings: lines for people, data for programs.


def finding_lines(
    findings: Sequence[Finding], columns: int, paint: Paint, *, every: bool
) -> Iterator[str]:
    """What is not well, or with `every` all, and a line with the numbers, folded at `columns`.

    Each finding has one line, then what it means and what to do.
    """
    margin = " " * min(_INDENT, columns // 4)

    def folded(text: str, indent: str = "") -> list[str]:
        return textwrap.wrap(
            text,
            columns,
            initial_indent=indent,
            subsequent_indent=f"{margin}  ",
            break_on_hyphens=False,
        )

    for one in findings:
        if one.verdict == "ok" and not every:
            continue
        # Without what a terminal would obey: some texts come from the cluster.
        said, advice = cap(f"{one.subject}: {one.said}", _LONGEST), cap(one.advice, _LONGEST)
        first, *rest = folded(f"{one.group:<10} {one.verdict:<8} {one.check:<12} {said}")
        yield first.replace(one.verdict, paint(one.verdict, COLOURS[one.verdict]), 1)
        yield from rest
        if one.verdict in {"WRONG", "note"}:
            yield from folded(f"means: {one.consequence}", margin)
        if one.verdict != "ok":
            yield from folded(f"to do: {f'{advice} [RUNBOOK {one.check}]'.lstrip()}", margin)
    counts = Counter(one.verdict for one in findings)
    if counts.keys() - {"ok"}:
        yield from folded(HINT)
    total = f"{counts['WRONG']} wrong, {counted(counts['note'], 'note')}, {counts['ok']} ok"
    total += f", {counts['unknown']} not checked" if counts["unknown"] else ""
    yield from folded(total if every or not counts["ok"] else f"{total} (-o wide lists all)")


def document_of(findings: Sequence[Finding]) -> dict[str, object]:
    """The data of the findings for programs."""
    verdicts = {one.verdict for one in findings}
    return {
        "ok": "WRONG" not in verdicts,
        "complete": "unknown" not in verdicts,
        "findings": [
            {
                "id": one.check,
                "verdict": one.verdict.lower(),
                "subject": one.subject,
                "said": one.said,
                "advice": one.advice,
                "group": one.group,
                "means": one.consequence,
            }
            for one in findings
        ],
    }
