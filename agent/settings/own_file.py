"""Reads the agent's own file: settings with their places, and profiles. Refuses unknown keys."""

from collections.abc import Iterator, Mapping
from typing import Final

from agent.cluster import parse_selector
from agent.errors import MalformedText, SettingsError, cap
from agent.settings.fields import Field, Setting, setting
from agent.settings.places import Place, read_yaml
from agent.settings.sources import Faults, Layer, ProfileMatch, SettingsProfile
from agent.settings.table import BY_KEY

PROFILES: Final = "profiles"
MATCH_KEYS: Final = frozenset({"nodes", "labels"})
LIVE: Final = {key: field for key, field in BY_KEY.items() if field.live and field.profiled}


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
    if document.keys() >= {"apiVersion", "kind"}:
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
    return SettingsProfile(text, _match(match), tuple(settings), item.where)


def _match(place: Place) -> ProfileMatch:
    """Read the condition of a profile. Raises SettingsError with its place."""
    parts = place.mapping(MATCH_KEYS)
    if not parts:
        raise place.fault("`nodes` or `labels` is needed")
    labels = None
    if "labels" in parts:
        try:
            labels = parse_selector(parts["labels"].text())
        except MalformedText as error:
            raise parts["labels"].fault(str(error)) from error
    nodes: tuple[str, ...] = ()
    if "nodes" in parts:
        nodes = tuple(item.text() for item in parts["nodes"].items())
        if not nodes:
            raise parts["nodes"].fault("an empty list selects nothing")
    return ProfileMatch(nodes, labels)


def _settings(
    key: str, here: Place, value: Place, known: Mapping[str, Field], faults: Faults, above: str = ""
) -> Iterator[Setting]:
    """The settings at and below `key`. `above`: the keys above it, each with its dot."""
    path = above + key
    with faults.kept():
        if path in known and "." not in key:
            yield setting(known[path], value.value(), value.where, value.shown())
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
