"""`hami-agent config show|check`: what the settings are, and where each came from."""

import argparse
import json
import shutil
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from agent.app.codes import BAD_SETTINGS
from agent.cli.codes import OK, PROBLEM
from agent.cli.main import Subparsers
from agent.cli.settings_args import add_settings, sources
from agent.core.errors import SettingsError
from agent.settings.load import Effective, Setting, load
from agent.settings.schema import build

API_VERSION = "hami-agent/v1"


def add_parser(subparsers: Subparsers) -> None:
    """The verbs `config show` and `config check`."""
    parser = subparsers.add_parser("config", help="show or check settings")
    verbs = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = verbs.add_parser(
        "show",
        help="print the effective settings",
        epilog="example: hami-agent config show --origin --config /etc/hami-agent/config.yaml",
    )
    show.add_argument("--origin", action="store_true", help="say where each value came from")
    show.add_argument("--diff", action="store_true", help="only what is not a default")
    check = verbs.add_parser(
        "check",
        help="check a settings file without starting anything",
        epilog="example: hami-agent config check ./config.yaml",
    )
    check.add_argument("file", nargs="?", type=Path, metavar="FILE", help="like --config FILE")
    for one in (show, check):
        one.add_argument("-o", "--output", choices=("table", "json"), default="table")
        add_settings(one)


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Print the settings, or the one sentence that says what is wrong with them."""
    if args.action == "check" and args.file is not None:
        args.config = args.file
    try:
        effective = load(sources(args, environ))
        build(effective, host_name=socket.gethostname())
    except SettingsError as error:
        sys.stderr.write(f"hami-agent: {error}\n")
        return PROBLEM if args.action == "check" else BAD_SETTINGS
    if args.action == "check":
        sys.stdout.write(_checked(effective, as_json=args.output == "json"))
        return OK
    settings = [
        one for one in effective.values() if not args.diff or one.value != one.field.default
    ]
    if args.output == "json":
        sys.stdout.write(json.dumps(_document(settings), indent=2) + "\n")
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
        sys.stdout.writelines(_table(settings, origin=args.origin, width=width))
    return OK


def _checked(effective: Effective, *, as_json: bool) -> str:
    changed = sum(1 for one in effective.values() if one.origin != "default")
    if as_json:
        return json.dumps({"apiVersion": API_VERSION, "kind": "ConfigCheck", "ok": True}) + "\n"
    return f"ok: {changed} of {len(effective)} settings differ from their defaults\n"


def _document(settings: Iterable[Setting]) -> dict[str, object]:
    data = [
        {"key": one.field.key, "value": _plain(one.value), "origin": one.origin} for one in settings
    ]
    return {"apiVersion": API_VERSION, "kind": "Config", "data": data}


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _text(value: object) -> str:
    if value is None:
        return "-"
    return json.dumps(_plain(value)) if not isinstance(value, str) else value or '""'


def _table(settings: Sequence[Setting], *, origin: bool, width: int) -> Iterable[str]:
    """Lines that fit `width` columns: the last column is cut, never wrapped."""
    rows = [("KEY", "VALUE", "FROM")]
    rows += [(one.field.key, _text(one.value), one.origin) for one in settings]
    keys = max(len(row[0]) for row in rows)
    values = min(max(len(row[1]) for row in rows), 48)
    for key, value, place in rows:
        line = f"{key:<{keys}}  {value:<{values}}"
        line = f"{line}  {place}" if origin else line
        yield (line.rstrip() if len(line) <= width else line[: width - 1] + "…") + "\n"
