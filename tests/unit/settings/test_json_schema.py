"""The JSON schema takes what the agent takes, and refuses the same mistakes."""

from typing import Any

import pytest
import yaml

from agent.errors import SettingsError
from agent.ledger import SourceFile
from agent.setting import Field
from agent.settings.schema import DRAFT, FIELDS, json_schema
from agent.settings.sources import Sources
from agent.settings.values import make_plan

jsonschema: Any = pytest.importorskip("jsonschema", reason="comes with kubernetes-validate")

GOOD = """
scheduler: hami
sharing:
  splitCount: 4
  memoryScaling: 1.5
  filterIndexes: [0, "3"]
  operatingMode: mps
  memoryResourceName: a.com/mem
library:
  cudaLogLevel: 3
health: {driverHang: 2s, quietPeriod: 1.5h, probePeriod: 500ms, longestQuietPeriod: 9000}
profiles:
  - name: big
    match: {nodes: [a*], labels: x=y}
    sharing: {splitCount: 20}
"""
BAD = [
    "sharing: {splitCuont: 4}",
    "sharing: {splitCount: 0}",
    "sharing: {splitCount: 5.5}",
    "sharing: {memoryScaling: lots}",
    "sharing: {operatingMode: fast}",
    "sharing: {filterIndexes: [x]}",
    "library: {hookPath: here}",
    "library: {cudaLogLevel: 1.5}",
    "library: {cudaLogLevel: true}",
    "health: {driverHang: 2 s}",
    "health: {driverHang: 2d}",
    "health: {driverHang: -2s}",
    "health: {driverHang: 0.5}",
    "mig: {strategy: none}",
    "sharing: {coreResourceName: a.com/cores/x}",
    "sharing: {memoryFactor: much}",
    "scheduler: volcano",
    "other: 1",
    "profiles: [{name: p}]",
    "profiles: [{name: p, match: {}}]",
    "profiles: [{name: p, match: {nodes: []}}]",
    "profiles: [{name: p, match: {nodes: [a]}, web: {port: 1}}]",
]


def errors_of(text: str) -> list[str]:
    validator = jsonschema.Draft202012Validator(json_schema())
    return [error.message for error in validator.iter_errors(yaml.safe_load(text))]


def refused(text: str) -> bool:
    try:
        make_plan(Sources(own=SourceFile("c.yaml", text.encode())))
    except SettingsError:
        return True
    return False


def leaf(field: Field) -> dict[str, Any]:
    found: Any = json_schema()
    for part in field.key.split("."):
        found = found["properties"][part]
    return found


def test_it_is_a_schema_of_the_draft_that_it_names():
    assert DRAFT == json_schema()["$schema"]
    jsonschema.Draft202012Validator.check_schema(json_schema())


def test_what_the_agent_takes_is_valid():
    assert not refused(GOOD)
    assert [] == errors_of(GOOD)


@pytest.mark.parametrize("text", BAD)
def test_what_the_agent_refuses_is_invalid(text: str):
    assert refused(text)
    assert errors_of(text)


def test_every_setting_is_in_it_with_its_sentence_and_a_default_that_is_valid():
    for field in FIELDS:
        schema = leaf(field)

        assert field.text == schema["description"]
        if field.default is not None:
            jsonschema.Draft202012Validator(schema).validate(schema["default"])


def test_a_profile_may_set_what_takes_effect_while_the_agent_runs():
    properties: Any = json_schema()["properties"]
    profile = properties["profiles"]["items"]["properties"]

    assert {"name", "match", "sharing", "library", "allocation", "report"} == set(profile)
    assert "splitCount" in profile["sharing"]["properties"]
    assert "resourceName" not in profile["sharing"]["properties"]
