"""Inside a pod: the service account's certificate and token, and what happens when they rotate."""

import asyncio
import contextlib
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from agent.errors import ApiError
from agent.kube import client as session_module
from agent.kube.client import ApiRequest, Connection, KubeSession, Library, configure, path_of
from tests.fakes.chance import NoChance

pytestmark = pytest.mark.looptime(False)

CERTIFICATES = Path(__file__).parents[1] / "vectors" / "tls"
ASK = ApiRequest("get", "nodes", path_of("nodes", "node-1"))


class TlsServer:
    """Answers who shows the token `right`; its certificate is exchanged by name."""

    def __init__(self) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.token = "first"  # noqa: S105 -- a test
        self.seen = 0
        self.drop: list[asyncio.BaseTransport] = []

    def present(self, name: str) -> None:
        """Show this certificate from now on, and cut the connections that saw another."""
        self.context.load_cert_chain(CERTIFICATES / f"{name}.crt", CERTIFICATES / f"{name}.key")
        while self.drop:
            self.drop.pop().close()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.seen += 1
        assert request.transport is not None
        self.drop.append(request.transport)
        right = request.headers.get("Authorization") == f"Bearer {self.token}"
        return web.json_response({}, status=200 if right else 401)


@contextlib.asynccontextmanager
async def in_a_pod(account: Path) -> AsyncIterator[tuple[TlsServer, KubeSession]]:
    """A server with certificate one and a session from the files of a service account."""
    server = TlsServer()
    server.present("one")
    web_server = web.Server(server.answer, access_log=None)
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(web_server, "127.0.0.1", 0, ssl=server.context)
    port = str(listener.sockets[0].getsockname()[1])
    environment = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port}
    session = KubeSession(Connection(service_account=account, environment=environment), NoChance())
    mount(account, "one", "first")
    try:
        async with asyncio.timeout(30):
            yield server, session
    finally:
        await session.close()
        listener.close()
        await web_server.shutdown(0.1)


def mount(account: Path, certificate: str, token: str) -> None:
    """What the kubelet puts into the pod."""
    shutil.copy(CERTIFICATES / f"{certificate}.crt", account / "ca.crt")
    (account / "token").write_text(token)


async def test_a_rotated_certificate_is_read_again_as_often_as_it_rotates(tmp_path: Path):
    async with in_a_pod(tmp_path) as (server, session):
        await session.call(ASK)
        for name in ("two", "one", "two"):
            server.present(name)
            mount(tmp_path, name, "first")
            await session.call(ASK)

        assert 4 == server.seen


async def test_a_server_that_is_another_is_not_talked_to(tmp_path: Path):
    async with in_a_pod(tmp_path) as (server, session):
        server.present("two")
        with pytest.raises(ApiError, match=r"no answer.*certificate"):
            await session.call(ASK)

        assert ((("get", "nodes", "none"), 2),) == session.requests.items()

    assert 0 == server.seen


async def test_credentials_that_vanish_in_the_middle_are_told_and_may_come_back(tmp_path: Path):
    async with in_a_pod(tmp_path) as (server, session):
        await session.call(ASK)
        server.token = "second"  # noqa: S105 -- a test
        (tmp_path / "token").unlink()
        with pytest.raises(ApiError, match="token: cannot be read"):
            await session.call(ASK)
        mount(tmp_path, "one", "second")
        await session.call(ASK)

    assert 4 == server.seen


async def test_requests_that_fail_together_renew_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    loads: list[Connection] = []

    async def counted(library: Library, connection: Connection) -> object:
        loads.append(connection)
        return await configure(library, connection)

    monkeypatch.setattr(session_module, "configure", counted)
    async with in_a_pod(tmp_path) as (server, session):
        await session.call(ASK)
        server.token = "second"  # noqa: S105 -- a test
        mount(tmp_path, "one", "second")
        async with asyncio.TaskGroup() as group:
            for _ in range(6):
                group.create_task(session.call(ASK))

    assert 2 == len(loads)
