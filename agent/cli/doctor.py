"""`hami-agent doctor --pre`: checks whether the agent could serve on this node."""

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
    """Add the verb `doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help="check this node before the agent starts on it",
        description="Checks what the agent needs on this node, with the settings of `run`: "
        "settings, paths, HAMi-core, driver, kubelet, Node, rights, and other device plugins. It "
        "changes nothing. Exits 1 if something keeps the agent from serving.",
        epilog="example: hami-agent doctor --pre --config /etc/hami-agent/config.yaml -o json",
    )
    parser.add_argument(
        "--pre",
        action="store_true",
        required=True,
        help="check before the first start, or before a switch from another plugin",
    )
    parser.add_argument(
        "--read-only",
        action="store_true",
        help="do not check the rights to write, for an account that may only read",
    )
    add_output(parser)
    add_settings(parser)


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print a line for every check; return the exit code."""
    configure("error", "auto", environ)
    read = asyncio.run(looked(sources(args, environ)))
    findings = tuple(_findings(read, environ, reader=args.read_only))
    wrong = any(finding.verdict is PreflightVerdict.WRONG for finding in findings)
    if args.output == "json":
        _write_json(findings, ok=not wrong)
    else:
        sys.stdout.writelines(map(_line, findings))
        sys.stdout.write(_sum(findings))
    return PROBLEM if wrong else OK


def _findings(read: SourcesRead, environ: Mapping[str, str], *, reader: bool) -> Sequence[Finding]:
    try:
        plan = read.taken()
        settings = plan.settings(NodeFacts())
    except SettingsError as error:
        advice = "correct it; `hami-agent config check` prints what each node would get"
        return [Finding.wrong(PreflightCheck.SETTINGS, "settings", str(error), advice)]
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
    hami = _hami_files(plan, values, settings.node)
    return [main, *notes, hami, *asyncio.run(examine(settings, environ, reader=reader))]


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
    names = [name for profile in plan.node_config.profiles for name in profile.match.nodes]
    return judge_hami_files(files, node, names)


def _line(finding: Finding) -> str:
    verdict, point = finding.verdict, finding.point.value
    line = f"{verdict.value:<6} {point:<11} {finding.subject}: {finding.said}"
    if finding.advice:
        line += f"; {finding.advice}"
    return line + ("\n" if verdict is PreflightVerdict.OK else f" [RUNBOOK {point}]\n")


def _sum(findings: Sequence[Finding]) -> str:
    counts = {
        verdict: sum(finding.verdict is verdict for finding in findings)
        for verdict in PreflightVerdict
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
                "id": finding.point.value,
                "verdict": finding.verdict.value.lower(),
                "subject": finding.subject,
                "said": finding.said,
                "advice": finding.advice,
            }
            for finding in findings
        ],
    }
    sys.stdout.write(json.dumps(document, indent=2) + "\n")
