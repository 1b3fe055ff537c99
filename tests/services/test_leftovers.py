"""After the agents are gone, so is what they wrote on the Nodes, and nothing of others."""

from collections.abc import Sequence

import pytest

from agent.core.cluster.annotations import MUTEX_LOCK, REGISTER
from agent.core.errors import (
    ApiConflict,
    ApiError,
    ApiForbidden,
    ApiNotFound,
)
from agent.core.node.leftovers import NodeLeftovers, NodeTraces
from agent.services.leftovers import clean
from tests.services.leaving import AGENTS, IDLE, WRITTEN, FakeLeftovers, cleaned, served


async def test_every_node_is_cleaned_once_and_told_of():
    bare = NodeTraces("c", "1", {"seen": "1"})
    api = FakeLeftovers(served("a"), served("b"), bare)

    outcome, told = await cleaned(api)

    assert outcome.complete
    assert ["a", "b"] == api.removed
    assert {MUTEX_LOCK, "seen"} == api.held["a"].annotations.keys()
    assert list(outcome.nodes) == told
    assert [WRITTEN, WRITTEN, ()] == [one.removed for one in told]
    assert {MUTEX_LOCK} == told[0].left.keys()


async def test_a_second_time_there_is_nothing_to_do():
    api = FakeLeftovers(served("a", condition=True))
    await cleaned(api)

    outcome, _ = await cleaned(api)

    assert outcome.complete
    assert (["a"], ["a"], ()) == (api.removed, api.forgotten, outcome.nodes[0].removed)


async def test_the_condition_goes_where_an_agent_wrote_it():
    api = FakeLeftovers(served("a", condition=True), served("b"), NodeTraces("c", "1", {}))

    outcome, _ = await cleaned(api)

    assert (["a"], ["a", "b"]) == (api.forgotten, api.removed)
    assert ("condition GpuDegraded", *WRITTEN) == outcome.nodes[0].removed


async def test_a_node_without_a_kubelet_holds_nobody_up_and_is_cleaned():
    api = FakeLeftovers(served("a"), served("b"), pods=[{"one": "a", "two": "gone"}])
    api.without_kubelet |= {"a", "gone"}

    outcome, _ = await cleaned(api)

    assert outcome.complete
    assert ["a", "b"] == api.removed


async def test_a_node_whose_kubelet_cannot_be_asked_for_is_none_without():
    class Refusing(FakeLeftovers):
        async def look(self, name: str, resource: str) -> NodeLeftovers:
            del resource
            raise ApiForbidden(f"get nodes ({name})", status=403)

    api = Refusing(served("a"), pods=[{"one": "a"}])

    with pytest.raises(ApiForbidden):
        await cleaned(api)

    assert [] == api.removed


async def test_a_change_in_between_is_looked_at_anew():
    api = FakeLeftovers(served("a"))
    api.fail["a"] = ApiConflict("changed", status=409)

    assert "" == (await clean(api, served("a"), IDLE, AGENTS.resource)).failure

    assert ["a"] == api.removed


async def test_a_node_that_changes_for_ever_is_told():
    class Changing(FakeLeftovers):
        async def remove(self, node: NodeTraces, keys: Sequence[str]) -> None:
            del node, keys
            raise ApiConflict("changed", status=409)

    done = await clean(Changing(served("a")), served("a"), IDLE, AGENTS.resource)

    assert ("it changed 5 times during the removal; try again", ()) == (done.failure, done.removed)


async def test_a_node_that_is_gone_is_clean():
    api = FakeLeftovers(served("a"), served("b"))
    api.fail["a"] = ApiNotFound("gone", status=404)

    outcome, _ = await cleaned(api)

    assert outcome.complete
    assert ["b"] == api.removed


async def test_a_refusal_for_one_node_stops_no_other_and_is_told():
    api = FakeLeftovers(served("a"), served("b"))
    api.fail["a"] = ApiForbidden("patch nodes (a): no", status=403)

    outcome, told = await cleaned(api)

    assert not outcome.complete
    assert ["b"] == api.removed
    assert "patch nodes (a): no" == told[0].failure


async def test_only_nodes_that_may_have_something_of_an_agents_are_looked_at():
    api = FakeLeftovers(served("a"), NodeTraces("c", "1", {"seen": "1"}))

    await cleaned(api)

    assert {"a": 1} == api.looked


async def test_who_begins_to_serve_in_between_keeps_what_he_has():
    class Beginning(FakeLeftovers):
        async def remove(self, node: NodeTraces, keys: Sequence[str]) -> None:
            self.serving[node.name] = float("inf")
            await super().remove(node, keys)

    api = Beginning(served("a"))
    api.fail["a"] = ApiConflict("changed", status=409)

    done = await clean(api, served("a"), IDLE, AGENTS.resource, here=True)

    assert ([], (), "") == (api.removed, done.removed, done.failure)
    assert REGISTER in done.left


async def test_a_server_that_falls_silent_ends_it_and_the_rest_is_told():
    bare = NodeTraces("c", "1", {"seen": "1"})
    api = FakeLeftovers(served("a"), served("b"), bare, served("d"))
    api.fail["b"] = ApiError("no answer")

    outcome, told = await cleaned(api)

    assert (False, True) == (outcome.complete, outcome.is_silent)
    assert (["a"], ("d",)) == (api.removed, outcome.unreached)
    assert ["a", "b"] == [one.node for one in told]
    assert "no answer" == told[1].failure
