"""What HAMi passes over is passed over here, and told of in few lines; what is junk is refused."""

import json

import pytest

from agent.settings.sources import NodeFacts
from agent.settings.values import NodeValues
from tests.unit.settings.plans import plan_of


def value_of(plan: NodeValues, key: str) -> object:
    return plan.resolve(NodeFacts("a"))[key].value


def keys(count: int) -> dict[str, int]:
    return {f"key{number:06}": 1 for number in range(count)}


PROFILES = [{"name": str(one), "match": {"labels": "x=y"}} for one in range(30)]


@pytest.mark.parametrize(
    ("sources", "first", "last"),
    [
        (
            {"nodes": {"nodeconfig": [], **keys(70_000)}},
            "n.json:1:20: unknown key `key000000`",
            "n.json: and 69980 more are passed over",
        ),
        ({"devices": {"nvidia": keys(25)}}, "key000000", "d.yaml: and 5 more are passed over"),
        ({"own": {"scheduler": "none", "profiles": PROFILES}}, "", "and 10 more are passed over"),
    ],
    ids=["unknown keys of HAMi's JSON", "of HAMi's YAML", "profiles that never apply"],
)
def test_what_is_passed_over_is_told_of_twenty_times_and_then_by_its_number(sources, first, last):
    plan = plan_of(**{name: json.dumps(one) for name, one in sources.items()})  # type: ignore[arg-type]

    assert 21 == len(plan.warnings)
    assert first in plan.warnings[0]
    assert plan.warnings[-1].endswith(last)


def is_in(key: str, *values: object) -> dict[str, object]:
    return {"matchExpressions": [{"key": key, "operator": "In", "values": values}]}


@pytest.mark.parametrize("text", ["{}", '{"comment": 1}', '{"nodeconfig": null, "comment": 1}'])
def test_a_json_without_nodes_is_an_empty_list_as_in_hami(text: str):
    plan = plan_of(nodes=text)

    assert () == plan.node_config.profiles
    assert ('"nodeconfig"' not in text) == any("nothing is taken" in one for one in plan.warnings)


def test_null_in_the_list_of_nodes_is_an_entry_of_no_node():
    plan = plan_of(nodes='{"nodeconfig":[null,{"name":"a","devicesplitcount":3}]}')

    assert 3 == value_of(plan, "sharing.splitCount")
    (warning,) = plan.warnings
    assert "n.json:1:16: nodeconfig[0]: an entry without name and nodelabelselector" in warning


@pytest.mark.parametrize(
    ("selector", "labels", "holds"),
    [
        ({"matchLabels": {"zone": None}}, {"zone": ""}, True),
        ({"matchLabels": {"zone": None}}, {"zone": "a"}, False),
        ({"matchLabels": {"zone": None, "rack": "1"}}, {"zone": "", "rack": "1"}, True),
        ({"matchLabels": {"zone": None}}, {}, False),
        (is_in("zone", None), {"zone": ""}, True),
        (is_in("zone", "a", None), {"zone": "a"}, True),
        (is_in("zone", "a", None), {"zone": "b"}, False),
        (is_in("zone", "a", None), {"zone": ""}, True),
    ],
)
def test_null_in_a_selector_is_an_empty_text_as_in_go(
    selector: object, labels: dict[str, str], *, holds: bool
):
    entry = {"nodelabelselector": selector, "devicesplitcount": 3}
    plan = plan_of(nodes=json.dumps({"nodeconfig": [entry]}))

    assert () == plan.warnings
    assert holds == bool(plan.applied(NodeFacts("a", labels)))


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"devicesplitcuont": 3}, "unknown key"),
        ({"devicesplitcount": 0}, "overrides nothing"),
        ({"migstrategy": "single"}, "has no effect"),
        ({"nodelabelselector": {"matchLabels": {"/": "x"}}}, "selects no node"),
        ({"devicememoryscaling": -1}, "sharing.memoryScaling"),
        ({"filterdevices": {"uuid": ["GPU-x", "GPU-x"]}}, "named twice"),
    ],
)
@pytest.mark.parametrize("by", ["flag", "own file", "environment"])
def test_what_is_wrong_with_the_own_entry_is_not_hidden_behind_others(
    part: dict[str, object], said: str, by: str
):
    entries = [{"name": f"n{number}"} | part for number in range(60)]
    plan = plan_of(
        nodes=json.dumps({"nodeconfig": entries}),
        own="node: {name: n55}" if by == "own file" else "",
        flags={"--node-name": "n55"} if by == "flag" else None,
        environ={"NODE_NAME": "n55"} if by == "environment" else None,
    )

    first = next(one for one in plan.warnings if said in one)
    assert "n55" == plan.name
    assert "n.json:1:" in first
    assert abs(column(first) - json.dumps({"nodeconfig": entries}).index('"n55"')) < 150
    assert [f"n{number}" for number in range(60)] == list(plan.names())


def column(warning: str) -> int:
    return int(warning.partition("n.json:1:")[2].partition(":")[0].split(")")[0])


@pytest.mark.parametrize("name", ["gpu-*", "GPU-1", "gpu-[12]", "gpu 1"])
def test_an_entry_whose_name_no_node_can_have_is_told(name: str):
    plan = plan_of(nodes=f'{{"nodeconfig":[{{"name":"{name}","devicesplitcount":3}}]}}')

    (warning,) = plan.warnings
    assert f"n.json:1:16: nodeconfig[0]: no Node is called {name}: " in warning
    assert "profiles of config.yaml" in warning


@pytest.mark.parametrize("text", ["---\n# later\n", "null\n", "~", "--- # nothing\n...\n"])
def test_a_yaml_file_of_comments_alone_is_empty(text: str):
    assert 10 == value_of(plan_of(own=text), "sharing.splitCount")
    assert 10 == value_of(plan_of(devices=text), "sharing.splitCount")


@pytest.mark.parametrize(("word", "on"), [("true", True), ("TRUE", False), ("1", False)])
def test_hamis_switch_of_the_score_is_on_for_true_alone(word: str, *, on: bool):
    plan = plan_of(environ={"ENABLE_TOPOLOGY_SCORE": word})

    assert on == value_of(plan, "report.topologyScore")
    assert (not on) == any("ENABLE_TOPOLOGY_SCORE" in one for one in plan.warnings)


@pytest.mark.parametrize("word", ["false", "0", ""])
def test_hamis_switch_of_the_score_is_off_without_a_word_where_it_says_so(word: str):
    plan = plan_of(environ={"ENABLE_TOPOLOGY_SCORE": word})

    assert False is value_of(plan, "report.topologyScore")
    assert () == plan.warnings


def test_hamis_switch_of_the_score_stops_no_start():
    plan = plan_of(environ={"ENABLE_TOPOLOGY_SCORE": "yes, please"})

    assert False is value_of(plan, "report.topologyScore")
    assert "'yes, please'" in plan.warnings[0]


LINKS = {
    "HAMI_AGENT_WEB_SERVICE_HOST": "10.0.0.1",
    "HAMI_AGENT_WEB_SERVICE_PORT": "9394",
    "HAMI_AGENT_WEB_PORT": "tcp://10.0.0.1:9394",
    "HAMI_AGENT_WEB_PORT_9394_TCP_ADDR": "10.0.0.1",
}


def test_a_service_of_the_name_of_a_section_sets_nothing():
    assert 9394 == value_of(plan_of(environ=LINKS), "web.port")


def test_beside_such_a_service_the_port_can_still_be_set():
    assert 77 == value_of(plan_of(environ={**LINKS, "HAMI_AGENT_WEB_PORT": "77"}), "web.port")


ZERO = '{"nodeconfig": [{"name": "a", "devicesplitcount": 0}]}'
BY_LABEL = """
sharing: {splitCount: 4}
profiles:
- {name: p, match: {labels: "gpu=big"}, sharing: {splitCount: 7}}
"""


@pytest.mark.parametrize(
    ("own", "entry", "says"),
    [
        (BY_LABEL, {"name": "a"}, "splitCount of all nodes is 4 (c.yaml:2:"),
        (BY_LABEL, {"name": "*"}, "splitCount of all nodes is 4 (c.yaml:2:"),
        (BY_LABEL, {"nodelabelselector": {}}, "splitCount of all nodes is 4 (c.yaml:2:"),
        ("", {"name": "a"}, "splitCount of all nodes is 10 (default)"),
    ],
)
def test_a_zero_is_told_with_the_value_of_all_nodes(own: str, entry: dict[str, object], says: str):
    nodes = json.dumps({"nodeconfig": [entry | {"devicesplitcount": 0}]})
    (told,) = plan_of(own=own, nodes=nodes).warnings

    assert "devicesplitcount 0 overrides nothing, as in HAMi's plugin: " in told
    assert says in told


def test_a_zero_is_not_told_where_a_variable_decides():
    environ = {"HAMI_AGENT_SHARING_SPLIT_COUNT": "5"}

    assert () == plan_of(own=BY_LABEL, nodes=ZERO, environ=environ).warnings


def test_zeros_leave_room_for_what_else_was_passed_over():
    entries = [{"name": f"n{one}", "devicesplitcount": 0} for one in range(30)]
    own = "sharing: {filterUUIDs: [GPU-a, GPU-a]}"
    warnings = plan_of(own=own, nodes=json.dumps({"nodeconfig": entries})).warnings

    assert "named twice: GPU-a" in warnings[0]
    assert "and 11 more are passed over" in warnings[-1]
