"""The sources of settings: reads files, variables and flags, and merges them into one plan.

Order, later wins: defaults, HAMi's device-config.yaml, our own file, its profiles in their order,
HAMi's config.json for this node, the environment, flags. One error in a source refuses all of them.
"""

import asyncio
import contextlib
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from agent.cluster import parse_selector
from agent.errors import MalformedText, SettingsError, StateCorrupt, cap
from agent.health.xids import malformed
from agent.host.files import read_file
from agent.kit.tasks import Offload
from agent.ledger import LastGood, Ledger, SourceFile
from agent.node import SCHEDULER
from agent.setting import FALSE, Field, shown
from agent.settings.files import Place, first_of, kept, read_yaml, refuse
from agent.settings.hami import read_device_config, read_node_config
from agent.settings.schema import BY_KEY, DEFAULT, FIELDS, LIVE, ProfileHead, Setting, read_setting
from agent.settings.sources import NodeFacts, NodeValues, SettingsProfile, Sources
from agent.state import LAST_GOOD_KIND, unseal

# The agent's own file.

PROFILES: Final = "profiles"


def read_own_file(
    file: SourceFile, errors: list[str]
) -> tuple[list[Setting], list[SettingsProfile]]:
    """What the whole file sets for all nodes and for some. Errors go to `errors`.

    Raises SettingsError: the file is not YAML, or is a Kubernetes object.
    """
    document = read_yaml(file.content, file.name)
    settings: list[Setting] = []
    profiles: dict[str, SettingsProfile] = {}
    for key, here, value in () if document.null else document.pairs():
        with kept(errors):
            if key != PROFILES:
                settings.extend(_settings(key, here, value, BY_KEY, errors))
                continue
            for item in () if value.null else value.items():
                with kept(errors):
                    profile = _profile(item, errors)
                    if profile.name in profiles:
                        raise item.fault(f"the profile {cap(profile.name, 64)} is defined twice")
                    profiles[profile.name] = profile
    return settings, list(profiles.values())


def _profile(item: Place, errors: list[str]) -> SettingsProfile:
    """Read one profile. Raises SettingsError: its name or condition is wrong."""
    head: dict[str, object] = {}
    settings: list[Setting] = []
    for key, here, value in item.pairs():
        if key == "match":
            head[key] = {name: inner.value() for name, _, inner in value.pairs()}
        elif key == "name":
            head[key] = value.value()
        else:
            settings.extend(_settings(key, here, value, LIVE, errors))

    try:
        found = msgspec.convert(head, ProfileHead)
        labels = parse_selector(found.match.labels) if found.match.labels else None
    except (msgspec.ValidationError, MalformedText) as error:
        raise item.fault(cap(str(error))) from error
    nodes = found.match.nodes or ()
    if not nodes and labels is None:
        raise item.fault("`nodes` or `labels` is needed under `match`")
    return SettingsProfile(found.name, item.where, tuple(settings), nodes, labels)


def _settings(
    key: str,
    here: Place,
    value: Place,
    known: Mapping[str, Field],
    errors: list[str],
    above: str = "",
) -> Iterator[Setting]:
    """The settings at and below `key`. `above`: the keys above it, each with its dot."""
    # A key with a dot would be a second way to set the same setting.
    path = "" if "." in key else above + key
    with kept(errors):
        if path in known:
            yield read_setting(known[path], value.value(), value.where, value.shown())
        elif any(name.startswith(f"{path}.") for name in known):
            # Null is a section whose keys are all commented out.
            for name, place, inner in () if value.null else value.pairs():
                yield from _settings(name, place, inner, known, errors, f"{path}.")
        elif any(f"{name}.".startswith(f"{path}.") for name in BY_KEY):
            raise SettingsError(
                f"{here.where}: a profile cannot set {path}, which acts before the node is known"
            )
        else:
            unknown = f"unknown setting {cap(above + key, 64)}"
            raise SettingsError(f"{here.where}: {unknown}; `hami-agent config show` lists all")


# Variables and flags.

PREFIX: Final = "HAMI_AGENT_"
SERVICE_HOST: Final = "_SERVICE_HOST"
VARIABLES: Final = frozenset(field.variables[0] for field in FIELDS)
SCORE_SWITCH: Final = "ENABLE_TOPOLOGY_SCORE"


class InheritedSetting(msgspec.Struct, frozen=True):
    """A variable and a flag of HAMi's and NVIDIA's plugins without effect here.

    `harmless`: values that ask for what the agent does anyway. `strict`: any other value is
    refused instead of ignored. `switch`: the flag may stand alone and then means true.
    """

    variable: str = ""
    flags: tuple[str, ...] = ()
    harmless: frozenset[str] = frozenset()
    strict: bool = False
    switch: bool = False


FOREIGN: Final[tuple[InheritedSetting, ...]] = (
    InheritedSetting("MIG_STRATEGY", ("--mig-strategy",), frozenset({"none"})),
    InheritedSetting("DEVICE_SPLIT_COUNT", ("--device-split-count",)),
    InheritedSetting("DEVICE_MEMORY_SCALING", ("--device-memory-scaling",)),
    InheritedSetting("DEVICE_CORES_SCALING", ("--device-cores-scaling",)),
    InheritedSetting("DISABLE_CORE_LIMIT", ("--disable-core-limit",), FALSE, switch=True),
    InheritedSetting("DEVICE_ID_STRATEGY", ("--device-id-strategy",), frozenset({"uuid"})),
    InheritedSetting(
        "DEVICE_DISCOVERY_STRATEGY",
        ("--device-discovery-strategy",),
        frozenset({"auto", "nvml"}),
        strict=True,
    ),
    InheritedSetting("REPORT_NODE_CAPACITY", ("--report-node-capacity",), FALSE, switch=True),
    InheritedSetting("NVIDIA_CDI_HOOK_PATH", ("--nvidia-cdi-hook-path",)),
    InheritedSetting("NVIDIA_CTK_PATH", ("--nvidia-ctk-path",)),
    InheritedSetting("IMEX_CHANNEL_IDS", ("--imex-channel-ids",)),
    InheritedSetting("IMEX_REQUIRED", ("--imex-required",), FALSE, strict=True, switch=True),
    InheritedSetting(flags=("-v", "--v")),
)
"""What an environment or a command line made for HAMi's plugin may also contain."""


def read_surroundings(
    environ: Mapping[str, str], flags: Mapping[str, str], errors: list[str], warnings: list[str]
) -> list[Setting]:
    """What variables and flags set; flags win. Errors go to `errors`, with the name."""
    # Beside a Service named hami-agent, Kubernetes gives every container of its namespace
    # HAMI_AGENT_SERVICE_HOST, HAMI_AGENT_PORT and more, and beside one named hami-agent-web an
    # address as HAMI_AGENT_WEB_PORT; the operator's own value of that is a number.
    links = tuple(
        name.removesuffix(SERVICE_HOST) + part
        for name in environ
        if name.startswith(PREFIX) and name.endswith(SERVICE_HOST)
        for part in ("_SERVICE_", "_PORT")
    )
    environ = {
        name: value
        for name, value in environ.items()
        if not name.startswith(links)
        or (name in VARIABLES and not re.match("(tcp|udp|sctp)://", value))
    }
    errors += [
        f"env {cap(name)}: unknown setting; a variable is {PREFIX} and the words of a key, such as "
        f"{PREFIX}SHARING_SPLIT_COUNT; `hami-agent config show` lists all keys; the flag --config "
        "names the settings file"
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in VARIABLES  # most likely misspelled
    ]

    warnings += [
        f"env {name}: {shown(item)} is neither an XID nor all: it is ignored"
        for name in ("DP_DISABLE_HEALTHCHECKS", "DP_ENABLE_HEALTHCHECKS")
        for item in malformed(environ.get(name, ""))
    ]

    # HAMi's plugin takes every text but `true` for false, and never ends because of it.
    score = environ.get(SCORE_SWITCH, "")
    if score and score != "true":
        environ = {**environ, SCORE_SWITCH: "false"}
        if score not in FALSE:
            text = f"env {SCORE_SWITCH}: {shown(score)} is not true"
            warnings.append(f"{text}, so the scores are off, as in HAMi's plugin")

    for foreign in FOREIGN:
        flag = foreign.flags[0]
        both = {f"env {foreign.variable}": environ.get(foreign.variable), flag: flags.get(flag)}
        for name, value in both.items():
            if not value or value in foreign.harmless:
                continue
            if foreign.strict:  # the operator relies on something that the agent does not do
                served = "false" if foreign.switch else " or ".join(sorted(foreign.harmless))
                text = f"{name}: no other value works here: expected {served}, found {shown(value)}"
                errors.append(text)
            else:
                warnings.append(f"{name}: has no effect here")

    given: list[tuple[Field, str, str]] = []
    for field in FIELDS:
        own, *others = field.variables
        # Another plugin's empty variable counts as not set.
        if name := own if own in environ else next(filter(environ.get, others), ""):
            given.append((field, environ[name], f"env {name}"))
    given += [(one, flags[one.flag], one.flag) for one in FIELDS if one.flag in flags]

    settings: list[Setting] = []
    for field, value, where in given:
        with kept(errors):
            settings.append(read_setting(field, value, where))
    return settings


def make_plan(sources: Sources) -> NodeValues:
    """Merge all sources. Raises SettingsError with every error that they contain."""
    errors, warnings = list[str](), list[str]()
    base, profiles = list[Setting](), list[SettingsProfile]()

    if sources.device_config is not None:
        with kept(errors):
            base += read_device_config(sources.device_config, errors, warnings)
    knows_requests = bool(base)
    if sources.own is not None:
        with kept(errors):
            settings, profiles = read_own_file(sources.own, errors)
            base += settings
    if sources.node_config is not None:
        with kept(errors):
            profiles += read_node_config(sources.node_config, errors, warnings)
    top = read_surroundings(sources.environ, sources.flags, errors, warnings)
    refuse(errors)

    # Without a scheduler the agent asks no API server, which has the labels.
    values = {one.field.key: one.value for one in (*base, *top)}
    if values.get(SCHEDULER) == "none":
        never = [
            f"{one.where}: the {cap(f'profile {one.name}' if one.name else 'entry', 64)} never "
            "applies: it selects by labels, which the agent does not read with scheduler: none"
            for one in profiles
            if one.labels is not None
        ]
        warnings += first_of(never, "settings")
        profiles = [one for one in profiles if one.labels is None]

    return NodeValues(
        sources, tuple(base), tuple(profiles), tuple(top), tuple(warnings), knows_requests
    )


# Reads the files; at the start it falls back to the last good ones.

DEFAULT_FILE: Final = Path("/etc/hami-agent/config.yaml")
DEVICE_CONFIG: Final = "files.deviceConfig"
NODE_CONFIG: Final = "files.nodeConfig"
COPY: Final = "settings.json"
"""Name of the last good settings in the state directory."""

MAX_YAML: Final = 256 * 1024
MAX_JSON: Final = 1024 * 1024
"""Bytes: what a ConfigMap can hold."""
_HAMIS: Final = ((DEVICE_CONFIG, "device_config", MAX_YAML), (NODE_CONFIG, "node_config", MAX_JSON))
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
    sources: Sources, offload: Offload, last: SourcesRead | None = None, good: Sources | None = None
) -> SourcesRead:
    """Read all sources. `last`: the result of the last read, which is returned if it still holds.

    `good`: the sources in force. If a file of theirs is gone, everything is refused: settings do
    not fall back to defaults while pods run. `offload` reads files and parses YAML. A file that
    does not answer is refused.
    """
    current = sources
    path = own_path = sources.file or DEFAULT_FILE
    plan = last.plan if last is not None and last.refusal is None else None
    refusal: SettingsError | None = None

    async def read(kind: str, file: Path, limit: int, *, needed: bool) -> None:
        """Read one file into `current`."""
        nonlocal current, path
        path = file
        content = await offload.call(partial(read_file, file, limit, needed=needed))
        found = None if content is None else SourceFile(str(file), content)
        current = msgspec.structs.replace(current, **{kind: found})

        former = getattr(good, kind, None)
        if found is None and former is not None and former.name == str(file):
            raise SettingsError(
                f"{file}: was removed; the agent keeps its settings until it is back; to go on "
                "without it, restart the agent"
            )

    try:
        async with asyncio.timeout(DEADLINE):
            # Our own file, the environment and the flags come first: they say where HAMi's are.
            await read("own", path, MAX_YAML, needed=sources.file is not None)
            if plan is None or plan.sources.own != current.own:
                plan = await offload.call(make_plan, current)
            values = plan.resolve(NodeFacts())

            for key, kind, limit in _HAMIS:
                if (one := values[key]).value:  # the default files need not exist
                    await read(kind, Path(str(one.value)), limit, needed=one.origin != DEFAULT)

            if plan.sources != current:
                plan = await offload.call(make_plan, current)
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
    return SourcesRead(current, None if refusal else plan, refusal)


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
    for own in (None, start.sources.own):
        with contextlib.suppress(SettingsError):
            known = msgspec.structs.replace(sources, own=own)
            file = make_plan(known).settings(NodeFacts()).paths.state / COPY
    if file is None:
        raise refusal

    try:
        async with asyncio.timeout(DEADLINE):
            content = await state.call(partial(read_file, file, MAX_COPY, needed=False))
        copy = None if content is None else unseal(content, LAST_GOOD_KIND, LastGood)
        last = None if copy is None else recalled(copy, sources)
    except (TimeoutError, SettingsError, StateCorrupt) as error:
        reason = str(error).removeprefix(f"{file}: ") or _UNANSWERED
        raise SettingsError(
            f"{refusal}; the last good settings cannot be used either: {file}: {reason}"
        ) from error
    if last is None:
        raise refusal
    return msgspec.structs.replace(start, plan=last, refusal=refusal)


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
