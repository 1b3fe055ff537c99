"""Reads YAML and JSON with the place of each value, and collects what is wrong with them.

JSON is checked by a parser of JSON, and then read as the YAML that it also is: the marks of YAML
are the places of its values. Refused in one sentence: text that is not UTF-8, YAML aliases, several
documents, more than 20 levels, repeated keys. No settings file needs them, and attacks use some of
them.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec
import yaml

from agent.errors import SettingsError, cap

NULL, STR, MAP = (f"tag:yaml.org,2002:{name}" for name in ("null", "str", "map"))
"""Tags of YAML: the types of nodes."""

MAX_DEPTH: Final = 20

# libyaml takes a tenth of the time, which shortens every start; both read the same YAML.
LOADER: Final[type[yaml.SafeLoader]] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

MISFITS: Final = ValueError, TypeError, LookupError, AttributeError, ArithmeticError
"""What the constructors of YAML raise for a value that does not fit its tag (`!!bool maybe`), and
for a number with too many digits."""

_UNLIKE: Final = re.compile(r"(?:\\u[dD][89a-fA-F][0-9a-fA-F]{2})+|\\.|[\t\x85\u2028\u2029\ufeff]")
"""What the parsers of YAML read otherwise than JSON, or refuse, and other escapes."""

TOLD: Final = 20
"""Warnings of one kind about one file; further ones are only counted."""


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
        more = f" (and {len(every) - 1} more)" if len(every) > 1 else ""
        raise SettingsError(f"{every[0]}{more}", every=every)


def first_of(warnings: Sequence[str], name: str) -> list[str]:
    """The first TOLD of the warnings about `name`, and one with the number of the others."""
    more = len(warnings) - TOLD
    count = [f"{name}: and {more} more are passed over"] if more > 0 else []
    return [*warnings[:TOLD], *count]


def read_yaml(content: bytes, name: str, *, is_json: bool = False) -> "Place":
    """Read the document; an empty file is null. Messages call the file `name`.

    Raises:
        SettingsError: not UTF-8, not YAML, or one of the refused features.
    """
    _decoded(content, name)
    try:
        _refuse_harm(content, name)
        node = yaml.compose(content, Loader=LOADER) or yaml.ScalarNode(NULL, "", None)
    except yaml.MarkedYAMLError as error:
        # A quote that is never closed: the place where it was opened helps, not the file's end.
        is_open = error.problem == "found unexpected end of stream" and error.context_mark
        where = _at(name, error.context_mark if is_open else error.problem_mark)
        raise SettingsError(f"{where}: not valid YAML: {cap(str(error.problem))}") from error

    place = Place(name, node, is_json=is_json)
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    if {"apiVersion", "kind"} <= {str(key.value) for key, _ in pairs}:
        raise place.fault(
            "this is a Kubernetes object, not a settings file; give the file in its ConfigMap"
        )
    return place


def read_json(content: bytes, name: str) -> "Place":
    """Read the document; messages call the file `name`.

    Raises:
        SettingsError: not UTF-8, not JSON, or nested too deep.
    """
    text = _decoded(content, name)
    # What is nested too deep for the decoder is refused below, with its place.
    with contextlib.suppress(RecursionError):
        try:
            json.loads(text, parse_int=str)  # a too long number is refused later, with its place
        except json.JSONDecodeError as error:
            where = f"{name}:{error.lineno}:{error.colno}"
            problem = error.msg.removesuffix(" at").removesuffix(" starting")
            raise SettingsError(f"{where}: not valid JSON: {problem}") from error
    return read_yaml(_UNLIKE.sub(_for_yaml, text).encode(), name, is_json=True)


def _for_yaml(found: re.Match[str]) -> str:
    """A form with the same meaning in both languages. Tabs of JSON are outside its texts."""
    part = found[0]
    if len(part) > 2:
        # Two escapes are a character; half of one becomes U+FFFD, as in Go.
        pair: str = json.loads(f'"{part}"')
        return pair.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return part if part[0] == "\\" else " " if part == "\t" else f"\\u{ord(part):04x}"


def _decoded(content: bytes, name: str) -> str:
    """The text. The parsers name no line of a character that it may not have."""
    text = content.decode(errors="surrogateescape")
    if (bad := yaml.reader.Reader.NON_PRINTABLE.search(text)) is not None:
        lines = text[: bad.start()].split("\n")
        raise SettingsError(
            f"{name}:{len(lines)}:{len(lines[-1]) + 1}: is not UTF-8 text, or has a control "
            f"character (byte {len(text[: bad.start()].encode())}); save it as UTF-8"
        )
    return text


def _at(name: str, mark: Any) -> str:  # noqa: ANN401 -- PyYAML's two parsers share no type of it
    """Format a mark as `file:line:column`, from 1."""
    return f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name


def _refuse_harm(content: bytes, name: str) -> None:
    """Refuse aliases and depth from the parser's events, before the recursive compose."""
    depth = 0
    for event in yaml.parse(content, Loader=LOADER):
        if isinstance(event, yaml.AliasEvent):
            where = _at(name, event.start_mark)
            raise SettingsError(f"{where}: aliases are not allowed here; write the value out")

        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise SettingsError(
                f"{_at(name, event.start_mark)}: nested deeper than {MAX_DEPTH} levels, which no "
                "settings file needs; is it the right one?"
            )


class Place(msgspec.Struct, frozen=True):
    """A value in a file. Messages call the file `file`; `field` is the path to the value.

    Every reader raises SettingsError with the place.
    """

    file: str
    node: yaml.Node
    field: str = ""
    is_json: bool = False

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
        if not isinstance(self.node, yaml.MappingNode) or self.node.tag != MAP:
            raise self.fault(f"keys and values are expected here, not {self.shown()}")

        seen: set[str] = set()
        for key, value in self.node.value:
            here = Place(self.file, key, self.field)
            if not isinstance(key, yaml.ScalarNode) or key.tag != STR:
                raise here.fault(f"a text key is expected, not {here.shown()}")

            name = spelling(key.value)
            if name in seen:
                raise here.fault(f"the key `{cap(name, 64)}` stands here twice; remove one")

            seen.add(name)
            field = f"{self.field}.{name}".lstrip(".")
            yield name, here, Place(self.file, value, field, self.is_json)

    def items(self) -> tuple["Place", ...]:
        """Read the entries of a list."""
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.fault(f"a list is expected here, not {self.shown()}")
        return tuple(
            Place(self.file, item, f"{self.field}[{number}]", self.is_json)
            for number, item in enumerate(self.node.value)
        )

    def value(self) -> Any:  # noqa: ANN401 -- any value of YAML
        """Read any value as plain Python values; refuses a scalar that does not fit its tag."""
        text, tag = self.node.value, self.node.tag
        try:
            # Numbers of JSON such as 1e5 are texts in YAML.
            if self.is_json and isinstance(self.node, yaml.ScalarNode) and self.node.style != '"':
                return json.loads(text)
            if tag == STR and isinstance(text, str):
                return text
            # A new one each time: it keeps every node that it was ever given.
            return yaml.constructor.SafeConstructor().construct_object(self.node, deep=True)
        except (yaml.YAMLError, *MISFITS) as error:
            kind = cap(tag.rpartition(":")[2], 60)
            raise self.fault(f"not valid YAML: {self.shown()} is not of type {kind}") from error

    def shown(self) -> str:
        """A short form of the value for a message."""
        if isinstance(self.node, yaml.ScalarNode):
            # A number or a boolean in quotes is none: without the hint the message puzzles.
            quoted = " (text)" if self.node.style in {'"', "'"} else ""
            return f"`{cap(self.node.value, 40)}`{quoted}" if self.node.value else "nothing"
        return "a list" if isinstance(self.node, yaml.SequenceNode) else "a mapping"
