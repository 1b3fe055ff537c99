"""The API server model answers as kube-apiserver does.

Every test is asked of both, with pods of its own. `tests/peers/lab/servers.py` says what of an
object must agree. A node's rules are those of the Node authorizer; the account's are the
ClusterRole of deploy/. A server that overloads answers 429; that is the model's alone, for nothing
here can overload the real one.
"""

import pytest

from tests.peers.lab.api import JSON_PATCH, MERGE, STRATEGIC, Object, Refusal
from tests.peers.lab.control import NODE, NODE_PATH
from tests.peers.lab.servers import (
    EVENTS,
    FREE_POD,
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

PARTIAL = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"
NO_UID = "00000000-0000-4000-8000-000000000000"
ALL_PODS = "/api/v1/pods"
OTHER_PATH, POD, OTHER = f"{NODES}/{OTHER_NODE}", f"{PODS}/{OWN_POD}", f"{PODS}/{OTHER_POD}"
MARK = marks(seen="1")
LOCK = "hami.io/mutex.lock"
ESCAPED = LOCK.replace("/", "~1")


def binding(name: str, node: str = NODE, **metadata: object) -> Object:
    return {"metadata": {"name": name, **metadata}, "target": {"kind": "Node", "name": node}}


def an_event(name: str) -> Object:
    about = {"kind": "Pod", "name": OWN_POD, "namespace": "default"}
    return {"metadata": {"name": name}, "involvedObject": about, "count": 1}


# Who is refused what.

Row = tuple[str, str, object, Refusal]
ADMIN_REFUSED: list[Row] = [
    *((method, f"{PODS}/none", {}, NOT_FOUND) for method in ("GET", "PATCH", "DELETE")),
    *(("PATCH", f"{path}/none", {}, NOT_FOUND) for path in (NODES, EVENTS)),
    *(("GET", path, None, NOT_FOUND) for path in ("/api/v1/nothing", f"{POD}/nothing")),
    ("POST", f"{PODS}/none/binding", binding("none"), NOT_FOUND),
    ("POST", f"{POD}/binding", binding(OWN_POD, uid=NO_UID), CONFLICT),
    ("GET", f"{ALL_PODS}?fieldSelector=spec.nodeName", None, BAD_REQUEST),
    ("POST", PODS, plain_pod(FREE_POD), ALREADY_EXISTS),
    ("POST", PODS, plain_pod("") | {"metadata": {}}, INVALID),
    *(("POST", PODS, body, BAD_REQUEST) for body in (b"", b"{", b"[]")),
    ("PATCH", POD, [], BAD_REQUEST),
    ("PATCH", f"{POD}/status", {"metadata": {"uid": NO_UID}}, INVALID),
    ("PATCH", f"{POD}/status", {"metadata": {"resourceVersion": "1"}}, CONFLICT),
]
NODE_REFUSED: list[Row] = [
    *(("GET", path, None, FORBIDDEN) for path in (OTHER_PATH, NODES, OTHER, ALL_PODS, EVENTS)),
    ("GET", f"{NODES}?watch=1&fieldSelector=metadata.name%3D{OTHER_NODE}", None, FORBIDDEN),
    ("GET", f"{ALL_PODS}?watch=1&fieldSelector=spec.nodeName%3D{OTHER_NODE}", None, FORBIDDEN),
    *(("DELETE", path, None, FORBIDDEN) for path in (OTHER, NODE_PATH, f"{EVENTS}/none")),
    ("PATCH", POD, MARK, FORBIDDEN),
    ("PATCH", f"{PODS}/none/status", MARK, NOT_FOUND),
    ("POST", f"{POD}/binding", binding(OWN_POD), FORBIDDEN),
    ("POST", PODS, plain_pod("mine", NODE), FORBIDDEN),
]
NAMED = {"metadata": {"name": "x"}}
ACCOUNT_REFUSED: list[Row] = [
    *(("GET", path, None, FORBIDDEN) for path in (NODES, EVENTS, "/api/v1/secrets")),
    *(("PATCH", path, NAMED, FORBIDDEN) for path in (f"{NODE_PATH}/status", POD)),
    *(("DELETE", path, NAMED, FORBIDDEN) for path in (NODE_PATH, POD)),
    *(("POST", path, NAMED, FORBIDDEN) for path in (PODS, f"{POD}/binding")),
]
REFUSED: dict[str, list[Row]] = {
    "admin": ADMIN_REFUSED,
    "node": NODE_REFUSED,
    "account": ACCOUNT_REFUSED,
    "nobody": [("GET", path, None, UNAUTHORIZED) for path in (NODE_PATH, f"{PODS}?watch=1")],
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
        *((path, None) for path in (NODE_PATH, POD, OWN_PODS)),
    ],
    "account": [
        *((path, MARK) for path in (NODE_PATH, OTHER_PATH, f"{POD}/status", f"{OTHER}/status")),
        *((path, None) for path in (NODE_PATH, POD, ALL_PODS)),
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
REVIEWED: list[tuple[str, str, Object, tuple[bool, bool]]] = [
    ("watch", "nodes", {"name": NODE}, (True, True)),
    ("get", "nodes", {"name": OTHER_NODE}, (False, True)),
    ("patch", "nodes", {"name": OTHER_NODE}, (True, True)),
    ("list", "pods", {"fieldSelector": {"rawSelector": f"spec.nodeName={NODE}"}}, (True, True)),
    ("list", "pods", {}, (False, True)),
    ("patch", "pods", {"subresource": "status"}, (True, True)),
    ("patch", "pods", {}, (False, False)),
    ("create", "events", {}, (True, True)),
    ("delete", "events", {}, (False, False)),
]


async def test_a_node_and_the_account_are_told_what_they_may(server: Server) -> None:
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    kind = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
    for verb, resource, more, allowed in REVIEWED:
        asked = {"resourceAttributes": {"verb": verb, "resource": resource, **more}}
        body = kind | {"spec": asked}
        answers = [await user.create(path, body) for user in (server.node, server.account)]
        assert allowed == tuple(one["status"]["allowed"] for one in answers), asked


# Reads, lists and their forms.

SELECTED = {
    "spec.nodeName%3D%3Dnode-b": [OTHER_POD],
    "spec.nodeName%3Dnode-b,status.phase%3DPending": [OTHER_POD],
    "spec.nodeName%3Dnode-b,status.phase%3DRunning": [],
    "metadata.name%3Dpa,metadata.namespace%3Ddefault": [OWN_POD],
    f"metadata.name%3D{FREE_POD},spec.nodeName%3D": [FREE_POD],
    "spec.nodeName%3Dnobody-has-it": [],
}


async def test_fields_select_and_several_must_all_hold(server: Server) -> None:
    for selector, names in SELECTED.items():
        found = await server.admin.get(f"{ALL_PODS}?fieldSelector={selector}")
        assert ("PodList", "v1") == (found["kind"], found["apiVersion"])
        assert names == [item["metadata"]["name"] for item in found["items"]], selector
    assert "v1.36.3" == (await server.admin.get("/version"))["gitVersion"]


async def test_a_list_in_chunks_is_the_whole_list(server: Server) -> None:
    for name in ("chunk-a", "chunk-b", "chunk-c"):
        await server.admin.create(EVENTS, an_event(name))
    whole = await server.admin.get(EVENTS)
    first = await server.admin.get(f"{EVENTS}?limit=2")

    items, last = list(first["items"]), first
    while token := last["metadata"].get("continue"):
        last = await server.admin.get(f"{EVENTS}?limit=2&continue={token}")
        assert first["metadata"]["resourceVersion"] == last["metadata"]["resourceVersion"]
        items += last["items"]

    assert whole["items"] == items


async def test_metadata_alone_is_given_to_who_asks(server: Server) -> None:
    patched = await server.admin.have("PATCH", NODE_PATH, marks(meta="1"), accept=PARTIAL)
    one = await server.admin.have("GET", NODE_PATH, accept=PARTIAL)
    whole = await server.admin.get(NODE_PATH)

    assert patched == one
    assert {"kind", "apiVersion", "metadata"} == one.keys()
    assert ("PartialObjectMetadata", "meta.k8s.io/v1") == (one["kind"], one["apiVersion"])
    for member in ("name", "uid", "resourceVersion", "annotations"):
        assert whole["metadata"][member] == one["metadata"][member]

    async with server.node.watch(
        NODES, accept=PARTIAL, fieldSelector=f"metadata.name={NODE}"
    ) as events:
        (first,) = await events.take(1)
        again = await server.node.have("PATCH", NODE_PATH, marks(meta="2"), accept=PARTIAL)
        assert [{"type": "MODIFIED", "object": again}] == await events.take(1)
    assert one.keys() == first["object"].keys()


# Patches: three kinds, all or nothing; of a pod and of its status, one after the other.

AT = "/metadata/annotations"
FIRST: Object = {"type": "Ready", "status": "True"}
SECOND = FIRST | {"type": "Other"}
GONE = {"type": "Ready", "$patch": "delete"}


def changed(**status: object) -> Object:
    return {"status": status}


def operations(*some: str) -> list[Object]:
    """Of a JSON patch: `test NAME VALUE` and `remove NAME` of an annotation."""
    keys = ("op", "path", "value")
    rows = [one.split() for one in some]
    return [dict(zip(keys, (op, f"{AT}/{name}", *rest), strict=False)) for op, name, *rest in rows]


def ran(*some: tuple[str, str]) -> Object:
    """What a pod shows that runs, with these conditions."""
    return {"phase": "Running"} | ({"conditions": [*some]} if some else {})


NOTED, UNLOCK = marks(**{"n": "2", LOCK: "1"}), (f"test {ESCAPED} 1", f"remove {ESCAPED}")
STEPS: list[tuple[str, str, object, Object]] = [
    ("", MERGE, marks(a="1", b="2"), {"annotations": {"a": "1", "b": "2"}}),
    ("", STRATEGIC, marks(a=None, c="3"), {"annotations": {"b": "2", "c": "3"}}),
    ("", MERGE, {"metadata": {"labels": {"l": "v"}, "annotations": None}}, {"labels": {"l": "v"}}),
    ("", STRATEGIC, {"metadata": {"labels": None}}, {}),
    ("", MERGE, NOTED, {"annotations": {"n": "2", LOCK: "1"}}),
    ("", JSON_PATCH, operations(*UNLOCK), {"annotations": {"n": "2"}}),
    ("", MERGE, marks(n=None) | changed(phase="Failed"), {}),
    ("/status", MERGE, {"spec": {"nodeName": "elsewhere"}} | changed(phase="Running"), ran()),
    ("/status", STRATEGIC, changed(conditions=[FIRST]), ran(("Ready", "True"))),
    (
        *("/status", STRATEGIC, changed(conditions=[FIRST | {"status": "False"}, SECOND])),
        ran(("Ready", "False"), ("Other", "True")),
    ),
    ("/status", STRATEGIC, changed(conditions=[GONE]), ran(("Other", "True"))),
    ("/status", MERGE, changed(conditions=[FIRST]), ran(("Ready", "True"))),
]
FAILING = [
    operations("remove n", f"test {ESCAPED} 2"),
    operations("test none 1"),
    operations("remove none"),
    operations("steal n"),
]


async def test_patches_of_three_kinds_change_a_pod_and_its_status_apart(server: Server) -> None:
    path = await a_pod(server, "steps")
    for part, kind, body, expected in STEPS:
        patched = await server.admin.patch(f"{path}{part}", body, kind)
        assert seen("steps", NODE) | expected == essence(patched), body

    await server.admin.patch(path, NOTED)
    before = version(await server.admin.get(path))
    for body in FAILING:
        assert INVALID == await server.admin.refused("PATCH", path, body, kind=JSON_PATCH)
    assert BAD_REQUEST == await server.admin.refused("PATCH", path, {}, kind=JSON_PATCH)
    assert before == version(await server.admin.get(path))


async def test_a_node_and_its_status_are_patched_apart(server: Server) -> None:
    changes = marks(apart="1") | changed(capacity={"x.com/y": "5"})
    node = await server.admin.patch(
        f"{NODE_PATH}/status", changes | {"spec": {"unschedulable": True}}
    )
    assert "1" == node["metadata"]["annotations"]["apart"]
    assert "unschedulable" not in (node.get("spec") or {})
    node = await server.admin.patch(NODE_PATH, changed(capacity={"z.com/z": "1"}))
    assert {"x.com/y": "5"} == node["status"]["capacity"]


# Created, bound, deleted.


async def test_a_pod_is_bound_once_and_says_so(server: Server) -> None:
    claim = {"phase": "Running", "conditions": [FIRST | {"type": "PodScheduled"}]}
    created = await server.admin.create(PODS, plain_pod("bound") | {"status": claim})
    path, bind = f"{PODS}/bound", f"{PODS}/bound/binding"
    assert seen("bound", "") == essence(created)

    done = await server.admin.create(bind, binding("bound"))
    again = await server.admin.refused("POST", bind, binding("bound", OTHER_NODE))

    assert (("Status", "Success"), CONFLICT) == ((done["kind"], done["status"]), again)
    scheduled = [("PodScheduled", "True")]
    assert seen("bound", NODE, conditions=scheduled) == essence(await server.admin.get(path))
    await server.admin.delete(path)
    assert CONFLICT == await server.admin.refused("POST", bind, binding("bound"))


async def test_a_deletion_with_grace_marks_and_a_shorter_one_counts(server: Server) -> None:
    path = await a_pod(server, "graceful")
    for grace, left in ((20, 20), (5, 5), (-1, 1), (0, 0)):
        metadata = (await server.admin.delete(path, grace))["metadata"]
        assert left == metadata["deletionGracePeriodSeconds"]
        assert "deletionTimestamp" in metadata
    assert NOT_FOUND == await server.admin.refused("GET", path)


@pytest.mark.parametrize(
    ("how", "node", "grace", "left"),
    [("own", NODE, 7, 7), ("own-none", NODE, 0, 0), ("no-node", "", 7, 0), ("failed", NODE, 7, 0)],
)
async def test_a_pod_goes_at_once_that_nobody_has_to_stop(
    server: Server, how: str, node: str, grace: int, left: int
) -> None:
    pod, path = plain_pod(how, node), f"{PODS}/{how}"
    pod["spec"]["terminationGracePeriodSeconds"] = grace
    await server.admin.create(PODS, pod)
    if how == "failed":
        await server.admin.patch(f"{path}/status", changed(phase="Failed"))

    gone = await server.admin.have("DELETE", path, {})

    assert ("Pod", left) == (gone["kind"], gone["metadata"]["deletionGracePeriodSeconds"])
    assert (200 if left else 404) == (await server.admin.ask("GET", path)).code


# Watches: versions, selections, bookmarks, 410; each with pods on a node of its own.


def on(node: str) -> dict[str, str]:
    """The query for the pods of a node."""
    return {"fieldSelector": f"spec.nodeName={node}"}


async def now(server: Server) -> str:
    return version(await server.admin.get(PODS))


def seen(name: str, node: str, **more: object) -> Object:
    found = {"kind": "Pod", "name": name, "node": node, "phase": "Pending", **more}
    return {key: value for key, value in found.items() if value}


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
    running, ending = marked | ran(), marked | ran() | {"is_ending": True}
    expected = [*(("MODIFIED", one) for one in (marked, running, ending)), ("DELETED", ending)]
    assert expected == [told(event) for event in events]
    versions = [version(event["object"]) for event in events]
    assert (version(patched), version(gone)) == (versions[0], versions[-1])
    assert sorted(versions, key=int) == versions


async def test_what_enters_a_selection_is_added_and_what_leaves_is_deleted(server: Server) -> None:
    path, since = await a_pod(server, "wanderer", ""), await now(server)
    running = {"fieldSelector": "spec.nodeName=selected,status.phase=Running"}

    async with server.admin.watch(ALL_PODS, **running, resourceVersion=since) as active:
        await server.admin.create(f"{path}/binding", binding("wanderer", "selected"))
        await server.admin.patch(f"{path}/status", changed(phase="Running"))
        last = await server.admin.patch(f"{path}/status", changed(phase="Failed") | marks(x="1"))
        events = await active.take(2)

    shown = seen("wanderer", "selected", **ran(("PodScheduled", "True")))
    assert [("ADDED", shown), ("DELETED", shown)] == [*map(told, events)]
    assert version(last) == version(events[-1]["object"])


async def test_a_watch_ends_in_time_with_a_bookmark(server: Server) -> None:
    query = {**on("nothing"), "resourceVersion": await now(server), "allowWatchBookmarks": "true"}
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

    async with server.admin.watch(ALL_PODS, **on(node), resourceVersion=since) as events:
        (event,) = await events.rest()
    status = event["object"]
    assert ("ERROR", 410, "Expired") == (event["type"], status["code"], status["reason"])
    assert status["message"].startswith(f"too old resource version: {since} (")
    latest = await now(server)
    async with server.admin.watch(ALL_PODS, **on(node), resourceVersion=latest) as events:
        await server.admin.patch(path, marks(x="2"))
        assert ["MODIFIED"] == [event["type"] for event in await events.take(1)]
