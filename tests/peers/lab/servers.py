"""One API server as tests see it, be it the model or the real one: answers whole, four users.

There is no kubelet, no controller and no scheduler: nothing changes but by the tests. Both begin
with two Nodes, a pod on each, and one without a node.
"""

import asyncio
import contextlib
import io
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from agent.sandbox.apiserver import ApiServerModel
from agent.sandbox.store import ObjectStore
from tests.fakes.chance import Seeded
from tests.fakes.clock import ManualClock
from tests.peers.lab.api import MERGE, Object
from tests.peers.lab.cluster import ACCOUNT, account_token, open_root
from tests.peers.lab.control import ControlPlane, open_control_plane
from tests.peers.lab.identities import ADMIN, NODE, NODE_USER
from tests.peers.lab.space import until_answer

OTHER_NODE: Final = "node-b"
OWN_POD: Final = "pa"
OTHER_POD: Final = "pb"
FREE_POD: Final = "free"
PODS: Final = "/api/v1/namespaces/default/pods"
NODES: Final = "/api/v1/nodes"
NODE_PATH: Final = f"{NODES}/{NODE}"
EVENTS: Final = "/api/v1/namespaces/default/events"
_DEADLINE: Final = 20.0


Refusal = tuple[int, str]
"""Code and reason of a Status."""

BAD_REQUEST: Final = (400, "BadRequest")
FORBIDDEN: Final = (403, "Forbidden")
NOT_FOUND: Final = (404, "NotFound")
ALREADY_EXISTS: Final = (409, "AlreadyExists")
CONFLICT: Final = (409, "Conflict")
INVALID: Final = (422, "Invalid")


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: its code, its headers and the JSON value of its body (or its text)."""

    code: int
    headers: Mapping[str, str]
    body: Any

    @property
    def refusal(self) -> Refusal:
        """Code and reason of a Status."""
        return self.code, self.body.get("reason", "") if isinstance(self.body, dict) else ""

    @property
    def told(self) -> tuple[int, str, str]:
        """Code, reason and message of a Status."""
        body = self.body if isinstance(self.body, dict) else {"message": self.body}
        return (*self.refusal, body.get("message", ""))


class User:
    """One user of one API server."""

    def __init__(self, server: str, token: str, context: ssl.SSLContext | None) -> None:
        self._session = aiohttp.ClientSession(
            base_url=server,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            connector=aiohttp.TCPConnector(ssl=context or False, limit=0),
        )

    async def close(self) -> None:
        """End all connections."""
        await self._session.close()

    async def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        kind: str | None = None,
        accept: str = "application/json",
    ) -> Answer:
        """One request; `path` with its query, `kind` the Content-Type (a merge patch's for PATCH).

        A body of bytes is sent as it is.
        """
        headers = {
            "Content-Type": kind or (MERGE if method == "PATCH" else "application/json"),
            "Accept": accept,
        }
        data = None
        if body is not None:
            data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        request = self._session.request(method, path, data=data, headers=headers)
        async with asyncio.timeout(_DEADLINE), request as answer:
            text = await answer.text()
            try:
                value = json.loads(text)
            except json.JSONDecodeError:
                value = text
            return Answer(answer.status, dict(answer.headers), value)

    async def have(self, method: str, path: str, body: object = None, **more: str) -> Object:
        """The object of an answer that must be no refusal."""
        answer = await self.ask(method, path, body, **more)
        assert answer.code < 300, answer.body
        found: Object = answer.body
        return found

    async def refused(self, method: str, path: str, body: object = None, **more: str) -> Refusal:
        """Code and reason of an answer that must be a refusal."""
        answer = await self.ask(method, path, body, **more)
        assert answer.code >= 400, answer.body
        return answer.refusal

    async def told(
        self, method: str, path: str, body: object = None, **more: str
    ) -> tuple[int, str, str]:
        """Code, reason and message of an answer that must be a refusal."""
        answer = await self.ask(method, path, body, **more)
        assert answer.code >= 400, answer.body
        return answer.told

    @contextlib.asynccontextmanager
    async def watch(
        self, path: str, accept: str = "application/json", **query: str
    ) -> AsyncIterator["Frames"]:
        """The events of one watch, for as long as the block runs."""
        request = self._session.get(
            path, params={"watch": "1", **query}, headers={"Accept": accept}
        )
        async with request as answer:
            yield Frames(answer)


class Frames:
    """The answer to a watch: its code, and its events one by one."""

    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.code: Final = answer.status
        self._lines = answer.content

    async def next(self) -> Object | None:
        """The next event, None at the end. Raises TimeoutError: there is none for long."""
        async with asyncio.timeout(_DEADLINE):
            line = await self._lines.readline()
        found: Object | None = json.loads(line) if line else None
        return found

    async def take(self, count: int) -> list[Object]:
        """The next events."""
        taken = [await self.next() for _ in range(count)]
        return [event for event in taken if event is not None]

    async def rest(self) -> list[Object]:
        """All events until the server ends the watch."""
        events = []
        while (event := await self.next()) is not None:
            events.append(event)
        return events


@dataclass(frozen=True, slots=True)
class Server:
    """An API server and its users. `plane` is None for the model, `model` for the real one."""

    admin: User
    node: User
    account: User
    nobody: User
    plane: ControlPlane | None = None
    model: ApiServerModel | None = None

    @property
    def users(self) -> tuple[User, ...]:
        """All of them."""
        return (self.admin, self.node, self.account, self.nobody)

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
    admin, node, account, nobody = (User(model.url, token, None) for token in (*names, "t-unknown"))
    server = Server(admin, node, account, nobody, model=model)
    try:
        await _furnish(server)
        yield server
    finally:
        for user in server.users:
            await user.close()
        await model.stop()


@contextlib.asynccontextmanager
async def real_server(binaries: Path) -> AsyncIterator[Server]:
    """etcd and kube-apiserver of their own, without controllers.

    Raises TimeoutError, OSError: one of them does not start.
    """
    with open_root() as root:
        async with open_control_plane(root, binaries) as plane:
            account = {"metadata": {"name": "default"}}
            await plane.admin.create("/api/v1/namespaces/default/serviceaccounts", account)
            context = ssl.create_default_context(cafile=plane.certificates.ca)
            tokens = (
                plane.identities.tokens[ADMIN],
                plane.identities.tokens[NODE_USER],
                await account_token(plane.admin),
                "unknown",
            )
            admin, node, user, nobody = (User(plane.server, token, context) for token in tokens)
            server = Server(admin, node, user, nobody, plane=plane)
            try:
                await _furnish(server)
                await until_answer(
                    lambda: _has_rights(server), _DEADLINE, lambda: "the account has no rights"
                )
                yield server
            finally:
                for user in server.users:
                    await user.close()


async def _furnish(server: Server) -> None:
    for name in (NODE, OTHER_NODE):
        await server.admin.have("POST", NODES, {"metadata": {"name": name}})
    for name, node in ((OWN_POD, NODE), (OTHER_POD, OTHER_NODE), (FREE_POD, "")):
        await server.admin.have("POST", PODS, plain_pod(name, node))


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
    """The type of an event and the essence of its object."""
    return event["type"], essence(event["object"])


def marks(**annotations: object) -> Object:
    """A patch of annotations."""
    return {"metadata": {"annotations": annotations}}


def version(obj: Object) -> str:
    text: str = obj["metadata"]["resourceVersion"]
    return text


async def a_pod(server: Server, name: str, node: str = NODE, **metadata: object) -> str:
    """Create a pod of a test's own; its path."""
    await server.admin.have("POST", PODS, plain_pod(name, node, **metadata))
    return f"{PODS}/{name}"
