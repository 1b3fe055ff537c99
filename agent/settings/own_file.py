"""The agent's own file: every setting with its place, and profiles. An unknown key is an error."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from agent.codec.known_keys import nearest
from agent.codec.places import Place
from agent.codec.yaml_places import read_yaml
from agent.core.errors import SettingsError
from agent.settings.fields import Field, Setting, setting
from agent.settings.profiles import Profile, read_match
from agent.settings.table import BY_KEY

PROFILES: Final = "profiles"
LIVE: Final = {key: field for key, field in BY_KEY.items() if field.live and field.profiled}


@dataclasses.dataclass(frozen=True, slots=True)
class OwnFile:
    """What the file says for all nodes, and its profiles in their order."""

    settings: tuple[Setting, ...] = ()
    profiles: tuple[Profile, ...] = ()


def read_own_file(content: bytes, name: str) -> OwnFile:
    """The whole file; `name` is what messages call it. Raises SettingsError with the place."""
    document = read_yaml(content, name)
    if document is None:
        return OwnFile()
    settings: list[Setting] = []
    profiles: tuple[Profile, ...] = ()
    for key, _, value in document.pairs():
        if key == PROFILES:
            profiles = () if value.null else tuple(_profiles(value))
        else:
            settings.extend(_settings(key, value, BY_KEY))
    return OwnFile(tuple(settings), profiles)


def hint(name: str, known: Iterable[str]) -> str:
    """What stands behind an unknown name in a refusal."""
    return nearest(name, known, 0.5) or "; `hami-agent config show` lists all"


def _profiles(place: Place) -> Iterator[Profile]:
    seen: set[str] = set()
    for item in place.items():
        keys = {key: value for key, _, value in item.pairs()}
        for needed in ("name", "match"):
            if needed not in keys:
                raise item.fault(f"`{needed}` is needed")
        name = keys.pop("name")
        if name.text() in seen:
            raise name.fault(f"the profile {name.shown()} is there twice")
        seen.add(name.text())
        match = read_match(keys.pop("match"))
        settings = [one for key, value in keys.items() for one in _settings(key, value, LIVE)]
        yield Profile(name.text(), match, tuple(settings))


def _settings(key: str, place: Place, known: Mapping[str, Field]) -> Iterator[Setting]:
    """The settings at and below `key`."""
    field = known.get(key)
    if field is not None:
        yield setting(field, place.value(), place.where)
    elif place.is_mapping:
        for name, _, value in place.pairs():
            yield from _settings(f"{key}.{name}", value, known)
    elif not (place.null and any(name.startswith(f"{key}.") for name in known)):
        # null is a section whose keys are all commented out
        raise _unknown(key, place, known)


def _unknown(key: str, place: Place, known: Mapping[str, Field]) -> SettingsError:
    if key in BY_KEY:
        return SettingsError(
            f"{place.where}: a profile cannot set {key}, which acts before the node is known"
        )
    return SettingsError(f"{place.where}: unknown setting {key}{hint(key, known)}")
