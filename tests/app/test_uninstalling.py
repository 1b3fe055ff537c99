"""What an uninstallation of all Nodes waits for, cleans, skips and leaves."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from agent.cli.node import WAIT, Cleaned, uninstall_everywhere
from agent.cluster import HANDSHAKE, REGISTER
from agent.errors import ApiError, ApiForbidden, ApiNotFound
from agent.kube.client import Connection
from agent.kube.reader import NodeLeftovers

RESOURCE = "gpus.example/one"
KEYS = (REGISTER, HANDSHAKE)
SKIPPED = f"a device plugin serves {RESOURCE} there"
EVER = 1 << 30


def node(name: str, *, has_kubelet: bool = True, keys: Sequence[str] = KEYS) -> NodeLeftovers:
    return NodeLeftovers(name, tuple(keys), has_kubelet=has_kubelet)


class LeftoverNodes:
    """Nodes in memory. `agents` and `serving`: how often each still shows an agent, or a plugin.

    `fails`: what a change of a Node raises.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: dict[str, NodeLeftovers] = {}
        self.agents: dict[str, int] = {}
        self.serving: dict[str, int] = {}
        self.fails: dict[str, ApiError] = {}
        self.cleaned: list[str] = []
        self.told: list[Cleaned] = []
        self.rounds = 0
        monkeypatch.setattr("agent.cli.node.KubeLeftovers", lambda *_: self)
        monkeypatch.setattr("agent.cli.connections.check", lambda _: None)

    async def nodes(self, namespace: str, selector: str) -> tuple[NodeLeftovers, ...]:
        assert ("gpus", "app=agent") == (namespace, selector)
        self.rounds += 1
        return tuple(
            msgspec.structs.replace(
                one,
                served=self.serving.get(one.name, 0) >= self.rounds,
                agent="pod-1" if self.agents.get(one.name, 0) >= self.rounds else "",
            )
            for one in self.held.values()
        )

    async def clean(self, found: NodeLeftovers) -> None:
        if error := self.fails.get(found.name):
            raise error
        self.cleaned.append(found.name)
        self.held[found.name] = msgspec.structs.replace(found, keys=(), degraded=False)

    async def uninstall(self, *nodes: NodeLeftovers) -> float:
        """Take the agents off these Nodes; how long that takes."""
        self.held = {one.name: one for one in nodes} or self.held
        self.rounds, began = 0, asyncio.get_running_loop().time()
        found = uninstall_everywhere(Connection(Path("none")), RESOURCE, "gpus", "app=agent")
        self.told = [one async for one in found]
        return asyncio.get_running_loop().time() - began


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> LeftoverNodes:
    return LeftoverNodes(monkeypatch)


async def test_agents_and_kubelets_have_time_and_the_wait_is_said_once(cluster, capsys):
    cluster.agents = dict.fromkeys("abcde", 2)
    cluster.serving = {"a": 4, "b": 3}

    assert 0 < await cluster.uninstall(*map(node, "abcde")) < WAIT

    assert list("abcde") == cluster.cleaned, "when all are free"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hami-agent uninstall: waiting up to 90 s")
    assert line.endswith("for agents and plugins to end: a, b, c and 2 more")


async def test_what_does_not_end_keeps_its_own_node_if_a_kubelet_runs_it(cluster):
    cluster.agents = dict.fromkeys("bde", EVER)
    cluster.serving = {"c": EVER, "f": EVER}
    gone = [node(name, has_kubelet=False) for name in "df"]

    took = await cluster.uninstall(*map(node, "abc"), *gone, node("e", keys=()))

    assert WAIT <= took < WAIT + 10
    failures = {one.node: one.failure for one in cluster.told if one.failure}
    assert {"b", "e"} == failures.keys()
    assert "would write again (pod pod-1): clean it when" in failures["b"]
    assert {"c": SKIPPED, "f": SKIPPED} == {
        one.node: one.skipped for one in cluster.told if one.skipped
    }
    assert ["a", "d"] == cluster.cleaned


async def test_a_node_is_cleaned_after_the_last_agent_could_write_and_a_refusal_is_told(cluster):
    cluster.agents = {"b": 3}
    cluster.fails = {"c": ApiForbidden("no", status=403), "d": ApiNotFound("gone", status=404)}
    # Plugins on dead and on untouched Nodes are not waited for.
    cluster.serving = {"e": EVER, "f": EVER}

    await cluster.uninstall(*map(node, "abcd"), node("e", has_kubelet=False), node("f", keys=()))

    assert (4, ["a", "b"]) == (cluster.rounds, cluster.cleaned)
    assert ["c"] == [one.node for one in cluster.told if one.failure]
