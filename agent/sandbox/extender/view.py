"""What the scheduler model is told of a real cluster: its nodes, and what its pods hold."""

from collections.abc import Sequence

from agent.sandbox.api_errors import Json
from agent.sandbox.scheduler.verbs import HamiVerbs


class Nodes:
    """The nodes as they were last seen (an `Audience`)."""

    def __init__(self, hami: HamiVerbs) -> None:
        self._hami = hami
        self._nodes: dict[str, Json] = {}

    def known(self) -> frozenset[str]:
        """The names of all nodes."""
        return frozenset(self._nodes)

    def all(self) -> Sequence[Json]:
        """All nodes."""
        return tuple(self._nodes.values())

    async def replace(self, objects: Sequence[Json], known: frozenset[str]) -> None:
        """Take in a list."""
        present = {node["metadata"]["name"] for node in objects}
        for name in known - present:
            await self.see("DELETED", self._nodes[name])
        for node in objects:
            is_new = node["metadata"]["name"] not in self._nodes
            await self.see("ADDED" if is_new else "MODIFIED", node)

    async def see(self, kind: str, obj: Json) -> None:
        """Take in one change."""
        if kind == "DELETED":
            self._nodes.pop(obj["metadata"]["name"], None)
        else:
            self._nodes[obj["metadata"]["name"]] = obj
        await self._hami.see_node(kind, obj)


class Pods:
    """What pods hold (an `Audience`); the pods themselves are not kept."""

    def __init__(self, hami: HamiVerbs) -> None:
        self._hami = hami

    def known(self) -> frozenset[str]:
        """The pods that hold something."""
        return self._hami.usage.uids()

    async def replace(self, objects: Sequence[Json], known: frozenset[str]) -> None:
        """Take in a list; what was reserved since it was asked for stays."""
        for uid in known - {pod["metadata"]["uid"] for pod in objects}:
            self._hami.usage.forget(uid)
        for pod in objects:
            await self.see("ADDED", pod)

    async def see(self, kind: str, obj: Json) -> None:
        """Take in one change."""
        self._hami.see_pod(kind, obj)
