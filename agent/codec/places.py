"""Values of a file with their places, so that an error names file, line and column.

YAML and JSON are read into the same tree, so the same strict readers serve both.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Final, Protocol

import msgspec
import yaml

from agent.codec.gojson import is_float64
from agent.codec.plain_words import of_yaml
from agent.core.errors import SettingsError, cap

TAG: Final = "tag:yaml.org,2002:"
NULL: Final = f"{TAG}null"
INT: Final = f"{TAG}int"
FLOAT: Final = f"{TAG}float"
BOOL: Final = f"{TAG}bool"
STR: Final = f"{TAG}str"
MAP: Final = f"{TAG}map"
SEQ: Final = f"{TAG}seq"

PLAIN: Final = re.compile("-?(0|[1-9][0-9]{0,99})")
"""Whole numbers that mean the same in YAML, JSON and Python."""


class TextMark(Protocol):
    """A place in a text, from 0."""

    @property
    def line(self) -> int:
        """The line."""
        ...

    @property
    def column(self) -> int:
        """The column."""
        ...


def at(name: str, mark: TextMark | None) -> str:
    """Format a mark as `file:line:column`, from 1."""
    return f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name


def decoded(content: bytes, name: str) -> str:
    """Decode a file that messages call `name`. Raises SettingsError: it is not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise SettingsError(
            f"{name}:{line}: is not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from error


def place_of(text: str, offset: int, name: str) -> str:
    """Format the place of a character as `file:line:column`, from 1."""
    start = text.rfind("\n", 0, offset) + 1
    return f"{name}:{text.count(chr(10), 0, offset) + 1}:{offset - start + 1}"


class Place(msgspec.Struct, frozen=True):
    """A value in a file. Messages call the file `file`; `field` is the path to the value.

    Every reader raises SettingsError with the place.
    """

    file: str
    node: yaml.Node
    field: str = ""

    @property
    def where(self) -> str:
        """`file:line:column`."""
        return at(self.file, self.node.start_mark)

    def fault(self, text: str) -> SettingsError:
        """Make a SettingsError with `text` at this place."""
        field = f"{self.field}: " if self.field else ""
        return SettingsError(f"{self.where}: {field}{text}")

    @property
    def null(self) -> bool:
        """True when the value is null."""
        return bool(self.node.tag == NULL)

    def pairs(self) -> Iterator[tuple[str, "Place", "Place"]]:
        """Yield each key, its place and its value in the file's order; refuses a repeated key."""
        if not isinstance(self.node, yaml.MappingNode):
            raise self.fault(f"keys and values are expected here, not {self.shown()}")
        if self.node.tag != MAP:
            raise self.fault(f"the tag {cap(self.node.tag, 60)} is unknown")
        seen: set[str] = set()
        for key, value in self.node.value:
            here = Place(self.file, key, self.field)
            if not isinstance(key, yaml.ScalarNode) or key.tag != STR:
                raise here.fault(f"a text key is expected, not {here.shown()}")
            name = key.value
            if name in seen:
                raise here.fault(f"the key `{cap(name, 64)}` stands here twice; remove one")
            seen.add(name)
            yield name, here, Place(self.file, value, f"{self.field}.{name}".lstrip("."))

    def mapping(self, known: frozenset[str]) -> Mapping[str, "Place"]:
        """Read the values by key; refuses an unknown or repeated key."""
        values: dict[str, Place] = {}
        for name, here, value in self.pairs():
            if name not in known:
                names = ", ".join(sorted(known))
                raise here.fault(f"unknown key `{cap(name, 64)}`; known keys are {names}")
            values[name] = value
        return values

    def items(self) -> tuple["Place", ...]:
        """Read the entries of a list."""
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.fault(f"a list is expected here, not {self.shown()}")
        return tuple(
            Place(self.file, item, f"{self.field}[{number}]")
            for number, item in enumerate(self.node.value)
        )

    def integer(self, low: int, high: int) -> int:
        """Read a whole number from `low` to `high`."""
        if self.node.tag != INT:
            raise self.fault(f"a whole number is expected, not {self.shown()}")
        value = self.value()
        if not isinstance(value, int) or not low <= value <= high:
            raise self.fault(f"{self.shown()} is not between {low} and {high}")
        return value

    def number(self) -> float:
        """Read a finite number; a whole one stays an int."""
        value = self.value() if self.node.tag in {INT, FLOAT} else None
        if not isinstance(value, int | float) or not is_float64(value):
            raise self.fault(f"a number is expected, not {self.shown()}")
        return value

    def boolean(self) -> bool:
        """Read a boolean."""
        value = self.value() if self.node.tag == BOOL else None
        if not isinstance(value, bool):
            raise self.fault(f"true or false is expected, not {self.shown()}")
        return value

    def text(self) -> str:
        """Read a text that is not empty."""
        is_text = isinstance(self.node, yaml.ScalarNode) and self.node.tag == STR
        if not is_text or not self.node.value.strip():
            raise self.fault(f"text is expected, not {self.shown()}")
        return str(self.node.value)

    def value(self) -> object:
        """Read any value as plain Python values; refuses a scalar that does not fit its tag."""
        text, tag = self.node.value, self.node.tag
        if tag == STR and isinstance(text, str):
            return text
        if tag == INT and isinstance(text, str) and PLAIN.fullmatch(text):
            return int(text)  # the constructor takes a hundred times as long
        try:
            # A new one each time: it keeps every node that it was ever given.
            return yaml.constructor.SafeConstructor().construct_object(self.node, deep=True)
        except yaml.MarkedYAMLError as error:
            problem = of_yaml(error.problem or str(error), "")
            raise self.fault(f"not valid YAML: {cap(problem)}") from error
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            # The constructors raise these for a value that does not fit its explicit tag
            # (`!!bool maybe`) and for a number with too many digits.
            raise self.fault(
                f"not valid YAML: {self.shown()} is not of type {tag.rpartition(':')[2]}"
            ) from error

    def shown(self) -> str:
        """A short form of the value for a message."""
        if isinstance(self.node, yaml.ScalarNode):
            text = " (text)" if _is_quoted(self.node) else ""
            return f"`{cap(self.node.value, 40)}`{text}" if self.node.value else "nothing"
        return "a list" if isinstance(self.node, yaml.SequenceNode) else "a mapping"


def _is_quoted(node: yaml.ScalarNode) -> bool:
    """True for a text that would be another value without its quotes."""
    resolver = yaml.resolver.Resolver()
    plain = resolver.resolve(yaml.ScalarNode, node.value, (True, False))  # type: ignore[no-untyped-call]
    return bool(node.tag == STR and node.value and plain != STR)
