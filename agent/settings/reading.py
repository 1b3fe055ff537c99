"""The door to the sources: which files there are, and their bytes; at a start the last good ones.

What they say is agent.settings.values.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from agent import __version__
from agent.codec.last_good import decode_last_good
from agent.core.errors import AgentError, SettingsError, StateCorrupt
from agent.core.last_good import LastGood, SourceFile
from agent.host.textfile import check_size, read_bounded
from agent.settings.fields import DEFAULT, Values
from agent.settings.profiles import NodeFacts
from agent.settings.sources import Sources
from agent.settings.values import Plan, make_plan

DEFAULT_FILE: Final = Path("/etc/hami-agent/config.yaml")
DEVICE_CONFIG: Final = "files.deviceConfig"
NODE_CONFIG: Final = "files.nodeConfig"
COPY: Final = "settings.json"
"""Name of the last good settings in the state directory."""

MAX_YAML: Final = 256 * 1024
MAX_JSON: Final = 1024 * 1024
"""Bytes: what a ConfigMap can hold."""
MAX_COPY: Final = 4 * 1024 * 1024
"""Bytes: the files of a copy at their greatest, in base64, and the labels."""


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """What one look at the sources found.

    `asked`: the files that were looked for, there or not. `sources`: what was read, as far as it
    went. `plan` None: it is refused, and `refusal` says why; or it is the same as before. At a
    start with a `refusal`, the plan is that of the last good ones.
    """

    asked: frozenset[Path]
    sources: Sources
    plan: Plan | None = None
    refusal: SettingsError | None = None

    def taken(self) -> Plan:
        """The plan. Raises SettingsError: there is none."""
        if self.plan is None:
            raise self.refusal or SettingsError("nothing new was read")
        return self.plan


def load(sources: Sources) -> Plan:
    """Read everything. Raises SettingsError; then nothing of the sources is used."""
    return look(sources).taken()


def look(sources: Sources, good: Sources | None = None) -> Look:
    """Read everything; `good` is what was read and taken over before, where there is such.

    What it had and what is gone refuses all: settings do not fall back to defaults while pods run.
    """
    asked: set[Path] = set()
    found = sources
    try:
        for found in _read(sources, asked):  # noqa: B007 -- what was read stays
            pass
        if found == good:
            return Look(frozenset(asked), found)
        _refuse_removed(found, good, asked)
        return Look(frozenset(asked), found, make_plan(found))
    except SettingsError as error:
        return Look(frozenset(asked), found, refusal=error)


def begin(sources: Sources) -> Look:
    """Read all sources for a start; refused ones give way to the last good copy.

    Raises SettingsError: they are refused, and there is no copy, or one that cannot be used.
    """
    found = look(sources)
    try:
        found.taken().settings(NodeFacts())
    except SettingsError as error:
        refusal = error
    else:
        return found
    file = _copy_file(found.sources)
    if file is None:
        raise refusal
    try:
        copy = decode_last_good(read_bounded(file, MAX_COPY))
        return dataclasses.replace(found, plan=_recalled(copy, found.sources), refusal=refusal)
    except (SettingsError, StateCorrupt) as error:
        raise _both(refusal, file, error) from error


def read_text(path: Path) -> SourceFile:
    """One file that may be any of the three, up to the bound of its form. Raises SettingsError."""
    text = SourceFile(str(path), read_bounded(path, MAX_JSON))
    if not is_json(text):
        check_size(path, text.content, MAX_YAML)
    return text


def is_json(text: SourceFile) -> bool:
    """True for what is HAMi's config.json, if it is any of the three. A template is no JSON."""
    begin = text.content.lstrip()[:2]
    return text.name.endswith(".json") or (begin[:1] == b"{" and begin != b"{{")


def recalled(copy: LastGood, sources: Sources) -> Plan | None:
    """The files of the copy under the environment and flags of `sources`.

    None: they do not go together, so that the copy is of no use.
    """
    try:
        return _recalled(copy, sources)
    except SettingsError:
        return None


def last_good(sources: Sources, node: NodeFacts) -> LastGood:
    """The copy to keep of sources that fit the node."""
    return LastGood(
        written_by=__version__,
        node=node.name,
        labels=node.labels,
        device_config=sources.device_config,
        own=sources.own,
        node_config=sources.node_config,
    )


def _read(sources: Sources, asked: set[Path]) -> Iterator[Sources]:
    """The sources with each file that was read; those that were looked for go to `asked`.

    The own file, the environment and the flags say first where HAMi's files are.
    Raises SettingsError.
    """
    path = sources.file or DEFAULT_FILE
    asked.add(path)
    if sources.file is not None or is_there(path):
        sources = dataclasses.replace(sources, own=_content(path, MAX_YAML))
        yield sources
    values = make_plan(sources).resolve(NodeFacts())
    # Both are looked for in any case: who mends one file may have to mend the other one, too.
    named = tuple(_named(values, key, asked) for key in (DEVICE_CONFIG, NODE_CONFIG))
    yield dataclasses.replace(
        sources,
        device_config=_content(named[0], MAX_YAML),
        node_config=_content(named[1], MAX_JSON),
    )


def _named(values: Values, key: str, asked: set[Path]) -> Path | None:
    """The file that the setting names; the default one only where it is there."""
    named = values[key]
    if not named.value:
        return None
    path = Path(str(named.value))
    asked.add(path)
    return None if named.origin == DEFAULT and not is_there(path) else path


def _content(path: Path | None, limit: int) -> SourceFile | None:
    return None if path is None else SourceFile(str(path), read_bounded(path, limit))


def is_there(path: Path) -> bool:
    """False for a file that is missing; one that cannot be looked at is there, and refused."""
    try:
        return path.is_file()
    except OSError:
        return True


def _refuse_removed(sources: Sources, good: Sources | None, asked: set[Path]) -> None:
    """Raise SettingsError where a file that was good is still looked for and is not there."""
    before = good or Sources()
    for old, new in (
        (before.own, sources.own),
        (before.device_config, sources.device_config),
        (before.node_config, sources.node_config),
    ):
        if old is not None and new is None and Path(old.name) in asked:
            raise SettingsError(
                f"{old.name}: was removed; what it said holds until it is back; to go on without "
                "it, restart the agent"
            )


def _recalled(copy: LastGood, sources: Sources) -> Plan:
    """The same as recalled(). Raises SettingsError: they do not go together."""
    then = dataclasses.replace(
        sources, device_config=copy.device_config, own=copy.own, node_config=copy.node_config
    )
    plan = make_plan(then)
    plan.settings(NodeFacts())
    return plan


def _copy_file(sources: Sources) -> Path | None:
    """The copy, where it is known where that would be and something is there."""
    directory = _state_directory(sources)
    return None if directory is None or not is_there(directory / COPY) else directory / COPY


def _both(refusal: SettingsError, file: Path, error: AgentError) -> SettingsError:
    """Why the sources are refused, and their copy, too; one reason is said once."""
    if str(error) in refusal.every:
        return refusal
    reason = str(error).removeprefix(f"{file}: ")
    return SettingsError(
        f"{refusal}; the last good settings cannot be used either: {file}: {reason}"
    )


def _state_directory(sources: Sources) -> Path | None:
    """Where the state is: the own file says it if it is good, the environment and flags always."""
    ours = dataclasses.replace(sources, device_config=None, node_config=None)
    for known in (ours, dataclasses.replace(ours, own=None)):
        try:
            return make_plan(known).settings(NodeFacts()).paths.state
        except SettingsError:
            continue
    return None
