"""The API server model patches as kube-apiserver does: three kinds, all or nothing, or refused.

Every test is asked of both, with pods of its own.
"""

import pytest

from tests.peers.lab.api import JSON_PATCH, MERGE, STRATEGIC, Object
from tests.peers.lab.identities import NODE
from tests.peers.lab.servers import (
    BAD_REQUEST,
    CONFLICT,
    INVALID,
    NODE_PATH,
    OTHER_NODE,
    OWN_POD,
    PODS,
    Refusal,
    Server,
    a_pod,
    essence,
    marks,
    version,
)

NO_UID = "00000000-0000-4000-8000-000000000000"
POD = f"{PODS}/{OWN_POD}"


@pytest.mark.parametrize("kind", [MERGE, STRATEGIC])
async def test_a_patch_merges_maps_and_null_removes(server: Server, kind: str) -> None:
    path = await a_pod(server, f"maps-{len(kind)}", annotations={"a/x": "1", "b": "2"})

    changes = {"metadata": {"annotations": {"a/x": None, "c": "3"}, "labels": {"l": "v"}}}
    await server.admin.have("PATCH", path, changes, kind=kind)
    found = await server.admin.have("GET", path)

    assert ({"b": "2", "c": "3"}, {"l": "v"}) == (
        found["metadata"]["annotations"],
        found["metadata"]["labels"],
    )
    bare = await server.admin.have("PATCH", path, {"metadata": {"annotations": None}}, kind=kind)
    assert "annotations" not in bare["metadata"]


async def test_a_patch_without_effect_is_no_write(server: Server) -> None:
    path = await a_pod(server, "still", annotations={"a": "1"})
    before = await server.admin.have("GET", path)

    for changes in (marks(a="1"), marks(b=None), {}, {"status": {"phase": "Running"}}):
        assert version(before) == version(await server.admin.have("PATCH", path, changes))
    same = await server.admin.have("PATCH", path, [], kind=JSON_PATCH)
    assert version(before) == version(same)


async def test_pods_and_their_status_are_patched_apart(server: Server) -> None:
    path = await a_pod(server, "apart")
    whole = marks(a="1") | {
        "status": {"phase": "Running", "message": "why"},
        "spec": {"nodeName": "elsewhere"},
    }

    patched = await server.admin.have("PATCH", f"{path}/status", whole)
    assert (NODE, "Running", {"a": "1"}) == (
        patched["spec"]["nodeName"],
        patched["status"]["phase"],
        patched["metadata"]["annotations"],
    )
    plain = marks(b="2") | {"status": {"phase": "Failed"}}
    patched = await server.admin.have("PATCH", path, plain)
    assert ("Running", "why", {"a": "1", "b": "2"}) == (
        patched["status"]["phase"],
        patched["status"]["message"],
        patched["metadata"]["annotations"],
    )


async def test_nodes_and_their_status_are_patched_apart(server: Server) -> None:
    changes = marks(apart="1") | {
        "status": {"capacity": {"x.com/y": "5"}},
        "spec": {"unschedulable": True},
    }

    patched = await server.admin.have("PATCH", f"{NODE_PATH}/status", changes)
    assert ({"x.com/y": "5"}, "1", False) == (
        patched["status"]["capacity"],
        patched["metadata"]["annotations"]["apart"],
        "unschedulable" in (patched.get("spec") or {}),
    )
    patched = await server.admin.have(
        "PATCH", NODE_PATH, {"status": {"capacity": {"z.com/z": "1"}}}
    )
    assert {"x.com/y": "5"} == patched["status"]["capacity"]


async def test_a_list_is_merged_by_key_or_replaced(server: Server) -> None:
    status = f"{await a_pod(server, 'lists')}/status"

    async def conditions(kind: str, *entries: Object) -> list[tuple[str, str]]:
        changes = {"status": {"conditions": list(entries)}}
        patched = await server.admin.have("PATCH", status, changes, kind=kind)
        found: list[tuple[str, str]] = essence(patched)["conditions"]
        return found

    first, other = {"type": "Ready", "status": "False"}, {"type": "Other", "status": "True"}
    assert [("Ready", "False"), ("Other", "True")] == await conditions(STRATEGIC, first, other)
    again = await conditions(STRATEGIC, {"type": "Ready", "status": "True"})
    assert [("Ready", "True"), ("Other", "True")] == again
    gone = await conditions(STRATEGIC, {"type": "Ready", "$patch": "delete"})
    assert [("Other", "True")] == gone
    assert [("Ready", "False")] == await conditions(MERGE, first)


async def test_a_json_patch_is_done_whole_or_not_at_all(server: Server) -> None:
    path = await a_pod(server, "steps", annotations={"hami.io/a": "1", "n": "2"})
    before = await server.admin.have("GET", path)
    at = "/metadata/annotations"
    failing: list[list[Object]] = [
        [
            {"op": "add", "path": f"{at}/x", "value": "1"},
            {"op": "test", "path": f"{at}/hami.io~1a", "value": "2"},
        ],
        [{"op": "test", "path": f"{at}/none", "value": "1"}],
        [{"op": "remove", "path": f"{at}/none"}],
        [{"op": "add", "path": "/metadata/none/none", "value": "1"}],
        [{"op": "replace", "path": "/metadata/none/none", "value": "1"}],
        [{"op": "steal", "path": f"{at}/hami.io~1a"}],
    ]
    for operations in failing:
        refused = await server.admin.refused("PATCH", path, operations, kind=JSON_PATCH)
        assert INVALID == refused
    assert version(before) == version(await server.admin.have("GET", path))

    done = [
        {"op": "test", "path": f"{at}/hami.io~1a", "value": "1"},
        {"op": "remove", "path": f"{at}/hami.io~1a"},
        {"op": "replace", "path": f"{at}/n", "value": "3"},
        {"op": "add", "path": f"{at}/new", "value": "4"},
    ]
    patched = await server.admin.have("PATCH", path, done, kind=JSON_PATCH)
    expected = {"n": "3", "new": "4"}
    assert expected == patched["metadata"]["annotations"]


@pytest.mark.parametrize(
    ("kind", "body", "refusal"),
    [
        (JSON_PATCH, {}, BAD_REQUEST),
        (MERGE, [], BAD_REQUEST),
        (MERGE, {"metadata": {"uid": NO_UID}}, INVALID),
        (MERGE, {"metadata": {"resourceVersion": "1"}}, CONFLICT),
    ],
)
@pytest.mark.parametrize("part", ["", "/status"])
async def test_a_patch_that_cannot_be_is_refused(
    server: Server, kind: str, body: object, refusal: Refusal, part: str
) -> None:
    assert refusal == await server.admin.refused("PATCH", POD + part, body, kind=kind)


async def test_a_pod_is_not_moved_by_a_patch(server: Server) -> None:
    moved = {"spec": {"nodeName": OTHER_NODE}}

    assert INVALID == await server.admin.refused("PATCH", POD, moved)


async def test_the_right_uid_and_version_let_a_patch_pass(server: Server) -> None:
    status = f"{await a_pod(server, 'held')}/status"
    held = (await server.admin.have("GET", status))["metadata"]
    metadata = {key: held[key] for key in ("uid", "resourceVersion")} | {"annotations": {"a": "1"}}

    patched = await server.admin.have("PATCH", status, {"metadata": metadata})

    assert {"a": "1"} == patched["metadata"]["annotations"]
    refused = await server.admin.refused(
        "PATCH", status, {"metadata": metadata | {"annotations": {"a": "2"}}}
    )
    assert CONFLICT == refused
