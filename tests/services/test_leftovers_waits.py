"""Agents have time to end, and kubelets to say so; who waits says for what."""

import asyncio
from collections.abc import Mapping

import pytest

from agent.core.cluster.annotations import MUTEX_LOCK
from agent.core.errors import (
    ApiError,
    ApiForbidden,
    ApiGone,
    ApiThrottled,
)
from agent.services.leftovers import NEWS, PATIENCE, VACATING, vacated
from tests.services.leaving import AGENTS, IDLE, WRITTEN, FakeLeftovers, cleaned, served


async def test_the_agents_pods_are_waited_for():
    api = FakeLeftovers(served("a"), pods=[{"one": "a", "two": "b"}, {"two": "b"}, {}])

    outcome, _ = await cleaned(api)

    assert outcome.complete
    assert [AGENTS] * 3 == api.asked
    assert ["a"] == api.removed


async def test_a_pod_that_does_not_end_keeps_its_own_node_as_it_is_and_no_other():
    api = FakeLeftovers(
        served("a"), served("b", condition=True), served("c"), pods=[{"one": "b", "new": ""}]
    )
    began = asyncio.get_running_loop().time()

    outcome, _ = await cleaned(api)

    assert PATIENCE <= asyncio.get_running_loop().time() - began
    assert (False, {"b": "one"}) == (outcome.complete, outcome.occupied)
    assert (["a", "c"], []) == (api.removed, api.forgotten)


async def test_what_is_waited_for_is_said_at_once_and_every_ten_seconds():
    pods = {f"agent-{number}": "a" for number in range(7)}
    api, said = FakeLeftovers(served("a"), pods=[pods] * 25 + [{}]), list[str]()

    await cleaned(api, said)

    assert ["90 s", "80 s", "70 s"] == [" ".join(line.split()[3:5]) for line in said]
    assert all("agent-0, agent-1" in line and "and 2 more" in line for line in said)
    assert NEWS < len(api.asked)


async def test_single_errors_while_the_pods_end_are_told_and_tolerated():
    lost, throttled = ApiError("no answer"), ApiThrottled("slowly", status=429)
    pods: list[Mapping[str, str] | ApiError] = [{"one": "a"}, lost, throttled, {"one": "a"}, {}]
    api, said = FakeLeftovers(served("a"), pods=pods), list[str]()

    outcome, _ = await cleaned(api, said)

    assert outcome.complete
    assert ["a"] == api.removed
    assert 5 == len(api.asked)


@pytest.mark.parametrize(
    "pods",
    [[ApiError("no answer")], [{"one": "a"}, ApiForbidden("no", status=403)]],
    ids=["from the beginning", "for good"],
)
async def test_a_server_that_never_answers_or_refuses_is_not_waited_for(
    pods: list[Mapping[str, str] | ApiError],
):
    api, began = FakeLeftovers(served("a"), pods=pods), asyncio.get_running_loop().time()

    with pytest.raises(ApiError):
        await cleaned(api)

    assert 2 > asyncio.get_running_loop().time() - began
    assert [] == api.removed


async def test_a_server_that_stays_silent_is_waited_for_no_longer_than_for_the_pods():
    api = FakeLeftovers(served("a"), pods=[{"one": "a"}, ApiError("no answer")])
    began = asyncio.get_running_loop().time()

    with pytest.raises(ApiError):
        await cleaned(api)

    assert PATIENCE <= asyncio.get_running_loop().time() - began < PATIENCE + 2


async def test_kubelets_have_time_to_say_that_nobody_serves():
    api, said = FakeLeftovers(served("a"), served("b")), list[str]()
    api.serving = {"a": 12}

    outcome, _ = await cleaned(api, said)

    assert outcome.complete
    assert (["a", "b"], 1) == (api.removed, api.looked["b"])
    assert 2 == len(said)
    assert "no plugin serves gpus.example/one: a" in said[0]


async def test_where_somebody_goes_on_serving_nothing_is_touched_and_it_is_no_failure():
    api = FakeLeftovers(served("a", condition=True), served("b"))
    api.serving, api.degraded = {"a": float("inf")}, {"a"}
    began = asyncio.get_running_loop().time()

    outcome, told = await cleaned(api)

    assert outcome.complete
    assert VACATING <= asyncio.get_running_loop().time() - began
    assert (["b"], [], ()) == (api.removed, api.forgotten, told[0].removed)
    assert {*WRITTEN, MUTEX_LOCK, "condition GpuDegraded"} == told[0].left.keys()


async def test_single_errors_while_the_kubelets_are_asked_are_told_and_tolerated():
    api, said = FakeLeftovers(), list[str]()
    api.looks = [ApiError("no answer"), ApiGone("gone", status=410)]

    found = await vacated(api, ["a"], AGENTS.resource, said.append)

    assert ({"a": IDLE}, 1) == (found, len(said))
    api.looks = [ApiForbidden("no", status=403)]
    with pytest.raises(ApiForbidden):
        await vacated(api, ["a"], AGENTS.resource, said.append)
