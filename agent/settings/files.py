"""Reads the files of settings: the agent's own, and HAMi's `device-config.yaml` and `config.json`.

Each value has its place, and what is wrong is collected. Refused in one sentence: text that is not
UTF-8, YAML aliases, several documents, more than 20 levels, repeated keys. No settings file needs
them, and attacks use some of them.

In HAMi's files keys, types and precedence are those of HAMi's readers in Go (yaml.v2 and
encoding/json): null is absent, and one value of the wrong type refuses the file. What these accept
and no operator means is refused too: a fraction in place of a whole number, an infinite number. So
is what is a number, boolean or key to Go alone: `08`, `0o17`, `1e+06`, `y`, a key that is a number.
A warning names each unknown key.
Source: HAMi v2.10, the ConfigMap `<release>-scheduler-device` and the device plugin's
/config/config.json; HAMi #3173 for selectors and tiers.
"""

import contextlib
import enum
import fnmatch
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
import yaml

from agent.cluster import Requirement, parse_selector
from agent.errors import MalformedText, SettingsError, cap
from agent.hami.annotations import Int32, Int64
from agent.ledger import SourceFile
from agent.setting import Field, shown
from agent.settings.schema import BY_KEY, HEAD, PROFILE, SECTIONS, Setting, read_setting

TOLD: Final = 20
"""Warnings of one kind about one file; further ones are only counted."""


@contextlib.contextmanager
def kept(errors: list[str]) -> Iterator[None]:
    """Add a SettingsError that the block raises to `errors`, and continue after it."""
    try:
        yield
    except SettingsError as error:
        errors.extend(error.every)


def refuse(errors: Iterable[str]) -> None:
    """Raise one SettingsError that names all errors, if there are any."""
    every = tuple(dict.fromkeys(errors))
    if every:
        more = f" (and {len(every) - 1} more)" if len(every) > 1 else ""
        raise SettingsError(f"{every[0]}{more}", every=every)


def first_of(warnings: Sequence[str], name: str) -> list[str]:
    """The first TOLD of the warnings about `name`, and one with the number of the others."""
    more = len(warnings) - TOLD
    count = [f"{name}: and {more} more are passed over"] if more > 0 else []
    return [*warnings[:TOLD], *count]


def read_settings(given: Iterable[tuple[str, object, str]], errors: list[str]) -> list[Setting]:
    """The settings of these keys, values and origins. Values that do not fit go to `errors`."""
    settings: list[Setting] = []
    for key, value, where in given:
        with kept(errors):
            settings.append(read_setting(BY_KEY[key], value, where))
    return settings


# Documents with places. JSON is checked by a parser of JSON, and then read as the YAML that it also
# is: the marks of YAML are the places of its values.

NULL, STR, MAP = (f"tag:yaml.org,2002:{name}" for name in ("null", "str", "map"))
"""Tags of YAML: the types of nodes."""

MAX_DEPTH: Final = 20

# libyaml takes a tenth of the time, which shortens every start; both read the same YAML.
LOADER: Final[type[yaml.SafeLoader]] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

MISFITS: Final = ValueError, TypeError, LookupError, AttributeError, ArithmeticError
"""What the constructors of YAML raise for a value that does not fit its tag (`!!bool maybe`), and
for a number with too many digits."""


def read_yaml(content: bytes, name: str, *, is_json: bool = False) -> "Place":
    """Read the document; an empty file is null. Messages call the file `name`.

    Raises:
        SettingsError: not UTF-8, not YAML, or one of the refused features.
    """
    _decoded(content, name)
    try:
        # Aliases and depth are refused by the parser's events: composing is recursive.
        depth = 0
        for event in yaml.parse(content, Loader=LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH or isinstance(event, yaml.AliasEvent):
                deep = f"nested deeper than {MAX_DEPTH} levels, which no settings file needs; "
                alias = "aliases are not allowed here; write the value out"
                why = f"{deep}is it the right one?" if depth > MAX_DEPTH else alias
                raise SettingsError(f"{_at(name, event.start_mark)}: {why}")
        node = yaml.compose(content, Loader=LOADER) or yaml.ScalarNode(NULL, "", None)
    except yaml.MarkedYAMLError as error:
        # A quote that is never closed: the place where it was opened helps, not the file's end.
        is_open = error.problem == "found unexpected end of stream" and error.context_mark
        where = _at(name, error.context_mark if is_open else error.problem_mark)
        raise SettingsError(f"{where}: not valid YAML: {cap(str(error.problem))}") from error

    place = Place(name, node, is_json=is_json)
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    if {"apiVersion", "kind"} <= {str(key.value) for key, _ in pairs}:
        raise place.fault(
            "this is a Kubernetes object, not a settings file; give the file in its ConfigMap"
        )
    return place


def read_json(content: bytes, name: str) -> "Place":
    r"""Read the document; messages call the file `name`.

    Raises:
        SettingsError: not UTF-8, not JSON, nested too deep, or with an escape of two parts
            (`\ud83d\ude00`), which YAML does not have.
    """
    text = _decoded(content, name)
    # What is nested too deep for the decoder is refused below, with its place.
    with contextlib.suppress(RecursionError):
        try:
            json.loads(text, parse_int=str)  # a too long number is refused later, with its place
        except json.JSONDecodeError as error:
            problem = error.msg.removesuffix(" at").removesuffix(" starting")
            raise SettingsError(
                f"{name}:{error.lineno}:{error.colno}: not valid JSON: {problem}"
            ) from error
    # YAML does not indent with tabs; within texts JSON has none.
    return read_yaml(text.replace("\t", " ").encode(), name, is_json=True)


def _decoded(content: bytes, name: str) -> str:
    """The text. The parsers name no line of a character that it may not have."""
    text = content.decode(errors="surrogateescape")
    if (bad := yaml.reader.Reader.NON_PRINTABLE.search(text)) is not None:
        lines = text[: bad.start()].split("\n")
        raise SettingsError(
            f"{name}:{len(lines)}:{len(lines[-1]) + 1}: is not UTF-8 text, or has a control "
            f"character (byte {len(text[: bad.start()].encode())}); save it as UTF-8"
        )
    return text


def _at(name: str, mark: Any) -> str:  # noqa: ANN401 -- PyYAML's two parsers share no type of it
    """Format a mark as `file:line:column`, from 1."""
    return f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name


class Place(msgspec.Struct, frozen=True):
    """A value in a file. Messages call the file `file`; `field` is the path to the value.

    Every reader raises SettingsError with the place.
    """

    file: str
    node: yaml.Node
    field: str = ""
    is_json: bool = False

    @property
    def where(self) -> str:
        """`file:line:column`."""
        return _at(self.file, self.node.start_mark)

    def fault(self, text: str) -> SettingsError:
        """Make a SettingsError with `text` at this place."""
        field = f"{self.field}: " if self.field else ""
        return SettingsError(f"{self.where}: {field}{text}")

    @property
    def null(self) -> bool:
        """True when the value is null."""
        return bool(self.node.tag == NULL)

    def pairs(self, spelling: Callable[[str], str] = str) -> Iterator[tuple[str, "Place", "Place"]]:
        """Yield each key, its place and its value in the file's order; refuses a repeated key.

        `spelling`: how keys are compared and returned.
        """
        if not isinstance(self.node, yaml.MappingNode) or self.node.tag != MAP:
            raise self.fault(f"keys and values are expected here, not {self.shown()}")

        seen: set[str] = set()
        for key, value in self.node.value:
            here = Place(self.file, key, self.field)
            if not isinstance(key, yaml.ScalarNode) or key.tag != STR:
                raise here.fault(f"a text key is expected, not {here.shown()}")

            name = spelling(key.value)
            if name in seen:
                raise here.fault(f"the key `{cap(name, 64)}` stands here twice; remove one")

            seen.add(name)
            field = f"{self.field}.{name}".lstrip(".")
            yield name, here, Place(self.file, value, field, self.is_json)

    def items(self) -> Iterator["Place"]:
        """Yield the entries of a list."""
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.fault(f"a list is expected here, not {self.shown()}")
        for number, item in enumerate(self.node.value):
            yield Place(self.file, item, f"{self.field}[{number}]", self.is_json)

    def value(self) -> Any:  # noqa: ANN401 -- any value of YAML
        """Read any value as plain Python values; refuses a scalar that does not fit its tag."""
        try:
            # Numbers of JSON such as 1e5 are texts in YAML.
            if self.is_json and isinstance(self.node, yaml.ScalarNode) and self.node.style != '"':
                return json.loads(self.node.value)
            # A new one each time: it keeps every node that it was ever given.
            return yaml.constructor.SafeConstructor().construct_object(self.node, deep=True)
        except (yaml.YAMLError, *MISFITS) as error:
            kind = cap(self.node.tag.rpartition(":")[2], 60)
            raise self.fault(f"not valid YAML: {self.shown()} is not of type {kind}") from error

    def shown(self) -> str:
        """A short form of the value for a message."""
        if isinstance(self.node, yaml.ScalarNode):
            # A number or a boolean in quotes is none: without the hint the message puzzles.
            quoted = " (text)" if self.node.style in {'"', "'"} else ""
            return f"`{cap(self.node.value, 40)}`{quoted}" if self.node.value else "nothing"
        return "a list" if isinstance(self.node, yaml.SequenceNode) else "a mapping"


# The agent's own file.

Tier = enum.IntEnum("Tier", "OWN NAME LABELS ANY", start=0)
"""The tiers of HAMi's config.json: of its entries only those in the first tier that matches apply.

OWN: profiles of our own file, which apply beside them. Source: HAMi #3173.
"""


class SettingsProfile(msgspec.Struct, frozen=True):
    """Settings for the nodes that match all of `nodes` and `labels` that is set.

    `nodes`: names, one of which must match. `*` and `?` in them are patterns, but those of HAMi's
    entries are literal. `where`: its place, `file:line:column`. An entry of HAMi's config.json
    becomes a profile without a name for each tier that it is in. `faults`: its values that do not
    fit; they refuse the settings of the nodes to which it applies.
    """

    name: str
    where: str
    settings: tuple[Setting, ...]
    nodes: tuple[str, ...] = ()
    labels: tuple[Requirement, ...] | None = None
    tier: Tier = Tier.OWN
    faults: tuple[str, ...] = ()

    def names(self, name: str) -> bool:
        """True if the name matches; labels do not count here."""
        if self.tier is Tier.NAME:
            return name in self.nodes
        return not self.nodes or any(fnmatch.fnmatchcase(name, one) for one in self.nodes)

    def holds(self, name: str, labels: Mapping[str, str] | None) -> bool:
        """True if the node matches. Labels None: not known yet; what needs them does not match."""
        by_label = all(labels is not None and one.holds(labels) for one in self.labels or ())
        return by_label and self.names(name)


def read_own_file(
    file: SourceFile, errors: list[str]
) -> tuple[list[Setting], list[SettingsProfile]]:
    """What the whole file sets for all nodes and for some. Errors go to `errors`.

    Raises SettingsError: the file is not YAML, or is a Kubernetes object.
    """
    document = read_yaml(file.content, file.name)
    settings: list[Setting] = []
    profiles: dict[str, SettingsProfile] = {}
    for key, here, value in () if document.null else document.pairs():
        with kept(errors):
            if key != "profiles":
                settings.extend(_settings(key, here, value, BY_KEY, errors))
                continue
            for item in () if value.null else value.items():
                with kept(errors):
                    profile = _profile(item, errors)
                    if profile.name in profiles:
                        raise item.fault(f"the profile {cap(profile.name, 64)} is defined twice")
                    profiles[profile.name] = profile
    return settings, list(profiles.values())


def _profile(item: Place, errors: list[str]) -> SettingsProfile:
    """Read one profile. Raises SettingsError: its name or condition is wrong or missing."""
    found = {
        one.field.key: one for pair in item.pairs() for one in _settings(*pair, PROFILE, errors)
    }
    head: dict[str, Any] = {key: found.pop(key).value for key in HEAD if key in found}
    try:
        labels = parse_selector(head["match.labels"]) if "match.labels" in head else None
    except MalformedText as error:
        raise item.fault(cap(str(error))) from error

    nodes = head.get("match.nodes", ())
    if "name" not in head or not (nodes or labels):
        raise item.fault("a profile needs `name`, and `nodes` or `labels` under `match`")
    return SettingsProfile(head["name"], item.where, tuple(found.values()), nodes, labels)


def _settings(
    key: str,
    here: Place,
    value: Place,
    known: Mapping[str, Field],
    errors: list[str],
    above: str = "",
) -> Iterator[Setting]:
    """The settings at and below `key`. `above`: the keys above it, each with its dot."""
    # A key with a dot would be a second way to set the same setting.
    path = "" if "." in key else above + key
    with kept(errors):
        if path in known:
            yield read_setting(known[path], value.value(), value.where, value.shown())
        elif any(name.startswith(f"{path}.") for name in known):
            # Null is a section whose keys are all commented out.
            for name, place, inner in () if value.null else value.pairs():
                yield from _settings(name, place, inner, known, errors, f"{path}.")
        elif any(f"{name}.".startswith(f"{path}.") for name in BY_KEY):
            raise SettingsError(
                f"{here.where}: a profile cannot set {path}, which acts before the node is known"
            )
        else:
            unknown = f"unknown setting {cap(above + key, 64)}"
            raise SettingsError(f"{here.where}: {unknown}; `hami-agent config show` lists all")


# HAMi's two files.
#
# A shape says what a file may contain: a list is one of values of that shape, and a dict has these
# keys; ANY_KEY stands for every other one. HAMi also accepts an infinite number, which can scale
# nothing, and silently drops a fraction where a whole number is meant.

ANY_KEY: Final = ""
TEXTS: Final = [str]
Uint64 = Annotated[int, msgspec.Meta(ge=0)]
Finite = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
EXPECTED: Final[Mapping[object, str]] = {
    str: "text",
    bool: "true or false",
    Finite: "a number",
    Int32: "a whole number of 32 bits",
    Int64: "a whole number of 64 bits",
    Uint64: "a whole number from 0",
}
"""The words for a shape in messages."""

DEVICE_SHAPE: Final[Mapping[str, object]] = {
    **dict.fromkeys(("resourceCountName", "resourceMemoryName", "resourceCoreName"), str),
    **dict.fromkeys(("resourceMemoryPercentageName", "resourcePriorityName"), str),
    **dict.fromkeys(("libCudaLogLevel", "gpuCorePolicy", "runtimeClassName"), str),
    **dict.fromkeys(("defaultMemory", "defaultCores", "defaultGPUNum", "memoryFactor"), Int32),
    **dict.fromkeys(("overwriteEnv", "enableNumaTopology", "disableCoreLimit"), bool),
    "reportNodeCapacity": bool,
    "deviceMemoryScaling": Finite,
    "deviceCoreScaling": Finite,
    "deviceSplitCount": Uint64,
    "preConfiguredDeviceMemory": Int64,
    "migProfileAllowlist": [{"models": TEXTS, "profiles": TEXTS}],
    "knownMigGeometries": [
        {
            "models": TEXTS,
            "allowedGeometries": [[{"name": str, "core": Int32, "memory": Int32, "count": Int32}]],
        }
    ],
}
"""The section `nvidia` of device-config.yaml."""

NODE_SHAPE: Final[Mapping[str, object]] = {
    "name": str,
    "operatingmode": str,
    "devicesplitcount": Uint64,
    "devicememoryscaling": Finite,
    "devicecorescaling": Finite,
    "preconfigureddevicememory": Int64,
    "libcudaloglevel": str,
    "enablenumatopology": bool,
    "filterdevices": {"uuid": TEXTS, "index": [Uint64]},
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

FILTER: Final = "filterdevices"
FILTERS: Final = {"uuid": "sharing.filterUUIDs", "index": "sharing.filterIndexes"}
"""Key below FILTER → setting."""

WITHOUT_EFFECT: Final[Mapping[str, tuple[object, ...]]] = {
    "migstrategy": ("", "none"),
    "enablegetpreferredallocation": (True,),
    "reportnodecapacity": (False,),
}
"""Keys, in lower case, that the agent does not follow → values that ask for what it does anyway."""

NODES: Final = "nodeconfig"
SELECTOR: Final = "nodelabelselector"
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
                inner = shape.get(key, shape.get(ANY_KEY))
                if inner is None:
                    self.warnings.append(str(here.fault(f"unknown key `{cap(key, 64)}`")))
                elif key not in shape or not value.null:
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

        # In YAML every scalar is a text, as it is written.
        is_scalar = isinstance(place.node, yaml.ScalarNode)
        if shape is str and is_scalar and (place.null or not place.is_json):
            return "" if place.null else place.node.value

        # `1:30` is a text to Go, and 90 to PyYAML.
        value = place.node.value if is_scalar and ":" in place.node.value else place.value()
        if shape is not Finite and isinstance(value, float) and value.is_integer():
            value = int(value)  # Helm writes 131072 as 1.31072e+05
        try:
            return msgspec.convert(value, shape)
        except msgspec.ValidationError as error:
            raise place.fault(f"{EXPECTED[shape]} is expected, not {place.shown()}") from error


def read_device_config(file: SourceFile, errors: list[str], warnings: list[str]) -> list[Setting]:
    """What device-config.yaml sets for all nodes. Wrong values go to `errors`.

    Only the section `nvidia` is read; the others are of other vendors. Raises SettingsError with
    the place: the file cannot be parsed.
    """
    document, reader, found = read_yaml(file.content, file.name), FileReader(errors), Found()
    is_there = False
    for key, here, value in () if document.null else document.pairs():
        if key == "nvidia" and not value.null:
            is_there, found = True, reader.keys(value, DEVICE_SHAPE)
        elif key in SECTIONS:
            belongs = "has no effect in HAMi's file; it belongs in the agent's own config.yaml"
            warnings.append(f"{here.where}: {key} {belongs}")

    if not is_there:
        warnings.append(f"{file.name}: there is no section nvidia; nothing is taken")
    warnings += [*first_of(reader.warnings, file.name), *_without_effect(found)]
    known = ((DEVICE_CONFIG[key], *found[key]) for key in found if key in DEVICE_CONFIG)
    return read_settings(known, errors)


def read_node_config(
    file: SourceFile, errors: list[str], warnings: list[str]
) -> list[SettingsProfile]:
    """What config.json sets for some nodes: profiles for each entry; a later one wins.

    Values of a wrong type go to `errors`. Values that do not fit are warnings; the profile has them
    too. Raises SettingsError with the place: the file cannot be parsed.
    """
    reader = FileReader(errors)
    entries = _entries(file.content, file.name, reader)
    profiles = [one for item in entries for one in _profiles(item, reader)]
    warnings += first_of(reader.warnings, file.name)
    return profiles


def decode_nodeconfig(text: str) -> tuple[Mapping[str, object], ...]:
    """Decode the entries in their order, each with its known keys in lower case.

    Raises SettingsError: not a JSON object, or a value of another type or range.
    """
    reader = FileReader([])
    items = _entries(text.encode(errors="replace"), NODES, reader)
    entries = tuple(reader.value(item, NODE_SHAPE) for item in items)
    refuse(reader.errors)
    return entries


def _entries(content: bytes, name: str, reader: FileReader) -> Iterator[Place]:
    """The entries, unread. Raises SettingsError: the file cannot be parsed."""
    document = read_json(content, name)
    found = reader.keys(document, {NODES: Place})
    if NODES in found:
        yield from found[NODES][0].items()
    else:
        nothing = f"`{NODES}` has no entries; nothing is taken"
        reader.warnings.append(str(document.fault(nothing)))


def _profiles(item: Place, reader: FileReader) -> Iterator[SettingsProfile]:
    """The profiles of an entry, one for each tier that it is in; none if it selects no node."""
    found = {} if item.null else reader.keys(item, NODE_SHAPE)
    warnings, given = reader.warnings, list[tuple[str, object, str]]()
    for key, (value, where) in found.items():
        # As in HAMi, an empty value (0, "", false) overrides nothing, and neither does a filter
        # whose lists are both empty. Of another filter both lists are taken.
        if key == FILTER and any(value.values()):
            given += [(FILTERS[part], list(value.get(part, ())), where) for part in FILTERS]
        elif key in NODE_CONFIG and value:
            mode = "hami-core" if (key, value) == REMOTE else value
            given.append((NODE_CONFIG[key], mode, where))
    faults: list[str] = []
    settings = tuple(read_settings(given, faults))
    profile = SettingsProfile("", item.where, settings, faults=tuple(faults))

    name, _ = found.get("name", ("", ""))
    if name == "*":  # for nodes that no other entry selects
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
            labels = _selector(parts)
        except ValueError as error:
            warnings.append(f"{where}: {SELECTOR} selects no node: {error}")
        else:
            yield msgspec.structs.replace(profile, labels=labels, tier=Tier.LABELS)

    warnings += [*_without_effect(found), *faults]


def _selector(parts: Mapping[str, Any]) -> tuple[Requirement, ...] | None:
    """The selector; None: it selects every node, whatever its labels.

    Raises ValueError: Kubernetes' LabelSelectorAsSelector refuses it.
    """
    found = [Requirement(key, (value,)) for key, value in parts.get("matchlabels", {}).items()]

    for one in parts.get("matchexpressions", ()):
        key, operator, values = one.get("key", ""), one.get("operator"), one.get("values", ())
        is_known = operator in {"In", "NotIn", "Exists", "DoesNotExist"}
        if not is_known or bool(values) is not operator.endswith("In"):
            raise ValueError(f"{key}, {operator} and {len(values)} values are no requirement")
        found.append(Requirement(key, values, operator in {"In", "Exists"}))

    if not all(one.is_valid for one in found):
        raise ValueError("a key or a value is not one of a label")
    return tuple(found) or None


def _without_effect(found: Found) -> Iterator[str]:
    for key, (value, where) in found.items():
        if value not in WITHOUT_EFFECT.get(key.lower(), (value,)):
            yield f"{where}: {key} {shown(value)} has no effect here"
        if (key, value) == REMOTE:
            yield f"{where}: remote means hami-core; for remote GPUs keep HAMi's plugin"
