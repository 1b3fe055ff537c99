"""A real agent on the real pynvml, whose driver hangs or reports, and what an operator sees."""

import asyncio
import json
import statistics
from typing import Any

import pytest

from agent.sandbox.lab.cluster import SandboxCluster, open_cluster
from tests.process.agent_process import PATIENCE, comes, offers, options, run, started
from tests.process.driver_node import GPUS, LIMIT, SLICES, a_node

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(120)]


# A whole agent on the real pynvml and a library of ours that hangs: the agent never does.

PROBE = 1.0
"""Seconds: a page that waits for a call to the driver takes the two of its deadline."""


async def test_a_library_that_hangs_holds_up_no_page_and_refuses_with_the_reason(library):
    async with a_node(library) as node:
        assert "" == await node.allocate(SLICES[0])
        assert await comes(lambda: node.stub.inside == 0)
        threads, loop = node.threads, asyncio.get_running_loop()
        refusals, pages = list[str](), list[float]()
        node.stub.hang()
        begun = loop.time()
        while len(refusals) < 3:
            asked = loop.time()
            live, words = await node.page("/livez")
            assert 200 == live, words
            await node.page("/readyz")
            pages.append(loop.time() - asked)
            said = await node.allocate(SLICES[len(pages)])
            assert said or (not refusals and loop.time() - begun < PATIENCE)
            refusals += [said] * bool(said)
            assert node.threads <= threads + GPUS + 2  # the driver's own, and a slow one's
            await asyncio.sleep(0.3)

        assert LIMIT <= loop.time() - begun
        # In the middle: a single page may be late on a busy machine, with any driver.
        assert statistics.median(pages) < 2 * PROBE, pages
        for words in ("the driver has not answered for its GPU", "HA-4005"):
            assert words in refusals[0]
        assert 0 == node.cluster.allocatable()

        node.stub.hang(hung=False)
        assert await offers(node.cluster, 10 * GPUS), node.cluster.log.last(20)
        assert "" == await node.allocate(SLICES[-1])
        assert await comes(lambda: node.stub.inside == 0)
        assert await comes(lambda: node.threads <= threads), (threads, node.threads)
        assert 0 == await node.cluster.stop_agent()
    assert (0, 0, 0) == (node.stub.sessions, node.stub.sets, node.stub.undefined)


async def test_an_xid_of_the_library_takes_the_slices_of_its_gpu_away(library):
    async with a_node(library) as node:
        node.stub.xid(2, 48)

        assert await offers(node.cluster, 10 * (GPUS - 1)), node.cluster.log.last(20)
        assert "XID 48" in await node.allocate("GPU-5708-2-0")
        assert "" == await node.allocate("GPU-5708-0-0")


# Health as an operator meets it, with a real agent: recheck, Events, the Node's condition.


async def verb(cluster: SandboxCluster, *words: str) -> tuple[int, str, str]:
    """A verb in a process of its own, with this cluster's sockets."""
    sockets = dict.fromkeys(("recheck", "release"), cluster.places.run / "api.sock")
    socket = sockets.get(words[0], cluster.places.hardware_socket)
    done = await asyncio.to_thread(run, *words, "--socket", str(socket))
    return done.returncode, done.stdout, done.stderr


async def answering(cluster: SandboxCluster, slices: int = 20) -> None:
    """The agent offers its slices and can be asked."""
    await started(cluster, slices=slices)
    assert await cluster.until((cluster.places.run / "api.sock").exists, PATIENCE)


def condition(cluster: SandboxCluster) -> dict[str, Any]:
    conditions = (cluster.node().get("status") or {}).get("conditions") or []
    return next((one for one in conditions if one["type"] == "GpuDegraded"), {})


def reasons(cluster: SandboxCluster) -> list[str]:
    return [one["reason"] for one in cluster.store.select("events")]


async def test_a_gpu_that_falls_ill_is_told_everywhere_and_can_be_asked():
    async with open_cluster(options(gpus=2)) as cluster:
        cluster.places.config.write_text("report: {nodeCondition: true}\n")
        await answering(cluster)
        assert await cluster.until(lambda: condition(cluster).get("status") == "False", PATIENCE)

        code, text, _ = await verb(cluster, "recheck", "1")
        assert (0, True) == (code, "ok since" in text)
        assert 0 == (await verb(cluster, "simulate", "xid", "48", "--gpu", "1"))[0]
        assert await cluster.until(lambda: cluster.allocatable() == 10, PATIENCE)

        code, text, _ = await verb(cluster, "recheck", "1")
        assert 1 == code
        for words in ("not served", "reset it or reboot the node [H-048]"):
            assert words in text
        code, text, _ = await verb(cluster, "recheck", "1", "-o", "json")
        assert ("bad", "reset") == (
            json.loads(text)["data"]["condition"],
            json.loads(text)["data"]["action"],
        )
        assert 4 == (await verb(cluster, "recheck", "7"))[0]
        assert await cluster.until(lambda: condition(cluster).get("status") == "True", PATIENCE)
        assert "XID 48" in condition(cluster)["message"]
        assert await cluster.until(lambda: "GpuUnhealthy" in reasons(cluster), PATIENCE)
