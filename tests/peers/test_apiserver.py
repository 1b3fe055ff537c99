"""The API server model answers as kube-apiserver does: reads, lists, forms, and what is refused.

Every test is asked of both. `tests/peers/lab/servers.py` says what of an object must agree.
"""

import pytest

from tests.peers.lab.api import JSON_PATCH, Object
from tests.peers.lab.identities import NODE
from tests.peers.lab.servers import (
    ALREADY_EXISTS,
    BAD_REQUEST,
    EVENTS,
    FORBIDDEN,
    FREE_POD,
    INVALID,
    NODE_PATH,
    NODES,
    NOT_FOUND,
    OTHER_NODE,
    OTHER_POD,
    OWN_POD,
    PODS,
    Refusal,
    Server,
    a_pod,
    essence,
    marks,
    plain_pod,
    told,
    version,
)

ONE = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"
REFUSED = [
    ("GET", f"{PODS}/none", NOT_FOUND),
    ("PATCH", f"{PODS}/none", NOT_FOUND),
    ("PATCH", f"{PODS}/none/status", NOT_FOUND),
    ("DELETE", f"{PODS}/none", NOT_FOUND),
    ("GET", f"{NODES}/none", NOT_FOUND),
    ("PATCH", f"{EVENTS}/none", NOT_FOUND),
    ("GET", "/api/v1/nothing", NOT_FOUND),
    ("GET", "/api/v1/pods/pa", NOT_FOUND),
    ("GET", "/api/v1/namespaces/default/nodes", NOT_FOUND),
    ("GET", f"{PODS}/{OWN_POD}/nothing", NOT_FOUND),
    ("GET", f"{NODES}?limit=x", BAD_REQUEST),
    ("GET", f"{PODS}?watch=1&timeoutSeconds=x", BAD_REQUEST),
    ("GET", "/api/v1/pods?fieldSelector=spec.nodeName", BAD_REQUEST),
    ("GET", f"{EVENTS}?continue=xx", BAD_REQUEST),
]


@pytest.mark.parametrize(("method", "path", "refusal"), REFUSED)
async def test_what_is_not_there_or_not_served_is_refused(
    server: Server, method: str, path: str, refusal: Refusal
) -> None:
    body = None if method == "GET" else {}

    answer = await server.admin.ask(method, path, body)

    assert refusal == answer.refusal
    assert "application/json" == answer.headers["Content-Type"]
    assert ("Status", "v1", "Failure", answer.code) == tuple(
        answer.body[key] for key in ("kind", "apiVersion", "status", "code")
    )


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/api/v1/pods", "spec.color"),
        (NODES, "spec.nodeName"),
        (NODES, "metadata.namespace"),
        (EVENTS, "spec.nodeName"),
    ],
)
@pytest.mark.parametrize("watch", ["", "watch=1&"])
async def test_each_resource_is_selected_by_its_own_fields(
    server: Server, path: str, field: str, watch: str
) -> None:
    assert BAD_REQUEST == await server.admin.refused(
        "GET", f"{path}?{watch}fieldSelector={field}%3Dx"
    )


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("spec.nodeName%3Dnode-b", [OTHER_POD]),
        ("spec.nodeName%3D%3Dnode-b", [OTHER_POD]),
        ("spec.nodeName%3Dnode-b,status.phase%3DPending", [OTHER_POD]),
        ("spec.nodeName%3Dnode-b,status.phase%3DRunning", []),
        ("metadata.name%3Dpa,metadata.namespace%3Ddefault", [OWN_POD]),
        (f"metadata.name%3D{FREE_POD},spec.nodeName%3D", [FREE_POD]),
        (f"metadata.name%3D{FREE_POD},spec.schedulerName%3Dnobody", [FREE_POD]),
        ("spec.nodeName%3Dnobody-has-it", []),
    ],
)
async def test_fields_select_and_several_must_all_hold(
    server: Server, selector: str, names: list[str]
) -> None:
    found = await server.admin.have("GET", f"/api/v1/pods?fieldSelector={selector}")

    assert ("PodList", "v1") == (found["kind"], found["apiVersion"])
    assert names == [item["metadata"]["name"] for item in found["items"]]


async def test_a_node_is_selected_by_its_name(server: Server) -> None:
    found = await server.admin.have("GET", f"{NODES}?fieldSelector=metadata.name%3D{OTHER_NODE}")

    assert [OTHER_NODE] == [item["metadata"]["name"] for item in found["items"]]
    assert not {"kind", "apiVersion"} & found["items"][0].keys()


@pytest.mark.parametrize("version", ["", "?resourceVersion=0", "?resourceVersion=1"])
async def test_a_list_is_of_its_version_or_newer(server: Server, version: str) -> None:
    created = await server.admin.have("POST", PODS, plain_pod(f"new{len(version)}"))

    listed = await server.admin.have("GET", PODS + version)

    oldest = int(created["metadata"]["resourceVersion"])
    assert version == "?resourceVersion=0" or oldest <= int(listed["metadata"]["resourceVersion"])
    await server.admin.have("DELETE", f"{PODS}/new{len(version)}")


async def test_a_list_in_chunks_is_the_list_as_it_was_when_it_began(server: Server) -> None:
    for name in ("chunk-a", "chunk-b", "chunk-c"):
        await server.admin.have("POST", EVENTS, an_event(name))
    whole = await server.admin.have("GET", EVENTS)
    first = await server.admin.have("GET", f"{EVENTS}?limit=2")
    await server.admin.have("DELETE", f"{EVENTS}/chunk-c")
    await server.admin.have("POST", EVENTS, an_event("chunk-d"))

    items, last = list(first["items"]), first
    while token := last["metadata"].get("continue"):
        last = await server.admin.have("GET", f"{EVENTS}?limit=2&continue={token}")
        assert first["metadata"]["resourceVersion"] == last["metadata"]["resourceVersion"]
        items += last["items"]

    assert whole["items"] == items


async def test_metadata_alone_is_given_to_who_asks(server: Server) -> None:
    marks = {"metadata": {"annotations": {"meta": "1"}}}
    patched = await server.admin.have("PATCH", NODE_PATH, marks, accept=ONE)
    one = await server.admin.have("GET", NODE_PATH, accept=ONE)
    whole = await server.admin.have("GET", NODE_PATH)

    assert patched == one
    assert {"kind", "apiVersion", "metadata"} == one.keys()
    assert ("PartialObjectMetadata", "meta.k8s.io/v1") == (one["kind"], one["apiVersion"])
    for member in ("name", "uid", "resourceVersion", "annotations"):
        assert whole["metadata"][member] == one["metadata"][member]


async def test_a_refusal_is_a_status_in_every_form(server: Server) -> None:
    answer = await server.admin.ask("GET", f"{PODS}/none", accept=ONE)

    assert ("Status", NOT_FOUND) == (answer.body["kind"], answer.refusal)


async def test_a_watch_of_one_name_in_the_path_is_a_get(server: Server) -> None:
    found = await server.admin.have("GET", f"{PODS}/{OTHER_POD}?watch=1")

    expected = {"kind": "Pod", "name": OTHER_POD, "node": OTHER_NODE, "phase": "Pending"}
    assert expected == essence(found)


async def test_the_version_is_told_to_who_may_know(server: Server) -> None:
    assert "v1.36.3" == (await server.admin.have("GET", "/version"))["gitVersion"]
    assert "ok" == (await server.admin.ask("GET", "/readyz")).body


@pytest.mark.parametrize("path", [NODE_PATH, PODS, "/version", f"{PODS}?watch=1"])
async def test_a_token_that_nobody_knows_is_unauthorized(server: Server, path: str) -> None:
    refused = await server.nobody.refused("GET", path)

    assert (401, "Unauthorized") == refused


async def test_a_chunked_list_that_was_compacted_away_is_expired(server: Server) -> None:
    first = await server.admin.have("GET", f"{PODS}?limit=1")
    await server.admin.have("PATCH", f"{PODS}/{FREE_POD}", {"metadata": {"labels": {"l": "1"}}})

    await server.forget_history()

    path = f"{PODS}?limit=1&continue={first['metadata']['continue']}"
    gone = await server.admin.ask("GET", path)
    assert (410, "Expired") == gone.refusal


def an_event(name: str, **more: object) -> dict[str, object]:
    about = {"kind": "Pod", "name": OWN_POD, "namespace": "default"}
    return {"metadata": {"name": name}, "involvedObject": about, **more}


# Whoever asks the API server, or the model of it, is told what he may do.


def review(verb: str, resource: str, name: str = "", selector: str = "") -> dict[str, object]:
    base, _, part = resource.partition("/")
    asked: dict[str, object] = {"verb": verb, "resource": base}
    asked |= {"subresource": part} if part else {}
    asked |= {"name": name} if name else {}
    asked |= {"fieldSelector": {"rawSelector": selector}} if selector else {}
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": asked},
    }


OWN_PODS_ONLY = f"spec.nodeName={NODE}"
# Admission, which keeps a node from patching another one, has no part in a review.
REVIEWED = [
    (review("watch", "nodes", NODE), (True, True)),
    (review("patch", "nodes", NODE), (True, True)),
    (review("get", "nodes", OTHER_NODE), (False, True)),
    (review("patch", "nodes", OTHER_NODE), (True, True)),
    (review("list", "pods", selector=OWN_PODS_ONLY), (True, True)),
    (review("watch", "pods", selector=OWN_PODS_ONLY), (True, True)),
    (review("list", "pods"), (False, True)),
    (review("patch", "pods/status"), (True, True)),
    (review("patch", "pods"), (False, False)),
    (review("create", "events"), (True, True)),
    (review("delete", "events"), (False, False)),
]


@pytest.mark.parametrize(("asked", "allowed"), REVIEWED)
async def test_a_node_and_the_account_are_told_what_they_may(
    server: Server, asked: dict[str, object], allowed: tuple[bool, bool]
):
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"

    answers = [await user.ask("POST", path, asked) for user in (server.node, server.account)]

    assert allowed == tuple(one.body["status"]["allowed"] for one in answers)
    assert {201} == {one.code for one in answers}


# The API server model grants and refuses as kube-apiserver does: a node, and the agent's account.
#
# The node's rules are those of the Node authorizer and NodeRestriction; the account's are the
# ClusterRole of deploy/, applied to the real server.

MARK = {"metadata": {"annotations": {"seen": "1"}}}
LABEL = {"metadata": {"labels": {"node-restriction.kubernetes.io/x": "1"}}}
BINDING = {"metadata": {"name": OWN_POD}, "target": {"kind": "Node", "name": NODE}}
OTHER_PATH, POD, OTHER = f"{NODES}/{OTHER_NODE}", f"{PODS}/{OWN_POD}", f"{PODS}/{OTHER_POD}"
OWN_PODS = f"/api/v1/pods?fieldSelector=spec.nodeName%3D{NODE}"
MIRROR = {"kubernetes.io/config.mirror": "x"}
NODE_REFUSED = [
    ("PATCH", OTHER_PATH, MARK),
    ("PATCH", OTHER_PATH + "/status", MARK),
    ("PATCH", POD, MARK),
    ("PATCH", OTHER + "/status", MARK),
    ("PATCH", POD + "/status", LABEL),
    ("PATCH", NODE_PATH, LABEL),
    ("PATCH", NODE_PATH, {"spec": {"taints": [{"key": "k", "effect": "NoSchedule"}]}}),
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


async def test_a_pod_that_is_not_there_has_no_status_and_is_not_deleted(server: Server) -> None:
    assert NOT_FOUND == await server.node.refused("PATCH", f"{PODS}/none/status", MARK)
    assert NOT_FOUND == await server.node.refused("DELETE", f"{PODS}/none")


async def test_a_node_that_is_there_is_not_created_again(server: Server) -> None:
    refused = await server.node.refused("POST", NODES, {"metadata": {"name": NODE}})

    assert ALREADY_EXISTS == refused


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


# The API server model is watched as kube-apiserver is: versions, selections, bookmarks, 410.
#
# Every test is asked of both, with pods on a node of its own. A real server that overloads answers
# 429; that is the model's alone, for nothing here can overload the real one.

PARTIAL = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"
ENDED = {"gracePeriodSeconds": 0}


def on(node: str) -> dict[str, str]:
    """The query for the pods of a node."""
    return {"fieldSelector": f"spec.nodeName={node}"}


async def now(server: Server) -> str:
    return version(await server.admin.have("GET", PODS))


def seen(name: str, node: str, **more: object) -> Object:
    return {"kind": "Pod", "name": name, "node": node, "phase": "Pending", **more}


@pytest.mark.parametrize("since", [{}, {"resourceVersion": "0"}], ids=["none", "0"])
async def test_a_watch_without_a_version_begins_with_all(
    server: Server, since: dict[str, str]
) -> None:
    node = f"begin-{len(since)}"
    for name in ("b", "a"):
        await a_pod(server, f"{node}-{name}", node)
    # The beginning comes from a cache, and this list from it once it has both.
    await server.admin.have("GET", f"/api/v1/pods?resourceVersion={await now(server)}")

    async with server.admin.watch("/api/v1/pods", **on(node), **since) as frames:
        first = [told(event) for event in await frames.take(2)]
        path = await a_pod(server, f"{node}-c", node)
        await server.admin.have("PATCH", path, marks(x="1"))
        later = [told(event) for event in await frames.take(2)]

    assert [("ADDED", seen(f"{node}-{name}", node)) for name in "ab"] == first
    assert [
        ("ADDED", seen(f"{node}-c", node)),
        ("MODIFIED", seen(f"{node}-c", node, annotations={"x": "1"})),
    ] == later


async def test_a_watch_goes_on_after_the_version_of_a_list(server: Server) -> None:
    node = "going-on"
    path = await a_pod(server, "before", node)
    since = await now(server)
    patched = await server.admin.have("PATCH", path, marks(x="1"))
    await server.admin.have("PATCH", f"{path}/status", {"status": {"phase": "Running"}})
    gone = await server.admin.have("DELETE", path, ENDED)

    async with server.admin.watch("/api/v1/pods", **on(node), resourceVersion=since) as frames:
        events = await frames.take(4)

    x, running = {"annotations": {"x": "1"}}, {"phase": "Running"}
    expected = [
        ("MODIFIED", seen("before", node, **x)),
        ("MODIFIED", seen("before", node, **(x | running))),
        ("MODIFIED", seen("before", node, **(x | running), is_ending=True)),
        ("DELETED", seen("before", node, **(x | running), is_ending=True)),
    ]
    assert expected == [told(event) for event in events]
    versions = [version(event["object"]) for event in events]
    assert (version(patched), version(gone)) == (versions[0], versions[-1])
    assert sorted(versions, key=int) == versions
    assert 0 == events[-1]["object"]["metadata"]["deletionGracePeriodSeconds"]


async def test_what_enters_a_selection_is_added_and_what_leaves_is_deleted(server: Server) -> None:
    node = "selected"
    path, since = await a_pod(server, "wanderer", ""), await now(server)
    running = {"fieldSelector": f"spec.nodeName={node},status.phase=Running"}
    binding = {"metadata": {"name": "wanderer"}, "target": {"kind": "Node", "name": node}}

    async with (
        server.admin.watch("/api/v1/pods", **on(node), resourceVersion=since) as placed,
        server.admin.watch("/api/v1/pods", **running, resourceVersion=since) as active,
    ):
        await server.admin.have("POST", f"{path}/binding", binding)
        await server.admin.have("PATCH", f"{path}/status", {"status": {"phase": "Running"}})
        over = {"status": {"phase": "Failed"}} | marks(x="1")
        last = await server.admin.have("PATCH", f"{path}/status", over)
        of_node = await placed.take(3)
        of_phase = await active.take(2)

    conditions = {"conditions": [("PodScheduled", "True")]}
    bound = seen("wanderer", node, **conditions)
    ran = bound | {"phase": "Running"}
    failed = bound | {"phase": "Failed", "annotations": {"x": "1"}}
    told_of_node = [told(event) for event in of_node]
    assert [("ADDED", bound), ("MODIFIED", ran), ("MODIFIED", failed)] == told_of_node
    assert [("ADDED", ran), ("DELETED", ran)] == [told(event) for event in of_phase]
    assert version(last) == version(of_phase[-1]["object"])


async def test_a_write_without_effect_wakes_no_watch(server: Server) -> None:
    node = "woken"
    path = await a_pod(server, "still-here", node, annotations={"a": "1"})

    async with server.admin.watch(
        "/api/v1/pods", **on(node), resourceVersion=await now(server)
    ) as frames:
        await server.admin.have("PATCH", path, marks(a="1"))
        await server.admin.have("PATCH", path, {"status": {"phase": "Failed"}})
        await server.admin.have("PATCH", path, marks(a="2"))
        first = await frames.take(1)

    assert [("MODIFIED", seen("still-here", node, annotations={"a": "2"}))] == [
        told(event) for event in first
    ]


async def test_a_watch_of_metadata_tells_no_more(server: Server) -> None:
    async with server.node.watch(
        NODES, accept=PARTIAL, fieldSelector="metadata.name=node-a"
    ) as frames:
        first = await frames.next()
        patched = await server.node.have("PATCH", NODE_PATH, marks(seen="now"), accept=PARTIAL)
        second = await frames.next()

    assert first is not None
    assert {"type": "MODIFIED", "object": patched} == second
    assert {"kind", "apiVersion", "metadata"} == first["object"].keys()
    assert "PartialObjectMetadata" == first["object"]["kind"]


async def test_a_watch_ends_in_time_and_a_short_one_has_no_bookmark(server: Server) -> None:
    query = {"timeoutSeconds": "1", "resourceVersion": await now(server)}

    async with server.admin.watch(
        "/api/v1/pods", **on("nothing"), **query, allowWatchBookmarks="true"
    ) as frames:
        await server.admin.have("POST", PODS, plain_pod("elsewhere", "far"))
        assert (200, []) == (frames.code, await frames.rest())


async def test_a_watch_that_sees_nothing_gets_a_bookmark_before_its_end(server: Server) -> None:
    since = await now(server)
    query = {"timeoutSeconds": "5", "resourceVersion": since, "allowWatchBookmarks": "true"}

    async with server.admin.watch("/api/v1/pods", **on("nothing"), **query) as frames:
        created = await server.admin.have("POST", PODS, plain_pod("not-seen", "far"))
        events = await frames.rest()

    # The real server sometimes sends it twice.
    assert {("BOOKMARK", "Pod")} == {(one["type"], one["object"]["kind"]) for one in events}
    assert int(version(created)) <= int(version(events[0]["object"]))
    assert "annotations" not in events[0]["object"]["metadata"]


async def test_a_watch_from_a_version_of_before_is_gone_in_an_event(server: Server) -> None:
    node = "forgotten"
    path, since = await a_pod(server, "remembered", node), await now(server)
    await server.admin.have("PATCH", path, marks(x="1"))

    await server.forget_history()

    for accept in ("application/json", PARTIAL):
        async with server.admin.watch(
            "/api/v1/pods", accept=accept, **on(node), resourceVersion=since
        ) as frames:
            (event,) = await frames.rest()
            assert (200, "ERROR") == (frames.code, event["type"])
        status = event["object"]
        assert ("Status", "Failure", 410, "Expired") == tuple(
            status[key] for key in ("kind", "status", "code", "reason")
        )
        assert status["message"].startswith(f"too old resource version: {since} (")
    latest = await now(server)
    async with server.admin.watch("/api/v1/pods", **on(node), resourceVersion=latest) as frames:
        await server.admin.have("PATCH", path, marks(x="2"))
        assert ["MODIFIED"] == [event["type"] for event in await frames.take(1)]
