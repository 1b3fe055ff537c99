"""The API server model writes as kube-apiserver does: replaced, created, bound, deleted.

Every test is asked of both, with pods of its own.
"""

import pytest

from tests.peers.lab.api import Object
from tests.peers.lab.identities import NODE
from tests.peers.lab.servers import (
    EVENTS,
    FREE_POD,
    NODES,
    OTHER_NODE,
    PODS,
    Answer,
    Refusal,
    Server,
    a_pod,
    already_exists,
    bad_request,
    conflict,
    essence,
    invalid,
    marks,
    not_found,
    plain_pod,
    unclassified,
)

NO_UID = "00000000-0000-4000-8000-000000000000"
MODIFIED = "the object has been modified; please apply your changes to the latest version"
OTHER_NAMESPACE = (
    "the namespace of the provided object does not match the namespace sent on the request"
)


def binding(name: str, node: str = NODE, **metadata: object) -> Object:
    return {"metadata": {"name": name, **metadata}, "target": {"kind": "Node", "name": node}}


async def test_only_the_version_that_is_there_is_replaced(server: Server) -> None:
    path = await a_pod(server, "put")
    first = await server.admin.have("GET", path)
    await server.admin.have("PATCH", path, marks(a="1"))
    refused = 'Operation cannot be fulfilled on pods "put": '

    assert conflict(f"{refused}{MODIFIED} and try again") == await server.admin.refused(
        "PUT", path, first
    )
    newest = await server.admin.have("GET", path)
    newest["metadata"]["labels"] = {"l": "1"}
    newest["status"]["phase"] = "Failed"
    replaced = await server.admin.have("PUT", path, newest)
    assert ({"a": "1"}, {"l": "1"}, "Pending") == (
        replaced["metadata"]["annotations"],
        replaced["metadata"]["labels"],
        replaced["status"]["phase"],
    )
    del newest["metadata"]["resourceVersion"]
    ended = await server.admin.have("PUT", f"{path}/status", newest)
    assert "Failed" == ended["status"]["phase"]
    newest["metadata"]["uid"] = NO_UID
    code, reason, text = await server.admin.refused("PUT", path, newest)
    assert (409, "Conflict") == (code, reason)
    assert text.startswith(f"{refused}StorageError: invalid object, Code: 4, Key: ")
    assert f"/registry/pods/default/put, ResourceVersion: 0, AdditionalErrorMsg: {UID}" in text
    absent = await server.admin.refused("PUT", f"{PODS}/none", plain_pod("none"))
    assert not_found('pods "none"') == absent


UID = f"Precondition failed: UID in precondition: {NO_UID}, UID in object meta: "


@pytest.mark.parametrize(
    ("path", "body", "refusal"),
    [
        (
            PODS,
            plain_pod(FREE_POD),
            already_exists('pods "free"'),
        ),
        (
            NODES,
            {"metadata": {"name": NODE}},
            already_exists('nodes "node-a"'),
        ),
        (
            PODS,
            plain_pod("") | {"metadata": {}},
            invalid(
                'Pod "" is invalid: metadata.name: Required value: '
                "name or generateName is required",
            ),
        ),
        (
            PODS,
            plain_pod("x", resourceVersion="5"),
            unclassified("resourceVersion should not be set on objects to be created"),
        ),
        (
            PODS,
            plain_pod("x") | {"metadata": {"name": "x", "namespace": "other"}},
            bad_request(
                OTHER_NAMESPACE,
            ),
        ),
        (
            PODS,
            {"kind": "Node", "apiVersion": "v1", "metadata": {"name": "x"}},
            bad_request(
                (
                    'Node in version "v1" cannot be handled as a Pod: converting (v1.Node) to '
                    "(core.Pod): unknown conversion"
                ),
            ),
        ),
        (
            PODS,
            plain_pod("x", annotations={"a": 5}),
            bad_request(
                (
                    'Pod in version "v1" cannot be handled as a Pod: json: cannot unmarshal number '
                    "into Go struct field ObjectMeta.metadata.annotations of type string"
                ),
            ),
        ),
        (
            EVENTS,
            {"metadata": {"name": "x"}, "involvedObject": {"namespace": "team-a"}},
            invalid(
                (
                    'Event "x" is invalid: involvedObject.namespace: Invalid value: "team-a": '
                    "does not match event.namespace"
                ),
            ),
        ),
        (
            "/api/v1/namespaces/kube-system/events",
            {"metadata": {"name": "x"}, "involvedObject": {"kind": "Node", "name": NODE}},
            invalid(
                (
                    'Event "x" is invalid: involvedObject.namespace: Invalid value: "": '
                    "does not match event.namespace"
                ),
            ),
        ),
    ],
)
async def test_what_cannot_be_created_is_refused(
    server: Server, path: str, body: object, refusal: Refusal
) -> None:
    assert refusal == await server.admin.refused("POST", path, body)


@pytest.mark.parametrize("body", [b"", b"{", b"[]"])
async def test_a_body_that_is_no_object_is_not_recognized(server: Server, body: bytes) -> None:
    code, reason, text = await server.admin.refused("POST", PODS, body)

    assert (400, "BadRequest") == (code, reason)
    assert text.startswith("the object provided is unrecognized (must be of type Pod): couldn't ")


async def test_names_are_checked_and_generated(server: Server) -> None:
    code, reason, text = await server.admin.refused("POST", PODS, plain_pod("Bad_Name"))
    generated = plain_pod("") | {"metadata": {"generateName": "gen-"}}

    created = await server.admin.ask("POST", PODS, generated)

    assert (422, "Invalid") == (code, reason)
    assert text.startswith(
        'Pod "Bad_Name" is invalid: metadata.name: Invalid value: "Bad_Name": a '
    )
    assert text.endswith("[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')")
    assert 201 == created.code
    name = created.body["metadata"]["name"]
    assert ("gen-", 9) == (name[:4], len(name))


async def test_a_pod_is_bound_once_and_says_so(server: Server) -> None:
    path = await a_pod(server, "bound", "")
    code, reason, text = await server.admin.refused(
        "POST", f"{path}/binding", binding("bound", uid=NO_UID)
    )
    assert (409, "Conflict") == (code, reason)
    assert text.startswith('Operation cannot be fulfilled on pods "bound": StorageError: invalid ')

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
    taken = 'Operation cannot be fulfilled on pods/binding "bound": pod bound is already assigned'
    assert conflict(f'{taken} to node "node-a"') == again


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


@pytest.mark.parametrize(
    ("name", "body", "refusal"),
    [
        ("none", binding("none"), not_found('pods "none"')),
        (
            FREE_POD,
            binding("other"),
            bad_request("name in URL does not match name in Binding object"),
        ),
        (FREE_POD, {"metadata": {"name": FREE_POD}}, unclassified("target.name: Required value")),
        (
            FREE_POD,
            {"metadata": {"name": FREE_POD}, "target": {"kind": "Pod", "name": "x"}},
            unclassified(
                'target.kind: Unsupported value: "Pod": supported values: "Node", "<empty>"',
            ),
        ),
    ],
)
async def test_a_binding_that_cannot_be_is_refused(
    server: Server, name: str, body: object, refusal: Refusal
) -> None:
    assert refusal == await server.admin.refused("POST", f"{PODS}/{name}/binding", body)


async def test_a_pod_that_is_being_deleted_is_not_bound(server: Server) -> None:
    path = await a_pod(server, "dying")
    await server.admin.have("DELETE", path)

    refused = await server.admin.refused("POST", f"{path}/binding", binding("dying"))

    text = "pod dying is being deleted, cannot be assigned to a host"
    start = 'Operation cannot be fulfilled on pods/binding "dying": '
    assert (409, "Conflict", start + text) == refused


async def test_a_deletion_with_grace_marks_and_only_a_shorter_one_counts(server: Server) -> None:
    path = await a_pod(server, "graceful")

    async def delete(grace: int) -> tuple[int, bool]:
        metadata = (await deleted(server, path, gracePeriodSeconds=grace)).body["metadata"]
        return metadata["deletionGracePeriodSeconds"], "deletionTimestamp" in metadata

    assert [(20, True), (5, True), (5, True), (1, True)] == [
        await delete(grace) for grace in (20, 5, 25, -1)
    ]
    last = await server.admin.have("DELETE", f"{path}?gracePeriodSeconds=0")
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
    refused = 'Operation cannot be fulfilled on Pod "kept": the '

    by_uid = await server.admin.refused("DELETE", path, {"preconditions": {"uid": NO_UID}})
    by_version = await server.admin.refused(
        "DELETE", path, {"preconditions": {"resourceVersion": "1"}}
    )

    uids = f"UID in the precondition ({NO_UID}) does not match the UID in record ({held['uid']}). "
    ending = "The object might have been deleted and then recreated"
    assert (409, "Conflict", refused + uids + ending) == by_uid
    versions = "ResourceVersion in the precondition (1) does not match the ResourceVersion in "
    ending = f"record ({held['resourceVersion']}). The object might have been modified"
    assert (409, "Conflict", refused + versions + ending) == by_version
    right = {"preconditions": {"uid": held["uid"]}, "gracePeriodSeconds": 0}
    assert 200 == (await server.admin.ask("DELETE", path, right)).code


async def test_a_node_that_goes_leaves_a_status(server: Server) -> None:
    created = await server.admin.have("POST", NODES, {"metadata": {"name": "short"}})

    answer = await server.admin.have("DELETE", f"{NODES}/short")

    details = {"name": "short", "kind": "nodes", "uid": created["metadata"]["uid"]}
    assert ("Status", "Success", details) == (answer["kind"], answer["status"], answer["details"])


async def test_an_event_is_created_once_and_counted_on(server: Server) -> None:
    about = {"kind": "Node", "name": NODE, "uid": NODE}
    event = {"metadata": {"name": "node-a.17"}, "involvedObject": about, "count": 1}

    created = await server.admin.ask("POST", EVENTS, event)
    again = await server.admin.refused("POST", EVENTS, event)
    counted = await server.admin.have("PATCH", f"{EVENTS}/node-a.17", {"count": 2})

    assert (201, 2) == (created.code, counted["count"])
    assert already_exists('events "node-a.17"') == again
