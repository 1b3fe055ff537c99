"""The API server model grants and refuses as kube-apiserver does: a node, and the agent's account.

The node's rules are those of the Node authorizer and NodeRestriction; the account's are the
ClusterRole of deploy/, applied to the real server.
"""

import pytest

from tests.peers.lab.api import JSON_PATCH
from tests.peers.lab.cluster import ACCOUNT
from tests.peers.lab.identities import NODE, NODE_USER
from tests.peers.lab.servers import (
    EVENTS,
    NODE_PATH,
    NODES,
    OTHER_NODE,
    OTHER_POD,
    OWN_POD,
    PODS,
    Server,
    already_exists,
    invalid,
    not_found,
    plain_pod,
)

MARK = {"metadata": {"annotations": {"seen": "1"}}}
LABEL = {"metadata": {"labels": {"node-restriction.kubernetes.io/x": "1"}}}
BINDING = {"metadata": {"name": OWN_POD}, "target": {"kind": "Node", "name": NODE}}
OTHER_PATH, POD, OTHER = f"{NODES}/{OTHER_NODE}", f"{PODS}/{OWN_POD}", f"{PODS}/{OTHER_POD}"
OWN_PODS = f"/api/v1/pods?fieldSelector=spec.nodeName%3D{NODE}"
MIRROR = {"kubernetes.io/config.mirror": "x"}
HERE, EVERYWHERE = 'in the namespace "default"', "at the cluster scope"
ONLY_OWN = "only its own Node object"
ONLY_SELECTED = "can only list/watch pods with spec.nodeName field selector"


def cannot(user: str, verb: str, resource: str, name: str, where: str, why: str = "") -> str:
    subject = f'{resource.partition("/")[0]} "{name}"' if name else resource
    ending = f": {why}" if why else ""
    return (
        f'{subject} is forbidden: User "{user}" cannot {verb} resource "{resource}" '
        f'in API group "" {where}{ending}'
    )


def node_cannot(verb: str, resource: str, name: str, where: str, why: str = "") -> str:
    return cannot(NODE_USER, verb, resource, name, where, why)


NODE_REFUSED = [
    (
        "PATCH",
        OTHER_PATH,
        MARK,
        'nodes "node-b" is forbidden: node "node-a" is not allowed to modify node "node-b"',
    ),
    (
        "PATCH",
        OTHER_PATH + "/status",
        MARK,
        'nodes "node-b" is forbidden: node "node-a" is not allowed to modify node "node-b"',
    ),
    ("PATCH", POD, MARK, node_cannot("patch", "pods", OWN_POD, HERE)),
    (
        "PATCH",
        OTHER + "/status",
        MARK,
        (
            'pods "pb" is forbidden: node "node-a" can only update pod status for pods with '
            "spec.nodeName set to itself"
        ),
    ),
    (
        "PATCH",
        POD + "/status",
        LABEL,
        'pods "pa" is forbidden: node "node-a" cannot update labels through pod status',
    ),
    (
        "PATCH",
        NODE_PATH,
        LABEL,
        (
            'nodes "node-a" is forbidden: is not allowed to modify labels: '
            "node-restriction.kubernetes.io/x"
        ),
    ),
    (
        "PATCH",
        NODE_PATH,
        {"spec": {"taints": [{"key": "k", "effect": "NoSchedule"}]}},
        'nodes "node-a" is forbidden: node "node-a" is not allowed to modify taints',
    ),
    (
        "GET",
        OTHER_PATH,
        None,
        node_cannot(
            "get",
            "nodes",
            OTHER_NODE,
            EVERYWHERE,
            f"node 'node-a' cannot read 'node-b', {ONLY_OWN}",
        ),
    ),
    (
        "GET",
        NODES,
        None,
        node_cannot(
            "list", "nodes", "", EVERYWHERE, f"node 'node-a' cannot read all nodes, {ONLY_OWN}"
        ),
    ),
    (
        "GET",
        f"{NODES}?watch=1&fieldSelector=metadata.name%3D{OTHER_NODE}",
        None,
        node_cannot(
            "watch",
            "nodes",
            OTHER_NODE,
            EVERYWHERE,
            f"node 'node-a' cannot read 'node-b', {ONLY_OWN}",
        ),
    ),
    *(
        (
            "GET",
            f"{PODS}/{name}",
            None,
            node_cannot(
                "get",
                "pods",
                name,
                HERE,
                "no relationship found between node 'node-a' and this object",
            ),
        )
        for name in (OTHER_POD, "none")
    ),
    (
        "GET",
        "/api/v1/pods",
        None,
        node_cannot("list", "pods", "", EVERYWHERE, ONLY_SELECTED),
    ),
    ("GET", PODS, None, node_cannot("list", "pods", "", HERE, ONLY_SELECTED)),
    (
        "GET",
        f"/api/v1/pods?watch=1&fieldSelector=spec.nodeName%3D{OTHER_NODE}",
        None,
        node_cannot("watch", "pods", "", EVERYWHERE, ONLY_SELECTED),
    ),
    (
        "DELETE",
        OTHER,
        None,
        (
            'pods "pb" is forbidden: node "node-a" can only delete pods with spec.nodeName set to '
            "itself"
        ),
    ),
    ("POST", POD + "/binding", BINDING, node_cannot("create", "pods/binding", OWN_POD, HERE)),
    (
        "POST",
        PODS,
        plain_pod("mine", NODE),
        (
            'pods "mine" is forbidden: pod does not have "kubernetes.io/config.mirror" annotation, '
            'node "node-a" can only create mirror pods'
        ),
    ),
    (
        "POST",
        PODS,
        plain_pod("mine", NODE, annotations=MIRROR),
        (
            'pods "mine" is forbidden: node "node-a" can only create pods with an owner reference '
            "set to itself"
        ),
    ),
    (
        "POST",
        NODES,
        {"metadata": {"name": "node-c"}},
        'nodes "node-c" is forbidden: node "node-a" is not allowed to modify node "node-c"',
    ),
    ("DELETE", NODE_PATH, None, node_cannot("delete", "nodes", NODE, EVERYWHERE)),
    ("GET", EVENTS, None, node_cannot("list", "events", "", HERE)),
    ("GET", EVENTS + "/none", None, node_cannot("get", "events", "none", HERE)),
    ("DELETE", EVENTS + "/none", None, node_cannot("delete", "events", "none", HERE)),
]
ACCOUNT_REFUSED = [
    ("GET", NODES, ("list", "nodes", "", EVERYWHERE)),
    ("GET", f"{NODES}?fieldSelector=metadata.name%3D{NODE}", ("list", "nodes", NODE, EVERYWHERE)),
    ("PATCH", NODE_PATH + "/status", ("patch", "nodes/status", NODE, EVERYWHERE)),
    ("PUT", NODE_PATH, ("update", "nodes", NODE, EVERYWHERE)),
    ("DELETE", NODE_PATH, ("delete", "nodes", NODE, EVERYWHERE)),
    ("PATCH", POD, ("patch", "pods", OWN_POD, HERE)),
    ("PUT", POD + "/status", ("update", "pods/status", OWN_POD, HERE)),
    ("DELETE", POD, ("delete", "pods", OWN_POD, HERE)),
    ("POST", PODS, ("create", "pods", "", HERE)),
    ("POST", POD + "/binding", ("create", "pods/binding", OWN_POD, HERE)),
    ("GET", EVENTS, ("list", "events", "", HERE)),
    ("GET", EVENTS + "/none", ("get", "events", "none", HERE)),
    ("GET", "/api/v1/secrets", ("list", "secrets", "", EVERYWHERE)),
    ("GET", "/api/v1/namespaces/default/secrets", ("list", "secrets", "", HERE)),
    ("GET", "/api/v1/namespaces/default/secrets/x", ("get", "secrets", "x", HERE)),
]


@pytest.mark.parametrize(("method", "path", "body", "text"), NODE_REFUSED)
async def test_a_node_is_refused_what_is_not_its_own(
    server: Server, method: str, path: str, body: object, text: str
) -> None:
    assert (403, "Forbidden", text) == await server.node.refused(method, path, body)


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


async def test_a_pod_that_is_not_there_has_no_status_and_is_not_deleted(server: Server) -> None:
    absent = not_found('pods "none"')

    assert absent == await server.node.refused("PATCH", f"{PODS}/none/status", MARK)
    assert absent == await server.node.refused("DELETE", f"{PODS}/none")


async def test_a_node_that_is_there_is_not_created_again(server: Server) -> None:
    refused = await server.node.refused("POST", NODES, {"metadata": {"name": NODE}})

    assert already_exists('nodes "node-a"') == refused


async def test_a_node_releases_a_lock_only_if_it_knows_its_value(server: Server) -> None:
    key, path = "hami.io/mutex.lock", "/metadata/annotations/hami.io~1mutex.lock"
    await server.admin.have("PATCH", NODE_PATH, {"metadata": {"annotations": {key: "mine"}}})

    def release(value: str) -> list[dict[str, str]]:
        test = {"op": "test", "path": path, "value": value}
        return [test, {"op": "remove", "path": path}]

    refusal = invalid("the server rejected our request due to an error in our request")
    wrong = release("yours")
    assert refusal == await server.node.refused("PATCH", NODE_PATH, wrong, kind=JSON_PATCH)
    held = await server.node.have("GET", NODE_PATH)
    assert "mine" == held["metadata"]["annotations"][key]

    right = release("mine")
    left = await server.node.have("PATCH", NODE_PATH, right, kind=JSON_PATCH)
    assert key not in (left["metadata"].get("annotations") or {})
    assert refusal == await server.node.refused("PATCH", NODE_PATH, right, kind=JSON_PATCH)


@pytest.mark.parametrize(("method", "path", "denied"), ACCOUNT_REFUSED)
async def test_the_account_is_refused_what_deploy_does_not_grant(
    server: Server, method: str, path: str, denied: tuple[str, str, str, str]
) -> None:
    body = {"metadata": {"name": "x"}} if method != "GET" else None

    refused = await server.account.refused(method, path, body)

    assert (403, "Forbidden", cannot(ACCOUNT, *denied)) == refused


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
