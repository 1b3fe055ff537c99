"""What an uninstallation of all Nodes waits for; tests/cli/test_uninstall.py has what it tells."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from agent.cli.node import WAIT, uninstall_everywhere
from agent.cluster import HANDSHAKE, REGISTER
from agent.kube.client import Connection
from agent.kube.reader import NodeLeftovers

EVER = 1 << 30


class LeftoverNodes:
    """Nodes in memory, as said: `a+2`: an agent is seen in two rounds; `a*2`: a plugin is.

    `a!`: no kubelet runs it. `a-`: nothing is on it.
    """

    def __init__(self, said: str) -> None:
        self.held = {}
        self.until = {}
        self.rounds = 0
        for name, *words in map(list, said.split()):
            number = "".join(words).strip("+*!-")
            kind = "agent" if "+" in words else "plugin"
            self.until[name] = (kind, EVER if number == "9" else int(number or 0))
            keys = () if "-" in words else (REGISTER, HANDSHAKE)
            self.held[name] = NodeLeftovers(name, keys, has_kubelet="!" not in words)

    async def nodes(self, namespace: str, selector: str) -> tuple[NodeLeftovers, ...]:
        assert ("gpus", "app=agent") == (namespace, selector)
        self.rounds += 1
        there = {name: kind for name, (kind, last) in self.until.items() if last >= self.rounds}
        return tuple(
            msgspec.structs.replace(
                one,
                served=there.get(one.name) == "plugin",
                agent="pod-1" if there.get(one.name) == "agent" else "",
            )
            for one in self.held.values()
        )

    async def clean(self, found: NodeLeftovers) -> None:
        """Nothing fails."""


@pytest.mark.parametrize(
    ("said", "waits", "rounds", "cleaned", "failed", "skipped"),
    [
        ("a+2 b*3 c+2 d+2 e+2", "a, b, c and 2 more", 4, "abcde", "", ""),
        ("a+1 b c*3", "a, c", 4, "abc", "", ""),
        # What does not end keeps its own node, an agent only if a kubelet runs it.
        ("a b+9 c*9 d+9! e+9- f*9!", "b, c, e", 0, "ad", "be", "cf"),
        # Plugins on dead and on untouched Nodes are not waited for.
        ("a b+3 e*9! f*9-", "b", 4, "ab", "", "e"),
        ("a b", "", 1, "ab", "", ""),
    ],
)
async def test_agents_and_kubelets_have_time(
    monkeypatch, capsys, said, waits, rounds, cleaned, failed, skipped
):
    cluster, loop = LeftoverNodes(said), asyncio.get_running_loop()
    monkeypatch.setattr("agent.cli.node.KubeLeftovers", lambda *_: cluster)
    monkeypatch.setattr("agent.cli.connections.check", lambda _: None)
    began = loop.time()

    found = uninstall_everywhere(Connection(Path("none")), "one", "gpus", "app=agent")
    told = [one async for one in found]

    assert cleaned == "".join(one.node for one in told if one.removed)
    assert failed == "".join(one.node for one in told if one.failure)
    assert skipped == "".join(one.node for one in told if one.skipped)
    assert cluster.rounds == rounds if rounds else WAIT <= loop.time() - began < WAIT + 10
    line = f"hami-agent uninstall: waiting up to 90 s for agents and plugins to end: {waits}\n"
    assert (line if waits else "") == capsys.readouterr().err
