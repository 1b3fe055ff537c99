"""Reads YAML strictly into a tree with the place of each value.

Aliases, several documents and more than 20 levels are refused: no settings file needs them, and
attacks use them.
"""

from typing import Final

import yaml

from agent.codec.places import Place, at, decoded, place_of
from agent.codec.plain_words import TEMPLATE, UNCLOSED, of_yaml, unprintable
from agent.core.errors import SettingsError, cap

MAX_DEPTH: Final = 20

# libyaml takes a tenth of the time, which shortens every start; both read the same YAML.
LOADER: Final[type[yaml.SafeLoader]] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(content: bytes, name: str, loader: type[yaml.SafeLoader] = LOADER) -> Place | None:
    """Read the document, None for an empty file; messages call the file `name`.

    `loader` decides the type of a scalar without tag and quotes; by default as YAML 1.1.

    Raises:
        SettingsError: not UTF-8, not YAML, or one of the refused features.
    """
    text = decoded(content, name)
    try:
        _refuse_harm(content, name)
        node = yaml.compose(content, Loader=loader)
    except yaml.MarkedYAMLError as error:
        raise _in_words(error, text, name) from error
    except (yaml.YAMLError, RecursionError) as error:
        forbidden = unprintable(text)
        if forbidden is None:
            raise SettingsError(f"{name}: not valid YAML: {cap(str(error))}") from error
        where = place_of(text, forbidden[0], name)
        raise SettingsError(f"{where}: not valid YAML: {forbidden[1]}") from error
    return None if node is None else Place(name, node)


def _in_words(error: yaml.MarkedYAMLError, text: str, name: str) -> SettingsError:
    """The parser's error; for a quote that is never closed, at the place where it was opened."""
    mark, problem = error.problem_mark, error.problem or str(error)
    if problem == UNCLOSED and error.context_mark:
        mark = error.context_mark
    lines = text.split("\n")
    found = ""
    if mark is not None and mark.line < len(lines):
        found = lines[mark.line][mark.column : mark.column + 1]
    return SettingsError(f"{at(name, mark)}: not valid YAML: {cap(of_yaml(problem, found))}")


def _refuse_harm(content: bytes, name: str) -> None:
    depth, braces = 0, None
    for event in yaml.parse(content, Loader=LOADER):
        mark = event.start_mark
        if isinstance(event, yaml.MappingStartEvent) and event.flow_style and mark is not None:
            if mark.index == braces:  # `{{` begins no value or key of a setting
                raise SettingsError(f"{at(name, mark)}: {TEMPLATE}")
            braces = mark.index + 1
        if isinstance(event, yaml.AliasEvent):
            raise SettingsError(
                f"{at(name, event.start_mark)}: aliases are not allowed here; write the value out"
            )
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise SettingsError(
                f"{at(name, event.start_mark)}: nested deeper than {MAX_DEPTH} levels, which no "
                "settings file needs; is it the right one?"
            )
