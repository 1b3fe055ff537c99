"""What an uninstallation leaves on the Node: where no plugin serves, nothing of the agent's."""

import asyncio
import functools
import os
import shlex
import sys

import pytest
import pytest_asyncio

from agent import cluster as annotations
from agent.cluster import GPU_DEGRADED
from tests.peers.lab.agents import SOURCE
from tests.peers.lab.cluster import kept
from tests.peers.lab.control import counted
from tests.peers.lab.identities import ADMIN, NODE, NODE_USER
from tests.peers.lab.node_state import notes_of
from tests.peers.lab.servers import NODE_PATH, NODES, OTHER_NODE, marks, plain_pod, real_server
from tests.peers.lab.space import until_answer
from tests.peers.lab.switch import open_confined
from tests.shape.typed import told


async def uninstalled(kubeconfig, *words):
    """The exit code of the verb, and what it says."""
    ended = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agent", "uninstall", "--kubeconfig", str(kubeconfig), *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"},
    )
    said, _ = await ended.communicate()
    return ended.returncode, said.decode()


@pytest.fixture
def cleaning(cluster):
    """All Nodes, as the admin; there are no pods to wait for."""
    everywhere = ("--all-nodes", "--namespace=kube-system", "--selector=app=none,tier=none")
    return functools.partial(uninstalled, cluster.plane.kubeconfig(ADMIN), *everywhere)


async def test_what_the_agent_wrote_goes_after_it_and_nothing_else(cluster, cleaning):
    await cluster.start_registered_agent()
    await cluster.api.patch(NODE_PATH, marks(seen="1", **{annotations.CORDON: ""}))
    await cluster.end_agents()

    assert 0 == (await cleaning())[0]

    left = notes_of(await cluster.api.get(NODE_PATH))
    assert annotations.REGISTER not in left
    # The scheduler may have answered the report just then.
    assert not left.get(annotations.HANDSHAKE, "").startswith("Reported")
    assert {"seen", annotations.CORDON} <= set(left)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def server(binaries):
    async with kept(real_server(binaries)) as made:
        yield made


async def written(server):
    """What an agent writes on its Node, by the node's own user."""
    notes = {annotations.REGISTER: "[]", annotations.SCORE: "[]", "hami-agent/a": "1"}
    await server.node.have("PATCH", NODE_PATH, marks(**notes))
    condition = {"type": GPU_DEGRADED, "status": "True", "reason": "r", "message": "m"}
    body = {"status": {"conditions": [condition]}}
    kind = "application/strategic-merge-patch+json"
    await server.node.have("PATCH", f"{NODE_PATH}/status", body, kind=kind)
    return notes


async def test_with_the_nodes_own_identity_its_node_is_cleaned_and_no_other(server, tmp_path):
    notes = await written(server)
    here = ("--run-dir", str(tmp_path), "--node-name")
    kubeconfig = server.plane.kubeconfig(NODE_USER)

    code, said = await uninstalled(kubeconfig, *here, NODE)
    elsewhere, refused = await uninstalled(kubeconfig, *here, OTHER_NODE)
    again, nothing = await uninstalled(kubeconfig, *here, NODE)

    node = await server.admin.have("GET", NODE_PATH)
    assert (0, True) == (code, f"{NODE}: removed " in said), said
    assert not notes.keys() & notes_of(node).keys()
    assert GPU_DEGRADED not in [one["type"] for one in node["status"].get("conditions", ())]
    assert (1, True) == (elsewhere, "403" in refused), refused
    assert (0, True) == (again, "nothing of the agent's was found" in nothing), nothing


# Taking the agents off all Nodes, at the real API server: by the Job's own account, and as typed.
#
# The account is what the chart makes for it, with the policy that confines it. It may remove what
# agents leave on a Node, and nothing else.

OTHER_PATH = f"{NODES}/{OTHER_NODE}"
STATUS = f"{NODE_PATH}/status"
SYSTEM_PODS = "/api/v1/namespaces/kube-system/pods"
STRATEGIC = "application/strategic-merge-patch+json"
ENDS = 60.0
REPORT = (annotations.REGISTER, annotations.SCORE, annotations.HANDSHAKE)

NOTHING_WRITTEN = "who cleans up may write no annotation"
NOT_REMOVED = "who cleans up may not remove this annotation"
NOTHING_ELSE = "who cleans up may remove annotations and the condition GpuDegraded only"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def confined(binaries, tools):
    async with kept(open_confined(binaries, tools)) as made:
        yield made


@pytest.fixture
def admin(confined):
    return confined.server.admin


def conditions(*some):
    """A patch of these, each with its status."""
    return {
        "status": {
            "conditions": [
                {"type": kind, "status": status, "reason": "r", "message": "m"}
                for kind, status in some
            ]
        }
    }


def without(kind):
    return {"status": {"conditions": [{"type": kind, "$patch": "delete"}]}}


async def furnished(admin, path=NODE_PATH):
    """The Node with all that an agent leaves on it, and more."""
    await admin.have("PATCH", path, marks(**dict.fromkeys((*REPORT, "hami-agent/a", "kept"), "1")))
    known = conditions((GPU_DEGRADED, "False"), ("Ready", "True"))
    await admin.have("PATCH", f"{path}/status", known, kind=STRATEGIC)
    return await admin.have("GET", path)


FORGED = [
    (NODE_PATH, marks(**{annotations.REGISTER: "[]"}), NOTHING_WRITTEN),
    (OTHER_PATH, marks(**{"hami-agent/new": "1"}), NOTHING_WRITTEN),
    (NODE_PATH, marks(seen="1"), NOTHING_WRITTEN),
    (NODE_PATH, marks(**{annotations.MUTEX_LOCK: "mine"}), NOTHING_WRITTEN),
    (NODE_PATH, marks(kept=None), NOT_REMOVED),
    (STATUS, marks(kept=None), NOT_REMOVED),
    (NODE_PATH, {"metadata": {"labels": {"free": "1"}}}, NOTHING_ELSE),
    (NODE_PATH, {"metadata": {"finalizers": ["example.com/kept"]}}, NOTHING_ELSE),
    (NODE_PATH, {"spec": {"unschedulable": True}}, NOTHING_ELSE),
    (NODE_PATH, {"spec": {"taints": [{"key": "a", "effect": "NoExecute"}]}}, NOTHING_ELSE),
    (STATUS, conditions((GPU_DEGRADED, "True")), NOTHING_ELSE),
    (STATUS, conditions(("Ready", "False")), NOTHING_ELSE),
    (STATUS, conditions(("Mine", "True")), NOTHING_ELSE),
    (STATUS, without("Ready"), NOTHING_ELSE),
    (STATUS, {"status": {"capacity": {"nvidia.com/gpu": "9"}}}, NOTHING_ELSE),
    (STATUS, {"status": {"daemonEndpoints": {"kubeletEndpoint": {"Port": 1}}}}, NOTHING_ELSE),
]


@pytest.mark.parametrize(("path", "patch", "why"), FORGED)
async def test_a_forged_patch_is_denied_and_changes_nothing(confined, admin, path, patch, why):
    whole = path.removesuffix("/status")
    before = await furnished(admin, whole)

    code, reason, text = await confined.job.told("PATCH", path, patch, kind=STRATEGIC)

    assert (403, "Forbidden") == (code, reason)
    assert why in text
    assert before == await admin.have("GET", whole)


async def test_a_condition_of_the_agents_is_not_written_anew(confined, admin):
    await admin.ask("PATCH", STATUS, without(GPU_DEGRADED), kind=STRATEGIC)

    body = conditions((GPU_DEGRADED, "True"))
    _, _, text = await confined.job.told("PATCH", STATUS, body, kind=STRATEGIC)

    assert NOTHING_ELSE in text


@pytest.mark.parametrize("path", [NODE_PATH, OTHER_PATH])
async def test_what_agents_leave_may_be_removed(confined, admin, path):
    await furnished(admin, path)
    gone = (*REPORT, "hami-agent/a")

    await confined.job.have("PATCH", f"{path}/status", without(GPU_DEGRADED), kind=STRATEGIC)
    await confined.job.have("PATCH", path, marks(**dict.fromkeys(gone)))

    node = await admin.have("GET", path)
    assert not set(gone) & notes_of(node).keys()
    assert "1" == notes_of(node)["kept"]
    assert ["Ready"] == [one["type"] for one in node["status"]["conditions"]]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("DELETE", NODE_PATH),
        ("GET", "/api/v1/namespaces/default/pods"),
        ("GET", "/api/v1/namespaces/kube-system/secrets"),
        ("GET", "/api/v1/namespaces/kube-system/configmaps"),
        ("PATCH", "/api/v1/namespaces/default/pods/pa/status"),
    ],
)
async def test_the_account_may_nothing_else(confined, method, path):
    body = marks(seen="1") if method == "PATCH" else None

    code, _, text = await confined.job.told(method, path, body)

    assert 403 == code
    assert "is forbidden" in text


async def started(words, folder):
    """The program with its arguments, in a folder."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agent", *words),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"},
    )


async def written_by_account(admin):
    """What an agent leaves, on both Nodes."""
    for path in (NODE_PATH, OTHER_PATH):
        notes = {annotations.REGISTER: "[]", annotations.SCORE: "[]", "hami-agent/a": "1"}
        await admin.have("PATCH", path, marks(**notes))
        body = conditions((GPU_DEGRADED, "True"))
        await admin.have("PATCH", f"{path}/status", body, kind=STRATEGIC)


async def left(admin, *names):
    """What of an agent's is on these Nodes, or on any: annotations and conditions."""
    nodes = (await admin.have("GET", NODES))["items"]
    nodes = [node for node in nodes if not names or node["metadata"]["name"] in names]
    notes = [
        key
        for node in nodes
        for key in notes_of(node)
        if key in REPORT or key.startswith("hami-agent/")
    ]
    kinds = [one["type"] for node in nodes for one in node["status"].get("conditions", ())]
    return notes + [one for one in kinds if one == GPU_DEGRADED]


async def test_confined_the_verb_cleans_all_nodes(confined, admin, tmp_path):
    await written_by_account(admin)
    job = await started((*confined.arguments, f"--kubeconfig={confined.kubeconfig}"), tmp_path)

    said, _ = await job.communicate()

    assert 0 == job.returncode, said.decode()
    assert [] == await left(admin)


async def test_the_documented_command_waits_for_the_agent_of_a_node_and_cleans_all_nodes(
    confined, admin, tmp_path
):
    (line,) = [
        one
        for one in told("GUIDE.md")
        if one.startswith("hami-agent uninstall --") and "--kubeconfig" in one
    ]
    plane = confined.server.plane
    (tmp_path / "admin.kubeconfig").symlink_to(plane.kubeconfig(ADMIN))
    await written_by_account(admin)
    before = await left(admin, OTHER_NODE)
    pod = plain_pod("hami-agent-x", OTHER_NODE, namespace="kube-system")
    pod["metadata"]["labels"] = {"app.kubernetes.io/name": "hami-agent"}
    pod["spec"]["serviceAccountName"] = "hami-agent"
    await admin.have("POST", SYSTEM_PODS, pod)
    mark = plane.audit.mark()

    verb = await started(shlex.split(line)[1:], tmp_path)

    async def has_asked_twice():
        return counted(plane.audit.since(mark, ADMIN, "hami-agent-uninstall"))["list pods"] > 1

    await until_answer(has_asked_twice, ENDS, lambda: "nobody waits for the agent's pod")
    assert before == await left(admin, OTHER_NODE)
    await admin.have("DELETE", f"{SYSTEM_PODS}/hami-agent-x", {"gracePeriodSeconds": 0})
    said, _ = await verb.communicate()
    assert 0 == verb.returncode, said.decode()
    assert [] == await left(admin)


async def test_an_account_that_was_left_behind_loses_its_rights_by_one_command(
    confined, binaries, tmp_path
):
    (line,) = [
        one for one in told("GUIDE.md") if one.startswith("kubectl delete clusterrolebinding")
    ]
    await confined.job.have("GET", NODES)
    environ = {
        "PATH": f"{binaries}:{os.defpath}",
        "HOME": str(tmp_path),
        "KUBECONFIG": str(confined.server.plane.kubeconfig(ADMIN)),
    }

    typed = await asyncio.create_subprocess_exec(*shlex.split(line), env=environ)
    assert 0 == await typed.wait()

    async def is_powerless():
        asked = (("GET", NODES, None), ("PATCH", NODE_PATH, marks(**{"hami-agent/a": None})))
        answers = [await confined.job.ask(*one) for one in asked]
        return [403, 403] == [one.code for one in answers]

    await until_answer(is_powerless, ENDS, lambda: "the account has its rights")
