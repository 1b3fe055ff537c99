"""Reads the files of settings; at the start it falls back to the last good ones.

agent.settings.values interprets their content.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import Final

import msgspec

from agent import __version__
from agent.errors import AgentError, SettingsError, StateCorrupt
from agent.host.files import check_size, is_there, read_file
from agent.kit.tasks import Offload
from agent.ledger import LastGood, SourceFile
from agent.settings.schema import DEFAULT, Setting
from agent.settings.sources import NodeFacts, Sources
from agent.settings.values import NodeValues, make_plan
from agent.state import decode_last_good

DEFAULT_FILE: Final = Path("/etc/hami-agent/config.yaml")
DEVICE_CONFIG: Final = "files.deviceConfig"
NODE_CONFIG: Final = "files.nodeConfig"
COPY: Final = "settings.json"
"""Name of the last good settings in the state directory."""

MAX_YAML: Final = 256 * 1024
MAX_JSON: Final = 1024 * 1024
"""Bytes: what a ConfigMap can hold."""
DEADLINE: Final = 30.0
"""Seconds to read all files. A file system that hangs must not block the agent."""

MAX_COPY: Final = 4 * 1024 * 1024
"""Bytes: the largest files, in base64, and the labels."""


class SourcesRead(msgspec.Struct, frozen=True):
    """The result of one read of the sources.

    `asked`: the files that were looked for, whether they exist or not. `sources`: what was read
    before any error. `plan` None: the sources are refused (`refusal` says why) or unchanged. At a
    start with a `refusal`, `plan` is that of the last good sources. `silent`: a file system did
    not answer, so the caller must read again.
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
    """Read all sources. `good`: the sources in force, if there are any.

    If a file of `good` is gone, everything is refused: settings do not fall back to defaults while
    pods run. `offload` reads files and parses YAML. A file that does not answer is refused.
    """
    paths, current = [sources.file or DEFAULT_FILE], sources
    try:
        async with asyncio.timeout(DEADLINE):
            # Our own file, the environment and the flags come first: they say where HAMi's files
            # are. What was read is kept in `current` if the next read fails.
            if sources.file is not None or await is_there(paths[0], offload):
                own = SourceFile(str(paths[0]), await read_file(paths[0], MAX_YAML, offload))
                current = msgspec.structs.replace(current, own=own)
            values = (await offload.call(make_plan, current)).resolve(NodeFacts())
            named = values[DEVICE_CONFIG], values[NODE_CONFIG]
            # Both are watched even if one is refused: the operator may have to change both.
            paths += [Path(str(one.value)) for one in named if one.value]
            device_config = await _named(named[0], MAX_YAML, offload, paths)
            node_config = await _named(named[1], MAX_JSON, offload, paths)
            current = msgspec.structs.replace(
                current, device_config=device_config, node_config=node_config
            )
            if current == good:
                return SourcesRead(frozenset(paths), current)
            before = good or Sources()
            for old, new in (
                (before.own, current.own),
                (before.device_config, current.device_config),
                (before.node_config, current.node_config),
            ):
                if old is not None and new is None and Path(old.name) in paths:
                    refusal = SettingsError(
                        f"{old.name}: was removed; the agent keeps its settings until it is back; "
                        "to go on without it, restart the agent"
                    )
                    return SourcesRead(frozenset(paths), current, refusal=refusal)
            return SourcesRead(frozenset(paths), current, await offload.call(make_plan, current))
    except SettingsError as error:
        return SourcesRead(frozenset(paths), current, refusal=error)
    except TimeoutError:
        return SourcesRead(frozenset(paths), current, refusal=_unanswered(paths[-1]), silent=True)


async def begin(sources: Sources, offload: Offload, state: Offload) -> SourcesRead:
    """Read all sources at the start. If they are refused, `state` reads the last good copy.

    Raises SettingsError: they are refused, and there is no usable copy.
    """
    start = await look(sources, offload)
    try:
        start.taken().settings(NodeFacts())
    except SettingsError as error:
        refusal = error
    else:
        return start
    # Our own file says where the copy is, if it is good; else environment and flags do.
    file = last = None
    ours = msgspec.structs.replace(start.sources, device_config=None, node_config=None)
    for known in (msgspec.structs.replace(ours, own=None), ours):
        with contextlib.suppress(SettingsError):
            file = make_plan(known).settings(NodeFacts()).paths.state / COPY
    if file is None:
        raise refusal
    try:
        async with asyncio.timeout(DEADLINE):
            if await is_there(file, state):
                copy = decode_last_good(await read_file(file, MAX_COPY, state))
                last = recalled(copy, start.sources)
    except TimeoutError as error:
        raise _both(refusal, file, _unanswered(file)) from error
    except (SettingsError, StateCorrupt) as error:
        raise _both(refusal, file, error) from error
    if last is None:
        raise refusal
    return msgspec.structs.replace(start, plan=last, refusal=refusal)


async def read_text(path: Path, offload: Offload) -> SourceFile:
    """Read one file of any of the three kinds, up to the size of its kind. Raises SettingsError.

    It has no deadline: the operator may be typing the text.
    """
    text = SourceFile(str(path), await read_file(path, MAX_JSON, offload))
    if not is_json(text):
        check_size(path, text.content, MAX_YAML)
    return text


def is_json(text: SourceFile) -> bool:
    """True if the text, one of the three kinds, is HAMi's config.json. A template is not JSON."""
    begin = text.content.lstrip()[:2]
    return text.name.endswith(".json") or (begin[:1] == b"{" and begin != b"{{")


def recalled(copy: LastGood, sources: Sources) -> NodeValues:
    """Merge the files of the copy with the environment and flags of `sources`.

    Raises SettingsError: the result is refused, so the copy is not usable.
    """
    then = msgspec.structs.replace(
        sources, device_config=copy.device_config, own=copy.own, node_config=copy.node_config
    )
    plan = make_plan(then)
    plan.settings(NodeFacts())
    return plan


def last_good(sources: Sources, node: NodeFacts) -> LastGood:
    """The copy to keep of `sources`, which fit the node."""
    return LastGood(
        written_by=__version__,
        node=node.name,
        labels=node.labels,
        device_config=sources.device_config,
        own=sources.own,
        node_config=sources.node_config,
    )


def _unanswered(path: Path) -> SettingsError:
    text = f"was not read within {DEADLINE:g} s; check the file system that it is on"
    return SettingsError(f"{path}: {text}")


async def _named(
    setting: Setting, limit: int, offload: Offload, paths: list[Path]
) -> SourceFile | None:
    """Read the file that the setting names. The default file need not exist."""
    if not setting.value:
        return None
    path = Path(str(setting.value))
    paths.append(path)
    if setting.origin == DEFAULT and not await is_there(path, offload):
        return None
    return SourceFile(str(path), await read_file(path, limit, offload))


def _both(refusal: SettingsError, file: Path, error: AgentError) -> SettingsError:
    """The refusal of the sources and of their copy. The same reason appears once."""
    if str(error) in refusal.every:
        return refusal
    reason = str(error).removeprefix(f"{file}: ")
    return SettingsError(
        f"{refusal}; the last good settings cannot be used either: {file}: {reason}"
    )
