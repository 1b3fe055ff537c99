"""`hami-agent config show|check|schema`: shows and checks settings and their origins."""

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping

from agent.app.codes import BAD_SETTINGS
from agent.cli.arguments import TABLE, add_output
from agent.cli.codes import OK
from agent.cli.config_check import add_check, check
from agent.cli.documents import document
from agent.cli.main import Subparsers
from agent.cli.settings_args import add_settings, looked, sources
from agent.cli.settings_view import plain, table
from agent.cli.terminal import UNFOLDED, terminal_width
from agent.core.errors import SettingsError
from agent.host.clock import SystemClock
from agent.settings.fields import DEFAULT
from agent.settings.json_schema import json_schema
from agent.settings.sources import NodeFacts


def add_parser(subparsers: Subparsers) -> None:
    """Add the verbs `config show`, `config check` and `config schema`."""
    parser = subparsers.add_parser(
        "config",
        help="show or check settings",
        epilog="example: hami-agent config check /etc/hami-agent/config.yaml",
    )
    verbs = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = verbs.add_parser(
        "show",
        help="print the effective settings",
        description="Prints the settings of this node. Profiles that need labels are left out: "
        "`config check` takes labels as arguments.",
        epilog="example: hami-agent config show --origin --config /etc/hami-agent/config.yaml",
    )
    show.add_argument("--origin", action="store_true", help="print where each value came from")
    show.add_argument("--diff", action="store_true", help="print only what was set")
    add_output(show)
    add_settings(show)
    add_check(verbs)
    verbs.add_parser(
        "schema",
        help="print the JSON schema of the settings file, for editors",
        description="Prints the JSON schema (draft 2020-12) of /etc/hami-agent/config.yaml.",
        epilog="example: hami-agent config schema > hami-agent.schema.json",
    )


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run the verb; return the exit code."""
    if args.action == "schema":
        sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")
        return OK
    if args.action == "check":
        return check(args, environ)
    return _show(args, environ)


def _show(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    try:
        plan = asyncio.run(looked(sources(args, environ))).taken()
        name = plan.settings(NodeFacts()).node
    except SettingsError as error:
        sys.stderr.write(f"hami-agent: {error}\n")
        return BAD_SETTINGS
    for warning in plan.warnings:
        sys.stderr.write(f"hami-agent: warning: {warning}\n")
    if plan.need_labels(NodeFacts(name)):
        sys.stderr.write("hami-agent: note: what selects by labels is left out\n")
    values = plan.resolve(NodeFacts(name))
    settings = [
        setting for setting in values.values() if not args.diff or setting.origin != DEFAULT
    ]
    if args.output == TABLE:
        columns = terminal_width(environ, UNFOLDED)
        sys.stdout.writelines(table(settings, origin=args.origin, columns=columns))
    else:
        data = [plain(setting) for setting in settings]
        sys.stdout.write(document("Config", data, args.output, SystemClock().now()))
    return OK
