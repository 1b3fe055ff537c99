"""`hami-agent config show|check|schema`, and the flags of the settings that verbs share."""

import argparse
import asyncio
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from agent.cli import output
from agent.cli.main import TABLE, Exit, Subparsers, add_output, typed
from agent.cli.output import answer
from agent.errors import SettingsError
from agent.host.system import Worker, host_name
from agent.kit.units import Column
from agent.setting import boolean, text_where
from agent.settings import reading
from agent.settings.files import refuse
from agent.settings.reading import NodeValues, Sources, SourcesRead
from agent.settings.schema import DEFAULT, FIELDS, Setting, json_schema

_ALONE: Final[Mapping[str, Any]] = {"nargs": "?", "const": "true"}


def add_settings(
    parser: argparse.ArgumentParser, usage: str = "", only: Collection[str] | None = None
) -> None:
    """Add `--config`, an option for each setting with a flag, and the options of HAMi's plugin.

    `only`: the settings that the help shows; the others are accepted too, so that one command line
    fits all verbs.
    """
    parser.usage = f"%(prog)s [OPTION ...] {usage}".rstrip()
    text = "settings file (/etc/hami-agent/config.yaml)"
    parser.add_argument("--config", type=Path, metavar="FILE", help=text)
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
                *(field.flag, *field.other_flags),
                **(_ALONE if alone else {}),
                metavar="VALUE",
                dest=field.flag,
                help=text if only is None or field.key in only else argparse.SUPPRESS,
            )

    inherited = "accepted so that its command lines work; they have no effect"
    others = parser.add_argument_group(*("of HAMi's plugin", inherited) if only is None else ())
    hidden = None if only is None else argparse.SUPPRESS
    for names in (*((reading.flag_of(name),) for name in reading.FOREIGN), ("-v", "--v")):
        others.add_argument(*names, **_ALONE, metavar="VALUE", dest=names[0], help=hidden)


def flags(args: argparse.Namespace) -> Mapping[str, str]:
    """The given options of settings, by their names, which begin with a hyphen in `args`."""
    return {name: text for name, text in vars(args).items() if text is not None and name[0] == "-"}


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


INDENT: Final = "  "
OTHERS: Final = "all nodes"
LEFT_OUT: Final = "what selects by labels is left out: config check has --label KEY=VALUE"


def add_parser(subparsers: Subparsers) -> None:
    """Add the verbs `config show`, `config check` and `config schema`."""
    epilog = "example: hami-agent config check /etc/hami-agent/config.yaml"
    parser = subparsers.add_parser("config", epilog=epilog)
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
    words = "the settings file to check, without the variables of this environment"
    check.add_argument("file", nargs="?", type=Path, metavar="FILE", help=words)
    words = "a node to print, may be repeated; without it: what all nodes get"
    check.add_argument("--node", action="append", default=[], metavar="NAME", help=words)
    check.add_argument(
        "--label",
        action="append",
        default=[],
        type=typed(text_where(lambda text: text.find("=") > 0, "KEY=VALUE"), "KEY=VALUE"),
        metavar="KEY=VALUE",
        help="a label of the nodes",
    )
    add_output(check)
    add_settings(check, "[FILE]")

    verbs.add_parser(
        "schema",
        help="print the JSON schema of the settings file, for editors",
        epilog="example: hami-agent config schema > hami-agent.schema.json",
    )


def main(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Run the verb; return the exit code."""
    if args.action == "schema":
        sys.stdout.write(json.dumps(json_schema(), indent=2) + "\n")
        return Exit.OK

    return _check(args, environ) if args.action == "check" else _show(args, environ)


def _show(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Prints the settings of this node, without profiles that need labels."""
    try:
        plan = asyncio.run(looked(sources(args, environ))).taken()
        name = plan.settings().node
    except SettingsError as error:
        sys.stderr.write(f"hami-agent: {error}\n")
        return error.exit_code

    _tell(plan, [LEFT_OUT] if plan.need_labels(name) else [])
    values = plan.resolve(name)
    settings = _changed(values) if args.diff else list(values.values())
    answer(args.output, "Config", list(map(plain, settings)), table(settings, origin=args.origin))
    return Exit.OK


def _check(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Checks settings files without starting anything, and prints what nodes would get.

    HAMi's files are those of --device-config and --nodeconfig. Without FILE: as `run` would here.
    """
    labels = dict(label.partition("=")[::2] for label in args.label) if args.label else None
    try:
        given = sources(args, environ)
        given = Sources(args.file, flags=given.flags) if args.file else given
        plan = asyncio.run(looked(given)).taken()
        applied = [one for name in args.node for one in plan.applied(name, labels)]
        profiles = applied if args.node else plan.profiles
        refuse(fault for profile in profiles for fault in profile.faults)
    except SettingsError as error:
        sys.stderr.writelines(f"hami-agent: {text}\n" for text in error.every)
        said = {"ok": False, "error": str(error), "errors": list(error.every)}
        answer(args.output, "ConfigCheck", said, ())
        return Exit.PROBLEM

    lines, each = list[str](), list[object]()
    for name in args.node or [""]:
        changed = _changed(plan.resolve(name, labels))
        names = [one.name for one in plan.applied(name, labels) if one.name]
        title = name or OTHERS
        heads = ", ".join((title, *(f"profile {one}" for one in names)))
        lines.append(heads if changed else f"{heads}: all defaults")
        lines += [f"{INDENT}{row}" for row in list(table(changed, origin=True))[1:]]
        each.append({"name": title, "profiles": names, "settings": list(map(plain, changed))})

    notes = [LEFT_OUT] if any(plan.need_labels(name, labels) for name in args.node or [""]) else []
    if args.output == TABLE:
        _tell(plan, notes)
    said = {"ok": True, "warnings": list(plan.warnings), "notes": notes, "nodes": each}
    answer(args.output, "ConfigCheck", said, [*lines, "ok"])
    return Exit.OK


def _tell(plan: NodeValues, notes: Iterable[str]) -> None:
    """Print warnings and notes on standard error."""
    sys.stderr.writelines(f"hami-agent: warning: {text}\n" for text in plan.warnings)
    sys.stderr.writelines(f"hami-agent: note: {text}\n" for text in notes)


def _changed(values: Mapping[str, Setting]) -> list[Setting]:
    return [setting for setting in values.values() if setting.origin != DEFAULT]


def plain(setting: Setting) -> dict[str, object]:
    """A setting for JSON; a duration is a number of seconds."""
    return {"key": setting.field.key, "value": setting.value, "origin": setting.origin}


def table(settings: Iterable[Setting], *, origin: bool) -> Iterator[str]:
    """Yield a line of headings and a line for each setting. Nothing is cut."""
    rows = [(setting.field.key, _text(setting), setting.origin) for setting in settings]
    columns = [Column(title) for title in ("KEY", "VALUE", "FROM")]
    return output.table(columns if origin else columns[:2], rows, sys.maxsize)


def _text(setting: Setting) -> str:
    """A value as it would be written in the file; text that shows nothing is quoted."""
    value = setting.field.read.write(setting.value)
    is_shown = isinstance(value, str) and value.isprintable() and value
    return str(value) if is_shown else json.dumps(value)
