"""The requests of an uninstallation to the API server."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from agent.cluster import HANDSHAKE, REGISTER, SCORE
from agent.errors import MalformedText
from agent.health.news import GPU_DEGRADED
from agent.kube.client import (
    MERGE_PATCH,
    METADATA_ONLY,
    STRATEGIC_PATCH,
    ApiRequest,
    KubeSession,
    path_of,
)
from agent.kube.lists import Lists, command_budget
from agent.kube.narrow import inside, objects_in, read_object
from agent.kube.objects import decode_pod, decode_quantity

REPORT: Final = frozenset({REGISTER, SCORE, HANDSHAKE})
OWN: Final = "hami-agent/"
"""The prefix of the annotations that only agents write: those of earlier builds."""


class NodeLeftovers(msgspec.Struct, frozen=True):
    """What an agent may have left on a Node, and who is there now.

    - `keys`: the annotations that a device plugin or an agent writes.
    - `degraded`: it has the condition GpuDegraded.
    - `has_kubelet`: its kubelet reports.
    - `served`: that kubelet offers the resource, so a device plugin serves it. The kubelet reports
      the end of a plugin up to 10 s later (nodeStatusUpdateFrequency).
    """

    name: str
    keys: tuple[str, ...] = ()
    degraded: bool = False
    has_kubelet: bool = False
    served: bool = False

    @property
    def is_touched(self) -> bool:
        """True if there is something to remove."""
        return bool(self.keys) or self.degraded


class KubeLeftovers:
    """Nodes and pods of agents of one resource. Each request has the session's deadline of 10 s."""

    def __init__(self, session: KubeSession, resource: str) -> None:
        self._session = session
        self._resource = resource
        self._lists = Lists(session, whole=False, budget=command_budget)

    async def nodes(self) -> tuple[NodeLeftovers, ...]:
        """List all Nodes. Raises ApiError."""
        request = ApiRequest("list", "nodes", path_of("nodes"))
        # Each Node is read at once: the text of 5,000 is 100 MB.
        listed = await self._lists.fetch(request, lambda item: self._read(read_object(item)))
        return listed.items

    async def node(self, name: str) -> NodeLeftovers:
        """Get one Node. Raises ApiNotFound, ApiError."""
        request = ApiRequest("get", "nodes", path_of("nodes", name))
        return self._read(await self._session.fetch(request))

    async def clean(self, node: NodeLeftovers) -> None:
        """Remove what `node` names, the report first. Raises ApiNotFound, ApiError."""
        path = path_of("nodes", node.name)
        if node.keys:
            body = {"metadata": {"annotations": dict.fromkeys(node.keys)}}
            await self._session.call(
                ApiRequest("patch", "nodes", path, (), body, MERGE_PATCH, METADATA_ONLY)
            )
        if node.degraded:
            status = {"status": {"conditions": [{"type": GPU_DEGRADED, "$patch": "delete"}]}}
            await self._session.call(
                ApiRequest("patch", "nodes/status", f"{path}/status", (), status, STRATEGIC_PATCH)
            )

    async def agents(self, namespace: str, selector: str) -> Mapping[str, str]:
        """List the agents' pods, each with its node (empty: none yet). Raises ApiError."""
        query = (("labelSelector", selector),)
        request = ApiRequest("list", "pods", path_of("namespaces", namespace, "pods"), query=query)

        def place(item: Mapping[str, Any]) -> tuple[str, str]:
            return str(item["metadata"]["name"]), str(inside(item, "spec").get("nodeName", ""))

        listed = await self._lists.fetch(request, lambda item: place(read_object(item)))
        return dict(listed.items)

    async def gpu_pods(self, node: str) -> tuple[str, ...]:
        """List the unfinished pods of this node that request GPUs, as namespace/name.

        Raises ApiError.
        """
        query = (("fieldSelector", f"spec.nodeName={node}"),)
        request = ApiRequest("list", "pods", path_of("pods"), query=query)

        def gpu_pod(item: Mapping[str, Any]) -> str:
            try:
                pod = decode_pod(item, self._resource)
            except MalformedText:
                return ""
            return "/".join(pod.key) if pod.gpu_containers and not pod.terminal else ""

        listed = await self._lists.fetch(request, lambda item: gpu_pod(read_object(item)))
        return tuple(sorted(name for name in listed.items if name))

    def _read(self, node: Mapping[str, Any]) -> NodeLeftovers:
        metadata, status = inside(node, "metadata"), inside(node, "status")
        conditions = {
            one.get("type"): one.get("status") for one in objects_in(status, "conditions")
        }
        # The kubelet writes True and False; the controller Unknown when the kubelet is silent.
        has_kubelet = conditions.get("Ready", "Unknown") != "Unknown"
        offered = decode_quantity(str(inside(status, "allocatable").get(self._resource, 0)))
        keys = inside(metadata, "annotations")
        return NodeLeftovers(
            str(metadata.get("name")),
            tuple(key for key in keys if key in REPORT or key.startswith(OWN)),
            degraded=GPU_DEGRADED in conditions,
            has_kubelet=has_kubelet,
            served=has_kubelet and (offered or 0) > 0,
        )
