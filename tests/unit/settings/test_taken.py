"""What the sources give a node: its values, and a warning for what has no effect.

c.yaml is the agent's own file, d.yaml HAMi's device-config.yaml, n.json HAMi's config.json.
"""

import ast
import json

import pytest

from tests.unit.rows import rows_of
from tests.unit.settings.plans import plan_of, sources_of

HERE = ("a", {"zone": "a"})
OWN = """
sharing: {splitCount: 3}
profiles:
- {name: some, match: {nodes: [n*, a]}, sharing: {splitCount: 4}}
- {name: one, match: {nodes: [a], labels: zone=a}, sharing: {memoryScaling: 5}}
"""
SERVICE = {
    "SERVICE_HOST": "10.0.0.7",
    "SERVICE_PORT_HTTP": "9394",
    "PORT": "tcp://10.0.0.7:9394",
    "PORT_9394_TCP_ADDR": "10.0.0.7",
    "WEB_SERVICE_HOST": "10.0.0.1",
    "WEB_PORT_9394_TCP_ADDR": "10.0.0.1",
}
SHORT = {
    "OWN": f"own {OWN}",
    "SERVICE": " & ".join(f"environ HAMI_AGENT_{key}={SERVICE[key]}" for key in SERVICE),
}


@pytest.mark.parametrize(("words", "told"), rows_of(__file__, "taken.txt"))
def test_the_sources_give_a_node_its_values(words: str, told: str):
    whole = " & ".join(SHORT.get(word, word) for word in words.split(" & "))
    plan = plan_of(**sources_of(whole))
    found, warnings = plan.resolve(*HERE), list(plan.warnings)

    for part in told.split(" & "):
        if part.startswith("warns "):
            assert part.removeprefix("warns ") in warnings.pop(0)
            continue
        key, _, value = part.partition(" = ")
        value, _, origin = value.partition(" @ ")
        assert ast.literal_eval(value) == found[key].value
        assert origin in {"", found[key].origin}
    assert [] == warnings


def test_a_profile_that_asks_for_labels_is_not_for_a_node_whose_labels_are_not_known():
    plan = plan_of(
        own="profiles: [{name: p, match: {labels: 'zone!=a'}, report: {profile: colon}}]"
    )
    assert [["p"], []] == [[one.name for one in plan.applied("", known)] for known in ({}, None)]


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
