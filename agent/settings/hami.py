"""Reads HAMi's two files as settings: `device-config.yaml` for all nodes, `config.json` for some.

Keys, types and precedence are those of HAMi's readers in Go (yaml.v2 and encoding/json): null is
absent, and one value of the wrong type refuses the file. What these accept and no operator means is
refused too: a repeated key, an alias, a second document, a fraction in place of a whole number, an
infinite number. So is what is a number, boolean or key to Go alone: `08`, `0o17`, `1e+06`, `y`, a
key that is a number. A warning names each unknown key. A shape says what a file may contain.
Source: HAMi v2.10, the ConfigMap `<release>-scheduler-device` and the device plugin's
/config/config.json; HAMi #3173 for selectors and tiers.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
import yaml

from agent.cluster import Requirement, Selector
from agent.errors import MalformedText, SettingsError, cap
from agent.hami.annotations import INT32, INT64, UINT64
from agent.ledger import SourceFile
from agent.setting import shown
from agent.settings.files import Place, first_of, kept, read_json, read_yaml, refuse
from agent.settings.schema import BY_KEY, SECTIONS, Setting, read_setting
from agent.settings.sources import SettingsProfile, Tier

# The shapes. A pair of numbers is a whole number between them, a list is one of values of that
# shape, and a dict has these keys; ANY_KEY stands for every other one.

ANY_KEY: Final = ""
TEXTS: Final = [str]
EXPECTED: Final = {str: "text", bool: "true or false", float: "a number"}
"""The words for a shape in messages; the others are a whole number."""

DEVICE_SHAPE: Final[Mapping[str, object]] = {
    **dict.fromkeys(("resourceCountName", "resourceMemoryName", "resourceCoreName"), str),
    **dict.fromkeys(("resourceMemoryPercentageName", "resourcePriorityName"), str),
    **dict.fromkeys(("libCudaLogLevel", "gpuCorePolicy", "runtimeClassName"), str),
    **dict.fromkeys(("defaultMemory", "defaultCores", "defaultGPUNum", "memoryFactor"), INT32),
    **dict.fromkeys(("overwriteEnv", "enableNumaTopology", "disableCoreLimit"), bool),
    "reportNodeCapacity": bool,
    "deviceMemoryScaling": float,
    "deviceCoreScaling": float,
    "deviceSplitCount": UINT64,
    "preConfiguredDeviceMemory": INT64,
    "migProfileAllowlist": [{"models": TEXTS, "profiles": TEXTS}],
    "knownMigGeometries": [
        {
            "models": TEXTS,
            "allowedGeometries": [[{"name": str, "core": INT32, "memory": INT32, "count": INT32}]],
        }
    ],
}
"""The section `nvidia` of device-config.yaml."""

NODE_SHAPE: Final[Mapping[str, object]] = {
    "name": str,
    "operatingmode": str,
    "devicesplitcount": UINT64,
    "devicememoryscaling": float,
    "devicecorescaling": float,
    "preconfigureddevicememory": INT64,
    "libcudaloglevel": str,
    "enablenumatopology": bool,
    "filterdevices": {"uuid": TEXTS, "index": [UINT64]},
    "migstrategy": str,
    "enablegetpreferredallocation": bool,
    "reportnodecapacity": bool,
    "nodelabelselector": {
        "matchlabels": {ANY_KEY: str},
        "matchexpressions": [{"key": str, "operator": str, "values": TEXTS}],
    },
}
"""An entry of config.json, by its keys in lower case."""

DEVICE_CONFIG: Final[Mapping[str, str]] = {
    "resourceCountName": "sharing.resourceName",
    "resourceMemoryName": "sharing.memoryResourceName",
    "resourceMemoryPercentageName": "sharing.memoryPercentResourceName",
    "resourceCoreName": "sharing.coreResourceName",
    "memoryFactor": "sharing.memoryFactor",
    "defaultMemory": "sharing.defaultMemoryMiB",
    "defaultCores": "sharing.defaultCorePercent",
    "deviceSplitCount": "sharing.splitCount",
    "deviceMemoryScaling": "sharing.memoryScaling",
    "deviceCoreScaling": "sharing.coreScaling",
    "preConfiguredDeviceMemory": "sharing.preconfiguredMemoryMiB",
    "enableNumaTopology": "sharing.numaTopology",
    "libCudaLogLevel": "library.cudaLogLevel",
    "disableCoreLimit": "library.disableCoreLimit",
    "gpuCorePolicy": "library.corePolicy",
}
"""Key of device-config.yaml → setting. The other keys are for scheduler, webhook or MIG."""

NODE_CONFIG: Final[Mapping[str, str]] = {
    "operatingmode": "sharing.operatingMode",
    "devicesplitcount": "sharing.splitCount",
    "devicememoryscaling": "sharing.memoryScaling",
    "devicecorescaling": "sharing.coreScaling",
    "preconfigureddevicememory": "sharing.preconfiguredMemoryMiB",
    "libcudaloglevel": "library.cudaLogLevel",
    "enablenumatopology": "sharing.numaTopology",
}
"""Key of config.json, in lower case → setting."""

WITHOUT_EFFECT: Final[Mapping[str, tuple[object, ...]]] = {
    "migstrategy": ("", "none"),
    "enablegetpreferredallocation": (True,),
    "reportnodecapacity": (False,),
}
"""Keys, in lower case, that the agent does not follow → values that ask for what it does anyway."""

SECTION: Final = "nvidia"

NODES: Final = "nodeconfig"
ANY: Final = "*"
"""The name in the entries of nodes that no other entry selects."""

SELECTOR: Final = "nodelabelselector"
FILTER: Final = "filterdevices"

REMOTE: Final = ("operatingmode", "remote")

Found = dict[str, tuple[Any, str]]
"""Known keys of a file of HAMi's, each with its value and place (`file:line:column`)."""


class FileReader:
    """Reads one file by the rules of Go's reader, which takes null for absent.

    In JSON the case of keys does not count. `errors`: values of a wrong type. `warnings`: unknown
    keys.
    """

    def __init__(self, errors: list[str]) -> None:
        self.errors = errors
        self.warnings: list[str] = []

    def keys(self, place: Place, shape: Mapping[str, object]) -> Found:
        """The known keys of a mapping in their order."""
        found: Found = {}
        any_case = place.is_json and ANY_KEY not in shape
        with kept(self.errors):
            for key, here, value in place.pairs(str.lower if any_case else str):
                if key not in shape and ANY_KEY not in shape:
                    self.warnings.append(str(here.fault(f"unknown key `{cap(key, 64)}`")))
                elif key not in shape or not value.null:
                    inner = shape[key if key in shape else ANY_KEY]
                    with kept(self.errors):
                        found[key] = self.value(value, inner), value.where
        return found

    def value(self, place: Place, shape: Any) -> Any:  # noqa: ANN401 -- what the shape says
        """A value of this shape. Raises SettingsError: it has another one."""
        if shape is Place:
            return place

        if isinstance(shape, Mapping):
            found = {} if place.null else self.keys(place, shape)
            return {key: value for key, (value, _) in found.items()}

        if isinstance(shape, list):
            values = []
            for item in () if place.null else place.items():
                with kept(self.errors):
                    values.append(self.value(item, shape[0]))
            return tuple(values)

        is_scalar = isinstance(place.node, yaml.ScalarNode)
        value: Any = place.value() if is_scalar else None
        wrong = f"{EXPECTED.get(shape, 'a whole number')} is expected, not {place.shown()}"
        if shape is str:
            # In YAML every scalar is a text, as it is written.
            if not is_scalar or (place.is_json and not isinstance(value, str | None)):
                raise place.fault(wrong)
            return "" if place.null else str(place.node.value)

        if shape is bool or isinstance(value, bool):
            if shape is not bool or not isinstance(value, bool):
                raise place.fault(wrong)
            return value

        # `1:30` is a text to Go, and 90 to PyYAML. HAMi also accepts an infinite number, which can
        # scale nothing, and silently drops a fraction where a whole number is meant.
        is_number = isinstance(value, int | float) and ":" not in place.node.value
        if (
            not is_number
            or not abs(value) <= sys.float_info.max
            or (shape is not float and value % 1)
        ):
            raise place.fault(wrong)
        if shape is float:
            return value
        if not shape[0] <= value <= shape[1]:
            raise place.fault(f"{place.shown()} is not between {shape[0]} and {shape[1]}")
        return int(value)


def read_device_config(file: SourceFile, errors: list[str], warnings: list[str]) -> list[Setting]:
    """What device-config.yaml sets for all nodes. Wrong values go to `errors`.

    Only the section `nvidia` is read; the others are of other vendors. Raises SettingsError with
    the place: the file cannot be parsed.
    """
    document = read_yaml(file.content, file.name)
    pairs = () if document.null else document.pairs()
    sections = {key: (here, value) for key, here, value in pairs}
    reader, found = FileReader(errors), Found()

    if SECTION in sections and not sections[SECTION][1].null:
        found = reader.keys(sections[SECTION][1], DEVICE_SHAPE)
    else:
        reader.warnings.append(f"{file.name}: there is no section {SECTION}; nothing is taken")

    settings: list[Setting] = []
    for key, (value, where) in found.items():
        if key in DEVICE_CONFIG:
            with kept(errors):
                settings.append(read_setting(BY_KEY[DEVICE_CONFIG[key]], value, where))

    ours = [
        f"{here.where}: {key} has no effect in HAMi's file; it belongs in the agent's own "
        "config.yaml"
        for key, (here, _) in sections.items()
        if key in SECTIONS
    ]
    warnings += [*first_of(reader.warnings, file.name), *_without_effect(found), *ours]
    return settings


def read_node_config(
    file: SourceFile, errors: list[str], warnings: list[str]
) -> list[SettingsProfile]:
    """What config.json sets for some nodes: profiles for each entry; a later one wins.

    Values of a wrong type go to `errors`. Values that do not fit are warnings; the profile has them
    too. Raises SettingsError with the place: the file cannot be parsed.
    """
    reader = FileReader(errors)
    profiles: list[SettingsProfile] = []
    for item in _entries(file.content, file.name, reader):
        found = {} if item.null else reader.keys(item, NODE_SHAPE)
        name = str(found["name"][0]) if "name" in found else ""
        profiles += _profiles(item, name, found, reader.warnings)
    warnings += first_of(reader.warnings, file.name)
    return profiles


def decode_nodeconfig(text: str) -> tuple[Mapping[str, object], ...]:
    """Decode the entries in their order, each with its known keys in lower case.

    Raises:
        MalformedText: not a JSON object, or a value of another type or range.
    """
    reader = FileReader([])
    try:
        items = _entries(text.encode(errors="replace"), NODES, reader)
        entries = tuple(reader.value(item, NODE_SHAPE) for item in items)
        refuse(reader.errors)
    except SettingsError as error:
        raise MalformedText(str(error)) from error
    return entries


def _entries(content: bytes, name: str, reader: FileReader) -> tuple[Place, ...]:
    """The entries, unread. Raises SettingsError: the file cannot be parsed."""
    document = read_json(content, name)
    found = reader.keys(document, {NODES: Place})
    if NODES in found:
        nodes: Place = found[NODES][0]
        return nodes.items()
    reader.warnings.append(str(document.fault(f"`{NODES}` has no entries; nothing is taken")))
    return ()


def _profiles(
    item: Place, name: str, found: Found, warnings: list[str]
) -> Iterator[SettingsProfile]:
    """The profiles of an entry, one for each tier that it is in; none if it selects no node."""
    faults, settings = list[str](), list[Setting]()
    for key, (value, where) in found.items():
        # As in HAMi, an empty value (0, "", false) overrides nothing, and neither does a filter
        # whose lists are both empty. Of another filter both lists are taken.
        wanted: dict[str, object] = {}
        if key == FILTER and any(value.values()):
            wanted["sharing.filterUUIDs"] = list(value.get("uuid", ()))
            wanted["sharing.filterIndexes"] = list(value.get("index", ()))
        elif key in NODE_CONFIG and value:
            wanted[NODE_CONFIG[key]] = "hami-core" if (key, value) == REMOTE else value
        for setting, one in wanted.items():
            with kept(faults):
                settings.append(read_setting(BY_KEY[setting], one, where))
    profile = SettingsProfile("", item.where, tuple(settings), faults=tuple(faults))

    if name == ANY:
        yield msgspec.structs.replace(profile, tier=Tier.ANY)
    elif name:
        yield msgspec.structs.replace(profile, nodes=(name,), tier=Tier.NAME)
        if not re.fullmatch("[a-z0-9.-]+", name):
            exact = "names are compared as they are; patterns work in the profiles of config.yaml"
            warnings.append(str(item.fault(f"no Node is called {cap(name)}: {exact}")))
    elif SELECTOR not in found:
        warnings.append(str(item.fault(f"an entry without name and {SELECTOR} is of no node")))

    if SELECTOR in found:
        parts, where = found[SELECTOR]
        try:
            requirements = _requirements(parts)
        except ValueError as error:
            warnings.append(f"{where}: {SELECTOR} selects no node: {error}")
        else:
            # Without requirements it selects every node, whatever its labels.
            labels = Selector(requirements) if requirements else None
            yield msgspec.structs.replace(profile, labels=labels, tier=Tier.LABELS)

    warnings += [*_without_effect(found), *faults]


def _requirements(parts: Mapping[str, Any]) -> tuple[Requirement, ...]:
    """Raises ValueError: Kubernetes' LabelSelectorAsSelector refuses the selector."""
    found = [Requirement(key, (value,)) for key, value in parts.get("matchlabels", {}).items()]

    for one in parts.get("matchexpressions", ()):
        key, operator, values = one.get("key", ""), one.get("operator"), one.get("values", ())
        is_known = operator in {"In", "NotIn", "Exists", "DoesNotExist"}
        if not is_known or bool(values) is not operator.endswith("In"):
            raise ValueError(f"{key}, {operator} and {len(values)} values are no requirement")
        found.append(Requirement(key, values, operator in {"In", "Exists"}))

    if not all(one.is_valid for one in found):
        raise ValueError("a key or a value is not one of a label")
    return tuple(found)


def _without_effect(found: Found) -> Iterator[str]:
    for key, (value, where) in found.items():
        if value not in WITHOUT_EFFECT.get(key.lower(), (value,)):
            yield f"{where}: {key} {shown(value)} has no effect here"
        if (key, value) == REMOTE:
            yield f"{where}: remote means hami-core; for remote GPUs keep HAMi's plugin"
