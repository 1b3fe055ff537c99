"""The merged sources: values with their origins for any node, by its name, labels and GPUs."""

import dataclasses
import enum
import fnmatch
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from agent.cluster import Selector
from agent.errors import SettingsError
from agent.ledger import Ledger, SourceFile
from agent.node import RESOURCE, SCHEDULER, LastingSetting, undrained
from agent.setting import Value
from agent.settings.files import refuse
from agent.settings.schema import DEFAULT, FIELDS, Setting, Settings, Values, build

NODE_NAME: Final = "node.name"
WILD: Final = frozenset("*?[")
"""A name with one of these characters is a pattern."""


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


class NodeFacts(msgspec.Struct, frozen=True):
    """The facts that settings may depend on. `labels` and `gpus` None: not known yet."""

    name: str = ""
    labels: Mapping[str, str] | None = None
    gpus: frozenset[str] | None = None


Tier = enum.IntEnum("Tier", "OWN NAME LABELS ANY", start=0)
"""The tiers of HAMi's config.json: of its entries only those in the first tier that matches apply.

OWN: profiles of our own file, which apply beside them. Source: HAMi #3173.
"""


class SettingsProfile(msgspec.Struct, frozen=True):
    """Settings for the nodes that match all of `nodes` and `labels` that is set.

    `nodes`: names, one of which must match. `*` and `?` in them are patterns, but those of HAMi's
    entries are literal. `where`: its place, `file:line:column`. An entry of HAMi's config.json
    becomes a profile without a name for each tier that it is in. `faults`: its values that do not
    fit; they refuse the settings of the nodes to which it applies.
    """

    name: str
    where: str
    settings: tuple[Setting, ...]
    nodes: tuple[str, ...] = ()
    labels: Selector | None = None
    tier: Tier = Tier.OWN
    faults: tuple[str, ...] = ()

    def names(self, name: str) -> bool:
        """True if the name matches; labels do not count here."""
        if self.tier is Tier.NAME:
            return name in self.nodes
        return not self.nodes or any(fnmatch.fnmatchcase(name, one) for one in self.nodes)

    def holds(self, facts: NodeFacts) -> bool:
        """True if a node with these facts matches. Labels that are not known yet do not match."""
        by_label = self.labels is None or (
            facts.labels is not None and self.labels.matches(facts.labels)
        )
        return by_label and self.names(facts.name)


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

    def settings(self, facts: NodeFacts) -> Settings:
        """Build the sections of a node. Its name is from `facts`, else the sources, else the host.

        Raises SettingsError: the values do not fit the node or these GPUs.
        """
        name = facts.name or self.name
        facts = msgspec.structs.replace(facts, name=name)

        # Before the first scan the labels that decide may still come.
        if facts.gpus is not None or not self.need_labels(facts):
            for profile in self.applied(facts):
                refuse(profile.faults)
        return build(
            self.resolve(facts),
            host_name=name,
            gpus=max(1, len(facts.gpus or ())),
            knows_requests=self.knows_requests,
        )

    def need_labels(self, facts: NodeFacts) -> bool:
        """True if labels, which are not known yet, may change the values."""
        named = [one for one in self.profiles if one.names(facts.name)]
        first = min((one.tier for one in named if one.tier), default=Tier.OWN)
        by_labels = any(one.labels is not None and one.tier <= first for one in named)
        return by_labels and facts.labels is None

    def applied(self, facts: NodeFacts) -> list[SettingsProfile]:
        """The profiles that apply to a node with these facts, in their order."""
        found = [one for one in self.profiles if one.holds(facts)]
        first = min((one.tier for one in found if one.tier), default=Tier.OWN)
        return [one for one in found if one.tier in {Tier.OWN, first}]

    def resolve(self, facts: NodeFacts) -> Values:
        """The values of a node with these facts."""
        applied = self.applied(facts)
        profiled = [one for profile in applied for one in profile.settings]
        values = {field.key: Setting(field, field.default, DEFAULT) for field in FIELDS}
        values |= {one.field.key: one for one in (*self.base, *profiled, *self.top)}
        return Values(values, tuple(one.name for one in applied if one.name))

    @property
    def name(self) -> str:
        """The node's name from the sources, else the host's name."""
        return str(self.resolve(NodeFacts())[NODE_NAME].value or self.sources.host)

    def fixed(self) -> Mapping[str, Value]:
        """The settings that take effect only at the start, by key. They do not depend on facts."""
        resolved = self.resolve(NodeFacts()).items()
        return {k: one.value for k, one in resolved if not one.field.live} | {NODE_NAME: self.name}

    def lasting(self) -> tuple[LastingSetting, ...]:
        """The settings that change only while no pod holds slices. No profile sets them."""
        resolved = self.resolve(NodeFacts())
        return tuple(
            LastingSetting(key, str(resolved[key].value), resolved[key].origin)
            for key in (SCHEDULER, RESOURCE)
        )

    def undrained(self, ledger: Ledger) -> SettingsError | None:
        """Why these settings are refused because of the rows of `ledger`; None: they are not."""
        return undrained(self.lasting(), ledger, self.name)

    def names(self) -> tuple[str, ...]:
        """The names of nodes in the files, each once, in the order of the files."""
        exact = (
            name for one in self.profiles for name in one.nodes if one.tier or WILD.isdisjoint(name)
        )
        return tuple(dict.fromkeys(exact))
