"""The chart's rights on the real API server: enough for the agent and its Job, useless elsewhere.

All nodes share one account. What it may do is decided by the node that the token's pod is bound to,
which the API server writes into the token. The policies are as helm renders them with
`report.nodeCondition`; without it they allow less.
"""

import asyncio
import contextlib
import json
import shlex
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio

from agent import cluster as annotations
from agent.cluster import GPU_DEGRADED, NodeEvent, PodUid
from agent.kit.timing import SystemClock
from agent.kube.objects import EventSeries, event_object
from tests.chart.lab.helm import CHART, Helm
from tests.peers.lab.agents import RESOURCE, SOURCE
from tests.peers.lab.api import JSON_PATCH, STRATEGIC, Api, Object, notes_of
from tests.peers.lab.cluster import kept
from tests.peers.lab.control import ADMIN, NODE, NODE_PATH, ControlPlane, counted
from tests.peers.lab.part import run_program, until_answer
from tests.peers.lab.pods import a_container, a_pod
from tests.peers.lab.running import ACCOUNT, account_token, granted
from tests.peers.lab.servers import (
    EVENTS,
    NODES,
    OTHER_NODE,
    OTHER_POD,
    OWN_POD,
    PODS,
    conditions,
    marks,
    plain_pod,
    real_server,
)
from tests.shape.typed import told

SYSTEM_PODS: Final = "/api/v1/namespaces/kube-system/pods"
POLICIES: Final = str(SOURCE / "deploy" / "manifests" / "admission.yaml")
JOB: Final = "hami-agent-uninstall"
IN_FORCE: Final = 60.0
"""Seconds until the server's own watch has brought it a policy: one or two on a quiet machine."""
_KINDS: Final = ("ServiceAccount", "Role", "ValidatingAdmissionPolicy")
"""What of the chart's objects is a right; bindings too."""
_VALUES: Final = (
    *("namespaceOverride=kube-system", "image.repository=example/hami-agent"),
    "config.report.nodeCondition=true",
)


@dataclass(frozen=True, slots=True)
class Guarded:
    """One API server with the policies in force."""

    plane: ControlPlane
    admin: Api
    agent: Api
    """With the token of an agent's pod on node-a."""
    unbound: Api
    """With a token of the same account that names no pod."""
    job: Api
    """With the account of the Job after `helm uninstall`."""


async def kubectl(binaries: Path, plane: ControlPlane, *words: str) -> None:
    """Run it as the cluster's admin. Raises AssertionError: it failed."""
    environment = {"HOME": str(plane.root), "KUBECONFIG": str(plane.kubeconfig(ADMIN))}
    (await run_program(str(binaries / "kubectl"), *words, environment=environment)).succeeded()


async def apply(binaries: Path, plane: ControlPlane, objects: Sequence[Object]) -> None:
    """Have the rights among these objects in the place of those that are there."""
    rights = [one for one in objects if any(kind in one["kind"] for kind in _KINDS)]
    file = plane.root / "rights.json"
    file.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": rights}))
    words = ("apply", "--server-side", "--force-conflicts", f"--filename={file}")
    await kubectl(binaries, plane, *words)


async def token_of(admin: Api, account: str, kind: str = "", obj: Object | None = None) -> str:
    """A token of an account; with an object, one that ends with it and names its node."""
    spec: Object = {"expirationSeconds": 3600}
    if obj is not None:
        about = {key: obj["metadata"][key] for key in ("name", "uid")}
        spec["boundObjectRef"] = {"kind": kind, "apiVersion": "v1", **about}
    path = f"/api/v1/namespaces/kube-system/serviceaccounts/{account}/token"
    token: str = (await admin.create(path, {"spec": spec}))["status"]["token"]
    return token


def an_event(name: str, host: str, pod: str = OWN_POD) -> Object:
    """An Event as the agent on a node writes it; without a pod, it is about the Node."""
    about = ("default", pod, PodUid(pod)) if pod else ()
    event = NodeEvent("Tried", "a test", False, *about)
    found = event_object(EventSeries(event), host, SystemClock().now())
    return {**found, "metadata": {"name": name, "namespace": "default"}}


@contextlib.asynccontextmanager
async def open_guarded(binaries: Path, helm: Helm) -> AsyncIterator[Guarded]:
    """Returns once rights and policies are in force. Raises TimeoutError: they are not."""
    async with real_server(binaries) as server, contextlib.AsyncExitStack() as stack:
        plane, admin = server.plane, server.admin
        assert plane is not None
        await apply(binaries, plane, helm.told("hami-agent", CHART, _VALUES))
        pod = plain_pod("agent-of-node-a", NODE, namespace="kube-system")
        pod["spec"]["serviceAccountName"] = "hami-agent"
        made = await admin.create(SYSTEM_PODS, pod)
        tokens = await token_of(admin, "hami-agent", "Pod", made), await token_of(admin, JOB)
        agent, job = (plane.client(token) for token in tokens)
        stack.push_async_callback(agent.close)
        stack.push_async_callback(job.close)
        for node in (NODE_PATH, f"{NODES}/{OTHER_NODE}"):
            await admin.patch(f"{node}/status", conditions(("Ready", "True")), STRATEGIC)
        patched = f"{NODES}/{OTHER_NODE}", f"{PODS}/{OTHER_POD}/status", f"{NODE_PATH}/status"
        refused = [(agent, "POST", EVENTS, an_event("probe", OTHER_NODE))]
        refused += [(agent, "PATCH", path, marks(seen="1")) for path in patched[:2]]
        refused += [(job, "PATCH", path, marks(seen="1")) for path in patched[::2]]

        async def is_in_force() -> bool:
            """Where a right is not known yet, the refusal is not a policy's."""
            degraded, path = conditions((GPU_DEGRADED, "True")), f"{patched[2]}?dryRun=All"
            allowed = await agent.ask("PATCH", path, degraded, kind=STRATEGIC)
            told = [await who.ask(how, f"{at}?dryRun=All", what) for who, how, at, what in refused]
            of_policies = ["ValidatingAdmissionPolicy" in one.told[2] for one in told]
            return allowed.code < 300 and all(of_policies)

        await until_answer(is_in_force, IN_FORCE, lambda: "the policies are not in force")
        yield Guarded(plane, admin, agent, server.account, job)


OWN, OTHER = f"{PODS}/{OWN_POD}/status", f"{PODS}/{OTHER_POD}/status"
OTHER_PATH, STATUS = f"{NODES}/{OTHER_NODE}", f"{NODE_PATH}/status"
REPORT = (annotations.REGISTER, annotations.SCORE, annotations.HANDSHAKE)

NOT_WRITTEN = "the agent may not write this annotation of a Node"
OWN_EVENTS_ONLY = "the agent may write Events of its own only"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def guarded(binaries, tools, tmp_path_factory):
    helm = Helm(tools / "helm", tmp_path_factory.mktemp("helm"))
    async with kept(open_guarded(binaries, helm)) as made:
        yield made


def without(kind):
    return {"status": {"conditions": [{"type": kind, "$patch": "delete"}]}}


LABEL = {"metadata": {"labels": {"free": "1"}}}
FINALIZER = {"metadata": {"finalizers": ["example.com/kept"]}}
TAINT = {"spec": {"taints": [{"key": "a", "effect": "NoExecute"}]}}
DEGRADED = (GPU_DEGRADED, "True")
KUBELETS = [
    {"status": one}
    for one in (
        {"capacity": {RESOURCE: "8"}},
        {"allocatable": {RESOURCE: "8"}},
        {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]},
        {"daemonEndpoints": {"kubeletEndpoint": {"Port": 1}}},
        {"nodeInfo": {"kubeletVersion": "v1"}},
        {"volumesInUse": ["a"]},
        {"phase": "Pending"},
    )
]
"""What the kubelet alone tells of its Node."""
FORGED = {
    ("agent", "the agent may change its own Node only"): [
        (OTHER_PATH, marks(**{annotations.REGISTER: "[]"})),
        (f"{OTHER_PATH}/status", conditions(DEGRADED)),
    ],
    ("agent", NOT_WRITTEN): [
        (NODE_PATH, marks(**{note: "1"}))
        for note in ("seen", annotations.CORDON, annotations.MUTEX_LOCK)
    ],
    ("agent", "the agent may not remove this annotation of a Node"): [
        (NODE_PATH, marks(kept=None))
    ],
    ("agent", "the agent may change pods of its own node only"): [
        (OTHER, marks(**{annotations.BIND_PHASE: "success"}))
    ],
    ("agent", "the agent may not change this annotation of a pod"): [
        (OWN, marks(**note))
        for note in ({annotations.ALLOCATED: ";"}, {"seen": "1"}, {"kept": None})
    ],
    ("agent", "the agent may change annotations only"): [
        *((NODE_PATH, patch) for patch in (LABEL, FINALIZER, TAINT)),
        *((OWN, patch) for patch in (LABEL, {"status": {"phase": "Failed"}})),
        *((STATUS, patch) for patch in (conditions(DEGRADED, ("Ready", "False")), *KUBELETS)),
    ],
    ("unbound", "the token does not say on which node its pod is"): [
        (path, marks(**{annotations.SCORE: "1"})) for path in (NODE_PATH, OTHER_PATH, OWN)
    ],
    ("job", "who cleans up may write no annotation"): [
        (NODE_PATH, marks(**{annotations.REGISTER: "[]"})),
        (OTHER_PATH, marks(**{"hami-agent/new": "1"})),
        (NODE_PATH, marks(**{annotations.MUTEX_LOCK: "mine"})),
    ],
    ("job", "who cleans up may not remove this annotation"): [
        (path, marks(kept=None)) for path in (NODE_PATH, STATUS)
    ],
    ("job", "who cleans up may remove annotations and the condition GpuDegraded only"): [
        *((NODE_PATH, patch) for patch in (LABEL, FINALIZER, TAINT)),
        *((STATUS, conditions(one)) for one in (DEGRADED, ("Ready", "False"), ("Mine", "True"))),
        *((STATUS, patch) for patch in (without("Ready"), KUBELETS[0], KUBELETS[3])),
    ],
}


@pytest.mark.parametrize(("who", "why"), FORGED)
async def test_a_forged_patch_is_denied_and_changes_nothing(guarded, who, why):
    for path, patch in FORGED[who, why]:
        whole = path.removesuffix("/status")
        await guarded.admin.patch(whole, marks(kept="1"))
        if whole == NODE_PATH and who == "job":
            await guarded.admin.patch(STATUS, conditions((GPU_DEGRADED, "False")), STRATEGIC)
        before = await guarded.admin.get(whole)

        code, reason, text = await getattr(guarded, who).told("PATCH", path, patch, kind=STRATEGIC)

        assert (403, "Forbidden", True) == (code, reason, why in text), (path, patch, text)
        assert before == await guarded.admin.get(whole)


async def test_what_agents_and_their_job_write_they_may_write_change_and_remove(guarded):
    agents = (
        (NODE_PATH, (*REPORT, "hami-agent/anything")),
        (OWN, (annotations.BIND_PHASE, annotations.TO_ALLOCATE)),
    )
    for path, notes in agents:
        for value in ("1", "2", None):
            await guarded.agent.patch(path, marks(**dict.fromkeys(notes, value)))
            held = notes_of(await guarded.admin.get(path.removesuffix("/status")))
            assert {value} == {held.get(note) for note in notes}
    before = (await guarded.admin.get(NODE_PATH))["status"]
    for value in ("True", "False"):
        changed = conditions((GPU_DEGRADED, value))
        left = (await guarded.agent.patch(STATUS, changed, STRATEGIC))["status"]
        assert {"Ready": "True", GPU_DEGRADED: value} == kinds(left)
        assert before | {"conditions": left["conditions"]} == left

    for path in (NODE_PATH, OTHER_PATH):
        gone = (*REPORT, "hami-agent/a")
        await guarded.admin.patch(path, marks(**dict.fromkeys((*gone, "kept"), "1")))
        await guarded.admin.patch(f"{path}/status", conditions(DEGRADED), STRATEGIC)
        await guarded.job.patch(f"{path}/status", without(GPU_DEGRADED), STRATEGIC)
        await guarded.job.patch(path, marks(**dict.fromkeys(gone)))
        node = await guarded.admin.get(path)
        assert {"kept"} == notes_of(node).keys()
        assert {"Ready": "True"} == kinds(node["status"])


def kinds(status):
    return {one["type"]: one["status"] for one in status["conditions"]}


async def test_the_lock_is_released_and_never_taken_or_changed(guarded):
    pointer = "/metadata/annotations/hami.io~1mutex.lock"
    released = [{"op": "test", "path": pointer, "value": "mine"}, {"op": "remove", "path": pointer}]
    await guarded.admin.patch(NODE_PATH, marks(**{annotations.MUTEX_LOCK: "mine"}))

    forged = marks(**{annotations.MUTEX_LOCK: "yours"})
    assert NOT_WRITTEN in (await guarded.agent.told("PATCH", NODE_PATH, forged))[2]

    left = await guarded.agent.patch(NODE_PATH, released, JSON_PATCH)
    assert annotations.MUTEX_LOCK not in notes_of(left)


def about(**changes):
    return {"involvedObject": an_event("some", NODE)["involvedObject"] | changes}


OWNER = {"apiVersion": "v1", "kind": "Pod", "name": OWN_POD, "uid": "u"}
FORGED_EVENTS = {
    OWN_EVENTS_ONLY: [
        {"source": {"component": "kubelet", "host": NODE}},
        {"source": {"component": "hami-agent", "host": OTHER_NODE}},
        {"reportingComponent": "kubelet"},
        {"reportingInstance": OTHER_NODE},
    ],
    "the agent may write Events about its own Node and about pods only": [
        about(kind="Node", name=OTHER_NODE, namespace=None),
        about(kind="ConfigMap"),
        about(apiVersion="v2"),
    ],
    "the agent may tie an Event to nothing else": [
        {"related": about()["involvedObject"]},
        {"metadata": {"finalizers": ["example.com/kept"]}},
        {"metadata": {"ownerReferences": [OWNER]}},
    ],
}


@pytest.mark.parametrize("why", FORGED_EVENTS)
async def test_a_forged_event_is_denied_new_or_changed(guarded, why):
    event = an_event("agents", NODE)
    await guarded.admin.ask("POST", EVENTS, event)
    for forged in FORGED_EVENTS[why]:
        notes = event["metadata"] | forged.get("metadata", {})
        new = event | forged | {"metadata": notes | {"name": "forged"}}
        for asked in (("POST", EVENTS, new), ("PATCH", f"{EVENTS}/agents", forged)):
            _, reason, text = await guarded.agent.told(*asked)
            assert ("Forbidden", True) == (reason, why in text), (asked, text)


async def test_events_of_its_own_are_written_and_counted_on_and_no_other_is_changed(guarded):
    for name, pod in (("of-a-pod", OWN_POD), ("of-the-node", "")):
        await guarded.agent.create(EVENTS, an_event(name, NODE, pod))
        counted_on = await guarded.agent.patch(f"{EVENTS}/{name}", {"count": 2})
        assert 2 == counted_on["count"]

    ours = an_event("kubelets", NODE)
    theirs = {"source": {"component": "kubelet", "host": NODE}, "reportingComponent": "kubelet"}
    await guarded.admin.create(EVENTS, ours | theirs)
    await guarded.admin.create(EVENTS, an_event("elsewhere", OTHER_NODE))
    taken = {key: ours[key] for key in ("source", "reportingComponent", "reportingInstance")}
    for name, patch in (
        *(("kubelets", {"message": "forged"}), ("kubelets", taken)),
        ("elsewhere", {"count": 2}),
    ):
        _, _, text = await guarded.agent.told("PATCH", f"{EVENTS}/{name}", patch)
        assert OWN_EVENTS_ONLY in text


async def test_everybody_else_is_left_alone_and_the_job_may_nothing_else(guarded):
    await guarded.admin.patch(OTHER_PATH, marks(seen="1"))
    await guarded.admin.patch(NODE_PATH, {"metadata": {"labels": {"an-admins": "1"}}})
    await guarded.admin.create(EVENTS, an_event("an-admins", OTHER_NODE))
    await guarded.admin.patch(OTHER_PATH, marks(seen=None))

    for method, path in (
        ("DELETE", NODE_PATH),
        ("GET", PODS),
        ("GET", "/api/v1/namespaces/kube-system/secrets"),
        ("GET", "/api/v1/namespaces/kube-system/configmaps"),
        ("PATCH", OWN),
    ):
        body = marks(seen="1") if method == "PATCH" else None
        code, _, text = await guarded.job.told(method, path, body)
        assert (403, True) == (code, "is forbidden" in text)


# What an uninstallation leaves on the Node: where no plugin serves, nothing of the agent's.


async def written(guarded, *paths):
    """What an agent leaves, on those Nodes."""
    notes = {annotations.REGISTER: "[]", annotations.SCORE: "[]", "hami-agent/a": "1", "kept": "1"}
    for path in paths:
        await guarded.admin.patch(path, marks(**notes))
        await guarded.admin.patch(f"{path}/status", conditions(DEGRADED), STRATEGIC)


async def left(guarded, *paths):
    """What of an agent's is on these Nodes: annotations and conditions."""
    found = []
    for node in [await guarded.admin.get(path) for path in paths]:
        notes = notes_of(node)
        assert "kept" in notes
        found += [one for one in notes if one in REPORT or one.startswith("hami-agent/")]
        found += [one for one in kinds(node["status"]) if one == GPU_DEGRADED]
    return found


async def test_the_documented_commands_wait_for_an_agent_clean_all_nodes_and_end_the_account(
    guarded, binaries, tmp_path
):
    (clean,) = [
        one
        for one in told("GUIDE.md")
        if one.startswith("hami-agent uninstall --") and "--kubeconfig" in one
    ]
    (revoke,) = [
        one for one in told("GUIDE.md") if one.startswith("kubectl delete clusterrolebinding")
    ]
    plane, admin = guarded.plane, guarded.admin
    (tmp_path / "admin.kubeconfig").symlink_to(plane.kubeconfig(ADMIN))
    await written(guarded, NODE_PATH, OTHER_PATH)
    before = await left(guarded, OTHER_PATH)
    await admin.delete(f"{SYSTEM_PODS}/agent-of-node-a", grace=0)
    pod = plain_pod("hami-agent-x", OTHER_NODE, namespace="kube-system")
    pod["metadata"]["labels"] = {"app.kubernetes.io/name": "hami-agent"}
    pod["spec"]["serviceAccountName"] = "hami-agent"
    await admin.create(SYSTEM_PODS, pod)
    mark = plane.audit.mark()

    agent = (sys.executable, "-m", "agent", *shlex.split(clean)[1:])
    here = run_program(*agent, environment={"PYTHONPATH": str(SOURCE)}, folder=tmp_path)
    verb = asyncio.get_running_loop().create_task(here)

    async def has_asked_twice():
        return counted(plane.audit.since(mark, ADMIN, "hami-agent-uninstall"))["list pods"] > 1

    await until_answer(has_asked_twice, IN_FORCE, lambda: "nobody waits for the agent's pod")
    assert before == await left(guarded, OTHER_PATH)
    await admin.delete(f"{SYSTEM_PODS}/hami-agent-x", grace=0)
    (await verb).succeeded()
    assert [] == await left(guarded, NODE_PATH, OTHER_PATH)

    await guarded.job.get(NODES)
    await kubectl(binaries, plane, *shlex.split(revoke)[1:])

    async def is_powerless():
        asked = (("GET", NODES, None), ("PATCH", NODE_PATH, marks(**{"hami-agent/a": None})))
        answers = [await guarded.job.ask(*one) for one in asked]
        return [403, 403] == [one.code for one in answers]

    await until_answer(is_powerless, IN_FORCE, lambda: "the account has its rights")


# The agent itself, confined in a whole cluster.


@pytest_asyncio.fixture(loop_scope="session")
async def confined(cluster, binaries):
    """A kubeconfig of the account on this node, with the policies in force; gone afterwards."""
    plane = cluster.plane
    await account_token(cluster.api)
    token = await token_of(cluster.api, "hami-agent", "Node", await cluster.api.get(NODE_PATH))
    client = plane.client(token)

    async def until_may(code):
        # Another module may have left marks on the Node: one that is there is no change.
        path, body = f"{NODE_PATH}?dryRun=All", marks(confined="1")

        async def is_so():
            return code == (await client.ask("PATCH", path, body)).code

        await until_answer(is_so, IN_FORCE, lambda: f"the policies: not yet {code}")

    await kubectl(binaries, plane, "apply", "--server-side", f"--filename={POLICIES}")
    try:
        await until_may(403)
        yield plane.kubeconfig_for("confined", token)
    finally:
        await kubectl(binaries, plane, "delete", f"--filename={POLICIES}")
        await until_may(200)
        await client.close()


async def test_the_agent_works_with_these_rights_and_uses_each_of_them(cluster, confined):
    mark = cluster.plane.audit.mark()
    await cluster.start_registered_agent("--kubeconfig", str(confined))

    (served,) = await cluster.run(cluster.telling(a_pod("served", a_container())))
    await cluster.until_settled(served)
    # Bound without a lock: the Node is read before the refusal, which is told by an Event.
    await cluster.place(a_pod("unplaced"), [[cluster.share(0)]], locked=False)
    await cluster.until_failed("unplaced")
    await until_asked(cluster, mark, "create events")
    # An Event is counted on where the same happens again: what cannot be shared is told at each
    # start.
    path = cluster.root / "mig.json"
    path.write_text(json.dumps({"nodeconfig": [{"name": NODE, "operatingmode": "mig"}]}))
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

    await until_answer(is_asked, IN_FORCE, lambda: f"the agent asked for no {wanted}")
