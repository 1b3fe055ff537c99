"""What goes of a Node, by who serves there and by who wrote what as the API server keeps it."""

from collections.abc import Mapping
from typing import Any

import pytest

from agent.codec.leftovers import decode_state, decode_traces
from agent.core.cluster.annotations import CORDON, HANDSHAKE, MUTEX_LOCK, REGISTER, REPORTS, SCORE
from agent.core.errors import MalformedText
from agent.core.node.leftovers import CONDITION, NodeLeftovers, due

OWN = "hami-agent/gpus"
EVERYTHING = {REGISTER: "[]", SCORE: "[]", HANDSHAKE: "", MUTEX_LOCK: "a", OWN: "1", "seen": "1"}
ALL = f"{REGISTER} {SCORE} {HANDSHAKE} {OWN}"
EARLY, MIDDLE, LATE = (f"2026-01-01T00:00:{second}Z" for second in ("00", "10", "20"))
TAKEN = {REGISTER: "[]", REPORTS: f"after nvidia-device-plugin {EARLY}"}
IDLE = NodeLeftovers(kubelet=True)
SERVED = NodeLeftovers(kubelet=True, served=80)


def node(
    annotations: Mapping[str, str],
    agent: str = "",
    other: str = "",
    at: tuple[str, str] = (MIDDLE, EARLY),
) -> dict[str, Any]:
    """A Node; `agent` and `other` wrote the keys named, between spaces, at these times."""
    managed = [
        {
            "manager": manager,
            "time": when,
            "fieldsV1": {"f:metadata": {"f:annotations": {f"f:{key}": {} for key in keys.split()}}},
        }
        for manager, keys, when in zip(
            ("hami-agent", "nvidia-device-plugin"), (agent, other), at, strict=True
        )
    ]
    metadata = {"name": "a", "resourceVersion": "7", "annotations": dict(annotations)}
    return {"metadata": metadata | {"managedFields": managed}}


CASES: dict[str, tuple[dict[str, str], dict[str, Any], set[str]]] = {
    "ours alone": (EVERYTHING, {"agent": ALL}, {MUTEX_LOCK, "seen"}),
    "ours without a stamp": ({REGISTER: "[]", OWN: "1"}, {"agent": f"{REGISTER} {OWN}"}, set()),
    "another plugin followed": (
        {REGISTER: "[]", HANDSHAKE: "b", OWN: "1"},
        {"agent": OWN, "other": f"{REGISTER} {HANDSHAKE}"},
        {REGISTER, HANDSHAKE},
    ),
    "another plugin followed and says the same": (
        {REGISTER: "[]", HANDSHAKE: "Reported_b"},
        {"agent": REGISTER, "other": HANDSHAKE},
        {REGISTER, HANDSHAKE},
    ),
    "the scheduler answered": (
        {REGISTER: "[]", HANDSHAKE: "Requesting_b"},
        {"agent": REGISTER, "other": HANDSHAKE},
        set(),
    ),
    "taken over": (TAKEN, {"agent": REPORTS, "other": REGISTER}, set()),
    "taken over, and the scheduler answered": (
        TAKEN | {HANDSHAKE: "Requesting_b"},
        {"agent": REPORTS, "other": REGISTER},
        set(),
    ),
    "taken over, and its writer has come back": (
        TAKEN,
        {"agent": REPORTS, "other": REGISTER, "at": (MIDDLE, LATE)},
        {REGISTER},
    ),
    "taken over, and another reports": (
        TAKEN | {HANDSHAKE: "Reported_b"},
        {"agent": REPORTS, "other": REGISTER},
        {REGISTER, HANDSHAKE},
    ),
    "never ours": ({REGISTER: "[]"}, {"other": REGISTER}, {REGISTER}),
    "nobody knows whose": ({REGISTER: "[]", SCORE: "[]", OWN: "1"}, {}, {REGISTER, SCORE}),
    "nothing at all": ({}, {}, set()),
}


@pytest.mark.parametrize("case", CASES)
def test_where_nobody_serves_goes_what_is_an_agents(case: str):
    annotations, writers, left = CASES[case]

    traces = decode_traces(node(annotations, **writers))

    assert set(annotations) - left == set(due(traces, IDLE, here=False).keys)


@pytest.mark.parametrize("case", CASES)
def test_where_an_agent_was_and_nobody_serves_every_report_goes(case: str):
    annotations, writers, _ = CASES[case]

    traces = decode_traces(node(annotations, **writers))

    assert set(annotations) - {MUTEX_LOCK, "seen"} == set(due(traces, IDLE, here=True).keys)


@pytest.mark.parametrize("here", [False, True])
def test_beside_a_plugin_that_serves_nothing_goes(here: bool):  # noqa: FBT001 -- a case
    traces = decode_traces(node(EVERYTHING, agent=ALL))

    found = due(traces, NodeLeftovers(kubelet=True, served=1, degraded=True), here=here)

    assert ((), False) == (found.keys, found.condition)
    assert {REGISTER, SCORE, HANDSHAKE, OWN, CONDITION, MUTEX_LOCK} == found.left.keys()
    assert "a device plugin serves" in found.left[REGISTER]


def test_beside_a_plugin_that_reported_after_the_agent_goes_what_is_an_agents_alone():
    notes = {REGISTER: "[]", OWN: "1"}
    followed = decode_traces(node(notes, agent=OWN, other=REGISTER, at=(MIDDLE, LATE)))
    taken = decode_traces(node(notes, agent=OWN, other=REGISTER))

    assert ((OWN,), ()) == tuple(due(one, SERVED, here=False).keys for one in (followed, taken))
    assert (
        f"nvidia-device-plugin wrote the last report, at {LATE}"
        == (due(followed, SERVED, here=False).left[REGISTER])
    )


def test_the_condition_goes_where_an_agent_wrote_it_and_here_in_any_case():
    fields = {"f:status": {"f:conditions": {'k:{"type":"GpuDegraded"}': {}}}}
    mine, theirs = node({}), node({})
    mine["metadata"]["managedFields"].append({"manager": "hami-agent", "fieldsV1": fields})
    theirs["metadata"]["managedFields"].append({"manager": "kubelet", "fieldsV1": fields})
    degraded = NodeLeftovers(kubelet=True, degraded=True)
    found = [due(decode_traces(one), degraded, here=False) for one in (mine, theirs)]

    assert [(True, False), (False, True)] == [
        (one.condition, CONDITION in one.left) for one in found
    ]
    assert due(decode_traces(theirs), degraded, here=True).condition


REASONS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "nvidia-device-plugin wrote the last": ({REGISTER: "[]"}, {"other": REGISTER}),
    "does not know who": ({REGISTER: "[]"}, {}),
    "another device plugin has written": (
        {REGISTER: "[]", HANDSHAKE: "Reported_b"},
        {"agent": REGISTER, "other": HANDSHAKE},
    ),
    "has no report of an agent": ({SCORE: "[]"}, {}),
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_stays_of_hamis_has_its_true_reason(reason: str):
    annotations, writers = REASONS[reason]
    degraded = NodeLeftovers(kubelet=True, degraded=True)

    left = due(decode_traces(node(annotations, **writers)), degraded, here=False).left

    assert {*annotations, CONDITION} == left.keys()
    assert all(reason in why for why in left.values())


def test_all_else_is_nobodys_business():
    traces = decode_traces(node({**EVERYTHING, CORDON: "GPU-1"}, agent=ALL))

    assert {MUTEX_LOCK, CORDON} == due(traces, IDLE, here=False).left.keys()


def test_what_the_uninstallation_changed_counts_as_nobodys():
    found = node({REGISTER: "[]"}, agent=REGISTER)
    found["metadata"]["managedFields"][0]["manager"] = "hami-agent-uninstall"

    assert frozenset() == decode_traces(found).written


@pytest.mark.parametrize(
    "wrong",
    [
        {"managedFields": "none"},
        {"managedFields": [None, {"manager": "hami-agent", "fieldsV1": {"f:metadata": []}}]},
        {"annotations": None},
    ],
)
def test_what_has_another_shape_counts_as_nothing(wrong: dict[str, Any]):
    metadata = {"name": "a", "resourceVersion": "7", **wrong}

    assert () == due(decode_traces({"metadata": metadata}), IDLE, here=False).keys


@pytest.mark.parametrize("metadata", [{}, {"name": "a"}, {"name": 1, "resourceVersion": "7"}, None])
def test_a_node_without_name_or_version_is_refused(metadata: Any):
    with pytest.raises(MalformedText):
        decode_traces({"metadata": metadata})


@pytest.mark.parametrize(
    ("ready", "allocatable", "state"),
    [
        ("True", {"nvidia.com/gpu": "80"}, NodeLeftovers(kubelet=True, served=80)),
        ("False", {"nvidia.com/gpu": "1k"}, NodeLeftovers(kubelet=True, served=1000)),
        ("Unknown", {"nvidia.com/gpu": "80"}, NodeLeftovers()),
        ("True", {"nvidia.com/gpu": "0", "other.com/gpu": "8"}, IDLE),
        ("True", {"nvidia.com/gpu": "many"}, IDLE),
        ("True", None, IDLE),
    ],
)
def test_who_serves_is_what_a_living_kubelet_says(
    ready: str, allocatable: Any, state: NodeLeftovers
):
    conditions = [{"type": "Ready", "status": ready}, "odd"]
    status = {"conditions": conditions, "allocatable": allocatable}

    assert state == decode_state({"status": status}, "nvidia.com/gpu")


def test_of_a_node_that_says_nothing_nothing_is_known():
    assert NodeLeftovers() == decode_state({}, "nvidia.com/gpu")
    assert NodeLeftovers() == decode_state({"status": {"conditions": 1}}, "nvidia.com/gpu")
