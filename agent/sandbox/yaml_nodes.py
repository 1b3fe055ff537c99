"""YAML read strictly: each value keeps the line it stands on, so that an error can name it."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import yaml

from agent.core.errors import SettingsError, cap

_NULL: Final = "tag:yaml.org,2002:null"
_INT: Final = "tag:yaml.org,2002:int"
_BOOL: Final = "tag:yaml.org,2002:bool"
_STR: Final = "tag:yaml.org,2002:str"


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A value in a file, and where: every reader raises SettingsError with file:line."""

    file: Path
    node: yaml.Node
    field: str = ""

    def fault(self, text: str) -> SettingsError:
        """The error `text` at this place."""
        field = f"{self.field}: " if self.field else ""
        line = self.node.start_mark.line + 1
        return SettingsError(f"{self.file}:{line}: {field}{text}")

    def mapping(self, known: frozenset[str]) -> Mapping[str, "Place"]:
        """The values by key; refuses an unknown or repeated key."""
        if not isinstance(self.node, yaml.MappingNode):
            raise self.fault("a mapping is expected here")
        found: dict[str, Place] = {}
        for key, value in self.node.value:
            name = str(key.value)
            here = Place(self.file, key, self.field)
            if name not in known:
                names = ", ".join(sorted(known))
                raise here.fault(f"unknown key `{cap(name, 64)}`; known keys are {names}")
            if name in found:
                raise here.fault(f"the key `{name}` stands here twice")
            found[name] = Place(self.file, value, f"{self.field}.{name}".lstrip("."))
        return found

    def items(self) -> tuple["Place", ...]:
        """The entries of a list."""
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.fault("a list is expected here")
        return tuple(
            Place(self.file, item, f"{self.field}[{number}]")
            for number, item in enumerate(self.node.value)
        )

    @property
    def null(self) -> bool:
        """True when the value is null."""
        return bool(self.node.tag == _NULL)

    def integer(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`."""
        if self.node.tag != _INT:
            raise self.fault(f"a whole number is expected, not {self._shown()}")
        value = int(yaml.safe_load(self.node.value))
        if not low <= value <= high:
            raise self.fault(f"{value} is not between {low} and {high}")
        return value

    def boolean(self) -> bool:
        """True or false."""
        if self.node.tag != _BOOL:
            raise self.fault(f"true or false is expected, not {self._shown()}")
        return bool(yaml.safe_load(self.node.value))

    def text(self) -> str:
        """Text that is not empty."""
        if self.node.tag != _STR or not self.node.value.strip():
            raise self.fault(f"text is expected, not {self._shown()}")
        return str(self.node.value)

    def raw(self) -> str:
        """The scalar as it is written, whatever YAML would make of it.

        `0000:18:00.0` is a number to YAML 1.1, and so is `570.148`.
        """
        if not isinstance(self.node, yaml.ScalarNode) or not self.node.value.strip():
            raise self.fault(f"text is expected, not {self._shown()}")
        return str(self.node.value)

    def _shown(self) -> str:
        if isinstance(self.node, yaml.ScalarNode):
            return f"`{cap(self.node.value, 64)}`" if self.node.value else "nothing"
        return "a list" if isinstance(self.node, yaml.SequenceNode) else "a mapping"


def read_yaml(file: Path) -> Place:
    """The document in `file`. Raises SettingsError: unreadable, not UTF-8, no YAML, empty."""
    try:
        text = file.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise SettingsError(f"{file}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{file}: is not UTF-8 text (byte {error.start})") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise SettingsError(f"{file}:{line}: is not YAML: {cap(str(error.problem))}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{file}: is not YAML: {cap(str(error))}") from error
    if node is None:
        raise SettingsError(f"{file}: is empty")
    return Place(file, node)
