"""Merges all sources into values with their origins, and builds the sections of a node.

One error in a source refuses the whole source. The message has the place and the remedy.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec

from agent.codec.faults import Faults
from agent.codec.known_keys import IgnoredKeys, KnownKey
from agent.core.errors import SettingsError, cap
from agent.core.node.drained import RESOURCE, SCHEDULER, LastingSetting, kept, undrained
from agent.core.state.last_good import SourceFile
from agent.core.state.ledger import Ledger
from agent.settings.fields import DEFAULT, Setting, Values
from agent.settings.hami_keys import NODE_CONFIG
from agent.settings.kinds import Value, shown
from agent.settings.profiles import NodeFacts, Profiles
from agent.settings.sections import Settings, build
from agent.settings.sources import Layer, Sources
from agent.settings.surroundings import read_surroundings
from agent.settings.table import BY_KEY, FIELDS

FILTERS: Final = frozenset({"sharing.filterUUIDs", "sharing.filterIndexes"})
"""Lists that should name each GPU once."""
NODE_NAME: Final = "node.name"
HELD: Final = "the pods that hold slices"
"""The origin of a value that stays because of the ledger's rows."""


@dataclasses.dataclass(frozen=True, slots=True)
class NodeValues:
    """The merged sources, for any node. `warnings`: what has no effect, with its place.

    `profiles`: those of our own file, then the entries of HAMi's config.json. `held`: values that
    stay in force, whatever the sources say.
    """

    sources: Sources
    device_config: Layer
    own: Layer
    node_config: Layer
    surroundings: Layer
    warnings: tuple[str, ...]
    profiles: Profiles = dataclasses.field(compare=False, repr=False)
    held: tuple[Setting, ...] = ()

    @property
    def labelled(self) -> bool:
        """Whether the agent can read the Node's labels. Without a scheduler it asks no API server.

        No profile and no file of HAMi's sets that.
        """
        layers = (self.own.settings, self.surroundings.settings, self.held)
        values = {one.field.key: one.value for layer in layers for one in layer}
        return values.get(SCHEDULER) != "none"

    def settings(self, facts: NodeFacts) -> Settings:
        """Build the sections of a node. Its name is from `facts`, else the sources, else the host.

        Raises SettingsError: the values do not fit these GPUs.
        """
        name = facts.name or self.name
        values = self.resolve(msgspec.structs.replace(facts, name=name))
        return build(
            values,
            host_name=name,
            gpus=max(1, len(facts.gpus or ())),
            knows_requests=bool(self.device_config.settings),
        )

    def resolve(self, facts: NodeFacts) -> Values:
        """The values of a node with these facts."""
        if not self.labelled:
            facts = msgspec.structs.replace(facts, labels=None)
        applied = self.profiles.of(facts)
        values = self.of_all_nodes()
        profiled = (profile.settings for profile in applied)
        for settings in (*profiled, self.surroundings.settings, self.held):
            values.update({setting.field.key: setting for setting in settings})
        return Values(values, tuple(one.name for one in applied if not one.match.exact))

    def of_all_nodes(self) -> dict[str, Setting]:
        """The values of all nodes before profiles, environment and flags apply, by key."""
        values = {field.key: Setting(field, field.default, DEFAULT) for field in FIELDS}
        for layer in (self.device_config, self.own):
            values.update({setting.field.key: setting for setting in layer.settings})
        return values

    @property
    def name(self) -> str:
        """The node's name from the sources, else the host's name."""
        return str(self.resolve(NodeFacts())[NODE_NAME].value or self.sources.host)

    def fixed(self) -> Mapping[str, Value]:
        """The settings that take effect only at the start, by key. They do not depend on facts."""
        resolved = self.resolve(NodeFacts())
        values = {key: one.value for key, one in resolved.items() if not one.field.live}
        return values | {NODE_NAME: self.name}

    @property
    def wanted(self) -> "NodeValues":
        """What the sources say, with nothing held."""
        return dataclasses.replace(self, held=())

    def lasting(self) -> tuple[LastingSetting, ...]:
        """The settings that change only while no pod holds slices. No profile sets them."""
        resolved = self.resolve(NodeFacts())
        settings = (resolved[key] for key in (SCHEDULER, RESOURCE))
        return tuple(LastingSetting(s.field.key, str(s.value), s.origin) for s in settings)

    def undrained(self, ledger: Ledger) -> SettingsError | None:
        """Why some wanted settings must wait because of the rows of `ledger`; None: none must."""
        return undrained(self.wanted.lasting(), ledger, self.name)

    def keeping(self, ledger: Ledger) -> "NodeValues":
        """The wanted settings, but what the rows of `ledger` do not allow yet stays as it is."""
        values = kept(self.wanted.lasting(), ledger)
        held = tuple(Setting(BY_KEY[key], value, HELD) for key, value in values.items())
        return dataclasses.replace(self, held=held)

    def names(self) -> tuple[str, ...]:
        """The names of nodes in the files, each once, in the order of the files."""
        return tuple(dict.fromkeys(name for one in self.profiles for name in one.match.singles))


def make_plan(sources: Sources) -> NodeValues:
    """Merge all sources. Raises SettingsError with every error that they contain."""
    faults = Faults()
    device_config, own, node_config = _files(sources, faults)
    surroundings = read_surroundings(sources.environ, sources.flags, faults)
    faults.refuse()
    layers = (device_config, own, node_config, surroundings)
    plan = NodeValues(
        sources,
        *layers,
        warnings=tuple(text for layer in layers for text in layer.warnings),
        profiles=Profiles((*own.profiles, *node_config.profiles)),
    )
    ignored = IgnoredKeys("settings")
    for warning in _without_effect(plan):
        ignored.over(lambda: warning)  # noqa: B023 -- called at once
    for say in _overriding_nothing(plan):  # last: there may be one for each node
        ignored.over(say)
    return dataclasses.replace(plan, warnings=(*plan.warnings, *ignored.warnings))


def _files(sources: Sources, faults: Faults) -> tuple[Layer, Layer, Layer]:
    """Read HAMi's device-config.yaml, our own file and HAMi's config.json."""
    if sources.device_config is None and sources.own is None and sources.node_config is None:
        return Layer(), Layer(), Layer()
    # Late: the start of a node without files does not load YAML.
    from agent.settings.hami_files import read_device_layer, read_node_layer  # noqa: PLC0415
    from agent.settings.own_file import read_own_file  # noqa: PLC0415

    return (
        _read(sources.device_config, read_device_layer, faults),
        _read(sources.own, read_own_file, faults),
        _read(sources.node_config, read_node_layer, faults),
    )


def _read(
    source: SourceFile | None, read: Callable[[bytes, str, Faults], Layer], faults: Faults
) -> Layer:
    if source is not None:
        with faults.kept():
            return read(source.content, source.name, faults)
    return Layer()


def _without_effect(plan: NodeValues) -> Iterator[str]:
    """Warnings about what is valid and has no effect."""
    for profile in plan.own.profiles:
        if profile.match.labels is not None and not plan.labelled:
            yield (
                f"{profile.where}: the profile {cap(profile.name, 64)} never applies: it selects "
                "by labels, which the agent does not read with scheduler: none"
            )
    for setting in _all(plan):
        if setting.field.key in FILTERS and isinstance(setting.value, tuple):
            counts = Counter(setting.value)
            twice = [word for word, times in counts.items() if times > 1]
            if twice:
                yield f"{setting.origin}: {setting.field.key}: named twice: {cap(', '.join(twice))}"


def _overriding_nothing(plan: NodeValues) -> Iterator[Callable[[], str]]:
    """Warnings about a 0 or false of config.json on a node whose value differs from it.

    There is none if a flag or a variable sets the value: config.json cannot override that.
    """
    of_all = plan.of_all_nodes()
    decided = {setting.field.key for setting in plan.surroundings.settings}
    for profile in plan.node_config.profiles:
        for node, empty in itertools.product(profile.match.nodes, profile.empty):
            key = NODE_CONFIG[empty.key]
            candidates = _candidates(plan, node, of_all[key])
            if key not in decided and any(one.value != empty.value for one in candidates):
                yield partial(_overrides_nothing, empty, key, candidates)


def _candidates(plan: NodeValues, node: str, before: Setting) -> list[Setting]:
    """The values that the node may have for a setting; several if labels or GPUs decide."""
    candidates = [before]
    for profile in plan.profiles.naming(node):
        if profile.match.labels is not None and not plan.labelled:
            continue
        for one in profile.settings:
            if one.field is before.field:
                candidates = [one] if profile.match.by_name_alone else [*candidates, one]
    return candidates


def _overrides_nothing(empty: KnownKey, key: str, candidates: Sequence[Setting]) -> str:
    value = candidates[0]
    reason = f"{key} is {shown(value.value)} ({value.origin})"
    if len(candidates) > 1:
        reason = f"{key} depends on the profiles that the node's labels or GPUs select"
    text = f"{empty.where}: {empty.key} {shown(empty.value)}"
    return f"{text} overrides nothing, as in HAMi's plugin: {reason}"


def _all(plan: NodeValues) -> Iterator[Setting]:
    """Every setting of our own file, the profiles, the environment and the flags."""
    yield from plan.own.settings
    for profile in plan.profiles:
        yield from profile.settings
    yield from plan.surroundings.settings
