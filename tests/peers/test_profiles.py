"""Profiles of the agent's own file: the labels of the Node choose, also while the agent runs."""

import asyncio

import pytest_asyncio

from tests.peers.lab.clockwork import REGISTERED, kubelet_said, wall
from tests.peers.lab.config_files import open_files
from tests.peers.lab.report import Told, node_writes, until_node_writes, until_told
from tests.peers.lab.settings import ALL, QUIET, until_everywhere
from tests.peers.lab.tidy import NODE_PATH

OWN_FILE = """
sharing:
  splitCount: 10
profiles:
  - name: narrow
    match: {labels: "pool in (small, tiny)"}
    sharing: {splitCount: 3}
  - name: heavy
    match: {labels: "pool=tiny,!big"}
    sharing: {memoryScaling: 2}
"""


async def label(cluster, **labels):
    """Set labels of the Node, or remove those that are None."""
    await cluster.api.patch(NODE_PATH, {"metadata": {"labels": labels}})


@pytest_asyncio.fixture(loop_scope="session")
async def own_file(cluster):
    """The agent's own file with profiles; the Node has no label of theirs, neither afterwards."""
    yield open_files(cluster).write("config.yaml", OWN_FILE)
    await label(cluster, pool=None, big=None, unrelated=None)


async def test_labels_of_the_node_choose_profiles_from_the_first_report_on(
    cluster, table, own_file
):
    await label(cluster, pool="small")
    mark = cluster.plane.audit.mark()
    await cluster.start_registered_agent("--config", str(own_file), slices=24)
    await until_told(cluster, Told(8, 3), 0.0, 10.0)
    await until_node_writes(cluster, mark, 1)
    loop, since = asyncio.get_running_loop(), wall()
    steps: list[tuple[Told, dict[str, str | None]]] = [
        (Told(8, 3, 163118), {"pool": "tiny"}),
        (Told(8, 3), {"big": ""}),
        (ALL, {"pool": None, "big": None}),
    ]

    for count, (wanted, labels) in enumerate(steps, start=2):
        began = loop.time()
        await label(cluster, **labels)
        await until_everywhere(cluster, table, wanted, began, "Node labelled")
        await until_node_writes(cluster, mark, count)
    await label(cluster, unrelated="x")
    await asyncio.sleep(QUIET)  # what is claimed is about this time

    assert 1 + len(steps) == node_writes(cluster, mark)
    assert [] == kubelet_said(cluster, REGISTERED, since=since)
