"""The sources of settings (files, environment, flags) and what is read of variables and flags.

Order, later wins: defaults, HAMi's device-config.yaml, our own file, its profiles in their order,
HAMi's config.json for this node, the environment, flags.
"""

import contextlib
import enum
import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from agent.cluster import Selector
from agent.errors import SettingsError, cap
from agent.health.xids import malformed
from agent.ledger import SourceFile
from agent.setting import FALSE, shown
from agent.settings.schema import FIELDS, Setting, read_setting

WILD: Final = frozenset("*?[")
"""A name with one of these characters is a pattern."""
TOLD: Final = 20
"""Warnings of one kind about one file; further ones are only counted."""


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


class Faults:
    """The errors of one reading in their order, each once, so that one message names them all."""

    def __init__(self) -> None:
        self._errors: dict[str, SettingsError] = {}

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keep a SettingsError that the block raises, and continue after it."""
        try:
            yield
        except SettingsError as error:
            self.add(error)

    def add(self, error: SettingsError) -> None:
        """Keep this error too."""
        for text in error.every:
            self._errors.setdefault(text, error)

    @property
    def texts(self) -> tuple[str, ...]:
        """What each error says."""
        return tuple(self._errors)

    def refuse(self) -> None:
        """Raise one SettingsError with all errors, if there are any."""
        if not self._errors:
            return
        first, *more = self._errors
        if not more:
            raise self._errors[first]
        raise SettingsError(f"{first} (and {len(more)} more)", every=tuple(self._errors))


def first_of(warnings: Sequence[str], name: str) -> tuple[str, ...]:
    """The first TOLD of the warnings about `name`, and one with the number of the others."""
    more = len(warnings) - TOLD
    count = (f"{name}: and {more} more are passed over",) if more > 0 else ()
    return (*warnings[:TOLD], *count)


class NodeFacts(msgspec.Struct, frozen=True):
    """The facts that settings may depend on. `labels` and `gpus` None: not known yet."""

    name: str = ""
    labels: Mapping[str, str] | None = None
    gpus: frozenset[str] | None = None


Tier = enum.IntEnum("Tier", "OWN NAME LABELS ANY", start=0)
"""The tiers of HAMi's config.json: of its entries only those in the first tier that matches apply.

OWN: profiles of our own file, which apply beside them. Source: HAMi #3173.
"""


class ProfileMatch(msgspec.Struct, frozen=True):
    """A profile's condition. All parts that are set must hold; one of several names suffices.

    Names may contain `*` and `?`, but those of HAMi's entries are literal.
    """

    nodes: tuple[str, ...] = ()
    labels: Selector | None = None
    tier: Tier = Tier.OWN

    def holds(self, facts: NodeFacts) -> bool:
        """True if a node with these facts matches. Labels that are not known yet do not match."""
        by_label = self.labels is None or (
            facts.labels is not None and self.labels.matches(facts.labels)
        )
        return by_label and self.names(facts.name)

    def names(self, name: str) -> bool:
        """True if the name matches; labels do not count here."""
        if self.tier is Tier.NAME:
            return name in self.nodes
        return not self.nodes or any(fnmatch.fnmatchcase(name, one) for one in self.nodes)

    @property
    def singles(self) -> tuple[str, ...]:
        """The names that are not patterns."""
        return tuple(name for name in self.nodes if self.tier or not WILD & {*name})


class SettingsProfile(msgspec.Struct, frozen=True):
    """Settings for the nodes that `match` selects. `where`: its place, `file:line:column`.

    An entry of HAMi's config.json becomes a profile without a name for each tier that it is in.
    `faults`: its values that do not fit; they refuse the settings of the nodes to which it applies.
    """

    name: str
    match: ProfileMatch
    settings: tuple[Setting, ...]
    where: str
    faults: Faults = msgspec.field(default_factory=Faults)


class Layer(msgspec.Struct, frozen=True):
    """What one source sets for all nodes and for some, and warnings about what it ignores."""

    settings: tuple[Setting, ...] = ()
    profiles: tuple[SettingsProfile, ...] = ()
    warnings: tuple[str, ...] = ()


PREFIX: Final = "HAMI_AGENT_"
SERVICE_HOST: Final = "_SERVICE_HOST"
VARIABLES: Final = tuple(field.variables[0] for field in FIELDS)

XID_LISTS: Final = ("DP_DISABLE_HEALTHCHECKS", "DP_ENABLE_HEALTHCHECKS")
SCORE_SWITCH: Final = "ENABLE_TOPOLOGY_SCORE"
_ADDRESS: Final = re.compile("(?:tcp|udp|sctp)://")


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
    environ: Mapping[str, str], flags: Mapping[str, str], faults: Faults
) -> Layer:
    """Read what variables and flags set; flags win. Errors go to `faults`, with the name."""
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
        if not name.startswith(links) or (name in VARIABLES and not _ADDRESS.match(value))
    }

    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in VARIABLES:  # most likely misspelled
            text = (
                f"env {cap(name)}: unknown setting; a variable is {PREFIX} and the words of a key, "
                f"such as {PREFIX}SHARING_SPLIT_COUNT; `hami-agent config show` lists all keys; "
                "the flag --config names the settings file"
            )
            faults.add(SettingsError(text))

    warnings = [
        f"env {name}: {shown(item)} is neither an XID nor all: it is ignored"
        for name in XID_LISTS
        for item in malformed(environ.get(name, ""))
    ]

    score = environ.get(SCORE_SWITCH, "")
    if score and score != "true" and score not in FALSE:
        text = f"env {SCORE_SWITCH}: {shown(score)} is not true"
        warnings.append(f"{text}, so the scores are off, as in HAMi's plugin")

    for foreign in FOREIGN:
        named = [(f"env {foreign.variable}", environ.get(foreign.variable, ""))]
        named += [(flag, flags.get(flag, "")) for flag in foreign.flags[:1]]
        for name, value in named:
            if not value or value in foreign.harmless:
                continue
            if foreign.strict:  # the operator relies on something that the agent does not do
                served = "false" if foreign.switch else " or ".join(sorted(foreign.harmless))
                text = f"{name}: no other value works here: expected {served}, found {shown(value)}"
                faults.add(SettingsError(text))
            else:
                warnings.append(f"{name}: has no effect here")

    settings: list[Setting] = []
    for field in FIELDS:
        own, *others = field.variables
        # Another plugin's empty variable counts as not set.
        name = own if own in environ else next(filter(environ.get, others), "")
        if name:
            # HAMi's plugin takes every text but `true` for false here.
            value = str(environ[name] == "true") if name == SCORE_SWITCH else environ[name]
            with faults.kept():
                settings.append(read_setting(field, value, f"env {name}"))

    for field in FIELDS:
        if field.flag and field.flag in flags:
            with faults.kept():
                settings.append(read_setting(field, flags[field.flag], field.flag))
    return Layer(tuple(settings), warnings=tuple(warnings))
