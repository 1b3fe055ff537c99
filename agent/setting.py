"""The declaration of a setting at the attribute that holds it, and the types with their bounds."""

import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Final

import msgspec

Value = str | int | float | bool | tuple[str, ...] | None
"""The value of a setting, as a file can have it."""

TRUE = frozenset({"1", "t", "T", "true", "TRUE", "True"})
FALSE = frozenset({"0", "f", "F", "false", "FALSE", "False"})

_NUMBER: Final = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")


class WrongValue(Exception):  # noqa: N818 -- becomes a SettingsError where its place is known
    """A value does not fit its setting; str() says what was expected."""


class ValueType(msgspec.Struct, frozen=True):
    """A type with bounds. `schema`: the same in JSON Schema. `write` formats a value for a file.

    `read` takes what YAML has, or the text of a variable or flag. It raises WrongValue.
    """

    read: Callable[[object], Any]
    schema: Mapping[str, object]
    write: Callable[[Any], Value] = lambda value: value

    def __call__(self, value: object) -> Any:  # noqa: ANN401 -- a Value of this type
        """Read `value`."""
        return self.read(value)


def read_text(value: object) -> str:
    """Text. Raises WrongValue."""
    if not isinstance(value, str):
        # YAML reads 94 as a number and `no` as false; quotes make either a string.
        quoted = " in quotes" if isinstance(value, int | float) else ""
        raise WrongValue(f"expected text{quoted}")
    # No path and no message can hold these. A variable that is not UTF-8 has surrogates.
    if re.search("[\0\ud800-\udfff]", value):
        raise WrongValue("expected text of UTF-8 characters without NUL")
    return value


def _boolean(value: object) -> bool:
    if not (isinstance(value, bool | str) and str(value) in TRUE | FALSE):
        raise WrongValue("expected true or false")
    return str(value) in TRUE


boolean = ValueType(_boolean, {"type": "boolean"})
"""True or false; variables and flags may also say 1, 0, t or f."""

text = ValueType(read_text, {"type": "string"})


def _text_or_whole(value: object) -> str:
    # A number of thousands of digits would take long to write.
    is_short = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**19
    return str(value) if is_short else read_text(value)


text_or_whole = ValueType(_text_or_whole, {"type": ["string", "integer"]})
"""A string. A whole number becomes the string of its digits."""


def text_where(holds: Callable[[str], object], expected: str, **schema: object) -> ValueType:
    """Text for which `holds` is true. Messages say what was `expected`."""

    def check(value: object) -> str:
        found = read_text(value)
        if not holds(found):
            raise WrongValue(expected)
        return found

    return ValueType(check, {"type": "string", **schema})


def text_like(form: re.Pattern[str], example: str) -> ValueType:
    """Text of the form `form`. Messages show `example`."""
    return text_where(form.fullmatch, f"expected text like {example}", pattern=f"^{form.pattern}$")


def optional(kind: ValueType, **schema: str) -> ValueType:
    """The same text, or an empty one, which counts as not set."""
    return ValueType(
        lambda value: kind(value) if read_text(value) else None, {"type": "string", **schema}
    )


_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DOMAIN = rf"{_LABEL}(\.{_LABEL})*"

optional_text = optional(text)
path = text_where(lambda path: path.startswith("/"), "expected an absolute path", pattern="^/")
optional_path = optional(path, pattern="^(/|$)")

_NODE_NAME = re.compile(rf"(?=.{{1,253}}\Z){_DOMAIN}")
node_name = optional(
    text_where(_NODE_NAME.fullmatch, "expected the name of a Node, like gpu-1 (lower case)")
)
"""Source: kubernetes pkg/apis/core/validation ValidateNodeName (a DNS subdomain)."""

resource_name = text_where(
    re.compile(
        rf"(?!requests\.|.*kubernetes\.io/)(?=[^/]{{1,244}}/){_DOMAIN}"
        r"/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
    ).fullmatch,
    "expected a name like nvidia.com/gpu",
    pattern="^[^/]+/[^/]+$",
)
"""By the kubelet's rule: kubernetes pkg/apis/core/v1/helper IsExtendedResourceName."""

optional_resource = text_like(re.compile("([^/]+/[^/]+)?"), "nvidia.com/gpumem")
"""The name of a resource that pods request and no node has; empty: there is none."""


def choice(*words: str, like: Mapping[str, str] | None = None) -> ValueType:
    """One of `words`. `like`: other spellings, of HAMi and NVIDIA, with the word for each."""

    def read(value: object) -> str:
        if isinstance(value, str) and (word := (like or {}).get(value, value)) in words:
            return word
        raise WrongValue(f"expected one of {', '.join(words)}")

    return ValueType(read, {"enum": list(words)})


def list_of(item: ValueType, least: int = 0) -> ValueType:
    """A list of at least `least` items, separated by commas in variables and flags."""

    def read(value: object) -> tuple[str, ...]:
        items = value
        if isinstance(value, str):
            items = [part for part in map(str.strip, value.split(",")) if part]
        if not isinstance(items, list) or len(items) < least:
            raise WrongValue("expected a list of one or more" if least else "expected a list")
        return tuple(str(item(one)) for one in items)

    bound = {"minItems": least} if least else {}
    return ValueType(read, {"type": "array", "items": item.schema, **bound})


texts = list_of(text)


# Numbers and durations.


def _whole(value: object) -> int | None:
    if isinstance(value, str) and re.fullmatch("-?[0-9]{1,19}", value):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)  # Helm writes 131072 as 1.31072e+05
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _decimal(value: Any) -> float | None:  # noqa: ANN401 -- float() judges it
    """The finite number; None if it is none. float() also takes `1_0` and other scripts."""
    if isinstance(value, bool) or (isinstance(value, str) and not _NUMBER.fullmatch(value)):
        return None
    try:
        parsed = float(value)
    except (OverflowError, TypeError):
        return None
    return parsed if math.isfinite(parsed) else None


def number(
    low: float,
    high: float,
    parse: Callable[[object], float | None] = _decimal,
    expected: str = "a number",
    show: Callable[[float], str] = "{:.10g}".format,
    kind: str = "number",
) -> ValueType:
    """A finite number from `low` to `high`, which `parse` finds in a value."""

    def read(value: object) -> float:
        parsed = parse(value)
        if parsed is None:
            raise WrongValue(f"expected {expected}")
        if not low <= parsed <= high:
            raise WrongValue(f"expected {show(low)} to {show(high)}")
        return parsed

    return ValueType(read, {"type": kind, "minimum": low, "maximum": high})


def whole(low: int, high: int) -> ValueType:
    """A whole number from `low` to `high`."""
    return number(low, high, _whole, "a whole number", kind="integer")


indexes = list_of(whole(0, 1_000_000))
"""Of GPUs."""


HOW: Final = "Such as 500ms, 2s, 10m or 1h; a number alone is seconds."
"""The last sentence of each duration's help."""

_UNITS: Final = {"h": Decimal(3600), "m": Decimal(60), "s": Decimal(1), "ms": Decimal("0.001")}
_FORM: Final = re.compile("([0-9]{1,20}(?:[.][0-9]{1,400})?)(ms|s|m|h)")


def seconds_of(value: object) -> float | None:
    """The seconds of a duration, which is a text with a unit or a number; None if it is none."""
    match = _FORM.fullmatch(value) if isinstance(value, str) else None
    return float(Decimal(match[1]) * _UNITS[match[2]]) if match else _decimal(value)


def written(seconds: float) -> str:
    """Format a duration as the files do, in the largest unit that divides it."""
    exact = Decimal(repr(float(seconds)))
    for unit, size in _UNITS.items():
        if exact >= size and not exact % size:
            return f"{int(exact / size)}{unit}"
    return f"{exact:f}s"


def duration(low: float, high: float) -> ValueType:
    """A duration from `low` to `high` seconds; its value is seconds."""
    expected = "a duration such as 500ms, 2s, 10m or 1h"
    seconds = number(low, high, seconds_of, expected, written)
    words = {"type": "string", "pattern": "^[0-9]+([.][0-9]+)?(ms|s|m|h)?$"}
    return ValueType(seconds.read, {"anyOf": [words, seconds.schema]}, written)


class Field(msgspec.Struct, frozen=True):
    """One setting, declared at the attribute that holds its value: `Annotated[int, Field(...)]`.

    `key`: its path in the file (`sharing.splitCount`). `flag`: the option of `run`; `other_flags`:
    its spellings in HAMi and NVIDIA. `env`: further variables; the first one that is set wins.
    `live`: a change takes effect while the agent runs. Profiles may set a live setting, unless
    `profiled` is False. `convert`: makes the attribute of the value. agent.settings.schema adds
    `default`, that of the attribute, and `place`, the attribute's path in Settings.
    """

    key: str
    read: ValueType
    text: str
    flag: str = ""
    env: tuple[str, ...] = ()
    other_flags: tuple[str, ...] = ()
    live: bool = False
    profiled: bool = True
    convert: Callable[[Any], object] | None = None
    default: Value = None
    place: tuple[str, ...] = ()

    @property
    def variables(self) -> tuple[str, ...]:
        """All variable names: the agent's own, then those of HAMi and NVIDIA."""
        words = "".join(f"_{c}" if c.isupper() else c for c in self.key.replace(".", "_"))
        return (f"HAMI_AGENT_{words.upper()}", *self.env)
