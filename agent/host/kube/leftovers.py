"""All that an uninstallation asks of the API server."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from agent.codec.leftovers import decode_state, decode_traces
from agent.codec.narrow import read_object
from agent.codec.objects import decode_pod
from agent.core.errors import ApiError, ApiNotFound, MalformedText
from agent.core.health.news import GPU_DEGRADED
from agent.core.node.leftovers import Agents, NodeLeftovers, NodeTraces
from agent.host.kube.lists import Lists
from agent.host.kube.session import ApiRequest, KubeSession, path_of

ONE: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"
LIST: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
MERGE_PATCH: Final = "application/merge-patch+json"
STRATEGIC_PATCH: Final = "application/strategic-merge-patch+json"

T = TypeVar("T")
Read = Callable[[Mapping[str, Any]], T]


class KubeLeftovers:
    """Port agent.core.ports.Leftovers. Methods keep the session's deadline of 10 s a request."""

    def __init__(self, session: KubeSession) -> None:
        self._session = session
        self._lists = Lists(session, whole=False)

    async def nodes(self) -> tuple[NodeTraces, ...]:
        """All Nodes. Raises ApiError."""
        request = ApiRequest("GET", "list", "nodes", path_of("nodes"), accept=LIST)
        return await self._items(request, _traces)

    async def node(self, name: str) -> NodeTraces:
        """One Node. Raises ApiNotFound, ApiError."""
        return _traces(await self._session.fetch(_get(name, ONE)))

    async def remove(self, node: NodeTraces, keys: Sequence[str]) -> None:
        """Take annotations off the Node as it was seen. Raises ApiConflict, ApiError."""
        annotations = dict.fromkeys(keys)
        body = {"metadata": {"resourceVersion": node.version, "annotations": annotations}}
        path = path_of("nodes", node.name)
        request = ApiRequest(
            "PATCH", "patch", "nodes", path, body=body, content_type=MERGE_PATCH, accept=ONE
        )
        await self._session.call(request)

    async def forget_condition(self, name: str) -> None:
        """Take the condition GpuDegraded off the Node. Raises ApiError."""
        forgotten = {"type": GPU_DEGRADED, "$patch": "delete"}
        request = ApiRequest(
            "PATCH",
            "patch",
            "nodes/status",
            path_of("nodes", name, "status"),
            body={"status": {"conditions": [forgotten]}},
            content_type=STRATEGIC_PATCH,
            accept=ONE,
        )
        await self._session.call(request)

    async def agents(self, agents: Agents) -> tuple[str, ...]:
        """The names of the agents' pods. Raises ApiError."""
        request = dataclasses.replace(_pods(agents), accept=LIST)
        return await self._items(request, _name)

    async def places(self, agents: Agents) -> Mapping[str, str]:
        """The agents' pods, each with its node; empty where it has none yet. Raises ApiError."""
        return dict(await self._items(_pods(agents), _place))

    async def gpu_pods(self, node: str, resource: str) -> tuple[str, ...]:
        """The pods of this node that have GPUs, or wait for them, as namespace/name.

        Raises ApiError.
        """
        query = (("fieldSelector", f"spec.nodeName={node}"),)
        request = ApiRequest("GET", "list", "pods", path_of("pods"), query=query)

        def held(one: Mapping[str, Any]) -> str:
            try:
                pod = decode_pod(one, resource)
            except MalformedText:
                return ""
            return "/".join(pod.key) if pod.gpu_containers and not pod.terminal else ""

        found = await self._items(request, held)
        return tuple(sorted(name for name in found if name))

    async def look(self, name: str, resource: str) -> NodeLeftovers:
        """What the Node says of itself; of one that is not there, nothing. Raises ApiError."""
        try:
            return decode_state(await self._session.fetch(_get(name, "application/json")), resource)
        except ApiNotFound:
            return NodeLeftovers()

    async def _items(self, request: ApiRequest, read: Read[T]) -> tuple[T, ...]:
        """All objects of a list, as read: of 5,000 Nodes they are 100 MB of text themselves."""
        listed = await self._lists.fetch(request, lambda item: read(read_object(item)))
        return listed.items


def _name(pod: Mapping[str, Any]) -> str:
    return str(pod["metadata"]["name"])


def _place(pod: Mapping[str, Any]) -> tuple[str, str]:
    return _name(pod), pod.get("spec", {}).get("nodeName", "")


def _pods(agents: Agents) -> ApiRequest:
    path = path_of("namespaces", agents.namespace, "pods")
    return ApiRequest("GET", "list", "pods", path, query=(("labelSelector", agents.selector),))


def _get(name: str, accept: str) -> ApiRequest:
    return ApiRequest("GET", "get", "nodes", path_of("nodes", name), accept=accept)


def _traces(obj: Mapping[str, Any]) -> NodeTraces:
    try:
        return decode_traces(obj)
    except MalformedText as error:
        raise ApiError(f"get nodes: {error}") from error
