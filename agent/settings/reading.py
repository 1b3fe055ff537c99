"""Reads the files of settings; at the start it falls back to the last good ones.

agent.settings.values interprets their content.
"""

import asyncio
import contextlib
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from agent import __version__
from agent.errors import AgentError, SettingsError, StateCorrupt
from agent.host.files import check_size, read_file
from agent.kit.tasks import Offload
from agent.ledger import LastGood, Ledger, SourceFile
from agent.settings.schema import DEFAULT
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
_HAMIS: Final = (
    (DEVICE_CONFIG, "device_config", MAX_YAML),
    (NODE_CONFIG, "node_config", MAX_JSON),
)
"""The setting that names a file of HAMi's, its attribute in Sources, and its most bytes."""
DEADLINE: Final = 30.0
"""Seconds to read all files. A file system that hangs must not block the agent."""

MAX_COPY: Final = 4 * 1024 * 1024
"""Bytes: the largest files, in base64, and the labels."""

_UNANSWERED = f"was not read within {DEADLINE:g} s; check the file system that it is on"


class SourcesRead(msgspec.Struct, frozen=True):
    """The result of one read of the sources.

    `sources`: what was read before any error. `plan` None: they are refused, and `refusal` says
    why. At a start with a `refusal`, `plan` is that of the last good sources.
    """

    sources: Sources
    plan: NodeValues | None = None
    refusal: SettingsError | None = None

    def taken(self) -> NodeValues:
        """The plan. Raises SettingsError: there is none."""
        if self.plan is None:
            raise self.refusal or SettingsError("nothing was read")
        return self.plan


async def look(
    sources: Sources,
    offload: Offload,
    last: SourcesRead | None = None,
    good: Sources | None = None,
) -> SourcesRead:
    """Read all sources. `last`: the result of the last read, which is returned if it still holds.

    `good`: the sources in force. If a file of theirs is gone, everything is refused: settings do
    not fall back to defaults while pods run. `offload` reads files and parses YAML. A file that
    does not answer is refused.
    """
    current, gone = sources, list[Path]()
    path = own_path = sources.file or DEFAULT_FILE

    async def read(kind: str, file: Path, limit: int, *, needed: bool) -> None:
        """Read one file into `current`."""
        nonlocal current, path
        path = file
        content = await offload.call(partial(read_file, file, limit, needed=needed))

        former = getattr(good, kind, None)
        if content is None and former is not None and former.name == str(file):
            gone.append(file)
        found = None if content is None else SourceFile(str(file), content)
        current = msgspec.structs.replace(current, **{kind: found})

    try:
        async with asyncio.timeout(DEADLINE):
            # Our own file, the environment and the flags come first: they say where HAMi's are.
            await read("own", path, MAX_YAML, needed=sources.file is not None)
            if last is not None and last.refusal is None and last.sources.own == current.own:
                plan = last.taken()
            else:
                plan = await offload.call(make_plan, current)
            values = plan.resolve(NodeFacts())

            for key, kind, limit in _HAMIS:
                if (one := values[key]).value:  # the default files need not exist
                    await read(kind, Path(str(one.value)), limit, needed=one.origin != DEFAULT)

            if last is not None and last.refusal is None and last.sources == current:
                return last
            if gone:
                raise SettingsError(  # noqa: TRY301 -- judged below as any other
                    f"{gone[0]}: was removed; the agent keeps its settings until it is back; "
                    "to go on without it, restart the agent"
                )
            return SourcesRead(current, await offload.call(make_plan, current))
    except TimeoutError:
        refusal = SettingsError(f"{path}: {_UNANSWERED}")
        # The thread may still wait for something else, perhaps the file of `last`.
        if path == own_path and last is not None and str(last.refusal).endswith(_UNANSWERED):
            return last
    except SettingsError as error:
        refusal = error
    # What was read may be less than all: only the same refusal again is no news.
    if last is not None and (last.sources, str(last.refusal)) == (current, str(refusal)):
        return last
    return SourcesRead(current, refusal=refusal)


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
    file: Path | None = None
    ours = msgspec.structs.replace(start.sources, device_config=None, node_config=None)
    for known in (msgspec.structs.replace(ours, own=None), ours):
        with contextlib.suppress(SettingsError):
            file = make_plan(known).settings(NodeFacts()).paths.state / COPY
    if file is None:
        raise refusal

    try:
        async with asyncio.timeout(DEADLINE):
            content = await state.call(partial(read_file, file, MAX_COPY, needed=False))
        last = None if content is None else recalled(decode_last_good(content), start.sources)
    except TimeoutError as error:
        raise _both(refusal, file, SettingsError(_UNANSWERED)) from error
    except (SettingsError, StateCorrupt) as error:
        raise _both(refusal, file, error) from error
    if last is None:
        raise refusal
    return msgspec.structs.replace(start, plan=last, refusal=refusal)


async def read_text(path: Path, offload: Offload) -> SourceFile:
    """Read one file of any of the three kinds, up to the size of its kind. Raises SettingsError.

    It has no deadline: the operator may be typing the text.
    """
    content = await offload.call(read_file, path, MAX_JSON)
    text = SourceFile(str(path), content or b"")
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


def stand_in(
    copy: LastGood | None, sources: Sources, facts: NodeFacts, ledger: Ledger
) -> NodeValues | None:
    """The settings of the copy in the place of `sources`, which the node or its rows refuse.

    None: the copy says the same, is refused itself, or there is none.
    """
    with contextlib.suppress(SettingsError):
        if copy is not None:
            last = recalled(copy, sources)
            last.settings(facts)
            if last.sources != sources and last.undrained(ledger) is None:
                return last
    return None


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


def _both(refusal: SettingsError, file: Path, error: AgentError) -> SettingsError:
    """The refusal of the sources and of their copy. The same reason appears once."""
    if str(error) in refusal.every:
        return refusal
    reason = str(error).removeprefix(f"{file}: ")
    return SettingsError(
        f"{refusal}; the last good settings cannot be used either: {file}: {reason}"
    )
