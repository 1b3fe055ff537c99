"""The API server model writes as kube-apiserver does: created, bound, deleted.

Every test is asked of both, with pods of its own.
"""

import pytest

from tests.peers.lab.api import Object
from tests.peers.lab.identities import NODE
from tests.peers.lab.servers import (
    ALREADY_EXISTS,
    BAD_REQUEST,
    CONFLICT,
    EVENTS,
    FREE_POD,
    INVALID,
    NODES,
    NOT_FOUND,
    OTHER_NODE,
    PODS,
    Answer,
    Refusal,
    Server,
    a_pod,
    essence,
    marks,
    plain_pod,
)

NO_UID = "00000000-0000-4000-8000-000000000000"


def binding(name: str, node: str = NODE, **metadata: object) -> Object:
    return {"metadata": {"name": name, **metadata}, "target": {"kind": "Node", "name": node}}


@pytest.mark.parametrize(
    ("path", "body", "refusal"),
    [
        (PODS, plain_pod(FREE_POD), ALREADY_EXISTS),
        (NODES, {"metadata": {"name": NODE}}, ALREADY_EXISTS),
        (PODS, plain_pod("") | {"metadata": {}}, INVALID),
        (PODS, plain_pod("x") | {"metadata": {"name": "x", "namespace": "other"}}, BAD_REQUEST),
        (EVENTS, {"metadata": {"name": "x"}, "involvedObject": {"namespace": "team-a"}}, INVALID),
        (
            "/api/v1/namespaces/kube-system/events",
            {"metadata": {"name": "x"}, "involvedObject": {"kind": "Node", "name": NODE}},
            INVALID,
        ),
        (PODS, b"", BAD_REQUEST),
        (PODS, b"{", BAD_REQUEST),
        (PODS, b"[]", BAD_REQUEST),
    ],
)
async def test_what_cannot_be_created_is_refused(
    server: Server, path: str, body: object, refusal: Refusal
) -> None:
    assert refusal == await server.admin.refused("POST", path, body)


async def test_a_name_is_generated(server: Server) -> None:
    generated = plain_pod("") | {"metadata": {"generateName": "gen-"}}

    created = await server.admin.ask("POST", PODS, generated)

    assert 201 == created.code
    name = created.body["metadata"]["name"]
    assert ("gen-", 9) == (name[:4], len(name))


async def test_a_pod_is_bound_once_and_says_so(server: Server) -> None:
    path = await a_pod(server, "bound", "")
    other = await server.admin.refused("POST", f"{path}/binding", binding("bound", uid=NO_UID))
    assert CONFLICT == other

    created = await server.admin.ask(
        "POST", f"{path}/binding", binding("bound", annotations={"by": "binding"})
    )
    again = await server.admin.refused("POST", f"{path}/binding", binding("bound", OTHER_NODE))

    assert (201, "Status", "Success") == (
        created.code,
        created.body["kind"],
        created.body["status"],
    )
    expected = {
        "kind": "Pod",
        "name": "bound",
        "node": NODE,
        "phase": "Pending",
        "annotations": {"by": "binding"},
        "conditions": [("PodScheduled", "True")],
    }
    assert expected == essence(await server.admin.have("GET", path))
    assert CONFLICT == again


async def test_a_pod_that_names_its_node_is_not_scheduled_whatever_its_author_says(
    server: Server,
) -> None:
    claim = {"phase": "Running", "conditions": [{"type": "PodScheduled", "status": "True"}]}
    created = await server.admin.have("POST", PODS, plain_pod("unplaced", NODE) | {"status": claim})
    path = f"{PODS}/unplaced"
    await server.admin.have("PATCH", path, marks(x="1") | {"status": claim})

    expected = {"kind": "Pod", "name": "unplaced", "node": NODE, "phase": "Pending"}
    assert expected == essence(created)
    assert expected | {"annotations": {"x": "1"}} == essence(await server.admin.have("GET", path))


async def test_a_pod_that_is_not_there_is_not_bound(server: Server) -> None:
    refused = await server.admin.refused("POST", f"{PODS}/none/binding", binding("none"))

    assert NOT_FOUND == refused


async def test_a_pod_that_is_being_deleted_is_not_bound(server: Server) -> None:
    path = await a_pod(server, "dying")
    await server.admin.have("DELETE", path)

    refused = await server.admin.refused("POST", f"{path}/binding", binding("dying"))

    assert CONFLICT == refused


async def test_a_deletion_with_grace_marks_and_only_a_shorter_one_counts(server: Server) -> None:
    path = await a_pod(server, "graceful")

    async def delete(grace: int) -> tuple[int, bool]:
        metadata = (await deleted(server, path, gracePeriodSeconds=grace)).body["metadata"]
        return metadata["deletionGracePeriodSeconds"], "deletionTimestamp" in metadata

    assert [(20, True), (5, True), (5, True), (1, True)] == [
        await delete(grace) for grace in (20, 5, 25, -1)
    ]
    last = (await deleted(server, path, gracePeriodSeconds=0)).body
    assert 0 == last["metadata"]["deletionGracePeriodSeconds"]
    assert 404 == (await server.admin.ask("GET", path)).code


async def deleted(server: Server, path: str, **options: object) -> Answer:
    return await server.admin.ask("DELETE", path, options)


@pytest.mark.parametrize("how", ["no-node", "failed", "forced", "own-grace"])
async def test_a_pod_that_nobody_has_to_stop_goes_at_once(server: Server, how: str) -> None:
    pod = plain_pod(how, "" if how == "no-node" else NODE)
    if how == "own-grace":
        pod["spec"]["terminationGracePeriodSeconds"] = 0
    await server.admin.have("POST", PODS, pod)
    if how == "failed":
        phase = {"status": {"phase": "Failed"}}
        await server.admin.have("PATCH", f"{PODS}/{how}/status", phase)

    options = {"gracePeriodSeconds": 0} if how == "forced" else {}
    answer = await deleted(server, f"{PODS}/{how}", **options)

    assert (200, "Pod", 0) == (
        answer.code,
        answer.body["kind"],
        answer.body["metadata"]["deletionGracePeriodSeconds"],
    )
    assert 404 == (await server.admin.ask("GET", f"{PODS}/{how}")).code


async def test_a_pod_with_a_grace_period_of_its_own_gets_that(server: Server) -> None:
    pod = plain_pod("own", NODE)
    pod["spec"]["terminationGracePeriodSeconds"] = 7
    await server.admin.have("POST", PODS, pod)

    marked = await server.admin.have("DELETE", f"{PODS}/own")

    assert 7 == marked["metadata"]["deletionGracePeriodSeconds"]


async def test_another_pod_of_the_name_or_another_version_is_not_deleted(server: Server) -> None:
    path = await a_pod(server, "kept")
    held = (await server.admin.have("GET", path))["metadata"]

    by_uid = await server.admin.refused("DELETE", path, {"preconditions": {"uid": NO_UID}})
    by_version = await server.admin.refused(
        "DELETE", path, {"preconditions": {"resourceVersion": "1"}}
    )

    assert (CONFLICT, CONFLICT) == (by_uid, by_version)
    right = {"preconditions": {"uid": held["uid"]}, "gracePeriodSeconds": 0}
    assert 200 == (await server.admin.ask("DELETE", path, right)).code


async def test_a_node_that_goes_leaves_a_status(server: Server) -> None:
    await server.admin.have("POST", NODES, {"metadata": {"name": "short"}})

    answer = await server.admin.have("DELETE", f"{NODES}/short")

    assert ("Status", "Success") == (answer["kind"], answer["status"])


async def test_an_event_is_created_once_and_counted_on(server: Server) -> None:
    about = {"kind": "Node", "name": NODE, "uid": NODE}
    event = {"metadata": {"name": "node-a.17"}, "involvedObject": about, "count": 1}

    created = await server.admin.ask("POST", EVENTS, event)
    again = await server.admin.refused("POST", EVENTS, event)
    counted = await server.admin.have("PATCH", f"{EVENTS}/node-a.17", {"count": 2})

    assert (201, 2) == (created.code, counted["count"])
    assert ALREADY_EXISTS == again
