"""Reads JSON into the same tree as YAML, so that an error names line and column.

Keys match in any case, as in Go's encoding/json, and are returned in lower case, except the labels
below `matchLabels`, a map in Go. NaN, Infinity and more than 20 levels are refused.
"""

import bisect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final, cast

import yaml

from agent.codec.gojson import fold
from agent.codec.places import BOOL, FLOAT, INT, MAP, NULL, SEQ, STR, Place, at, decoded, place_of
from agent.codec.plain_words import of_json
from agent.core.errors import SettingsError, cap

MAX_DEPTH: Final = 20
LABELS: Final = "matchlabels"
"""The key whose value keeps its keys as they are written."""

_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')
_LITERALS: Final = {"true": BOOL, "false": BOOL, "null": NULL}
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def read_json(content: bytes, name: str) -> Place:
    """Read the document; messages call the file `name`.

    Raises:
        SettingsError: not UTF-8, not JSON, or nested too deep.
    """
    text = decoded(content, name)
    if not text.strip():
        raise SettingsError(f"{name}: is empty; {{}} is JSON that says nothing")
    try:
        json.loads(text, parse_int=str)  # a too long number is refused later, with its place
    except json.JSONDecodeError as error:
        where = f"{name}:{error.lineno}:{error.colno}"
        raise SettingsError(f"{where}: not valid JSON: {of_json(error.msg)}") from error
    except RecursionError as error:
        raise _too_deep(place_of(text, _beyond(text), name)) from error
    except ValueError as error:
        raise SettingsError(f"{name}: not valid JSON: {cap(str(error))}") from error
    return Place(name, _Tree(text, name).value(0))


def _too_deep(where: str) -> SettingsError:
    return SettingsError(
        f"{where}: nested deeper than {MAX_DEPTH} levels, which no settings file needs; is it the "
        "right one?"
    )


def _beyond(text: str) -> int:
    """The offset of the first bracket beyond the limit."""
    depth = 0
    for match in _TOKEN.finditer(text):
        depth += (match[0] in "{[") - (match[0] in "}]")
        if depth > MAX_DEPTH:
            return match.start()
    return 0


class _Spot:
    """A place in a text; line and column are computed only when read."""

    __slots__ = ("_lines", "_start")

    def __init__(self, lines: Sequence[int], start: int) -> None:
        self._lines = lines
        self._start = start

    @property
    def line(self) -> int:
        """The line, from 0."""
        return bisect.bisect_right(self._lines, self._start) - 1

    @property
    def column(self) -> int:
        """The column, from 0."""
        return self._start - self._lines[self.line]


_Token = tuple[str, int]


class _Tree:
    """Builds the nodes of a text that is known to be valid JSON."""

    def __init__(self, text: str, name: str) -> None:
        self._name = name
        self._lines = [0, *(match.end() for match in re.finditer("\n", text))]
        self._tokens = ((match[0], match.start()) for match in _TOKEN.finditer(text))
        self._next = next(self._tokens)

    def value(self, depth: int, *, is_map: bool = False) -> yaml.Node:
        """Read the next value; the keys of a map stay as written. Raises SettingsError."""
        token = self._take()
        if depth >= MAX_DEPTH:
            raise _too_deep(self._where(token))
        spot = self._spot(token)
        if token[0] == "{":
            members = list(self._members(depth, str if is_map else fold))
            return yaml.MappingNode(MAP, members, start_mark=spot)
        if token[0] == "[":
            return yaml.SequenceNode(SEQ, list(self._items(depth)), start_mark=spot)
        return self._scalar(token)

    def _members(
        self, depth: int, spelling: Callable[[str], str]
    ) -> Iterator[tuple[yaml.Node, yaml.Node]]:
        while self._next[0] != "}":
            key = self._scalar(self._take())
            key.value = spelling(key.value)
            self._take()  # the colon
            yield key, self.value(depth + 1, is_map=key.value == LABELS)
            self._skip_comma()
        self._take()

    def _items(self, depth: int) -> Iterator[yaml.Node]:
        while self._next[0] != "]":
            yield self.value(depth + 1)
            self._skip_comma()
        self._take()

    def _skip_comma(self) -> None:
        if self._next[0] == ",":
            self._take()

    def _scalar(self, token: _Token) -> yaml.ScalarNode:
        text = token[0]
        spot = self._spot(token)
        if text[0] == '"':
            value = _SURROGATE.sub("\ufffd", json.loads(text)) if "\\" in text else text[1:-1]
            return yaml.ScalarNode(STR, value, start_mark=spot)
        tag = _LITERALS.get(text)
        if tag is None:
            if text.lstrip("-")[0] not in "0123456789":
                raise SettingsError(f"{self._where(token)}: {text} is not a JSON value")
            tag = INT if text.lstrip("-").isdigit() else FLOAT
        return yaml.ScalarNode(tag, text, start_mark=spot)

    def _take(self) -> _Token:
        token = self._next
        self._next = next(self._tokens, token)
        return token

    def _spot(self, token: _Token) -> yaml.Mark:
        """The token's place as a Mark, of which only line and column are read."""
        return cast("yaml.Mark", _Spot(self._lines, token[1]))

    def _where(self, token: _Token) -> str:
        return at(self._name, self._spot(token))
