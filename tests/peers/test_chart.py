"""The rights of deploy/ on the real API server: enough for the agent, and useless elsewhere.

All nodes share one account. What it may do is decided by the node that the token's pod is bound to,
which the API server writes into the token.
"""

import contextlib

import pytest
import pytest_asyncio

from agent import cluster as annotations
from tests.peers.lab.api import JSON_PATCH, RefusedError
from tests.peers.lab.cluster import ACCOUNT, account_token, kept
from tests.peers.lab.control import counted
from tests.peers.lab.guarded import (
    ACCOUNTS,
    COLLECTIONS,
    IN_FORCE,
    an_event,
    apply_policies,
    bound_to,
    open_guarded,
    policies,
)
from tests.peers.lab.identities import NODE
from tests.peers.lab.node_state import notes_of
from tests.peers.lab.placement import annotate, bind, create_by_hand, share
from tests.peers.lab.pods import a_container, a_pod, run, telling, until_failed, until_settled
from tests.peers.lab.requests import granted
from tests.peers.lab.servers import (
    EVENTS,
    NODE_PATH,
    NODES,
    OTHER_NODE,
    OTHER_POD,
    OWN_POD,
    PODS,
    marks,
)
from tests.peers.lab.settings import NODE_CONFIG, MountedFiles, node_config, open_files
from tests.peers.lab.space import until_answer

OWN, OTHER = f"{PODS}/{OWN_POD}/status", f"{PODS}/{OTHER_POD}/status"
OTHER_PATH = f"{NODES}/{OTHER_NODE}"
TOLD = 30.0

OWN_NODE_ONLY = "the agent may change its own Node only"
OWN_PODS_ONLY = "the agent may change pods of its own node only"
NOT_WRITTEN = "the agent may not write this annotation of a Node"
NOT_REMOVED = "the agent may not remove this annotation of a Node"
NOT_OF_A_POD = "the agent may not change this annotation of a pod"
ANNOTATIONS_ONLY = "the agent may change annotations only"
OWN_EVENTS_ONLY = "the agent may write Events of its own only"
ITS_NODE_AND_PODS_ONLY = "the agent may write Events about its own Node and about pods only"
TIED_TO_NOTHING = "the agent may tie an Event to nothing else"
NO_NODE = "the token does not say on which node its pod is"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def guarded(binaries):
    async with kept(open_guarded(binaries, policies())) as made:
        yield made


def released(value="mine"):
    pointer = "/metadata/annotations/hami.io~1mutex.lock"
    return [{"op": "test", "path": pointer, "value": value}, {"op": "remove", "path": pointer}]


LABEL = {"metadata": {"labels": {"free": "1"}}}
TAINT = {"spec": {"unschedulable": True}}
FINALIZER = {"metadata": {"finalizers": ["example.com/kept"]}}
FORGED = [
    (OTHER_PATH, marks(**{annotations.REGISTER: "[]"}), OWN_NODE_ONLY),
    (NODE_PATH, marks(seen="1"), NOT_WRITTEN),
    (NODE_PATH, marks(**{annotations.CORDON: "GPU-1"}), NOT_WRITTEN),
    (NODE_PATH, marks(**{annotations.MUTEX_LOCK: "mine"}), NOT_WRITTEN),
    (NODE_PATH, marks(kept=None), NOT_REMOVED),
    (NODE_PATH, LABEL, ANNOTATIONS_ONLY),
    (NODE_PATH, FINALIZER, ANNOTATIONS_ONLY),
    (NODE_PATH, TAINT, ANNOTATIONS_ONLY),
    (OTHER, marks(**{annotations.BIND_PHASE: "success"}), OWN_PODS_ONLY),
    (OWN, marks(**{annotations.ALLOCATED: "GPU-1,NVIDIA,1,1:;"}), NOT_OF_A_POD),
    (OWN, marks(seen="1"), NOT_OF_A_POD),
    (OWN, marks(kept=None), NOT_OF_A_POD),
    (OWN, LABEL, ANNOTATIONS_ONLY),
    (OWN, {"status": {"phase": "Failed"}}, ANNOTATIONS_ONLY),
]


@pytest.mark.parametrize(("path", "patch", "why"), FORGED)
async def test_a_forged_patch_is_denied_and_changes_nothing(guarded, path, patch, why):
    whole = path.removesuffix("/status")
    kept_note = marks(kept="1")
    await guarded.admin.have("PATCH", whole, kept_note)
    before = await guarded.admin.have("GET", whole)

    code, reason, text = await guarded.agent.told("PATCH", path, patch)

    assert (403, "Forbidden") == (code, reason)
    assert why in text
    assert before == await guarded.admin.have("GET", whole)


@pytest.mark.parametrize(
    ("path", "notes"),
    [
        (NODE_PATH, (annotations.REGISTER, annotations.SCORE, annotations.HANDSHAKE)),
        (NODE_PATH, ("hami-agent/anything",)),
        (OWN, (annotations.BIND_PHASE, annotations.TO_ALLOCATE)),
    ],
)
async def test_what_the_agent_writes_it_may_write_change_and_remove(guarded, path, notes):
    for value in ("1", "2", None):
        await guarded.agent.have("PATCH", path, marks(**dict.fromkeys(notes, value)))
        held = notes_of(await guarded.admin.have("GET", path.removesuffix("/status")))
        assert {value} == {held.get(note) for note in notes}


async def test_the_lock_is_released_and_never_taken_or_changed(guarded):
    await guarded.admin.have("PATCH", NODE_PATH, marks(**{annotations.MUTEX_LOCK: "mine"}))

    forged = marks(**{annotations.MUTEX_LOCK: "yours"})
    _, _, text = await guarded.agent.told("PATCH", NODE_PATH, forged)
    assert NOT_WRITTEN in text

    left = await guarded.agent.have("PATCH", NODE_PATH, released(), kind=JSON_PATCH)
    assert annotations.MUTEX_LOCK not in notes_of(left)


async def test_events_are_written_in_the_nodes_own_name_alone(guarded):
    _, _, text = await guarded.agent.told("POST", EVENTS, an_event("theirs", OTHER_NODE))
    assert OWN_EVENTS_ONLY in text

    await guarded.agent.have("POST", EVENTS, an_event("own", NODE))
    counted_on = await guarded.agent.have("PATCH", f"{EVENTS}/own", {"count": 2})
    assert 2 == counted_on["count"]

    await guarded.admin.have("POST", EVENTS, an_event("theirs", OTHER_NODE))
    _, _, text = await guarded.agent.told("PATCH", f"{EVENTS}/theirs", {"count": 2})
    assert OWN_EVENTS_ONLY in text


def about(**changes):
    return {"involvedObject": an_event("some", NODE)["involvedObject"] | changes}


OWNER = {"apiVersion": "v1", "kind": "Pod", "name": OWN_POD, "uid": "u"}
FORGED_EVENTS = [
    ({"source": {"component": "kubelet", "host": NODE}}, OWN_EVENTS_ONLY),
    ({"source": {"component": "hami-agent", "host": OTHER_NODE}}, OWN_EVENTS_ONLY),
    ({"reportingComponent": "kubelet"}, OWN_EVENTS_ONLY),
    ({"reportingInstance": OTHER_NODE}, OWN_EVENTS_ONLY),
    (about(kind="Node", name=OTHER_NODE, namespace=None), ITS_NODE_AND_PODS_ONLY),
    (about(kind="ConfigMap"), ITS_NODE_AND_PODS_ONLY),
    (about(apiVersion="v2"), ITS_NODE_AND_PODS_ONLY),
    ({"related": about()["involvedObject"]}, TIED_TO_NOTHING),
    ({"metadata": {"finalizers": ["example.com/kept"]}}, TIED_TO_NOTHING),
    ({"metadata": {"ownerReferences": [OWNER]}}, TIED_TO_NOTHING),
]


@pytest.mark.parametrize(("forged", "why"), FORGED_EVENTS)
async def test_a_forged_event_is_denied_new_or_changed(guarded, forged, why):
    event = an_event("agents", NODE)
    notes = event["metadata"] | forged.get("metadata", {})
    new = event | forged | {"metadata": notes | {"name": "forged"}}
    await guarded.admin.ask("POST", EVENTS, event)

    _, reason, text = await guarded.agent.told("POST", EVENTS, new)
    assert "Forbidden" == reason
    assert why in text
    _, reason, text = await guarded.agent.told("PATCH", f"{EVENTS}/agents", forged)
    assert "Forbidden" == reason
    assert why in text


async def test_an_event_of_the_nodes_kubelet_is_not_made_the_agents(guarded):
    theirs = an_event("kubelets", NODE)
    ours = {key: theirs[key] for key in ("source", "reportingComponent", "reportingInstance")}
    kubelets = {"source": {"component": "kubelet", "host": NODE}, "reportingComponent": "kubelet"}
    await guarded.admin.have("POST", EVENTS, theirs | kubelets)

    for patch in ({"message": "forged"}, ours):
        _, _, text = await guarded.agent.told("PATCH", f"{EVENTS}/kubelets", patch)
        assert OWN_EVENTS_ONLY in text


async def test_an_event_about_the_node_is_written_and_counted_on(guarded):
    event = an_event("of-the-node", NODE, pod="")

    await guarded.agent.have("POST", EVENTS, event)
    counted_on = await guarded.agent.have("PATCH", f"{EVENTS}/of-the-node", {"count": 2})
    assert 2 == counted_on["count"]


@pytest.mark.parametrize("path", [NODE_PATH, OTHER_PATH, OWN])
async def test_a_token_that_names_no_node_changes_nothing(guarded, path):
    code, _, text = await guarded.unbound.told("PATCH", path, marks(**{annotations.SCORE: "1"}))

    assert 403 == code
    assert NO_NODE in text


async def test_everybody_else_is_left_alone(guarded):
    await guarded.admin.have("PATCH", OTHER_PATH, marks(seen="1"))
    await guarded.admin.have("PATCH", NODE_PATH, {"metadata": {"labels": {"an-admins": "1"}}})
    await guarded.admin.have("POST", EVENTS, an_event("an-admins", OTHER_NODE))


@pytest_asyncio.fixture(loop_scope="session")
async def confined(cluster):
    """A kubeconfig of the account on this node, with the policies in force; gone afterwards."""
    await account_token(cluster.api)
    node = await cluster.api.get(NODE_PATH)
    review = await cluster.api.create(f"{ACCOUNTS}/hami-agent/token", bound_to("Node", node))
    token = review["status"]["token"]
    client = cluster.plane.client(token)

    async def is_denied():
        with contextlib.suppress(RefusedError):
            # Another module may have left marks on the Node: one that is there is no change.
            await client.patch(f"{NODE_PATH}?dryRun=All", marks(confined="1"))
            return False
        return True

    async def is_allowed():
        return not await is_denied()

    async def ask(method, path, body):
        return await cluster.api.call(method, path, body)

    await apply_policies(ask, policies())
    try:
        await until_answer(is_denied, IN_FORCE, lambda: "the policies are not in force")
        yield cluster.plane.kubeconfig_for("confined", token)
    finally:
        for document in policies():
            path = f"{COLLECTIONS[document['kind']]}/{document['metadata']['name']}"
            await cluster.api.delete(path)
        await until_answer(is_allowed, IN_FORCE, lambda: "the policies are still in force")
        await client.close()


async def test_the_agent_works_with_these_rights_and_uses_each_of_them(cluster, confined):
    mark = cluster.plane.audit.mark()
    await cluster.start_registered_agent("--kubeconfig", str(confined))

    (served,) = await run(cluster, telling(cluster, a_pod("served", a_container())))
    await until_settled(cluster, served)
    # Bound without a lock: the Node is read before the refusal, which is told by an Event.
    await create_by_hand(cluster, a_pod("unplaced"))
    await annotate(cluster, "unplaced", [[share(cluster, 0)]])
    await bind(cluster, "unplaced")
    await until_failed(cluster, "unplaced")
    await until_asked(cluster, mark, "create events")
    # An Event is counted on where the same happens again: what cannot be shared is told at each
    # start.
    path = open_files(cluster, MountedFiles).write(NODE_CONFIG, node_config(operatingmode="mig"))
    for wanted in ("create events", "patch events"):
        await cluster.end_agents()
        since = cluster.plane.audit.mark()
        await cluster.start_agent("--kubeconfig", str(confined), "--nodeconfig", str(path))
        await until_asked(cluster, since, wanted)

    asked = cluster.plane.audit.since(mark, ACCOUNT)
    # That an Event is there already is no refusal: this is how the agent learns of it.
    # Nor is it one that an agent was ended while it asked.
    known = {(409, "events"), (504, "nodes"), (504, "pods"), (504, "events")}
    failed = [one for one in asked if one.code >= 400]
    assert [] == [one for one in failed if (one.code, one.resource) not in known]
    assert granted() == set(counted(asked))


async def until_asked(cluster, mark, wanted):
    """Return once the account has asked for that since a mark."""

    async def is_asked():
        return wanted in counted(cluster.plane.audit.since(mark, ACCOUNT))

    await until_answer(is_asked, TOLD, lambda: f"the agent asked for no {wanted}")
