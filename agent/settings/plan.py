"""All sources joined: what they say of any node, from their bytes and the node's facts alone.

Order, later wins: defaults, HAMi's device-config.yaml, our own file, its profiles in their order,
HAMi's config.json for this node, the environment, flags. A refused source is refused whole, with
its place and the mend.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeVar

from agent.core.last_good import SourceFile
from agent.settings.fields import Effective, Setting
from agent.settings.hami_files import (
    Layer,
    NodeLayer,
    read_device_layer,
    read_node_layer,
)
from agent.settings.own_file import OwnFile, read_own_file
from agent.settings.profiles import NodeFacts
from agent.settings.surroundings import ignored, read_environment, read_flags
from agent.settings.table import FIELDS

T = TypeVar("T")

Text = SourceFile
"""A file as it was read."""


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """All sources as they were found; a file that is not there is None."""

    device_config: Text | None = None
    own: Text | None = None
    node_config: Text | None = None
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    flags: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Resolved:
    """Every setting by key, and the profiles that applied."""

    settings: Effective
    profiles: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What the sources say of every node. `warnings`: what was passed over, with its place."""

    device_config: Layer
    own: OwnFile
    node_config: NodeLayer
    surroundings: tuple[Setting, ...]
    warnings: tuple[str, ...]

    def resolve(self, facts: NodeFacts) -> Resolved:
        """The settings of a node with these facts: the same facts, the same settings."""
        applied = [profile for profile in self.own.profiles if profile.match.holds(facts)]
        layers = (
            self.device_config.settings,
            self.own.settings,
            *(profile.settings for profile in applied),
            tuple(self.node_config.of(facts.name)),
            self.surroundings,
        )
        found = {field.key: Setting(field, field.default, "default") for field in FIELDS}
        for layer in layers:
            found.update({one.field.key: one for one in layer})
        return Resolved(found, tuple(profile.name for profile in applied))

    def names(self) -> tuple[str, ...]:
        """The nodes that the files name, each once, in the order of the files."""
        by_profile = (name for one in self.own.profiles for name in one.match.nodes)
        exact = (name for name in by_profile if not any(sign in name for sign in "*?["))
        entries = (name for name, _ in self.node_config.entries if name)
        return tuple(dict.fromkeys((*exact, *entries)))


def make_plan(given: Given) -> Plan:
    """Read all sources. Raises SettingsError; then nothing of them is used."""
    device_config = _read(given.device_config, read_device_layer, Layer())
    own = _read(given.own, read_own_file, OwnFile())
    node_config = _read(given.node_config, read_node_layer, NodeLayer())
    surroundings = (*read_environment(given.environ), *read_flags(given.flags))
    warnings = (*device_config.warnings, *node_config.warnings, *ignored(given.environ))
    return Plan(device_config, own, node_config, surroundings, warnings)


def _read(source: Text | None, read: Callable[[bytes, str], T], nothing: T) -> T:
    return nothing if source is None else read(source.content, source.name)
