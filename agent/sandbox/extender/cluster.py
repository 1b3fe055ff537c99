"""Implements the scheduler's port over a real API server."""

from collections.abc import Mapping
from typing import Final

from agent.core.errors import ApiError
from agent.host.kube.session import ApiRequest, KubeSession, path_of
from agent.sandbox import api_errors
from agent.sandbox.api_errors import Json, StatusError

MERGE_PATCH: Final = "application/merge-patch+json"
_REFUSALS: Final[Mapping[int, type[StatusError]]] = {
    kind.code: kind
    for kind in (
        api_errors.BadRequestError,
        api_errors.UnauthorizedError,
        api_errors.ForbiddenError,
        api_errors.NotFoundError,
        api_errors.ConflictError,
        api_errors.BodyTooLargeError,
        api_errors.InvalidError,
        api_errors.TooManyRequestsError,
    )
}


class KubeCluster:
    """See `agent.sandbox.scheduler.cluster.Cluster`: each call is one request."""

    def __init__(self, session: KubeSession) -> None:
        self._session = session

    async def get(self, resource: str, namespace: str, name: str) -> Json:
        """See `SchedulerCluster.get`."""
        return await self._send(ApiRequest("get", resource, _path(resource, namespace, name)))

    async def patch(
        self,
        resource: str,
        namespace: str,
        name: str,
        changes: Json,
        *,
        uid: str | None = None,
        version: str | None = None,
    ) -> Json:
        """See `SchedulerCluster.patch`; the server checks the UID and version in the metadata."""
        held = {"uid": uid, "resourceVersion": version}
        conditions = {key: value for key, value in held.items() if value is not None}
        body = changes | {"metadata": changes.get("metadata", {}) | conditions}
        return await self._send(
            ApiRequest(
                "patch",
                resource,
                _path(resource, namespace, name),
                body=body,
                content_type=MERGE_PATCH,
            )
        )

    async def create(self, resource: str, namespace: str, obj: Json) -> None:
        """See `SchedulerCluster.create`."""
        request = ApiRequest("create", resource, _path(resource, namespace), body=obj)
        try:
            await self._send(request)
        except api_errors.ConflictError as refusal:
            raise api_errors.AlreadyExistsError(str(refusal)) from refusal

    async def bind(self, namespace: str, name: str, uid: str, node_name: str) -> None:
        """See `SchedulerCluster.bind`."""
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": name, "namespace": namespace, "uid": uid},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node_name},
        }
        path = path_of("namespaces", namespace, "pods", name, "binding")
        await self._send(ApiRequest("create", "pods/binding", path, body=body))

    async def _send(self, request: ApiRequest) -> Json:
        try:
            return dict(await self._session.fetch(request))
        except ApiError as error:
            kind = _REFUSALS.get(error.status, StatusError)
            raise kind(str(error)) from error


def _path(resource: str, namespace: str, *name: str) -> str:
    scope = ("namespaces", namespace) if namespace else ()
    return path_of(*scope, resource, *name)
