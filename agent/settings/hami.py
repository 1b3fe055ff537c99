"""Reads HAMi's two files as settings: `device-config.yaml` for all nodes, `config.json` for some.

Keys, types and precedence are those of HAMi's readers in Go (yaml.v2 and encoding/json): null is
absent, and one value of the wrong type refuses the file. What these accept and no operator means is
refused too: a repeated key, an alias, a second document, a fraction in place of a whole number, an
infinite number. So is what is a number, boolean or key to Go alone: `08`, `0o17`, `1e+06`, `y`, a
key that is a number. A warning names each unknown key.
Source: HAMi v2.10, the ConfigMap `<release>-scheduler-device` and the device plugin's
/config/config.json; HAMi #3173 for selectors and tiers.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import yaml

from agent.cluster import Requirement, Selector
from agent.errors import MalformedText, SettingsError, cap
from agent.hami.register import INT32, INT64, UINT64
from agent.setting import shown
from agent.settings.files import STR, Place, read_json, read_yaml, refuse_object
from agent.settings.schema import BY_KEY, SECTIONS, Setting, read_setting
from agent.settings.sources import (
    TOLD,
    Faults,
    Layer,
    ProfileMatch,
    SettingsProfile,
    Tier,
    first_of,
)

Reader = Callable[[Place], object]
"""Checks one value and returns it. Raises SettingsError with its place."""

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

OPERATORS: Final = frozenset({"In", "NotIn", "Exists", "DoesNotExist"})
REMOTE: Final = ("operatingmode", "remote")

_NAME: Final = re.compile("[a-z0-9.-]+")
"""The characters of a Node's name."""

_NAMELESS: Final = f"an entry without name and {SELECTOR} is of no node"
_EXACT: Final = "names are compared as they are; patterns work in the profiles of config.yaml"


Found = dict[str, tuple[Any, str]]
"""Known keys of a file of HAMi's, each with its value and place (`file:line:column`)."""


class _FileReader:
    """Reads one file by the rules of Go's reader, which takes null for absent.

    `is_json`: by encoding/json, which ignores the case of keys; else by yaml.v2, which does not.
    Wrong values go to `faults`, and what is ignored to `warnings`.
    """

    def __init__(self, faults: Faults, *, is_json: bool) -> None:
        self.faults = faults
        self.warnings: list[str] = []
        self._is_json = is_json

    def read(self, place: Place, table: Mapping[str, Reader]) -> Found:
        """The known keys of a mapping in their order; null counts as absent."""
        found: Found = {}
        with self.faults.kept():
            for key, here, value in place.pairs(str.lower if self._is_json else str):
                if key not in table:
                    self.warnings.append(str(here.fault(f"unknown key `{cap(key, 64)}`")))
                elif not value.null:
                    with self.faults.kept():
                        found[key] = table[key](value), value.where
        return found

    def nested(self, table: Mapping[str, Reader]) -> Reader:
        """A reader of mappings with these keys, as a dict; null has none."""
        return lambda place: (
            {}
            if place.null
            else {key: value for key, (value, _) in self.read(place, table).items()}
        )

    def many(self, read: Reader) -> Reader:
        """A reader of lists of such values; null is an empty list, as in Go."""

        def read_all(place: Place) -> tuple[object, ...]:
            values: list[object] = []
            for item in () if place.null else place.items():
                with self.faults.kept():
                    values.append(read(item))
            return tuple(values)

        return read_all

    def text(self, place: Place) -> str:
        """Read a text. In YAML every scalar is one, as it is written."""
        if place.null:
            return ""
        is_scalar = isinstance(place.node, yaml.ScalarNode)
        if not (place.node.tag == STR if self._is_json else is_scalar):
            raise place.fault(f"text is expected, not {place.shown()}")
        place.value()  # an explicit tag must fit
        return str(place.node.value)

    def flag(self, place: Place) -> bool:
        """Read a boolean, in YAML in any of YAML 1.1's words but `y` and `n`."""
        value = self._scalar(place)
        if not isinstance(value, bool):
            raise place.fault(f"true or false is expected, not {place.shown()}")
        return value

    def number(self, place: Place) -> float:
        """Read a finite number. HAMi also accepts an infinite one, which can scale nothing."""
        value = self._scalar(place)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not abs(value) <= sys.float_info.max  # not so of NaN either
        ):
            raise place.fault(f"a number is expected, not {place.shown()}")
        return value

    def whole(self, low: int, high: int) -> Callable[[Place], int]:
        """A reader of whole numbers; `1.2e+06` is one in YAML. HAMi silently drops a fraction."""

        def read(place: Place) -> int:
            value = self._scalar(place)
            if isinstance(value, float) and value.is_integer() and not self._is_json:
                value = int(value)

            if isinstance(value, bool) or not isinstance(value, int):
                raise place.fault(f"a whole number is expected, not {place.shown()}")
            if not low <= value <= high:
                raise place.fault(f"{place.shown()} is not between {low} and {high}")
            return value

        return read

    def _scalar(self, place: Place) -> object:
        """The value of a scalar, else None. `1:30` is a text to Go, and 90 to PyYAML."""
        is_scalar = isinstance(place.node, yaml.ScalarNode) and ":" not in place.node.value
        return place.value() if is_scalar else None


# device-config.yaml


def read_device_layer(content: bytes, name: str, faults: Faults) -> Layer:
    """Read what device-config.yaml sets for all nodes. Wrong values go to `faults`.

    Raises SettingsError with the place: the file cannot be parsed.
    """
    found, warnings = read_device_config(content, name, faults)
    settings: list[Setting] = []
    for key, (value, where) in found.items():
        if key in DEVICE_CONFIG:
            with faults.kept():
                settings.append(read_setting(BY_KEY[DEVICE_CONFIG[key]], value, where))
    return Layer(tuple(settings), warnings=warnings)


def read_device_config(content: bytes, name: str, faults: Faults) -> tuple[Found, tuple[str, ...]]:
    """The known keys of the section `nvidia` (others are of other vendors), and warnings.

    Raises SettingsError with the place: the file cannot be parsed.
    """
    document = read_yaml(content, name)
    sections: dict[str, tuple[Place, Place]] = {}
    if document is not None and not document.null:
        refuse_object(document)
        sections = {key: (here, value) for key, here, value in document.pairs()}

    keys = _FileReader(faults, is_json=False)
    found: Found = {}

    section = sections.pop(SECTION, None)
    if section is None or section[1].null:
        keys.warnings.append(f"{name}: there is no section {SECTION}; nothing is taken")
    else:
        models = keys.many(keys.text)
        template: dict[str, Reader] = {"name": keys.text}
        template |= dict.fromkeys(("core", "memory", "count"), keys.whole(*INT32))
        geometries = keys.many(keys.many(keys.nested(template)))

        texts = (
            *("resourceCountName", "resourceMemoryName", "resourceMemoryPercentageName"),
            *("resourceCoreName", "resourcePriorityName", "libCudaLogLevel", "gpuCorePolicy"),
            "runtimeClassName",
        )
        wholes = ("defaultMemory", "defaultCores", "defaultGPUNum", "memoryFactor")
        flags = ("overwriteEnv", "enableNumaTopology", "disableCoreLimit", "reportNodeCapacity")

        table: Mapping[str, Reader] = {
            **dict.fromkeys(texts, keys.text),
            **dict.fromkeys(wholes, keys.whole(*INT32)),
            **dict.fromkeys(flags, keys.flag),
            **dict.fromkeys(("deviceMemoryScaling", "deviceCoreScaling"), keys.number),
            "deviceSplitCount": keys.whole(*UINT64),
            "preConfiguredDeviceMemory": keys.whole(*INT64),
            "migProfileAllowlist": keys.many(keys.nested({"models": models, "profiles": models})),
            "knownMigGeometries": keys.many(
                keys.nested({"models": models, "allowedGeometries": geometries})
            ),
        }

        found = keys.read(section[1], table)

    ours = tuple(
        f"{here.where}: {key} has no effect in HAMi's file; it belongs in the agent's own "
        "config.yaml"
        for key, (here, _) in sections.items()
        if key in SECTIONS
    )
    warnings = (*first_of(keys.warnings, name), *_without_effect(found), *ours)
    return found, warnings


# config.json


def read_node_layer(content: bytes, name: str, faults: Faults, node: str = "") -> Layer:
    """Read what config.json sets for some nodes: profiles for each entry; a later one wins.

    Values of a wrong type go to `faults`. Values that do not fit are warnings; the profile has them
    too. Raises SettingsError with the place: the file cannot be parsed.
    """
    keys = _FileReader(faults, is_json=True)
    items = _read_items(content, name, keys)

    # Of many warnings only the first are told: those about `node` come before the others.
    own, others = list[str](), keys.warnings
    profiles: list[SettingsProfile] = []
    for item in items:
        keys.warnings = []
        named, found = _read_entry(item, keys)
        profiles += _profiles(named, item.where, found, keys.warnings)
        (own if named == node else others).extend(keys.warnings)

    return Layer(profiles=tuple(profiles), warnings=first_of([*own, *others], name))


def decode_nodeconfig(text: str) -> tuple[Mapping[str, object], ...]:
    """Decode the entries in their order, each with its known keys in lower case.

    Raises:
        MalformedText: not a JSON object, or a value of another type or range.
    """
    try:
        keys = _FileReader(Faults(), is_json=True)
        items = _read_items(text.encode(errors="replace"), NODES, keys)
        entries = [found for _, found in (_read_entry(item, keys) for item in items)]
        keys.faults.refuse()
    except SettingsError as error:
        raise MalformedText(str(error)) from error
    return tuple({key: value for key, (value, _) in found.items()} for found in entries)


def _read_items(content: bytes, name: str, keys: _FileReader) -> list[Place]:
    """The entries, unread. Raises SettingsError: the file is another one."""
    document = read_json(content, name)
    refuse_object(document)

    top = [key for key, _, _ in document.pairs(str.lower)]
    if NODES not in top:
        if len(top) > TOLD:
            raise document.fault(
                f"the key `{NODES}` is not there, and {len(top)} others are; is it the right file?"
            )
        keys.warnings.append(str(document.fault(f"there is no key `{NODES}`; nothing is taken")))

    found = keys.read(document, {NODES: Place.items})
    return list(found[NODES][0]) if NODES in found else []


def _read_entry(item: Place, keys: _FileReader) -> tuple[str, Found]:
    """The name of an entry (empty: it has none), and its keys, in lower case."""
    expression = {"key": keys.text, "operator": keys.text, "values": keys.many(keys.text)}
    table: Mapping[str, Reader] = {
        "name": keys.text,
        "operatingmode": keys.text,
        "devicesplitcount": keys.whole(*UINT64),
        "devicememoryscaling": keys.number,
        "devicecorescaling": keys.number,
        "preconfigureddevicememory": keys.whole(*INT64),
        "libcudaloglevel": keys.text,
        "enablenumatopology": keys.flag,
        FILTER: keys.nested(
            {"uuid": keys.many(keys.text), "index": keys.many(keys.whole(*UINT64))}
        ),
        "migstrategy": keys.text,
        "enablegetpreferredallocation": keys.flag,
        "reportnodecapacity": keys.flag,
        SELECTOR: keys.nested(
            {
                "matchlabels": lambda place: {
                    key: keys.text(value) for key, _, value in place.pairs()
                },
                "matchexpressions": keys.many(keys.nested(expression)),
            }
        ),
    }

    found = {} if item.null else keys.read(item, table)
    named = str(found["name"][0]) if "name" in found else ""
    if not named and SELECTOR not in found:
        keys.warnings.append(str(item.fault(_NAMELESS)))
    elif named not in {"", ANY} and not _NAME.fullmatch(named):
        keys.warnings.append(str(item.fault(f"no Node is called {cap(named)}: {_EXACT}")))
    return named, found


def _profiles(name: str, where: str, found: Found, warnings: list[str]) -> list[SettingsProfile]:
    """The profiles of an entry, one for each tier that it is in; none if it selects no node."""
    matches: list[ProfileMatch] = []
    if name == ANY:
        matches.append(ProfileMatch(tier=Tier.ANY))
    elif name:
        matches.append(ProfileMatch((name,), tier=Tier.NAME))

    if SELECTOR in found:
        selector, place = found[SELECTOR]
        try:
            matches.append(ProfileMatch(labels=_selector(selector), tier=Tier.LABELS))
        except ValueError as error:
            warnings.append(f"{place}: {SELECTOR} selects no node: {error}")

    faults = Faults()
    settings: list[Setting] = []
    for key, value, place in _overrides(found):
        with faults.kept():
            settings.append(read_setting(BY_KEY[key], value, place))

    warnings += _without_effect(found)
    warnings += faults.texts
    return [SettingsProfile("", match, tuple(settings), where, faults) for match in matches]


def _overrides(found: Found) -> Iterator[tuple[str, object, str]]:
    """The settings of an entry with their values and places.

    As in HAMi, an empty value (0, "", false) overrides nothing, and neither does a filter whose
    lists are both empty. Of another filter both lists are taken.
    """
    for key, (value, where) in found.items():
        if key == FILTER and any(value.values()):
            for theirs, ours in (("uuid", "filterUUIDs"), ("index", "filterIndexes")):
                yield f"sharing.{ours}", list(value.get(theirs, ())), where
        elif key in NODE_CONFIG and value:
            yield NODE_CONFIG[key], "hami-core" if (key, value) == REMOTE else value, where


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


def _without_effect(found: Found) -> Iterator[str]:
    for key, (value, where) in found.items():
        if value not in WITHOUT_EFFECT.get(key.lower(), (value,)):
            yield f"{where}: {key} {shown(value)} has no effect here"
        if (key, value) == REMOTE:
            yield f"{where}: remote means hami-core; for remote GPUs keep HAMi's plugin"
