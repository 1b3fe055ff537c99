"""What the API server model takes for an object, and in which form and portions it gives some."""

import pytest

from agent.sandbox.api_errors import Json
from tests.fakes.api_client import JSON_PATCH, NODE_A, POD_A, connected

pytestmark = pytest.mark.looptime(False)

PODS = "/api/v1/namespaces/default/pods"
EVENTS = "/api/v1/namespaces/default/events"
META = "application/json;as={};g=meta.k8s.io;v=v1,application/json"
ONE, MANY = META.format("PartialObjectMetadata"), META.format("PartialObjectMetadataList")


def a_pod(name: str, **metadata: object) -> Json:
    return {"metadata": {"name": name, **metadata}, "spec": {"containers": []}}


@pytest.mark.parametrize(
    ("path", "body", "code", "text"),
    [
        (PODS, a_pod("Bad_Name"), 422, 'Pod "Bad_Name" is invalid: metadata.name: Invalid value'),
        (PODS, {"spec": {}}, 422, 'Pod "" is invalid: metadata.name: Required value'),
        (PODS, a_pod("x", resourceVersion="5"), 500, "resourceVersion should not be set on"),
        (PODS, a_pod("x", annotations={"a": 5}), 400, "cannot unmarshal number into Go struct"),
        (PODS, a_pod("x", labels={"a": True}), 400, "cannot unmarshal bool into Go struct field"),
        (PODS, a_pod("x", annotations={"a": "x" * 262144}), 422, "may not be more than 262144 byt"),
        (
            PODS,
            {"kind": "Node", **a_pod("x")},
            400,
            'Node in version "v1" cannot be handled as a P',
        ),
        (PODS, b"[]", 400, "the object provided is unrecognized (must be of type Pod)"),
        (
            EVENTS,
            {"metadata": {"name": "e"}, "involvedObject": {"namespace": "team-a"}},
            422,
            'involvedObject.namespace: Invalid value: "team-a": does not match event.namespace',
        ),
    ],
)
async def test_what_is_no_object_is_not_created(
    path: str, body: object, code: int, text: str
) -> None:
    async with connected() as (server, client):
        before = server.store.version

        refused = await client.call("POST", path, body)

        assert code == refused.code
        assert text in refused.body["message"]
        assert before == server.store.version


@pytest.mark.parametrize(
    ("path", "patch", "code", "text"),
    [
        (NODE_A, {"metadata": {"annotations": {"a": []}}}, 422, "cannot unmarshal array into Go"),
        (NODE_A, {"metadata": {"annotations": {"a": "x" * 262144}}}, 422, "Too long: may not be"),
        (NODE_A, {"kind": "Pod"}, 422, ' "" is invalid: patch: Invalid value'),
        (NODE_A, {"metadata": {"name": None}}, 400, "undeterminable: name must be provided"),
        (POD_A, {"metadata": {"namespace": "b"}}, 400, "does not match the namespace sent on the"),
        (POD_A, {"metadata": {"resourceVersion": "x"}}, 500, 'strconv.ParseUint: parsing "x"'),
        (POD_A, {"spec": {"nodeName": "b"}}, 422, "pod updates may not change fields other than"),
    ],
)
async def test_a_patch_that_makes_no_object_is_refused(
    path: str, patch: Json, code: int, text: str
) -> None:
    async with connected() as (server, client):
        before = server.store.version

        refused = await client.patch(path, patch)

        assert code == refused.code
        assert text in refused.body["message"]
        assert before == server.store.version


async def test_an_object_is_replaced_but_for_its_status_and_what_the_server_gave() -> None:
    async with connected() as (server, client):
        before = server.store.get("nodes", "", "node-a")
        node = {"metadata": {"name": "node-a", "labels": {"l": "1"}}, "status": {"phase": "down"}}

        after = (await client.call("PUT", NODE_A, node)).body

        assert ({"l": "1"}, {"phase": "up"}) == (after["metadata"]["labels"], after["status"])
        assert before["metadata"]["uid"] == after["metadata"]["uid"]


@pytest.mark.parametrize(
    ("metadata", "code", "text"),
    [
        ({"name": "node-a", "resourceVersion": "1"}, 409, "the object has been modified; please"),
        ({"name": "node-a", "uid": "other"}, 409, "Key: /registry/minions/node-a, ResourceVersion"),
        ({"name": "node-b"}, 400, "does not match the name on the URL (node-a)"),
    ],
)
async def test_another_object_or_version_is_not_replaced(
    metadata: Json, code: int, text: str
) -> None:
    async with connected() as (_, client):
        refused = await client.call("PUT", NODE_A, {"metadata": metadata})

        assert code == refused.code
        assert text in refused.body["message"]


async def test_a_status_that_is_replaced_takes_no_spec_with_it() -> None:
    async with connected() as (_, client):
        node = {"metadata": {"name": "node-a"}, "status": {"a": 1}, "spec": {"unschedulable": True}}

        after = (await client.call("PUT", NODE_A + "/status", node)).body

        assert ({"a": 1}, False) == (after["status"], "spec" in after)


async def test_operations_that_are_none_are_not_decoded() -> None:
    async with connected() as (_, client):
        refused = await client.patch(NODE_A, ["remove"], JSON_PATCH)

        assert (400, "BadRequest") == refused.failure


async def test_a_watch_by_name_in_the_path_is_a_get() -> None:
    async with connected() as (_, client):
        assert "Pod" == (await client.get(POD_A + "?watch=true")).body["kind"]


async def test_what_has_no_grace_is_answered_with_a_status() -> None:
    async with connected() as (server, client):
        uid = server.store.get("nodes", "", "node-b")["metadata"]["uid"]

        answer = (await client.call("DELETE", "/api/v1/nodes/node-b")).body

        assert ("Success", uid) == (answer["status"], answer["details"]["uid"])


async def test_the_grace_of_a_deletion_may_stand_in_the_query() -> None:
    async with connected() as (_, client):
        marked = (await client.call("DELETE", POD_A + "?gracePeriodSeconds=7")).body

        assert 7 == marked["metadata"]["deletionGracePeriodSeconds"]


async def test_a_list_in_chunks_is_the_list_as_it_was() -> None:
    async with connected() as (server, client):
        whole = (await client.get(PODS)).body
        first = (await client.get(PODS + "?limit=2")).body
        server.store.create("pods", a_pod("zz"))
        await client.patch(PODS + "/free", {"metadata": {"labels": {"l": "1"}}})
        server.store.delete("pods", "default", "pb")
        token = first["metadata"]["continue"]

        second = (await client.get(f"{PODS}?limit=2&continue={token}")).body

        assert whole["items"] == first["items"] + second["items"]
        assert 1 == first["metadata"]["remainingItemCount"]
        assert whole["metadata"] == second["metadata"]


async def test_a_list_that_was_begun_too_long_ago_goes_on_with_what_is_there() -> None:
    async with connected() as (server, client):
        token = (await client.get(PODS + "?limit=1")).body["metadata"]["continue"]
        server.api.forget_history()

        gone = await client.get(f"{PODS}?limit=1&continue={token}")
        assert (410, "Expired") == gone.failure
        rest = await client.get(f"{PODS}?continue={gone.body['metadata']['continue']}")

        assert ["pa", "pb"] == [item["metadata"]["name"] for item in rest.body["items"]]
        both = await client.get(f"{PODS}?continue={token}&resourceVersion=1")
        assert (400, "BadRequest") == both.failure


async def test_metadata_alone_is_given_to_who_asks() -> None:
    async with connected() as (server, client):
        one = (await client.call("GET", NODE_A, accept=ONE)).body
        many = (await client.call("GET", "/api/v1/nodes", accept=MANY)).body

        held = server.store.get("nodes", "", "node-a")["metadata"]
        expected = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1"}
        assert expected | {"metadata": held} == one
        assert one == many["items"][0]


@pytest.mark.parametrize(
    ("path", "accept"), [(NODE_A, MANY), ("/api/v1/nodes", ONE), (NODE_A, "text/html")]
)
async def test_a_form_that_does_not_fit_is_not_acceptable(path: str, accept: str) -> None:
    async with connected() as (_, client):
        refused = await client.call("GET", path, accept=accept)

        assert (406, "NotAcceptable") == refused.failure


async def test_a_form_that_is_not_known_is_passed_over_for_the_next() -> None:
    async with connected() as (_, client):
        accept = "application/json;as=Table;g=meta.k8s.io;v=v1, application/json"

        assert "Node" == (await client.call("GET", NODE_A, accept=accept)).body["kind"]


async def test_a_long_answer_is_packed() -> None:
    async with connected() as (server, client):
        marks = {"metadata": {"annotations": {"a": "x" * 140_000}}}
        await client.patch(NODE_A, marks)

        answer = await client.get(NODE_A)

        assert "gzip" == answer.headers["Content-Encoding"]
        assert server.store.get("nodes", "", "node-a") == answer.body
        assert "Content-Encoding" not in (await client.get(POD_A)).headers
