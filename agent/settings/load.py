"""The door to the sources: which files there are, and their bytes.

What they say is agent.settings.plan.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from agent.host.textfile import read_bounded
from agent.settings.fields import Effective
from agent.settings.plan import Given, Plan, Text, make_plan
from agent.settings.profiles import NodeFacts

DEFAULT_FILE: Final = Path("/etc/hami-agent/config.yaml")
DEVICE_CONFIG: Final = "files.deviceConfig"
NODE_CONFIG: Final = "files.nodeConfig"

MAX_YAML: Final = 256 * 1024
MAX_JSON: Final = 1024 * 1024
"""Bytes: what a ConfigMap can hold."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sources:
    """Where settings come from. `file` None: the default file, if it is there.

    `flags` holds the options that were given, by their name.
    """

    file: Path | None
    environ: Mapping[str, str]
    flags: Mapping[str, str]


def load(sources: Sources) -> Plan:
    """Read everything. Raises SettingsError; then nothing of the sources is used.

    The own file, the environment and the flags say first where HAMi's files are.
    """
    given = Given(own=_own(sources.file), environ=sources.environ, flags=sources.flags)
    own = make_plan(given)
    where = own.resolve(NodeFacts()).settings
    device_config = _hami_file(where, DEVICE_CONFIG, MAX_YAML)
    node_config = _hami_file(where, NODE_CONFIG, MAX_JSON)
    if device_config is None and node_config is None:
        return own
    return make_plan(
        dataclasses.replace(given, device_config=device_config, node_config=node_config)
    )


def read_text(path: Path) -> Text:
    """One file, up to the greater bound. Raises SettingsError."""
    return Text(str(path), read_bounded(path, MAX_JSON))


def _own(file: Path | None) -> Text | None:
    if file is None and not DEFAULT_FILE.is_file():
        return None
    path = file or DEFAULT_FILE
    return Text(str(path), read_bounded(path, MAX_YAML))


def _hami_file(settings: Effective, key: str, limit: int) -> Text | None:
    """The file that the setting names; the default one only where it is there."""
    named = settings[key]
    path = Path(str(named.value))
    if not named.value or (named.origin == "default" and not path.is_file()):
        return None
    return Text(str(path), read_bounded(path, limit))
