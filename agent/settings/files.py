"""Reads YAML and JSON with the place of each value, and the agent's own file.

Both languages become the same tree, so the same strict readers serve both, and an error names file,
line and column. Refused in one sentence: text that is not UTF-8, YAML aliases, several documents,
more than 20 levels, repeated keys, NaN in JSON. No settings file needs them, and attacks use some
of them.
"""

import bisect
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec
import yaml

from agent.cluster import Selector, parse_selector
from agent.errors import MalformedText, SettingsError, cap
from agent.setting import Field
from agent.settings.schema import BY_KEY, LIVE, Setting, read_setting
from agent.settings.sources import Faults, Layer, ProfileMatch, SettingsProfile

NULL, INT, FLOAT, BOOL, STR, MAP, SEQ = (
    f"tag:yaml.org,2002:{name}" for name in ("null", "int", "float", "bool", "str", "map", "seq")
)
"""Tags of YAML: the types of nodes."""

MAX_DEPTH: Final = 20

# libyaml takes a tenth of the time, which shortens every start; both read the same YAML.
LOADER: Final[type[yaml.SafeLoader]] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]]|[^\s{}\[\],:"]+')
"""What valid JSON consists of, besides commas and colons."""

Mark = Any
"""A place in a text, from 0, of either of PyYAML's parsers: their types have nothing in common."""

_LITERALS: Final = {"true": BOOL, "false": BOOL, "null": NULL}
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def read_yaml(content: bytes, name: str) -> "Place | None":
    """Read the document, None for an empty file; messages call the file `name`.

    Raises:
        SettingsError: not UTF-8, not YAML, or one of the refused features.
    """
    text = _decoded(content, name)
    # The parsers name no line of such a character.
    if (bad := yaml.reader.Reader.NON_PRINTABLE.search(text)) is not None:
        lines = text[: bad.start()].split("\n")
        where = f"{name}:{len(lines)}:{len(lines[-1]) + 1}"
        raise SettingsError(f"{where}: not valid YAML: unacceptable character #x{ord(bad[0]):04x}")

    try:
        _refuse_harm(content, name)
        node = yaml.compose(content, Loader=LOADER)
    except yaml.MarkedYAMLError as error:
        # A quote that is never closed: the place where it was opened helps, not the file's end.
        is_open = error.problem == "found unexpected end of stream" and error.context_mark
        where = _at(name, error.context_mark if is_open else error.problem_mark)
        raise SettingsError(
            f"{where}: not valid YAML: {cap(error.problem or str(error))}"
        ) from error
    return None if node is None else Place(name, node)


def read_json(content: bytes, name: str) -> "Place":
    """Read the document; messages call the file `name`.

    Raises:
        SettingsError: not UTF-8, not JSON, or nested too deep.
    """
    text = _decoded(content, name)
    if not text.strip():
        raise SettingsError(f"{name}: is empty; {{}} is JSON that says nothing")

    # What is nested too deep for the decoder is refused below, with its place.
    with contextlib.suppress(RecursionError):
        try:
            json.loads(text, parse_int=str)  # a too long number is refused later, with its place
        except json.JSONDecodeError as error:
            where = f"{name}:{error.lineno}:{error.colno}"
            problem = error.msg.removesuffix(" at").removesuffix(" starting")
            raise SettingsError(f"{where}: not valid JSON: {problem}") from error
    return Place(name, _tree(text, name))


def _decoded(content: bytes, name: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise SettingsError(
            f"{name}:{line}: is not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from error


def _at(name: str, mark: Mark) -> str:
    """Format a mark as `file:line:column`, from 1."""
    return f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name


def _too_deep(name: str, mark: Mark) -> SettingsError:
    return SettingsError(
        f"{_at(name, mark)}: nested deeper than {MAX_DEPTH} levels, which no settings file needs; "
        "is it the right one?"
    )


def _refuse_harm(content: bytes, name: str) -> None:
    """Refuse aliases and depth from the parser's events, before the recursive compose.

    Templates too: the parser's own word for `{{` says something else of the line after it.
    """
    depth, brace = 0, -1
    for event in yaml.parse(content, Loader=LOADER):
        if isinstance(event, yaml.MappingStartEvent) and event.flow_style and event.start_mark:
            if event.start_mark.index == brace + 1 and brace >= 0:
                where = _at(name, event.start_mark)
                raise SettingsError(f"{where}: this is a template that was not rendered")
            brace = event.start_mark.index

        if isinstance(event, yaml.AliasEvent):
            where = _at(name, event.start_mark)
            raise SettingsError(f"{where}: aliases are not allowed here; write the value out")

        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise _too_deep(name, event.start_mark)


def _tree(text: str, name: str) -> yaml.Node:
    """The nodes of a text that is valid JSON, but for NaN, Infinity and its depth."""
    lines = [0, *(match.end() for match in re.finditer("\n", text))]
    tokens = _TOKEN.finditer(text)

    def mark(token: re.Match[str]) -> yaml.Mark:
        start = token.start()
        line = bisect.bisect_right(lines, start) - 1
        return yaml.Mark(name, start, line, start - lines[line], None, 0)

    def node(token: re.Match[str], depth: int) -> yaml.Node:
        begin, start = token[0], mark(token)
        if depth > MAX_DEPTH:
            raise _too_deep(name, start)

        if begin in {"{", "["}:
            nodes = []
            while (inner := next(tokens))[0] not in {"}", "]"}:
                nodes.append(node(inner, depth + 1))
            if begin == "[":
                return yaml.SequenceNode(SEQ, nodes, start)

            pairs = list(zip(nodes[::2], nodes[1::2], strict=True))
            return yaml.MappingNode(MAP, pairs, start)

        if begin[0] == '"':
            # Half of a character becomes U+FFFD, as in Go.
            value = _SURROGATE.sub("\ufffd", json.loads(begin))
            return yaml.ScalarNode(STR, value, start, style='"')

        digits = begin.removeprefix("-")
        if begin not in _LITERALS and not digits[0].isdigit():
            raise SettingsError(f"{_at(name, start)}: {begin} is not a JSON value")
        number = INT if digits.isdigit() else FLOAT
        return yaml.ScalarNode(_LITERALS.get(begin, number), begin, start)

    return node(next(tokens), 1)


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
        if not isinstance(self.node, yaml.MappingNode):
            raise self.fault(f"keys and values are expected here, not {self.shown()}")
        if self.node.tag != MAP:
            raise self.fault(f"the tag {cap(self.node.tag, 60)} is unknown")

        seen: set[str] = set()
        for key, value in self.node.value:
            here = Place(self.file, key, self.field)
            if not isinstance(key, yaml.ScalarNode) or key.tag != STR:
                raise here.fault(f"a text key is expected, not {here.shown()}")

            name = spelling(key.value)
            if name in seen:
                raise here.fault(f"the key `{cap(name, 64)}` stands here twice; remove one")

            seen.add(name)
            yield name, here, Place(self.file, value, f"{self.field}.{name}".lstrip("."))

    def items(self) -> tuple["Place", ...]:
        """Read the entries of a list."""
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.fault(f"a list is expected here, not {self.shown()}")
        return tuple(
            Place(self.file, item, f"{self.field}[{number}]")
            for number, item in enumerate(self.node.value)
        )

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

        try:
            # A new one each time: it keeps every node that it was ever given.
            return yaml.constructor.SafeConstructor().construct_object(self.node, deep=True)
        except yaml.MarkedYAMLError as error:
            raise self.fault(f"not valid YAML: {cap(error.problem or str(error))}") from error
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            # The constructors raise these for a value that does not fit its explicit tag
            # (`!!bool maybe`) and for a number with too many digits.
            raise self.fault(
                f"not valid YAML: {self.shown()} is not of type {tag.rpartition(':')[2]}"
            ) from error

    def shown(self) -> str:
        """A short form of the value for a message."""
        if isinstance(self.node, yaml.ScalarNode):
            # A number or a boolean in quotes is none: without the hint the message puzzles.
            quoted = " (text)" if self.node.style in {'"', "'"} else ""
            return f"`{cap(self.node.value, 40)}`{quoted}" if self.node.value else "nothing"
        return "a list" if isinstance(self.node, yaml.SequenceNode) else "a mapping"


PROFILES: Final = "profiles"


def read_own_file(content: bytes, name: str, faults: Faults) -> Layer:
    """Read the whole file. `name`: its name in messages. Errors go to `faults`.

    Raises SettingsError: the file is not YAML, or is a Kubernetes object.
    """
    document = read_yaml(content, name)
    if document is None or document.null:
        return Layer()
    refuse_object(document)

    settings: list[Setting] = []
    profiles: dict[str, SettingsProfile] = {}
    with faults.kept():
        for key, here, value in document.pairs():
            if key != PROFILES:
                settings.extend(_settings(key, here, value, BY_KEY, faults))
            elif not value.null:
                with faults.kept():
                    for item in value.items():
                        with faults.kept():
                            profile = _profile(item, profiles, faults)
                            profiles[profile.name] = profile
    return Layer(tuple(settings), tuple(profiles.values()))


def refuse_object(document: Place) -> None:
    """Raise SettingsError for a Kubernetes object: people give the ConfigMap around the file."""
    pairs = document.node.value if isinstance(document.node, yaml.MappingNode) else ()
    keys = [key.value for key, _ in pairs]
    if "apiVersion" in keys and "kind" in keys:
        raise document.fault(
            "this is a Kubernetes object, not a settings file; give the file in its ConfigMap"
        )


def _profile(item: Place, former: Mapping[str, object], faults: Faults) -> SettingsProfile:
    """Read one profile. Raises SettingsError, also if `former` has its name."""
    keys = {key: (here, value) for key, here, value in item.pairs()}
    _, name = keys.pop("name", (None, None))
    _, match = keys.pop("match", (None, None))
    settings = [
        one
        for key, (here, value) in keys.items()
        for one in _settings(key, here, value, LIVE, faults)
    ]

    if name is None or match is None:
        raise item.fault(f"`{'match' if name else 'name'}` is needed")
    text = name.text()
    if text in former:
        raise name.fault(f"the profile {name.shown()} is defined twice")

    nodes: tuple[str, ...] = ()
    labels: Selector | None = None
    for key, here, value in match.pairs():
        if key == "nodes":
            nodes = tuple(item.text() for item in value.items())
            if not nodes:
                raise value.fault("an empty list selects nothing")
        elif key == "labels":
            try:
                labels = parse_selector(value.text())
            except MalformedText as error:
                raise value.fault(str(error)) from error
        else:
            raise here.fault(f"unknown key `{cap(key, 64)}`; known keys are labels, nodes")

    if not nodes and labels is None:
        raise match.fault("`nodes` or `labels` is needed")
    return SettingsProfile(text, ProfileMatch(nodes, labels), tuple(settings), item.where)


def _settings(
    key: str, here: Place, value: Place, known: Mapping[str, Field], faults: Faults, above: str = ""
) -> Iterator[Setting]:
    """The settings at and below `key`. `above`: the keys above it, each with its dot."""
    path = above + key
    with faults.kept():
        if path in known and "." not in key:
            yield read_setting(known[path], value.value(), value.where, value.shown())
        elif "." not in key and any(name.startswith(f"{path}.") for name in known):
            # Null is a section whose keys are all commented out.
            for name, place, inner in () if value.null else value.pairs():
                yield from _settings(name, place, inner, known, faults, f"{path}.")
        elif "." not in key and any(f"{name}.".startswith(f"{path}.") for name in BY_KEY):
            raise SettingsError(
                f"{here.where}: a profile cannot set {path}, which acts before the node is known"
            )
        else:
            # A key with a dot would be a second way to set the same setting.
            raise SettingsError(
                f"{here.where}: unknown setting {cap(path, 64)}; `hami-agent config show` lists all"
            )
