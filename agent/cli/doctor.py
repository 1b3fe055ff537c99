"""`hami-agent doctor`: checks this node, beside the agent or before it starts there (`--pre`)."""

import argparse
import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from agent.app.checkup import CheckupRequest, examine_running
from agent.app.preflight import examine
from agent.cli.api_socket import Unreachable, call
from agent.cli.arguments import TABLE, add_output, nearest
from agent.cli.codes import INCOMPLETE, OK, PROBLEM, WARNED
from agent.cli.doctor_view import document_of, write_lines
from agent.cli.documents import document
from agent.cli.logs import configure
from agent.cli.main import Subparsers
from agent.cli.settings_args import add_settings, looked, sources, started
from agent.cli.terminal import UNFOLDED, terminal_width
from agent.core.errors import SettingsError, cap
from agent.core.node.check_groups import ALL_GROUPS, CheckGroup, in_groups
from agent.core.node.findings import Finding, PreflightCheck, PreflightVerdict
from agent.core.node.preflight import judge_hami_files
from agent.core.node.running_agent import AgentAnswer
from agent.host.clock import SystemClock
from agent.settings.fields import Values
from agent.settings.reading import DEVICE_CONFIG, NODE_CONFIG, SourcesRead
from agent.settings.sections import Settings, check_shares
from agent.settings.sources import NodeFacts, Sources
from agent.settings.values import NodeValues

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
