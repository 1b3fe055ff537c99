"""The API server model answers as kube-apiserver does.

Every test is asked of both, with pods of its own. `tests/peers/lab/servers.py` says what of an
object must agree. A node's rules are those of the Node authorizer; the account's are the
ClusterRole of deploy/. A server that overloads answers 429; that is the model's alone, for nothing
here can overload the real one.
"""

import pytest

from tests.peers.lab.api import JSON_PATCH, MERGE, STRATEGIC, Object, Refusal
from tests.peers.lab.control import NODE
from tests.peers.lab.servers import (
    EVENTS,
    FREE_POD,
    NODE_PATH,
    NODES,
    OTHER_NODE,
    OTHER_POD,
    OWN_POD,
    PODS,
    Server,
    a_pod,
    essence,
    marks,
    plain_pod,
    told,
    version,
)

BAD_REQUEST = (400, "BadRequest")
UNAUTHORIZED = (401, "Unauthorized")
FORBIDDEN = (403, "Forbidden")
NOT_FOUND = (404, "NotFound")
ALREADY_EXISTS = (409, "AlreadyExists")
CONFLICT = (409, "Conflict")
INVALID = (422, "Invalid")

NO_UID = "00000000-0000-4000-8000-000000000000"
ALL_PODS = "/api/v1/pods"
OTHER_PATH, POD, OTHER = f"{NODES}/{OTHER_NODE}", f"{PODS}/{OWN_POD}", f"{PODS}/{OTHER_POD}"
MARK = marks(seen="1")
LOCK = "hami.io/mutex.lock"
LOCK_POINTER = "/metadata/annotations/hami.io~1mutex.lock"


def binding(name: str, node: str = NODE, **metadata: object) -> Object:
    return {"metadata": {"name": name, **metadata}, "target": {"kind": "Node", "name": node}}


def an_event(name: str) -> Object:
    about = {"kind": "Pod", "name": OWN_POD, "namespace": "default"}
    return {"metadata": {"name": name}, "involvedObject": about, "count": 1}


# Who is refused what.

Row = tuple[str, str, object, Refusal]
ADMIN_REFUSED: list[Row] = [
    ("GET", f"{PODS}/none", None, NOT_FOUND),
    ("PATCH", f"{PODS}/none", {}, NOT_FOUND),
    ("PATCH", f"{PODS}/none/status", {}, NOT_FOUND),
    ("DELETE", f"{PODS}/none", {}, NOT_FOUND),
    ("GET", f"{NODES}/none", None, NOT_FOUND),
    ("PATCH", f"{EVENTS}/none", {}, NOT_FOUND),
    ("GET", "/api/v1/nothing", None, NOT_FOUND),
    ("GET", "/api/v1/pods/pa", None, NOT_FOUND),
    ("GET", f"{POD}/nothing", None, NOT_FOUND),
    ("POST", f"{PODS}/none/binding", binding("none"), NOT_FOUND),
    ("POST", f"{POD}/binding", binding(OWN_POD, uid=NO_UID), CONFLICT),
    ("GET", f"{PODS}?watch=1&timeoutSeconds=x", None, BAD_REQUEST),
    ("GET", f"{ALL_PODS}?fieldSelector=spec.nodeName", None, BAD_REQUEST),
    ("GET", f"{ALL_PODS}?fieldSelector=spec.color%3Dx", None, BAD_REQUEST),
    ("GET", f"{NODES}?watch=1&fieldSelector=spec.nodeName%3Dx", None, BAD_REQUEST),
    ("POST", PODS, plain_pod(FREE_POD), ALREADY_EXISTS),
    ("POST", NODES, {"metadata": {"name": NODE}}, ALREADY_EXISTS),
    ("POST", PODS, plain_pod("") | {"metadata": {}}, INVALID),
    ("POST", PODS, plain_pod("x", namespace="other"), BAD_REQUEST),
    ("POST", PODS, b"", BAD_REQUEST),
    ("POST", PODS, b"{", BAD_REQUEST),
    ("POST", PODS, b"[]", BAD_REQUEST),
    ("PATCH", POD, {"spec": {"nodeName": OTHER_NODE}}, INVALID),
    ("PATCH", POD, [], BAD_REQUEST),
    ("PATCH", POD, {"metadata": {"uid": NO_UID}}, INVALID),
    ("PATCH", f"{POD}/status", {"metadata": {"uid": NO_UID}}, INVALID),
    ("PATCH", f"{POD}/status", {"metadata": {"resourceVersion": "1"}}, CONFLICT),
]
NODE_REFUSED: list[Row] = [
    ("PATCH", POD, MARK, FORBIDDEN),
    *(("GET", path, None, FORBIDDEN) for path in (OTHER_PATH, NODES, OTHER, f"{PODS}/none")),
    *(("GET", path, None, FORBIDDEN) for path in (ALL_PODS, PODS, EVENTS)),
    ("GET", f"{NODES}?watch=1&fieldSelector=metadata.name%3D{OTHER_NODE}", None, FORBIDDEN),
    ("GET", f"{ALL_PODS}?watch=1&fieldSelector=spec.nodeName%3D{OTHER_NODE}", None, FORBIDDEN),
    *(("DELETE", path, None, FORBIDDEN) for path in (OTHER, NODE_PATH, f"{EVENTS}/none")),
    ("POST", f"{POD}/binding", binding(OWN_POD), FORBIDDEN),
    ("POST", PODS, plain_pod("mine", NODE), FORBIDDEN),
    ("POST", NODES, {"metadata": {"name": "node-c"}}, FORBIDDEN),
    ("PATCH", f"{PODS}/none/status", MARK, NOT_FOUND),
]
NAMED = {"metadata": {"name": "x"}}
ACCOUNT_REFUSED: list[Row] = [
    *(("GET", path, None, FORBIDDEN) for path in (NODES, EVENTS, f"{EVENTS}/none")),
    *(("GET", path, None, FORBIDDEN) for path in ("/api/v1/secrets", f"{PODS[:-4]}secrets/x")),
    ("GET", f"{NODES}?fieldSelector=metadata.name%3D{NODE}", None, FORBIDDEN),
    *(("PATCH", path, NAMED, FORBIDDEN) for path in (f"{NODE_PATH}/status", POD)),
    *(("PUT", path, NAMED, FORBIDDEN) for path in (NODE_PATH, f"{POD}/status")),
    *(("DELETE", path, NAMED, FORBIDDEN) for path in (NODE_PATH, POD)),
    *(("POST", path, NAMED, FORBIDDEN) for path in (PODS, f"{POD}/binding")),
]
NOBODY_REFUSED: list[Row] = [
    ("GET", path, None, UNAUTHORIZED) for path in (NODE_PATH, PODS, "/version", f"{PODS}?watch=1")
]
REFUSED = {
    "admin": ADMIN_REFUSED,
    "node": NODE_REFUSED,
    "account": ACCOUNT_REFUSED,
    "nobody": NOBODY_REFUSED,
}


@pytest.mark.parametrize("who", REFUSED)
async def test_who_is_refused_what_and_in_which_form(server: Server, who: str) -> None:
    for method, path, body, refusal in REFUSED[who]:
        answer = await getattr(server, who).ask(method, path, body)

        assert refusal == answer.refusal, (method, path, body, answer)
        assert "application/json" == answer.headers["Content-Type"]
        assert ("Status", "v1", "Failure", answer.code) == tuple(
            answer.body[key] for key in ("kind", "apiVersion", "status", "code")
        )


OWN_PODS = f"{ALL_PODS}?fieldSelector=spec.nodeName%3D{NODE}"
ALLOWED: dict[str, list[tuple[str, Object | None]]] = {
    "node": [
        *((path, MARK) for path in (NODE_PATH, f"{NODE_PATH}/status", f"{POD}/status")),
        (NODE_PATH, {"metadata": {"labels": {"free": "1"}}}),
        *((path, None) for path in (NODE_PATH, POD, OWN_PODS)),
        (f"{NODES}?fieldSelector=metadata.name%3D{NODE}", None),
        (f"{PODS}?fieldSelector=spec.nodeName%3D{NODE}", None),
    ],
    "account": [
        *((path, MARK) for path in (NODE_PATH, OTHER_PATH, f"{POD}/status", f"{OTHER}/status")),
        (f"{POD}/status", {"metadata": {"labels": {"account": "may"}}}),
        *((path, None) for path in (NODE_PATH, POD, OWN_PODS, ALL_PODS)),
    ],
}


@pytest.mark.parametrize("who", ALLOWED)
async def test_who_may_do_what(server: Server, who: str) -> None:
    user = getattr(server, who)
    for path, body in ALLOWED[who]:
        await user.have("GET" if body is None else "PATCH", path, body)

    await user.create(EVENTS, an_event(f"by-{who}"))
    assert ALREADY_EXISTS == await user.refused("POST", EVENTS, an_event(f"by-{who}"))
    assert 2 == (await user.patch(f"{EVENTS}/by-{who}", {"count": 2}))["count"]
    async with user.watch(NODES, fieldSelector=f"metadata.name={NODE}") as events:
        (first,) = await events.take(1)
    assert ("ADDED", NODE) == (first["type"], first["object"]["metadata"]["name"])


# Admission, which keeps a node from patching another one, has no part in a review.
REVIEWED = [
    ("watch nodes", NODE, (True, True)),
    ("patch nodes", NODE, (True, True)),
    ("get nodes", OTHER_NODE, (False, True)),
    ("patch nodes", OTHER_NODE, (True, True)),
    ("list pods", f"spec.nodeName={NODE}", (True, True)),
    ("watch pods", f"spec.nodeName={NODE}", (True, True)),
    ("list pods", "", (False, True)),
    ("patch pods/status", "", (True, True)),
    ("patch pods", "", (False, False)),
    ("create events", "", (True, True)),
    ("delete events", "", (False, False)),
]


async def test_a_node_and_the_account_are_told_what_they_may(server: Server) -> None:
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    for words, which, allowed in REVIEWED:
        verb, resource = words.split()
        base, _, part = resource.partition("/")
        asked: Object = {"verb": verb, "resource": base} | ({"subresource": part} if part else {})
        if "=" in which:
            asked["fieldSelector"] = {"rawSelector": which}
        elif which:
            asked["name"] = which
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }
        answers = [await user.create(path, body) for user in (server.node, server.account)]
        assert allowed == tuple(one["status"]["allowed"] for one in answers), words


# Reads, lists and their forms.

SELECTED = {
    "spec.nodeName%3Dnode-b": [OTHER_POD],
    "spec.nodeName%3D%3Dnode-b": [OTHER_POD],
    "spec.nodeName%3Dnode-b,status.phase%3DPending": [OTHER_POD],
    "spec.nodeName%3Dnode-b,status.phase%3DRunning": [],
    "metadata.name%3Dpa,metadata.namespace%3Ddefault": [OWN_POD],
    f"metadata.name%3D{FREE_POD},spec.nodeName%3D": [FREE_POD],
    f"metadata.name%3D{FREE_POD},spec.schedulerName%3Dnobody": [FREE_POD],
    "spec.nodeName%3Dnobody-has-it": [],
}


async def test_fields_select_and_several_must_all_hold(server: Server) -> None:
    for selector, names in SELECTED.items():
        found = await server.admin.get(f"{ALL_PODS}?fieldSelector={selector}")
        assert ("PodList", "v1") == (found["kind"], found["apiVersion"])
        assert names == [item["metadata"]["name"] for item in found["items"]], selector
    (node,) = (await server.admin.get(f"{NODES}?fieldSelector=metadata.name%3D{NODE}"))["items"]
    assert NODE == node["metadata"]["name"]
    assert not {"kind", "apiVersion"} & node.keys()
    assert "v1.36.3" == (await server.admin.get("/version"))["gitVersion"]


# Patches: three kinds, all or nothing.


@pytest.mark.parametrize("kind", [MERGE, STRATEGIC])
async def test_a_patch_merges_maps_and_null_removes(server: Server, kind: str) -> None:
    path = await a_pod(server, f"maps-{len(kind)}", annotations={"a/x": "1", "b": "2"})

    changes = {"metadata": {"annotations": {"a/x": None, "c": "3"}, "labels": {"l": "v"}}}
    await server.admin.patch(path, changes, kind)
    found = (await server.admin.get(path))["metadata"]

    assert ({"b": "2", "c": "3"}, {"l": "v"}) == (found["annotations"], found["labels"])
    bare = await server.admin.patch(path, {"metadata": {"annotations": None}}, kind)
    assert "annotations" not in bare["metadata"]


async def test_pods_and_nodes_and_their_status_are_patched_apart(server: Server) -> None:
    path = await a_pod(server, "apart")
    whole = marks(a="1") | {"status": {"phase": "Running"}, "spec": {"nodeName": "elsewhere"}}
    patched = essence(await server.admin.patch(f"{path}/status", whole))
    expected = {"node": NODE, "phase": "Running", "annotations": {"a": "1"}}
    assert expected.items() <= patched.items()
    plain = marks(b="2") | {"status": {"phase": "Failed"}}
    patched = essence(await server.admin.patch(path, plain))
    assert ("Running", {"a": "1", "b": "2"}) == (patched["phase"], patched["annotations"])

    changes = marks(apart="1") | {
        "status": {"capacity": {"x.com/y": "5"}},
        "spec": {"unschedulable": True},
    }
    node = await server.admin.patch(f"{NODE_PATH}/status", changes)
    assert "1" == node["metadata"]["annotations"]["apart"]
    assert "unschedulable" not in (node.get("spec") or {})
    node = await server.admin.patch(NODE_PATH, {"status": {"capacity": {"z.com/z": "1"}}})
    assert {"x.com/y": "5"} == node["status"]["capacity"]


async def test_a_list_is_merged_by_key_or_replaced(server: Server) -> None:
    status = f"{await a_pod(server, 'lists')}/status"
    first, other = {"type": "Ready", "status": "False"}, {"type": "Other", "status": "True"}
    for kind, entries, left in (
        (STRATEGIC, [first, other], [("Ready", "False"), ("Other", "True")]),
        (STRATEGIC, [first | {"status": "True"}], [("Ready", "True"), ("Other", "True")]),
        (STRATEGIC, [{"type": "Ready", "$patch": "delete"}], [("Other", "True")]),
        (MERGE, [first], [("Ready", "False")]),
    ):
        patched = await server.admin.patch(status, {"status": {"conditions": entries}}, kind)
        assert left == essence(patched)["conditions"]


async def test_a_json_patch_is_done_whole_or_not_at_all(server: Server) -> None:
    path = await a_pod(server, "steps", annotations={"hami.io/a": "1", "n": "2"})
    before, at = await server.admin.get(path), "/metadata/annotations"
    failing: list[object] = [
        [
            {"op": "remove", "path": f"{at}/n"},
            {"op": "test", "path": f"{at}/hami.io~1a", "value": "2"},
        ],
        [{"op": "test", "path": f"{at}/none", "value": "1"}],
        [{"op": "remove", "path": f"{at}/none"}],
        [{"op": "steal", "path": f"{at}/hami.io~1a"}],
    ]
    for operations in failing:
        assert INVALID == await server.admin.refused("PATCH", path, operations, kind=JSON_PATCH)
    assert BAD_REQUEST == await server.admin.refused("PATCH", path, {}, kind=JSON_PATCH)
    assert version(before) == version(await server.admin.get(path))

    done = [
        {"op": "test", "path": f"{at}/hami.io~1a", "value": "1"},
        {"op": "remove", "path": f"{at}/hami.io~1a"},
    ]
    patched = await server.admin.patch(path, done, JSON_PATCH)
    assert {"n": "2"} == patched["metadata"]["annotations"]


async def test_a_node_releases_a_lock_only_if_it_knows_its_value(server: Server) -> None:
    await server.admin.patch(NODE_PATH, marks(**{LOCK: "mine"}))

    def release(value: str) -> list[Object]:
        test = {"op": "test", "path": LOCK_POINTER, "value": value}
        return [test, {"op": "remove", "path": LOCK_POINTER}]

    for value, is_held in (("yours", True), ("mine", False), ("mine", False)):
        answer = await server.node.ask("PATCH", NODE_PATH, release(value), kind=JSON_PATCH)
        left = (await server.node.get(NODE_PATH))["metadata"].get("annotations") or {}
        assert is_held == (LOCK in left)
    assert INVALID == answer.refusal, "there is none any more"


async def test_the_right_uid_and_version_let_a_patch_pass_once(server: Server) -> None:
    status = f"{await a_pod(server, 'held')}/status"
    held = (await server.admin.get(status))["metadata"]
    metadata = {key: held[key] for key in ("uid", "resourceVersion")} | {"annotations": {"a": "1"}}

    patched = await server.admin.patch(status, {"metadata": metadata})

    assert {"a": "1"} == patched["metadata"]["annotations"]
    late = {"metadata": metadata | {"annotations": {"a": "2"}}}
    assert CONFLICT == await server.admin.refused("PATCH", status, late)


# Created, bound, deleted.


async def test_a_pod_is_bound_once_and_says_so(server: Server) -> None:
    made = await server.admin.create(PODS, plain_pod("") | {"metadata": {"generateName": "gen-"}})
    name = made["metadata"]["name"]
    assert ("gen-", 9) == (name[:4], len(name))
    path = f"{PODS}/{name}"

    done = await server.admin.create(f"{path}/binding", binding(name))
    again = await server.admin.refused("POST", f"{path}/binding", binding(name, OTHER_NODE))

    assert (("Status", "Success"), CONFLICT) == ((done["kind"], done["status"]), again)
    expected = {"conditions": [("PodScheduled", "True")]}
    assert seen(name, NODE, **expected) == essence(await server.admin.get(path))
    await server.admin.delete(path)
    leaving = await server.admin.refused("POST", f"{path}/binding", binding(name))
    assert CONFLICT == leaving


async def test_a_pod_that_names_its_node_is_not_scheduled_whatever_its_author_says(
    server: Server,
) -> None:
    claim = {"phase": "Running", "conditions": [{"type": "PodScheduled", "status": "True"}]}
    created = await server.admin.create(PODS, plain_pod("unplaced", NODE) | {"status": claim})
    path = f"{PODS}/unplaced"
    await server.admin.patch(path, marks(x="1") | {"status": claim})

    assert seen("unplaced", NODE) == essence(created)
    marked = seen("unplaced", NODE, annotations={"x": "1"})
    assert marked == essence(await server.admin.get(path))


async def test_a_deletion_with_grace_marks_and_only_a_shorter_one_counts(server: Server) -> None:
    path = await a_pod(server, "graceful")
    for grace, left in ((20, 20), (5, 5), (25, 5), (-1, 1), (0, 0)):
        metadata = (await server.admin.delete(path, grace))["metadata"]
        assert left == metadata["deletionGracePeriodSeconds"]
        assert "deletionTimestamp" in metadata
    assert NOT_FOUND == await server.admin.refused("GET", path)

    pod = plain_pod("own", NODE)
    pod["spec"]["terminationGracePeriodSeconds"] = 7
    await server.admin.create(PODS, pod)
    marked = await server.admin.delete(f"{PODS}/own")
    assert 7 == marked["metadata"]["deletionGracePeriodSeconds"]


@pytest.mark.parametrize("how", ["no-node", "failed", "own-grace"])
async def test_a_pod_that_nobody_has_to_stop_goes_at_once(server: Server, how: str) -> None:
    pod, path = plain_pod(how, "" if how == "no-node" else NODE), f"{PODS}/{how}"
    if how == "own-grace":
        pod["spec"]["terminationGracePeriodSeconds"] = 0
    await server.admin.create(PODS, pod)
    if how == "failed":
        await server.admin.patch(f"{path}/status", {"status": {"phase": "Failed"}})

    gone = await server.admin.have("DELETE", path, {})

    assert ("Pod", 0) == (gone["kind"], gone["metadata"]["deletionGracePeriodSeconds"])
    assert NOT_FOUND == await server.admin.refused("GET", path)


async def test_a_node_that_goes_leaves_a_status(server: Server) -> None:
    await server.admin.create(NODES, {"metadata": {"name": "short"}})

    answer = await server.admin.delete(f"{NODES}/short")

    assert ("Status", "Success") == (answer["kind"], answer["status"])


# Watches: versions, selections, bookmarks, 410; each with pods on a node of its own.


def on(node: str) -> dict[str, str]:
    """The query for the pods of a node."""
    return {"fieldSelector": f"spec.nodeName={node}"}


async def now(server: Server) -> str:
    return version(await server.admin.get(PODS))


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
    await server.admin.get(f"{ALL_PODS}?resourceVersion={await now(server)}")

    async with server.admin.watch(ALL_PODS, **on(node), **since) as events:
        first = [told(event) for event in await events.take(2)]
        await a_pod(server, f"{node}-c", node)
        later = [told(event) for event in await events.take(1)]

    assert [("ADDED", seen(f"{node}-{name}", node)) for name in "abc"] == first + later


async def test_a_watch_goes_on_after_the_version_of_a_list(server: Server) -> None:
    node = "going-on"
    path = await a_pod(server, "before", node)
    since = await now(server)
    patched = await server.admin.patch(path, marks(x="1"))
    await server.admin.patch(path, marks(x="1"))  # no effect: nobody is told
    await server.admin.patch(path, {"status": {"phase": "Failed"}})
    await server.admin.patch(f"{path}/status", {"status": {"phase": "Running"}})
    gone = await server.admin.delete(path, 0)

    async with server.admin.watch(ALL_PODS, **on(node), resourceVersion=since) as watch:
        events = await watch.take(4)

    marked = seen("before", node, annotations={"x": "1"})
    running = marked | {"phase": "Running"}
    expected = [
        *(("MODIFIED", marked), ("MODIFIED", running)),
        *(("MODIFIED", running | {"is_ending": True}), ("DELETED", running | {"is_ending": True})),
    ]
    assert expected == [told(event) for event in events]
    versions = [version(event["object"]) for event in events]
    assert (version(patched), version(gone)) == (versions[0], versions[-1])
    assert sorted(versions, key=int) == versions


async def test_what_enters_a_selection_is_added_and_what_leaves_is_deleted(server: Server) -> None:
    node = "selected"
    path, since = await a_pod(server, "wanderer", ""), await now(server)
    running = {"fieldSelector": f"spec.nodeName={node},status.phase=Running"}

    async with (
        server.admin.watch(ALL_PODS, **on(node), resourceVersion=since) as placed,
        server.admin.watch(ALL_PODS, **running, resourceVersion=since) as active,
    ):
        await server.admin.create(f"{path}/binding", binding("wanderer", node))
        await server.admin.patch(f"{path}/status", {"status": {"phase": "Running"}})
        over = {"status": {"phase": "Failed"}} | marks(x="1")
        last = await server.admin.patch(f"{path}/status", over)
        of_node, of_phase = await placed.take(3), await active.take(2)

    bound = seen("wanderer", node, conditions=[("PodScheduled", "True")])
    ran = bound | {"phase": "Running"}
    failed = bound | {"phase": "Failed", "annotations": {"x": "1"}}
    assert [("ADDED", bound), ("MODIFIED", ran), ("MODIFIED", failed)] == [*map(told, of_node)]
    assert [("ADDED", ran), ("DELETED", ran)] == [*map(told, of_phase)]
    assert version(last) == version(of_phase[-1]["object"])


async def test_a_watch_ends_in_time_with_a_bookmark_unless_it_is_short(server: Server) -> None:
    query = {**on("nothing"), "resourceVersion": await now(server), "allowWatchBookmarks": "true"}

    async with server.admin.watch(ALL_PODS, **query, timeoutSeconds="1") as events:
        await server.admin.create(PODS, plain_pod("elsewhere", "far"))
        assert [] == await events.rest()
    query["resourceVersion"] = await now(server)
    async with server.admin.watch(ALL_PODS, **query, timeoutSeconds="5") as events:
        created = await server.admin.create(PODS, plain_pod("not-seen", "far"))
        found = await events.rest()

    # The real server sometimes sends it twice.
    assert {("BOOKMARK", "Pod")} == {(one["type"], one["object"]["kind"]) for one in found}
    assert int(version(created)) <= int(version(found[0]["object"]))
    assert "annotations" not in found[0]["object"]["metadata"]


async def test_who_goes_on_from_a_version_that_was_compacted_away_gets_410(server: Server) -> None:
    node = "forgotten"
    path, since = await a_pod(server, "remembered", node), await now(server)
    await server.admin.patch(path, marks(x="1"))

    await server.forget_history()

    expired = (410, "Expired")
    async with server.admin.watch(ALL_PODS, **on(node), resourceVersion=since) as events:
        (event,) = await events.rest()
    status = event["object"]
    assert ("ERROR", *expired) == (event["type"], status["code"], status["reason"])
    assert status["message"].startswith(f"too old resource version: {since} (")
    latest = await now(server)
    async with server.admin.watch(ALL_PODS, **on(node), resourceVersion=latest) as events:
        await server.admin.patch(path, marks(x="2"))
        assert ["MODIFIED"] == [event["type"] for event in await events.take(1)]
