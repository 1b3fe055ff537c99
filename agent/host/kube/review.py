"""Asks the API server for the rights of this identity and for other plugins on the node."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from agent.codec.narrow import read_object
from agent.core.node.api_rights import Right
from agent.host.kube.lists import Lists, command_budget
from agent.host.kube.session import ApiRequest, KubeSession, path_of

REVIEWS: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
PLUGINS: Final = ("hami-device-plugin", "nvidia-device-plugin")
"""Names or components of pods of other plugins for NVIDIA GPUs contain one of these."""


class Neighbours(msgspec.Struct, frozen=True):
    """The pods of this node, by namespace and name.

    `plugins`: those that are other plugins for NVIDIA GPUs, as namespace/name.
    """

    pods: tuple[tuple[str, str], ...]
    plugins: tuple[str, ...]


class KubeReview:
    """Sends each request once. It has the session's deadline of 10 s and raises ApiError."""

    def __init__(self, session: KubeSession, node: str) -> None:
        self._session = session
        self._node = node

    async def granted(self, right: Right) -> bool:
        """True when this identity has the right; the right is not used."""
        resource, _, part = right.resource.partition("/")
        attributes: dict[str, object] = {"verb": right.verb, "resource": resource}
        attributes |= {"subresource": part} if part else {}
        attributes |= {"name": right.name} if right.name else {}
        attributes |= {"namespace": right.namespace} if right.namespace else {}
        attributes |= {"fieldSelector": {"rawSelector": right.selector}} if right.selector else {}
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        request = ApiRequest("create", "selfsubjectaccessreviews", REVIEWS, body=body)
        status = (await self._session.fetch(request)).get("status")
        return isinstance(status, Mapping) and status.get("allowed") is True

    async def neighbours(self) -> Neighbours:
        """List the pods of this node."""
        query = (("fieldSelector", f"spec.nodeName={self._node}"),)
        request = ApiRequest("list", "pods", path_of("pods"), query=query)
        lists = Lists(self._session, budget=command_budget)
        metas = (
            await lists.fetch(request, lambda item: read_object(item).get("metadata") or {})
        ).items
        names = tuple((meta.get("namespace", ""), meta.get("name", "")) for meta in metas)
        return Neighbours(names, tuple(_plugins(metas)))


def _plugins(metas: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for metadata in metas:
        labels = metadata.get("labels") or {}
        words = (metadata.get("name", ""), labels.get("app.kubernetes.io/component", ""))
        if any(plugin in word for plugin in PLUGINS for word in words):
            yield f"{metadata.get('namespace')}/{metadata.get('name')}"
