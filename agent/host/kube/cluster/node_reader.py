"""Reads the status of one node: from its agent, through the API server, or from its objects."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from agent.codec.cluster import decode_name, is_device_plugin
from agent.codec.narrow import Raw, inside, objects_in, read_object, read_pod
from agent.codec.objects import decode_pod
from agent.core.cluster.pods import NodeView, PodView
from agent.core.errors import ApiError
from agent.host.kube.api import KubeNode
from agent.host.kube.cluster.reader import AGENTS, METADATA_LIST
from agent.host.kube.lists import Lists, command_budget
from agent.host.kube.session import ApiRequest, KubeSession, path_of

ENDED: Final = frozenset({"Succeeded", "Failed"})
"""Phases of a pod that does not serve any more, such as an evicted one."""
PORT: Final = 9394
"""Where the pod names none."""
PORT_NAME: Final = "http"
DOCUMENT: Final = ("api", "v1", "status")


class NodeObjects(msgspec.Struct, frozen=True):
    """The Node and the pods bound to it."""

    node: NodeView
    pods: tuple[PodView, ...]


class NodeReader:
    """Reads what is known of one node with the rights of the operator; each answer has 10 s."""

    def __init__(self, session: KubeSession, node: str) -> None:
        self._session = session
        self._node = node

    async def by_agent(self) -> bytes:
        """The agent's `/api/v1/status`, through the proxy of the API server.

        Raises ApiError: there is no agent's pod, the account may not use the proxy, or the agent
        does not answer from elsewhere.
        """
        query = (("fieldSelector", f"spec.nodeName={self._node}"), ("labelSelector", AGENTS))
        request = ApiRequest("list", "pods", path_of("pods"), query=query)
        listed = await Lists(self._session, budget=command_budget).fetch(request, _place)
        # During an update the old pod, which is deleted, may be listed first.
        alive = sorted(place for place in listed.items if place is not None)
        if not alive:
            raise ApiError(f"no pod of the agent is on the node {self._node}")
        _, namespace, place = alive[0]
        path = path_of("namespaces", namespace, "pods", place, "proxy", *DOCUMENT)
        return bytes(await self._session.call(ApiRequest("get", "pods/proxy", path)))

    async def objects(self, resource: str) -> NodeObjects | None:
        """The Node and its pods; None: there is no such Node. `resource`: the name of slices.

        Raises ApiError.
        """
        node = await KubeNode(self._session, self._node).get_node()
        if node is None:
            return None
        query = (("fieldSelector", f"spec.nodeName={self._node}"),)
        request = ApiRequest("list", "pods", path_of("pods"), query=query)
        listed = await Lists(self._session, budget=command_budget).fetch(
            request, lambda item: decode_pod(read_pod(item), resource)
        )
        return NodeObjects(node, listed.items)

    async def names(self) -> tuple[str, ...]:
        """The names of all Nodes. Raises ApiError."""
        request = ApiRequest("list", "nodes", path_of("nodes"), accept=METADATA_LIST)
        listed = await Lists(self._session, whole=False, budget=command_budget).fetch(
            request, decode_name
        )
        return tuple(sorted(name for _, name in listed.items))


def _place(raw: Raw) -> tuple[bool, str, str] | None:
    """Whether it is deleted, namespace, and NAME:PORT of a living agent's pod."""
    item = read_object(raw)
    metadata = inside(item, "metadata")
    if inside(item, "status").get("phase") in ENDED or not is_device_plugin(item):
        return None
    place = f"{metadata.get('name', '')}:{_port(item)}"
    return "deletionTimestamp" in metadata, str(metadata.get("namespace", "")), place


def _port(pod: Mapping[str, Any]) -> int:
    """The agent's port, which the chart chooses: beside HAMi's monitor it is another one."""
    for container in objects_in(inside(pod, "spec"), "containers"):
        for port in objects_in(container, "ports"):
            number = port.get("containerPort")
            if port.get("name") == PORT_NAME and isinstance(number, int):
                return number
    return PORT
