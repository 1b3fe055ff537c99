"""All that an uninstallation asks of the API server."""

import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

from agent.codec.leftovers import decode_traces
from agent.codec.objects import decode_pod
from agent.core.errors import ApiError, ApiNotFound, MalformedText
from agent.core.leftovers import Agents, NodeTraces
from agent.core.node_condition import GPU_DEGRADED
from agent.host.kube.session import KubeSession, Request, path_of

PAGE: Final = 100
"""Nodes at a time: with who wrote what, each may have 25 KB."""
ONE: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"
LIST: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
MERGE_PATCH: Final = "application/merge-patch+json"
STRATEGIC_PATCH: Final = "application/strategic-merge-patch+json"


class KubeLeftovers:
    """Port agent.core.ports.Leftovers. Methods keep the session's deadline of 10 s a request."""

    def __init__(self, session: KubeSession) -> None:
        self._session = session

    async def nodes(self) -> tuple[NodeTraces, ...]:
        """All Nodes. Raises ApiError."""
        request = Request("GET", "list", "nodes", path_of("nodes"), accept=LIST)
        return tuple([_traces(one) async for one in self._items(request)])

    async def node(self, name: str) -> NodeTraces:
        """One Node. Raises ApiNotFound, ApiError."""
        return _traces(await self._session.fetch(_get(name, ONE)))

    async def remove(self, node: NodeTraces, keys: Sequence[str]) -> None:
        """Take annotations off the Node as it was seen. Raises ApiConflict, ApiError."""
        annotations = dict.fromkeys(keys)
        body = {"metadata": {"resourceVersion": node.version, "annotations": annotations}}
        path = path_of("nodes", node.name)
        request = Request(
            *("PATCH", "patch", "nodes", path), body=body, content_type=MERGE_PATCH, accept=ONE
        )
        await self._session.call(request)

    async def forget_condition(self, name: str) -> None:
        """Take the condition GpuDegraded off the Node. Raises ApiError."""
        forgotten = {"type": GPU_DEGRADED, "$patch": "delete"}
        request = Request(
            *("PATCH", "patch", "nodes/status", path_of("nodes", name, "status")),
            body={"status": {"conditions": [forgotten]}},
            content_type=STRATEGIC_PATCH,
            accept=ONE,
        )
        await self._session.call(request)

    async def agents(self, agents: Agents) -> Mapping[str, str]:
        """The agents' pods, each with its node; empty where it has none yet. Raises ApiError."""
        path = path_of("namespaces", agents.namespace, "pods")
        query = (("labelSelector", agents.selector),)
        request = Request("GET", "list", "pods", path, query=query)
        return {
            pod["metadata"]["name"]: pod.get("spec", {}).get("nodeName", "")
            async for pod in self._items(request)
        }

    async def gpu_pods(self, node: str, resource: str) -> tuple[str, ...]:
        """The pods of this node that have GPUs, or wait for them, as namespace/name.

        Raises ApiError.
        """
        query = (("fieldSelector", f"spec.nodeName={node}"),)
        request = Request("GET", "list", "pods", path_of("pods"), query=query)
        found = []
        async for one in self._items(request):
            try:
                pod = decode_pod(one, resource)
            except MalformedText:
                continue
            if pod.gpu_containers and not pod.terminal:
                found.append("/".join(pod.key))
        return tuple(sorted(found))

    async def has_kubelet(self, name: str) -> bool:
        """Whether a kubelet reports from this Node: it is the one that ends pods.

        Raises ApiError.
        """
        try:
            node = await self._session.fetch(_get(name, "application/json"))
        except ApiNotFound:
            return False
        conditions = (node.get("status") or {}).get("conditions") or ()
        # False is the kubelet's own word; Unknown is said by others, when it has fallen silent.
        return any(
            one.get("type") == "Ready" and one.get("status") != "Unknown" for one in conditions
        )

    async def _items(self, request: Request) -> AsyncIterator[Mapping[str, Any]]:
        """All objects of a list, page by page."""
        more = ""
        while True:
            page = (("limit", str(PAGE)), *((("continue", more),) if more else ()))
            asked = dataclasses.replace(request, query=request.query + page)
            answer = await self._session.fetch(asked)
            # An empty list of metadata has null there.
            for one in answer.get("items") or ():
                yield one
            more = (answer.get("metadata") or {}).get("continue") or ""
            if not more:
                return


def _get(name: str, accept: str) -> Request:
    return Request("GET", "get", "nodes", path_of("nodes", name), accept=accept)


def _traces(obj: Mapping[str, Any]) -> NodeTraces:
    try:
        return decode_traces(obj)
    except MalformedText as error:
        raise ApiError(f"get nodes: {error}") from error
