"""A client of the API server model that knows nothing of the agent's own client."""

import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from agent.sandbox.apiserver import ApiServerModel
from agent.sandbox.store import ObjectStore
from tests.fakes.chance import Seeded
from tests.fakes.clock import ManualClock

TOKENS = {
    "t-admin": "admin",
    "t-node": "system:node:node-a",
    "t-account": "system:serviceaccount:kube-system:hami-agent",
    "t-stranger": "jane",
}
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
JSON_PATCH = "application/json-patch+json"
POD_A = "/api/v1/namespaces/default/pods/pa"
NODE_A = "/api/v1/nodes/node-a"


class HttpAnswer:
    """Code, headers and decoded body of one answer."""

    def __init__(self, code: int, headers: dict[str, str], body: Any) -> None:
        self.code = code
        self.headers = headers
        self.body = body

    @property
    def failure(self) -> tuple[int, str]:
        """Code and reason of a Status."""
        assert "Status" == self.body["kind"]
        assert self.code == self.body["code"]
        return self.code, self.body["reason"]


class Client:
    """One user's connection."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        kind: str = "application/json",
        accept: str = "*/*",
    ) -> HttpAnswer:
        data = None if body is None else io.BytesIO(_encode(body))
        headers = {"Content-Type": kind, "Accept": accept}
        request = self._session.request(method, self._url + path, data=data, headers=headers)
        async with request as response:
            text = await response.text()
            is_json = response.content_type == "application/json" and text.startswith("{")
            return HttpAnswer(
                response.status, dict(response.headers), json.loads(text) if is_json else text
            )

    async def get(self, path: str) -> HttpAnswer:
        return await self.call("GET", path)

    async def patch(self, path: str, body: Any, kind: str = MERGE) -> HttpAnswer:
        return await self.call("PATCH", path, body, kind)

    @asynccontextmanager
    async def watch(self, path: str) -> AsyncIterator[AsyncIterator[Any]]:
        async with self._session.get(self._url + path) as response:
            assert 200 == response.status

            async def frames() -> AsyncIterator[Any]:
                async for line in response.content:
                    yield json.loads(line)

            yield frames()


class ServedRequests:
    """A running server with two nodes, a pod on each and one without."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = ObjectStore(self.clock, Seeded())
        self.api = ApiServerModel(self.store, TOKENS)
        for node in ("node-a", "node-b"):
            self.store.create("nodes", {"metadata": {"name": node}, "status": {"phase": "up"}})
        for pod, node in (("pa", "node-a"), ("pb", "node-b"), ("free", "")):
            spec = {"nodeName": node, "containers": []} if node else {"containers": []}
            self.store.create("pods", {"metadata": {"name": pod}, "spec": spec})

    @asynccontextmanager
    async def as_user(self, token: str) -> AsyncIterator[Client]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with aiohttp.ClientSession(headers=headers) as session:
            yield Client(session, self.api.url)


@asynccontextmanager
async def served() -> AsyncIterator[ServedRequests]:
    """The server, for as long as the block runs."""
    server = ServedRequests()
    await server.api.start()
    try:
        yield server
    finally:
        await server.api.stop()


@asynccontextmanager
async def connected(user: str = "t-admin") -> AsyncIterator[tuple[ServedRequests, Client]]:
    """The server and one client of it."""
    async with served() as server, server.as_user(user) as client:
        yield server, client


def _encode(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()
