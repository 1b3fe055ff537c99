"""Passes the nodes, pods and quotas of a real cluster to the scheduler model."""

from collections.abc import Sequence

from agent.sandbox.api_errors import Json
from agent.sandbox.scheduler.quota import Quotas, full_name
from agent.sandbox.scheduler.verbs import HamiVerbs


class SeenNodes:
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


class QuotaView:
    """The ResourceQuotas as they were last seen (an `Audience`)."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas

    def known(self) -> frozenset[str]:
        """The full names of all quotas."""
        return self._quotas.names()

    async def replace(self, objects: Sequence[Json], known: frozenset[str]) -> None:
        """Take in a list."""
        gone = known - {full_name(quota) for quota in objects}
        self._quotas.retain(self._quotas.names() - gone)
        for quota in objects:
            await self.see("ADDED", quota)

    async def see(self, kind: str, obj: Json) -> None:
        """Take in one change."""
        self._quotas.see(kind, obj)


class SeenPods:
    """The pods as they were last seen (an `Audience`), kept in the scheduler model."""

    def __init__(self, hami: HamiVerbs) -> None:
        self._hami = hami

    def known(self) -> frozenset[str]:
        """The UIDs of all pods."""
        return self._hami.pod_uids()

    async def replace(self, objects: Sequence[Json], known: frozenset[str]) -> None:
        """Take in a list. Pods that came since it was requested stay."""
        gone = known - {pod["metadata"]["uid"] for pod in objects}
        self._hami.retain_pods(self._hami.pod_uids() - gone)
        for pod in objects:
            await self.see("ADDED", pod)

    async def see(self, kind: str, obj: Json) -> None:
        """Take in one change."""
        self._hami.see_pod(kind, obj)
