"""What kubectl needs beside the objects: a way in, and a list of what there is.

kubectl sends no token over plain HTTP, and this model has no certificate. So a path may begin with
`/as/<token>`: then it is as if that token had come with the request.
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
}


def unfolded(request: web.BaseRequest) -> web.BaseRequest:
    """The request with the token of its path in its headers; any other one as it is."""
    if not request.raw_path.startswith(PREFIX):
        return request
    token, _, rest = request.raw_path.removeprefix(PREFIX).partition("/")
    headers = {**request.headers, "Authorization": f"Bearer {token}"}
    return request.clone(rel_url=f"/{rest}", headers=headers)


def listed(path: str) -> Json | None:
    """What a client is told of the kinds that are served here; None: the path is another one."""
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
