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
from agent.host.system import read_file
from agent.kit.tasks import Offload
from agent.ledger import Decider, LastGood, Ledger, Row, SourceFile
from agent.setting import Value
from agent.settings import files
from agent.settings.files import SettingsProfile, Tier, kept, refuse
from agent.settings.schema import DEFAULT, FIELDS, Setting, Settings, build, read_setting
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

    `file`: the path of our own file; None: the default file, if it exists.
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
    our own file, then the entries of HAMi's config.json. `top`: variables and flags.
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
        # While labels are unknown, another entry may still take the place of a wrong one.
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

    def check_rows(self, ledger: Ledger) -> None:
        """Raise SettingsError: the rows were answered under another scheduler or resource name.

        If rows differ, each of their values fits.
        """
        resolved = self.resolve()
        for key in LASTING:
            setting = resolved[key]
            values = sorted({_answered_under(row, key) for row in ledger.rows} - {""})
            if values and setting.value not in values:
                raise SettingsError(
                    f"{setting.origin}: {key} cannot change from {values[0]} to {setting.value} "
                    "while pods hold slices; running pods go on",
                    remedy=f"drain the node (kubectl drain {self.name}) or delete the pods that "
                    "`hami-agent status --by pod` names, or set it back; slices are held for 60 "
                    "to 75 s after their pod has gone",
                )


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


PREFIX: Final = "HAMI_AGENT_"
VARIABLES: Final = frozenset(field.variables[0] for field in FIELDS)
_OF_SERVICE: Final = re.compile("_SERVICE_|_PORT(_|$)")

FOREIGN: Final = (
    *("MIG_STRATEGY", "DEVICE_SPLIT_COUNT", "DEVICE_MEMORY_SCALING", "DEVICE_CORES_SCALING"),
    *("DISABLE_CORE_LIMIT", "DEVICE_ID_STRATEGY", "DEVICE_DISCOVERY_STRATEGY"),
    *("REPORT_NODE_CAPACITY", "NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH", "IMEX_CHANNEL_IDS"),
    "IMEX_REQUIRED",
)
"""Variables of HAMi's and NVIDIA's plugins without effect here; each has a flag, too."""


def flag_of(variable: str) -> str:
    """The flag of HAMi's and NVIDIA's plugins that means the same as the variable."""
    return f"--{variable.lower().replace('_', '-')}"


def read_surroundings(
    environ: Mapping[str, str], flags: Mapping[str, str], errors: list[str], warnings: list[str]
) -> list[Setting]:
    """What variables and flags set; flags win. Errors go to `errors`, with the name."""
    # Kubernetes sets HAMI_AGENT_SERVICE_HOST, HAMI_AGENT_PORT_9394_TCP and more beside a Service
    # named hami-agent; other names are most likely misspelled.
    errors += [
        f"env {cap(name)}: unknown setting; a variable is {PREFIX} and the words of a key, such as "
        f"{PREFIX}SHARING_SPLIT_COUNT; see SETTINGS.md"
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in VARIABLES and not _OF_SERVICE.search(name)
    ]
    warnings += [f"env {name}: has no effect here" for name in FOREIGN if environ.get(name)]
    warnings += [f"{name}: has no effect here" for name in map(flag_of, FOREIGN) if name in flags]

    settings: list[Setting] = []
    for field in FIELDS:
        own, *others = field.variables
        # Another plugin's empty variable counts as not set.
        name = own if own in environ else next(filter(environ.get, others), "")
        with kept(errors):
            if name:
                settings.append(read_setting(field, environ[name], f"env {name}"))
            if field.flag in flags:
                settings.append(read_setting(field, flags[field.flag], field.flag))
    return settings


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

    return NodeValues(
        sources, tuple(base), tuple(profiles), tuple(top), tuple(warnings), knows_requests
    )


DEFAULT_FILE: Final = Path("/etc/hami-agent/config.yaml")
DEVICE_CONFIG: Final = "files.deviceConfig"
NODE_CONFIG: Final = "files.nodeConfig"
COPY: Final = "settings.json"
"""Name of the last good settings in the state directory."""

MAX_FILE: Final = 1024 * 1024  # what a ConfigMap can hold
MAX_COPY: Final = 4 * MAX_FILE  # all files, in base64, and the labels
DEADLINE: Final = 30.0
"""Seconds to read all files. A file system that hangs must not block the agent."""


class SourcesRead(msgspec.Struct, frozen=True):
    """The result of one read. `sources`: what was read before any error.

    `plan` None: they are refused, and `refusal` says why. At a start with a `refusal`, `plan` is
    that of the last good sources.
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
    not fall back to defaults while pods run. Files that do not answer are refused.
    """
    try:
        async with asyncio.timeout(DEADLINE):
            found = await offload.call(_look, sources, last, good)
    except TimeoutError:
        file = sources.file or DEFAULT_FILE
        text = f"{file}, or a file of HAMi's, was not read within {DEADLINE:g} s"
        found = SourcesRead(sources, refusal=SettingsError(text, remedy="check the file system"))

    # What was read may be less than all: only the same refusal again is no news.
    if last and (last.sources, str(last.refusal)) == (found.sources, str(found.refusal)):
        return last
    return found


def _look(sources: Sources, last: SourcesRead | None, good: Sources | None) -> SourcesRead:
    current, refusal = sources, None
    plan = last.plan if last is not None and last.refusal is None else None
    try:
        # Our own file, the environment and the flags come first: they say where HAMi's are.
        own = sources.file or DEFAULT_FILE
        current = _with_file(current, good, "own", own, needed=sources.file is not None)
        if plan is None or plan.sources.own != current.own:
            plan = make_plan(current)
        values = plan.resolve()

        for key, kind in ((DEVICE_CONFIG, "device_config"), (NODE_CONFIG, "node_config")):
            if (one := values[key]).value:  # the default files need not exist
                file, is_needed = Path(str(one.value)), one.origin != DEFAULT
                current = _with_file(current, good, kind, file, needed=is_needed)

        if plan.sources != current:
            plan = make_plan(current)
    except SettingsError as error:
        plan, refusal = None, error
    return SourcesRead(current, plan, refusal)


def _with_file(
    sources: Sources, good: Sources | None, kind: str, file: Path, *, needed: bool
) -> Sources:
    """Read one file into the sources. Raises SettingsError."""
    content = read_file(file, MAX_FILE, needed=needed)
    former = getattr(good, kind, None)
    if content is None and former is not None and former.name == str(file):
        raise SettingsError(f"{file}: was removed; put it back, or restart the agent without it")
    found = None if content is None else SourceFile(str(file), content)
    return msgspec.structs.replace(sources, **{kind: found})


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
    if file is not None:
        with contextlib.suppress(TimeoutError, SettingsError, StateCorrupt):
            async with asyncio.timeout(DEADLINE):
                content = await state.call(partial(read_file, file, MAX_COPY))
            last = recalled(unseal(content or b"", LAST_GOOD_KIND, LastGood), sources)
            return msgspec.structs.replace(start, plan=last, refusal=refusal)
    raise refusal


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


def stand_in(copy: LastGood | None, sources: Sources, ledger: Ledger) -> NodeValues | None:
    """The settings of the copy in the place of `sources`, which the rows refuse.

    None: the copy says the same, is refused itself, or there is none.
    """
    with contextlib.suppress(SettingsError):
        last = recalled(copy, sources) if copy is not None else None
        if last is not None and last.sources != sources:
            last.check_rows(ledger)
            return last
    return None
