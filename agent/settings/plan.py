"""All sources joined: what they say of any node, from their bytes and the node's facts alone.

Order, later wins: defaults, HAMi's device-config.yaml, our own file, its profiles in their order,
HAMi's config.json for this node, the environment, flags. A refused source is refused whole, with
its place and the mend.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

from agent.codec.faults import Faults
from agent.codec.known_keys import Found, Passed
from agent.core.errors import cap
from agent.core.last_good import SourceFile
from agent.settings.fields import DEFAULT, Effective, Setting
from agent.settings.hami_files import (
    NODE_CONFIG,
    Layer,
    NodeLayer,
    read_device_layer,
    read_node_layer,
)
from agent.settings.kinds import shown
from agent.settings.own_file import OwnFile, read_own_file
from agent.settings.profiles import WILD, NodeFacts, Profiles
from agent.settings.surroundings import ignored, read_environment, read_flags
from agent.settings.table import FIELDS

T = TypeVar("T")

Text = SourceFile
"""A file as it was read."""

FILTERS: Final = frozenset({"sharing.filterUUIDs", "sharing.filterIndexes"})
"""Lists of GPUs, of which each is named once."""


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
    """What the sources say of every node. `warnings`: what was passed over, with its place.

    `labelled`: labels of nodes can be known. Without a scheduler there is no API server to ask.
    `profiles` and `by_name`: the profiles, and what config.json says, sorted by nodes' names.
    """

    device_config: Layer
    own: OwnFile
    node_config: NodeLayer
    surroundings: tuple[Setting, ...]
    warnings: tuple[str, ...]
    labelled: bool
    profiles: Profiles = dataclasses.field(compare=False, repr=False)
    by_name: Mapping[str, tuple[Setting, ...]] = dataclasses.field(compare=False, repr=False)

    def resolve(self, facts: NodeFacts) -> Resolved:
        """The settings of a node with these facts: the same facts, the same settings."""
        if not self.labelled:
            facts = dataclasses.replace(facts, labels=None)
        applied = self.profiles.of(facts)
        layers = (
            *(profile.settings for profile in applied),
            self.by_name.get(facts.name, ()),
            self.surroundings,
        )
        found = self.of_all_nodes()
        for layer in layers:
            found.update({one.field.key: one for one in layer})
        return Resolved(found, tuple(profile.name for profile in applied))

    def of_all_nodes(self) -> dict[str, Setting]:
        """What all nodes have before what is said of some of them, by key."""
        found = {field.key: Setting(field, field.default, DEFAULT) for field in FIELDS}
        for layer in (self.device_config.settings, self.own.settings):
            found.update({one.field.key: one for one in layer})
        return found

    def names(self) -> tuple[str, ...]:
        """The nodes that the files name, each once, in the order of the files."""
        by_profile = (name for one in self.own.profiles for name in one.match.nodes)
        exact = (name for name in by_profile if not any(sign in name for sign in WILD))
        entries = (name for name, _ in self.node_config.entries if name)
        return tuple(dict.fromkeys((*exact, *entries)))


def make_plan(given: Given) -> Plan:
    """Read all sources. Raises SettingsError with all that is wrong; then nothing is used."""
    faults = Faults()
    device_config = _read(given.device_config, read_device_layer, Layer(), faults)
    own = _read(given.own, read_own_file, OwnFile(), faults)
    node_config = _read(given.node_config, read_node_layer, NodeLayer(), faults)
    environment = read_environment(given.environ, faults)
    surroundings = (*environment, *read_flags(given.flags, faults))
    faults.refuse()
    plan = Plan(
        device_config=device_config,
        own=own,
        node_config=node_config,
        surroundings=surroundings,
        warnings=(),
        labelled=_has_scheduler((*own.settings, *surroundings)),
        profiles=Profiles(own.profiles),
        by_name=node_config.by_name(),
    )
    warnings = (
        *device_config.warnings,
        *node_config.warnings,
        *ignored(given.environ, given.flags),
    )
    passed = Passed("settings")
    for sentence in _passed_over(plan):
        passed.over(lambda: sentence)  # noqa: B023 -- said at once
    for say in _overriding_nothing(plan):  # last: there may be one for each node
        passed.over(say)
    return dataclasses.replace(plan, warnings=(*warnings, *passed.warnings))


def _read(
    source: Text | None, read: Callable[[bytes, str, Faults], T], nothing: T, faults: Faults
) -> T:
    if source is not None:
        with faults.kept():
            return read(source.content, source.name, faults)
    return nothing


def _has_scheduler(settings: Iterable[Setting]) -> bool:
    """No profile sets it and no file of HAMi's: it is the same for all nodes."""
    return {one.field.key: one.value for one in settings}.get("scheduler") != "none"


def _passed_over(plan: Plan) -> Iterator[str]:
    """What is no mistake and has no effect."""
    for one in plan.own.profiles:
        if one.match.labels is not None and not plan.labelled:
            yield (
                f"{one.where}: the profile {cap(one.name, 64)} never applies: it asks for labels, "
                "which nobody knows with scheduler: none"
            )
    for setting in _all(plan):
        if setting.field.key in FILTERS and isinstance(setting.value, tuple):
            counts = Counter(setting.value)
            twice = [word for word, times in counts.items() if times > 1]
            if twice:
                yield f"{setting.origin}: {setting.field.key}: twice there: {cap(', '.join(twice))}"


def _overriding_nothing(plan: Plan) -> Iterator[Callable[[], str]]:
    """The zeros and falses of config.json where the node has something else all the same.

    Not where a flag or a variable decides: there another value would override nothing, either.
    """
    of_all = plan.of_all_nodes()
    decided = {one.field.key for one in plan.surroundings}
    for node, one in plan.node_config.empty:
        key = NODE_CONFIG[one.key]
        may_hold = _may_hold(plan, node, of_all[key])
        if key not in decided and any(holds.value != one.value for holds in may_hold):
            yield partial(_overrides_nothing, one, key, may_hold)


def _may_hold(plan: Plan, node: str, before: Setting) -> list[Setting]:
    """What the node may have for that setting; more than one where labels or GPUs decide."""
    found = [before]
    for profile in plan.profiles.naming(node):
        if profile.match.labels is not None and not plan.labelled:
            continue
        for one in profile.settings:
            if one.field is before.field:
                found = [one] if profile.match.by_name_alone else [*found, one]
    for one in plan.by_name.get(node, ()):
        if one.field is before.field:
            found = [one]
    return found


def _overrides_nothing(one: Found, key: str, may_hold: Sequence[Setting]) -> str:
    holds = may_hold[0]
    told = f"{key} is {shown(holds.value)} ({holds.origin})"
    if len(may_hold) > 1:
        told = f"which profiles apply, and so {key}, depends on the node's labels or GPUs"
    return (
        f"{one.where}: {one.key} {shown(one.value)} overrides nothing, as in HAMi's plugin: {told}"
    )


def _all(plan: Plan) -> Iterator[Setting]:
    """Every setting of every source."""
    yield from plan.own.settings
    for profile in plan.own.profiles:
        yield from profile.settings
    for _, settings in plan.node_config.entries:
        yield from settings
    yield from plan.surroundings
