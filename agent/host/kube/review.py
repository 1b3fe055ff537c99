"""What this identity may do at the API server, and which other plugins run on the node."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from agent.codec.narrow import read_object
from agent.core.node.api_rights import Right
from agent.host.kube.lists import Lists
from agent.host.kube.session import ApiRequest, KubeSession, path_of

REVIEWS: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
PLUGINS: Final = ("hami-device-plugin", "nvidia-device-plugin")
"""In the names or components of pods of other plugins for NVIDIA GPUs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Neighbours:
    """The pods of this node, by namespace and name.

    `plugins`: those that are other plugins for NVIDIA GPUs, as namespace/name.
    """

    pods: tuple[tuple[str, str], ...]
    plugins: tuple[str, ...]


class KubeReview:
    """Asks once. Methods keep the session's deadline of 10 s and raise ApiError."""

    def __init__(self, session: KubeSession, node: str) -> None:
        self._session = session
        self._node = node

    async def granted(self, right: Right) -> bool:
        """True when this identity has the right; nothing is done with it."""
        resource, _, part = right.resource.partition("/")
        asked: dict[str, object] = {"verb": right.verb, "resource": resource}
        asked |= {"subresource": part} if part else {}
        asked |= {"name": right.name} if right.name else {}
        asked |= {"namespace": right.namespace} if right.namespace else {}
        asked |= {"fieldSelector": {"rawSelector": right.selector}} if right.selector else {}
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }
        request = ApiRequest("POST", "create", "selfsubjectaccessreviews", REVIEWS, body=body)
        status = (await self._session.fetch(request)).get("status")
        return isinstance(status, Mapping) and status.get("allowed") is True

    async def neighbours(self) -> Neighbours:
        """The pods of this node."""
        query = (("fieldSelector", f"spec.nodeName={self._node}"),)
        request = ApiRequest("GET", "list", "pods", path_of("pods"), query=query)
        listed = await Lists(self._session).fetch(request, read_object)
        found = [item.get("metadata") or {} for item in listed.items]
        names = tuple((one.get("namespace", ""), one.get("name", "")) for one in found)
        return Neighbours(names, tuple(_plugins(found)))


def _plugins(found: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for metadata in found:
        labels = metadata.get("labels") or {}
        words = (metadata.get("name", ""), labels.get("app.kubernetes.io/component", ""))
        if any(plugin in word for plugin in PLUGINS for word in words):
            yield f"{metadata.get('namespace')}/{metadata.get('name')}"
