"""The door to the sources: which files there are, and their bytes.

What they say is agent.settings.plan.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from agent.core.errors import SettingsError
from agent.host.textfile import check_size, read_bounded
from agent.settings.fields import DEFAULT, Effective
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


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """What one look at the sources found.

    `asked`: the files that were looked for, there or not. `given`: what was read, as far as it
    went. `plan` None: it is refused, and `refusal` says why; or it is the same as before.
    """

    asked: frozenset[Path]
    given: Given
    plan: Plan | None = None
    refusal: SettingsError | None = None


def load(sources: Sources) -> Plan:
    """Read everything. Raises SettingsError; then nothing of the sources is used."""
    found = look(sources)
    if found.plan is None:
        raise found.refusal or SettingsError("nothing was read")
    return found.plan


def look(sources: Sources, good: Given | None = None) -> Look:
    """Read everything; `good` is what was read and taken over before, where there is such.

    What it had and what is gone refuses all: settings do not fall back to defaults while pods run.
    """
    search = _Search(sources)
    try:
        search.read()
        given = search.given
        if given == good:
            return Look(frozenset(search.asked), given)
        _refuse_removed(given, good, search.asked)
        plan = make_plan(given)
    except SettingsError as error:
        return Look(frozenset(search.asked), search.given, refusal=error)
    return Look(frozenset(search.asked), given, plan)


def read_text(path: Path) -> Text:
    """One file that may be any of the three, up to the bound of its form. Raises SettingsError."""
    text = Text(str(path), read_bounded(path, MAX_JSON))
    if not is_json(text):
        check_size(path, text.content, MAX_YAML)
    return text


def is_json(text: Text) -> bool:
    """True for what is HAMi's config.json, if it is any of the three. A template is no JSON."""
    begin = text.content.lstrip()[:2]
    return text.name.endswith(".json") or (begin[:1] == b"{" and begin != b"{{")


class _Search:
    """The files one after the other: what was read stays, whatever the next one says."""

    def __init__(self, sources: Sources) -> None:
        self.asked: set[Path] = set()
        self.given = Given(environ=sources.environ, flags=sources.flags)
        self._file = sources.file

    def read(self) -> None:
        """The own file, the environment and the flags say first where HAMi's files are.

        Raises SettingsError.
        """
        self.given = dataclasses.replace(self.given, own=self._own())
        where = make_plan(self.given).resolve(NodeFacts()).settings
        # Both are looked for in any case: who mends one file may have to mend the other one, too.
        named = tuple(self._named(where, key) for key in (DEVICE_CONFIG, NODE_CONFIG))
        self.given = dataclasses.replace(
            self.given,
            device_config=_content(named[0], MAX_YAML),
            node_config=_content(named[1], MAX_JSON),
        )

    def _own(self) -> Text | None:
        path = self._file or DEFAULT_FILE
        self.asked.add(path)
        if self._file is None and not is_there(path):
            return None
        return Text(str(path), read_bounded(path, MAX_YAML))

    def _named(self, settings: Effective, key: str) -> Path | None:
        """The file that the setting names; the default one only where it is there."""
        named = settings[key]
        if not named.value:
            return None
        path = Path(str(named.value))
        self.asked.add(path)
        return None if named.origin == DEFAULT and not is_there(path) else path


def is_there(path: Path) -> bool:
    """False for a file that is missing; one that cannot be looked at is there, and refused."""
    try:
        return path.is_file()
    except OSError:
        return True


def _content(path: Path | None, limit: int) -> Text | None:
    return None if path is None else Text(str(path), read_bounded(path, limit))


def _refuse_removed(given: Given, good: Given | None, asked: set[Path]) -> None:
    """Raise SettingsError where a file that was good is still looked for and is not there."""
    before = good or Given()
    for old, new in (
        (before.own, given.own),
        (before.device_config, given.device_config),
        (before.node_config, given.node_config),
    ):
        if old is not None and new is None and Path(old.name) in asked:
            raise SettingsError(
                f"{old.name}: was removed; what it said holds until it is back; to go on without "
                "it, restart the agent"
            )
