"""What the sources give a node: its values, and a warning for what has no effect.

c.yaml is the agent's own file, d.yaml HAMi's device-config.yaml, n.json HAMi's config.json.
"""

import json

import pytest

from tests.unit.settings.plans import plan_of

COUNT, SCALING = "sharing.splitCount", "sharing.memoryScaling"
HERE = ("a", {"zone": "a"})
DEVICES = "nvidia: {deviceSplitCount: 2}"
OWN = """
sharing: {splitCount: 3}
profiles:
- {name: some, match: {nodes: [n*, a]}, sharing: {splitCount: 4}}
- {name: one, match: {nodes: [a], labels: zone=a}, sharing: {memoryScaling: 5}}
"""
SERVICE = {
    "HAMI_AGENT_SERVICE_HOST": "10.0.0.7",
    "HAMI_AGENT_SERVICE_PORT_HTTP": "9394",
    "HAMI_AGENT_PORT": "tcp://10.0.0.7:9394",
    "HAMI_AGENT_PORT_9394_TCP_ADDR": "10.0.0.7",
    "HAMI_AGENT_WEB_SERVICE_HOST": "10.0.0.1",
    "HAMI_AGENT_WEB_PORT_9394_TCP_ADDR": "10.0.0.1",
}
"""What Kubernetes sets beside Services named hami-agent and hami-agent-web."""


def nodes(*entries: object) -> str:
    return json.dumps({"nodeconfig": entries})


def entry(**keys: object) -> str:
    return nodes({"name": "a", **keys})


SIX = entry(devicesplitcount=6)
ORDER = [
    ({}, {COUNT: (10, "default")}),
    ({"devices": DEVICES}, {COUNT: (2, "d.yaml:1:28")}),
    ({"devices": DEVICES, "own": "sharing: {splitCount: 3}"}, {COUNT: (3, "c.yaml:1:23")}),
    ({"devices": DEVICES, "own": OWN}, {COUNT: (4, "c.yaml:4:63"), SCALING: (5.0, "c.yaml:5:77")}),
    ({"own": OWN, "nodes": SIX}, {COUNT: (6, "n.json:1:51"), SCALING: (5.0, "c.yaml:5:77")}),
    (
        {"nodes": SIX, "environ": {"HAMI_AGENT_SHARING_SPLIT_COUNT": "7"}},
        {COUNT: (7, "env HAMI_AGENT_SHARING_SPLIT_COUNT")},
    ),
    (
        {"environ": {"HAMI_AGENT_SHARING_SPLIT_COUNT": "7"}, "flags": {"--split-count": "8"}},
        {COUNT: (8, "--split-count")},
    ),
    (
        {"environ": {"NODE_NAME": "hami", "HAMI_AGENT_NODE_NAME": "own"}},
        {"node.name": ("own", "env HAMI_AGENT_NODE_NAME")},
    ),
]


@pytest.mark.parametrize(("sources", "expected"), ORDER)
def test_a_later_source_wins_and_each_value_has_its_origin(sources, expected):
    found = plan_of(**sources).resolve(*HERE)

    assert expected == {key: (found[key].value, found[key].origin) for key in expected}


@pytest.mark.parametrize(
    ("match", "node", "holds"),
    [
        ("{nodes: [a, 'b?']}", ("b1",), True),
        ("{nodes: [a, 'b?']}", ("b12",), False),
        ("{labels: 'zone=a'}", ("", {"zone": "a"}), True),
        ("{labels: 'zone=a'}", ("", {}), False),
        ("{labels: 'zone!=a'}", ("", {}), True),
        ("{labels: 'zone!=a'}", ("", None), False),
        ("{nodes: [a], labels: 'zone=a'}", ("b", {"zone": "a"}), False),
    ],
)
def test_a_profile_is_for_nodes_that_keep_all_it_asks(match: str, node, *, holds: bool):
    plan = plan_of(own=f"profiles:\n- {{name: p, match: {match}, sharing: {{splitCount: 4}}}}")

    assert (4 if holds else 10) == plan.resolve(*node)[COUNT].value
    assert ["p"] * holds == [one.name for one in plan.applied(*node)]


VALUES = [
    # files that say nothing
    *(({"own": text}, {COUNT: 10}, ()) for text in ("# x\n", "---\n# later\n", "null\n", "~")),
    ({"own": "profiles:\n  # - name: p\n"}, {COUNT: 10}, ()),
    *(({"nodes": text}, {COUNT: 10}, ()) for text in ("{}", '{"nodeconfig": null}')),
    ({"nodes": nodes(None, {"name": "a", "devicesplitcount": 3})}, {COUNT: 3}, ()),
    ({"own": "sharing: {splitCount: }\nscheduler:"}, {COUNT: 10, "scheduler": "hami"}, ()),
    # HAMi's keys
    ({"own": "library: {cudaLogLevel: '3'}"}, {"library.cudaLogLevel": "3"}, ()),
    ({"devices": "nvidia: {libCudaLogLevel: ''}"}, {"library.cudaLogLevel": ""}, ()),
    (
        {"nodes": entry(migstrategy="mixed", enablegetpreferredallocation=False, colour=1)},
        {},
        ("n.json:1:94: colour cannot be set here; see SETTINGS.md",),
    ),
    ({"nodes": entry(operatingmode="remote")}, {"sharing.operatingMode": "hami-core"}, ()),
    # zeros of config.json override nothing, as in HAMi's plugin
    *(
        ({"nodes": entry(devicesplitcount=0), name: text}, {COUNT: count}, ())
        for name, text, count in [("own", "", 10), ("own", OWN, 4), ("devices", DEVICES, 2)]
    ),
    # variables
    ({"environ": {**SERVICE, "HAMI_AGENT_WEB_PORT": "77"}}, {"web.port": 77}, ()),
    *(
        ({"environ": environ}, {key: value}, ())
        for environ, key, value in [
            ({"FAIL_ON_INIT_ERROR": "true"}, "driver.onNoDriver", "exit"),
            ({"NVIDIA_DRIVER_ROOT": "/y", "NVIDIA_DEV_ROOT": "/x"}, "allocation.devRoot", "/x"),
            ({"PASS_DEVICE_SPECS": ""}, "allocation.passDeviceSpecs", False),
            ({"GDS_ENABLED": "1"}, "allocation.gds", True),
            ({"ENABLE_TOPOLOGY_SCORE": "true"}, "report.topologyScore", True),
            ({"HAMI_AGENT_LIBRARY_CUDA_LOG_LEVEL": ""}, "library.cudaLogLevel", ""),
            ({"HAMI_AGENT_SHARING_FILTER_INDEXES": "0, 3"}, "sharing.filterIndexes", ("0", "3")),
        ]
    ),
    # variables and flags of HAMi's plugin that change nothing
    *(
        (
            {source: {name: value}},
            {COUNT: 10},
            (f"{'env ' * (source == 'environ')}{name}: has no effect here",),
        )
        for variable, flag, value in [
            ("DEVICE_SPLIT_COUNT", "--device-split-count", "3"),
            ("MIG_STRATEGY", "--mig-strategy", "none"),
        ]
        for source, name in (("environ", variable), ("flags", flag))
    ),
    # durations
    *(
        ({"own": f"health: {{driverHang: {written}}}"}, {"health.driverHang": 2.0}, ())
        for written in ("2s", "2", '"2"', "2000ms", "2.0")
    ),
    *(
        ({"environ": {f"HAMI_AGENT_HEALTH_{name}": "1.5m"}}, {f"health.{key}": 90.0}, ())
        for name, key in [("DRIVER_HANG", "driverHang"), ("QUIET_PERIOD", "quietPeriod")]
    ),
    # lists that name a GPU twice
    (
        {
            "own": "sharing: {filterUUIDs: [x, y, x], filterIndexes: [1, '1', 2]}",
            "nodes": nodes({"name": "n", "filterdevices": {"uuid": ["x", "x", "x"], "index": []}}),
            "environ": {"HAMI_AGENT_SHARING_FILTER_INDEXES": "0,1,0,1"},
        },
        {"sharing.filterUUIDs": ("x", "y", "x")},
        (),
    ),
]


@pytest.mark.parametrize(("sources", "values", "warned"), VALUES)
def test_the_sources_give_a_node_its_values(sources, values, warned):
    plan = plan_of(**sources)
    found = plan.resolve(*HERE)

    assert values == {key: found[key].value for key in values}
    assert len(warned) == len(plan.warnings), plan.warnings
    for text, warning in zip(warned, plan.warnings, strict=True):
        assert text in warning


def test_every_key_of_hamis_files_reaches_its_setting():
    devices = {
        "resourceCountName": ("a.com/gpu", "sharing.resourceName", "a.com/gpu"),
        "resourceMemoryName": ("a.com/mem", "sharing.memoryResourceName", "a.com/mem"),
        "resourceMemoryPercentageName": ("a.b/c", "sharing.memoryPercentResourceName", "a.b/c"),
        "resourceCoreName": ("", "sharing.coreResourceName", ""),
        "memoryFactor": (1024, "sharing.memoryFactor", 1024),
        "defaultMemory": (-1, "sharing.defaultMemoryMiB", -1),
        "defaultCores": (30, "sharing.defaultCorePercent", 30),
        "deviceSplitCount": (2, "sharing.splitCount", 2),
        "deviceMemoryScaling": (1.5, "sharing.memoryScaling", 1.5),
        "deviceCoreScaling": (2, "sharing.coreScaling", 2.0),
        "preConfiguredDeviceMemory": (7, "sharing.preconfiguredMemoryMiB", 7),
        "enableNumaTopology": (False, "sharing.numaTopology", False),
        "libCudaLogLevel": (3, "library.cudaLogLevel", "3"),
        "disableCoreLimit": (True, "library.disableCoreLimit", True),
        "gpuCorePolicy": ("FORCE", "library.corePolicy", "force"),
    }
    given = {key: value for key, (value, _, _) in devices.items()}
    found = plan_of(json.dumps({"nvidia": given})).resolve(*HERE)

    assert {key: value for _, key, value in devices.values()} == {
        key: one.value for key, one in found.items() if one.origin != "default"
    }


def keys(count: int) -> dict[str, int]:
    return {f"key{number:06}": 1 for number in range(count)}


@pytest.mark.parametrize(
    "sources",
    [
        {"nodes": json.dumps({"nodeconfig": [{"name": 1}], **keys(700)})},
        {"devices": json.dumps({"nvidia": {"a b": 1, **keys(25)}})},
    ],
)
def test_twenty_warnings_are_told_about_a_file_and_wrong_values_first(sources):
    warnings = plan_of(**sources).warnings

    assert 20 == len(warnings)
    assert ": name: expected text" in warnings[0] or "a b cannot be set here" in warnings[0]
