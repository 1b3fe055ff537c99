"""HAMi's config.json since #3173: entries by name, else by label selector, else of the name `*`."""

import json

import pytest

from agent.errors import SettingsError
from agent.settings.sources import NodeFacts
from agent.settings.values import NodeValues
from tests.unit.settings.plans import plan_of

SPLIT, SCALING, MODE = "sharing.splitCount", "sharing.memoryScaling", "sharing.operatingMode"
N1 = NodeFacts("n1", {"gpu": "a100", "Pool": "X"})


def by(labels: dict[str, str], **more: object) -> dict[str, object]:
    return {"nodelabelselector": {"matchLabels": labels}, **more}


def a100(**more: object) -> dict[str, object]:
    return by({"gpu": "a100"}, **more)


def pool_x(**more: object) -> dict[str, object]:
    return by({"Pool": "X"}, **more)


def t4(**more: object) -> dict[str, object]:
    return by({"gpu": "t4"}, **more)


def named(name: str, **more: object) -> dict[str, object]:
    return {"name": name, **more}


def plan(*entries: dict[str, object], own: str = "") -> NodeValues:
    return plan_of(own=own, nodes=json.dumps({"nodeconfig": list(entries)}))


def split(*entries: dict[str, object], facts: NodeFacts = N1) -> object:
    return plan(*entries).resolve(facts)[SPLIT].value


TWO, THREE, FOUR, FIVE = ({"devicesplitcount": count} for count in (2, 3, 4, 5))


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([a100(**FOUR), named("*", **THREE)], {SPLIT: 4}),
        ([named("*", **THREE), a100(**FOUR)], {SPLIT: 4}),
        ([t4(**FOUR), named("*", **THREE)], {SPLIT: 3}),
        ([named("n1", **TWO), a100(**FOUR, devicememoryscaling=2)], {SPLIT: 2, SCALING: 1}),
        ([a100(**FOUR, devicememoryscaling=2), pool_x(**FIVE)], {SPLIT: 5, SCALING: 2}),
        ([a100(**FOUR), pool_x(devicesplitcount=0)], {SPLIT: 4}),
        ([named("other", operatingmode="remote")], {MODE: "hami-core"}),
        ([named("n1", operatingmode="remote")], {MODE: "hami-core"}),
        ([a100(operatingmode="mps"), pool_x(operatingmode="remote")], {MODE: "hami-core"}),
        ([named("*", **THREE), named("*", operatingmode="mig")], {SPLIT: 3, MODE: "mig"}),
        ([named("n1", **TWO, **t4())], {SPLIT: 2}),
        ([named("other", **TWO, **a100())], {SPLIT: 2}),
        ([named("N1", **TWO), {"devicesplitcount": 4}], {SPLIT: 10}),
    ],
)
def test_only_the_first_tier_that_matches_applies(entries, expected):
    values = plan(*entries).resolve(N1)

    assert expected == {key: values[key].value for key in expected}


@pytest.mark.parametrize(
    ("selector", "matches"),
    [
        ({}, True),
        ({"matchLabels": {}}, True),
        ({"matchExpressions": []}, True),
        (None, False),
        ({"matchLabels": {"gpu": "a100", "Pool": "X"}}, True),
        ({"MATCHLABELS": {"Pool": "X"}}, True),
        ({"matchLabels": {"pool": "X"}}, False),
        ({"matchLabels": {"Pool": "x"}}, False),
        ({"matchLabels": {"GPU": "", "gpu": "a100"}}, False),
        ({"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["t4", "a100"]}]}, True),
        ({"matchExpressions": [{"Key": "gpu", "Operator": "In", "Values": ["t4"]}]}, False),
        ({"matchExpressions": [{"key": "gpu", "operator": "NotIn", "values": ["t4"]}]}, True),
        ({"matchExpressions": [{"key": "gpu", "operator": "NotIn", "values": ["a100"]}]}, False),
        ({"matchExpressions": [{"key": "none", "operator": "NotIn", "values": ["a"]}]}, True),
        ({"matchExpressions": [{"key": "Pool", "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": "pool", "operator": "Exists", "values": None}]}, False),
        ({"matchExpressions": [{"key": "pool", "operator": "DoesNotExist"}]}, True),
        (
            {
                "matchLabels": {"gpu": "a100"},
                "matchExpressions": [{"key": "Pool", "operator": "DoesNotExist"}],
            },
            False,
        ),
    ],
)
def test_a_selector_is_kubernetes_selector(selector, matches):
    assert split({"nodelabelselector": selector, **FOUR}) == (4 if matches else 10)


@pytest.mark.parametrize(
    ("name", "is_needed"), [("n1", False), ("n2", True)], ids=["named", "not named"]
)
def test_a_node_that_an_entry_names_needs_no_labels(name, is_needed):
    selected = {"nodelabelselector": {"matchLabels": {"gpu": "a100"}}, **FOUR}

    assert is_needed == plan(selected, {"name": "n1", **FOUR}).need_labels(NodeFacts(name))


@pytest.mark.parametrize(
    "expression",
    [
        {"key": "gpu", "operator": "in", "values": ["a100"]},
        {"key": "gpu", "operator": "In", "values": []},
        {"key": "gpu", "operator": "Exists", "values": ["a100"]},
        {"operator": "DoesNotExist"},
        {"key": "gpu", "operator": "NotIn", "values": ["not valid!"]},
        {"key": "-gpu-", "operator": "NotIn", "values": ["a100"]},
        {"key": "/", "operator": "DoesNotExist"},
        {"key": "gpu"},
        None,
    ],
)
def test_a_selector_that_kubernetes_refuses_selects_no_node_and_is_told(expression):
    found = plan({"nodelabelselector": {"matchExpressions": [expression]}, **FOUR})

    assert 10 == found.resolve(N1)[SPLIT].value
    assert ["n.json:1:39: nodelabelselector selects no node"] == [
        ":".join(text.split(":")[:4]) for text in found.warnings
    ]


def test_labels_that_are_not_known_select_nothing_but_what_selects_every_node():
    entries = (a100(**FOUR), named("*", **THREE))
    unseen = NodeFacts("n1")

    assert 3 == split(*entries, facts=unseen)
    assert 5 == split(*entries, {"nodelabelselector": {}, **FIVE}, facts=unseen)


def test_the_entries_win_over_profiles_and_leave_them_what_they_do_not_set():
    own = (
        "profiles: [{name: p, match: {labels: gpu=a100}, sharing: {splitCount: 7, coreScaling: 2}}]"
    )
    values = plan(pool_x(**FIVE), named("*", **THREE), own=own).resolve(N1)

    assert (5, 2) == (values[SPLIT].value, values["sharing.coreScaling"].value)
    assert ("p",) == values.profiles


def test_without_a_scheduler_no_selector_applies_and_that_is_told():
    found = plan(a100(**FOUR), named("*", **THREE), own="scheduler: none")

    assert 3 == found.resolve(N1)[SPLIT].value
    assert ["n.json:1:17: the entry never applies"] == [
        text.partition(": it selects")[0] for text in found.warnings
    ]


FAST = {"operatingmode": "fast"}


@pytest.mark.parametrize(
    ("entries", "refused"),
    [
        ([named("n1", **FAST)], True),
        ([a100(**FAST)], True),
        ([named("*", **FAST)], True),
        ([named("other", **FAST)], False),
        ([t4(**FAST)], False),
        ([named("n1", **TWO), a100(**FAST), named("*", **FAST)], False),
        ([a100(**FOUR), named("*", devicesplitcount=10**6)], False),
        ([a100(**FOUR), pool_x(devicememoryscaling=-1)], True),
        ([named("other", operatingmode="remote", colour="red")], False),
    ],
)
def test_a_wrong_value_refuses_the_file_only_on_the_nodes_of_its_entry(entries, refused):
    found = plan(*entries)

    assert found.warnings
    if refused:
        with pytest.raises(SettingsError, match=r"^n\.json:1:.*expected"):
            found.settings(N1)
    else:
        assert found.settings(N1)


def test_before_the_first_scan_an_entry_that_labels_may_replace_is_not_judged():
    found = plan(a100(**FOUR), named("*", **FAST))

    assert found.settings(NodeFacts("n1"))
    assert found.settings(N1)
    for sure in (NodeFacts("n1", gpus=frozenset()), NodeFacts("n1", {})):
        with pytest.raises(SettingsError, match="operatingMode"):
            found.settings(sure)
