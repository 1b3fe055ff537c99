"""What an uninstallation leaves on the Node: where no plugin serves, nothing of the agent's."""

import asyncio
import functools
import sys

import pytest
import pytest_asyncio

from agent import cluster as annotations
from agent.cli.uninstall import Cleaned, uninstall_everywhere
from agent.health.news import GPU_DEGRADED
from agent.kube.client import Connection
from agent.kube.objects import entries
from tests.peers.lab.agents import RESOURCE, SOURCE
from tests.peers.lab.identities import ADMIN, NODE, NODE_USER
from tests.peers.lab.keeper import kept
from tests.peers.lab.node_state import notes_of
from tests.peers.lab.servers import (
    NODE_PATH,
    NODES,
    OTHER_NODE,
    PODS,
    marks,
    plain_pod,
    real_server,
)
from tests.peers.lab.switch import MANAGER, hand_over, until_serving


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


def writers(node, key):
    """Who wrote an annotation, as the API server keeps it."""
    return [one.writer for one in entries(node["metadata"]) if key in one.annotations]


async def test_what_the_agent_took_over_from_hamis_plugin_goes_after_it(cluster, theirs, cleaning):
    agent, _ = await hand_over(cluster, theirs)
    held = await cluster.api.get(NODE_PATH)
    await agent.part.stop()

    code, said = await cleaning()

    left = notes_of(await cluster.api.get(NODE_PATH))
    assert [MANAGER] == writers(held, annotations.REGISTER)
    assert (0, True) == (code, annotations.REGISTER in said), said
    assert annotations.REGISTER not in left


async def test_one_node_that_was_hamis_plugins_is_cleaned_after_the_agent(
    cluster, theirs, tmp_path
):
    agent, _ = await hand_over(cluster, theirs)
    await agent.part.stop()

    kubeconfig = cluster.plane.kubeconfig(NODE_USER)
    code, said = await uninstalled(kubeconfig, "--run-dir", str(tmp_path), "--node-name", NODE)

    assert (0, True) == (code, annotations.REGISTER in said), said
    assert annotations.REGISTER not in notes_of(await cluster.api.get(NODE_PATH))


async def test_hamis_plugin_that_follows_keeps_its_node(cluster, theirs, cleaning):
    agent, _ = await hand_over(cluster, theirs)
    await agent.part.stop()
    await theirs.start()
    await until_serving(cluster, theirs)

    code, said = await cleaning()

    left = notes_of(await cluster.api.get(NODE_PATH))
    assert (0, True) == (code, f"{NODE}: skipped: a device plugin serves" in said), said
    assert left[annotations.REGISTER]


@pytest.mark.timeout(240)
async def test_a_living_agent_that_no_selector_names_is_left_alone(cluster, cleaning, tmp_path):
    agent = await cluster.start_registered_agent()
    before = await cluster.api.get(NODE_PATH)

    code, said = await cleaning()
    here = ("--run-dir", str(tmp_path / "none"), "--node-name", NODE)
    refused, why = await uninstalled(cluster.plane.kubeconfig(NODE_USER), *here)

    after = await cluster.api.get(NODE_PATH)
    assert agent.part.is_alive
    assert (0, True) == (code, f"skipped: a device plugin serves {RESOURCE}" in said), said
    assert (1, True) == (refused, f"a device plugin serves {RESOURCE}" in why), why
    assert "waiting" in said
    report, kept = (notes_of(one)[annotations.REGISTER] for one in (before, after))
    assert report == kept


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


async def test_pods_with_gpus_hold_it_up_until_it_is_forced(server, tmp_path):
    notes = await written(server)
    pod = plain_pod("with-a-gpu", NODE)
    pod["spec"]["containers"][0]["resources"] = {"limits": {RESOURCE: "1"}}
    await server.admin.have("POST", PODS, pod)
    here = ("--run-dir", str(tmp_path), "--node-name", NODE)
    kubeconfig = server.plane.kubeconfig(NODE_USER)

    code, said = await uninstalled(kubeconfig, *here)
    held = notes_of(await server.admin.have("GET", NODE_PATH))
    forced, _ = await uninstalled(kubeconfig, *here, "--force")

    assert (1, True) == (code, "default/with-a-gpu" in said), said
    assert notes.items() <= held.items()
    assert 0 == forced
    assert not notes.keys() & notes_of(await server.admin.have("GET", NODE_PATH)).keys()
    await server.admin.have("DELETE", f"{PODS}/with-a-gpu", {"gracePeriodSeconds": 0})


async def test_a_pod_that_does_not_end_keeps_its_node_only_where_a_kubelet_is(server, monkeypatch):
    """Without controllers and kubelets nobody ends these pods, nor says what the Nodes are."""
    for name, ready in ((NODE, "Unknown"), (OTHER_NODE, "True")):
        condition = {"type": "Ready", "status": ready, "reason": "r", "message": "m"}
        body = {"status": {"conditions": [condition]}}
        kind = "application/strategic-merge-patch+json"
        await server.admin.have("PATCH", f"{NODES}/{name}/status", body, kind=kind)
        await server.admin.have("PATCH", f"{NODES}/{name}", marks(**{"hami-agent/a": "1"}))
        pod = plain_pod(f"agent-of-{name}", name)
        pod["metadata"]["labels"] = {"app": "agent"}
        await server.admin.have("POST", PODS, pod)
    monkeypatch.setattr("agent.cli.uninstall.WAIT", 0.0)
    told, said = list[Cleaned](), list[str]()
    connection = Connection(server.plane.kubeconfig(ADMIN))

    await uninstall_everywhere(
        connection, RESOURCE, "default", "app=agent,other!=one", told.append, said.append
    )

    failures = {one.node: one.failure for one in told if one.failure}
    assert [OTHER_NODE] == list(failures)
    assert f"(pod agent-of-{OTHER_NODE})" in failures[OTHER_NODE]
    assert "hami-agent/a" not in notes_of(await server.admin.have("GET", NODE_PATH))
    assert "hami-agent/a" in notes_of(await server.admin.have("GET", f"{NODES}/{OTHER_NODE}"))
