"""Reads the agent's own file: settings with their places, and profiles. Refuses unknown keys."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from agent.codec.faults import Faults
from agent.codec.known_keys import LIKENESS, nearest
from agent.codec.places import Place
from agent.codec.strangers import refuse_files_of_hami, refuse_stranger
from agent.codec.yaml_places import read_yaml
from agent.core.cluster.selector import parse_selector
from agent.core.errors import MalformedText, SettingsError, cap
from agent.settings.fields import Field, Setting, setting
from agent.settings.profiles import ProfileMatch, SettingsProfile
from agent.settings.sources import Layer
from agent.settings.table import BY_KEY

PROFILES: Final = "profiles"
MATCH_KEYS: Final = frozenset({"nodes", "labels", "gpus"})
LIVE: Final = {key: field for key, field in BY_KEY.items() if field.live and field.profiled}


class _SettingEntry(msgspec.Struct, frozen=True):
    """A key, its place and its value. `above`: the keys above it, joined by dots."""

    name: str
    here: Place
    value: Place
    above: str = ""

    @property
    def key(self) -> str:
        """The path, with dots."""
        return f"{self.above}.{self.name}" if self.above else self.name


def read_own_file(content: bytes, name: str, faults: Faults) -> Layer:
    """Read the whole file. `name`: its name in messages. Errors go to `faults`.

    Raises SettingsError: the file is not YAML, or is another program's file.
    """
    document = read_yaml(content, name)
    if document is None or document.null:
        return Layer()
    refuse_stranger(document)
    refuse_files_of_hami(document)
    settings: list[Setting] = []
    profiles: list[SettingsProfile] = []
    with faults.kept():
        for key, here, value in document.pairs():
            if key != PROFILES:
                settings.extend(_settings(_SettingEntry(key, here, value), BY_KEY, faults))
            elif not value.null:
                with faults.kept():
                    profiles.extend(_profiles(value, faults))
    return Layer(tuple(settings), tuple(profiles))


def hint(name: str, known: Iterable[str]) -> str:
    """The end of a refusal of an unknown name: a similar name, or the command that lists all."""
    return nearest(name, known) or "; `hami-agent config show` lists all"


def _profiles(place: Place, faults: Faults) -> Iterator[SettingsProfile]:
    seen: set[str] = set()
    for item in place.items():
        with faults.kept():
            yield _profile(item, seen, faults)


def _profile(item: Place, seen: set[str], faults: Faults) -> SettingsProfile:
    """Read one profile. Raises SettingsError, also if `seen` has its name."""
    keys = {key: _SettingEntry(key, here, value) for key, here, value in item.pairs()}
    name, match = keys.pop("name", None), keys.pop("match", None)
    settings = [one for entry in keys.values() for one in _settings(entry, LIVE, faults)]
    if name is None or match is None:
        raise item.fault(f"`{'match' if name else 'name'}` is needed")
    text = name.value.text()
    if text in seen:
        raise name.value.fault(f"the profile {name.value.shown()} is defined twice")
    seen.add(text)
    return SettingsProfile(text, _match(match.value), tuple(settings), item.where)


def _match(place: Place) -> ProfileMatch:
    """Read the condition of a profile. Raises SettingsError with its place."""
    parts = place.mapping(MATCH_KEYS)
    if not parts:
        raise place.fault("`nodes`, `labels` or `gpus` is needed")
    labels = None
    if "labels" in parts:
        try:
            labels = parse_selector(parts["labels"].text())
        except MalformedText as error:
            raise parts["labels"].fault(str(error)) from error
    return ProfileMatch(_texts(parts.get("nodes")), labels, _texts(parts.get("gpus")))


def _texts(place: Place | None) -> tuple[str, ...]:
    if place is None:
        return ()
    texts = tuple(item.text() for item in place.items())
    if not texts:
        raise place.fault("an empty list selects nothing")
    return texts


def _settings(
    entry: _SettingEntry, known: Mapping[str, Field], faults: Faults
) -> Iterator[Setting]:
    """The settings at and below the entry. Errors go to `faults`."""
    key, value = entry.key, entry.value
    field = known.get(key)
    with faults.kept():
        if "." in entry.name:
            raise _dotted(entry, known)
        if field is not None:
            yield setting(field, value.value(), value.where, value.shown())
        elif not any(name.startswith(f"{key}.") for name in known):
            raise _unknown(entry, known)
        elif not value.null:  # null is a section whose keys are all commented out
            for name, here, inner in value.pairs():
                yield from _settings(_SettingEntry(name, here, inner, key), known, faults)


def _dotted(entry: _SettingEntry, known: Mapping[str, Field]) -> SettingsError:
    """The refusal of a key with a dot: it would be a second way to set the same setting."""
    close = difflib.get_close_matches(entry.key, known, n=1, cutoff=LIKENESS)
    if not close or entry.above:
        return _unknown(entry, known)
    *sections, name = close[0].split(".")
    form = f"{name}: …"
    for section in reversed(sections):
        form = f"{section}: {{{form}}}"
    return SettingsError(
        f"{entry.here.where}: a key has no dots: `{cap(entry.key, 64)}`; write `{form}`"
    )


def _unknown(entry: _SettingEntry, known: Mapping[str, Field]) -> SettingsError:
    where, key = entry.here.where, entry.key
    if any(name == key or name.startswith(f"{key}.") for name in BY_KEY):
        return SettingsError(
            f"{where}: a profile cannot set {key}, which acts before the node is known"
        )
    sections = {name.rpartition(".")[0] for name in known} - {""}
    close = "" if "." in key else nearest(key, sections)
    return SettingsError(f"{where}: unknown setting {key}{close or hint(key, known)}")
