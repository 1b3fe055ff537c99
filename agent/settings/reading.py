"""The sources of settings: files, variables and flags, and what they give a node.

Order, later wins: defaults, HAMi's device-config.yaml, our own file, its profiles in their order,
HAMi's config.json for this node, the environment, flags. One error in a source refuses all of them.
"""

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from agent.errors import SettingsError, StateCorrupt, cap
from agent.health.xids import malformed
from agent.host.system import read_file
from agent.kit.tasks import Offload
from agent.kit.units import some
from agent.ledger import Decider, LastGood, Ledger, Row, SourceFile
from agent.setting import FALSE, Value, shown
from agent.settings import files
from agent.settings.files import SettingsProfile, Tier, kept, refuse
from agent.settings.schema import DEFAULT, FIELDS, Setting, Settings, build
from agent.state import LAST_GOOD_KIND, unseal

NODE_NAME: Final = "node.name"
SCHEDULER: Final = "scheduler"
RESOURCE: Final = "sharing.resourceName"

LASTING: Final = (SCHEDULER, RESOURCE)
"""The settings that change only while no pod holds slices. No profile sets them.

Otherwise the agent could not tell a container that was answered under the former settings from one
that asks now.
"""


class Sources(msgspec.Struct, frozen=True):
    """The sources of settings. A file that does not exist, or was not read yet, is None.

    `file`: the path of our own file; None: the default file, if it exists. `flags`: the given
    options by name. `host`: the host's name.
    """

    file: Path | None = None
    environ: Mapping[str, str] = msgspec.field(default_factory=dict)
    flags: Mapping[str, str] = msgspec.field(default_factory=dict)
    host: str = ""
    device_config: SourceFile | None = None
    own: SourceFile | None = None
    node_config: SourceFile | None = None


Labels = Mapping[str, str] | None
"""The labels of a Node; None: not known yet."""


@dataclasses.dataclass(frozen=True, slots=True)
class NodeValues:
    """The merged sources, for any node. `warnings`: what has no effect, with its place.

    `base`: what HAMi's device-config.yaml and our own file set for all nodes. `profiles`: those of
    our own file, then the entries of HAMi's config.json. `top`: what variables and flags set.
    `knows_requests`: HAMi's device-config.yaml says how its scheduler reads requests.
    """

    sources: Sources
    base: tuple[Setting, ...]
    profiles: tuple[SettingsProfile, ...]
    top: tuple[Setting, ...]
    warnings: tuple[str, ...]
    knows_requests: bool

    def settings(self, name: str = "", labels: Labels = None) -> Settings:
        """Build the sections of a node. Without a name it has that of the sources or the host.

        Raises SettingsError: the values do not fit the node.
        """
        name = name or self.name
        # While labels that decide are unknown, another entry may still take the place of a wrong
        # one.
        if not self.need_labels(name, labels):
            refuse(fault for one in self.applied(name, labels) for fault in one.faults)
        return build(self.resolve(name, labels), name, knows_requests=self.knows_requests)

    def need_labels(self, name: str, labels: Labels = None) -> bool:
        """True if labels, which are not known yet, may change the values."""
        named = _of_first_tier([one for one in self.profiles if one.names(name)])
        return labels is None and any(one.labels is not None for one in named)

    def applied(self, name: str, labels: Labels = None) -> list[SettingsProfile]:
        """The profiles that apply to a node, in their order."""
        return _of_first_tier([one for one in self.profiles if one.holds(name, labels)])

    def resolve(self, name: str = "", labels: Labels = None) -> Mapping[str, Setting]:
        """All settings of a node, by key."""
        profiled = [one for profile in self.applied(name, labels) for one in profile.settings]
        values = {field.key: Setting(field, field.default, DEFAULT) for field in FIELDS}
        return values | {one.field.key: one for one in (*self.base, *profiled, *self.top)}

    @property
    def name(self) -> str:
        """The node's name from the sources, else the host's name."""
        return str(self.resolve()[NODE_NAME].value or self.sources.host)

    def fixed(self) -> Mapping[str, Value]:
        """The settings that take effect only at the start, by key. They are those of every node."""
        resolved = self.resolve().items()
        return {k: one.value for k, one in resolved if not one.field.live} | {NODE_NAME: self.name}

    def undrained(self, ledger: Ledger) -> SettingsError | None:
        """Why these settings are refused because of the rows of `ledger`; None: they are not.

        If rows differ, each of their values fits. The first setting that does not fit is named.
        """
        resolved = self.resolve()
        for key in LASTING:
            setting = resolved[key]
            rows = [row for row in ledger.rows if _answered_under(row, key)]
            values = [_answered_under(row, key) for row in rows]
            if not values or setting.value in values:
                continue

            pods = {
                f"{row.namespace}/{row.pod}"
                if row.holder
                else "pods that the kubelet has not named"
                for row in rows
            }
            restart = ", then restart the agent" if key == SCHEDULER else ""
            return SettingsError(
                f"{setting.origin}: {key} cannot change from {values[-1]} to {setting.value} "
                f"while slices are held by {some(pods)}; running pods go on",
                remedy=f"drain the node (kubectl drain {self.name}) or delete what holds "
                f"them{restart}, or set it back; slices are held for up to a minute after their "
                "pod has gone",
            )
        return None

    def names(self) -> tuple[str, ...]:
        """The names of nodes in the files, each once, in the order of the files."""
        # A name of our own profiles with one of these characters is a pattern.
        exact = (
            name
            for one in self.profiles
            for name in one.nodes
            if one.tier or not set("*?[") & set(name)
        )
        return tuple(dict.fromkeys(exact))


def _of_first_tier(found: list[SettingsProfile]) -> list[SettingsProfile]:
    """Those of our own file, and of HAMi's entries those in the first tier that there is."""
    first = min((one.tier for one in found if one.tier), default=Tier.OWN)
    return [one for one in found if one.tier in {Tier.OWN, first}]


def _answered_under(row: Row, key: str) -> str:
    """The value of the setting under which a row was answered; empty: the row fits every one.

    An adopted row fits every scheduler. A row of an earlier agent has no resource name.
    """
    if key == RESOURCE:
        return row.resource

    scheduler = "none" if row.decided_by is Decider.KUBELET else "hami"
    return "" if row.adopted else scheduler


# Variables and flags.

PREFIX: Final = "HAMI_AGENT_"
SERVICE_HOST: Final = "_SERVICE_HOST"
VARIABLES: Final = frozenset(field.variables[0] for field in FIELDS)


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

    named = {f"env {name}": value for name, value in environ.items()} | dict(flags)
    for foreign in FOREIGN:
        for name in (f"env {foreign.variable}", foreign.flags[0]):
            value = named.get(name, "")
            if not value or value in foreign.harmless:
                continue
            if foreign.strict:  # the operator relies on something that the agent does not do
                served = "false" if foreign.switch else " or ".join(sorted(foreign.harmless))
                text = f"{name}: no other value works here: expected {served}, found {shown(value)}"
                errors.append(text)
            else:
                warnings.append(f"{name}: has no effect here")

    given: list[tuple[str, object, str]] = []
    for field in FIELDS:
        own, *others = field.variables
        # Another plugin's empty variable counts as not set.
        if name := own if own in environ else next(filter(environ.get, others), ""):
            given.append((field.key, environ[name], f"env {name}"))
    given += [(one.key, flags[one.flag], one.flag) for one in FIELDS if one.flag in flags]
    return files.read_settings(given, errors)


def make_plan(sources: Sources) -> NodeValues:
    """Merge all sources. Raises SettingsError with every error that they contain."""
    errors, warnings = list[str](), list[str]()
    base, profiles = list[Setting](), list[SettingsProfile]()

    if sources.device_config is not None:
        with kept(errors):
            base += files.read_device_config(sources.device_config, errors, warnings)
    knows_requests = bool(base)
    if sources.own is not None:
        with kept(errors):
            settings, profiles = files.read_own_file(sources.own, errors)
            base += settings
    if sources.node_config is not None:
        with kept(errors):
            profiles += files.read_node_config(sources.node_config, errors, warnings)
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
        warnings += files.first_of(never, "settings")
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
            values = plan.resolve()

            for key, kind, limit in (
                (DEVICE_CONFIG, "device_config", MAX_YAML),
                (NODE_CONFIG, "node_config", MAX_JSON),
            ):
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
        start.taken().settings()
    except SettingsError as error:
        refusal = error
    else:
        return start

    # Our own file says where the copy is, if it is good; else environment and flags do.
    file: Path | None = None
    for own in (None, start.sources.own):
        with contextlib.suppress(SettingsError):
            known = make_plan(msgspec.structs.replace(sources, own=own))
            file = known.settings().paths.state / COPY
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
    plan.settings()
    return plan


def stand_in(
    copy: LastGood | None, sources: Sources, ledger: Ledger, name: str = "", labels: Labels = None
) -> NodeValues | None:
    """The settings of the copy in the place of `sources`, which the node or its rows refuse.

    None: the copy says the same, is refused itself, or there is none.
    """
    with contextlib.suppress(SettingsError):
        if copy is not None:
            last = recalled(copy, sources)
            last.settings(name, labels)
            if last.sources != sources and last.undrained(ledger) is None:
                return last
    return None
