"""HAMi's two files: every key by the rules of HAMi's readers, and the same values as in its plugin.

HAMi keeps nothing (nil) for a key of device-config.yaml that is absent, and its plugin crashes when
it needs the value. d.yaml is HAMi's device-config.yaml, n.json its config.json.
"""

import ast
import json
import re
from collections.abc import Mapping

import pytest

from agent.errors import SettingsError
from agent.ledger import SourceFile
from agent.settings.files import DEVICE_CONFIG, refuse
from agent.settings.reading import NodeValues, Sources, make_plan
from agent.settings.schema import Setting
from tests.hami_vectors import Vector, cases, vectors
from tests.unit.rows import rows_of
from tests.unit.settings.plans import plan_of


def device_plan(text: str) -> NodeValues:
    return make_plan(Sources(device_config=SourceFile("d.yaml", text.encode())))


@pytest.mark.parametrize(("line", "value"), rows_of(__file__, "scalars.txt"))
def test_a_scalar_is_what_hamis_reader_takes_it_for(line: str, value: str):
    """Each was read by yaml.v2 v2.4.0 into HAMi's types."""
    found = device_plan(f"nvidia:\n  {line}\n").resolve()[DEVICE_CONFIG[line.partition(":")[0]]]
    assert value == repr(found.value)


DEFAULTS = {
    "deviceMemoryScaling": 1.0,
    "deviceSplitCount": 10,
    "disableCoreLimit": False,
    "gpuCorePolicy": "default",
    "libCudaLogLevel": "1",
}
"""Ours, by HAMi's keys; `overwriteEnv` is the webhook's."""

WRONG_TYPE = {"device_config_yaml-104": "a value of the wrong type is refused by HAMi, too"}


def device_values(vector: Vector) -> Mapping[str, object]:
    """What a node gets, by HAMi's keys."""
    found = device_plan(vector.given).resolve("node-a")
    return {key: found[DEVICE_CONFIG[key]].value for key in DEFAULTS}


@pytest.mark.parametrize("vector", cases("device_config_yaml", without=WRONG_TYPE), ids=str)
def test_what_hami_reads_is_set_and_what_is_absent_is_a_default_and_no_crash(vector: Vector):
    # What Go takes for an absent key is nil, or the zero of its type.
    wanted = {
        key: vector.expected[key] for key in DEFAULTS if vector.expected[key] not in ("", None)
    }
    assert DEFAULTS | wanted == device_values(vector)


@pytest.mark.parametrize("name", WRONG_TYPE)
def test_a_value_of_the_wrong_type_refuses_the_file_at_the_line_that_hami_names(name: str):
    vector = vectors("device_config_yaml")[name]
    line, value = re.findall(r"line ([0-9]+): .* `(.*)`", vector.expected["error"])[0]
    with pytest.raises(SettingsError, match=rf"^d\.yaml:{line}:.*`{value}`"):
        device_plan(vector.given)


# config.json

KEYS = {
    "deviceCoreScaling": "sharing.coreScaling",
    "deviceMemoryScaling": "sharing.memoryScaling",
    "deviceSplitCount": "sharing.splitCount",
    "enableNumaTopology": "sharing.numaTopology",
    "libCudaLogLevel": "library.cudaLogLevel",
    "preConfiguredDeviceMemory": "sharing.preconfiguredMemoryMiB",
}
REFUSED = {
    "nodeconfig-091": "a file with an error is refused",
    "nodeconfig-092": "a file with an error is refused",
    "nodeconfig-094": "a file with an error is refused",
    "nodeconfig-093": "a negative scaling is refused",
}
DIFFERENT = REFUSED | {
    "nodeconfig-095": "a file that is not there leaves the mode as it is",
    "nodeconfig-099": "what is set nowhere is a default",
    "nodeconfig-089": "HAMi refuses a log level that is a number",
}


def resolved(vector: Vector) -> Mapping[str, Setting]:
    """The values of the vector's node, where none of them is refused."""
    base = SourceFile("d.yaml", json.dumps({"nvidia": vector.given["base"]}).encode())
    content = vector.given["config.json"]
    nodes = SourceFile("n.json", content.encode()) if content else None
    plan = make_plan(Sources(device_config=base, node_config=nodes))
    name = vector.given["NODE_NAME"]
    for profile in plan.applied(name):
        refuse(profile.faults)
    return plan.resolve(name)


def values(found: Mapping[str, Setting]) -> Mapping[str, object]:
    return {name: found[key].value for name, key in KEYS.items()}


@pytest.mark.parametrize("vector", cases("nodeconfig", without=DIFFERENT), ids=str)
def test_a_node_gets_what_hami_resolves_for_it(vector: Vector):
    found = resolved(vector)
    wanted_filter = vector.expected["filter"] or {"uuid": [], "index": []}
    assert vector.expected["resolved"] == values(found)
    assert vector.expected["mode"] == found["sharing.operatingMode"].value
    assert tuple(wanted_filter["uuid"]) == found["sharing.filterUUIDs"].value
    assert tuple(map(str, wanted_filter["index"])) == found["sharing.filterIndexes"].value


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_with_an_error_is_refused_whole_and_not_half_forgotten(name: str):
    """HAMi logs it, goes on without any entry, and registers an empty mode."""
    with pytest.raises(SettingsError, match=r"^n\.json:[12]:"):
        resolved(vectors("nodeconfig")[name])


N1 = ("n1", {"gpu": "a100", "Pool": "X"})


@pytest.mark.parametrize(("entries", "told"), rows_of(__file__, "hami_files.txt"))
def test_each_entry_counts_on_its_nodes_and_a_wrong_one_refuses_the_file_there_alone(entries, told):
    """By name, else by label selector, else of the name `*`, since HAMi #3173."""
    found = plan_of(nodes=f'{{"nodeconfig": [{entries}]}}')
    values, warnings, parts = found.resolve(*N1), [*found.warnings], told.split(" & ")

    for part in parts:
        key, _, value = part.partition(" = ")
        if part.startswith("warns "):
            assert part.removeprefix("warns ") in warnings.pop(0)
        elif part != "refused":
            assert ast.literal_eval(value) == values[key].value
    assert [] == warnings
    if "refused" not in parts:
        assert found.settings(*N1)
        return
    with pytest.raises(SettingsError, match=r"^n\.json:1:.*expected") as caught:
        found.settings(*N1)
    assert str(caught.value) in found.warnings
    if '"name": "*"' not in entries:
        assert 10 == found.settings("n2").sharing.split_count
