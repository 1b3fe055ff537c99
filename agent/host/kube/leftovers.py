"""The requests of an uninstallation to the API server."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from agent.codec.leftovers import decode_state, decode_traces
from agent.codec.narrow import read_object
from agent.codec.objects import decode_pod
from agent.core.errors import ApiError, ApiNotFound, MalformedText
from agent.core.health.news import GPU_DEGRADED
from agent.core.node.leftovers import Agents, NodeLeftovers, NodeTraces
from agent.host.kube.lists import Lists
from agent.host.kube.session import (
    MERGE_PATCH,
    METADATA_ONLY,
    STRATEGIC_PATCH,
    ApiRequest,
    KubeSession,
    path_of,
)

LIST: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"

T = TypeVar("T")
Read = Callable[[Mapping[str, Any]], T]


class KubeLeftovers:
    """The Leftovers port. Each request has the session's deadline of 10 s."""

    def __init__(self, session: KubeSession) -> None:
        self._session = session
        self._lists = Lists(session, whole=False)

    async def nodes(self) -> tuple[NodeTraces, ...]:
        """List all Nodes. Raises ApiError."""
        request = ApiRequest("list", "nodes", path_of("nodes"), accept=LIST)
        return await self._items(request, _traces)

    async def node(self, name: str) -> NodeTraces:
        """Get one Node. Raises ApiNotFound, ApiError."""
        return _traces(await self._session.fetch(_get(name, METADATA_ONLY)))

    async def remove(self, node: NodeTraces, keys: Sequence[str]) -> None:
        """Remove annotations if the Node is as `node` shows it. Raises ApiConflict, ApiError."""
        annotations = dict.fromkeys(keys)
        body = {"metadata": {"resourceVersion": node.version, "annotations": annotations}}
        path = path_of("nodes", node.name)
        request = ApiRequest(
            "patch", "nodes", path, body=body, content_type=MERGE_PATCH, accept=METADATA_ONLY
        )
        await self._session.call(request)

    async def forget_condition(self, name: str) -> None:
        """Remove the condition GpuDegraded from the Node. Raises ApiError."""
        deletion = {"type": GPU_DEGRADED, "$patch": "delete"}
        request = ApiRequest(
            "patch",
            "nodes/status",
            path_of("nodes", name, "status"),
            body={"status": {"conditions": [deletion]}},
            content_type=STRATEGIC_PATCH,
            accept=METADATA_ONLY,
        )
        await self._session.call(request)

    async def agents(self, agents: Agents) -> tuple[str, ...]:
        """List the names of the agents' pods. Raises ApiError."""
        request = msgspec.structs.replace(_pods(agents), accept=LIST)
        return await self._items(request, _name)

    async def places(self, agents: Agents) -> Mapping[str, str]:
        """List the agents' pods, each with its node (empty: none yet). Raises ApiError."""
        return dict(await self._items(_pods(agents), _place))

    async def gpu_pods(self, node: str, resource: str) -> tuple[str, ...]:
        """List the unfinished pods of this node that request GPUs, as namespace/name.

        Raises ApiError.
        """
        query = (("fieldSelector", f"spec.nodeName={node}"),)
        request = ApiRequest("list", "pods", path_of("pods"), query=query)

        def gpu_pod(item: Mapping[str, Any]) -> str:
            try:
                pod = decode_pod(item, resource)
            except MalformedText:
                return ""
            return "/".join(pod.key) if pod.gpu_containers and not pod.terminal else ""

        names = await self._items(request, gpu_pod)
        return tuple(sorted(name for name in names if name))

    async def look(self, name: str, resource: str) -> NodeLeftovers:
        """Get what the agent left on the Node; nothing for a missing Node. Raises ApiError."""
        try:
            return decode_state(await self._session.fetch(_get(name, "application/json")), resource)
        except ApiNotFound:
            return NodeLeftovers()

    async def _items(self, request: ApiRequest, read: Read[T]) -> tuple[T, ...]:
        # Each object is read at once: the text of 5,000 Nodes is 100 MB.
        listed = await self._lists.fetch(request, lambda item: read(read_object(item)))
        return listed.items


def _name(pod: Mapping[str, Any]) -> str:
    return str(pod["metadata"]["name"])


def _place(pod: Mapping[str, Any]) -> tuple[str, str]:
    return _name(pod), pod.get("spec", {}).get("nodeName", "")


def _pods(agents: Agents) -> ApiRequest:
    path = path_of("namespaces", agents.namespace, "pods")
    return ApiRequest("list", "pods", path, query=(("labelSelector", agents.selector),))


def _get(name: str, accept: str) -> ApiRequest:
    return ApiRequest("get", "nodes", path_of("nodes", name), accept=accept)


def _traces(obj: Mapping[str, Any]) -> NodeTraces:
    try:
        return decode_traces(obj)
    except MalformedText as error:
        raise ApiError(f"get nodes: {error}") from error
