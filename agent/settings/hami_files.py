"""Translates HAMi's two files into settings: HAMi's keys, its order of precedence, our bounds."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from agent.codec.device_config import read_device_config
from agent.codec.faults import Faults
from agent.codec.known_keys import IgnoredKeys, KnownKey
from agent.codec.nodeconfig import NodeEntry, read_nodeconfig
from agent.core.errors import cap
from agent.settings.fields import Setting, setting
from agent.settings.hami_keys import DEVICE_CONFIG, NODE_CONFIG
from agent.settings.kinds import shown
from agent.settings.profiles import ProfileMatch, SettingsProfile
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
}
"""Key of config.json → values that need no warning, and why the others have no effect."""

FILTER: Final = "filterdevices"


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
    return Layer(tuple(settings), warnings=(*config.warnings, *ours))


def read_node_layer(content: bytes, name: str, faults: Faults) -> Layer:
    """Read what config.json sets for some nodes: one profile for each entry; a later one wins.

    Wrong values go to `faults`. Raises SettingsError with the place: the file cannot be parsed.
    """
    config = read_nodeconfig(content, name, faults)
    profiles = tuple(_profile(entry, faults) for entry in config.entries)
    ignored = IgnoredKeys(name)
    for warning in _warnings(config.entries):
        ignored.over(lambda: warning)  # noqa: B023 -- called at once
    return Layer(profiles=profiles, warnings=(*config.warnings, *ignored.warnings))


def _profile(entry: NodeEntry, faults: Faults) -> SettingsProfile:
    """The profile of an entry. An entry without a name applies to no node."""
    names = (entry.name,) if entry.name else ()
    empty = (one for one in entry.found if one.key in NODE_CONFIG and one.value in (0, False))
    return SettingsProfile(
        name="",
        match=ProfileMatch(names, exact=True),
        settings=tuple(_overrides(entry.found, faults)),
        where=entry.where,
        empty=tuple(empty),
    )


def _warnings(entries: Iterable[NodeEntry]) -> Iterator[str]:
    """What is valid and may not be what the operator meant."""
    first: dict[str, str] = {}
    for entry in entries:
        place = first.setdefault(entry.name, entry.where)
        if entry.name and place != entry.where:
            yield (
                f"{entry.where}: the node {cap(entry.name, 64)} is also named at {place}; both "
                "entries apply, and this one wins where they differ, as in HAMi's plugin"
            )
        for known in entry.found:
            silent, reason = WITHOUT_EFFECT.get(known.key, ((known.value,), ""))
            if known.value not in silent:
                yield f"{known.where}: {known.key} {shown(known.value)} has no effect: {reason}"


def _overrides(entries: Iterable[KnownKey], faults: Faults) -> Iterator[Setting]:
    """The settings of an entry. An empty value (0, "", false) overrides nothing, as in HAMi."""
    for known in entries:
        with faults.kept():
            if known.key == FILTER:
                yield from _filter(known)
            elif known.key in NODE_CONFIG and known.value:
                yield setting(BY_KEY[NODE_CONFIG[known.key]], known.value, known.where)


def _filter(known: KnownKey) -> Iterator[Setting]:
    """Both filter lists, as HAMi takes them; nothing if both are empty."""
    lists = known.value if isinstance(known.value, dict) else {}
    if any(lists.values()):
        for key, name in (("uuid", "sharing.filterUUIDs"), ("index", "sharing.filterIndexes")):
            yield setting(BY_KEY[name], list(lists.get(key, ())), known.where)
