"""The flags of the settings, which several verbs share."""

import argparse
from collections.abc import Collection, Mapping
from pathlib import Path

from agent.host.files import Worker, host_name
from agent.setting import boolean
from agent.settings.reading import FOREIGN, SourcesRead, begin, look
from agent.settings.schema import FIELDS
from agent.settings.sources import Sources


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
            default = "" if value is None else f" [{value}]"
            is_shown = only is None or field.key in only

            group.add_argument(
                field.flag,
                *field.other_flags,
                nargs="?" if alone else None,
                const="true" if alone else None,
                metavar="VALUE",
                dest=field.flag,
                help=field.text + default if is_shown else argparse.SUPPRESS,
            )

    others = parser.add_argument_group(
        *("of HAMi's plugin", "accepted so that its command lines work; they have no effect")
        if only is None
        else ()
    )
    for foreign in FOREIGN:
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
    given = vars(args).items()
    return {name: text for name, text in given if name.startswith("-") and text is not None}


def sources(args: argparse.Namespace, environ: Mapping[str, str]) -> Sources:
    """The sources of the settings of this call."""
    return Sources(args.config, environ, flags(args), host_name())


async def looked(origin: Sources) -> SourcesRead:
    """Read the sources once, on a thread that does not delay the exit."""
    async with Worker("settings") as files:
        return await look(origin, files)


async def started(origin: Sources) -> SourcesRead:
    """Read the settings to start with. Raises SettingsError."""
    async with Worker("settings") as files, Worker("state") as state:
        return await begin(origin, files, state)
