"""Parts of a JSON object of the API server: what is missing or misshapen counts as absent."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

NOTHING: Final[Mapping[str, object]] = MappingProxyType({})


def inside(parent: Mapping[str, object], key: str) -> Mapping[str, object]:
    """The object below `key`; an empty one where there is none."""
    value = parent.get(key)
    return value if isinstance(value, Mapping) else NOTHING


def objects_in(parent: Mapping[str, object], key: str) -> tuple[Mapping[str, object], ...]:
    """The objects of the list below `key`; none where there is no list."""
    value = parent.get(key)
    found = value if isinstance(value, list | tuple) else ()
    return tuple(one for one in found if isinstance(one, Mapping))
