"""The session: credentials that rotate, rights that are missing, servers that misbehave."""

import asyncio
import contextlib
import shutil
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from agent.cluster import MUTEX_LOCK, NodeCondition, NodeEvent, PodUid
from agent.errors import (
    ApiConflict,
    ApiError,
    ApiForbidden,
    ApiGone,
    ApiInvalid,
    ApiNotFound,
    ApiThrottled,
)
from agent.kube import client as session_module
from agent.kube.client import (
    Access,
    ApiRequest,
    Connection,
    KubeSession,
    open_access,
    path_of,
    read_object,
    refused,
)
from agent.kube.objects import EventPoster, KubeApi
from agent.kube.reader import NodeReader
from tests.builders import NODE, NOON, RESOURCE
from tests.fakes.chance import NoChance
from tests.fakes.clock import ManualClock
from tests.fakes.http import a_session, answering
from tests.fakes.kubeworld import KUBECONFIG, NAMESPACE, model_world

pytestmark = pytest.mark.looptime(False)

ASK = ApiRequest("get", "nodes", path_of("nodes", NODE))


async def test_a_token_that_stays_bad_is_tried_twice_and_then_told(tmp_path: Path):
    async with model_world(tmp_path) as world:
        world.create_node({})
        world.use_token("expired")
        with pytest.raises(ApiForbidden, match="answered 401: Unauthorized") as raised:
            await world.node_api.annotate_node({"a": "b"})

        assert ((("patch", "nodes", "401"), 2),) == world.session.requests.items()

    assert 401 == raised.value.status
    assert "expired" not in str(raised.value)


async def test_who_observes_reads_and_sends_no_request_that_writes(tmp_path: Path):
    async with model_world(tmp_path) as world:
        world.create_node({MUTEX_LOCK: "held"})
        uid = PodUid(world.create_pod("one"))
        session = KubeSession(Connection(world.kubeconfig), NoChance(), observes=True)
        node, poster = KubeApi(session, NODE), EventPoster(session, NODE, ManualClock())
        pods = KubeApi(session, NODE, RESOURCE)
        for write in (
            node.annotate_node({"a": "b"}),
            node.release_lock(MUTEX_LOCK, "held"),
            node.set_condition(degraded(status=True)),
            pods.annotate_pod(NAMESPACE, "one", uid, {"a": "b"}),
            poster.post(NodeEvent("ReportConflict", "a text", warning=True)),
        ):
            with pytest.raises(ApiForbidden, match="only observes"):
                await write
        seen = await node.get_node()
        await session.close()

        assert seen is not None
        assert {MUTEX_LOCK: "held"} == world.node_annotations()
        assert ([], {}) == (world.events(), world.pod_annotations("one"))
        assert ((("get", "nodes", "200"), 1),) == session.requests.items()


async def test_at_most_two_requests_of_a_verb_for_a_resource_are_in_flight(tmp_path: Path):
    running, most = 0, 0

    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _turn in range(20):
            await asyncio.sleep(0)
        running -= 1
        return web.json_response({})

    async with a_session(answer, tmp_path) as session:
        await session.open()
        async with asyncio.TaskGroup() as group:
            for _ in range(9):
                group.create_task(session.call(ASK))

    assert 2 == most


@pytest.mark.parametrize("stops", [1, 3])
async def test_an_agent_that_stood_still_for_longer_than_the_deadline_reads_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops: int
):
    loop = asyncio.get_running_loop()

    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        loop.call_soon(time.sleep, 0.4)  # noqa: TID251 -- the agent stands still
        return web.json_response({})

    async with a_session(answer, tmp_path) as session:
        await session.call(ASK)  # the connection is open
        monkeypatch.setattr(session_module, "DEADLINE", 0.2)
        for _ in range(stops):
            assert b"{}" == await session.call(ASK)


async def test_a_look_at_one_object_waits_for_no_list_and_no_patch_that_hangs(tmp_path: Path):
    hanging = asyncio.Semaphore(0)

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET" and "pods/" in request.path:
            found = {"metadata": {"uid": "u", "name": "one"}, "spec": {"nodeName": NODE}}
            return web.json_response(found)
        hanging.release()
        await asyncio.Event().wait()
        raise AssertionError

    async with a_session(answer, tmp_path) as session, asyncio.timeout(5):
        pods = KubeApi(session, NODE, "nvidia.com/gpu")
        async with asyncio.TaskGroup() as group:
            patch = {"hami.io/a": "b"}
            slow = [
                group.create_task(ask)
                for _ in range(4)
                for ask in (
                    pods.list_pods(),
                    pods.annotate_pod(NAMESPACE, "one", PodUid("u"), patch),
                )
            ]
            for _ in range(4):  # two lists and two patches are on their way, the others wait
                await hanging.acquire()
            found = await pods.get_pod(NAMESPACE, "one")
            for task in slow:
                task.cancel()

    assert found is not None
    assert "one" == found.name


async def test_a_server_that_does_not_answer_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def answer(_: web.BaseRequest) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(session_module, "DEADLINE", 0.1)
    async with a_session(answer, tmp_path) as session:
        await session.open()
        with pytest.raises(ApiError) as raised:
            await session.call(ASK)

        assert ((("get", "nodes", "none"), 1),) == session.requests.items()

    assert (
        "get nodes (/api/v1/nodes/node-1): no answer from the API server (TimeoutError); reached "
        f"through {tmp_path}/kubeconfig"
    ) == str(raised.value)
    assert 0 == raised.value.status


async def test_an_answer_that_is_too_long_is_refused(tmp_path: Path):
    async with a_session(answering(b" " * (session_module.BODY_LIMIT + 1)), tmp_path) as session:
        with pytest.raises(ApiError, match="longer than 20 MiB"):
            await session.call(ASK)


@pytest.mark.parametrize("body", [b"not JSON", b"[1]", b"", b'"text"'])
async def test_an_answer_that_is_no_object_is_refused(tmp_path: Path, body: bytes):
    async with a_session(answering(body), tmp_path) as session:
        with pytest.raises(ApiError, match="not a JSON object"):
            await session.fetch(ASK, read_object)


# A condition of the Node: merged by its type, the others stay.


def degraded(*, status: bool, message: str = "GPU 1 is bad") -> NodeCondition:
    return NodeCondition(status, "NotServed", message, NOON)


async def test_a_condition_is_created_and_replaced_and_the_others_stay(tmp_path: Path):
    async with model_world(tmp_path) as world:
        ready = {"type": "Ready", "status": "True"}
        world.store.create("nodes", {"metadata": {"name": NODE}, "status": {"conditions": [ready]}})
        api = KubeApi(world.session, NODE)
        await api.set_condition(degraded(status=False))
        await api.set_condition(degraded(status=True))
        found = world.store.get("nodes", "", NODE)["status"]["conditions"]

    assert {"Ready": "True", "GpuDegraded": "True"} == {one["type"]: one["status"] for one in found}
    assert {
        "type": "GpuDegraded",
        "status": "True",
        "reason": "NotServed",
        "message": "GPU 1 is bad",
        "lastHeartbeatTime": "2026-09-01T12:00:00Z",
        "lastTransitionTime": "2026-09-01T12:00:00Z",
    } in found


# Statuses of the API server become errors that callers act upon.


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, ApiError),
        (401, ApiForbidden),
        (403, ApiForbidden),
        (404, ApiNotFound),
        (409, ApiConflict),
        (410, ApiGone),
        (422, ApiInvalid),
        (429, ApiThrottled),
        (500, ApiError),
        (503, ApiError),
    ],
)
def test_a_status_has_its_class_and_the_text_says_what_was_asked(status: int, kind: type[ApiError]):
    error = refused("patch nodes (/x)", status, b'{"kind":"Status","message":"again"}')

    said = f"patch nodes (/x): the API server answered {status}: again"
    assert (kind, status, said) == (type(error), error.status, str(error))
    # A proxy's answer does not say that an object is gone.
    for body in (b"<html>no such page</html>", b"404 page not found\n", b""):
        assert ApiError is type(refused("get pods (/x)", 404, body))


@pytest.mark.parametrize(
    "body", [b"<html>\xff bad\n gateway</html>" * 99, b"[1]", b'{"message":7}']
)
def test_any_body_gives_one_short_line(body: bytes):
    text = str(refused("x", 502, body))

    assert "\n" not in text
    assert 400 > len(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7", 7.0),
        (" 7 ", 7.0),
        ("0", 0.0),
        ("999999", 3600.0),
        ("-1", None),
        ("1.5", None),
        ("soon", None),
        ("\u0667", None),
        ("", None),
        (None, None),
        ("Wed, 21 Oct 2026 07:28:00 GMT", None),
    ],
)
def test_retry_after_is_read_as_seconds(text: str | None, expected: float | None):
    assert expected == refused("x", 503, b"", text).retry_after


# The Node with its status, and other Nodes by name.


STATUS = {"allocatable": {RESOURCE: "12"}, "capacity": {RESOURCE: 20}}


async def test_the_node_is_seen_with_its_amounts(tmp_path: Path):
    async with model_world(tmp_path) as world:
        world.store.create("nodes", {"metadata": {"name": NODE}, "status": STATUS})
        seen = await NodeReader(world.session, NODE).get_sight(RESOURCE)
        other = await NodeReader(world.session, NODE).get_sight("other.com/gpu")

    assert (12, 20) == (seen.slices, seen.capacity)
    assert (0, 0) == (other.slices, other.capacity)
    assert NODE == seen.name


# Inside a pod: the service account's certificate and token, and what happens when they rotate.


CERTIFICATES = Path(__file__).parents[1] / "vectors" / "tls"


class TlsServer:
    """Answers who shows the token `right`; its certificate is exchanged by name."""

    def __init__(self) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.token = "first"  # noqa: S105 -- a test
        self.accepts = ""
        """The name in the client's certificate; empty: the token counts."""
        self.url = ""
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
        if self.accepts:
            right = self.accepts in str(request.transport.get_extra_info("peercert"))
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
    server.url = f"https://127.0.0.1:{port}"
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


async def test_a_renewal_that_takes_long_holds_up_no_other_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def slow(connection: Connection) -> Access:
        begun.set()
        await may_end.wait()
        return await open_access(connection)

    async with in_a_pod(tmp_path) as (server, session), asyncio.TaskGroup() as group:
        await session.call(ASK)
        monkeypatch.setattr(session_module, "open_access", slow)
        server.token = "second"  # noqa: S105 -- a test
        refused = group.create_task(session.call(ASK))
        await begun.wait()
        server.token = "first"  # noqa: S105 -- a test
        async with asyncio.timeout(5):
            assert b"{}" == await session.call(ASK)
        may_end.set()
        assert b"{}" == await refused


async def test_a_client_certificate_that_rotates_is_shown_after_a_401(tmp_path: Path):
    async with in_a_pod(tmp_path) as (server, _):
        for name in ("one", "two"):
            server.context.load_verify_locations(CERTIFICATES / f"{name}.crt")
        server.context.verify_mode = ssl.CERT_OPTIONAL
        server.accepts = "test server two"
        for end in ("crt", "key"):
            shutil.copy(CERTIFICATES / f"one.{end}", tmp_path / f"client.{end}")
        kubeconfig = tmp_path / "kubeconfig"
        text = KUBECONFIG.format(server=server.url, token="first")  # noqa: S106 -- a test
        user = f"client-certificate: {tmp_path}/client.crt, client-key: {tmp_path}/client.key"
        text = text.replace('token: "first"', user)
        kubeconfig.write_text(
            text.replace("server:", f"certificate-authority: {tmp_path}/ca.crt, server:")
        )
        session = KubeSession(Connection(kubeconfig), NoChance())
        try:
            with pytest.raises(ApiForbidden):
                await session.call(ASK)
            for end in ("crt", "key"):
                shutil.copy(CERTIFICATES / f"two.{end}", tmp_path / f"client.{end}")
            await session.call(ASK)
        finally:
            await session.close()


EXEC = ApiRequest("get", "pods/exec", path_of("namespaces", "d", "pods", "p", "exec"))
SUCCESS = b'\x03{"status": "Success"}'


FAILED = b'\x03{"status": "Failure", "message": "exit code 1"}'


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([b"\x01a", b"\x02a warning", b"\x01", b"\x01b", SUCCESS], "ab"),
        ([b"\x01ab", FAILED], "ab"),
        ([b"\x02bad\n", FAILED], "bad"),
        ([FAILED], "exit code 1"),
        ([], "the command wrote nothing"),
        ([b"\x01" + bytes(1 << 20)] * 20 + [SUCCESS], "the answer is longer than 20 MiB"),
        (None, "no answer from the API server"),
    ],
)
async def test_a_command_says_what_it_wrote_or_why_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frames: list[bytes] | None, said: str
):
    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(request)
        for frame in (b"", *(frames or ())):
            await socket.send_bytes(frame)
        if frames is None:
            await asyncio.sleep(60)
        await socket.send_str("a text")
        return socket

    if frames is None:
        monkeypatch.setattr(session_module, "EXECUTION", 0.2)
    async with a_session(answer, tmp_path) as session:
        try:
            answered = (await session.execute(EXEC)).decode()
        except ApiError as error:
            answered = str(error)

    assert said in answered


@pytest.mark.parametrize(
    ("said", "beside"),
    [
        (b"\x15\x03\x01\x00\x02\x02\x16", ""),
        (b"HTTP/1.1 200 OK\r\nX-Long: %s\r\n\r\n" % (b"a" * 9000), ""),
        (b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n", ', proxy-url: "{url}"'),
    ],
    ids=["no HTTP", "a long header", "a proxy that reaches nothing"],
)
async def test_an_answer_that_is_not_the_api_servers_says_nothing_of_its_objects(
    tmp_path: Path, said: bytes, beside: str
):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(said)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        text = KUBECONFIG.format(server="https://api.invalid:6443" if beside else url, token="t")  # noqa: S106 -- a test
        path = tmp_path / "kubeconfig"
        path.write_text(text.replace("}}]", beside.format(url=url) + "}}]", 1))
        session = KubeSession(Connection(path), NoChance())
        with pytest.raises(ApiError, match="no answer from the API server") as caught:
            await session.call(ApiRequest("get", "pods", path_of("namespaces", "d", "pods", "p")))
        await session.close()

    assert (ApiError, 0) == (type(caught.value), caught.value.status)


async def test_a_closed_session_says_so(tmp_path: Path):
    async with model_world(tmp_path) as world:
        world.create_node({})
        await world.session.call(ASK)
        await world.session.close()
        await world.session.close()
        with pytest.raises(ApiError, match="was closed"):
            await world.session.call(ASK)
