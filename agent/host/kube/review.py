"""What this identity may do at the API server, and which other plugins run on the node."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from agent.core.preflight import Right
from agent.host.kube.session import KubeSession, Request, path_of

REVIEWS: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
PLUGINS: Final = ("hami-device-plugin", "nvidia-device-plugin")
"""In the names or components of pods of other plugins for NVIDIA GPUs."""


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
        asked |= {"fieldSelector": {"rawSelector": right.selector}} if right.selector else {}
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }
        request = Request("POST", "create", "selfsubjectaccessreviews", REVIEWS, body=body)
        status = (await self._session.fetch(request)).get("status")
        return isinstance(status, Mapping) and status.get("allowed") is True

    async def plugins(self) -> tuple[str, ...]:
        """Pods of this node that are other plugins for NVIDIA GPUs, as namespace/name."""
        query = (("fieldSelector", f"spec.nodeName={self._node}"),)
        answer = await self._session.fetch(
            Request("GET", "list", "pods", path_of("pods"), query=query)
        )
        return tuple(_plugins(answer.get("items") or ()))


def _plugins(items: Any) -> Iterator[str]:  # noqa: ANN401 -- a document of somebody else
    for item in items:
        metadata = item.get("metadata") or {}
        labels = metadata.get("labels") or {}
        words = (metadata.get("name", ""), labels.get("app.kubernetes.io/component", ""))
        if any(plugin in word for plugin in PLUGINS for word in words):
            yield f"{metadata.get('namespace')}/{metadata.get('name')}"
