"""Flags of the settings, shared by `run` and `config`."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from agent.settings.fields import Field
from agent.settings.load import Sources
from agent.settings.table import FIELDS


def add_settings(parser: argparse.ArgumentParser) -> None:
    """`--config` and one option for each setting that has a flag."""
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="settings file (/etc/hami-agent/config.yaml)"
    )
    group = parser.add_argument_group("settings", "each overrides the file and the environment")
    for field in FIELDS:
        if field.flag:
            group.add_argument(
                field.flag, metavar="VALUE", dest=field.key, help=field.text + _shown(field)
            )


def _shown(field: Field) -> str:
    """The default as it would be written behind the flag."""
    default = field.default
    if default is None:
        return ""
    return f" [{','.join(default) if isinstance(default, tuple) else default}]"


def sources(args: argparse.Namespace, environ: Mapping[str, str]) -> Sources:
    """Where the settings of this call come from."""
    given = vars(args)
    flags = {
        field.flag: given[field.key]
        for field in FIELDS
        if field.flag and given.get(field.key) is not None
    }
    return Sources(file=args.config, environ=environ, flags=flags)
