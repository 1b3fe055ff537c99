"""What the API server model does that no test compares with the original, and its faults.

`tests/peers/test_apiserver_*.py` ask the model and the original the same.
"""

import json
import random

import aiohttp
import pytest

from agent.host.process import SystemClock
from agent.sandbox.api_errors import Json
from agent.sandbox.apiserver import BODY_LIMIT, ApiServerModel
from agent.sandbox.apiserver_access import ADMIN
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.webhook import admit_pod
from agent.sandbox.store import KINDS, ObjectStore
from tests.fakes.api_client import MERGE, NODE_A, POD_A, Client, connected, served

pytestmark = pytest.mark.looptime(False)

NODE_B = "/api/v1/nodes/node-b"
PODS = "/api/v1/namespaces/default/pods"
MARK = {"metadata": {"annotations": {"a": "1"}}}
WATCH = "/api/v1/pods?watch=true&fieldSelector=spec.nodeName%3Dnode-a"


def mark(stored: Json) -> Json:
    count = int((stored["metadata"].get("annotations") or {"n": "-1"})["n"])
    stored["metadata"]["annotations"] = {"n": str(count + 1)}
    return stored


@pytest.mark.parametrize(
    ("method", "path", "failure"),
    [
        ("PUT", "/api/v1/pods", (404, "NotFound")),
        ("POST", "/api/v1/pods", (404, "NotFound")),
        ("GET", POD_A + "/binding", (404, "NotFound")),
        ("GET", "/api/v1/pods?watch=1&labelSelector=a%3Db", (400, "BadRequest")),
        ("GET", "/api/v1/pods?labelSelector=%28", (400, "BadRequest")),
        ("GET", "/api/v1/pods?watch=1&resourceVersion=x", (400, "BadRequest")),
    ],
)
async def test_what_is_not_served_is_refused(
    method: str, path: str, failure: tuple[int, str]
) -> None:
    async with connected() as (_, client):
        assert failure == (await client.call(method, path)).failure


@pytest.mark.parametrize(
    ("body", "kind"), [(b"{", MERGE), (b" " * (BODY_LIMIT + 1), MERGE), (b"{}", "text/plain")]
)
async def test_a_patch_that_cannot_be_read_is_refused(body: bytes, kind: str) -> None:
    async with connected() as (server, client):
        before = server.store.version

        assert (400, "BadRequest") == (await client.patch(NODE_A, body, kind)).failure
        assert before == server.store.version


async def test_a_binding_names_a_node() -> None:
    async with connected() as (_, client):
        binding = {"metadata": {"name": "free"}, "target": {}}
        refused = await client.call("POST", f"{PODS}/free/binding", binding)

        assert (400, "BadRequest") == refused.failure


async def test_the_grace_of_a_deletion_may_stand_in_the_query() -> None:
    async with connected() as (_, client):
        marked = (await client.call("DELETE", POD_A + "?gracePeriodSeconds=7")).body

        assert 7 == marked["metadata"]["deletionGracePeriodSeconds"]


async def test_new_pods_pass_the_webhook() -> None:
    pods = "/api/v1/namespaces/default/pods"
    container: Json = {"name": "c", "resources": {"limits": {"nvidia.com/gpu": 1}}}
    async with served() as server:
        webhook = ApiServerModel(
            server.store, {"t": "admin"}, lambda pod: admit_pod(pod, SchedulerSettings())
        )
        await webhook.start()
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer t"}) as session:
            client = Client(session, webhook.url)
            pod = {"metadata": {"name": "new"}, "spec": {"containers": [container]}}
            created = await client.call("POST", pods, pod)
            container["securityContext"] = {"privileged": True}
            refused = await client.call("POST", pods, pod)
        await webhook.stop()

    assert "hami-scheduler" == created.body["spec"]["schedulerName"]
    assert (403, "Forbidden") == refused.failure


async def test_a_stranger_may_do_nothing() -> None:
    async with connected("t-stranger") as (_, client):
        answer = await client.get(POD_A)

        assert (403, "Forbidden") == answer.failure
        assert 'User "jane" cannot get resource "pods"' in answer.body["message"]


async def test_every_request_is_recorded_and_counted_for_its_user() -> None:
    async with served() as server:
        async with server.as_user("t-node") as node, server.as_user("t-admin") as admin:
            await node.get(NODE_A)
            await node.patch(NODE_B, MARK)
            await admin.patch(POD_A + "/status", MARK)
        journal = server.api.journal

    calls = [(call.user, call.verb, call.resource, call.name, call.code) for call in journal.calls]
    assert [
        ("system:node:node-a", "get", "nodes", "node-a", 200),
        ("system:node:node-a", "patch", "nodes", "node-b", 403),
        ("admin", "patch", "pods", "pa", 200),
    ] == calls
    assert "status" == journal.calls[2].subresource
    assert 1 == journal.counts["admin", "patch", "pods"]
    assert (1, 1, 0) == (
        journal.reads("system:node:node-a"),
        journal.writes("system:node:node-a"),
        journal.watches("system:node:node-a"),
    )


@pytest.mark.parametrize("body", [b"{", {}, {"spec": {"resourceAttributes": []}}])
async def test_a_review_of_nothing_is_a_bad_request(body: object) -> None:
    async with connected("t-node") as (_, client):
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"

        assert (400, "BadRequest") == (await client.call("POST", path, body)).failure


async def test_ended_watches_can_be_continued() -> None:
    async with connected() as (server, client):
        path = f"{WATCH}&resourceVersion={server.store.version}"
        async with client.watch(path) as frames:
            server.store.update("pods", "default", "pa", mark)
            version = (await anext(frames))["object"]["metadata"]["resourceVersion"]
            server.api.end_watches()
            assert [] == [frame async for frame in frames]

        server.store.bind("default", "free", "node-a")
        async with client.watch(f"{WATCH}&resourceVersion={version}") as frames:
            assert "ADDED" == (await anext(frames))["type"]


async def test_watches_that_are_ended_get_the_bookmark_of_their_end() -> None:
    async with connected() as (server, client):
        path = f"{WATCH}&resourceVersion={server.store.version}&allowWatchBookmarks=true"
        async with client.watch(path) as frames:
            server.store.update("nodes", "", "node-b", mark)
            server.api.end_watches()
            seen = [frame async for frame in frames]

        assert [("BOOKMARK", "Pod")] == [(one["type"], one["object"]["kind"]) for one in seen]
        assert str(server.store.version) == seen[0]["object"]["metadata"]["resourceVersion"]


async def test_a_watch_that_falls_behind_the_history_is_told_so() -> None:
    async with connected() as (server, client):
        async with client.watch(f"{WATCH}&resourceVersion={server.store.version}") as frames:
            for _ in range(1100):
                server.store.update("pods", "default", "pb", mark)
            seen = [frame async for frame in frames]

        assert [("ERROR", 410)] == [(frame["type"], frame["object"]["code"]) for frame in seen]


async def test_a_throttled_client_is_told_when_to_come_again() -> None:
    async with connected() as (server, client):
        server.api.throttle(2, retry_after=7)

        for _ in range(2):
            answer = await client.get(NODE_A)
            assert (429, "TooManyRequests") == answer.failure
            assert "7" == answer.headers["Retry-After"]
        assert 200 == (await client.get(NODE_A)).code


async def test_an_outage_cuts_watches_and_refuses_connections_until_it_ends() -> None:
    async with connected() as (server, client):
        port = server.api.port
        async with client.watch(f"{WATCH}&resourceVersion={server.store.version}") as frames:
            await server.api.begin_outage()
            with pytest.raises(aiohttp.ClientError):
                await anext(frames)
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.get(NODE_A)

        await server.api.end_outage()

        assert 200 == (await client.get(NODE_A)).code
        assert port == server.api.port


# The API server model as kubectl uses it: a token in the path, and the kinds that there are.

TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"
TOKEN = "secret"  # noqa: S105 -- the model's
KINDS_OF_BODY = {"PATCH": "application/merge-patch+json"}
POD = {"metadata": {"name": "a", "namespace": "demo"}, "spec": {"containers": []}}


@pytest.fixture
async def server():
    store = ObjectStore(SystemClock(), random.Random(1))  # noqa: S311 -- a model's
    model = ApiServerModel(store, {TOKEN: ADMIN})
    await model.start()
    yield model
    await model.stop()


async def asked(server, path, method="GET", body=None):
    """Status and document, as kubectl asks: with no token in the headers."""
    async with (
        aiohttp.ClientSession() as session,
        session.request(
            method,
            f"{server.url}{path}",
            headers={
                "Accept": TABLE,
                "Content-Type": KINDS_OF_BODY.get(method, "application/json"),
            },
            data=body,
        ) as answer,
    ):
        return answer.status, await answer.json()


async def test_a_token_in_the_path_speaks_for_its_user(server):
    path = f"/as/{TOKEN}/api/v1/namespaces/demo/pods"
    made, _ = await asked(server, f"{path}?fieldManager=k", "POST", json.dumps(POD))
    status, found = await asked(server, f"{path}?limit=500&fieldSelector=metadata.name%3Da")

    assert (201, 200) == (made, status)
    assert ["a"] == [pod["metadata"]["name"] for pod in found["items"]]


async def test_a_selector_may_say_what_is_not_wanted_as_for_the_pods_of_a_described_node(server):
    path = f"/as/{TOKEN}/api/v1/namespaces/demo/pods"
    for name, phase in (("a", "Running"), ("b", "Succeeded"), ("c", "Failed")):
        metadata = {"name": name, "namespace": "demo"}
        pod = {**POD, "metadata": metadata, "status": {"phase": phase}}
        await asked(server, path, "POST", json.dumps(pod))
        await asked(server, f"{path}/{name}/status", "PATCH", json.dumps(pod))
    query = "status.phase!%3DSucceeded,status.phase!%3DFailed,metadata.namespace%3Ddemo"
    status, found = await asked(server, f"{path}?fieldSelector={query}")

    assert 200 == status, found
    assert ["a"] == [pod["metadata"]["name"] for pod in found["items"]]


async def test_without_a_known_token_nobody_is_let_in(server):
    for path in ("/api/v1/pods", "/as/guessed/api/v1/pods", "/as/", "/as//api/v1/pods"):
        assert 401 == (await asked(server, path))[0]


async def test_a_client_is_told_what_there_is(server):
    _, versions = await asked(server, f"/as/{TOKEN}/api?timeout=32s")
    _, groups = await asked(server, f"/as/{TOKEN}/apis")
    _, found = await asked(server, f"/as/{TOKEN}/api/v1")

    assert (["v1"], []) == (versions["versions"], groups["groups"])
    assert dict(KINDS) == {one["name"]: one["kind"] for one in found["resources"]}
    assert ["nodes", "namespaces"] == [
        one["name"] for one in found["resources"] if not one["namespaced"]
    ]
