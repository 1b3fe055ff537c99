"""Values of a file that know where they stand, so that an error can name file, line and column.

YAML and JSON are read into the same tree: one set of strict readers serves every file.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Final, Protocol

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
"""Whole numbers that YAML, JSON and Python write alike."""


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
    """`file:line:column`, from 1."""
    return f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name


def decoded(content: bytes, name: str) -> str:
    """The text of a file that messages call `name`. Raises SettingsError: it is no UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise SettingsError(
            f"{name}:{line}: is not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from error


def place_of(text: str, offset: int, name: str) -> str:
    """`file:line:column` of a character, from 1."""
    start = text.rfind("\n", 0, offset) + 1
    return f"{name}:{text.count(chr(10), 0, offset) + 1}:{offset - start + 1}"


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A value in a file. `file` is what messages call it, `field` the path to the value in it.

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
        """The error `text` at this place."""
        field = f"{self.field}: " if self.field else ""
        return SettingsError(f"{self.where}: {field}{text}")

    @property
    def null(self) -> bool:
        """True when the value is null."""
        return bool(self.node.tag == NULL)

    def pairs(self) -> Iterator[tuple[str, "Place", "Place"]]:
        """Key, the key's place and the value, in the order of the file; a key stands there once."""
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
        """The values by key; refuses an unknown or repeated key."""
        found: dict[str, Place] = {}
        for name, here, value in self.pairs():
            if name not in known:
                names = ", ".join(sorted(known))
                raise here.fault(f"unknown key `{cap(name, 64)}`; known keys are {names}")
            found[name] = value
        return found

    def items(self) -> tuple["Place", ...]:
        """The entries of a list."""
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.fault(f"a list is expected here, not {self.shown()}")
        return tuple(
            Place(self.file, item, f"{self.field}[{number}]")
            for number, item in enumerate(self.node.value)
        )

    def integer(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`."""
        if self.node.tag != INT:
            raise self.fault(f"a whole number is expected, not {self.shown()}")
        value = self.value()
        if not isinstance(value, int) or not low <= value <= high:
            raise self.fault(f"{self.shown()} is not between {low} and {high}")
        return value

    def number(self) -> float:
        """A finite number; a whole one stays whole."""
        value = self.value() if self.node.tag in {INT, FLOAT} else None
        if not isinstance(value, int | float) or not is_float64(value):
            raise self.fault(f"a number is expected, not {self.shown()}")
        return value

    def boolean(self) -> bool:
        """True or false."""
        value = self.value() if self.node.tag == BOOL else None
        if not isinstance(value, bool):
            raise self.fault(f"true or false is expected, not {self.shown()}")
        return value

    def text(self) -> str:
        """Text that is not empty."""
        is_text = isinstance(self.node, yaml.ScalarNode) and self.node.tag == STR
        if not is_text or not self.node.value.strip():
            raise self.fault(f"text is expected, not {self.shown()}")
        return str(self.node.value)

    def raw(self) -> str:
        """The scalar as it is written, whatever YAML would make of it.

        `0000:18:00.0` is a number to YAML 1.1, and so is `570.148`.
        """
        if not isinstance(self.node, yaml.ScalarNode) or not self.node.value.strip():
            raise self.fault(f"text is expected, not {self.shown()}")
        return str(self.node.value)

    def value(self) -> object:
        """Whatever stands here, as plain values; a scalar that its type cannot hold is refused."""
        text, tag = self.node.value, self.node.tag
        if tag == STR and isinstance(text, str):
            return text
        if tag == INT and isinstance(text, str) and PLAIN.fullmatch(text):
            return int(text)  # most of a great file; the constructor takes a hundred times as long
        try:
            # A fresh one: it remembers every node that it was ever given.
            return yaml.constructor.SafeConstructor().construct_object(self.node, deep=True)
        except yaml.MarkedYAMLError as error:
            problem = of_yaml(error.problem or str(error), "")
            raise self.fault(f"not valid YAML: {cap(problem)}") from error
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            # What the constructors raise at an explicit tag (`!!bool maybe`) over another value,
            # and at a number of more digits than fit.
            raise self.fault(
                f"not valid YAML: {self.shown()} is no {tag.rpartition(':')[2]}"
            ) from error

    def shown(self) -> str:
        """A short form of the value for a message."""
        if isinstance(self.node, yaml.ScalarNode):
            text = " (text)" if _is_quoted(self.node) else ""
            return f"`{cap(self.node.value, 40)}`{text}" if self.node.value else "nothing"
        return "a list" if isinstance(self.node, yaml.SequenceNode) else "a mapping"


def _is_quoted(node: yaml.ScalarNode) -> bool:
    """True for text that looks like something else, as it would be without its quotes."""
    resolver = yaml.resolver.Resolver()
    plain = resolver.resolve(yaml.ScalarNode, node.value, (True, False))  # type: ignore[no-untyped-call]
    return bool(node.tag == STR and node.value and plain != STR)
