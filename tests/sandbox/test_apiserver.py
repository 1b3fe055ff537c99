"""The API server model over real HTTP: reads, writes, errors."""

import aiohttp
import pytest

from agent.sandbox.api_errors import Json
from agent.sandbox.apiserver import BODY_LIMIT, ApiServerModel
from agent.sandbox.scheduler.model import SchedulerSettings
from agent.sandbox.scheduler.webhook import admit_pod
from tests.fakes.api_client import (
    JSON_PATCH,
    MERGE,
    NODE_A,
    POD_A,
    STRATEGIC,
    Client,
    connected,
    served,
)

pytestmark = pytest.mark.looptime(False)


async def test_an_object_is_got_and_an_absent_one_is_not_found() -> None:
    async with connected() as (server, client):
        assert server.store.get("pods", "default", "pa") == (await client.get(POD_A)).body
        absent = await client.get("/api/v1/namespaces/default/pods/nobody")

        assert (404, "NotFound") == absent.failure
        assert 'pods "nobody" not found' == absent.body["message"]


async def test_a_list_has_the_version_from_which_to_watch() -> None:
    async with connected() as (server, client):
        found = (await client.get("/api/v1/pods?fieldSelector=spec.nodeName%3Dnode-a")).body

        assert "PodList" == found["kind"]
        assert str(server.store.version) == found["metadata"]["resourceVersion"]
        assert ["pa"] == [item["metadata"]["name"] for item in found["items"]]


async def test_version_and_readiness_are_served() -> None:
    async with connected() as (_, client):
        assert "v1.36.3" == (await client.get("/version")).body["gitVersion"]
        assert "ok" == (await client.get("/readyz")).body


@pytest.mark.parametrize(
    ("method", "path", "failure"),
    [
        ("GET", "/api/v1/secrets", (404, "NotFound")),
        ("GET", "/apis/apps/v1/deployments", (404, "NotFound")),
        ("GET", "/api/v1/pods/pa", (404, "NotFound")),
        ("GET", "/api/v1/namespaces/default/nodes", (404, "NotFound")),
        ("GET", POD_A + "/log", (404, "NotFound")),
        ("PUT", "/api/v1/pods", (405, "MethodNotAllowed")),
        ("PATCH", "/api/v1/pods", (405, "MethodNotAllowed")),
        ("POST", "/api/v1/pods", (405, "MethodNotAllowed")),
        ("GET", POD_A + "/binding", (405, "MethodNotAllowed")),
        ("GET", "/api/v1/pods?limit=x", (400, "BadRequest")),
        ("GET", "/api/v1/pods?continue=x", (400, "BadRequest")),
        ("GET", "/api/v1/pods?resourceVersion=x", (400, "BadRequest")),
        ("GET", "/api/v1/pods?resourceVersion=999", (504, "Timeout")),
        ("GET", POD_A + "?resourceVersion=999", (504, "Timeout")),
        ("GET", "/api/v1/pods?fieldSelector=spec.nodeName", (400, "BadRequest")),
        ("GET", "/api/v1/pods?watch=true&timeoutSeconds=x", (400, "BadRequest")),
        ("DELETE", POD_A + "/status", (405, "MethodNotAllowed")),
        ("GET", "/api/v1/pods?watch=1&labelSelector=a%3Db", (400, "BadRequest")),
        ("GET", "/api/v1/pods?labelSelector=%28", (400, "BadRequest")),
        ("GET", "/api/v1/pods?fieldSelector=spec.color!%3Dred", (400, "BadRequest")),
        ("GET", "/api/v1/pods?fieldSelector=spec.color%3Dred", (400, "BadRequest")),
    ],
)
async def test_what_is_not_served_is_refused(
    method: str, path: str, failure: tuple[int, str]
) -> None:
    async with connected() as (_, client):
        assert failure == (await client.call(method, path)).failure


async def test_a_merge_patch_of_a_node_keeps_its_status() -> None:
    patch = {"metadata": {"annotations": {"a": "1"}}, "status": {"phase": "down"}}
    async with connected() as (_, client):
        node = (await client.patch(NODE_A, patch)).body

        assert {"a": "1"} == node["metadata"]["annotations"]
        assert {"phase": "up"} == node["status"]


@pytest.mark.parametrize("kind", [MERGE, STRATEGIC])
async def test_a_status_patch_stores_annotations_and_keeps_the_spec(kind: str) -> None:
    patch = {
        "metadata": {"annotations": {"a": "1", "b": None}},
        "spec": {"nodeName": "elsewhere"},
        "status": {"phase": "Running"},
    }
    async with connected() as (_, client):
        pod = (await client.patch(POD_A + "/status", patch, kind)).body

        assert {"a": "1"} == pod["metadata"]["annotations"]
        assert "node-a" == pod["spec"]["nodeName"]
        assert "Running" == pod["status"]["phase"]


async def test_the_spec_of_a_pod_cannot_be_patched() -> None:
    async with connected() as (_, client):
        refused = await client.patch(POD_A, {"spec": {"nodeName": "node-b"}})

        assert (422, "Invalid") == refused.failure


@pytest.mark.parametrize(
    ("held", "failure"),
    [({"uid": "other"}, (422, "Invalid")), ({"resourceVersion": "1"}, (409, "Conflict"))],
    ids=["uid", "version"],
)
async def test_a_precondition_in_a_patch_that_does_not_hold_is_refused(
    held: dict[str, str], failure: tuple[int, str]
) -> None:
    patch = {"metadata": held | {"annotations": {"a": "1"}}}
    async with connected() as (server, client):
        assert failure == (await client.patch(POD_A + "/status", patch)).failure
        assert "annotations" not in server.store.get("pods", "default", "pa")["metadata"]


async def test_a_lock_is_removed_only_by_who_knows_its_value() -> None:
    path = "/metadata/annotations/hami.io~1mutex.lock"
    async with connected() as (server, client):
        await client.patch(NODE_A, {"metadata": {"annotations": {"hami.io/mutex.lock": "mine"}}})

        wrong = [{"op": "test", "path": path, "value": "yours"}, {"op": "remove", "path": path}]
        assert (422, "Invalid") == (await client.patch(NODE_A, wrong, JSON_PATCH)).failure
        marks = server.store.get("nodes", "", "node-a")["metadata"]["annotations"]
        assert {"hami.io/mutex.lock": "mine"} == marks

        right = [{"op": "test", "path": path, "value": "mine"}, {"op": "remove", "path": path}]
        assert {} == (await client.patch(NODE_A, right, JSON_PATCH)).body["metadata"]["annotations"]
        assert (422, "Invalid") == (await client.patch(NODE_A, right, JSON_PATCH)).failure


@pytest.mark.parametrize(
    ("body", "kind", "failure"),
    [
        ({"a": 1}, "application/json", (415, "UnsupportedMediaType")),
        ({"a": 1}, "application/apply-patch+yaml", (415, "UnsupportedMediaType")),
        (b"{", MERGE, (400, "BadRequest")),
        (b"[]", MERGE, (400, "BadRequest")),
        ({"op": "add"}, JSON_PATCH, (400, "BadRequest")),
        ({"metadata": {"name": "other"}}, MERGE, (400, "BadRequest")),
        (b" " * (BODY_LIMIT + 1), MERGE, (413, "RequestEntityTooLarge")),
    ],
)
async def test_a_bad_patch_is_refused(body: object, kind: str, failure: tuple[int, str]) -> None:
    async with connected() as (server, client):
        before = server.store.version

        assert failure == (await client.patch(NODE_A, body, kind)).failure
        assert before == server.store.version


async def test_a_pod_is_created_bound_and_deleted() -> None:
    pods = "/api/v1/namespaces/default/pods"
    async with connected() as (server, client):
        pod = {"metadata": {"name": "new"}, "spec": {"containers": []}}
        created = await client.call("POST", pods, pod)
        assert (201, "Pending") == (created.code, created.body["status"]["phase"])
        second = await client.call("POST", pods, pod)
        assert (409, "AlreadyExists") == second.failure
        assert 'pods "new" already exists' == second.body["message"]

        notes = {"annotations": {"a": "b"}}
        binding = {"metadata": {"name": "new"} | notes, "target": {"name": "node-a"}}
        assert 201 == (await client.call("POST", pods + "/new/binding", binding)).code
        bound = (await client.get(pods + "/new")).body
        assert ("node-a", {"a": "b"}) == (
            bound["spec"]["nodeName"],
            bound["metadata"]["annotations"],
        )
        assert ["True"] == [one["status"] for one in bound["status"]["conditions"]]
        again = await client.call("POST", pods + "/new/binding", binding)
        assert (409, "Conflict") == again.failure
        assert again.body["message"].endswith('pod new is already assigned to node "node-a"')

        marked = await client.call("DELETE", pods + "/new", {"gracePeriodSeconds": 5})
        assert 5 == marked.body["metadata"]["deletionGracePeriodSeconds"]
        server.store.finalize("default", "new")
        for verb, body in (("GET", None), ("DELETE", None), ("PUT", created.body)):
            assert 404 == (await client.call(verb, pods + "/new", body)).code
        assert 404 == (await client.patch(pods + "/new", {})).code


async def test_a_deletion_with_the_wrong_uid_is_a_conflict() -> None:
    options = {"preconditions": {"uid": "other"}}
    async with connected() as (_, client):
        assert (409, "Conflict") == (await client.call("DELETE", POD_A, options)).failure


async def test_an_event_is_created_and_counted_on() -> None:
    events = "/api/v1/namespaces/default/events"
    async with connected() as (_, client):
        created = await client.call("POST", events, {"metadata": {"generateName": "pa."}})
        name = created.body["metadata"]["name"]
        counted = await client.patch(f"{events}/{name}", {"count": 2})

        assert 2 == counted.body["count"]


async def test_an_object_of_another_namespace_is_refused() -> None:
    pod = {"metadata": {"name": "x", "namespace": "other"}, "spec": {}}
    async with connected() as (_, client):
        refused = await client.call("POST", "/api/v1/namespaces/default/pods", pod)

        assert (400, "BadRequest") == refused.failure


@pytest.mark.parametrize(
    ("binding", "code", "text"),
    [
        ({"target": {"name": "node-a"}}, 400, "name in URL does not match name in Binding object"),
        ({"metadata": {"name": "free"}}, 500, "target.name: Required value"),
        (
            {"metadata": {"name": "free"}, "target": {"kind": "Pod", "name": "x"}},
            500,
            'target.kind: Unsupported value: "Pod": supported values: "Node", "<empty>"',
        ),
    ],
)
async def test_a_binding_that_is_wrong_is_refused(binding: Json, code: int, text: str) -> None:
    async with connected() as (_, client):
        free = "/api/v1/namespaces/default/pods/free/binding"
        refused = await client.call("POST", free, binding)

        assert (code, text) == (refused.code, refused.body["message"])
        assert ("reason" in refused.body) == (code == 400)


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
