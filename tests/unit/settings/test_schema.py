"""Settings as they are declared: the table, the types, the sections, and the JSON schema."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.allocate.room import RequestRules
from agent.hami.annotations import ReportProfile
from agent.kubelet.door import encode_list
from agent.model import SliceGroup, SliceList, slice_id
from agent.setting import Field, WrongValue, duration, written
from agent.settings.schema import BY_KEY, DRAFT, FIELDS, Settings, build, json_schema
from tests.builders import G1
from tests.unit.rows import rows_of
from tests.unit.settings.plans import plan_of, sources_of

jsonschema: Any = pytest.importorskip("jsonschema", reason="comes with kubernetes-validate")


def settings_of(own: str = "", environ: dict[str, str] | None = None) -> Settings:
    return build(plan_of(own=own, environ=environ).resolve(), "n")


# The sections.


def test_what_is_set_reaches_the_parts_that_use_it_in_their_types():
    found = settings_of(
        "sharing: {filterUUIDs: [a], filterIndexes: [1, '2']}\nallocation: {mpsRoot: ''}\n"
        "library: {hookPath: /h}\ndriver: {onNoDriver: exit}\nreport: {profile: colon}",
        {
            "HAMI_AGENT_SHARING_MEMORY_RESOURCE_NAME": "a.com/mem",
            "HAMI_AGENT_ALLOCATION_FENCE": "prestart",
            "HAMI_AGENT_LIBRARY_CORE_POLICY": "force",
        },
    )

    assert RequestRules(memory="a.com/mem") == found.match.requests
    assert (frozenset({"a"}), frozenset({1, 2})) == (
        found.sharing.filter_uuids,
        found.sharing.filter_indexes,
    )
    assert ("force", None) == (found.edits.core_policy, found.edits.mps_root)
    assert ReportProfile.COLON is found.report.profile
    assert (True, "exit") == (found.fenced, found.on_no_driver)
    assert "/h/vgpu" == str(found.hook_path / "vgpu")


@pytest.mark.parametrize(("own", "port"), [("", 0), ("web: {port: 77}\n", 77)])
def test_who_observes_has_a_lock_sockets_a_state_and_a_port_of_its_own(own: str, port: int):
    found = settings_of(own + "paths: {run: /r, state: /s}\nobserve: true\n")
    assert ("/r/observe", "/r/observe/state") == (str(found.paths.run), str(found.paths.state))
    assert port == found.web_port


def test_the_longest_list_of_sixteen_gpus_is_one_that_the_kubelet_takes():
    most: Any = BY_KEY["sharing.splitCount"].read.schema["maximum"]
    ids = tuple(slice_id(G1, 1000 + n) for n in range(most))
    group = SliceGroup(G1, ids, healthy=False, numa=1)
    assert encode_list(SliceList(1, 16 * (group,)))


# Durations are read with a unit or as seconds, and printed as they are read.


def read(text: str) -> str:
    """Seconds and how they are printed, or what is said of it."""
    try:
        seconds = duration(0.1, 36000)(yaml.safe_load(text))
    except WrongValue as error:
        return f"! {error}"
    return f"{seconds:g} {written(seconds)}"


@pytest.mark.parametrize(("text", "expected"), rows_of(__file__, "durations.txt"))
def test_a_duration_is_seconds_and_printed_in_the_greatest_unit_that_fits(text, expected):
    assert read(text).startswith(expected)


@pytest.mark.parametrize("value", ["1e400s", "1e400", f"{'9' * 400}s", math.nan, math.inf])
def test_what_no_float_holds_is_no_duration(value):
    with pytest.raises(WrongValue, match="expected a duration such as 500ms, 2s, 10m or 1h"):
        duration(1, 3600)(value)


# The JSON schema takes what the agent takes, and refuses the same mistakes.

GOOD = Path(__file__).with_name("good.yaml").read_text(encoding="utf-8")


def errors_of(text: str) -> list[str]:
    validator = jsonschema.Draft202012Validator(json_schema())
    return [error.message for error in validator.iter_errors(yaml.safe_load(text))]


def leaf(field: Field) -> dict[str, Any]:
    found: Any = json.loads(json.dumps(json_schema()))
    for part in field.key.split("."):
        found = found["properties"][part]
    return found


def test_it_is_a_schema_of_its_draft_and_takes_what_the_agent_takes():
    assert DRAFT == json_schema()["$schema"]
    jsonschema.Draft202012Validator.check_schema(json_schema())
    assert plan_of(own=GOOD)
    assert [] == errors_of(GOOD)


@pytest.mark.parametrize(
    "words", [words for words, _ in rows_of(__file__, "refused.txt") if words.startswith("own ")]
)
def test_what_the_agent_refuses_is_invalid(words: str):
    assert errors_of(sources_of(words)["own"])


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
