"""Settings from their sources, later wins: defaults, the file, the environment, flags.

A refused source is refused whole, with its place and the mend; nothing is taken from it.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path

from agent.core.errors import SettingsError
from agent.settings.fields import Field, Value, WrongValue, refuse
from agent.settings.table import BY_KEY, FIELDS
from agent.settings.yamlfile import Entry, read_file

DEFAULT_FILE = Path("/etc/hami-agent/config.yaml")
PREFIX = "HAMI_AGENT_"
SERVICE_HOST = "_SERVICE_HOST"
VARIABLES = tuple(field.variables[0] for field in FIELDS)


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """An effective value and where it came from (`default`, file:line, `env NAME`, a flag)."""

    field: Field
    value: Value
    origin: str


@dataclasses.dataclass(frozen=True, slots=True)
class Sources:
    """Where settings come from. `file` None: the default file, if it is there.

    `flags` holds the options that were given, by their name.
    """

    file: Path | None
    environ: Mapping[str, str]
    flags: Mapping[str, str]


Effective = Mapping[str, Setting]


def load(sources: Sources) -> Effective:
    """Every setting by key. Raises SettingsError; then nothing of the sources is used."""
    found = {field.key: Setting(field, field.default, "default") for field in FIELDS}
    for entry in _file_entries(sources.file):
        field = BY_KEY.get(entry.key)
        if field is None and entry.value is None and _is_section(entry.key):
            continue  # a section whose keys are all commented out
        if field is None:
            near = _nearest(entry.key, BY_KEY)
            raise SettingsError(f"{entry.where}: unknown setting {entry.key}{near}")
        found[field.key] = _read(field, entry.value, entry.where)
    _refuse_unknown(sources.environ)
    for field in FIELDS:
        for variable in field.variables:
            if variable in sources.environ:
                value = sources.environ[variable]
                found[field.key] = _read(field, value, f"env {variable}")
                break
        if field.flag and field.flag in sources.flags:
            found[field.key] = _read(field, sources.flags[field.flag], field.flag)
    return found


def _file_entries(file: Path | None) -> Iterable[Entry]:
    if file is not None:
        return read_file(file)
    return read_file(DEFAULT_FILE) if DEFAULT_FILE.is_file() else ()


def _is_section(key: str) -> bool:
    return any(known.startswith(f"{key}.") for known in BY_KEY)


def _read(field: Field, value: object, where: str) -> Setting:
    try:
        return Setting(field, field.read(value), where)
    except WrongValue as error:
        raise refuse(where, field.key, error) from error


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    """A variable with our prefix that no setting reads is a mistake, most likely of spelling.

    Kubernetes' own are none: beside a Service named hami-agent, every container of its namespace
    gets HAMI_AGENT_SERVICE_HOST, HAMI_AGENT_PORT and more (service links).
    """
    links = tuple(
        name.removesuffix(SERVICE_HOST) + part
        for name in environ
        if name.startswith(PREFIX) and name.endswith(SERVICE_HOST)
        for part in ("_SERVICE_", "_PORT")
    )
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in VARIABLES and not name.startswith(links):
            raise SettingsError(f"env {name}: unknown setting{_nearest(name, VARIABLES)}")


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else "; `hami-agent config show` lists all"
