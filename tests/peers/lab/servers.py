"""One API server as tests see it, be it the model or the real one: answers whole, four users.

There is no kubelet, no controller and no scheduler: nothing changes but by the tests. Both begin
with two Nodes, a pod on each, and one without a node.
"""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp

from agent.sandbox.apiserver import ApiServerModel
from agent.sandbox.store import ObjectStore
from tests.fakes.chance import Seeded
from tests.fakes.clock import ManualClock
from tests.peers.lab.api import Api, Object
from tests.peers.lab.cluster import open_root
from tests.peers.lab.control import (
    ADMIN,
    NODE,
    NODE_PATH,
    NODE_USER,
    ControlPlane,
    open_control_plane,
)
from tests.peers.lab.part import until_answer
from tests.peers.lab.running import ACCOUNT, account_token

OTHER_NODE: Final = "node-b"
OWN_POD: Final = "pa"
OTHER_POD: Final = "pb"
FREE_POD: Final = "free"
PODS: Final = "/api/v1/namespaces/default/pods"
NODES: Final = "/api/v1/nodes"
EVENTS: Final = "/api/v1/namespaces/default/events"
_DEADLINE: Final = 20.0


@dataclass(frozen=True, slots=True)
class Server:
    """An API server and its users. `plane` is None for the model, `model` for the real one."""

    admin: Api
    node: Api
    account: Api
    nobody: Api
    plane: ControlPlane | None = None
    model: ApiServerModel | None = None

    async def forget_history(self) -> None:
        """Let nobody continue from a version of before: compacted, and started again.

        The real server keeps the latest writes in memory, so a compaction alone is not enough.
        """
        if self.model is not None:
            self.model.forget_history()
        if self.plane is not None:
            version = (await self.admin.have("GET", PODS))["metadata"]["resourceVersion"]
            await _compact(self.plane, int(version))
            await self.plane.apiserver.stop()
            await self.plane.apiserver.start()
            await self.plane.until_ready()


@contextlib.asynccontextmanager
async def model_server() -> AsyncIterator[Server]:
    """The model, with the same users and Nodes as the real one."""
    names = {"t-admin": ADMIN, "t-node": NODE_USER, "t-account": ACCOUNT}
    model = ApiServerModel(ObjectStore(ManualClock(), Seeded(1)), names)
    await model.start()
    try:
        users = [Api(model.url, token, None) for token in (*names, "t-unknown")]
        async with _served(users) as (admin, node, account, nobody):
            yield Server(admin, node, account, nobody, model=model)
    finally:
        await model.stop()


@contextlib.asynccontextmanager
async def real_server(binaries: Path) -> AsyncIterator[Server]:
    """etcd and kube-apiserver of their own, without controllers."""
    with open_root() as root:
        async with open_control_plane(root, binaries) as plane:
            account = {"metadata": {"name": "default"}}
            await plane.admin.create("/api/v1/namespaces/default/serviceaccounts", account)
            token = await account_token(plane.admin)
            tokens = (plane.tokens[ADMIN], plane.tokens[NODE_USER], token, "unknown")
            users = [plane.client(one) for one in tokens]
            async with _served(users) as (admin, node, user, nobody):
                server = Server(admin, node, user, nobody, plane=plane)
                await until_answer(
                    lambda: _has_rights(server), _DEADLINE, lambda: "the account has no rights"
                )
                yield server


@contextlib.asynccontextmanager
async def _served(users: list[Api]) -> AsyncIterator[list[Api]]:
    """What both begin with, made by the first of these users; all are closed."""
    admin, *_ = users
    try:
        for name in (NODE, OTHER_NODE):
            await admin.create(NODES, {"metadata": {"name": name}})
        for name, node in ((OWN_POD, NODE), (OTHER_POD, OTHER_NODE), (FREE_POD, "")):
            await admin.create(PODS, plain_pod(name, node))
        yield users
    finally:
        for user in users:
            await user.close()


async def _has_rights(server: Server) -> bool:
    """Whether the server knows the account's rights already, which a watch of its own brings it."""
    return (await server.account.ask("GET", NODE_PATH)).code == 200


async def _compact(plane: ControlPlane, version: int) -> None:
    flag = "--etcd-servers="
    (etcd,) = (part for part in plane.apiserver.command if part.startswith(flag))
    body = {"revision": str(version), "physical": True}
    async with (
        aiohttp.ClientSession(base_url=etcd.removeprefix(flag)) as session,
        session.post("/v3/kv/compaction", json=body) as answer,
    ):
        assert answer.status == 200, await answer.text()


def plain_pod(name: str, node: str = "", **metadata: object) -> Object:
    """A pod that nobody runs; without a node, nobody places it either."""
    spec: Object = {
        "schedulerName": "nobody",
        "automountServiceAccountToken": False,
        "containers": [{"name": "main", "image": "none"}],
    }
    if node:
        spec["nodeName"] = node
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", **metadata},
        "spec": spec,
    }


def essence(obj: Object) -> Object:
    """What of an object both servers must agree on: the model completes nothing."""
    metadata, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    conditions = [(one["type"], one["status"]) for one in status.get("conditions") or ()]
    found = {
        "kind": obj.get("kind"),
        "name": metadata["name"],
        "annotations": metadata.get("annotations"),
        "labels": metadata.get("labels"),
        "grace": metadata.get("deletionGracePeriodSeconds"),
        "is_ending": "deletionTimestamp" in metadata or None,
        "node": spec.get("nodeName"),
        "phase": status.get("phase"),
        "conditions": conditions,
    }
    return {key: value for key, value in found.items() if value}


def told(event: Object) -> tuple[str, Object]:
    return event["type"], essence(event["object"])


def marks(**annotations: object) -> Object:
    return {"metadata": {"annotations": annotations}}


def conditions(*some: tuple[str, str]) -> Object:
    return {
        "status": {
            "conditions": [
                {"type": kind, "status": status, "reason": "r", "message": "m"}
                for kind, status in some
            ]
        }
    }


def version(obj: Object) -> str:
    text: str = obj["metadata"]["resourceVersion"]
    return text


async def a_pod(server: Server, name: str, node: str = NODE, **metadata: object) -> str:
    """Create a pod of a test's own; its path."""
    await server.admin.have("POST", PODS, plain_pod(name, node, **metadata))
    return f"{PODS}/{name}"
