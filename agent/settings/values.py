"""Merges all sources into values with their origins, and builds the sections of a node.

One error in a source refuses the whole source. The message has the place and the remedy.
"""

import dataclasses
from collections.abc import Mapping
from itertools import chain
from typing import Final

import msgspec

from agent.errors import SettingsError, cap
from agent.ledger import Ledger
from agent.node.devices import RESOURCE, SCHEDULER, LastingSetting, undrained
from agent.setting import Value
from agent.settings.schema import DEFAULT, FIELDS, Setting, Settings, Values, build
from agent.settings.sources import (
    Faults,
    Layer,
    NodeFacts,
    SettingsProfile,
    Sources,
    Tier,
    first_of,
    read_surroundings,
)

NODE_NAME: Final = "node.name"


@dataclasses.dataclass(frozen=True, slots=True)
class NodeValues:
    """The merged sources, for any node. `warnings`: what has no effect, with its place."""

    sources: Sources
    device_config: Layer
    own: Layer
    node_config: Layer
    surroundings: Layer
    warnings: tuple[str, ...]

    @property
    def profiles(self) -> tuple[SettingsProfile, ...]:
        """Those of our own file, then the entries of HAMi's config.json."""
        return (*self.own.profiles, *self.node_config.profiles)

    @property
    def labelled(self) -> bool:
        """Whether the agent can read the Node's labels. Without a scheduler it asks no API server.

        No profile and no file of HAMi's sets that.
        """
        layers = (self.own.settings, self.surroundings.settings)
        values = {one.field.key: one.value for layer in layers for one in layer}
        return values.get(SCHEDULER) != "none"

    def settings(self, facts: NodeFacts) -> Settings:
        """Build the sections of a node. Its name is from `facts`, else the sources, else the host.

        Raises SettingsError: the values do not fit the node or these GPUs.
        """
        name = facts.name or self.name
        facts = msgspec.structs.replace(facts, name=name)

        # Before the first scan the labels that decide may still come.
        if facts.gpus is not None or not self.need_labels(facts):
            for profile in self.applied(facts):
                profile.faults.refuse()
        return build(
            self.resolve(facts),
            host_name=name,
            gpus=max(1, len(facts.gpus or ())),
            knows_requests=bool(self.device_config.settings),
        )

    def need_labels(self, facts: NodeFacts) -> bool:
        """True if labels, which are not known yet, may change the values."""
        named = [one.match for one in self.profiles if one.match.names(facts.name)]
        first = min((one.tier for one in named if one.tier), default=Tier.OWN)

        by_labels = any(one.labels is not None and one.tier <= first for one in named)
        return by_labels and self.labelled and facts.labels is None

    def applied(self, facts: NodeFacts) -> list[SettingsProfile]:
        """The profiles that apply to a node with these facts, in their order."""
        if not self.labelled:
            facts = msgspec.structs.replace(facts, labels=None)

        found = [one for one in self.profiles if one.match.holds(facts)]
        first = min((one.match.tier for one in found if one.match.tier), default=Tier.OWN)
        return [one for one in found if one.match.tier in {Tier.OWN, first}]

    def resolve(self, facts: NodeFacts) -> Values:
        """The values of a node with these facts."""
        applied = self.applied(facts)
        values = {field.key: Setting(field, field.default, DEFAULT) for field in FIELDS}

        settings = (self.device_config.settings, self.own.settings)
        profiled = (profile.settings for profile in applied)
        for setting in chain(*settings, *profiled, self.surroundings.settings):
            values[setting.field.key] = setting
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
        return tuple(dict.fromkeys(name for one in self.profiles for name in one.match.singles))


def make_plan(sources: Sources) -> NodeValues:
    """Merge all sources. Raises SettingsError with every error that they contain."""
    faults, later = Faults(), Faults()
    surroundings = read_surroundings(sources.environ, sources.flags, later)

    device_config = own = node_config = Layer()
    if sources.device_config or sources.own or sources.node_config:
        # Late: the start of a node without files does not load YAML.
        from agent.settings.files import read_own_file  # noqa: PLC0415
        from agent.settings.hami import read_device_layer, read_node_layer  # noqa: PLC0415

        if (file := sources.device_config) is not None:
            with faults.kept():
                device_config = read_device_layer(file.content, file.name, faults)

        if (file := sources.own) is not None:
            with faults.kept():
                own = read_own_file(file.content, file.name, faults)

        if (file := sources.node_config) is not None:
            named = {one.field.key: one.value for one in (*own.settings, *surroundings.settings)}
            node = str(named.get(NODE_NAME) or sources.host)
            with faults.kept():
                node_config = read_node_layer(file.content, file.name, faults, node)

    with faults.kept():
        later.refuse()
    faults.refuse()

    layers = (device_config, own, node_config, surroundings)
    warnings = tuple(text for layer in layers for text in layer.warnings)
    plan = NodeValues(sources, *layers, warnings=warnings)
    if plan.labelled:
        return plan

    never = [
        f"{one.where}: the {cap(f'profile {one.name}' if one.name else 'entry', 64)} never "
        "applies: it selects by labels, which the agent does not read with scheduler: none"
        for one in plan.profiles
        if one.match.labels is not None
    ]

    return dataclasses.replace(plan, warnings=(*warnings, *first_of(never, "settings")))
