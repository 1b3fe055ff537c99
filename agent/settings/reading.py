"""The door to the sources: which files there are, and their bytes; at a start the last good ones.

What they say is agent.settings.values.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

from agent import __version__
from agent.codec.last_good import decode_last_good
from agent.core.errors import AgentError, SettingsError, StateCorrupt
from agent.core.state.last_good import LastGood, SourceFile
from agent.host.textfile import TextFiles, check_size
from agent.kit.offload import Offload
from agent.settings.fields import DEFAULT, Setting
from agent.settings.profiles import NodeFacts
from agent.settings.sources import Sources
from agent.settings.values import NodeValues, make_plan

DEFAULT_FILE: Final = Path("/etc/hami-agent/config.yaml")
DEVICE_CONFIG: Final = "files.deviceConfig"
NODE_CONFIG: Final = "files.nodeConfig"
COPY: Final = "settings.json"
"""Name of the last good settings in the state directory."""

MAX_YAML: Final = 256 * 1024
MAX_JSON: Final = 1024 * 1024
"""Bytes: what a ConfigMap can hold."""
DEADLINE: Final = 30.0
"""Seconds for one look at all files: a file system that hangs is no reason to wait for ever."""

MAX_COPY: Final = 4 * 1024 * 1024
"""Bytes: the files of a copy at their greatest, in base64, and the labels."""


@dataclasses.dataclass(frozen=True, slots=True)
class SourcesRead:
    """What one look at the sources found.

    `asked`: the files that were looked for, there or not. `sources`: what was read, as far as it
    went. `plan` None: it is refused, and `refusal` says why; or it is the same as before. At a
    start with a `refusal`, the plan is that of the last good ones. `silent`: a file system does
    not answer, so that it must be asked again.
    """

    asked: frozenset[Path]
    sources: Sources
    plan: NodeValues | None = None
    refusal: SettingsError | None = None
    silent: bool = False

    def taken(self) -> NodeValues:
        """The plan. Raises SettingsError: there is none."""
        if self.plan is None:
            raise self.refusal or SettingsError("nothing new was read")
        return self.plan


async def look(sources: Sources, offload: Offload, good: Sources | None = None) -> SourcesRead:
    """Read everything; `good` is what was read and taken over before, where there is such.

    What it had and what is gone refuses all: settings do not fall back to defaults while pods run.
    Files are waited for, and YAML is parsed, by `offload`; one that does not answer is refused.
    """
    asked: list[Path] = []
    found = sources
    try:
        async with asyncio.timeout(DEADLINE):
            async for more in _read(sources, TextFiles(offload), asked):
                found = more  # stays, whatever the next one says
            if found == good:
                return SourcesRead(frozenset(asked), found)
            _refuse_removed(found, good, asked)
            return SourcesRead(frozenset(asked), found, await offload.call(make_plan, found))
    except SettingsError as error:
        return SourcesRead(frozenset(asked), found, refusal=error)
    except TimeoutError:
        return SourcesRead(frozenset(asked), found, refusal=_unanswered(asked[-1]), silent=True)


async def begin(sources: Sources, offload: Offload, state: Offload) -> SourcesRead:
    """Read all sources for a start; refused ones give way to the last good copy, read by `state`.

    Raises SettingsError: they are refused, and there is no copy, or one that cannot be used.
    """
    found = await look(sources, offload)
    try:
        found.taken().settings(NodeFacts())
    except SettingsError as error:
        refusal = error
    else:
        return found
    file = _copy_file(found.sources)
    copy = None if file is None else await _copy(file, refusal, TextFiles(state))
    if file is None or copy is None:
        raise refusal
    try:
        last = _recalled(copy, found.sources)
    except SettingsError as error:
        raise _both(refusal, file, error) from error
    return dataclasses.replace(found, plan=last, refusal=refusal)


async def read_text(path: Path, offload: Offload) -> SourceFile:
    """One file that may be any of the three, up to the bound of its form. Raises SettingsError.

    It is waited for as long as it takes: somebody may be typing it.
    """
    text = SourceFile(str(path), await TextFiles(offload).read(path, MAX_JSON))
    if not is_json(text):
        check_size(path, text.content, MAX_YAML)
    return text


def is_json(text: SourceFile) -> bool:
    """True for what is HAMi's config.json, if it is any of the three. A template is no JSON."""
    begin = text.content.lstrip()[:2]
    return text.name.endswith(".json") or (begin[:1] == b"{" and begin != b"{{")


def recalled(copy: LastGood, sources: Sources) -> NodeValues | None:
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


def _unanswered(path: Path) -> SettingsError:
    text = f"was not read within {DEADLINE:g} s; look at the file system that it lies on"
    return SettingsError(f"{path}: {text}")


async def _read(sources: Sources, files: TextFiles, asked: list[Path]) -> AsyncIterator[Sources]:
    """The sources with each file that was read; those that were looked for go to `asked`.

    The own file, the environment and the flags say first where HAMi's files are.
    Raises SettingsError.
    """
    path = sources.file or DEFAULT_FILE
    asked.append(path)
    if sources.file is not None or await files.is_there(path):
        own = SourceFile(str(path), await files.read(path, MAX_YAML))
        sources = dataclasses.replace(sources, own=own)
        yield sources
    values = (await files.offload.call(make_plan, sources)).resolve(NodeFacts())
    named = values[DEVICE_CONFIG], values[NODE_CONFIG]
    # Both are asked for in any case: who mends one file may have to mend the other one, too.
    asked += [Path(str(one.value)) for one in named if one.value]
    yield dataclasses.replace(
        sources,
        device_config=await _named(named[0], MAX_YAML, files, asked),
        node_config=await _named(named[1], MAX_JSON, files, asked),
    )


async def _named(
    setting: Setting, limit: int, files: TextFiles, asked: list[Path]
) -> SourceFile | None:
    """The file that the setting names; the default one only where it is there."""
    if not setting.value:
        return None
    path = Path(str(setting.value))
    asked.append(path)
    if setting.origin == DEFAULT and not await files.is_there(path):
        return None
    return SourceFile(str(path), await files.read(path, limit))


def _refuse_removed(sources: Sources, good: Sources | None, asked: Sequence[Path]) -> None:
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


def _recalled(copy: LastGood, sources: Sources) -> NodeValues:
    """The same as recalled(). Raises SettingsError: they do not go together."""
    then = dataclasses.replace(
        sources, device_config=copy.device_config, own=copy.own, node_config=copy.node_config
    )
    plan = make_plan(then)
    plan.settings(NodeFacts())
    return plan


async def _copy(file: Path, refusal: SettingsError, files: TextFiles) -> LastGood | None:
    """The last good copy, None where there is none. Raises SettingsError: it cannot be used."""
    try:
        async with asyncio.timeout(DEADLINE):
            if not await files.is_there(file):
                return None
            return decode_last_good(await files.read(file, MAX_COPY))
    except (SettingsError, StateCorrupt) as error:
        raise _both(refusal, file, error) from error
    except TimeoutError as error:
        raise _both(refusal, file, _unanswered(file)) from error


def _both(refusal: SettingsError, file: Path, error: AgentError) -> SettingsError:
    """Why the sources are refused, and their copy, too; one reason is said once."""
    if str(error) in refusal.every:
        return refusal
    reason = str(error).removeprefix(f"{file}: ")
    return SettingsError(
        f"{refusal}; the last good settings cannot be used either: {file}: {reason}"
    )


def _copy_file(sources: Sources) -> Path | None:
    """Where the copy would be, as the own file says, if it is good, or environment and flags."""
    ours = dataclasses.replace(sources, device_config=None, node_config=None)
    for known in (ours, dataclasses.replace(ours, own=None)):
        try:
            return make_plan(known).settings(NodeFacts()).paths.state / COPY
        except SettingsError:
            continue
    return None
