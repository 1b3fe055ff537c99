"""A whole agent on the real pynvml and a library of ours that hangs: the agent never does."""

import asyncio
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.fakes.nvml_stub import NvmlStub
from tests.process.agent_process import comes, offers, run
from tests.process.driver_node import GPUS, LIMIT, SLICES, DriverNode, a_cluster, a_node, start

pytestmark = [pytest.mark.process, pytest.mark.looptime(False), pytest.mark.timeout(120)]

HANG = 20.0
SLOW = 5.0
"""Longer than anything waits for a driver that is there."""
PROBE = 1.0
"""Seconds: a page that waits for a call to the driver takes the two of its deadline."""


@dataclass
class WatchedAgent:
    """What was seen of an agent whose driver hung. `refused_at`: seconds after it began to.

    `early`, `later`: the seconds of each page before a slice was refused, and after.
    """

    answered: int = 0
    refused_at: float | None = None
    refusal: str = ""
    most_threads: int = 0
    ready: set[int] = field(default_factory=set)
    early: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)


async def watch(node: DriverNode, seconds: float) -> WatchedAgent:
    """Ask the agent everything again and again: pages, and slices until one is refused."""
    seen, loop = WatchedAgent(), asyncio.get_running_loop()
    begun = loop.time()
    while loop.time() - begun < seconds:
        asked = loop.time()
        live, words = await node.page("/livez")
        lives = loop.time()
        assert 200 == live, words
        seen.ready.add((await node.page("/readyz"))[0])
        pages = seen.early if seen.refused_at is None else seen.later
        pages += [lives - asked, loop.time() - lives]
        if seen.refused_at is None:
            seen.refusal = await node.allocate(SLICES[1 + seen.answered])
            seen.answered += not seen.refusal
            seen.refused_at = loop.time() - begun if seen.refusal else None
        seen.most_threads = max(seen.most_threads, node.threads)
        await asyncio.sleep(0.3)
    return seen


@pytest.mark.slow
async def test_a_library_that_hangs_for_20_s_holds_up_no_page_and_refuses_with_the_reason(library):
    async with a_node(library) as node:
        assert "" == await node.allocate(SLICES[0])
        assert await comes(lambda: node.stub.inside == 0)
        threads = node.threads
        node.stub.hang()
        seen = await watch(node, HANG)

        assert seen.answered >= 1
        assert seen.refused_at is not None
        assert LIMIT <= seen.refused_at
        # In the middle: a single page may be late on a busy machine, with any driver.
        assert statistics.median(seen.early) < PROBE, seen.early
        assert statistics.median(seen.later) < PROBE, seen.later
        assert "The driver has not answered for GPU" in seen.refusal
        assert "HA-4005" in seen.refusal
        assert 0 == node.cluster.allocatable()
        assert seen.most_threads <= threads + GPUS + 2  # the driver's own, and a slow one's

        node.stub.hang(hung=False)
        assert await offers(node.cluster, 10 * GPUS), node.cluster.log.last(20)
        assert "" == await node.allocate(SLICES[-1])
        assert await comes(lambda: node.stub.inside == 0)
        assert await comes(lambda: node.threads <= threads), (threads, node.threads)
        assert 0 == await node.cluster.stop_agent()
    assert (0, 0, 0) == (node.stub.sessions, node.stub.sets, node.stub.undefined)


@pytest.mark.slow
async def test_a_library_that_takes_5_s_to_begin_is_served(library):
    stub = NvmlStub(library)
    stub.set(2, memory=16 << 30)
    stub.hang("nvmlInitWithFlags")
    async with a_cluster() as cluster:
        await start(cluster, library)
        assert await comes(lambda: stub.inside == 1)
        await asyncio.sleep(SLOW)
        assert (1, 0) == (stub.calls("nvmlInitWithFlags"), cluster.allocatable())
        stub.hang("nvmlInitWithFlags", hung=False)

        assert await offers(cluster, 10 * GPUS), cluster.log.last(20)
        assert 1 == stub.calls("nvmlInitWithFlags")
        assert 0 == await cluster.stop_agent()
    assert (0, 0, 0) == (stub.sessions, stub.sets, stub.undefined)


async def test_one_gpu_of_eight_that_hangs_leaves_the_others_served(library):
    async with a_node(library, gpus=8) as node:
        threads = node.threads
        node.stub.hang(slot=3)

        assert await offers(node.cluster, 70), node.cluster.log.last(20)
        for gpu in range(8):
            assert ("HA-4005" if gpu == 3 else "") in await node.allocate(f"GPU-5708-{gpu}-0")
        assert node.threads <= threads + 2

        node.stub.hang(slot=3, hung=False)
        assert await offers(node.cluster, 80), node.cluster.log.last(20)
        assert "" == await node.allocate("GPU-5708-3-0")


async def test_an_xid_of_the_library_takes_the_slices_of_its_gpu_away(library):
    async with a_node(library) as node:
        node.stub.xid(2, 48)

        assert await offers(node.cluster, 10 * (GPUS - 1)), node.cluster.log.last(20)
        assert "XID 48" in await node.allocate("GPU-5708-2-0")
        assert "" == await node.allocate("GPU-5708-0-0")


async def test_release_all_lets_go_of_a_gpu_that_is_not_shared_too(library):
    stub = NvmlStub(library)
    stub.set(1, mig=1)
    stub.set(2, memory=16 << 30)
    async with a_cluster() as cluster:
        await start(cluster, library)
        assert await offers(cluster, 20), cluster.log.last(20)
        socket = str(cluster.places.run / "api.sock")
        assert await comes(lambda: Path(socket).exists())
        one = await asyncio.to_thread(run, "release", "1", "--socket", socket)
        every = await asyncio.to_thread(run, "release", "all", "--socket", socket)

        assert 1 == one.returncode
        assert "GPU 1 is not shared: it is in MIG mode" in one.stderr
        assert "`hami-agent release all` releases it too" in one.stderr
        assert 0 == every.returncode, every.stderr
        assert ([False] * 3, 0) == ([stub.attached(slot) for slot in range(3)], stub.sessions)
        stub.set(1, mig=0)
        await asyncio.to_thread(run, "recheck", "all", "--socket", socket)
        assert await offers(cluster, 30), cluster.log.last(20)
