"""What the API server model does that no test compares with the original, and its faults.

`tests/peers/test_apiserver_*.py` ask the model and the original the same.
"""

import asyncio
import json

import aiohttp
import pytest

from agent.sandbox.apiserver import BODY_LIMIT, ApiServerModel
from agent.sandbox.apiserver_requests import json_patch, strategic_merge_patch
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.webhook import admit_pod
from agent.sandbox.store import KINDS, BadRequestError, GoneError, InvalidError, Json, ObjectStore
from tests.fakes.chance import Seeded
from tests.fakes.clock import ManualClock
from tests.peers.lab.api import STRATEGIC
from tests.peers.lab.identities import NODE_USER
from tests.peers.lab.servers import (
    BAD_REQUEST,
    FREE_POD,
    NODE_PATH,
    NODES,
    NOT_FOUND,
    OTHER_NODE,
    OWN_POD,
    PODS,
    Refusal,
    Server,
    User,
    marks,
    model_server,
    plain_pod,
    version,
)

OWN = f"{PODS}/{OWN_POD}"
OTHER = f"{NODES}/{OTHER_NODE}"
WATCH = "/api/v1/pods"
MINE = {"fieldSelector": "spec.nodeName=node-a"}
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


@pytest.fixture
async def server():
    async with model_server() as made:
        yield made


@pytest.mark.looptime(False)
@pytest.mark.parametrize(
    ("method", "path", "body", "kind", "refusal"),
    [
        ("PUT", "/api/v1/pods", None, None, NOT_FOUND),
        ("POST", "/api/v1/pods", None, None, NOT_FOUND),
        ("GET", f"{OWN}/binding", None, None, NOT_FOUND),
        ("GET", "/api/v1/pods?watch=1&labelSelector=a%3Db", None, None, BAD_REQUEST),
        ("GET", "/api/v1/pods?labelSelector=%28", None, None, BAD_REQUEST),
        ("GET", "/api/v1/pods?watch=1&resourceVersion=x", None, None, BAD_REQUEST),
        ("POST", f"{PODS}/{FREE_POD}/binding", {"target": {}}, None, BAD_REQUEST),
        ("POST", f"{PODS}/{FREE_POD}/binding", {"target": {"name": "n"}}, None, BAD_REQUEST),
        ("PATCH", NODE_PATH, b"{", None, BAD_REQUEST),
        ("PATCH", NODE_PATH, b" " * (BODY_LIMIT + 1), None, BAD_REQUEST),
        ("PATCH", NODE_PATH, {}, "text/plain", BAD_REQUEST),
        ("PATCH", NODE_PATH, {"$patch": "replace"}, STRATEGIC, BAD_REQUEST),
        ("POST", REVIEWS, b"{", None, BAD_REQUEST),
        ("POST", REVIEWS, {}, None, BAD_REQUEST),
        ("POST", REVIEWS, {"spec": {"resourceAttributes": []}}, None, BAD_REQUEST),
    ],
)
async def test_what_is_not_served_or_cannot_be_read_is_refused(
    server: Server, method: str, path: str, body: object, kind: str | None, refusal: Refusal
) -> None:
    answer = await server.admin.ask(method, path, body, kind=kind)

    assert refusal == answer.refusal


@pytest.mark.looptime(False)
async def test_new_pods_pass_the_webhook(server: Server) -> None:
    assert server.model is not None
    webhook = ApiServerModel(
        server.model.store, {"t": "admin"}, lambda pod: admit_pod(pod, SchedulerSettings())
    )
    await webhook.start()
    user = User(webhook.url, "t", None)
    container: Json = {"name": "c", "resources": {"limits": {"nvidia.com/gpu": 1}}}
    pod = {"metadata": {"name": "new"}, "spec": {"containers": [container]}}
    created = await user.have("POST", PODS, pod)
    container["securityContext"] = {"privileged": True}
    refused = await user.refused("POST", PODS, pod)
    await user.close()
    await webhook.stop()

    assert "hami-scheduler" == created["spec"]["schedulerName"]
    assert (403, "Forbidden") == refused


@pytest.mark.looptime(False)
async def test_every_request_is_recorded_and_counted_for_its_user(server: Server) -> None:
    assert server.model is not None
    journal = server.model.journal
    journal.calls.clear()
    await server.node.have("GET", NODE_PATH)
    denied = await server.node.ask("PATCH", OTHER, marks(a="1"))
    await server.admin.have("PATCH", f"{OWN}/status", marks(a="1"))

    assert 'node "node-a" is not allowed to modify node "node-b"' in denied.body["message"]
    assert [
        (NODE_USER, "get", "nodes", "", "node-a", 200),
        (NODE_USER, "patch", "nodes", "", OTHER_NODE, 403),
        ("admin", "patch", "pods", "status", OWN_POD, 200),
    ] == [(c.user, c.verb, c.resource, c.subresource, c.name, c.code) for c in journal.calls]
    assert 1 == journal.counts["admin", "patch", "pods"]
    found = (journal.reads(NODE_USER), journal.writes(NODE_USER), journal.watches(NODE_USER))
    assert (1, 1, 0) == found


# Watches, and the faults that tests switch on.


@pytest.mark.looptime(False)
async def test_ended_watches_get_a_bookmark_and_can_be_continued(server: Server) -> None:
    assert server.model is not None
    now = {"resourceVersion": str(server.model.store.version), "allowWatchBookmarks": "true"}
    async with server.admin.watch(WATCH, **MINE, **now) as frames:
        await server.admin.have("PATCH", OTHER, marks(a="1"))
        server.model.end_watches()
        (seen,) = await frames.rest()
    assert ("BOOKMARK", "Pod") == (seen["type"], seen["object"]["kind"])
    assert str(server.model.store.version) == version(seen["object"])

    server.model.store.bind("default", FREE_POD, "node-a")
    since = {"resourceVersion": version(seen["object"])}
    async with server.admin.watch(WATCH, **MINE, **since) as frames:
        (added,) = await frames.take(1)
    assert "ADDED" == added["type"]


@pytest.mark.looptime(False)
async def test_a_watch_that_falls_behind_the_history_is_told_so(server: Server) -> None:
    assert server.model is not None
    store = server.model.store

    def count(stored: Json) -> Json:
        stored["metadata"]["annotations"] = {"n": str(store.version)}
        return stored

    async with server.admin.watch(WATCH, resourceVersion=str(store.version), **MINE) as frames:
        for _ in range(1100):
            store.update("pods", "default", "pb", count)
        seen = await frames.rest()

    assert [("ERROR", 410)] == [(frame["type"], frame["object"]["code"]) for frame in seen]


async def test_a_watch_gets_a_bookmark_each_minute_and_two_seconds_before_its_end(
    server: Server,
) -> None:
    """On virtual time: a minute of silence costs nothing."""
    assert server.model is not None
    loop = asyncio.get_running_loop()
    query = {"watch": "1", "allowWatchBookmarks": "1", "timeoutSeconds": "105", **MINE}
    query |= {"resourceVersion": str(server.model.store.version)}
    headers = {"Authorization": "Bearer t-admin"}
    async with (
        aiohttp.ClientSession(server.model.url, headers=headers) as session,
        session.get(WATCH, params=query) as answer,
    ):
        await server.admin.have("PATCH", OTHER, marks(a="1"))
        began = loop.time()
        seen = [(json.loads(line), loop.time() - began) async for line in answer.content]

    assert [("BOOKMARK", str(server.model.store.version))] * 2 == [
        (frame["type"], version(frame["object"])) for frame, _ in seen
    ]
    assert [60, 103] == [pytest.approx(at, abs=1.5) for _, at in seen]
    assert 105 == pytest.approx(loop.time() - began, abs=1.5)


@pytest.mark.looptime(False)
async def test_a_throttled_client_is_told_when_to_come_again(server: Server) -> None:
    assert server.model is not None
    server.model.throttle(2, retry_after=7)

    for _ in range(2):
        answer = await server.admin.ask("GET", NODE_PATH)
        assert (429, "TooManyRequests") == answer.refusal
        assert "7" == answer.headers["Retry-After"]
    await server.admin.have("GET", NODE_PATH)


@pytest.mark.looptime(False)
async def test_an_outage_cuts_watches_and_refuses_connections_until_it_ends(server: Server) -> None:
    assert server.model is not None
    url = server.model.url
    since = {"resourceVersion": str(server.model.store.version)}
    async with server.admin.watch(WATCH, **MINE, **since) as frames:
        await server.model.begin_outage()
        with pytest.raises(aiohttp.ClientError):
            await frames.next()
    with pytest.raises(aiohttp.ClientConnectionError):
        await server.admin.ask("GET", NODE_PATH)

    await server.model.end_outage()

    assert url == server.model.url
    await server.admin.have("GET", NODE_PATH)


# As kubectl uses it: a token in the path, and the kinds that there are.


@pytest.mark.looptime(False)
async def test_kubectl_finds_what_there_is_by_the_token_in_the_path(server: Server) -> None:
    assert server.model is not None
    table = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"
    user = User(server.model.url, "", None)

    async def get(path: str) -> Json:
        return await user.have("GET", f"/as/t-admin{path}", accept=table)

    for name, phase in (("a", "Running"), ("b", "Succeeded"), ("c", "Failed")):
        await user.have("POST", f"/as/t-admin{PODS}?fieldManager=k", plain_pod(name))
        status = {"status": {"phase": phase}}
        await user.have("PATCH", f"/as/t-admin{PODS}/{name}/status", status)
    unlike = "status.phase!%3DSucceeded,status.phase!%3DFailed,spec.nodeName%3D"
    found = await get(f"{PODS}?limit=500&fieldSelector={unlike}")
    versions, groups = await get("/api?timeout=32s"), await get("/apis")
    resources = (await get("/api/v1"))["resources"]
    refusals = [await user.refused("GET", path) for path in ("/as/x/api/v1/pods", "/as/")]
    await user.close()

    assert ["a", FREE_POD] == [pod["metadata"]["name"] for pod in found["items"]]
    assert (["v1"], []) == (versions["versions"], groups["groups"])
    assert dict(KINDS) == {one["name"]: one["kind"] for one in resources}
    assert ["nodes", "namespaces"] == [one["name"] for one in resources if not one["namespaced"]]
    assert [(401, "Unauthorized")] * 2 == refusals


# The object store by itself: what those who hold it in their process rely on.


def a_store(history: int = 100) -> ObjectStore:
    store = ObjectStore(ManualClock(), Seeded(), history)
    spec = {"nodeName": "n1", "terminationGracePeriodSeconds": 20}
    store.create("pods", {"metadata": {"name": "p"}, "spec": spec})
    return store


def test_what_was_read_does_not_change_and_what_the_server_gave_cannot_be_changed() -> None:
    store = a_store()
    created = store.get("pods", "default", "p")
    assert "2026-08-21T06:20:39Z" == created["metadata"]["creationTimestamp"]

    def fail(pod: Json) -> Json:
        pod["spec"]["half"] = True
        raise BadRequestError("no")

    with pytest.raises(BadRequestError):
        store.update("pods", "default", "p", fail)
    assert created == store.get("pods", "default", "p")
    labels = {"metadata": {"uid": "x", "labels": {"a": "b"}}}
    updated = store.update("pods", "default", "p", lambda pod: pod | labels)

    for key in ("name", "namespace", "uid", "creationTimestamp"):
        assert created["metadata"][key] == updated["metadata"][key]
    assert "labels" not in created["metadata"]


def test_a_pod_on_a_node_is_deleted_when_the_kubelet_says_so() -> None:
    store = a_store()

    marked = store.delete("pods", "default", "p")

    assert "2026-08-21T06:20:59Z" == marked["metadata"]["deletionTimestamp"]
    store.finalize("default", "p", uid=marked["metadata"]["uid"])
    assert [] == store.select("pods")


async def test_a_version_that_the_history_has_lost_is_gone_for_all_who_are_not_up_to_date() -> None:
    store = a_store(history=2)
    since = store.version
    for name in "abc":
        store.create("pods", {"metadata": {"name": name}, "spec": {}})
    with pytest.raises(GoneError, match="too old resource version: 2"):
        store.subscribe("pods", since)
    store.subscribe("pods", since + 1)

    current, since = store.subscribe("pods", store.version), store.version
    with pytest.raises(TimeoutError):  # who gives up its wait loses nothing
        async with asyncio.timeout(1):
            await anext(current)
    store.forget_history()
    with pytest.raises(GoneError):
        store.subscribe("pods", since)
    store.create("pods", {"metadata": {"name": "d"}, "spec": {}})
    assert "d" == (await anext(current)).object["metadata"]["name"]


# Patches beyond those that the original is asked for, too.


def test_a_strategic_patch_passes_over_an_order_and_wants_each_elements_key() -> None:
    target = {"conditions": [{"type": "A", "status": "True"}, {"type": "B", "status": "True"}]}
    patch = {
        "$setElementOrder/conditions": [{"type": "A"}, {"type": "B"}],
        "conditions": [{"type": "B", "status": "False"}],
        "args": [3],
    }

    merged = strategic_merge_patch(target | {"args": [1, 2]}, patch)

    states = [(entry["type"], entry["status"]) for entry in merged["conditions"]]
    assert ([("A", "True"), ("B", "False")], [3]) == (states, merged["args"])
    for unknown in ({"$retainKeys": ["a"]}, {"containers": [{"image": "x"}]}):
        with pytest.raises(BadRequestError):
            strategic_merge_patch({}, unknown)


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "add", "path": "/a/b", "value": 1},
        {"op": "add", "path": "/list/7/b", "value": 1},
        {"op": "remove", "path": "/list/0"},
        {"op": "remove", "path": ""},
        {"op": "move", "from": "/a", "path": "/b"},
        {"op": "add"},
        {},
    ],
)
def test_a_json_patch_reaches_members_of_maps_alone(operation: Json) -> None:
    target = {"a": "1", "list": [{"b": 1}]}
    added = {"op": "add", "path": "/list/0/c", "value": 4}
    assert [{"b": 1, "c": 4}] == json_patch(target, [added])["list"]

    with pytest.raises(InvalidError):
        json_patch(target, [added, operation])

    assert {"a": "1", "list": [{"b": 1}]} == target
