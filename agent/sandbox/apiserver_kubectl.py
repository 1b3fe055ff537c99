"""Serves what kubectl needs besides objects: authentication by path, and discovery.

kubectl sends no token over plain HTTP, and this model has no certificate. So a path may begin with
`/as/<token>`, which counts as the token of the request.
"""

from collections.abc import Mapping
from typing import Final

from aiohttp import web

from agent.sandbox.api_errors import Json
from agent.sandbox.store import CLUSTER_SCOPED, KINDS

PREFIX: Final = "/as/"
_VERBS: Final = ("create", "delete", "get", "list", "patch", "update", "watch")
_SHORT: Final[Mapping[str, tuple[str, ...]]] = {
    "nodes": ("no",),
    "pods": ("po",),
    "events": ("ev",),
    "resourcequotas": ("quota",),
    "namespaces": ("ns",),
}


def unfolded(request: web.BaseRequest) -> web.BaseRequest:
    """The request with the token of its path, if it has one, moved to its headers."""
    if not request.raw_path.startswith(PREFIX):
        return request
    token, _, rest = request.raw_path.removeprefix(PREFIX).partition("/")
    headers = {**request.headers, "Authorization": f"Bearer {token}"}
    return request.clone(rel_url=f"/{rest}", headers=headers)


def listed(path: str) -> Json | None:
    """The discovery answer for that path; None: it is not a discovery path."""
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": []}
    if path != "/api/v1":
        return None
    resources = [
        {
            "name": name,
            "singularName": kind.lower(),
            "namespaced": name not in CLUSTER_SCOPED,
            "kind": kind,
            "verbs": list(_VERBS),
            "shortNames": list(_SHORT[name]),
        }
        for name, kind in KINDS.items()
    ]
    return {"kind": "APIResourceList", "groupVersion": "v1", "resources": resources}
