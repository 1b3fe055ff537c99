"""Of what lies on a Node goes what an agent wrote, as the API server keeps who wrote what."""

from collections.abc import Mapping
from typing import Any

import pytest

from agent.codec.leftovers import decode_traces
from agent.core.annotations import CORDON, HANDSHAKE, MUTEX_LOCK, REGISTER, SCORE
from agent.core.errors import MalformedText

OWN = "hami-agent/gpus"
EVERYTHING = {REGISTER: "[]", SCORE: "[]", HANDSHAKE: "", MUTEX_LOCK: "a", OWN: "1", "seen": "1"}
ALL = f"{REGISTER} {SCORE} {HANDSHAKE} {OWN}"


def node(annotations: Mapping[str, str], agent: str = "", other: str = "") -> dict[str, Any]:
    """A Node; `agent` and `other` wrote the keys named, between spaces."""
    managed = [
        {
            "manager": manager,
            "fieldsV1": {"f:metadata": {"f:annotations": {f"f:{key}": {} for key in keys.split()}}},
        }
        for manager, keys in (("hami-agent", agent), ("nvidia-device-plugin", other))
    ]
    metadata = {"name": "a", "resourceVersion": "7", "annotations": dict(annotations)}
    return {"metadata": metadata | {"managedFields": managed}}


CASES = {
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
    "never ours": ({REGISTER: "[]"}, {"other": REGISTER}, {REGISTER}),
    "nothing at all": ({}, {}, set()),
}


@pytest.mark.parametrize("case", CASES)
def test_of_one_node_goes_what_the_agent_wrote(case: str):
    annotations, writers, left = CASES[case]

    traces = decode_traces(node(annotations, **writers))

    assert set(annotations) - left == set(traces.ours)


def test_what_stays_of_hamis_has_a_reason_and_all_else_is_nobodys_business():
    traces = decode_traces(node({**EVERYTHING, CORDON: "GPU-1"}, agent=OWN, other=REGISTER))

    assert {REGISTER, SCORE, HANDSHAKE, MUTEX_LOCK, CORDON} == traces.others.keys()
    assert all(traces.others.values())


def test_a_condition_is_ours_where_an_agent_wrote_it():
    fields = {"f:status": {"f:conditions": {'k:{"type":"GpuDegraded"}': {}}}}
    mine, theirs = node({}), node({})
    mine["metadata"]["managedFields"].append({"manager": "hami-agent", "fieldsV1": fields})
    theirs["metadata"]["managedFields"].append({"manager": "kubelet", "fieldsV1": fields})

    assert (True, False) == (decode_traces(mine).condition, decode_traces(theirs).condition)


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

    assert () == decode_traces({"metadata": metadata}).ours


@pytest.mark.parametrize("metadata", [{}, {"name": "a"}, {"name": 1, "resourceVersion": "7"}, None])
def test_a_node_without_name_or_version_is_refused(metadata: Any):
    with pytest.raises(MalformedText):
        decode_traces({"metadata": metadata})
