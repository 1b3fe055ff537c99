"""YAML, read strictly: the tree with the place of each value.

Aliases, several documents and more than 20 levels are refused: a file of settings needs none of
them, and each has been used to harm a reader.
"""

from typing import Final

import yaml

from agent.codec.places import Place, at
from agent.core.errors import SettingsError, cap

MAX_DEPTH: Final = 20

# libyaml's reader takes a tenth of the time, which a start is made of; both know the same YAML.
LOADER: Final[type[yaml.SafeLoader]] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(content: bytes, name: str, loader: type[yaml.SafeLoader] = LOADER) -> Place | None:
    """The document, None when there is none; `name` is what messages call the file.

    `loader` says which value a scalar without a tag and quotes is; by default, YAML 1.1's.

    Raises:
        SettingsError: not UTF-8, not YAML, or more than a file of settings needs.
    """
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise SettingsError(f"{name}: is not UTF-8 text (byte {error.start})") from error
    try:
        _refuse_aliases(content, name)
        node = yaml.compose(content, Loader=loader)
    except yaml.MarkedYAMLError as error:
        where = at(name, error.problem_mark)
        raise SettingsError(
            f"{where}: not valid YAML: {cap(error.problem or str(error))}"
        ) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise SettingsError(f"{name}: not valid YAML: {cap(str(error))}") from error
    return None if node is None else Place(name, node)


def _refuse_aliases(content: bytes, name: str) -> None:
    depth = 0
    for event in yaml.parse(content, Loader=LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise SettingsError(f"{at(name, event.start_mark)}: aliases are not allowed here")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise SettingsError(
                f"{at(name, event.start_mark)}: nested deeper than {MAX_DEPTH} levels"
            )
