"""Nodes and pods that an uninstallation meets, in memory."""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from agent.core.cluster.annotations import HANDSHAKE, MUTEX_LOCK, REGISTER, SCORE
from agent.core.errors import (
    ApiError,
    ApiNotFound,
)
from agent.core.node.leftovers import Agents, Cleaned, LeftoverOutcome, NodeLeftovers, NodeTraces
from agent.services.leftovers import clean_all

OWN = "hami-agent/gpus"
WRITTEN = (OWN, REGISTER, SCORE, HANDSHAKE)
AGENTS = Agents("gpus", "app.kubernetes.io/name=hami-agent", "gpus.example/one")
IDLE = NodeLeftovers(kubelet=True)


def served(name: str, *, condition: bool = False) -> NodeTraces:
    """A Node with annotations of ours and of others."""
    notes = dict.fromkeys((*WRITTEN, MUTEX_LOCK, "seen"), "1")
    return NodeTraces(name, "1", notes, frozenset(WRITTEN), condition)


class FakeLeftovers:
    """Nodes and pods in memory. `fail`: errors by Node, each given once, at a change.

    `pods` are those present at each question, with their nodes; the last ones stay. An error among
    them is raised. `serving`: how often each Node still says that somebody serves; `looks`: errors
    for the next looks.
    """

    def __init__(
        self, *nodes: NodeTraces, pods: Sequence[Mapping[str, str] | ApiError] = ()
    ) -> None:
        self.held = {node.name: node for node in nodes}
        self.without_kubelet: set[str] = set()
        self.degraded: set[str] = set()
        self.serving: dict[str, float] = {}
        self.fail: dict[str, ApiError] = {}
        self.looks: list[ApiError] = []
        self.looked: Counter[str] = Counter()
        self.removed: list[str] = []
        self.forgotten: list[str] = []
        self.asked: list[Agents] = []
        self._pods = list(pods)
        self._present: Mapping[str, str] = {}

    async def nodes(self) -> tuple[NodeTraces, ...]:
        return tuple(self.held.values())

    async def node(self, name: str) -> NodeTraces:
        if name not in self.held:
            raise ApiNotFound("gone", status=404)
        return self.held[name]

    async def remove(self, node: NodeTraces, keys: Sequence[str]) -> None:
        self._fail(node.name)
        left = {key: text for key, text in node.annotations.items() if key not in keys}
        self.held[node.name] = msgspec.structs.replace(node, annotations=left)
        self.removed.append(node.name)

    async def forget_condition(self, name: str) -> None:
        self._fail(name)
        self.held[name] = msgspec.structs.replace(self.held[name], condition=False)
        self.forgotten.append(name)

    async def agents(self, agents: Agents) -> tuple[str, ...]:
        self.asked.append(agents)
        present = self._pods[0] if self._pods else {}
        del self._pods[: len(self._pods) > 1]
        if isinstance(present, ApiError):
            raise present
        self._present = present
        return tuple(present)

    async def places(self, agents: Agents) -> Mapping[str, str]:
        del agents
        return self._present

    async def look(self, name: str, resource: str) -> NodeLeftovers:
        assert AGENTS.resource == resource
        self.looked[name] += 1
        if self.looks:
            raise self.looks.pop(0)
        if name in self.without_kubelet:
            return NodeLeftovers()
        served = self.looked[name] <= self.serving.get(name, 0)
        return NodeLeftovers(kubelet=True, served=80 * served, degraded=name in self.degraded)

    def _fail(self, name: str) -> None:
        if name in self.fail:
            raise self.fail.pop(name)


async def cleaned(
    api: FakeLeftovers, said: list[str] | None = None
) -> tuple[LeftoverOutcome, list[Cleaned]]:
    """The outcome, and what was told on the way."""
    told: list[Cleaned] = []
    heard: list[str] = [] if said is None else said
    return await clean_all(api, AGENTS, told.append, heard.append), told
