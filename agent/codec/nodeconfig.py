"""Reads HAMi's `config.json`: overrides for nodes by name or by labels, and for all others.

It follows Go's encoding/json: keys match in any case, unknown keys are ignored, and one value of
the wrong type refuses the whole file. Unlike Go, it also refuses a repeated key.
Source: HAMi v2.10, the device plugin's /config/config.json, key `nodeconfig`; HAMi #3173.
"""

import re
from collections.abc import Mapping
from typing import Final

import msgspec
import yaml

from agent.codec.faults import Faults
from agent.codec.gojson import INT64, UINT64
from agent.codec.json_places import LABELS, read_json
from agent.codec.key_readers import Reader, many, nested, read_known, strict_whole
from agent.codec.known_keys import TOLD, IgnoredKeys, KnownKey
from agent.codec.places import STR, Place
from agent.codec.strangers import refuse_stranger
from agent.core.errors import MalformedText, SettingsError, cap

WHAT = "nodeconfig"

_NAME: Final = re.compile("[a-z0-9.-]+")
"""The characters of a Node's name."""
ANY: Final = "*"
"""The name in the entries of nodes that no other entry selects."""
SELECTOR: Final = "nodelabelselector"
_NAMELESS: Final = f"an entry without name and {SELECTOR} is of no node"
_EXACT: Final = "names are compared as they are; patterns work in the profiles of config.yaml"


class NodeEntry(msgspec.Struct, frozen=True):
    """The overrides for some nodes; the keys are in lower case."""

    name: str
    where: str
    found: tuple[KnownKey, ...]


class NodeConfig(msgspec.Struct, frozen=True):
    """The entries, and warnings about ignored parts."""

    entries: tuple[NodeEntry, ...] = ()
    warnings: tuple[str, ...] = ()


def read_nodeconfig(
    content: bytes, name: str, faults: Faults | None = None, node: str = ""
) -> NodeConfig:
    """Read the file; messages call it `name`. Wrong values go to `faults`.

    The entries that name `node` come first, so that its warnings are told before many of others.

    Raises:
        SettingsError: not a JSON object, or a value of another type or range, with its place.
    """
    passed = IgnoredKeys(name)
    table = _table(passed)

    def read_entry(place: Place) -> NodeEntry:
        found = () if place.null else read_known(place, table, passed, faults)
        named = next((str(known.value) for known in found if known.key == "name"), "")
        if not named and all(known.key != SELECTOR for known in found):
            passed.over(lambda: str(place.fault(_NAMELESS)))
        elif named not in {"", ANY} and not _NAME.fullmatch(named):
            passed.over(lambda: str(place.fault(f"no Node is called {cap(named)}: {_EXACT}")))
        return NodeEntry(named, place.where, tuple(k for k in found if k.key != "name"))

    def is_of_others(place: Place) -> bool:
        pairs = place.node.value if isinstance(place.node, yaml.MappingNode) else ()
        return not node or all((key.value, value.value) != ("name", node) for key, value in pairs)

    document = read_json(content, name)
    refuse_stranger(document)
    _look_for_nodes(document, passed)
    found = read_known(document, {WHAT: many(read_entry, is_of_others)}, passed, faults)
    entries = next((known.value for known in found), ())
    return NodeConfig(entries if isinstance(entries, tuple) else (), passed.warnings)


def _look_for_nodes(document: Place, passed: IgnoredKeys) -> None:
    """Warn if the key `nodeconfig`, the only one that HAMi reads, is missing.

    Raises SettingsError if there are many other keys: it is another file.
    """
    keys = [key for key, _, _ in document.pairs()]
    if WHAT in keys:
        return
    if len(keys) > TOLD:
        raise document.fault(
            f"the key `{WHAT}` is not there, and {len(keys)} others are; is it the right file?"
        )
    passed.over(lambda: str(document.fault(f"there is no key `{WHAT}`; nothing is taken")))


def decode_nodeconfig(text: str) -> tuple[Mapping[str, object], ...]:
    """Decode the entries in their order, each with its known keys in lower case.

    Raises:
        MalformedText: not a JSON object, or a value of another type or range.
    """
    try:
        config = read_nodeconfig(text.encode(errors="replace"), WHAT)
    except SettingsError as error:
        raise MalformedText(str(error)) from error
    return tuple(
        ({"name": entry.name} if entry.name else {}) | {k.key: k.value for k in entry.found}
        for entry in config.entries
    )


def _table(passed: IgnoredKeys) -> Mapping[str, Reader]:
    return {
        "name": _text,
        "operatingmode": _text,
        "devicesplitcount": strict_whole(*UINT64),
        "devicememoryscaling": Place.number,
        "devicecorescaling": Place.number,
        "preconfigureddevicememory": strict_whole(*INT64),
        "libcudaloglevel": _text,
        "enablenumatopology": Place.boolean,
        "filterdevices": nested(
            {"uuid": many(_text), "index": many(strict_whole(*UINT64))}, passed
        ),
        "migstrategy": _text,
        "enablegetpreferredallocation": Place.boolean,
        "reportnodecapacity": Place.boolean,
        SELECTOR: nested(
            {
                LABELS: lambda place: {key: _text(value) for key, _, value in place.pairs()},
                "matchexpressions": many(
                    nested({"key": _text, "operator": _text, "values": many(_text)}, passed)
                ),
            },
            passed,
        ),
    }


def _text(place: Place) -> str:
    """Read a text; null, which is left in lists and labels alone, is an empty one, as in Go."""
    if place.null:
        return ""
    if place.node.tag != STR:
        raise place.fault(f"text is expected, not {place.shown()}")
    return str(place.node.value)
