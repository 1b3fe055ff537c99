"""What a pod may cost at the API server: each request has a cause, or is named."""

import pytest

from agent.sandbox.apiserver import ApiCall
from agent.sandbox.scenario.default import pod_requests
from agent.sandbox.scenario.workloads import PLACED

ONE, PAIR, TRIO, PREPARED = PLACED
USUAL = ("get pods", "patch pods", "patch nodes", "get pods")


def judged(workload, kinds, *pauses):
    calls = [
        ApiCall("agent", verb, resource, "", "", workload.name, 200)
        for verb, resource in map(str.split, kinds)
    ]
    return pod_requests(workload, calls, pauses)


@pytest.mark.parametrize(
    ("workload", "answers"),
    [(ONE, "1 answer"), (PAIR, "1 answer"), (TRIO, "2 answers"), (PREPARED, "2 answers")],
    ids=[one.name for one in PLACED],
)
def test_two_writes_one_read_and_one_more_are_told_by_kind(workload, answers):
    told, wrong = judged(workload, USUAL)

    assert f"{workload.name} ({answers}): 1 patch pods, 1 patch nodes, 2 get pods" == told
    assert [] == wrong


@pytest.mark.parametrize("workload", [TRIO, PREPARED], ids=["two containers", "init container"])
def test_each_answer_may_have_a_read_before_it(workload):
    assert [] == judged(workload, (*USUAL, "get pods"))[1]
    assert ["trio: 1 get pods too many"] == judged(TRIO, (*USUAL, *["get pods"] * 2))[1]


def test_a_second_answer_that_is_late_explains_one_more_write_and_is_named():
    told, wrong = judged(PREPARED, (*USUAL, "patch pods"), 1.34)

    assert "2 patch pods" in told
    assert "(1 more: 1.3 s between two answers)" in told
    assert [] == wrong


def test_a_late_answer_without_one_more_write_is_nothing_to_tell():
    assert "more" not in judged(TRIO, USUAL, 1.2)[0]


@pytest.mark.parametrize(
    "more",
    [
        "patch pods",
        "patch nodes",
        "get pods",
        "get nodes",
        "list pods",
        "create events",
    ],
)
def test_what_nothing_explains_is_named_with_its_pod(more):
    assert [f"one: 1 {more} too many"] == judged(ONE, (*USUAL, more))[1]


@pytest.mark.parametrize("missing", ["patch pods", "patch nodes"])
def test_a_write_that_never_came_is_named(missing):
    assert [f"pair: no {missing}"] == judged(PAIR, [one for one in USUAL if one != missing])[1]
