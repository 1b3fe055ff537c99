"""The API server model is watched as kube-apiserver is: versions, selections, bookmarks, 410.

Every test is asked of both, with pods on a node of its own. A real server that overloads answers
429; that is the model's alone, for nothing here can overload the real one.
"""

import pytest

from tests.peers.lab.api import Object
from tests.peers.lab.servers import (
    NODE_PATH,
    NODES,
    PODS,
    Server,
    a_pod,
    marks,
    plain_pod,
    told,
    version,
)

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
