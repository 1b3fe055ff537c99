"""The session: credentials that rotate, rights that are missing, servers that misbehave."""

import asyncio
import collections
import contextlib
import shutil
import ssl
import time
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
from agent.kube import client
from agent.kube.client import (
    ApiRequest,
    Connection,
    KubeSession,
    open_access,
    path_of,
    read_object,
    refused,
)
from agent.kube.objects import EventPoster, KubeApi
from tests.builders import NODE, NOON, RESOURCE
from tests.fakes.chance import NoChance
from tests.fakes.clock import ManualClock
from tests.fakes.http import answering
from tests.fakes.kubeworld import KUBECONFIG, NAMESPACE

pytestmark = [pytest.mark.looptime(False), pytest.mark.timeout(30)]

ASK = ApiRequest("get", "nodes", path_of("nodes", NODE))


async def test_a_token_that_stays_bad_is_tried_twice_and_then_told(world):
    world.create_node({})
    world.use_token("expired")
    with pytest.raises(ApiForbidden, match="answered 401: Unauthorized") as raised:
        await world.node_api.annotate_node({"a": "b"})

    assert ((("patch", "nodes", "401"), 2),) == world.session.requests.items()
    assert (401, False) == (raised.value.status, "expired" in str(raised.value))


async def test_who_observes_reads_and_sends_no_request_that_writes(world):
    world.create_node({MUTEX_LOCK: "held"})
    uid = PodUid(world.create_pod("one"))
    session = KubeSession(Connection(world.kubeconfig), NoChance(), observes=True)
    node, pods = KubeApi(session, NODE), KubeApi(session, NODE, RESOURCE)
    event = NodeEvent("ReportConflict", "text", warning=True)
    for write in (
        node.annotate_node({"a": "b"}),
        node.release_lock(MUTEX_LOCK, "held"),
        node.set_condition(degraded(status=True)),
        pods.annotate_pod(NAMESPACE, "one", uid, {"a": "b"}),
        EventPoster(session, NODE, ManualClock()).post(event),
    ):
        with pytest.raises(ApiForbidden, match="only observes"):
            await write
    seen = await node.get_node()
    await session.close()

    assert {MUTEX_LOCK: "held"} == seen.annotations == world.node_annotations()
    assert ([], {}) == (world.events(), world.pod_annotations("one"))
    assert ((("get", "nodes", "200"), 1),) == session.requests.items()


async def test_two_requests_of_a_kind_are_in_flight_and_no_other_kind_waits_for_them(serve):
    came, arrived = collections.Counter(), asyncio.Semaphore(0)

    async def answer(request):
        if "pods/one" in request.path and request.method == "GET":
            pod = {"metadata": {"uid": "u", "name": "one"}, "spec": {"nodeName": NODE}}
            return web.json_response(pod)
        came[request.method] += 1
        arrived.release()
        return await asyncio.Event().wait()

    pods = KubeApi(await serve(answer), NODE, RESOURCE)
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        patch = (NAMESPACE, "one", PodUid("u"), {"hami.io/a": "b"})
        slow = [
            group.create_task(ask(*about))
            for ask, about in ((pods.list_pods, ()), (pods.annotate_pod, patch)) * 4
        ]
        for _ in range(4):
            await arrived.acquire()
        assert "one" == (await pods.get_pod(NAMESPACE, "one")).name
        assert {"GET": 2, "PATCH": 2} == came
        for task in slow:
            task.cancel()


@pytest.mark.parametrize("stops", [1, 3])
async def test_an_agent_that_stood_still_for_longer_than_the_deadline_reads_the_answer(
    serve, monkeypatch, stops
):
    loop = asyncio.get_running_loop()

    async def answer(_):
        loop.call_soon(time.sleep, 0.4)  # noqa: TID251 -- the agent stands still
        return web.json_response({})

    session = await serve(answer)
    await session.call(ASK)  # the connection is open
    monkeypatch.setattr(client, "DEADLINE", 0.2)
    for _ in range(stops):
        assert b"{}" == await session.call(ASK)


async def test_a_server_that_does_not_answer_is_given_up(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "DEADLINE", 0.1)
    session = await serve(lambda _: asyncio.Event().wait())
    await session.open()
    with pytest.raises(ApiError) as raised:
        await session.call(ASK)

    assert ((("get", "nodes", "none"), 1),) == session.requests.items()
    said = "get nodes (/api/v1/nodes/node-1): no answer from the API server (TimeoutError)"
    assert f"{said}; reached through {tmp_path}/kubeconfig" == str(raised.value)
    assert 0 == raised.value.status


async def test_an_answer_that_is_too_long_is_refused(serve):
    with pytest.raises(ApiError, match="longer than 20 MiB"):
        await (await serve(answering(b" " * (client.BODY_LIMIT + 1)))).call(ASK)


@pytest.mark.parametrize("body", [b"not JSON", b"[1]", b"", b'"text"'])
async def test_an_answer_that_is_no_object_is_refused(serve, body):
    with pytest.raises(ApiError, match="not a JSON object"):
        await (await serve(answering(body))).fetch(ASK, read_object)


async def test_a_closed_session_says_so(world):
    await world.session.open()
    for _ in range(2):
        await world.session.close()
    with pytest.raises(ApiError, match="was closed"):
        await world.session.call(ASK)


# A condition of the Node: merged by its type, the others stay.


def degraded(*, status: bool) -> NodeCondition:
    return NodeCondition(status, "NotServed", "GPU 1 is bad", NOON)


async def test_a_condition_is_created_and_replaced_and_the_others_stay(world):
    ready = {"type": "Ready", "status": "True"}
    world.store.create("nodes", {"metadata": {"name": NODE}, "status": {"conditions": [ready]}})
    for status in (False, True):
        await KubeApi(world.session, NODE).set_condition(degraded(status=status))
    found = {one["type"]: one for one in world.store.get("nodes", "", NODE)["status"]["conditions"]}

    times = dict.fromkeys(("lastHeartbeatTime", "lastTransitionTime"), "2026-09-01T12:00:00Z")
    said = {"type": "GpuDegraded", "reason": "NotServed", "message": "GPU 1 is bad"}
    assert {"Ready": ready, "GpuDegraded": {"status": "True", **said, **times}} == found


# Statuses of the API server become errors that callers act upon.

REST = dict.fromkeys((400, 500, 503), ApiError) | dict.fromkeys((401, 403), ApiForbidden)
NAMED = {404: ApiNotFound, 409: ApiConflict, 410: ApiGone, 422: ApiInvalid, 429: ApiThrottled}


@pytest.mark.parametrize(("status", "kind"), (REST | NAMED).items())
def test_a_status_has_its_class_and_the_text_says_what_was_asked(status, kind):
    error = refused("patch nodes (/x)", status, b'{"kind":"Status","message":"again"}')

    said = f"patch nodes (/x): the API server answered {status}: again"
    assert (kind, status, said) == (type(error), error.status, str(error))


@pytest.mark.parametrize("status", [404, 502])
@pytest.mark.parametrize(
    "body", [b"<html>\xff bad\n gateway</html>" * 99, b"404 page not found\n", b"", b"[1]"]
)
def test_a_proxys_answer_says_of_no_object_that_it_is_gone_and_is_one_short_line(status, body):
    error = refused("x", status, body)

    assert ApiError is type(error)
    assert "\n" not in str(error)
    assert 400 > len(str(error))


SECONDS = {"7": 7.0, " 7 ": 7.0, "0": 0.0, "999999": 3600.0}
UNREAD = ("-1", "1.5", "soon", "\u0667", "", None, "Wed, 21 Oct 2026 07:28:00 GMT")


@pytest.mark.parametrize(("text", "expected"), (SECONDS | dict.fromkeys(UNREAD)).items())
def test_retry_after_is_read_as_seconds(text, expected):
    assert expected == refused("x", 503, b"", text).retry_after


# Inside a pod: the service account's certificate and token, and what happens when they rotate.


CERTIFICATES = Path(__file__).parents[1] / "vectors" / "tls"


class TlsServer:
    """Answers who shows the token `first`; its certificate is exchanged by name.

    `accepts`: the name in the client's certificate, which counts then instead of the token.
    """

    def __init__(self) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.accepts = ""
        self.refuses = self.seen = 0
        self.drop: list[asyncio.BaseTransport] = []

    def present(self, name: str) -> None:
        """Show this certificate from now on, and cut the connections that saw another."""
        self.context.load_cert_chain(CERTIFICATES / f"{name}.crt", CERTIFICATES / f"{name}.key")
        while self.drop:
            self.drop.pop().close()

    async def answer(self, request):
        self.seen += 1
        self.drop.append(request.transport)
        right = request.headers.get("Authorization") == "Bearer first"
        if self.accepts:
            right = self.accepts in str(request.transport.get_extra_info("peercert"))
        self.refuses -= (is_refused := self.refuses > 0)
        return web.json_response({}, status=200 if right and not is_refused else 401)


def mount(account: Path, certificate: str, *names: str) -> None:
    """Copy a certificate's files, as what the kubelet puts into the pod."""
    for end, name in zip(("crt", "key"), names, strict=False):
        shutil.copy(CERTIFICATES / f"{certificate}.{end}", account / name)


@pytest.fixture
async def in_a_pod(tmp_path):
    """A server with certificate one and a session from the files of a service account."""
    server = TlsServer()
    server.present("one")
    web_server = web.Server(server.answer, access_log=None)
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(web_server, "127.0.0.1", 0, ssl=server.context)
    port = str(listener.sockets[0].getsockname()[1])
    environment = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port}
    connection = Connection(service_account=tmp_path, environment=environment)
    session = KubeSession(connection, NoChance())
    mount(tmp_path, "one", "ca.crt")
    (tmp_path / "token").write_text("first")
    yield server, session, f"https://127.0.0.1:{port}"
    await session.close()
    listener.close()
    await web_server.shutdown(0.1)


CODES = ("200", "none")


async def test_a_rotated_certificate_is_read_again_and_a_server_that_is_another_is_not_talked_to(
    in_a_pod, tmp_path
):
    server, session, _ = in_a_pod
    await session.call(ASK)
    for seen, name in enumerate(("two", "one", "two"), 1):
        server.present(name)
        if name == "two":
            with pytest.raises(ApiError, match=r"no answer.*certificate"):
                await session.call(ASK)
        assert seen == server.seen
        mount(tmp_path, name, "ca.crt")
        await session.call(ASK)

    # Each is tried again with the files as they are then.
    assert [4, 7] == [dict(session.requests.items())["get", "nodes", code] for code in CODES]


async def test_a_renewal_that_takes_long_holds_up_no_other_request(in_a_pod, monkeypatch):
    server, session, _ = in_a_pod
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def slow(connection):
        begun.set()
        await may_end.wait()
        return await open_access(connection)

    async with asyncio.TaskGroup() as group:
        await session.call(ASK)
        monkeypatch.setattr(client, "open_access", slow)
        server.refuses = 1
        renewing = group.create_task(session.call(ASK))
        await begun.wait()
        async with asyncio.timeout(5):
            assert b"{}" == await session.call(ASK)
        may_end.set()
        assert b"{}" == await renewing


async def test_a_client_certificate_that_rotates_is_shown_after_a_401(in_a_pod, tmp_path):
    server, _, url = in_a_pod
    for name in ("one", "two"):
        server.context.load_verify_locations(CERTIFICATES / f"{name}.crt")
    server.context.verify_mode, server.accepts = ssl.CERT_OPTIONAL, "test server two"
    mount(tmp_path, "one", "client.crt", "client.key")
    text = KUBECONFIG.format(server=url, token="first")  # noqa: S106 -- a test
    user = f"client-certificate: {tmp_path}/client.crt, client-key: {tmp_path}/client.key"
    text = text.replace('token: "first"', user)
    text = text.replace("server:", f"certificate-authority: {tmp_path}/ca.crt, server:")
    (tmp_path / "kubeconfig").write_text(text)
    session = KubeSession(Connection(tmp_path / "kubeconfig"), NoChance())
    async with contextlib.AsyncExitStack() as opened:
        opened.push_async_callback(session.close)
        with pytest.raises(ApiForbidden):
            await session.call(ASK)
        mount(tmp_path, "two", "client.crt", "client.key")
        await session.call(ASK)


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
async def test_a_command_says_what_it_wrote_or_why_it_failed(serve, monkeypatch, frames, said):
    async def answer(request):
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(request)
        for frame in (b"", *(frames or ())):
            await socket.send_bytes(frame)
        if frames is None:
            await asyncio.sleep(60)
        await socket.send_str("a text")
        return socket

    if frames is None:
        monkeypatch.setattr(client, "EXECUTION", 0.2)
    session = await serve(answer)
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
    tmp_path, said, beside
):
    async def answer(reader, writer):
        await reader.readline()
        writer.write(said)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        text = KUBECONFIG.format(server="https://api.invalid:6443" if beside else url, token="t")  # noqa: S106 -- a test
        path = tmp_path / "kubeconfig"
        path.write_text(text.replace("}}]", beside.format(url=url) + "}}]", 1))
        async with contextlib.AsyncExitStack() as opened:
            session = KubeSession(Connection(path), NoChance())
            opened.push_async_callback(session.close)
            with pytest.raises(ApiError, match="no answer from the API server") as caught:
                await session.call(ASK)

    assert (ApiError, 0) == (type(caught.value), caught.value.status)
