"""YAML by the rules of Go's yaml.v2, with which HAMi reads its device-config.yaml.

They differ from YAML 1.1 (used for all other files) and from 1.2: `1e+06` and `08` are numbers,
`1:30` is text, `0o17` and `0x1F` are whole numbers, and `y` and `n` are booleans.
Source: gopkg.in/yaml.v2 v2.4.0 resolve.go and decode.go.
"""

import math
import re
from collections.abc import Callable
from typing import Final, TypeGuard

import yaml

from agent.codec.gojson import INT64, UINT64
from agent.codec.places import BOOL, FLOAT, INT, MAP, NULL, SEQ, STR, TAG, Place
from agent.codec.yaml_places import LOADER, read_yaml
from agent.core.errors import cap

_FLOATS: Final = {
    f"{sign}.{name}": float(f"{sign}{name}")
    for sign in ("", "+", "-")
    for name in ("inf", "Inf", "INF")
} | dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan)
_WORDS: Final[dict[str, tuple[str, object]]] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), (NULL, None)),
    **dict.fromkeys(("y", "Y", "yes", "Yes", "YES", "on", "On", "ON"), (BOOL, True)),
    **dict.fromkeys(("n", "N", "no", "No", "NO", "off", "Off", "OFF"), (BOOL, False)),
    **dict.fromkeys(("true", "True", "TRUE"), (BOOL, True)),
    **dict.fromkeys(("false", "False", "FALSE"), (BOOL, False)),
    **{word: (FLOAT, value) for word, value in _FLOATS.items()},
    "<<": (f"{TAG}merge", "<<"),
}
_WHOLE: Final = re.compile("([-+]?)(?:0[xX]([0-9a-fA-F]+)|0[bB]([01]+)|0[oO]?([0-7]+)|([0-9]+))")
"""Go's ParseInt of base 0, without underscores; octal digits may follow a bare 0."""
_DECIMAL: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_BETWEEN: Final = re.compile("(?<=[0-9])_(?=[0-9])")
_BASES: Final = (16, 2, 8, 10)


def resolve(written: str) -> tuple[str, object]:
    """Tag and value of a scalar without quotes; one that Go reads as no other value is text."""
    if written in _WORDS:
        return _WORDS[written]
    if written[:1] in set("+-0123456789"):
        plain = written.replace("_", "")
        whole_number = _integer(plain)
        return (INT, whole_number) if whole_number is not None else _decimal(plain, written)
    if written[:1] == ".":  # here an underscore must stand between digits
        return _decimal(_BETWEEN.sub("", written), written)
    return STR, written


def _integer(plain: str) -> int | None:
    match = _WHOLE.fullmatch(plain)
    if match is None or (match[5] and match[5][0] == "0" and match[5] != "0"):
        return None  # `08` is no octal number: Go reads it as a float
    digits, base = next((d, b) for d, b in zip(match.groups()[1:], _BASES, strict=True) if d)
    if len(digits) > 64:
        return None
    value = int(match[1] + digits, base)
    return value if INT64[0] <= value <= (INT64[1] if match[1] else UINT64[1]) else None


def _decimal(plain: str, written: str) -> tuple[str, object]:
    """A float, or text if no float64 holds it."""
    value = float(plain) if _DECIMAL.fullmatch(plain) else math.inf
    return (FLOAT, value) if math.isfinite(value) else (STR, written)


def _resolve(_: yaml.SafeLoader, kind: type[yaml.Node], value: str | None, implicit: object) -> str:
    """The tag of a node without one; `implicit[0]` is True for a scalar without quotes."""
    if kind is yaml.ScalarNode:
        is_plain = isinstance(implicit, tuple) and implicit[0]
        return resolve(value or "")[0] if is_plain else STR
    return SEQ if kind is yaml.SequenceNode else MAP


_Loader: Final = type("_Loader", (LOADER,), {"resolve": _resolve})


def read_go_yaml(content: bytes, name: str) -> Place | None:
    """Read the document as yaml.v2 does, with the limits of agent.codec.yaml_places.read_yaml.

    Raises SettingsError.
    """
    document = read_yaml(content, name, _Loader)
    if document is not None:
        _name_keys(document.node)
    return document


def _name_keys(node: yaml.Node) -> None:
    """Make every key a text, even if it would be another value."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _name_keys(item)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            key.tag = STR if key.tag in {INT, FLOAT, BOOL, NULL} else key.tag
            _name_keys(value)


def text(place: Place) -> str:
    """Read any scalar as it is written; null is empty."""
    if not isinstance(place.node, yaml.ScalarNode):
        raise place.fault(f"text is expected, not {place.shown()}")
    return "" if _value(place) is None else str(place.node.value)


def flag(place: Place) -> bool:
    """Read a boolean, in any of YAML 1.1's words."""
    value = _value(place)
    if not isinstance(value, bool):
        raise place.fault(f"true or false is expected, not {place.shown()}")
    return value


def number(place: Place) -> float:
    """Read a finite number. HAMi also accepts an infinite one, which can scale nothing."""
    value = _value(place)
    if not _is_number(value) or not math.isfinite(value):
        raise place.fault(f"a number is expected, not {place.shown()}")
    return value


def whole(low: int, high: int) -> Callable[[Place], int]:
    """A reader of whole numbers; `1e+06` is one. HAMi silently drops a fraction."""

    def read(place: Place) -> int:
        value = _value(place)
        if not _is_number(value) or not math.isfinite(value) or value != int(value):
            raise place.fault(f"a whole number is expected, not {place.shown()}")
        if not low <= value <= high:
            raise place.fault(f"{place.shown()} is not between {low} and {high}")
        return int(value)

    return read


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _value(place: Place) -> object:
    """The value of a scalar, which an explicit tag must fit; None for null and no scalar."""
    node = place.node
    if not isinstance(node, yaml.ScalarNode):
        return None
    if node.tag == STR:
        return node.value
    tag, value = resolve(node.value)
    if isinstance(value, int) and node.tag == FLOAT:
        return float(value)
    if tag != node.tag:
        raise place.fault(f"{place.shown()} is not of type {cap(node.tag.rpartition(':')[2], 60)}")
    return value
