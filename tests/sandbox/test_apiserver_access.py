"""Who may do what, in the words of the real server."""

import pytest

from tests.fakes.api_client import JSON_PATCH, MERGE, NODE_A, POD_A, connected, served

pytestmark = pytest.mark.looptime(False)

MARK = {"metadata": {"annotations": {"a": "1"}}}
NODE_B = "/api/v1/nodes/node-b"
POD_B = "/api/v1/namespaces/default/pods/pb"
EVENTS = "/api/v1/namespaces/default/events"
PODS = "/api/v1/namespaces/default/pods"
NODES = "/api/v1/nodes"
NODE_B_LISTED = "/api/v1/nodes?fieldSelector=metadata.name%3Dnode-b"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
RESTRICTED = "node-restriction.kubernetes.io/x"
LABEL = {"metadata": {"labels": {RESTRICTED: "1"}}}
TAINT = {"spec": {"taints": [{"key": "k", "effect": "NoSchedule"}]}}
MIRROR = {"metadata": {"name": "x", "annotations": {"kubernetes.io/config.mirror": "x"}}}
OWN_PODS = "/api/v1/pods?fieldSelector=spec.nodeName%3Dnode-a"

ALLOWED_TO_A_NODE = [
    ("PATCH", NODE_A, MARK),
    ("PATCH", POD_A + "/status", MARK),
    ("GET", NODE_A, None),
    ("GET", "/api/v1/nodes?fieldSelector=metadata.name%3Dnode-a", None),
    ("GET", POD_A, None),
    ("GET", OWN_PODS, None),
    ("DELETE", POD_A, None),
    ("POST", EVENTS, {"metadata": {"name": "e"}}),
]
REFUSED_TO_A_NODE = [
    ("PATCH", NODE_B, MARK, 'node "node-a" is not allowed to modify node "node-b"'),
    ("PATCH", POD_A, MARK, 'User "system:node:node-a" cannot patch resource "pods"'),
    (
        "PATCH",
        POD_B + "/status",
        MARK,
        "can only update pod status for pods with spec.nodeName set to itself",
    ),
    ("GET", NODE_B, None, "cannot read 'node-b', only its own Node object"),
    ("GET", "/api/v1/nodes", None, "cannot read all nodes, only its own Node object"),
    ("GET", NODE_B_LISTED, None, 'nodes "node-b" is forbidden'),
    ("GET", POD_B + "x", None, "no relationship found between node 'node-a' and this object"),
    ("GET", POD_B, None, "no relationship found between node 'node-a' and this object"),
    ("GET", "/api/v1/pods", None, "can only list/watch pods with spec.nodeName"),
    ("DELETE", POD_B, None, "can only delete pods with spec.nodeName set to itself"),
    ("POST", POD_A + "/binding", {"target": {"name": "node-a"}}, "cannot create"),
    ("POST", PODS, {"metadata": {"name": "x"}}, 'node "node-a" can only create mirror pods'),
    ("POST", PODS, MIRROR, 'node "node-a" can only create pods with an owner reference'),
    ("POST", NODES, {"metadata": {"name": "x"}}, 'is not allowed to modify node "x"'),
    ("PATCH", POD_A + "/status", LABEL, 'node "node-a" cannot update labels through pod status'),
    ("PATCH", NODE_A, TAINT, 'nodes "node-a" is forbidden: node "node-a" is not allowed to modify'),
    ("PATCH", NODE_A, LABEL, f"is not allowed to modify labels: {RESTRICTED}"),
    ("GET", "/api/v1/secrets", None, 'cannot list resource "secrets"'),
    ("DELETE", NODE_A, None, 'cannot delete resource "nodes"'),
    ("GET", EVENTS, None, 'cannot list resource "events"'),
]


@pytest.mark.parametrize(("method", "path", "body"), ALLOWED_TO_A_NODE)
async def test_a_node_may_do_what_node_restriction_leaves_it(
    method: str, path: str, body: object
) -> None:
    async with connected("t-node") as (_, client):
        assert (await client.call(method, path, body, MERGE)).code in (200, 201)


@pytest.mark.parametrize(("method", "path", "body", "text"), REFUSED_TO_A_NODE)
async def test_a_node_is_refused_the_rest(method: str, path: str, body: object, text: str) -> None:
    async with connected("t-node") as (server, client):
        before = server.store.version

        answer = await client.call(method, path, body, MERGE)

        assert (403, "Forbidden") == answer.failure
        assert text in answer.body["message"]
        assert before == server.store.version


async def test_a_node_may_release_the_lock_of_its_own_node() -> None:
    patch = [{"op": "test", "path": "/metadata/name", "value": "node-a"}]
    async with connected("t-node") as (_, client):
        assert 200 == (await client.patch(NODE_A, patch, JSON_PATCH)).code


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("PATCH", NODE_B, 200),
        ("PATCH", POD_B + "/status", 200),
        ("PATCH", POD_B, 403),
        ("GET", OWN_PODS, 200),
        ("DELETE", POD_A, 403),
        ("GET", NODE_A, 200),
        ("GET", NODES, 403),
        ("GET", POD_A, 200),
        ("GET", "/api/v1/secrets", 403),
    ],
)
async def test_a_service_account_has_the_rights_of_its_role(
    method: str, path: str, code: int
) -> None:
    body = MARK if method == "PATCH" else None
    async with connected("t-account") as (_, client):
        assert code == (await client.call(method, path, body, MERGE)).code


async def test_a_stranger_may_do_nothing() -> None:
    async with connected("t-stranger") as (_, client):
        answer = await client.get(POD_A)

        expected = (
            'pods "pa" is forbidden: User "jane" cannot get resource "pods" in API group "" '
            'in the namespace "default"'
        )
        assert (403, expected) == (answer.code, answer.body["message"])


@pytest.mark.parametrize("token", ["", "t-unknown"])
async def test_an_unknown_token_is_unauthorized(token: str) -> None:
    async with connected(token) as (_, client):
        assert (401, "Unauthorized") == (await client.get(POD_A)).failure


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


def review(verb: str, resource: str, **more: object) -> dict[str, object]:
    return {"spec": {"resourceAttributes": {"verb": verb, "resource": resource, **more}}}


@pytest.mark.parametrize(
    ("asked", "allowed"),
    [
        (review("patch", "nodes", name="node-b"), True),  # the refusal is admission's
        (review("get", "nodes", name="node-b"), False),
        (review("patch", "pods", subresource="status"), True),
        (review("list", "pods"), False),
        (review("list", "pods", fieldSelector={"rawSelector": "spec.nodeName=node-a"}), True),
    ],
)
async def test_a_node_that_asks_is_told_what_it_may(
    asked: dict[str, object],
    allowed: bool,  # noqa: FBT001 -- a row of the table
) -> None:
    async with connected("t-node") as (_, client):
        answer = await client.call("POST", REVIEWS, asked)

        assert (201, allowed) == (answer.code, answer.body["status"]["allowed"])


@pytest.mark.parametrize("body", [b"{", {}, {"spec": {"resourceAttributes": []}}])
async def test_a_review_of_nothing_is_a_bad_request(body: object) -> None:
    async with connected("t-node") as (_, client):
        assert (400, "BadRequest") == (await client.call("POST", REVIEWS, body)).failure
