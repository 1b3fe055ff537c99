"""HAMi's two files as settings: its keys, its rules of what overrides, our bounds."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from agent.codec.device_config import read_device_config
from agent.codec.faults import Faults
from agent.codec.known_keys import IgnoredKeys, KnownKey
from agent.codec.nodeconfig import NodeEntry, read_nodeconfig
from agent.core.errors import cap
from agent.settings.fields import Setting, setting
from agent.settings.kinds import shown
from agent.settings.profiles import ProfileMatch, SettingsProfile
from agent.settings.sources import Layer
from agent.settings.table import BY_KEY, SECTIONS

DEVICE_CONFIG: Final[Mapping[str, str]] = {
    "resourceCountName": "sharing.resourceName",
    "resourceMemoryName": "sharing.memoryResourceName",
    "deviceSplitCount": "sharing.splitCount",
    "deviceMemoryScaling": "sharing.memoryScaling",
    "deviceCoreScaling": "sharing.coreScaling",
    "preConfiguredDeviceMemory": "sharing.preconfiguredMemoryMiB",
    "enableNumaTopology": "sharing.numaTopology",
    "libCudaLogLevel": "library.cudaLogLevel",
    "disableCoreLimit": "library.disableCoreLimit",
    "gpuCorePolicy": "library.corePolicy",
}
"""Key of device-config.yaml → setting. The others are for scheduler and webhook, or for MIG."""

NODE_CONFIG: Final[Mapping[str, str]] = {
    "operatingmode": "sharing.operatingMode",
    "devicesplitcount": "sharing.splitCount",
    "devicememoryscaling": "sharing.memoryScaling",
    "devicecorescaling": "sharing.coreScaling",
    "preconfigureddevicememory": "sharing.preconfiguredMemoryMiB",
    "libcudaloglevel": "library.cudaLogLevel",
    "enablenumatopology": "sharing.numaTopology",
}
"""Key of config.json → setting."""

WITHOUT_EFFECT: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    "migstrategy": (
        ("", "none"),
        "HAMi's plugin does not use it either, and MIG instances are not shared yet",
    ),
    "enablegetpreferredallocation": (
        (True,),
        "the kubelet is always told which slices fit the scheduler's choice",
    ),
}
"""Key of config.json → values of which nothing is told, and why the others have no effect."""

FILTER: Final = "filterdevices"


def read_device_layer(content: bytes, name: str, faults: Faults) -> Layer:
    """What device-config.yaml sets for all nodes; wrong values go to `faults`.

    Raises SettingsError with the place: it cannot be read at all.
    """
    config = read_device_config(content, name, faults)
    settings: list[Setting] = []
    for one in config.found:
        if one.key in DEVICE_CONFIG:
            with faults.kept():
                settings.append(setting(BY_KEY[DEVICE_CONFIG[one.key]], one.value, one.where))
    ours = tuple(
        f"{where}: {key} has no effect in HAMi's file; it belongs in the agent's own config.yaml"
        for key, where in config.others.items()
        if key in SECTIONS
    )
    return Layer(tuple(settings), warnings=(*config.warnings, *ours))


def read_node_layer(content: bytes, name: str, faults: Faults) -> Layer:
    """What config.json sets for some nodes, a profile for each entry; later ones win.

    Wrong values go to `faults`. Raises SettingsError with the place: it cannot be read at all.
    """
    config = read_nodeconfig(content, name, faults)
    profiles = tuple(_profile(entry, faults) for entry in config.entries)
    passed = IgnoredKeys(name)
    for sentence in _told(config.entries):
        passed.over(lambda: sentence)  # noqa: B023 -- said at once
    return Layer(profiles=profiles, warnings=(*config.warnings, *passed.warnings))


def _profile(entry: NodeEntry, faults: Faults) -> SettingsProfile:
    """What an entry sets; one without a name is of no node."""
    names = (entry.name,) if entry.name else ()
    empty = (one for one in entry.found if one.key in NODE_CONFIG and one.value in (0, False))
    return SettingsProfile(
        name="",
        match=ProfileMatch(names, exact=True),
        settings=tuple(_overrides(entry.found, faults)),
        where=entry.where,
        empty=tuple(empty),
    )


def _told(entries: Iterable[NodeEntry]) -> Iterator[str]:
    """What is no mistake, and may not be what was meant."""
    first: dict[str, str] = {}
    for entry in entries:
        place = first.setdefault(entry.name, entry.where)
        if entry.name and place != entry.where:
            yield (
                f"{entry.where}: the node {cap(entry.name, 64)} is named at {place}, too; both "
                "entries count, and where they differ this one, as in HAMi's plugin"
            )
        for one in entry.found:
            silent, reason = WITHOUT_EFFECT.get(one.key, ((one.value,), ""))
            if one.value not in silent:
                yield f"{one.where}: {one.key} {shown(one.value)} has no effect: {reason}"


def _overrides(found: Iterable[KnownKey], faults: Faults) -> Iterator[Setting]:
    """What an entry sets: an empty value (0, "", false) overrides nothing, as in HAMi."""
    for one in found:
        with faults.kept():
            if one.key == FILTER:
                yield from _filter(one)
            elif one.key in NODE_CONFIG and one.value:
                yield setting(BY_KEY[NODE_CONFIG[one.key]], one.value, one.where)


def _filter(found: KnownKey) -> Iterator[Setting]:
    """Both lists at once, as HAMi takes them, unless both are empty."""
    lists = found.value if isinstance(found.value, dict) else {}
    if any(lists.values()):
        for key, name in (("uuid", "sharing.filterUUIDs"), ("index", "sharing.filterIndexes")):
            yield setting(BY_KEY[name], list(lists.get(key, ())), found.where)
