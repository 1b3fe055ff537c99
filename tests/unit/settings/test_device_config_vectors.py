"""HAMi's device-config.yaml: the same values as HAMi v2.10 reads, but what is absent is a default.

HAMi keeps nothing (nil) for a key that is absent, and its plugin crashes when it needs the value.
"""

import re
from collections.abc import Mapping

import pytest

from agent.errors import SettingsError
from agent.ledger import SourceFile
from agent.settings.hami import DEVICE_CONFIG, read_device_config
from agent.settings.sources import Faults, NodeFacts, Sources
from agent.settings.values import NodeValues, make_plan
from tests.hami_vectors import Vector, cases, vectors

ZEROS = {"disableCoreLimit": False, "gpuCorePolicy": "", "overwriteEnv": False}
"""What Go takes for an absent key that is no pointer; the others are nil."""

DEFAULTS = {
    "deviceMemoryScaling": 1.0,
    "deviceSplitCount": 10,
    "disableCoreLimit": False,
    "gpuCorePolicy": "default",
    "libCudaLogLevel": "1",
}
"""Ours, by HAMi's keys; `overwriteEnv` is the webhook's."""

REFUSED = {
    "device_config_yaml-101": "a value of the wrong type is refused by HAMi, too",
    "device_config_yaml-104": "a value of the wrong type is refused by HAMi, too",
}
OTHER_CASE = "device_config_yaml-103"


def plan(vector: Vector) -> NodeValues:
    return make_plan(Sources(device_config=SourceFile("d.yaml", vector.given.encode())))


def values(vector: Vector) -> Mapping[str, object]:
    """What a node gets, by HAMi's keys."""
    found = plan(vector).resolve(NodeFacts("node-a"))
    return {key: found[DEVICE_CONFIG[key]].value for key in DEFAULTS}


@pytest.mark.parametrize("vector", cases("device_config_yaml", without=REFUSED), ids=str)
def test_the_section_is_read_as_hami_reads_it(vector: Vector):
    known, _ = read_device_config(vector.given.encode(), "d", Faults())
    found = {one.key: one.value for one in known}

    assert found.keys() <= vector.expected.keys()
    assert vector.expected == {
        "error": None,
        **{key: found.get(key, ZEROS.get(key)) for key in vector.expected if key != "error"},
    }


@pytest.mark.parametrize("vector", cases("device_config_yaml", without=REFUSED), ids=str)
def test_what_hami_reads_is_set_and_what_is_absent_is_a_default_and_no_crash(vector: Vector):
    unset = ("", None)
    wanted = {key: vector.expected[key] for key in DEFAULTS if vector.expected[key] not in unset}

    assert DEFAULTS | wanted == values(vector)


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_of_the_wrong_type_refuses_the_file_at_the_line_that_hami_names(name: str):
    vector = vectors("device_config_yaml")[name]
    line, value = re.findall(r"line ([0-9]+): .* `(.*)`", vector.expected["error"])[0]

    with pytest.raises(SettingsError, match=rf"^d\.yaml:{line}:.*`{value}`"):
        plan(vector)


def test_a_key_in_another_case_is_passed_over_as_in_hami_but_not_in_silence():
    """HAMi says nothing, and its plugin crashes for want of the count."""
    vector = vectors("device_config_yaml")[OTHER_CASE]

    assert ("d.yaml:2:3: nvidia: unknown key `devicesplitcount`",) == plan(vector).warnings
    assert DEFAULTS == values(vector)
