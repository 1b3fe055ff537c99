"""After the agents are gone, so is what they wrote on the Nodes, and nothing of others."""

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence

import pytest

from agent.core.annotations import HANDSHAKE, MUTEX_LOCK, REGISTER, SCORE
from agent.core.errors import ApiConflict, ApiError, ApiForbidden, ApiNotFound
from agent.core.leftovers import Agents, Cleaned, NodeTraces, Outcome
from agent.services.leftovers import PATIENCE, clean, clean_all

OWN = "hami-agent/gpus"
WRITTEN = (OWN, REGISTER, SCORE, HANDSHAKE)
AGENTS = Agents("gpus", "app.kubernetes.io/name=hami-agent")


def served(name: str, *, condition: bool = False) -> NodeTraces:
    """A Node with annotations of ours and of others."""
    notes = dict.fromkeys((*WRITTEN, MUTEX_LOCK, "seen"), "1")
    return NodeTraces(name, "1", notes, frozenset(WRITTEN), condition)


class FakeLeftovers:
    """Nodes and pods in memory. `fail`: errors by Node, each given once, at a change.

    `pods` are those present at each question, with their nodes; the last ones stay.
    """

    def __init__(self, *nodes: NodeTraces, pods: Sequence[Mapping[str, str]] = ()) -> None:
        self.held = {node.name: node for node in nodes}
        self.without_kubelet: set[str] = set()
        self.fail: dict[str, ApiError] = {}
        self.removed: list[str] = []
        self.forgotten: list[str] = []
        self.asked: list[Agents] = []
        self._pods = list(pods)

    async def nodes(self) -> tuple[NodeTraces, ...]:
        return tuple(self.held.values())

    async def node(self, name: str) -> NodeTraces:
        if name not in self.held:
            raise ApiNotFound("gone", status=404)
        return self.held[name]

    async def remove(self, node: NodeTraces, keys: Sequence[str]) -> None:
        self._fail(node.name)
        left = {key: text for key, text in node.annotations.items() if key not in keys}
        self.held[node.name] = dataclasses.replace(node, annotations=left)
        self.removed.append(node.name)

    async def forget_condition(self, name: str) -> None:
        self._fail(name)
        self.held[name] = dataclasses.replace(self.held[name], condition=False)
        self.forgotten.append(name)

    async def agents(self, agents: Agents) -> Mapping[str, str]:
        self.asked.append(agents)
        present = self._pods[0] if self._pods else {}
        del self._pods[: len(self._pods) > 1]
        return present

    async def has_kubelet(self, name: str) -> bool:
        return name not in self.without_kubelet

    def _fail(self, name: str) -> None:
        if name in self.fail:
            raise self.fail.pop(name)


async def cleaned(api: FakeLeftovers) -> tuple[Outcome, list[Cleaned]]:
    """The outcome, and what was told on the way."""
    told: list[Cleaned] = []
    return await clean_all(api, AGENTS, told.append), told


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


async def test_a_node_without_a_kubelet_holds_nobody_up_and_is_cleaned():
    api = FakeLeftovers(served("a"), served("b"), pods=[{"one": "a", "two": "gone"}])
    api.without_kubelet |= {"a", "gone"}

    outcome, _ = await cleaned(api)

    assert outcome.complete
    assert ["a", "b"] == api.removed


async def test_a_node_whose_kubelet_cannot_be_asked_for_is_none_without():
    class Refusing(FakeLeftovers):
        async def has_kubelet(self, name: str) -> bool:
            raise ApiForbidden(f"get nodes ({name})", status=403)

    api = Refusing(served("a"), pods=[{"one": "a"}])

    with pytest.raises(ApiForbidden):
        await cleaned(api)

    assert [] == api.removed


async def test_a_change_in_between_is_looked_at_anew():
    api = FakeLeftovers(served("a"))
    api.fail["a"] = ApiConflict("changed", status=409)

    assert "" == (await clean(api, served("a"))).failure

    assert ["a"] == api.removed


async def test_a_node_that_changes_for_ever_is_told():
    class Changing(FakeLeftovers):
        async def remove(self, node: NodeTraces, keys: Sequence[str]) -> None:
            del node, keys
            raise ApiConflict("changed", status=409)

    done = await clean(Changing(served("a")), served("a"))

    assert ("it changed 5 times while it was looked at", ()) == (done.failure, done.removed)


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
