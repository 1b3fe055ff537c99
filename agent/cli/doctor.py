"""`hami-agent doctor --pre`: does the agent find all it needs on this node, and whom else?"""

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence

from agent.app.preflight import examine
from agent.cli.arguments import add_output
from agent.cli.codes import OK, PROBLEM
from agent.cli.logs import configure
from agent.cli.main import Subparsers
from agent.cli.settings_args import add_settings, looked, sources
from agent.cli.settings_view import API_VERSION
from agent.core.errors import SettingsError
from agent.core.node.preflight import (
    Finding,
    PreflightCheck,
    PreflightVerdict,
    counted,
    judge_hami_files,
)
from agent.settings.fields import Values
from agent.settings.profiles import NodeFacts
from agent.settings.reading import DEVICE_CONFIG, NODE_CONFIG, SourcesRead
from agent.settings.sections import check_shares
from agent.settings.values import NodeValues


def add_parser(subparsers: Subparsers) -> None:
    """The verb `doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help="look at this node before the agent starts on it",
        description="Looks at all that the agent needs on this node, with the settings that `run` "
        "would have here, and changes nothing: settings, paths, HAMi-core, driver, kubelet, Node, "
        "rights, and other device plugins. Exits 1 if something keeps the agent from serving.",
        epilog="example: hami-agent doctor --pre --config /etc/hami-agent/config.yaml -o json",
    )
    parser.add_argument(
        "--pre", action="store_true", required=True, help="before the first start, or a switch"
    )
    parser.add_argument(
        "--read-only",
        action="store_true",
        help="as an account that may only read: the agent's rights to write are passed over",
    )
    add_output(parser)
    add_settings(parser)


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print a line for everything that was looked at."""
    configure("error", "auto", environ)
    found = asyncio.run(looked(sources(args, environ)))
    findings = tuple(_findings(found, environ, reader=args.read_only))
    wrong = any(one.verdict is PreflightVerdict.WRONG for one in findings)
    if args.output == "json":
        _write_json(findings, ok=not wrong)
    else:
        sys.stdout.writelines(_line(one) for one in findings)
        sys.stdout.write(_sum(findings))
    return PROBLEM if wrong else OK


def _findings(found: SourcesRead, environ: Mapping[str, str], *, reader: bool) -> Sequence[Finding]:
    try:
        plan = found.taken()
        settings = plan.settings(NodeFacts())
    except SettingsError as error:
        advice = "mend it; `hami-agent config check` says what each node would get"
        return [Finding.wrong(PreflightCheck.SETTINGS, "settings", str(error), advice)]
    values = plan.resolve(NodeFacts(settings.node))
    read = Finding.ok(PreflightCheck.SETTINGS, "settings", f"accepted, for Node {settings.node}")
    try:
        check_shares(values)
    except SettingsError as error:
        read = Finding.wrong(PreflightCheck.SETTINGS, "settings", str(error))
    notes = [
        Finding.note(PreflightCheck.SETTINGS, "settings", text, "it changes nothing here")
        for text in plan.warnings
    ]
    hami = _hami_files(plan, values, settings.node)
    return [read, *notes, hami, *asyncio.run(examine(settings, environ, reader=reader))]


def _hami_files(plan: NodeValues, values: Values, node: str) -> Finding:
    sources = plan.sources
    files = {
        str(values[key].value): text is not None
        for key, text in (
            (DEVICE_CONFIG, sources.device_config),
            (NODE_CONFIG, sources.node_config),
        )
        if values[key].value
    }
    names = [name for one in plan.node_config.profiles for name in one.match.nodes]
    return judge_hami_files(files, node, names)


def _line(one: Finding) -> str:
    line = f"{one.verdict.value:<6} {one.point.value:<11} {one.subject}: {one.said}"
    if one.advice:
        line += f"; {one.advice}"
    return line + (
        f" [RUNBOOK {one.point.value}]\n" if one.verdict is not PreflightVerdict.OK else "\n"
    )


def _sum(findings: Sequence[Finding]) -> str:
    counts = {
        verdict: sum(one.verdict is verdict for one in findings) for verdict in PreflightVerdict
    }
    notes = counted(counts[PreflightVerdict.NOTE], "note")
    return f"{counts[PreflightVerdict.WRONG]} wrong, {notes}, {counts[PreflightVerdict.OK]} ok\n"


def _write_json(findings: Sequence[Finding], *, ok: bool) -> None:
    document = {
        "apiVersion": API_VERSION,
        "kind": "Preflight",
        "ok": ok,
        "findings": [
            {
                "id": one.point.value,
                "verdict": one.verdict.value.lower(),
                "subject": one.subject,
                "said": one.said,
                "advice": one.advice,
            }
            for one in findings
        ],
    }
    sys.stdout.write(json.dumps(document, indent=2) + "\n")
