"""What the API server model does that no test compares with the original, and its faults.

`tests/peers/test_apiserver_*.py` ask the model and the original the same.
"""

import aiohttp
import pytest

from agent.sandbox.api_errors import Json
from agent.sandbox.apiserver import BODY_LIMIT, ApiServerModel
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.webhook import admit_pod
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
