"""The API server model answers as kube-apiserver does: reads, lists, forms, and what is refused.

Every test is asked of both. `tests/peers/lab/servers.py` says what of an object must agree.
"""

import pytest

from tests.peers.lab.servers import (
    BAD_REQUEST,
    EVENTS,
    FREE_POD,
    NODE_PATH,
    NODES,
    NOT_FOUND,
    OTHER_NODE,
    OTHER_POD,
    OWN_POD,
    PODS,
    Refusal,
    Server,
    essence,
    plain_pod,
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


async def test_a_list_in_chunks_is_the_whole_list(server: Server) -> None:
    for name in ("chunk-a", "chunk-b", "chunk-c"):
        await server.admin.have("POST", EVENTS, an_event(name))
    whole = await server.admin.have("GET", EVENTS)
    first = await server.admin.have("GET", f"{EVENTS}?limit=2")
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


def an_event(name: str, **more: object) -> dict[str, object]:
    about = {"kind": "Pod", "name": OWN_POD, "namespace": "default"}
    return {"metadata": {"name": name}, "involvedObject": about, **more}
