"""`hami-agent config show|check|schema`, and the flags of the settings, which several verbs share.

`config` shows and checks settings and their origins.
"""

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from agent.cli.main import OK, PROBLEM, TABLE, Subparsers, add_output
from agent.cli.output import UNFOLDED, answer, terminal_width
from agent.errors import SettingsError, cap
from agent.host.system import Worker, check_size, host_name, read_file
from agent.ledger import SourceFile
from agent.setting import boolean
from agent.settings import reading
from agent.settings.files import first_of, kept, refuse
from agent.settings.reading import Labels, NodeValues, Sources, SourcesRead
from agent.settings.schema import DEFAULT, FIELDS, SECTIONS, Setting, check_shares, json_schema

# The flags of the settings.


def add_settings(
    parser: argparse.ArgumentParser, usage: str = "", only: Collection[str] | None = None
) -> None:
    """Add `--config`, an option for each setting with a flag, and the options of HAMi's plugin.

    `usage`: the usage after the options. `only`: the settings that the help shows; the others are
    accepted too, so that one command line fits all verbs.
    """
    parser.usage = f"%(prog)s [OPTION ...] {usage}".rstrip()
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="settings file (/etc/hami-agent/config.yaml)"
    )
    group = parser.add_argument_group("settings", "each overrides the file and the environment")
    for field in FIELDS:
        if field.flag:
            # A switch may stand alone, as in HAMi's plugin: --pass-device-specs is =true.
            alone = field.read is boolean

            # The default as it would be written after the flag.
            value = field.read.write(field.default)
            value = ",".join(value) if isinstance(value, tuple) else value
            text = field.text if value is None else f"{field.text} [{value}]"
            group.add_argument(
                field.flag,
                *field.other_flags,
                nargs="?" if alone else None,
                const="true" if alone else None,
                metavar="VALUE",
                dest=field.flag,
                help=text if only is None or field.key in only else argparse.SUPPRESS,
            )

    inherited = "accepted so that its command lines work; they have no effect"
    others = parser.add_argument_group(*("of HAMi's plugin", inherited) if only is None else ())
    for foreign in reading.FOREIGN:
        others.add_argument(
            *foreign.flags,
            nargs="?" if foreign.switch else None,
            const="true" if foreign.switch else None,
            metavar="VALUE",
            dest=foreign.flags[0],
            help=None if only is None else argparse.SUPPRESS,
        )


def flags(args: argparse.Namespace) -> Mapping[str, str]:
    """The given options of settings, by their names, which begin with a hyphen in `args`."""
    return {
        name: text for name, text in vars(args).items() if name.startswith("-") and text is not None
    }


def sources(args: argparse.Namespace, environ: Mapping[str, str]) -> Sources:
    """The sources of the settings of this call."""
    return Sources(args.config, environ, flags(args), host_name())


async def looked(origin: Sources) -> SourcesRead:
    """Read the sources once, on a thread that does not delay the exit."""
    async with Worker("settings") as files:
        return await reading.look(origin, files)


async def started(origin: Sources) -> SourcesRead:
    """Read the settings to start with. Raises SettingsError."""
    async with Worker("settings") as files, Worker("state") as state:
        return await reading.begin(origin, files, state)


# The verb.

INDENT: Final = "  "

OTHERS: Final = "other nodes"
"""The title of what each node gets that no file names."""

KINDS: Final = {
    "device_config": "HAMi's device-config.yaml",
    "own": "the agent's own file",
    "node_config": "HAMi's config.json",
}
"""The kinds of files, as attributes of Sources, in the words of a message."""

_NVIDIA: Final = re.compile(rb"""(?m)^[\s{]*["']?nvidia["']?\s*:""")
_OURS: Final = re.compile(rf""""({"|".join(SECTIONS)})"\s*:""".lower().encode())
"""The key by which HAMi's device-config.yaml, or our own file in JSON, is recognised."""

STDIN: Final = Path("/dev/stdin")

_WIDEST: Final = 48
"""Columns reserved for a value; a longer one moves the next column."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the verbs `config show`, `config check` and `config schema`."""
    parser = subparsers.add_parser(
        "config", epilog="example: hami-agent config check /etc/hami-agent/config.yaml"
    )

    verbs = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = verbs.add_parser(
        "show",
        help="print the effective settings",
        description=_show.__doc__,
        epilog="example: hami-agent config show --origin --config /etc/hami-agent/config.yaml",
    )
    show.add_argument("--origin", action="store_true", help="print where each value came from")
    show.add_argument("--diff", action="store_true", help="print only what was set")
    add_output(show)
    add_settings(show)

    check = verbs.add_parser(
        "check",
        help="check settings files and print what each node would get",
        description=_check.__doc__,
        epilog="example: hami-agent config check config.yaml --node gpu-1 --label zone=a",
    )
    check.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="a file to check; - is standard input"
    )

    words = "a node to print, may be repeated; without it: all nodes that the files name"
    check.add_argument("--node", action="append", default=[], metavar="NAME", help=words)

    check.add_argument(
        "--label",
        action="append",
        type=_label,
        default=[],
        metavar="KEY=VALUE",
        help="a label of the nodes",
    )

    add_output(check)
    add_settings(check, "[FILE ...]")

    verbs.add_parser(
        "schema",
        help="print the JSON schema of the settings file, for editors",
        description="Prints the JSON schema (draft 2020-12) of /etc/hami-agent/config.yaml.",
        epilog="example: hami-agent config schema > hami-agent.schema.json",
    )


def _label(text: str) -> tuple[str, str]:
    """A label of a node. Raises ArgumentTypeError: it is not KEY=VALUE."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise argparse.ArgumentTypeError(f"{text}: expected KEY=VALUE")
    return key, value


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run the verb; return the exit code."""
    if args.action == "schema":
        sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")
        return OK

    return _check(args, environ) if args.action == "check" else _show(args, environ)


def _show(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Prints the settings of this node.

    Profiles that need labels are left out: `config check` takes labels as arguments.
    """
    try:
        plan = asyncio.run(looked(sources(args, environ))).taken()
        name = plan.settings().node
    except SettingsError as error:
        sys.stderr.write(f"hami-agent: {error}\n")
        return error.exit_code

    _tell(plan, ["what selects by labels is left out"] * plan.need_labels(name))
    values = plan.resolve(name)
    settings = _changed(values) if args.diff else list(values.values())
    lines = table(settings, origin=args.origin, columns=terminal_width(environ, UNFOLDED))
    answer(args.output, "Config", list(map(plain, settings)), lines)
    return OK


def _check(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Checks settings files without starting anything, and prints what each node would get.

    The files are the agent's own config.yaml and HAMi's device-config.yaml and config.json,
    recognised by their content. Without FILE: the files and variables that `run` would use here.
    """
    labels = dict(args.label) if args.label else None
    try:
        plan = _plan(args, environ)
        nodes = _nodes(args, plan, labels)
    except SettingsError as error:
        sys.stderr.writelines(f"hami-agent: {text}\n" for text in error.every)
        said = {"ok": False, "error": str(error), "errors": list(error.every)}
        answer(args.output, "ConfigCheck", said, ())
        return PROBLEM

    # What the command line would have to name for these profiles to apply.
    needing = [
        f"the profile {cap(one.name, 64) or f'at {one.where}'} is left out: it needs labels: "
        "--label KEY=VALUE"
        for one in plan.profiles
        if one.labels is not None and not args.label
    ]
    notes = first_of(needing, "profiles")
    columns, lines = terminal_width(environ, UNFOLDED) - len(INDENT), []
    each: list[object] = []

    for title, name in nodes:
        changed = _changed(plan.resolve(name, labels))
        profiles = [one.name for one in plan.applied(name, labels) if one.name]
        heads = ", ".join((title, *(f"profile {name}" for name in profiles)))
        lines.append(heads if changed else f"{heads}: all defaults")
        rows = table(changed, origin=True, columns=columns)
        lines += [f"{INDENT}{row}" for row in list(rows)[1:]]
        each.append({"name": title, "profiles": profiles, "settings": list(map(plain, changed))})

    if args.output == TABLE:
        _tell(plan, notes)
    said = {"ok": True, "warnings": list(plan.warnings), "notes": notes, "nodes": each}
    answer(args.output, "ConfigCheck", said, [*lines, "ok"])
    return OK


def _tell(plan: NodeValues, notes: Iterable[str]) -> None:
    """Print warnings and notes on standard error: programs read the other one."""
    sys.stderr.writelines(f"hami-agent: warning: {text}\n" for text in plan.warnings)
    sys.stderr.writelines(f"hami-agent: note: {text}\n" for text in notes)


def _changed(values: Mapping[str, Setting]) -> list[Setting]:
    return [setting for setting in values.values() if setting.origin != DEFAULT]


def _plan(args: argparse.Namespace, environ: Mapping[str, str]) -> NodeValues:
    """Read the sources. Raises one SettingsError with the faults of all of them.

    Named files are read by their kind, without the variables of this environment.
    """
    if not args.files:
        return asyncio.run(looked(sources(args, environ))).taken()

    errors, files = list[str](), dict[str, SourceFile]()
    for path in (*args.files, *([args.config] if args.config else [])):
        with kept(errors):
            file = STDIN if path == Path("-") else path
            text = SourceFile(str(file), read_file(file, reading.MAX_JSON) or b"")
            kind = _kind(text)
            if kind != "node_config":  # a larger one was refused above
                check_size(file, text.content, reading.MAX_YAML)
            if kind in files:
                fault = f"is {KINDS[kind]}, and so is {files[kind].name}; name only one"
                raise SettingsError(f"{path}: {fault}")
            files[kind] = text

    with kept(errors):
        plan = reading.make_plan(msgspec.structs.replace(Sources(flags=flags(args)), **files))
    refuse(errors)

    return plan


def _kind(text: SourceFile) -> str:
    """The attribute of Sources to which a file belongs: by its keys, also if it is broken."""
    content = text.content.lower()
    if b'"nodeconfig"' in content or (text.name.endswith(".json") and not _OURS.search(content)):
        return "node_config"
    return "device_config" if _NVIDIA.search(content) else "own"


def _nodes(args: argparse.Namespace, plan: NodeValues, labels: Labels) -> Sequence[tuple[str, str]]:
    """Each node's title and name. Raises one SettingsError with the faults of all of them."""
    asked = [(name, name) for name in args.node or plan.names()]
    if not args.node:
        asked.append((OTHERS, ""))

    applied = [one for _, name in asked for one in plan.applied(name, labels)]
    profiles = applied if args.node else plan.profiles
    errors = [fault for profile in profiles for fault in profile.faults]
    for _, name in asked:
        with kept(errors):
            check_shares(plan.resolve(name, labels))
    refuse(errors)
    return asked


def plain(setting: Setting) -> dict[str, object]:
    """A setting for JSON; a duration is a number of seconds."""
    return {"key": setting.field.key, "value": setting.value, "origin": setting.origin}


def table(settings: Sequence[Setting], *, origin: bool, columns: int) -> Iterator[str]:
    """Yield a line of headings and a line for each setting. Nothing is cut.

    A setting that would go beyond `columns` has a line for each cell.
    """
    rows = [("KEY", "VALUE", "FROM")]
    rows += [(setting.field.key, _text(setting), setting.origin) for setting in settings]
    keys = max(len(row[0]) for row in rows)
    values = min(max(len(row[1]) for row in rows), _WIDEST)

    for key, value, place in rows:
        cells = (f"{key:<{keys}}", f"{value:<{values}}", place)[: 3 if origin else 2]
        line = INDENT.join(cells).rstrip()
        lines = [line] if len(line) <= columns else [key, *(2 * INDENT + one for one in cells[1:])]
        yield from map(str.rstrip, lines)


def _text(setting: Setting) -> str:
    """A value as it would be written in the file; text that shows nothing is quoted."""
    value = setting.field.read.write(setting.value)
    if value is None:
        return "-"

    is_shown = isinstance(value, str) and value.isprintable() and value
    return str(value) if is_shown else json.dumps(value)
