"""Translates HAMi's two files into settings: HAMi's keys, its order of precedence, our bounds."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from agent.codec.device_config import read_device_config
from agent.codec.faults import Faults
from agent.codec.known_keys import IgnoredKeys, KnownKey
from agent.codec.nodeconfig import ANY, SELECTOR, NodeEntry, read_nodeconfig
from agent.core.cluster.selector import Requirement, Selector
from agent.core.errors import cap
from agent.settings.fields import Setting, setting
from agent.settings.hami_keys import DEVICE_CONFIG, NODE_CAPACITY, NODE_CONFIG
from agent.settings.kinds import shown
from agent.settings.profiles import ProfileMatch, SettingsProfile, Tier
from agent.settings.sources import Layer
from agent.settings.table import BY_KEY, SECTIONS

WITHOUT_EFFECT: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    "migstrategy": (
        ("", "none"),
        "HAMi's plugin does not use it either, and the agent does not share MIG instances yet",
    ),
    "enablegetpreferredallocation": (
        (True,),
        "the agent always tells the kubelet which slices fit the scheduler's choice",
    ),
    "reportnodecapacity": ((False,), NODE_CAPACITY),
}
"""Key of config.json → values that need no warning, and why the others have no effect."""

FILTER: Final = "filterdevices"
OPERATORS: Final = frozenset({"In", "NotIn", "Exists", "DoesNotExist"})
REMOTE: Final = ("operatingmode", "remote")


def read_device_layer(content: bytes, name: str, faults: Faults) -> Layer:
    """Read what device-config.yaml sets for all nodes. Wrong values go to `faults`.

    Raises SettingsError with the place: the file cannot be parsed.
    """
    config = read_device_config(content, name, faults)
    settings: list[Setting] = []
    for known in config.found:
        if known.key in DEVICE_CONFIG:
            with faults.kept():
                settings.append(setting(BY_KEY[DEVICE_CONFIG[known.key]], known.value, known.where))
    ours = tuple(
        f"{where}: {key} has no effect in HAMi's file; it belongs in the agent's own config.yaml"
        for key, where in config.others.items()
        if key in SECTIONS
    )
    warnings = (*config.warnings, *_without_effect(config.found), *ours)
    return Layer(tuple(settings), warnings=warnings)


def read_node_layer(content: bytes, name: str, faults: Faults, node: str = "") -> Layer:
    """Read what config.json sets for some nodes: profiles for each entry; a later one wins.

    The warnings about entries of `node` come first.

    Values of a wrong type go to `faults`. Values that do not fit are warnings; the profile has them
    too. Raises SettingsError with the place: the file cannot be parsed.
    """
    config = read_nodeconfig(content, name, faults, node)
    ignored = IgnoredKeys(name)
    profiles = tuple(one for entry in config.entries for one in _profiles(entry, ignored))
    unfit = dict.fromkeys(text for one in profiles for text in one.faults.texts)
    for warning in (*_warnings(config.entries), *unfit):
        ignored.over(lambda: warning)  # noqa: B023 -- called at once
    in_order = sorted(profiles, key=lambda one: [int(n) for n in one.where.split(":")[-2:]])
    return Layer(profiles=tuple(in_order), warnings=(*config.warnings, *ignored.warnings))


def _profiles(entry: NodeEntry, ignored: IgnoredKeys) -> Iterator[SettingsProfile]:
    """The entry's profiles, one for each tier that it is in; none if it selects no node."""
    others = ProfileMatch(tier=Tier.ANY)
    named = others if entry.name == ANY else ProfileMatch((entry.name,), tier=Tier.NAME)
    matches = [named] if entry.name else []
    for known in entry.found:
        if known.key == SELECTOR and isinstance(known.value, dict):
            try:
                matches.append(ProfileMatch(labels=_selector(known.value), tier=Tier.LABELS))
            except ValueError as error:
                why = f"{known.where}: {SELECTOR} selects no node: {error}"
                ignored.over(lambda: why)  # noqa: B023 -- called at once
    faults = Faults()
    settings = tuple(_overrides(entry.found, faults))
    empty = tuple(one for one in entry.found if one.key in NODE_CONFIG and one.value in (0, False))
    for match in matches:
        yield SettingsProfile("", match, settings, entry.where, empty, faults)


def _selector(parts: Mapping[str, Any]) -> Selector | None:
    """None: every node. Raises ValueError: Kubernetes' LabelSelectorAsSelector refuses it."""
    found = [Requirement(key, (value,)) for key, value in parts.get("matchlabels", {}).items()]
    for one in parts.get("matchexpressions", ()):
        key, operator, values = one.get("key"), one.get("operator"), one.get("values", ())
        if not key or operator not in OPERATORS or bool(values) is not operator.endswith("In"):
            raise ValueError(f"{key}, {operator} and {len(values)} values are no requirement")
        found.append(Requirement(key, values, operator in {"In", "Exists"}))
    for one in found:
        if not one.is_valid:
            raise ValueError(f"{cap(one.key, 64)}: the key or a value is not one of a label")
    return Selector(tuple(found)) if found else None


def _warnings(entries: Iterable[NodeEntry]) -> Iterator[str]:
    """What is valid and may not be what the operator meant."""
    first: dict[str, str] = {}
    for entry in entries:
        place = first.setdefault(entry.name, entry.where)
        if entry.name and place != entry.where:
            yield (
                f"{entry.where}: the name {cap(entry.name, 64)} is also at {place}; both entries "
                "apply, and this one wins where they differ, as in HAMi's plugin"
            )
        yield from _without_effect(entry.found)
        for known in entry.found:
            if (known.key, known.value) == REMOTE:
                yield f"{known.where}: remote means hami-core; for remote GPUs keep HAMi's plugin"


def _without_effect(found: Iterable[KnownKey]) -> Iterator[str]:
    for known in found:
        silent, reason = WITHOUT_EFFECT.get(known.key.lower(), ((known.value,), ""))
        if known.value not in silent:
            yield f"{known.where}: {known.key} {shown(known.value)} has no effect: {reason}"


def _overrides(entries: Iterable[KnownKey], faults: Faults) -> Iterator[Setting]:
    """The settings of an entry. An empty value (0, "", false) overrides nothing, as in HAMi."""
    for known in entries:
        with faults.kept():
            if known.key == FILTER:
                yield from _filter(known)
            elif known.key in NODE_CONFIG and known.value:
                value = "hami-core" if (known.key, known.value) == REMOTE else known.value
                yield setting(BY_KEY[NODE_CONFIG[known.key]], value, known.where)


def _filter(known: KnownKey) -> Iterator[Setting]:
    """Both filter lists, as HAMi takes them; nothing if both are empty."""
    lists = known.value if isinstance(known.value, dict) else {}
    if any(lists.values()):
        for key, name in (("uuid", "sharing.filterUUIDs"), ("index", "sharing.filterIndexes")):
            yield setting(BY_KEY[name], list(lists.get(key, ())), known.where)
