"""What is left on the Node after the chart's uninstallation: what the agent wrote goes, by what the
API server keeps of who wrote what.
"""

import asyncio
import functools
import ssl

import pytest
import pytest_asyncio

from agent.core import annotations
from tests.deploy.carried import uninstall
from tests.peers.lab.identities import ADMIN, NODE
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


@pytest.fixture
def cleaning(cluster):
    """The chart's program for afterwards, as the admin; there are no pods to wait for."""
    context = ssl.create_default_context(cafile=cluster.plane.certificates.ca)
    script = uninstall()
    api = script.Api(cluster.plane.server, cluster.plane.identities.tokens[ADMIN], context)
    return functools.partial(asyncio.to_thread, script.main, "kube-system", "app=none", api)


async def test_what_the_agent_wrote_goes_after_it_and_nothing_else(cluster, cleaning):
    await cluster.start_registered_agent()
    await cluster.api.patch(NODE_PATH, marks(seen="1", **{annotations.CORDON: ""}))
    await cluster.end_agents()

    assert 0 == await cleaning()

    left = notes_of(await cluster.api.get(NODE_PATH))
    assert annotations.REGISTER not in left
    # The scheduler may have answered the report just then.
    assert not left.get(annotations.HANDSHAKE, "").startswith("Reported")
    assert {"seen", annotations.CORDON} <= set(left)


async def test_what_another_plugin_wrote_since_stays(cluster, cleaning):
    await cluster.start_registered_agent()
    await cluster.end_agents()
    theirs = {annotations.REGISTER: "[]", annotations.HANDSHAKE: "Reported"}
    writer = f"{NODE_PATH}?fieldManager=nvidia-device-plugin"
    await cluster.api.patch(writer, marks(**theirs))

    assert 0 == await cleaning()

    left = notes_of(await cluster.api.get(NODE_PATH))
    assert theirs[annotations.REGISTER] == left[annotations.REGISTER]
    assert annotations.HANDSHAKE in left  # the scheduler may have answered it meanwhile


async def test_a_plugin_that_follows_with_the_same_report_keeps_it(cluster, cleaning):
    await cluster.start_registered_agent()
    await cluster.end_agents()
    # A scheduler that answers takes away who reported last.
    cluster.parts["extender"].freeze()
    report = notes_of(await cluster.api.get(NODE_PATH))[annotations.REGISTER]
    theirs = {annotations.REGISTER: report, annotations.HANDSHAKE: "Reported"}
    writer = f"{NODE_PATH}?fieldManager=nvidia-device-plugin"
    await cluster.api.patch(writer, marks(**theirs))

    assert 0 == await cleaning()

    assert theirs.items() <= notes_of(await cluster.api.get(NODE_PATH)).items()


@pytest_asyncio.fixture(loop_scope="session")
async def server(binaries):
    async with real_server(binaries) as made:
        yield made


async def test_a_pod_that_does_not_end_keeps_its_node_only_where_a_kubelet_is(server):
    """Without controllers and kubelets nobody ends these pods, nor says what the Nodes are."""
    script = uninstall()
    context = ssl.create_default_context(cafile=server.plane.certificates.ca)
    api = script.Api(server.plane.server, server.plane.identities.tokens[ADMIN], context)
    for name, ready in ((NODE, "Unknown"), (OTHER_NODE, "True")):
        condition = {"type": "Ready", "status": ready, "reason": "r", "message": "m"}
        body = {"status": {"conditions": [condition]}}
        kind = "application/strategic-merge-patch+json"
        await server.admin.have("PATCH", f"{NODES}/{name}/status", body, kind=kind)
        await server.admin.have("PATCH", f"{NODES}/{name}", marks(**{"hami-agent/a": "1"}))
        pod = plain_pod(f"agent-of-{name}", name)
        pod["metadata"]["labels"] = {"app": "agent"}
        await server.admin.have("POST", PODS, pod)

    code = await asyncio.to_thread(script.main, "default", "app=agent", api, 0.0, 0.1)

    assert 1 == code
    assert "hami-agent/a" not in notes_of(await server.admin.have("GET", NODE_PATH))
    assert "hami-agent/a" in notes_of(await server.admin.have("GET", f"{NODES}/{OTHER_NODE}"))
