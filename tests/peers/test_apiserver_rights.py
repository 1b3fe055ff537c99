"""The API server model grants and refuses as kube-apiserver does: a node, and the agent's account.

The node's rules are those of the Node authorizer; the account's are the ClusterRole of deploy/,
applied to the real server.
"""

import pytest

from tests.peers.lab.api import JSON_PATCH
from tests.peers.lab.identities import NODE
from tests.peers.lab.servers import (
    EVENTS,
    FORBIDDEN,
    INVALID,
    NODE_PATH,
    NODES,
    NOT_FOUND,
    OTHER_NODE,
    OTHER_POD,
    OWN_POD,
    PODS,
    Server,
    plain_pod,
)

MARK = {"metadata": {"annotations": {"seen": "1"}}}
BINDING = {"metadata": {"name": OWN_POD}, "target": {"kind": "Node", "name": NODE}}
OTHER_PATH, POD, OTHER = f"{NODES}/{OTHER_NODE}", f"{PODS}/{OWN_POD}", f"{PODS}/{OTHER_POD}"
OWN_PODS = f"/api/v1/pods?fieldSelector=spec.nodeName%3D{NODE}"
MIRROR = {"kubernetes.io/config.mirror": "x"}
NODE_REFUSED = [
    ("PATCH", POD, MARK),
    ("GET", OTHER_PATH, None),
    ("GET", NODES, None),
    ("GET", f"{NODES}?watch=1&fieldSelector=metadata.name%3D{OTHER_NODE}", None),
    ("GET", OTHER, None),
    ("GET", f"{PODS}/none", None),
    ("GET", "/api/v1/pods", None),
    ("GET", PODS, None),
    ("GET", f"/api/v1/pods?watch=1&fieldSelector=spec.nodeName%3D{OTHER_NODE}", None),
    ("DELETE", OTHER, None),
    ("POST", POD + "/binding", BINDING),
    ("POST", PODS, plain_pod("mine", NODE)),
    ("POST", PODS, plain_pod("mine", NODE, annotations=MIRROR)),
    ("POST", NODES, {"metadata": {"name": "node-c"}}),
    ("DELETE", NODE_PATH, None),
    ("GET", EVENTS, None),
    ("GET", EVENTS + "/none", None),
    ("DELETE", EVENTS + "/none", None),
]
ACCOUNT_REFUSED = [
    ("GET", NODES),
    ("GET", f"{NODES}?fieldSelector=metadata.name%3D{NODE}"),
    ("PATCH", NODE_PATH + "/status"),
    ("PUT", NODE_PATH),
    ("DELETE", NODE_PATH),
    ("PATCH", POD),
    ("PUT", POD + "/status"),
    ("DELETE", POD),
    ("POST", PODS),
    ("POST", POD + "/binding"),
    ("GET", EVENTS),
    ("GET", EVENTS + "/none"),
    ("GET", "/api/v1/secrets"),
    ("GET", "/api/v1/namespaces/default/secrets"),
    ("GET", "/api/v1/namespaces/default/secrets/x"),
]


@pytest.mark.parametrize(("method", "path", "body"), NODE_REFUSED)
async def test_a_node_is_refused_what_is_not_its_own(
    server: Server, method: str, path: str, body: object
) -> None:
    assert FORBIDDEN == await server.node.refused(method, path, body)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PATCH", NODE_PATH, MARK),
        ("PATCH", NODE_PATH + "/status", MARK),
        ("PATCH", NODE_PATH, {"metadata": {"labels": {"free": "1"}}}),
        ("PATCH", POD + "/status", MARK),
        ("GET", NODE_PATH, None),
        ("GET", f"{NODES}?fieldSelector=metadata.name%3D{NODE}", None),
        ("GET", POD, None),
        ("GET", OWN_PODS, None),
        ("GET", f"{PODS}?fieldSelector=spec.nodeName%3D{NODE}", None),
    ],
)
async def test_a_node_may_do_what_is_its_own(
    server: Server, method: str, path: str, body: object
) -> None:
    assert 200 == (await server.node.ask(method, path, body)).code


async def test_a_pod_that_is_not_there_has_no_status(server: Server) -> None:
    assert NOT_FOUND == await server.node.refused("PATCH", f"{PODS}/none/status", MARK)


async def test_a_node_releases_a_lock_only_if_it_knows_its_value(server: Server) -> None:
    key, path = "hami.io/mutex.lock", "/metadata/annotations/hami.io~1mutex.lock"
    await server.admin.have("PATCH", NODE_PATH, {"metadata": {"annotations": {key: "mine"}}})

    def release(value: str) -> list[dict[str, str]]:
        test = {"op": "test", "path": path, "value": value}
        return [test, {"op": "remove", "path": path}]

    wrong = release("yours")
    assert INVALID == await server.node.refused("PATCH", NODE_PATH, wrong, kind=JSON_PATCH)
    held = await server.node.have("GET", NODE_PATH)
    assert "mine" == held["metadata"]["annotations"][key]

    right = release("mine")
    left = await server.node.have("PATCH", NODE_PATH, right, kind=JSON_PATCH)
    assert key not in (left["metadata"].get("annotations") or {})
    assert INVALID == await server.node.refused("PATCH", NODE_PATH, right, kind=JSON_PATCH)


@pytest.mark.parametrize(("method", "path"), ACCOUNT_REFUSED)
async def test_the_account_is_refused_what_deploy_does_not_grant(
    server: Server, method: str, path: str
) -> None:
    body = {"metadata": {"name": "x"}} if method != "GET" else None

    assert FORBIDDEN == await server.account.refused(method, path, body)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PATCH", NODE_PATH, MARK),
        ("PATCH", OTHER_PATH, MARK),
        ("PATCH", POD + "/status", MARK),
        ("PATCH", OTHER + "/status", MARK),
        ("PATCH", POD + "/status", {"metadata": {"labels": {"account": "may"}}}),
        ("GET", NODE_PATH, None),
        ("GET", POD, None),
        ("GET", OWN_PODS, None),
        ("GET", "/api/v1/pods", None),
    ],
)
async def test_the_account_may_do_what_deploy_grants(
    server: Server, method: str, path: str, body: object
) -> None:
    assert 200 == (await server.account.ask(method, path, body)).code


async def test_node_and_account_write_events_and_count_them_on(server: Server) -> None:
    about = {"kind": "Pod", "name": OWN_POD, "namespace": "default"}
    for name, user in (("by-node", server.node), ("by-account", server.account)):
        event = {"metadata": {"name": name}, "involvedObject": about, "count": 1}
        await user.have("POST", EVENTS, event)
        counted = await user.have("PATCH", f"{EVENTS}/{name}", {"count": 2})
        assert 2 == counted["count"]


async def test_node_and_account_watch_the_node(server: Server) -> None:
    for user in (server.node, server.account):
        async with user.watch(NODES, fieldSelector=f"metadata.name={NODE}") as frames:
            first = await frames.next()
            assert first is not None
            assert ("ADDED", NODE) == (first["type"], first["object"]["metadata"]["name"])
