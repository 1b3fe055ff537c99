"""The agent's own YAML file: every scalar with its line and column.

Aliases, duplicate keys, several documents, more than 256 KiB and more than 20 levels are refused:
a settings file needs none of them, and each has been used to harm a reader.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import yaml

from agent.core.errors import SettingsError, cap

MAX_BYTES = 256 * 1024
MAX_DEPTH = 20
MAP_TAG = "tag:yaml.org,2002:map"


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A value of the file: its dotted key, itself, and where it stands (`file:line:column`)."""

    key: str
    value: object
    where: str


def read_file(path: Path) -> tuple[Entry, ...]:
    """All entries of the file. Raises SettingsError with the file and, where known, the line."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        reason = error.strerror or str(error)
        raise SettingsError(
            f"{path}: cannot be read: {reason}; check the path and its rights"
        ) from (error)
    if len(content) > MAX_BYTES:
        raise SettingsError(
            f"{path}: is larger than {MAX_BYTES // 1024} KiB; is it the right file?"
        )
    return parse(content, str(path))


def parse(content: bytes, name: str) -> tuple[Entry, ...]:
    """All entries of `content`; `name` is what messages call the file. Raises SettingsError."""
    try:
        loader = yaml.SafeLoader(content)
        try:
            _refuse_aliases(content, name)
            node = loader.get_single_node()
            if node is None:
                return ()
            return tuple(_entries(node, "", name, loader, 0))
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise SettingsError(
            f"{where}: not valid YAML: {cap(error.problem or str(error))}"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"{name}: not valid YAML: {cap(str(error))}") from error


def _refuse_aliases(content: bytes, name: str) -> None:
    depth = 0
    for event in yaml.parse(content, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise SettingsError(f"{_at(name, event.start_mark)}: aliases are not allowed here")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise SettingsError(
                f"{_at(name, event.start_mark)}: nested deeper than {MAX_DEPTH} levels"
            )


class _Mark(Protocol):
    """A place in a YAML text, from 0."""

    line: int
    column: int


def _at(name: str, mark: _Mark | None) -> str:
    return f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name


def _entries(
    node: yaml.Node, prefix: str, name: str, loader: yaml.SafeLoader, depth: int
) -> Iterator[Entry]:
    if not isinstance(node, yaml.MappingNode):
        if depth == 0:
            raise SettingsError(f"{_at(name, node.start_mark)}: expected keys and values")
        yield Entry(prefix, loader.construct_object(node, deep=True), _at(name, node.start_mark))
        return
    if node.tag != MAP_TAG:
        raise SettingsError(f"{_at(name, node.start_mark)}: the tag {cap(node.tag, 60)} is unknown")
    seen: set[str] = set()
    for key_node, value_node in node.value:
        where = _at(name, key_node.start_mark)
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise SettingsError(f"{where}: expected a text key, found {cap(repr(key), 40)}")
        if key in seen:
            raise SettingsError(f"{where}: {prefix and prefix + '.'}{key} is there twice")
        seen.add(key)
        dotted = f"{prefix}.{key}" if prefix else key
        yield from _entries(value_node, dotted, name, loader, depth + 1)
