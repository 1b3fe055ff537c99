"""Reads the files of settings: the agent's own, and HAMi's `device-config.yaml` and `config.json`.

Each value has its place, and what is wrong is collected. Refused in one sentence: text that is not
UTF-8, YAML aliases, several documents, more than 20 levels, repeated keys. No settings file needs
them, and attacks use some of them. Null is absent.

HAMi's files are read into the same settings, by HAMi's keys: a warning names each unknown one, and
keys that the agent does not need have no effect.
Source: HAMi v2.10, the ConfigMap `<release>-scheduler-device` and the device plugin's
/config/config.json; HAMi #3173 for selectors and tiers.
"""

import contextlib
import difflib
import enum
import fnmatch
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, Literal

import msgspec
import yaml

from agent.cluster import Requirement
from agent.errors import SettingsError, cap
from agent.ledger import SourceFile
from agent.setting import Field, ValueType, WrongValue
from agent.settings.schema import BY_KEY, HEAD, PROFILE, Setting, read_setting

TOLD: Final = 20
"""Warnings about one file; there is no end of keys that a file can have."""


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
        more = f" (and {len(every) - 1} more: see `hami-agent config check`)" if every[1:] else ""
        raise SettingsError(f"{every[0]}{more}", every=every)


# Documents with places, which are the marks of YAML. JSON is read as the YAML that it also is.

NULL, STR, MAP = (f"tag:yaml.org,2002:{name}" for name in ("null", "str", "map"))
"""Tags of YAML: the types of nodes."""

MAX_DEPTH: Final = 20

# libyaml takes a tenth of the time, which shortens every start; both read the same YAML.
LOADER: Final[type[yaml.SafeLoader]] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

MISFITS: Final = ValueError, TypeError, LookupError, AttributeError, ArithmeticError
"""What the constructors of YAML raise for a value that does not fit its tag (`!!bool maybe`), and
for a number with too many digits."""


def read_yaml(content: bytes, name: str, *, is_json: bool = False) -> "Place":
    r"""Read the document; an empty file is null. Messages call the file `name`.

    Raises SettingsError: not UTF-8, not YAML, or one of the refused features. In JSON also an
    escape of two parts (`\ud83d\ude00`), which YAML does not have.
    """
    try:
        # YAML does not indent with tabs; within texts JSON has none.
        text, depth = content.replace(b"\t", b" " if is_json else b"\t").decode(), 0
        # Aliases and depth are refused by the parser's events: composing is recursive.
        for event in yaml.parse(text, Loader=LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH or isinstance(event, yaml.AliasEvent):
                raise SettingsError(
                    f"{_at(name, event.start_mark)}: no settings file needs aliases, or more than "
                    f"{MAX_DEPTH} levels; is it the right one?"
                )
        node = yaml.compose(text, Loader=LOADER) or yaml.ScalarNode(NULL, "", None)
        if is_json:
            json.loads(content, parse_int=str)  # a too long number is refused with its place
    except json.JSONDecodeError as error:
        where = f"{name}:{error.lineno}:{error.colno}"
        raise SettingsError(f"{where}: not valid JSON: {error.msg}") from error
    except yaml.MarkedYAMLError as error:
        where = _at(name, error.problem_mark)
        raise SettingsError(f"{where}: not valid YAML: {cap(str(error.problem))}") from error
    except (UnicodeDecodeError, yaml.reader.ReaderError) as error:
        raise SettingsError(
            f"{name}: is not UTF-8 text, or has a control character: {cap(str(error))}"
        ) from error

    return Place(name, node, is_json=is_json)


def _at(name: str, mark: Any) -> str:  # noqa: ANN401 -- PyYAML's two parsers share no type of it
    """Format a mark as `file:line:column`, from 1."""
    return f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name


class Place(msgspec.Struct, frozen=True):
    """A value in a file, which messages call `file`. Readers raise SettingsError with the place."""

    file: str
    node: yaml.Node
    is_json: bool = False

    @property
    def where(self) -> str:
        """`file:line:column`."""
        return _at(self.file, self.node.start_mark)

    def fault(self, text: str) -> SettingsError:
        """Make a SettingsError with `text` at this place."""
        return SettingsError(f"{self.where}: {text}")

    def pairs(self) -> Iterator[tuple[str, "Place", "Place"]]:
        """Yield each key, its place and its value in the file's order; refuses a repeated key.

        In JSON the case of keys does not count, as in Go: they are yielded in lower case.
        """
        if self.node.tag == NULL:  # a section whose keys are all commented out
            return
        if not isinstance(self.node, yaml.MappingNode) or self.node.tag != MAP:
            raise self.fault(f"keys and values are expected here, not {self.shown()}")

        seen: set[str] = set()
        for key, value in self.node.value:
            here = Place(self.file, key)
            if not isinstance(key, yaml.ScalarNode) or key.tag != STR:
                raise here.fault(f"a text key is expected, not {here.shown()}")

            name = key.value.lower() if self.is_json else key.value
            if name in seen:
                raise here.fault(f"the key `{cap(name, 64)}` stands here twice; remove one")

            seen.add(name)
            yield name, here, Place(self.file, value, self.is_json)

    def items(self) -> Iterator["Place"]:
        """Yield the entries of a list."""
        if self.node.tag == NULL:
            return
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.fault(f"a list is expected here, not {self.shown()}")
        yield from (Place(self.file, item, self.is_json) for item in self.node.value)

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


def read_keys(
    place: Place,
    known: Mapping[str, Field | None],
    errors: list[str],
    unknown: list[str],
    above: str = "",
) -> Iterator[Setting]:
    """Yield the settings at `place` and below. Values that do not fit go to `errors`.

    `known`: the setting for each path of keys; None: the key has no effect. Other paths go to
    `unknown`. `above`: the keys above `place`, each with its dot.
    """
    with kept(errors):
        for key, here, value in place.pairs():
            # A key with a dot would be a second way to set the same setting.
            path = "" if "." in key else above + key
            field = known.get(path)
            with kept(errors):
                if field is not None:
                    given = value.value()
                    # As in HAMi, an empty value (0, "", false) in config.json overrides nothing.
                    if given is not None and not (place.is_json and given in (0, "", [])):
                        shown = "" if isinstance(given, list) else value.shown()
                        yield read_setting(field, given, value.where, shown)
                elif any(name.startswith(f"{path}.") for name in known):
                    yield from read_keys(value, known, errors, unknown, f"{path}.")
                elif path not in known:
                    name = cap(above + key, 64)
                    # A file may have any number of keys, and looking for the nearest takes a while.
                    ours = {*known, *(one.partition(".")[0] for one in known)}
                    near = difflib.get_close_matches(name, ours, 1) if len(unknown) < TOLD else ()
                    hint = "".join(f" (did you mean `{one.replace('.', ': ')}`?)" for one in near)
                    said = f"{name} cannot be set here{hint}; see SETTINGS.md"
                    unknown.append(f"{here.where}: {said}")


def _listed(document: Place, key: str) -> Iterator[Place]:
    """Yield the entries of the list that the document has under `key`."""
    for name, _, value in document.pairs():
        if name == key:
            yield from value.items()


# The agent's own file.

Tier = enum.IntEnum("Tier", "OWN NAME LABELS ANY", start=0)
"""The tiers of HAMi's config.json: of its entries only those in the first tier that matches apply.

OWN: profiles of our own file, which apply beside them. Source: HAMi #3173.
"""


class SettingsProfile(msgspec.Struct, frozen=True):
    """Settings for the nodes that match all of `nodes` and `labels` that is set.

    `nodes`: names, one of which must match. `*` and `?` in them are patterns, but those of HAMi's
    entries are literal. An entry of HAMi's config.json becomes a profile without a name for each
    tier that it is in. `faults`: its values that do not fit; they refuse the settings of the nodes
    to which it applies.
    """

    name: str
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


OWN_KEYS: Final = BY_KEY | {"profiles": None}


def read_own_file(
    file: SourceFile, errors: list[str]
) -> tuple[list[Setting], list[SettingsProfile]]:
    """What the whole file sets for all nodes and for some. Errors go to `errors`.

    Raises SettingsError: the file is not YAML.
    """
    document = read_yaml(file.content, file.name)
    settings = list(read_keys(document, OWN_KEYS, errors, errors))
    profiles: list[SettingsProfile] = []
    for item in _listed(document, "profiles"):
        with kept(errors):
            profiles.append(_profile(item, errors))
    return settings, profiles


def _profile(item: Place, errors: list[str]) -> SettingsProfile:
    """Read one profile. Raises SettingsError: its name or its condition is missing."""
    faults: list[str] = []
    found = {one.field.key: one for one in read_keys(item, PROFILE, faults, faults)}
    head: dict[str, Any] = {key: found.pop(key).value for key in HEAD if key in found}
    nodes, labels = head.get("match.nodes", ()), head.get("match.labels")
    errors += faults
    if not faults and ("name" not in head or not (nodes or labels)):
        raise item.fault("a profile needs `name`, and `nodes` or `labels` under `match`")
    return SettingsProfile(head.get("name", ""), tuple(found.values()), nodes, labels)


# HAMi's two files.

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
"""Key of the section `nvidia` of device-config.yaml → setting."""

NODE_CONFIG: Final[Mapping[str, str]] = {
    "operatingmode": "sharing.operatingMode",
    "devicesplitcount": "sharing.splitCount",
    "devicememoryscaling": "sharing.memoryScaling",
    "devicecorescaling": "sharing.coreScaling",
    "preconfigureddevicememory": "sharing.preconfiguredMemoryMiB",
    "libcudaloglevel": "library.cudaLogLevel",
    "enablenumatopology": "sharing.numaTopology",
    "filterdevices.uuid": "sharing.filterUUIDs",
    "filterdevices.index": "sharing.filterIndexes",
}
"""Key of an entry of config.json, in lower case → setting."""

WITHOUT_EFFECT: Final[Mapping[str, tuple[str, ...]]] = {
    "device-config.yaml": (
        *("resourcePriorityName", "overwriteEnv", "defaultGPUNum", "runtimeClassName"),
        *("reportNodeCapacity", "migProfileAllowlist", "knownMigGeometries"),
    ),
    "config.json": ("migstrategy", "enablegetpreferredallocation", "reportnodecapacity"),
}
"""Further keys of HAMi's, for its scheduler, its webhook or MIG."""

NODES, NAME, SELECTOR = "nodeconfig", "name", "nodelabelselector"


class _Expression(msgspec.Struct, forbid_unknown_fields=True):
    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()


class _Selector(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    match_labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    match_expressions: tuple[_Expression, ...] = ()


def _read_selector(value: object) -> tuple[Requirement, ...]:
    """What a node's labels must meet. Raises WrongValue: Kubernetes refuses the selector."""
    try:
        given = msgspec.convert(value, _Selector)
    except msgspec.ValidationError as error:
        raise WrongValue(f"expected a label selector ({cap(str(error))})") from error

    found = [Requirement(key, (one,)) for key, one in given.match_labels.items()]
    found += [
        Requirement(one.key, one.values, one.operator in {"In", "Exists"})
        for one in given.match_expressions
    ]
    # Kubernetes LabelSelectorAsSelector: In and NotIn need values, the others have none.
    if not all(one.is_valid for one in found) or any(
        bool(one.values) is not one.operator.endswith("In") for one in given.match_expressions
    ):
        raise WrongValue("expected a label selector that Kubernetes takes")
    return tuple(found)


DEVICE_KEYS: Final = dict.fromkeys(WITHOUT_EFFECT["device-config.yaml"]) | {
    key: BY_KEY[setting] for key, setting in DEVICE_CONFIG.items()
}
ENTRY_KEYS: Final = dict.fromkeys(WITHOUT_EFFECT["config.json"]) | {
    **{key: BY_KEY[setting] for key, setting in NODE_CONFIG.items()},
    NAME: Field(NAME, HEAD[NAME].read, "The Node; * is every one that no other entry selects."),
    SELECTOR: Field(SELECTOR, ValueType(_read_selector, {}), "A label selector of Kubernetes."),
}


def read_device_config(file: SourceFile, errors: list[str], warnings: list[str]) -> list[Setting]:
    """What device-config.yaml sets for all nodes. Wrong values go to `errors`.

    Only the section `nvidia` is read; the others are of other vendors. Raises SettingsError with
    the place: the file cannot be parsed.
    """
    unknown, found = list[str](), list[Setting]()
    for key, _, value in read_yaml(file.content, file.name).pairs():
        if key == "nvidia":
            found += read_keys(value, DEVICE_KEYS, errors, unknown)
    warnings += unknown[:TOLD]
    return found


def read_node_config(
    file: SourceFile, errors: list[str], warnings: list[str]
) -> list[SettingsProfile]:
    """What config.json sets for some nodes: profiles for each entry; a later one wins.

    Values that do not fit are warnings, and faults of the profile. Raises SettingsError with the
    place: the file cannot be parsed.
    """
    document, unknown = read_yaml(file.content, file.name, is_json=True), list[str]()
    list(read_keys(document, {NODES: None}, errors, unknown))
    faults = list[str]()
    items = _listed(document, NODES)
    profiles = [one for item in items for one in _of_entry(item, faults, unknown)]
    warnings += (faults + unknown)[:TOLD]
    return profiles


def _of_entry(item: Place, errors: list[str], unknown: list[str]) -> Iterator[SettingsProfile]:
    """The profiles of an entry, one for each tier that it is in; none if it selects no node."""
    faults: list[str] = []
    found = {one.field.key: one for one in read_keys(item, ENTRY_KEYS, faults, unknown)}
    errors += faults
    head: dict[str, Any] = {k: found.pop(k).value for k in (NAME, SELECTOR) if k in found}
    profile = SettingsProfile("", tuple(found.values()), faults=tuple(faults))

    if (name := head.get(NAME)) is not None:
        tier, nodes = (Tier.ANY, ()) if name == "*" else (Tier.NAME, (name,))
        yield msgspec.structs.replace(profile, tier=tier, nodes=nodes)
    if (labels := head.get(SELECTOR)) is not None:
        # An empty selector selects every node, whatever its labels.
        yield msgspec.structs.replace(profile, tier=Tier.LABELS, labels=labels or None)
