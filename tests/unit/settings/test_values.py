"""What all sources together say of a node: later ones win, and each value has its origin."""

import json

import pytest

from agent.core.allocation.requests import RequestRules
from agent.settings.sources import NodeFacts
from tests.unit.settings.plans import plan_of

DEVICES = "nvidia: {deviceSplitCount: 2}"
OWN = """
sharing: {splitCount: 3}
profiles:
  - name: some
    match: {nodes: [n*]}
    sharing: {splitCount: 4}
  - name: one
    match: {nodes: [node-a]}
    sharing: {splitCount: 5}
"""
NODES = '{"nodeconfig":[{"name":"node-a","devicesplitcount":6}]}'
HERE = NodeFacts("node-a")
COUNT = "sharing.splitCount"


def count_of(
    devices: str = "", own: str = "", nodes: str = "", *, facts=HERE, environ=None, flags=None
) -> tuple[object, str]:
    found = plan_of(devices, own, nodes, environ, flags).resolve(facts)[COUNT]
    return found.value, found.origin


def test_each_source_wins_over_the_ones_before_it():
    environ, flags = {"HAMI_AGENT_SHARING_SPLIT_COUNT": "7"}, {"--split-count": "8"}

    assert (10, "default") == count_of()
    assert (2, "d.yaml:1:28") == count_of(DEVICES)
    assert (3, "c.yaml:2:23") == count_of(DEVICES, OWN, facts=NodeFacts("other"))
    assert (4, "c.yaml:6:27") == count_of(DEVICES, OWN, facts=NodeFacts("node-b"))
    assert (5, "c.yaml:9:27") == count_of(DEVICES, OWN)
    assert (6, "n.json:1:52") == count_of(DEVICES, OWN, NODES)
    assert (7, "env HAMI_AGENT_SHARING_SPLIT_COUNT") == count_of(
        DEVICES, OWN, NODES, environ=environ
    )
    assert (8, "--split-count") == count_of(DEVICES, OWN, NODES, environ=environ, flags=flags)


def test_the_same_plan_gives_the_same_settings_for_the_same_facts():
    plan = plan_of(DEVICES, OWN, NODES)
    assert plan.resolve(HERE) == plan.resolve(HERE)
    assert ("some", "one") == plan.resolve(HERE).profiles


@pytest.mark.parametrize(
    ("match", "facts", "holds"),
    [
        ("{nodes: [a, 'b?']}", NodeFacts("b1"), True),
        ("{nodes: [a, 'b?']}", NodeFacts("b12"), False),
        ("{labels: 'zone=a'}", NodeFacts(labels={"zone": "a"}), True),
        ("{labels: 'zone=a'}", NodeFacts(labels={}), False),
        ("{labels: 'zone!=a'}", NodeFacts(labels={}), True),
        ("{labels: 'zone!=a'}", NodeFacts(labels=None), False),
        ("{nodes: [a], labels: 'zone=a'}", NodeFacts("a", {"zone": "a"}), True),
        ("{nodes: [a], labels: 'zone=a'}", NodeFacts("b", {"zone": "a"}), False),
    ],
)
def test_a_profile_is_for_nodes_that_keep_all_it_asks(match: str, facts: NodeFacts, *, holds: bool):
    own = f"profiles:\n- {{name: p, match: {match}, sharing: {{splitCount: 4}}}}"
    assert (4 if holds else 10) == count_of("", own, facts=facts)[0]


def test_profiles_that_are_commented_out_are_no_mistake():
    assert 10 == count_of("", "profiles:\n  # - name: p\n")[0]


def test_the_nodes_that_the_files_name_are_known():
    assert ("node-a", "x") == plan_of(
        DEVICES, OWN, '{"nodeconfig":[{"name":"x"},{"name":"node-a"}]}'
    ).names()


def test_every_key_of_hamis_files_reaches_its_setting():
    devices = {
        "resourceCountName": "a.com/gpu",
        "resourceMemoryName": "a.com/mem",
        "resourceMemoryPercentageName": "a.com/percent",
        "resourceCoreName": "",
        "memoryFactor": 1024,
        "defaultMemory": -1,
        "defaultCores": 30,
        "deviceSplitCount": 2,
        "deviceMemoryScaling": 1.5,
        "deviceCoreScaling": 2,
        "preConfiguredDeviceMemory": 7,
        "enableNumaTopology": False,
        "libCudaLogLevel": 3,
        "disableCoreLimit": True,
        "gpuCorePolicy": "FORCE",
    }
    found = plan_of(json.dumps({"nvidia": devices})).resolve(HERE)

    expected = {
        "sharing.resourceName": "a.com/gpu",
        "sharing.memoryResourceName": "a.com/mem",
        "sharing.memoryPercentResourceName": "a.com/percent",
        "sharing.coreResourceName": "",
        "sharing.memoryFactor": 1024,
        "sharing.defaultMemoryMiB": -1,
        "sharing.defaultCorePercent": 30,
        "sharing.splitCount": 2,
        "sharing.memoryScaling": 1.5,
        "sharing.coreScaling": 2.0,
        "sharing.preconfiguredMemoryMiB": 7,
        "sharing.numaTopology": False,
        "library.cudaLogLevel": "3",
        "library.disableCoreLimit": True,
        "library.corePolicy": "force",
    }
    assert expected == {key: one.value for key, one in found.items() if one.origin != "default"}


def test_keys_that_concern_the_scheduler_alone_are_checked_and_not_used():
    text = "nvidia: {defaultGPUNum: 5, runtimeClassName: x, overwriteEnv: true, "
    plan = plan_of(text + "resourcePriorityName: a.com/prio}")
    assert () == plan.warnings
    assert {"default"} == {one.origin for one in plan.resolve(HERE).values()}


@pytest.mark.parametrize(
    ("devices", "rules"),
    [
        ("nvidia: {memoryFactor: 4}", RequestRules(memory_factor=4, known=True)),
        ("nvidia: {deviceSplitCount: 4}", RequestRules(known=True)),
        ("nvidia: {}", RequestRules()),
        ("cambricon: {memoryFactor: 4}", RequestRules()),
    ],
)
def test_the_schedulers_rules_are_known_where_its_file_says_something(devices, rules):
    settings = plan_of(devices, "sharing: {}").settings(HERE)

    assert rules == settings.match.requests
    assert not plan_of("", "sharing: {memoryFactor: 4}").settings(HERE).match.requests.known


def test_a_log_level_that_is_empty_is_not_set_for_the_containers():
    found = plan_of("nvidia: {libCudaLogLevel: ''}").resolve(HERE)
    assert "" == found["library.cudaLogLevel"].value


def test_a_variable_of_hamis_that_changes_nothing_is_told():
    environ = {"DEVICE_SPLIT_COUNT": "5", "DEVICE_ID_STRATEGY": "index", "IMEX_REQUIRED": "false"}
    count, strategy = plan_of(environ=environ).warnings

    assert count.startswith("env DEVICE_SPLIT_COUNT: has no effect: HAMi's plugin ignores it since")
    assert count.endswith("set sharing.splitCount")
    assert "env DEVICE_ID_STRATEGY: has no effect: the agent always names GPUs by UUID" == strategy


@pytest.mark.parametrize(
    ("environ", "key", "value"),
    [
        ({"FAIL_ON_INIT_ERROR": "true"}, "driver.onNoDriver", "exit"),
        ({"FAIL_ON_INIT_ERROR": "false"}, "driver.onNoDriver", "wait"),
        ({"NVIDIA_DRIVER_ROOT": "/run/driver"}, "allocation.devRoot", "/run/driver"),
        (
            {"NVIDIA_DRIVER_ROOT": "/run/driver", "NVIDIA_DEV_ROOT": "/x"},
            "allocation.devRoot",
            "/x",
        ),
        ({"PASS_DEVICE_SPECS": ""}, "allocation.passDeviceSpecs", False),
        ({"GDS_ENABLED": "1"}, "allocation.gds", True),
        ({"ENABLE_TOPOLOGY_SCORE": "true"}, "report.topologyScore", True),
        ({"HAMI_AGENT_LIBRARY_CUDA_LOG_LEVEL": ""}, "library.cudaLogLevel", ""),
    ],
)
def test_variables_of_hamis_plugin_keep_their_meaning(environ, key: str, value: object):
    assert value == plan_of(environ=environ).resolve(HERE)[key].value


def test_a_gpu_that_is_filtered_twice_is_a_warning_and_no_error():
    own = "sharing: {filterUUIDs: [GPU-a, GPU-b, GPU-a], filterIndexes: [1, '1', 2]}"
    nodes = (
        '{"nodeconfig": [{"name": "n", "filterdevices": {"uuid": ["x", "x", "x"], "index": []}}]}'
    )
    environ = {"HAMI_AGENT_SHARING_FILTER_INDEXES": "0,1,0,1"}

    assert (
        "c.yaml:1:24: sharing.filterUUIDs: named twice: GPU-a",
        "c.yaml:1:62: sharing.filterIndexes: named twice: 1",
        "n.json:1:48: sharing.filterUUIDs: named twice: x",
        "env HAMI_AGENT_SHARING_FILTER_INDEXES: sharing.filterIndexes: named twice: 0, 1",
    ) == plan_of("", own, nodes, environ).warnings
    assert () == plan_of("", "sharing: {filterUUIDs: [a, b]}").warnings


def test_several_entries_of_one_name_apply_in_their_order():
    nodes = [{"name": "node-a", "devicesplitcount": count} for count in (3, 4)]
    assert 4 == count_of(nodes=json.dumps({"nodeconfig": nodes}))[0]
    assert 10 == count_of(nodes='{"nodeconfig":[{"devicesplitcount":3}]}', facts=NodeFacts())[0]
