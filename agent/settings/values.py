"""What all sources say of any node: values with their origins, and the sections made of them.

A refused source is refused whole, with its place and the mend.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from agent.codec.faults import Faults
from agent.codec.known_keys import IgnoredKeys, KnownKey
from agent.core.errors import SettingsError, cap
from agent.core.node.drained import RESOURCE, SCHEDULER, LastingSetting, undrained
from agent.core.state.last_good import SourceFile
from agent.core.state.ledger import Ledger
from agent.settings.fields import DEFAULT, Setting, Values
from agent.settings.hami_files import NODE_CONFIG, read_device_layer, read_node_layer
from agent.settings.kinds import Value, shown
from agent.settings.own_file import read_own_file
from agent.settings.profiles import NodeFacts, Profiles
from agent.settings.sections import Settings, build
from agent.settings.sources import Layer, Sources
from agent.settings.surroundings import read_surroundings
from agent.settings.table import FIELDS

FILTERS: Final = frozenset({"sharing.filterUUIDs", "sharing.filterIndexes"})
"""Lists of GPUs, of which each is named once."""
NODE_NAME: Final = "node.name"


@dataclasses.dataclass(frozen=True, slots=True)
class NodeValues:
    """What the sources say of every node. `warnings`: what was passed over, with its place.

    `labelled`: labels of nodes can be known. Without a scheduler there is no API server to ask.
    `profiles` has those of our own file, then the entries of HAMi's.
    """

    sources: Sources
    device_config: Layer
    own: Layer
    node_config: Layer
    surroundings: Layer
    labelled: bool
    warnings: tuple[str, ...]
    profiles: Profiles = dataclasses.field(compare=False, repr=False)

    def settings(self, facts: NodeFacts) -> Settings:
        """The sections of the node that `facts` name, else the sources, else its host.

        Raises SettingsError: values do not go together, or not with these GPUs.
        """
        name = facts.name or self.name
        values = self.resolve(dataclasses.replace(facts, name=name))
        return build(values, host_name=name, gpus=max(1, len(facts.gpus or ())))

    def resolve(self, facts: NodeFacts) -> Values:
        """The values of a node with these facts: the same facts, the same values."""
        if not self.labelled:
            facts = dataclasses.replace(facts, labels=None)
        applied = self.profiles.of(facts)
        found = self.of_all_nodes()
        for settings in (*(one.settings for one in applied), self.surroundings.settings):
            found.update({one.field.key: one for one in settings})
        return Values(found, tuple(one.name for one in applied if not one.match.exact))

    def of_all_nodes(self) -> dict[str, Setting]:
        """What all nodes have before what is said of some of them, by key."""
        found = {field.key: Setting(field, field.default, DEFAULT) for field in FIELDS}
        for layer in (self.device_config, self.own):
            found.update({one.field.key: one for one in layer.settings})
        return found

    @property
    def name(self) -> str:
        """The node's name, by the sources or by its host."""
        return str(self.resolve(NodeFacts())[NODE_NAME].value or self.sources.host)

    def fixed(self) -> Mapping[str, Value]:
        """The settings that act at the start alone, the same for all facts, by key."""
        found = self.resolve(NodeFacts())
        values = {key: one.value for key, one in found.items() if not one.field.live}
        return values | {NODE_NAME: self.name}

    def lasting(self) -> tuple[LastingSetting, ...]:
        """The settings that need a drained node to change. No profile sets them."""
        found = self.resolve(NodeFacts())
        settings = (found[key] for key in (SCHEDULER, RESOURCE))
        return tuple(LastingSetting(s.field.key, str(s.value), s.origin) for s in settings)

    def undrained(self, ledger: Ledger) -> SettingsError | None:
        """Why these settings are refused while `ledger` has its rows; None: they are not."""
        return undrained(self.lasting(), ledger, self.name)

    def names(self) -> tuple[str, ...]:
        """The nodes that the files name, each once, in the order of the files."""
        return tuple(dict.fromkeys(name for one in self.profiles for name in one.match.singles))


def make_plan(sources: Sources) -> NodeValues:
    """Read all sources. Raises SettingsError with all that is wrong; then nothing is used."""
    faults = Faults()
    device_config = _read(sources.device_config, read_device_layer, faults)
    own = _read(sources.own, read_own_file, faults)
    node_config = _read(sources.node_config, read_node_layer, faults)
    surroundings = read_surroundings(sources.environ, sources.flags, faults)
    faults.refuse()
    layers = (device_config, own, node_config, surroundings)
    plan = NodeValues(
        sources,
        *layers,
        labelled=_has_scheduler((*own.settings, *surroundings.settings)),
        warnings=tuple(text for layer in layers for text in layer.warnings),
        profiles=Profiles((*own.profiles, *node_config.profiles)),
    )
    passed = IgnoredKeys("settings")
    for sentence in _passed_over(plan):
        passed.over(lambda: sentence)  # noqa: B023 -- said at once
    for say in _overriding_nothing(plan):  # last: there may be one for each node
        passed.over(say)
    return dataclasses.replace(plan, warnings=(*plan.warnings, *passed.warnings))


def _read(
    source: SourceFile | None, read: Callable[[bytes, str, Faults], Layer], faults: Faults
) -> Layer:
    if source is not None:
        with faults.kept():
            return read(source.content, source.name, faults)
    return Layer()


def _has_scheduler(settings: Iterable[Setting]) -> bool:
    """No profile sets it and no file of HAMi's: it is the same for all nodes."""
    return {one.field.key: one.value for one in settings}.get("scheduler") != "none"


def _passed_over(plan: NodeValues) -> Iterator[str]:
    """What is no mistake and has no effect."""
    for one in plan.own.profiles:
        if one.match.labels is not None and not plan.labelled:
            name = cap(one.name, 64)
            yield (
                f"{one.where}: the profile {name} never applies: it asks for labels, which nobody "
                "knows with scheduler: none"
            )
    for setting in _all(plan):
        if setting.field.key in FILTERS and isinstance(setting.value, tuple):
            counts = Counter(setting.value)
            twice = [word for word, times in counts.items() if times > 1]
            if twice:
                yield f"{setting.origin}: {setting.field.key}: twice there: {cap(', '.join(twice))}"


def _overriding_nothing(plan: NodeValues) -> Iterator[Callable[[], str]]:
    """The zeros and falses of config.json where the node has something else all the same.

    Not where a flag or a variable decides: there another value would override nothing, either.
    """
    of_all = plan.of_all_nodes()
    decided = {one.field.key for one in plan.surroundings.settings}
    for profile in plan.node_config.profiles:
        for node, one in itertools.product(profile.match.nodes, profile.empty):
            key = NODE_CONFIG[one.key]
            may_hold = _may_hold(plan, node, of_all[key])
            if key not in decided and any(holds.value != one.value for holds in may_hold):
                yield partial(_overrides_nothing, one, key, may_hold)


def _may_hold(plan: NodeValues, node: str, before: Setting) -> list[Setting]:
    """What the node may have for that setting; more than one where labels or GPUs decide."""
    found = [before]
    for profile in plan.profiles.naming(node):
        if profile.match.labels is not None and not plan.labelled:
            continue
        for one in profile.settings:
            if one.field is before.field:
                found = [one] if profile.match.by_name_alone else [*found, one]
    return found


def _overrides_nothing(one: KnownKey, key: str, may_hold: Sequence[Setting]) -> str:
    holds = may_hold[0]
    told = f"{key} is {shown(holds.value)} ({holds.origin})"
    if len(may_hold) > 1:
        told = f"which profiles apply, and so {key}, depends on the node's labels or GPUs"
    return (
        f"{one.where}: {one.key} {shown(one.value)} overrides nothing, as in HAMi's plugin: {told}"
    )


def _all(plan: NodeValues) -> Iterator[Setting]:
    """Every setting of our own file, of each node, of the environment and of the flags."""
    yield from plan.own.settings
    for profile in plan.profiles:
        yield from profile.settings
    yield from plan.surroundings.settings
