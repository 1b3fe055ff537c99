"""HAMi's config.json over its device-config.yaml: the same settings as HAMi's plugin resolves."""

import json
from collections.abc import Mapping

import pytest

from agent.errors import SettingsError
from agent.ledger import SourceFile
from agent.settings.schema import Values
from agent.settings.sources import NodeFacts, Sources
from agent.settings.values import make_plan
from tests.builders import G1
from tests.hami_vectors import Vector, cases, vectors

KEYS = {
    "deviceCoreScaling": "sharing.coreScaling",
    "deviceMemoryScaling": "sharing.memoryScaling",
    "deviceSplitCount": "sharing.splitCount",
    "enableNumaTopology": "sharing.numaTopology",
    "libCudaLogLevel": "library.cudaLogLevel",
    "preConfiguredDeviceMemory": "sharing.preconfiguredMemoryMiB",
}
REFUSED = {
    "nodeconfig-089": "a file with an error is refused",
    "nodeconfig-091": "a file with an error is refused",
    "nodeconfig-092": "a file with an error is refused",
    "nodeconfig-094": "a file with an error is refused",
    "nodeconfig-093": "a negative scaling is refused",
}
DIFFERENT = REFUSED | {
    "nodeconfig-095": "a file that is not there leaves the mode as it is",
    "nodeconfig-099": "what is set nowhere is a default",
}


def resolved(vector: Vector, text: str | None = None) -> Values:
    """The values of the vector's node, where none of them is refused."""
    base = SourceFile("d.yaml", json.dumps({"nvidia": vector.given["base"]}).encode())
    content = vector.given["config.json"] if text is None else text
    nodes = SourceFile("n.json", content.encode()) if content else None
    plan = make_plan(Sources(device_config=base, node_config=nodes))
    for profile in plan.applied(facts := NodeFacts(vector.given["NODE_NAME"])):
        profile.faults.refuse()
    return plan.resolve(facts)


def values(found: Values) -> Mapping[str, object]:
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
    with pytest.raises(SettingsError, match=r"^n\.json:1:"):
        resolved(vectors("nodeconfig")[name])


def test_a_file_that_is_not_there_leaves_the_mode_as_it_is():
    """HAMi registers an empty mode then."""
    vector = vectors("nodeconfig")["nodeconfig-095"]
    found = resolved(vector, text="")

    assert "" == vector.expected["mode"]
    assert "hami-core" == found["sharing.operatingMode"].value
    assert vector.expected["resolved"] == values(found)


def test_what_is_set_nowhere_is_a_default_and_an_empty_value_overrides_nothing():
    """HAMi takes the zeros of the entry here, and crashes at what is still missing."""
    vector = vectors("nodeconfig")["nodeconfig-099"]

    assert vector.expected["resolved"]["deviceCoreScaling"] is None
    assert {
        "deviceCoreScaling": 1.0,
        "deviceMemoryScaling": 2,
        "deviceSplitCount": 10,
        "enableNumaTopology": False,
        "libCudaLogLevel": "1",
        "preConfiguredDeviceMemory": 0,
    } == values(resolved(vector))


def filters(text: str) -> tuple[object, object]:
    found = resolved(vectors("nodeconfig")["nodeconfig-096"], text)
    return found["sharing.filterUUIDs"].value, found["sharing.filterIndexes"].value


def test_a_later_filter_replaces_both_lists_of_an_earlier_one():
    first = f'{{"name":"node-a","filterdevices":{{"uuid":["{G1}"],"index":[1]}}}}'
    second = '{"name":"node-a","filterdevices":{"index":[2]}}'
    empty = '{"name":"node-a","filterdevices":{"uuid":[],"index":[]}}'

    assert ((G1,), ("1",)) == filters(f'{{"nodeconfig":[{first}]}}')
    assert ((), ("2",)) == filters(f'{{"nodeconfig":[{first},{second}]}}')
    assert ((G1,), ("1",)) == filters(f'{{"nodeconfig":[{first},{empty}]}}')


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ('"operatingmode":"fast"', "sharing.operatingMode: expected one of hami-core, mps, mig"),
        ('"devicesplitcount":1000000000', "sharing.splitCount: expected 1 to 10000"),
        ('"devicememoryscaling":1e300', "sharing.memoryScaling: expected 0.01 to 10"),
        ('"preconfigureddevicememory":-5', "sharing.preconfiguredMemoryMiB: expected 0 to"),
    ],
)
def test_a_value_beyond_our_bounds_refuses_the_file_on_its_node_and_warns_others(entry, says):
    """HAMi registers it as it is: an unknown mode, a billion slices."""
    vector = vectors("nodeconfig")["nodeconfig-096"]
    text = f'{{"nodeconfig":[{{"name":"node-a",{entry}}}]}}'
    with pytest.raises(SettingsError) as caught:
        resolved(vector, text)
    assert says in str(caught.value)
    assert str(caught.value).startswith("n.json:1:")

    others = make_plan(Sources(node_config=SourceFile("n.json", text.encode())))
    assert others.settings(NodeFacts("node-b")).sharing.split_count == 10
    assert (str(caught.value),) == others.warnings
