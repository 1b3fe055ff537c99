"""What to start with: the sources as they are, or as they were when they were good last."""

import dataclasses
from pathlib import Path
from typing import Final

from agent import __version__
from agent.codec.last_good import decode_last_good
from agent.core.errors import AgentError, SettingsError, StateCorrupt
from agent.core.last_good import LastGood
from agent.host.textfile import read_bounded
from agent.settings.load import Look, Sources, is_there, look
from agent.settings.plan import Given, make_plan
from agent.settings.profiles import NodeFacts
from agent.settings.reading import Reading
from agent.settings.sections import Settings

COPY: Final = "settings.json"
"""Name of the last good settings in the state directory."""

MAX_COPY: Final = 4 * 1024 * 1024
"""Bytes: the files of a copy at their greatest, in base64, and the labels."""


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """The settings to start with. `asked`: the files to watch.

    `refusal`: why the sources as they are cannot be used; the last good ones are.
    """

    settings: Settings
    reading: Reading
    asked: frozenset[Path]
    refusal: SettingsError | None = None


def begin(sources: Sources, host_name: str) -> Start:
    """Read all sources; refused ones give way to the last good copy.

    Raises SettingsError: they are refused, and there is no copy, or one that cannot be used.
    """
    found = look(sources)
    try:
        reading = reading_of(found, host_name)
        return Start(reading.settings(NodeFacts()), reading, found.asked)
    except SettingsError as error:
        refusal = error
    file = _copy_file(found.given)
    if file is None:
        raise refusal
    try:
        last = _recalled(_copy(file), found.given, host_name)
        return Start(last.settings(NodeFacts()), last, found.asked, refusal)
    except (SettingsError, StateCorrupt) as error:
        raise _both(refusal, file, error) from error


def reading_of(found: Look, host_name: str) -> Reading:
    """What a look at the sources gave. Raises SettingsError when they are refused."""
    if found.plan is None:
        raise found.refusal or SettingsError("nothing new was read")
    return Reading(found.plan, host_name, found.given)


def recalled(copy: LastGood, given: Given, host_name: str) -> Reading | None:
    """The files of the copy under the environment and flags of `given`.

    None: they do not go together, so that the copy is of no use.
    """
    try:
        return _recalled(copy, given, host_name)
    except SettingsError:
        return None


def last_good(given: Given, node: NodeFacts) -> LastGood:
    """The copy to keep of sources that fit the node."""
    return LastGood(
        written_by=__version__,
        node=node.name,
        labels=node.labels,
        device_config=given.device_config,
        own=given.own,
        node_config=given.node_config,
    )


def _recalled(copy: LastGood, given: Given, host_name: str) -> Reading:
    """The same. Raises SettingsError: they do not go together."""
    then = dataclasses.replace(
        given, device_config=copy.device_config, own=copy.own, node_config=copy.node_config
    )
    reading = Reading(make_plan(then), host_name, then)
    reading.settings(NodeFacts())
    return reading


def _copy_file(given: Given) -> Path | None:
    """The copy, where it is known where that would be and something is there."""
    directory = _state_directory(given)
    return None if directory is None or not is_there(directory / COPY) else directory / COPY


def _copy(file: Path) -> LastGood:
    """What the copy holds. Raises SettingsError or StateCorrupt: nothing that can be used."""
    return decode_last_good(read_bounded(file, MAX_COPY))


def _both(refusal: SettingsError, file: Path, error: AgentError) -> SettingsError:
    """Why the sources are refused, and their copy, too; one reason is said once."""
    if str(error) in refusal.every:
        return refusal
    reason = str(error).removeprefix(f"{file}: ")
    return SettingsError(
        f"{refusal}; the last good settings cannot be used either: {file}: {reason}"
    )


def _state_directory(given: Given) -> Path | None:
    """Where the state is: the own file says it if it is good, the environment and flags always."""
    for known in (dataclasses.replace(given, device_config=None, node_config=None), _outer(given)):
        try:
            return Reading(make_plan(known), "").settings(NodeFacts()).paths.state
        except SettingsError:
            continue
    return None


def _outer(given: Given) -> Given:
    return Given(environ=given.environ, flags=given.flags)
