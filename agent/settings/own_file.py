"""The agent's own file: every setting with its place, and profiles. An unknown key is an error."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from agent.codec.faults import Faults
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    """A key with its whole path, where it stands, and what stands behind it."""

    key: str
    here: Place
    value: Place


def read_own_file(content: bytes, name: str, faults: Faults) -> OwnFile:
    """The whole file; `name` is what messages call it. Whatever is wrong goes to `faults`.

    Raises SettingsError: it is no YAML.
    """
    document = read_yaml(content, name)
    if document is None:
        return OwnFile()
    settings: list[Setting] = []
    profiles: list[Profile] = []
    with faults.kept():
        for key, here, value in document.pairs():
            if key != PROFILES:
                settings.extend(_settings(_Entry(key, here, value), BY_KEY, faults))
            elif not value.null:
                with faults.kept():
                    profiles.extend(_profiles(value, faults))
    return OwnFile(tuple(settings), tuple(profiles))


def hint(name: str, known: Iterable[str]) -> str:
    """What stands behind an unknown name in a refusal."""
    return nearest(name, known, 0.5) or "; `hami-agent config show` lists all"


def _profiles(place: Place, faults: Faults) -> Iterator[Profile]:
    seen: set[str] = set()
    for item in place.items():
        with faults.kept():
            yield _profile(item, seen, faults)


def _profile(item: Place, seen: set[str], faults: Faults) -> Profile:
    """One profile, whose name is none of `seen`. Raises SettingsError."""
    keys = {key: _Entry(key, here, value) for key, here, value in item.pairs()}
    name, match = keys.pop("name", None), keys.pop("match", None)
    settings = [one for entry in keys.values() for one in _settings(entry, LIVE, faults)]
    if name is None or match is None:
        raise item.fault(f"`{'match' if name else 'name'}` is needed")
    text = name.value.text()
    if text in seen:
        raise name.value.fault(f"the profile {name.value.shown()} is there twice")
    seen.add(text)
    return Profile(text, read_match(match.value), tuple(settings), item.where)


def _settings(entry: _Entry, known: Mapping[str, Field], faults: Faults) -> Iterator[Setting]:
    """The settings at and below the entry; what is wrong goes to `faults`."""
    key, value = entry.key, entry.value
    field = known.get(key)
    with faults.kept():
        if field is not None:
            yield setting(field, value.value(), value.where)
        elif not any(name.startswith(f"{key}.") for name in known):
            raise _unknown(entry, known)
        elif not value.null:  # null is a section whose keys are all commented out
            for name, here, inner in value.pairs():
                yield from _settings(_Entry(f"{key}.{name}", here, inner), known, faults)


def _unknown(entry: _Entry, known: Mapping[str, Field]) -> SettingsError:
    where, key = entry.here.where, entry.key
    if any(name == key or name.startswith(f"{key}.") for name in BY_KEY):
        return SettingsError(
            f"{where}: a profile cannot set {key}, which acts before the node is known"
        )
    sections = {name.rpartition(".")[0] for name in known} - {""}
    close = "" if "." in key else nearest(key, sections)
    return SettingsError(f"{where}: unknown setting {key}{close or hint(key, known)}")
