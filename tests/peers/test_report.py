"""The register annotation beside a real API server: whatever becomes of it, one write mends it."""

import asyncio
import contextlib

import pytest
import pytest_asyncio

from agent import cluster as annotations
from agent.sandbox.hardware_talk import XidRequest
from tests.peers.lab.agents import RESOURCE
from tests.peers.lab.cluster import is_ready
from tests.peers.lab.identities import NODE
from tests.peers.lab.node_state import (
    NODE_PATH,
    Told,
    gpu_uuids,
    gpus_of,
    node_of,
    node_writes,
    notes_of,
    register_text,
    registered_health,
    text_of,
    until_allocatable,
    until_node_writes,
    until_told,
    write_register,
)
from tests.peers.lab.placement import agent_said, wall
from tests.peers.lab.pods import a_pod, run
from tests.peers.lab.requests import mark_of_rest
from tests.peers.lab.settings import (
    ALL,
    NODE_CONFIG,
    QUIET,
    ask_to_reload,
    node_config,
    with_node_config,
)
from tests.peers.lab.space import until

BOUND = 2.0
"""Seconds until the annotation is back; the agent spreads the writes of many nodes over one."""

BACK_WITHIN = 90.0
"""Seconds until an agent has tried again after tries in vain, each of them later."""


def hand_made(text):
    """The same GPUs as another plugin with other settings writes them."""
    gpus = [one | {"count": 2, "devmem": 1000} for one in gpus_of(text)]
    return text_of(gpus, colon=not text.startswith("["))


EDITS = {
    "edited": hand_made,
    "removed": lambda text: None,
    "shortened": lambda text: text_of(gpus_of(text)[:1], colon=not text.startswith("[")),
    "spoilt": lambda text: text[:-20],
}


async def held_text(cluster):
    """The annotation as the API server has it: a watch lags behind."""
    return notes_of(await cluster.api.get(NODE_PATH)).get(annotations.REGISTER)


async def test_what_somebody_does_to_the_annotation_is_undone_by_one_write(cluster, agent, table):
    text = await held_text(cluster)
    mark = await mark_of_rest(cluster)

    for count, (how, edit) in enumerate(EDITS.items(), start=1):
        began = wall()
        await write_register(cluster, edit(text))
        await until_node_writes(cluster, mark, count)
        took = await written_at(agent, began) - began
        table.hold(f"register annotation {how} → it is back", took, BOUND)
        assert text == await held_text(cluster)
    await asyncio.sleep(QUIET)  # what is claimed is about this time

    assert len(EDITS) == node_writes(cluster, mark)
    assert ["foreign"] * len(EDITS) == reasons(agent)[1:]
    assert text == await held_text(cluster)


async def written_at(agent, since):
    """When the agent wrote first after a moment, in Unix seconds; it logs that after the answer.

    Raises TimeoutError: it did not.
    """
    await until(
        lambda: bool(agent_said(agent, "report.written", since)), BACK_WITHIN, agent.part.tail
    )
    return agent_said(agent, "report.written", since)[0]


def reasons(agent):
    """Why the agent wrote, write by write."""
    return [line["reason"] for line in agent.events("report.written")]


@contextlib.asynccontextmanager
async def present_again(cluster):
    """Whatever happens in the block, afterwards there is a Node that takes pods."""
    try:
        yield
    finally:
        if NODE not in cluster.nodes.objects:
            await cluster.kubelet.restart()
        await cluster.nodes.until(lambda: is_ready(cluster.nodes), 60.0, "the Node is not ready")


async def test_a_node_that_was_deleted_and_made_anew_is_told_by_one_write(cluster, agent, table):
    uid, text = node_of(cluster)["metadata"]["uid"], register_text(cluster)
    mark = await mark_of_rest(cluster)

    async with present_again(cluster):
        await cluster.api.delete(NODE_PATH)
        await until(lambda: bool(agent.events("node.deleted")), 20.0, agent.part.tail)
        await asyncio.sleep(QUIET)  # what is claimed is about this time
        assert 0 == node_writes(cluster, mark), "there is no Node to write to"
        began = asyncio.get_running_loop().time()
        await cluster.kubelet.restart()  # it makes its Node when it starts, and only then
        at = await until_told(cluster, ALL, began, 60.0)
        made = cluster.nodes.when(NODE, lambda node: uid != node["metadata"]["uid"], since=began)
        table.hold("Node made anew → register annotation", at - made, BOUND)
    await until_allocatable(cluster)
    await until_node_writes(cluster, mark, 1)
    await asyncio.sleep(QUIET)  # what is claimed is about this time

    assert uid != node_of(cluster)["metadata"]["uid"]
    assert text == await held_text(cluster)
    assert 1 == node_writes(cluster, mark)
    assert ["inventory", "inventory"] == reasons(agent)


@pytest_asyncio.fixture(loop_scope="session")
async def fresh_kubelet(cluster):
    """Afterwards a kubelet that sees the Node as it is.

    The watch of one that was without its server comes back up to a minute later, and until then it
    does not write what it takes for written.
    """
    yield
    await cluster.revive()
    await cluster.kubelet.restart()


async def end(server, manner):
    """The API server is gone, or stands still."""
    if manner == "frozen":
        server.freeze()
    else:
        await server.kill()


async def begin_again(server, manner):
    """It comes back."""
    if manner == "frozen":
        server.thaw()
    else:
        await server.start()


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("fresh_kubelet")
@pytest.mark.parametrize(
    ("manner", "seconds"),
    [
        ("killed", 5),
        pytest.param("killed", 30, marks=pytest.mark.long),
        pytest.param("frozen", 30, marks=pytest.mark.long),
    ],
)
async def test_what_changed_while_the_api_server_was_away_is_one_write_after_it(
    cluster, table, manner, seconds
):
    agent, files = await with_node_config(cluster, 10)
    ill, *others = gpu_uuids(cluster)

    mark = await mark_of_rest(cluster)
    gone = wall()
    server = cluster.plane.apiserver
    await end(server, manner)
    await agent.simulate(XidRequest(gpu="0", xid=79))
    await until_allocatable(cluster, 7 * 10)
    for count in (7, 5):
        files.write(NODE_CONFIG, node_config(devicesplitcount=count))
        ask_to_reload(agent)
        await until_allocatable(cluster, 7 * count)
    assert not agent_said(agent, "report.written", gone)
    await asyncio.sleep(gone + seconds - wall())
    back = wall()
    await begin_again(server, manner)

    await until_told(cluster, Told(8, 5), 0.0, BACK_WITHIN)
    wrote = await written_at(agent, gone)
    table.add(f"API server comes back ({manner}, {seconds} s) → register annotation", wrote - back)
    await until_node_writes(cluster, mark, 1)
    await asyncio.sleep(QUIET)  # what is claimed is about this time

    # One that stood still finds a try whose client has left long ago, and lets it be.
    assert 1 == node_writes(cluster, mark, done=True)
    assert {ill: False} | dict.fromkeys(others, True) == registered_health(node_of(cluster))
    assert 7 * 5 == len(await cluster.kubelet.allocatable(RESOURCE))
    # The cluster's next test finds the scheduler back: its watches wait up to 30 s for a retry.
    await run(cluster, a_pod("after"), within=90.0)
