"""`hami-agent doctor`: checks this node, beside the agent or before it starts there (`--pre`)."""

import argparse
import asyncio
import contextlib
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from agent.app.preflight import (
    bytecode_finding,
    driver_findings,
    examine,
    library_findings,
    path_findings,
    report_differences,
    witness_finding,
)
from agent.cli.connections import Unreachable, call
from agent.cli.explain import ClusterSight, see_cluster
from agent.cli.logs import configure
from agent.cli.main import INCOMPLETE, OK, PROBLEM, TABLE, WARNED, Subparsers, add_output, nearest
from agent.cli.output import UNFOLDED, document, terminal_width
from agent.cli.settings_args import add_settings, looked, sources, started
from agent.cluster import HANDSHAKE, MUTEX_LOCK, REGISTER
from agent.errors import MalformedText, SettingsError, cap
from agent.hami.pod import decode_node_lock, decode_stamp
from agent.hami.register import decode_handshake, is_json_form, read_register
from agent.hookdirs import directory_sizes
from agent.host.node import device_nodes, look_at, plugin_sockets, waiting_agents
from agent.host.process import LockFile, SystemClock
from agent.kube.reader import NodeSight
from agent.model import Scan
from agent.node import preflight, scheduling
from agent.node.devices import judge_access
from agent.node.findings import (
    ALL_GROUPS,
    FROM_API,
    MEMBERS,
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
from agent.node.preflight import PluginSocket, judge_clock, judge_excess, judge_hami_files
from agent.node.scheduling import (
    AgentAnswer,
    NamedNode,
    NodeTraces,
    judge_agent,
    judge_entries,
    judge_instances,
)
from agent.ports import Clock
from agent.settings.fields import Values
from agent.settings.reading import DEVICE_CONFIG, NODE_CONFIG, SourcesRead
from agent.settings.sections import Settings, check_shares
from agent.settings.sources import NodeFacts, Sources
from agent.settings.values import NodeValues

# `doctor` without `--pre`: checks this node beside the agent that runs there; changes nothing.

R = TypeVar("R")
LARGEST: Final = 3
"""How many of the container directories that are too large have a line."""


class CheckupRequest(msgspec.Struct, frozen=True):
    """What to check, and what the caller already knows.

    - `agent`: the answer of the agent's readiness page.
    - `settings`: the findings about the settings.
    - `names`: the Nodes that the settings name; `files`: where they do.
    - `reader`: the account may only read, and is not the agent's.
    - `device_files`, `processes`: /dev and /proc.
    """

    agent: AgentAnswer
    groups: frozenset[CheckGroup] = ALL_GROUPS
    settings: tuple[Finding, ...] = ()
    names: tuple[str, ...] = ()
    files: str = "settings"
    reader: bool = False
    device_files: Path = Path("/dev")
    processes: Path = Path("/proc")


async def examine_running(
    settings: Settings, environ: Mapping[str, str], clock: Clock, request: CheckupRequest
) -> tuple[Finding, ...]:
    """All findings of these groups, in their order."""
    checkup = _Checkup(settings, clock, request)
    groups = request.groups
    if settings.plain is None and groups & (FROM_API | {CheckGroup.CONFIG}):
        others = [name for name in request.names if name != settings.node]
        reader = request.reader
        checkup.cluster = await see_cluster(settings, environ, clock, others, reader=reader)
    findings = [*request.settings, *checkup.agent(), *path_findings(settings)]
    findings += [*checkup.directories(), *checkup.config()]
    if groups & {CheckGroup.DRIVER, CheckGroup.SCHEDULER}:
        checkup.scan, driver = await driver_findings(settings, environ)
        findings += [*driver, *checkup.access()]
    if CheckGroup.LIBRARY in groups:
        findings += await library_findings(settings)
    if CheckGroup.KUBELET in groups:
        findings.append(await witness_finding(settings, serving=not request.agent.failure))
    findings += [*checkup.kubelet(), *checkup.api(), *checkup.scheduler()]
    findings += checkup.unseen(findings)
    return in_groups(traced(findings), groups)


class _Checkup(msgspec.Struct, eq=False):
    """One run of the checks. `cluster`, `scan`: what was seen; None: nothing."""

    settings: Settings
    clock: Clock
    request: CheckupRequest
    cluster: ClusterSight | None = None
    scan: Scan | None = None

    @property
    def sockets(self) -> tuple[PluginSocket, ...]:
        paths = self.settings.paths
        return plugin_sockets(paths.plugins, paths.kubelet_socket.name)

    @property
    def node(self) -> NodeSight | None:
        return self.cluster.node if self.cluster else None

    def agent(self) -> Iterator[Finding]:
        paths = self.settings.paths
        lock = paths.run / "lock"
        holder = LockFile(lock).holder().strip()
        waiting = waiting_agents(paths.run, holder, self.request.processes)
        yield from judge_agent(self.request.agent)
        yield judge_instances(look_at(lock), holder, waiting, self.sockets)
        yield bytecode_finding()

    def directories(self) -> Iterator[Finding]:
        hook = self.settings.paths.hook
        with contextlib.suppress(OSError):  # the lines above say what is wrong with the directories
            sizes = directory_sizes(hook).items()
            large = [(name, one) for name, one in sizes if one.is_beyond or one.closed]
            for name, size in sorted(large, key=lambda one: -one[1].size)[:LARGEST]:
                path = f"{hook}/vgpu/containers/{name}"
                yield preflight.judge_size(path, size.size, size.entries)

    def config(self) -> Iterator[Finding]:
        names = dict.fromkeys(self.request.names, NamedNode.UNSEEN)
        if self.cluster is not None:
            names |= self.cluster.names
        if self.settings.node in names:
            names[self.settings.node] = NamedNode.THERE
        yield from judge_entries(self.settings.node, names, self.request.files)

    def access(self) -> Iterator[Finding]:
        if self.settings.driver.simulate is None:
            gpus = None if self.scan is None else len(self.scan.gpus) + len(self.scan.faults)
            yield from judge_access(device_nodes(self.request.device_files), gpus)

    def kubelet(self) -> Iterator[Finding]:
        paths = self.settings.paths
        place = look_at(paths.plugins)
        yield preflight.judge_kubelet(place, look_at(paths.kubelet_socket))
        alive = [one for one in self.sockets if one.alive]
        # The register annotation is the agent's own here, and no sign of HAMi's plugin.
        answer = self.cluster.answer if self.cluster else None
        answer = answer and msgspec.structs.replace(answer, annotations={})
        yield from preflight.judge_plugins(place, alive, answer, takeover=self.settings.takeover)
        if self.node is not None:
            report, now = self._report(self.node.traces), self.clock.now()
            if finding := scheduling.judge_offer(self.settings.node, self.node.offer, report, now):
                yield finding

    def api(self) -> Iterator[Finding]:
        if self.cluster is None:
            return
        answer = self.cluster.answer
        if answer.failure:
            advice = answer.remedy or "repair the connection, and run this check again"
            yield Finding.unknown(PreflightCheck.NODE, answer.server, answer.failure, advice)
            return
        yield from preflight.judge_cluster(self.settings.node, answer)
        if self.cluster.excess is not None:
            yield judge_excess(answer.server, self.cluster.excess)
        if self.node is not None:
            yield judge_clock(answer.server, self.node.skew)

    def scheduler(self) -> Iterator[Finding]:
        if self.node is None:
            return
        traces, name, now = self.node.traces, self.settings.node, self.clock.now()
        profile, report = self.settings.report.profile, self._report(self.node.traces)
        yield scheduling.judge_present_report(name, report, profile)
        text = traces.annotations.get(HANDSHAKE, "")
        seen = scheduling.HandshakeSeen(text, text.partition(" ")[0][:32])
        if (said := _decoded(decode_handshake, text)) is not None:
            stamp = said.stamp if said.stamp is not None and said.stamp.tzinfo else None
            seen = scheduling.HandshakeSeen(text, said.word.value, stamp)
        yield scheduling.judge_handshake(name, seen, report, profile, now)
        yield scheduling.judge_writer(traces, report)
        lock = traces.annotations.get(MUTEX_LOCK)
        yield scheduling.judge_lock(name, lock, _decoded(decode_node_lock, lock), now)
        stale = [one.path for one in self.sockets if one.theirs and not one.alive]
        scores = self.settings.report.topology_score
        yield from scheduling.judge_leftovers(traces, stale, stamps=profile.stamps, scores=scores)

    def unseen(self, findings: Sequence[Finding]) -> Iterator[Finding]:
        """One finding for each group of which checks were not made."""
        if self.cluster is None:
            return
        made = {one.point for one in findings}
        rest = {PreflightCheck.MONITOR}  # there is nothing to say without HAMi's plugin
        for group in FROM_API:
            missing = [check for check in MEMBERS[group] if check not in made | rest]
            if missing:
                names = ", ".join(check.value for check in missing)
                said = f"not checked: {names}"
                advice = "repair what is said of the API server, and run this check again"
                server = self.cluster.answer.server
                yield Finding.unknown(missing[0], server, said, advice)

    def _report(self, traces: NodeTraces) -> scheduling.ReportSeen:
        text = traces.annotations.get(REGISTER)
        if text is None:
            return scheduling.ReportSeen()
        gpus = read_register(text)
        differences: tuple[str, ...] = ()
        if self.scan is not None and gpus:
            differences = report_differences(self.settings, self.scan, traces.annotations)
        return scheduling.ReportSeen(
            is_there=True,
            gpus=len(gpus),
            healthy=sum(gpu.split_count for gpu in gpus if gpu.healthy),
            is_json=is_json_form(text),
            differences=differences,
            written=_decoded(decode_stamp, traces.last_written)
            if REGISTER in traces.written
            else None,
        )


def _decoded(decode: Callable[[str], R], text: str | None) -> R | None:
    """What the text says; None if there is none, or it cannot be read."""
    try:
        return None if text is None else decode(text)
    except MalformedText:
        return None


# Renders the findings of `doctor`: lines for people, data for programs.

_INDENT: Final = 20
_LONGEST: Final = 1024
"""Characters of a text; some come from the cluster."""


def write_lines(findings: Sequence[Finding], columns: int, *, before: bool) -> None:
    """Print a line for each finding and one with their numbers, folded at `columns`.

    `before`: of `doctor --pre`.
    """
    each = _line if before else _lines
    lines = (line for one in findings for line in each(one))
    indent = " " * min(_INDENT, columns // 4)
    for line in (*lines, _sum(findings)):
        begin = indent if line.startswith(("means: ", "to do: ")) else ""
        parts = textwrap.wrap(
            line,
            columns,
            initial_indent=begin,
            subsequent_indent=f"{indent}  ",
            break_on_hyphens=False,
        )
        sys.stdout.writelines(f"{part}\n" for part in parts)


def document_of(findings: Sequence[Finding], *, before: bool) -> tuple[str, dict[str, object]]:
    """The kind and the data of the findings for programs."""
    counts = Counter(one.verdict for one in findings)
    data: dict[str, object] = {"ok": not counts[PreflightVerdict.WRONG]}
    if not before:
        data["complete"] = not counts[PreflightVerdict.UNKNOWN]
    data["findings"] = [_entry(one, before=before) for one in findings]
    return "Preflight" if before else "Checkup", data


def _line(finding: Finding) -> Iterator[str]:
    verdict, point = finding.verdict, finding.point.value
    line = f"{verdict.value:<6} {point:<11} {_safe(f'{finding.subject}: {finding.said}')}"
    if finding.advice:
        line += f"; {_safe(finding.advice)}"
    yield line if verdict is PreflightVerdict.OK else f"{line} [RUNBOOK {point}]"


def _lines(finding: Finding) -> Iterator[str]:
    group, verdict, point = group_of(finding.point).value, finding.verdict, finding.point.value
    said = _safe(f"{finding.subject}: {finding.said}")
    yield f"{group:<10} {verdict.value:<8} {point:<12} {said}"
    if verdict in {PreflightVerdict.WRONG, PreflightVerdict.NOTE}:
        yield f"means: {consequence(finding)}"
    if verdict is not PreflightVerdict.OK:
        advice = _safe(finding.advice)
        yield f"to do: {advice}{' ' if advice else ''}[RUNBOOK {point}]"


def _safe(text: str) -> str:
    """The text in one line, without what a terminal would obey."""
    return cap(text, _LONGEST)


def _sum(findings: Sequence[Finding]) -> str:
    counts = Counter(one.verdict for one in findings)
    notes = counted(counts[PreflightVerdict.NOTE], "note")
    unknown = counts[PreflightVerdict.UNKNOWN]
    unseen = f", {unknown} not checked" if unknown else ""
    wrong = counts[PreflightVerdict.WRONG]
    return f"{wrong} wrong, {notes}, {counts[PreflightVerdict.OK]} ok{unseen}"


def _entry(finding: Finding, *, before: bool) -> dict[str, str]:
    entry = {
        "id": finding.point.value,
        "verdict": finding.verdict.value.lower(),
        "subject": finding.subject,
        "said": finding.said,
        "advice": finding.advice,
    }
    if before:
        return entry
    means = "" if finding.verdict is PreflightVerdict.OK else consequence(finding)
    return entry | {"group": group_of(finding.point).value, "means": means}


ANSWER_SECONDS: Final = 5.0
_GROUPS: Final = ", ".join(CheckGroup)


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
    read = asyncio.run(_read(sources(args, environ), before=args.pre))
    groups = args.only or (ALL_GROUPS - args.skip if args.skip else ALL_GROUPS)
    findings = tuple(_findings(read, environ, args, groups))
    if args.output == TABLE:
        write_lines(findings, terminal_width(environ, UNFOLDED), before=args.pre)
    else:
        kind, data = document_of(findings, before=args.pre)
        sys.stdout.write(document(kind, data, args.output, SystemClock().now()))
    return _code({one.verdict for one in findings}, strict=args.strict)


async def _read(origin: Sources, *, before: bool) -> SourcesRead:
    """Read the settings; if they are refused, a running agent has the last good ones."""
    if not before:
        with contextlib.suppress(SettingsError):
            return await started(origin)
    return await looked(origin)


def _groups(text: str) -> frozenset[CheckGroup]:
    words = [word.strip() for word in text.split(",")]
    known = {group.value: group for group in CheckGroup}
    for word in words:
        if word not in known:
            hint = nearest(word, known)
            said = f"there is no group {cap(word, 64)!r}{hint or f'; the groups are {_GROUPS}'}"
            raise argparse.ArgumentTypeError(said)
    return frozenset(known[word] for word in words)


def _code(verdicts: set[PreflightVerdict], *, strict: bool) -> int:
    if PreflightVerdict.WRONG in verdicts:
        return PROBLEM
    if PreflightVerdict.UNKNOWN in verdicts:
        return INCOMPLETE
    return WARNED if strict and PreflightVerdict.NOTE in verdicts else OK


def _findings(
    read: SourcesRead,
    environ: Mapping[str, str],
    args: argparse.Namespace,
    groups: frozenset[CheckGroup],
) -> Sequence[Finding]:
    try:
        plan = read.taken()
        settings = plan.settings(NodeFacts())
    except SettingsError as error:
        return [_refused(error)]
    config = _config_findings(plan, settings, before=args.pre)
    if read.refusal is not None:
        config[0] = _refused(read.refusal)
    if args.pre:
        rest = asyncio.run(examine(settings, environ, reader=args.read_only))
        every = [*config, *rest]
        return every if groups == ALL_GROUPS else in_groups(every, groups)
    request = CheckupRequest(
        agent=_agent(settings),
        groups=groups,
        settings=tuple(config),
        names=plan.names(),
        files=_files(plan),
        reader=args.read_only,
    )
    return asyncio.run(examine_running(settings, environ, SystemClock(), request))


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
    return [main, *notes, _hami_files(plan, values, settings, before=before)]


def _hami_files(plan: NodeValues, values: Values, settings: Settings, *, before: bool) -> Finding:
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
    is_unchecked = settings.plain is None and not settings.match.requests.known
    return judge_hami_files(files, settings.node, names, needed=before, unchecked=is_unchecked)


def _files(plan: NodeValues) -> str:
    files = (plan.sources.own, plan.sources.node_config)
    return ", ".join(file.name for file in files if file is not None) or "settings"


def _agent(settings: Settings) -> AgentAnswer:
    """Ask the running agent by its socket."""
    path = settings.paths.run / "api.sock"
    try:
        status, text = call(path, "GET", "/readyz?verbose", ANSWER_SECONDS)
    except Unreachable as error:
        denied = isinstance(error.__cause__, PermissionError)
        reason = error.__cause__
        failure = os.strerror(reason.errno) if isinstance(reason, OSError) and reason.errno else ""
        return AgentAnswer(str(path), failure=failure or str(reason), denied=denied)
    return AgentAnswer(str(path), status, text)
