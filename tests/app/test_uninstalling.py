"""What an uninstallation of all Nodes waits for, cleans, skips and leaves."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from agent.cli.uninstall import PATIENCE, VACATING, Cleaned, uninstall_everywhere
from agent.cluster import HANDSHAKE, REGISTER
from agent.errors import ApiError, ApiForbidden, ApiNotFound
from agent.kube.client import Connection
from agent.kube.leftovers import NodeLeftovers

RESOURCE = "gpus.example/one"
KEYS = (REGISTER, HANDSHAKE)
LIVING = 1 << 30
LOST = ApiError("no answer")


def node(name: str, *, degraded: bool = False, has_kubelet: bool = True) -> NodeLeftovers:
    """A Node with a report."""
    return NodeLeftovers(name, KEYS, degraded=degraded, has_kubelet=has_kubelet)


class Nodes:
    """Nodes and agents' pods in memory.

    `pods`: those present at each question, each with its node; the last ones stay. `serving`: how
    often each Node still shows that a plugin serves. `fails`: what a change of a Node raises.
    """

    def __init__(self, *nodes: NodeLeftovers, pods: Sequence[Mapping[str, str]] = ({},)) -> None:
        self.held = {one.name: one for one in nodes}
        self.pods = list(pods)
        self.serving: dict[str, int] = {}
        self.fails: dict[str, ApiError] = {}
        self.gone: set[str] = set()
        self.cleaned: list[str] = []

    async def nodes(self) -> list[NodeLeftovers]:
        return [self._seen(name) for name in self.held]

    async def node(self, name: str) -> NodeLeftovers:
        if name in self.gone:
            raise ApiNotFound("gone", status=404)
        return self._seen(name)

    async def agents(self, namespace: str, selector: str) -> Mapping[str, str]:
        assert ("gpus", "app=agent") == (namespace, selector)
        return self.pods.pop(0) if self.pods[1:] else self.pods[0]

    async def clean(self, found: NodeLeftovers) -> None:
        if error := self.fails.get(found.name):
            raise error
        self.cleaned += [found.name] * found.is_touched
        self.held[found.name] = NodeLeftovers(found.name, has_kubelet=found.has_kubelet)

    def _seen(self, name: str) -> NodeLeftovers:
        left = self.serving.get(name, 0)
        self.serving[name] = left - 1
        return msgspec.structs.replace(self.held[name], served=left > 0)


class Room:
    """One uninstallation: what it says, and what it tells of each Node."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.said: list[str] = []
        self.told: list[Cleaned] = []

    async def uninstall(self, api: Nodes) -> tuple[Cleaned, ...]:
        """The result; it is the same as what was told on the way."""
        self._patch.setattr("agent.cli.uninstall.KubeLeftovers", lambda *_: api)
        self._patch.setattr("agent.cli.uninstall.check", lambda _: None)
        done = await uninstall_everywhere(
            Connection(Path("none")),
            RESOURCE,
            "gpus",
            "app=agent",
            self.told.append,
            self.said.append,
        )
        assert list(done.nodes) == self.told
        assert done.is_complete == (not any(one.failure for one in done.nodes))
        return done.nodes


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    return Room(monkeypatch)


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_every_touched_node_is_cleaned_and_a_second_time_there_is_nothing(room: Room):
    api = Nodes(node("a", degraded=True), node("b"), NodeLeftovers("c", has_kubelet=True))

    first = await room.uninstall(api)
    room.told.clear()

    assert [(*KEYS, "condition GpuDegraded"), KEYS] == [one.removed for one in first]
    assert () == await room.uninstall(api)
    assert ["a", "b"] == api.cleaned
    assert [] == room.said


async def test_the_agents_pods_are_waited_for(room: Room):
    pods: list[dict[str, str]] = [{"one": "a", "two": "b"}, {"two": "b"}, {}]
    api = Nodes(node("a"), node("b"), pods=pods)

    await room.uninstall(api)

    assert ["a", "b"] == api.cleaned
    assert ["waiting up to 90 s for the agents' pods to end: one, two"] == room.said


async def test_a_pod_that_does_not_end_keeps_its_own_node_if_a_kubelet_runs_it(room: Room):
    dead = node("d", has_kubelet=False)
    bare = NodeLeftovers("e", has_kubelet=True)
    api = Nodes(
        node("a"),
        node("b"),
        node("c"),
        dead,
        bare,
        pods=[{"one": "b", "new": "", "two": "d", "three": "e"}],
    )
    began = now()

    done = await room.uninstall(api)

    assert PATIENCE <= now() - began < PATIENCE + VACATING
    assert ["a", "c", "d"] == api.cleaned
    failures = {one.node: one.failure for one in done if one.failure}
    assert {"b", "e"} == failures.keys()
    assert "would write again (pod one): clean it by hand" in failures["b"]


async def test_what_is_waited_for_is_said_in_one_short_line(room: Room):
    pods = {f"agent-{number}": "a" for number in range(7)}

    await room.uninstall(Nodes(node("a"), pods=[pods] * 13 + [{}]))

    (line,) = room.said
    assert line.endswith("the agents' pods to end: agent-0, agent-1, agent-2 and 4 more")


async def test_kubelets_have_time_to_report_that_no_plugin_serves(room: Room):
    api = Nodes(node("a"), node("b"), node("c"))
    api.serving = {"a": 6, "b": 2, "c": 0}

    await room.uninstall(api)

    assert ["a", "b", "c"] == api.cleaned
    assert [
        "waiting up to 30 s for the kubelets to report that no plugin serves: a, b"
    ] == room.said


async def test_where_a_plugin_goes_on_serving_the_node_is_skipped_and_it_is_no_failure(room: Room):
    api = Nodes(node("a", degraded=True), node("b"), node("c"))
    api.serving = {"a": LIVING, "c": LIVING}
    began = now()

    done = await room.uninstall(api)

    assert VACATING <= now() - began < PATIENCE
    assert ["b"] == api.cleaned
    why = f"a device plugin serves {RESOURCE} there"
    assert [Cleaned("a", skipped=why), Cleaned("b", KEYS), Cleaned("c", skipped=why)] == list(done)


async def test_a_node_that_is_deleted_meanwhile_is_clean(room: Room):
    api = Nodes(node("a"), node("b"))
    api.serving, api.gone = {"a": LIVING}, {"a"}

    done = await room.uninstall(api)

    assert ["b"] == api.cleaned
    assert [Cleaned("b", KEYS)] == list(done)


async def test_a_plugin_that_begins_to_serve_during_the_wait_keeps_its_node(room: Room):
    class Beginning(Nodes):
        async def node(self, name: str) -> NodeLeftovers:
            self.serving["b"] = LIVING
            return await super().node(name)

    api = Beginning(node("a"), node("b"))
    api.serving = {"a": 3}

    done = await room.uninstall(api)

    assert ["a"] == api.cleaned
    assert done[1].skipped


async def test_a_refusal_for_one_node_stops_no_other_and_is_told(room: Room):
    api = Nodes(node("a"), node("b"), node("c"))
    api.fails = {name: ApiForbidden(f"patch nodes ({name}): no", status=403) for name in "ac"}

    done = await room.uninstall(api)

    assert ["b"] == api.cleaned
    assert ["patch nodes (a): no", "", "patch nodes (c): no"] == [one.failure for one in done]


async def test_a_server_that_falls_silent_ends_it(room: Room):
    api = Nodes(node("a"), node("b"), node("c"))
    api.fails = {"b": LOST}

    with pytest.raises(ApiError, match="no answer"):
        await room.uninstall(api)

    assert (["a"], ["a"]) == (api.cleaned, [one.node for one in room.told])
