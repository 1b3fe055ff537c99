"""The settings as the agent's parts receive them: none is left out, each in its own form."""

import types
import typing
from collections.abc import Iterator, Mapping

import msgspec
import pytest

from agent.health.xids import XidClass
from agent.ledger import SourceFile
from agent.settings.fields import Values
from agent.settings.sections import build
from agent.settings.sources import NodeFacts, Sources
from agent.settings.table import FIELDS
from agent.settings.values import make_plan

BUILT = {"scheduler", "health.disabledXids", "health.enabledXids"}
"""What build() makes a section of by itself."""
SOURCES = {"files.deviceConfig", "files.nodeConfig"}
"""What says which sources are read."""
SET = """
node: {kubeconfig: /k}
sharing: {filterUUIDs: [a], filterIndexes: [1]}
health: {xids: [94=fatal]}
driver: {nvmlLibrary: /l, simulate: h100}
allocation: {mpsRoot: /m}
"""


def settings_of(text: str) -> Values:
    given = Sources(own=SourceFile("c.yaml", text.encode()))
    return make_plan(given).resolve(NodeFacts())


def attributes(settings: msgspec.Struct) -> Iterator[tuple[str, object, object]]:
    """Of Settings and its sections: the name in the table, the type, and the value."""
    for name, hint in typing.get_type_hints(type(settings)).items():
        value = getattr(settings, name)
        if isinstance(value, msgspec.Struct):
            for inner, type_, own in attributes(value):
                yield f"{name}.{inner}", type_, own
        else:
            yield name, hint, value


def fits(value: object, hint: object) -> bool:
    """True for a value of that type, whatever is in it told by its own."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return any(fits(value, one) for one in inner)
    if origin in {tuple, frozenset}:
        return isinstance(value, origin) and all(fits(one, inner[0]) for one in value)
    if origin is Mapping:
        pairs = value.items() if isinstance(value, Mapping) else [(None, None)]
        return all(fits(key, inner[0]) and fits(one, inner[1]) for key, one in pairs)
    return type(value) is hint or (isinstance(hint, type) and isinstance(value, hint))


def test_there_is_no_setting_that_changes_nothing():
    without = {field.key for field in FIELDS if not field.sections}

    assert BUILT | SOURCES == without


def test_each_setting_has_its_place_and_no_place_has_two():
    settings = build(settings_of("scheduler: none"), host_name="n")
    places = [place for field in FIELDS for place in field.sections]

    assert len(set(places)) == len(places)
    assert set(places) <= {name for name, _, _ in attributes(settings)}


@pytest.mark.parametrize("text", ["scheduler: none", "observe: true", SET])
def test_every_attribute_has_the_type_that_its_section_says(text: str):
    settings = build(settings_of(text), host_name="n")

    assert [] == [
        (name, hint, value) for name, hint, value in attributes(settings) if not fits(value, hint)
    ]


def test_a_wrong_type_would_be_found():
    assert not fits("94", Mapping[int, XidClass])
    assert not fits({94: "fatal"}, Mapping[int, XidClass])
    assert not fits(("a",), frozenset[str])
    assert not fits(frozenset({"1"}), frozenset[int])
    assert not fits("", str | None) or fits(None, str | None)
    assert not fits(1, float)


@pytest.mark.parametrize(("written", "value"), [("3", "3"), ("'3'", "3"), ("''", ""), ("-1", "-1")])
def test_a_log_level_is_a_number_or_a_text(written: str, value: str):
    settings = settings_of(f"library: {{cudaLogLevel: {written}}}")

    assert value == build(settings, host_name="n").edits.cuda_log_level
